// Host memory and foot of the page, and the start of everything.

function fillHost() {
  byId("host-section").hidden = Boolean(data.run) && !data.host.length;
  const host = byId("host");
  heads(host, [[`part (${data.hostOrigin})`], ["bytes", true]]);
  const body = node("tbody", { parent: host });
  for (const [name, size] of data.host) addRow(body, [name, [formatSize(size), "number"]]);
  addRow(body, ["total", [data.hostTotal, "number"]]);
}

function footLines() {
  const numBlocks = (data.blocks.length + data.numLeftOut).toLocaleString("en");
  const counts = `${data.parameters} parameters, ${numTicks.toLocaleString("en")} ticks, ${numBlocks} blocks`;
  const lines = [`${counts}; ${data.run ? "run" : "estimated"} in ${data.seconds} s by memfit, version ${data.memfit}.`, ORIGINS];
  if (data.source) lines.push(`Usable memory of the device: ${data.source}.`);
  if (data.numLeftOut) lines.push(`${data.numLeftOut.toLocaleString("en")} blocks of ${data.leftOutUpTo} or less are in the curves, not in the lists.`);
  return lines;
}

fillHead();
byId("moment").textContent = `Peak ${data.moment}`;
fillRun();
drawLegend();
drawChart();
pinFromAddress();
drawMap();
drawViews();
drawBreakdown();
fillHost();
fillFoot(footLines());
chart.addEventListener("pointermove", (event) => ticks.length && showCursor(tickUnder(event)));
chart.addEventListener("pointerleave", hideCursor);
chart.addEventListener("blur", hideCursor);
chart.addEventListener("click", (event) => ticks.length && pin(tickUnder(event)));
chart.addEventListener("keydown", (event) => ticks.length && onKey(event));
byId("to-peak").addEventListener("click", () => ticks.length && pin(data.peakTick));
window.addEventListener("hashchange", pinFromAddress);
redrawOnResize(() => {
  hideCursor();
  drawChart();
  drawMap();
});
