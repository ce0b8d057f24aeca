// Head and foot of the page, and the start of everything.

function fillHead() {
  fillVerdict();
  byId("bounds").textContent = data.bounds;
  byId("moment").textContent = `Peak ${data.moment}`;
  if (data.failure) {
    byId("failure").textContent = data.failure;
    byId("failure").hidden = false;
  }
}

function fillFoot() {
  fillNotes();
  byId("host-section").hidden = Boolean(data.run) && !data.host.length;
  const host = byId("host");
  heads(host, [[`part (${data.hostOrigin})`], ["bytes", true]]);
  const body = node("tbody", { parent: host });
  for (const [name, size] of [...data.host, ["total", null]]) {
    const row = node("tr", { parent: body });
    node("td", { text: name, parent: row });
    node("td", { text: size === null ? data.hostTotal : formatSize(size), className: "number", parent: row });
  }
  const lines = [
    `${data.parameters} parameters, ${numTicks.toLocaleString("en")} ticks, ` +
      `${(data.blocks.length + data.numLeftOut).toLocaleString("en")} blocks; ${data.run ? "run" : "estimated"} in ${data.seconds} s by memfit, version ${data.memfit}.`,
    "Simulated: worked out from a trace of the step. Measured: read on a device. Assumed: a documented guess.",
  ];
  if (data.source) lines.push(`Usable memory of the device: ${data.source}.`);
  if (data.numLeftOut) lines.push(`${data.numLeftOut.toLocaleString("en")} blocks of ${data.leftOutUpTo} or less are in the curves, not in the lists.`);
  for (const text of lines) node("p", { text, parent: byId("footer") });
}

fillHead();
fillRun();
drawLegend();
drawChart();
pinFromAddress();
drawMap();
drawViews();
drawBreakdown();
fillFoot();
chart.addEventListener("pointermove", (event) => ticks.length && showCursor(tickUnder(event)));
chart.addEventListener("pointerleave", hideCursor);
chart.addEventListener("blur", hideCursor);
chart.addEventListener("click", (event) => ticks.length && pin(tickUnder(event)));
chart.addEventListener("keydown", (event) => ticks.length && onKey(event));
byId("to-peak").addEventListener("click", () => ticks.length && pin(data.peakTick));
window.addEventListener("hashchange", pinFromAddress);
let drawnWidth = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth === drawnWidth) return;
  drawnWidth = window.innerWidth;
  hideCursor();
  drawChart();
  drawMap();
});
