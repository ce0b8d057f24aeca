// Moves, categories and code of a plan's page, and the start of everything.

function fillMoves() {
  byId("moves-section").hidden = !data.moves.length;
  const table = byId("moves");
  heads(table, [["move"], ["results"], ["saves", true], ["costs", true]]);
  const body = node("tbody", { parent: table });
  for (const [title, keeps, saves, savesOrigin, costs, costsOrigin, caveat] of data.moves) {
    const tone = { "same results": "good", "changes training": "bad" }[keeps] || "";
    const cells = addRow(body, [title, [keeps, `keeps ${tone}`], [saves, "number"], [costs, "number"]]);
    if (caveat) node("span", { text: caveat, className: "caveat", parent: cells[0] });
    if (savesOrigin) node("span", { text: savesOrigin, className: "origin", parent: cells[2] });
    if (costsOrigin) node("span", { text: costsOrigin, className: "origin", parent: cells[3] });
  }
}

function fillCategories() {
  const table = byId("categories");
  heads(table, [["category"], ["before", true], ["after", true], [""]]);
  const body = node("tbody", { parent: table });
  const most = Math.max(1, ...data.peaks);
  for (const [name, before, after] of [...data.byCategory, ["total", ...data.peaks]]) {
    const cells = addRow(body, ["", [formatSize(before), "number"], [formatSize(after), "number"], ""]);
    const isCategory = name !== "total" && !data.overheads.includes(name);
    nameCategory(cells[0], name, isCategory);
    const pair = node("span", { className: "pair", parent: cells[3] });
    for (const size of [before, after]) {
      const bar = node("span", { parent: pair });
      bar.style.width = `${(100 * size) / most}%`;
      if (isCategory) bar.style.background = colour(name);
    }
  }
}

function fillCode() {
  byId("code").textContent = data.code;
  const button = byId("copy");
  button.addEventListener("click", async () => {
    const done = await copyText(byId("code"));
    button.textContent = done ? "Copied" : "Select and copy by hand";
    setTimeout(() => (button.textContent = "Copy"), 2000);
  });
}

/** Pages opened from a disk may have no clipboard; selecting works everywhere. */
async function copyText(element) {
  try {
    await navigator.clipboard.writeText(element.textContent);
    return true;
  } catch {
    getSelection().selectAllChildren(element);
    return document.execCommand("copy");
  }
}

function fillRefused() {
  const refused = byId("refused");
  for (const [name, reason] of data.refused) {
    const item = node("li", { parent: refused });
    node("code", { text: name, parent: item });
    node("span", { text: ` ${reason}`, parent: item });
  }
  if (!data.refused.length) node("li", { text: "None.", parent: refused });
}

fillHead();
fillMoves();
fillPoints();
drawFront();
fillTimelines();
drawTimelines();
fillCategories();
fillCode();
fillRefused();
fillFoot([`Planned in ${data.seconds} s by memfit, version ${data.memfit}.`, ORIGINS]);
front.addEventListener("pointermove", (event) => {
  const index = pointUnder(event);
  if (index === null) hidePoint();
  else showPoint(index);
});
front.addEventListener("pointerleave", hidePoint);
front.addEventListener("blur", hidePoint);
front.addEventListener("keydown", onFrontKey);
redrawOnResize(() => {
  hidePoint();
  drawFront();
  drawTimelines();
});
