// Head, moves, categories, code and foot of a plan's page, and the start of everything.

function fillPlanHead() {
  fillVerdict();
  for (const text of data.details) node("li", { text, parent: byId("details") });
}

function fillMoves() {
  byId("moves-section").hidden = !data.moves.length;
  const table = byId("moves");
  heads(table, [["move"], ["results"], ["saves", true], ["costs", true]]);
  const body = node("tbody", { parent: table });
  for (const [title, keeps, saves, savesOrigin, costs, costsOrigin, caveat] of data.moves) {
    const row = node("tr", { parent: body });
    const cell = node("td", { text: title, parent: row });
    if (caveat) node("span", { text: caveat, className: "caveat", parent: cell });
    const tone = { "same results": "good", "changes training": "bad" }[keeps] || "";
    node("td", { text: keeps, className: `keeps ${tone}`, parent: row });
    for (const [text, origin] of [[saves, savesOrigin], [costs, costsOrigin]]) {
      const number = node("td", { text, className: "number", parent: row });
      if (origin) node("span", { text: origin, className: "origin", parent: number });
    }
  }
}

function fillCategories() {
  const table = byId("categories");
  heads(table, [["category"], ["before", true], ["after", true], [""]]);
  const body = node("tbody", { parent: table });
  const most = Math.max(1, ...data.peaks);
  for (const [name, before, after] of [...data.byCategory, ["in all", ...data.peaks]]) {
    const row = node("tr", { parent: body });
    const cell = node("td", { parent: row });
    const named = name !== "in all" && !data.overheads.includes(name);
    if (named) swatch(cell, name);
    node("span", { text: name, parent: cell });
    for (const size of [before, after]) node("td", { text: formatSize(size), className: "number", parent: row });
    const pair = node("span", { className: "pair", parent: node("td", { parent: row }) });
    for (const size of [before, after]) {
      const bar = node("span", { parent: pair });
      bar.style.width = `${(100 * size) / most}%`;
      if (named) bar.style.background = colour(name);
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

function fillPlanFoot() {
  const refused = byId("refused");
  for (const [name, reason] of data.refused) {
    const item = node("li", { parent: refused });
    node("code", { text: name, parent: item });
    node("span", { text: ` ${reason}`, parent: item });
  }
  if (!data.refused.length) node("li", { text: "None.", parent: refused });
  fillNotes();
  const lines = [
    `Planned in ${data.seconds} s by memfit, version ${data.memfit}.`,
    "Simulated: worked out from a trace of the step. Measured: read on a device. Assumed: a documented guess.",
  ];
  for (const text of lines) node("p", { text, parent: byId("footer") });
}

fillPlanHead();
fillMoves();
fillPoints();
drawFront();
fillTimelines();
drawTimelines();
fillCategories();
fillCode();
fillPlanFoot();
front.addEventListener("pointermove", (event) => {
  const index = pointUnder(event);
  if (index === null) hidePoint();
  else showPoint(index);
});
front.addEventListener("pointerleave", hidePoint);
front.addEventListener("blur", hidePoint);
front.addEventListener("keydown", onFrontKey);
let drawnWidth = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth === drawnWidth) return;
  drawnWidth = window.innerWidth;
  hidePoint();
  drawFront();
  drawTimelines();
});
