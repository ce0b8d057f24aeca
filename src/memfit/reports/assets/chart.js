// The chart: stacked areas by category, and the moment under the pointer.

const MARGIN = { left: 62, right: 12, top: 42, bottom: 42 };
const chart = byId("chart");
const plot = byId("plot");
const most = Math.max(data.peakBytes, live.reduce((a, b) => Math.max(a, b), 0) + data.context, 1);
let view = null;
let cursorTick = null;
let pinnedTick = data.peakTick;

function drawChart() {
  clear(plot);
  const width = Math.max(240, chart.clientWidth);
  const height = width < 600 ? 340 : 420;
  const inner = { width: width - MARGIN.left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom };
  // A capacity far above the curve would squash it; the legend names it then.
  const shown = data.capacity !== null && data.capacity <= 1.8 * most;
  const top = 1.06 * Math.max(most, shown ? data.capacity : 0);
  const x = (tick) => MARGIN.left + (tick / numTicks) * inner.width;
  const y = (bytes) => MARGIN.top + inner.height * (1 - bytes / top);
  view = { x, inner, height, width };
  plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
  plot.setAttribute("height", height);
  drawPhaseBands(plot, data.marks, numTicks, x);
  for (const [tick] of data.marks) {
    shape("line", { class: "grid", x1: x(tick), x2: x(tick), y1: MARGIN.top, y2: MARGIN.top + inner.height }, plot);
  }
  drawAxes(x, y, top, inner);
  if (ticks.length) drawAreas(plot, curve, [["allocated", allocated], ["reserved", reserved]], x, y, inner.width);
  if (data.failureTick !== null) {
    const px = x(data.failureTick);
    shape("rect", { class: "unreached", x: px, y: MARGIN.top, width: x(numTicks) - px, height: inner.height }, plot);
    shape("line", { class: "lost", x1: px, x2: px, y1: MARGIN.top, y2: MARGIN.top + inner.height }, plot);
  }
  const onLeft = data.peakTick > numTicks / 2;
  if (shown) drawCapacity(x, y, inner, onLeft);
  if (ticks.length) drawPeak(x, y, inner, onLeft);
  view.cursor = shape("line", { class: "cursor", visibility: "hidden", y1: MARGIN.top, y2: MARGIN.top + inner.height }, plot);
  view.pin = shape("line", { class: "pin", y1: MARGIN.top, y2: MARGIN.top + inner.height }, plot);
  movePin();
}

function drawAxes(x, y, top, inner) {
  drawSizes(plot, y, top, MARGIN.left, MARGIN.left + inner.width);
  const base = MARGIN.top + inner.height;
  const stride = niceStep(numTicks, inner.width < 500 ? 3 : 8, false);
  for (let tick = 0; tick < numTicks; tick += stride) {
    const px = x(tick);
    shape("line", { class: "axis", x1: px, x2: px, y1: base, y2: base + 4 }, plot);
    // A label centred on the last mark may reach past the edge.
    if (px < MARGIN.left + inner.width - 12) shape("text", { x: px, y: base + 17, "text-anchor": "middle" }, plot, tick.toLocaleString("en"));
  }
  shape("text", { x: MARGIN.left + inner.width / 2, y: base + 35, "text-anchor": "middle" }, plot, "time in ticks: one per allocation or free");
}

/** Whether nothing is drawn above the capacity between two places: there is room for its label. */
function isFree(from, to, x, inner) {
  const sample = (px) => sampleAt(((px - MARGIN.left) / inner.width) * numTicks);
  for (let index = sample(from); index <= sample(to); index++) {
    if (Math.max(live[index], allocated[index] ?? 0, reserved[index] ?? 0) + data.context > data.capacity) return false;
  }
  return ![data.failureTick, data.peakTick].some((tick) => tick !== null && x(tick) > from - 6 && x(tick) < to + 6);
}

function drawCapacity(x, y, inner, onLeft) {
  const [left, right] = [MARGIN.left, MARGIN.left + inner.width];
  const py = y(data.capacity);
  shape("line", { class: "capacity", x1: left, x2: right, y1: py, y2: py }, plot);
  const text = `usable: ${formatSize(data.capacity)}`;
  // About 7.2 pixels a letter at this size. The legend names it where there is no room.
  const length = 7.2 * text.length + 6;
  const sides = [["start", left, left + length], ["end", right - length, right]];
  const side = (onLeft ? sides : sides.reverse()).find(([, from, to]) => !ticks.length || isFree(from, to, x, inner));
  if (!side) return;
  shape("text", { class: "limit", x: side[0] === "start" ? left + 6 : right - 6, y: py - 7, "text-anchor": side[0] }, plot, text);
}

