// The tables: blocks of the pinned moment, and the peak by module, operator, source line or category.

const NUM_LISTED = 10;
const MAX_ROWS = 500;
let shownView = "module";
const order = { column: 1, descending: true };

function drawViews() {
  const group = byId("views");
  clear(group);
  for (const name of Object.keys(data.breakdown)) {
    const button = node("button", { text: `by ${name}`, parent: group });
    button.type = "button";
    button.setAttribute("aria-pressed", String(name === shownView));
    button.addEventListener("click", () => {
      shownView = name;
      for (const other of group.children) other.setAttribute("aria-pressed", String(other === button));
      drawBreakdown();
    });
  }
}

function drawBreakdown() {
  const table = byId("breakdown");
  clear(table);
  const columns = [[shownView], ["bytes", true], ["share", true]];
  heads(table, columns.map(([, number]) => ["", number])).forEach((head, index) => {
    const column = Math.min(index, 1);
    const active = column === order.column && index < 2;
    const arrow = active ? (order.descending ? " \u25be" : " \u25b4") : "";
    const button = node("button", { text: columns[index][0] + arrow, parent: head });
    button.type = "button";
    if (active) head.setAttribute("aria-sort", order.descending ? "descending" : "ascending");
    button.addEventListener("click", () => {
      order.descending = column === order.column ? !order.descending : column === 1;
      order.column = column;
      drawBreakdown();
      table.querySelectorAll("th button")[index].focus();
    });
  });
  const rows = [...data.breakdown[shownView]];
  const sign = order.descending ? -1 : 1;
  rows.sort((a, b) => sign * (order.column ? a[1] - b[1] : byName(a[0], b[0])) || byName(a[0], b[0]));
  const body = node("tbody", { parent: table });
  for (const [name, size] of rows.slice(0, MAX_ROWS)) {
    const isOverhead = data.overheads.includes(name);
    const style = isOverhead || shownView === "category" ? "" : "mono";
    const share = formatShare(size / (data.peakBytes || 1));
    const [cell] = addRow(body, [["", style], [formatSize(size), "number"], [share, "number"]]);
    nameCategory(cell, name || "\u2013", shownView === "category" && !isOverhead);
  }
  if (rows.length > MAX_ROWS) {
    addRow(body, [`and ${rows.length - MAX_ROWS} more`])[0].colSpan = 3;
  }
}

function pin(tick, remember = true) {
  pinnedTick = valid(tick);
  movePin();
  const number = pinnedTick.toLocaleString("en");
  byId("pinned-title").textContent = `Largest live blocks at tick ${number}${pinnedTick === data.peakTick ? ", the peak" : ""}`;
  byId("pinned-event").textContent = `${phaseAt(pinnedTick)} \u00b7 ${describe(pinnedTick)}`;
  const blocks = liveBlocks(pinnedTick);
  const listed = blocks.slice(0, NUM_LISTED);
  const table = byId("pinned");
  clear(table);
  heads(table, [["size", true], ["category"], ["operator"], ["module"], ["source line"], ["since tick", true]]);
  const body = node("tbody", { parent: table });
  for (const [size, start, , category, module, op, source] of listed) {
    const origins = [op, module, source].map((code) => [data.strings[code] || "\u2013", "mono"]);
    const cells = addRow(body, [[formatSize(size), "number"], "", ...origins, [start.toLocaleString("en"), "number"]]);
    nameCategory(cells[1], data.categories[category], true);
  }
  const total = totalsAt(pinnedTick).reduce((sum, value) => sum + value, 0);
  const shown = listed.reduce((sum, block) => sum + block[0], 0);
  const rest = blocks.length - listed.length;
  byId("pinned-rest").textContent = total > shown
    ? `${rest ? rest.toLocaleString("en") : "Some"} smaller ${rest === 1 ? "block holds" : "blocks hold"} the other ${formatSize(total - shown)} of ${formatSize(total)}.`
    : `${formatSize(total)} in total.`;
  if (remember) history.replaceState(null, "", `#tick=${pinnedTick}`);
}