function drawPeak(x, y, inner, onLeft) {
  const px = x(data.peakTick);
  const index = sampleAt(data.peakTick);
  shape("line", { class: "peak", x1: px, x2: px, y1: MARGIN.top - 4, y2: MARGIN.top + inner.height }, plot);
  for (const values of [allocated, reserved]) {
    if (index < values.length) shape("circle", { class: "dot", cx: px, cy: y(values[index] + data.context), r: 4.5 }, plot);
  }
  const text = `peak: ${data.neededText}`;
  shape("text", { id: "peak-label", class: "strong", x: px, y: MARGIN.top - 9, "text-anchor": onLeft ? "end" : "start" }, plot, text);
}

function movePin() {
  const px = view.x(pinnedTick);
  view.pin.setAttribute("x1", px);
  view.pin.setAttribute("x2", px);
}

function tipRow(parent, name, text, { category, className } = {}) {
  const row = node("div", { className: "row", parent });
  const label = node("span", { parent: row });
  swatch(label, category, className);
  node("span", { text: name, parent: label });
  node("span", { text, parent: row });
}

/** A curve's value at a tick; between samples it is only nearly known. */
function curveText(values, tick) {
  const index = sampleAt(tick);
  if (index >= values.length) return "unknown";
  return (ticks[index] === tick ? "" : "about ") + formatSize(values[index]);
}

function showCursor(tick) {
  cursorTick = valid(tick);
  const px = view.x(cursorTick);
  view.cursor.setAttribute("x1", px);
  view.cursor.setAttribute("x2", px);
  view.cursor.setAttribute("visibility", "visible");
  const tip = byId("tip");
  clear(tip);
  node("p", { text: `Tick ${cursorTick.toLocaleString("en")} \u00b7 ${phaseAt(cursorTick)}`, parent: tip }).style.fontWeight = "600";
  node("p", { text: describe(cursorTick), parent: tip });
  const totals = totalsAt(cursorTick);
  for (let i = totals.length - 1; i >= 0; i--) {
    if (totals[i]) tipRow(tip, data.categories[i], formatSize(totals[i]), { category: data.categories[i] });
  }
  if (data.context) tipRow(tip, data.contextName, formatSize(data.context), { category: data.contextName });
  tipRow(tip, "allocated", curveText(allocated, cursorTick), { className: "line" });
  tipRow(tip, "reserved", curveText(reserved, cursorTick), { className: "line dashed" });
  tip.hidden = false;
  const scale = chart.clientWidth / view.width;
  const left = px * scale + 14;
  const fits = left + tip.offsetWidth <= chart.clientWidth;
  tip.style.left = `${fits ? left : Math.max(0, px * scale - 14 - tip.offsetWidth)}px`;
}

function hideCursor() {
  byId("tip").hidden = true;
  if (view) view.cursor.setAttribute("visibility", "hidden");
}

/** The highest moment near the pointer: a spike one tick wide must be easy to hit. */
function tickUnder(event) {
  const box = chart.getBoundingClientRect();
  const position = ((event.clientX - box.left) * view.width) / box.width;
  const perPixel = numTicks / view.inner.width;
  const tick = (position - MARGIN.left) * perPixel;
  const first = sampleAt(tick - 2 * perPixel);
  const last = sampleAt(tick + 2 * perPixel);
  if (perPixel < 0.5) return Math.floor(tick);
  let best = first;
  for (let index = first; index <= last; index++) if (live[index] > live[best]) best = index;
  return ticks[best];
}

function pinFromAddress() {
  const match = /^#tick=(\d+)$/.exec(location.hash);
  if (ticks.length) pin(match ? Number(match[1]) : data.peakTick, false);
}

function onKey(event) {
  const here = cursorTick ?? pinnedTick;
  const stride = event.shiftKey ? Math.ceil(numTicks / 50) : 1;
  const forward = complete ? here + stride : ticks[Math.min(ticks.length - 1, sampleAt(here) + stride)];
  const back = complete ? here - stride : ticks[Math.max(0, sampleAt(here) - stride)];
  const moves = { ArrowLeft: back, ArrowRight: forward, Home: 0, End: numTicks - 1, p: data.peakTick, P: data.peakTick };
  if (event.key in moves) showCursor(moves[event.key]);
  else if (event.key === "Enter" || event.key === " ") pin(here);
  else if (event.key === "Escape") hideCursor();
  else return;
  event.preventDefault();
}

function drawLegend() {
  [...data.categories].reverse().forEach((category) => legendEntry(category, category));
  if (data.context) legendEntry(data.contextName, data.contextName);
  const also = data.context ? " + context" : "";
  legendEntry(`allocated${also}`, null, "line");
  legendEntry(`reserved${also}`, null, "line dashed");
  const above = data.capacity > 1.8 * most ? " (above the chart)" : "";
  if (data.capacity !== null) legendEntry(`usable on the device: ${formatSize(data.capacity)}${above}`, null, "line limit");
  if (data.failureTick !== null) legendEntry(`out of memory at tick ${data.failureTick.toLocaleString("en")}; what follows is never reached`, null, "line lost");
}
