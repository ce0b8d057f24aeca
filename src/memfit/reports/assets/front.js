// Memory against time: the best plans known, the budget, and the one that was chosen.

const FRONT_MARGIN = { left: 74, right: 20, top: 46, bottom: 46 };
// Times further apart than this are drawn on a logarithmic scale, or the short ones would be one line.
const WIDE_RANGE = 8;
const front = byId("front");
const plot = byId("plot");
const timed = data.front.filter(([, seconds]) => seconds !== null);
let positions = [];
let shownPoint = null;

function formatTime(seconds) {
  if (seconds >= 1) return `${+seconds.toFixed(3)} s`;
  return seconds >= 1e-3 ? `${+(seconds * 1e3).toFixed(3)} ms` : `${+(seconds * 1e6).toFixed(1)} \u00b5s`;
}

/** Round times between two. */
function timeMarks(low, high, logarithmic) {
  if (!logarithmic) {
    const raw = (high - low) / 6;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].find((factor) => factor * power >= raw) * power;
    const first = Math.ceil(low / step);
    return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, index) => (first + index) * step);
  }
  const factors = high > 1000 * low ? [1] : [1, 2, 5];
  const marks = [];
  for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10) marks.push(...factors.map((factor) => factor * power));
  return marks.filter((seconds) => seconds >= low && seconds <= high);
}

/** From and to of an axis that shows every value with room at both ends. */
function span(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const room = 0.08 * (high - low || high || 1);
  return [Math.max(0, low - room), high + room];
}

function drawFront() {
  clear(plot);
  front.hidden = timed.length < 2;
  if (front.hidden) return;
  const width = Math.max(240, front.clientWidth);
  const height = width < 600 ? 280 : 340;
  const inner = { width: width - FRONT_MARGIN.left - FRONT_MARGIN.right, height: height - FRONT_MARGIN.top - FRONT_MARGIN.bottom };
  const sizes = timed.map(([peak]) => peak);
  // A budget far from every plan would squash them.
  const near = data.budget <= 1.5 * Math.max(...sizes);
  const [left, right] = span(near ? [...sizes, data.budget] : sizes);
  const times = timed.map(([, seconds]) => seconds);
  const logarithmic = Math.max(...times) > WIDE_RANGE * Math.min(...times);
  const [low, high] = logarithmic ? [Math.min(...times) / 1.2, 1.2 * Math.max(...times)] : span(times);
  const scale = logarithmic ? Math.log : (seconds) => seconds;
  const x = (bytes) => FRONT_MARGIN.left + ((bytes - left) / (right - left)) * inner.width;
  const y = (seconds) => FRONT_MARGIN.top + inner.height * (1 - (scale(seconds) - scale(low)) / (scale(high) - scale(low)));
  plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
  plot.setAttribute("height", height);
  drawFrontAxes({ x, y, inner, left, right, marks: timeMarks(low, high, logarithmic) });
  const spread = logarithmic ? ", logarithmic" : "";
  shape("text", { class: "strong", x: 4, y: 14 }, plot, `time of a step (${data.timeOrigin}${spread})`);
  if (near) drawBudget(x(data.budget), inner);
  const path = timed.map(([peak, seconds], i) => `${i ? "L" : "M"}${x(peak).toFixed(1)} ${y(seconds).toFixed(1)}`).join("");
  shape("path", { class: "front", d: path }, plot);
  positions = timed.map(([peak, seconds]) => [x(peak), y(seconds)]);
  // The chosen one last, so that it lies on top.
  const order = timed.map((_, i) => i).sort((a, b) => timed[a][4] - timed[b][4]);
  for (const i of order) {
    const [, , , , chosen, origin] = timed[i];
    const name = `point${origin === "simulated" ? " verified" : ""}${chosen ? " chosen" : ""}`;
    shape("circle", { class: name, cx: positions[i][0], cy: positions[i][1], r: chosen ? 8 : 5 }, plot);
  }
}

function drawFrontAxes({ x, y, inner, left, right, marks }) {
  const [start, end] = [FRONT_MARGIN.left, FRONT_MARGIN.left + inner.width];
  const base = FRONT_MARGIN.top + inner.height;
  for (const seconds of marks) {
    shape("line", { class: "grid", x1: start, x2: end, y1: y(seconds), y2: y(seconds) }, plot);
    shape("text", { x: start - 8, y: y(seconds) + 4, "text-anchor": "end" }, plot, formatTime(seconds));
  }
  shape("line", { class: "axis", x1: start, x2: end, y1: base, y2: base }, plot);
  const stride = niceStep(right - left, inner.width < 500 ? 3 : 6, true, right);
  for (let bytes = Math.ceil(left / stride) * stride; bytes <= right; bytes += stride) {
    shape("line", { class: "axis", x1: x(bytes), x2: x(bytes), y1: base, y2: base + 4 }, plot);
    if (x(bytes) < end - 20) shape("text", { x: x(bytes), y: base + 18, "text-anchor": "middle" }, plot, axisLabel(bytes, right));
  }
  shape("text", { x: (start + end) / 2, y: base + 38, "text-anchor": "middle" }, plot, "memory that the device must provide");
}

function drawBudget(px, inner) {
  const end = FRONT_MARGIN.left + inner.width;
  shape("rect", { class: "over", x: px, y: FRONT_MARGIN.top, width: Math.max(0, end - px), height: inner.height }, plot);
  shape("line", { class: "capacity", x1: px, x2: px, y1: FRONT_MARGIN.top, y2: FRONT_MARGIN.top + inner.height }, plot);
  const onLeft = px > FRONT_MARGIN.left + inner.width / 2;
  const place = { class: "limit", x: px + (onLeft ? 4 : -4), y: FRONT_MARGIN.top - 8, "text-anchor": onLeft ? "end" : "start" };
  shape("text", place, plot, `budget: ${formatSize(data.budget)}`);
}

function showPoint(index) {
  hidePoint();
  shownPoint = Math.max(0, Math.min(timed.length - 1, index));
  const [peak, , time, label, chosen, origin] = timed[shownPoint];
  const [px, py] = positions[shownPoint];
  shape("circle", { class: "ring", cx: px, cy: py, r: 11 }, plot);
  const tip = byId("tip");
  node("p", { text: label, parent: tip }).style.fontWeight = "600";
  for (const [name, text] of [["memory", `${formatSize(peak)} (${origin})`], ["time", `${time} (${data.timeOrigin})`]]) {
    const row = node("div", { className: "row", parent: tip });
    node("span", { text: name, parent: row });
    node("span", { text, parent: row });
  }
  if (chosen) node("p", { text: "the plan", className: "good", parent: tip });
  tip.hidden = false;
  const scale = front.clientWidth / plot.viewBox.baseVal.width;
  const [right, left] = [px * scale + 16, px * scale - 16 - tip.offsetWidth];
  const beside = right + tip.offsetWidth <= front.clientWidth ? right : left >= 0 ? left : null;
  const [above, below] = [py * scale - 16 - tip.offsetHeight, py * scale + 16];
  tip.style.left = `${beside ?? Math.max(0, front.clientWidth - tip.offsetWidth) / 2}px`;
  tip.style.top = `${beside === null ? (above >= 0 ? above : below) : Math.max(0, py * scale - tip.offsetHeight / 2)}px`;
}

function hidePoint() {
  const ring = plot.querySelector(".ring");
  if (ring) ring.remove();
  clear(byId("tip"));
  byId("tip").hidden = true;
}

/** The point nearest to the pointer, where one is near. */
function pointUnder(event) {
  const box = front.getBoundingClientRect();
  const scale = plot.viewBox.baseVal.width / box.width;
  const [px, py] = [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
  const distances = positions.map(([x, y]) => Math.hypot(x - px, y - py));
  const best = distances.indexOf(Math.min(...distances));
  return distances[best] <= 60 ? best : null;
}

function onFrontKey(event) {
  const here = shownPoint ?? Math.max(0, timed.findIndex(([, , , , chosen]) => chosen));
  // The front begins with the largest memory, which lies on the right.
  const moves = { ArrowLeft: here + 1, ArrowRight: here - 1, Home: timed.length - 1, End: 0 };
  if (event.key in moves) showPoint(shownPoint === null ? here : moves[event.key]);
  else if (event.key === "Escape") hidePoint();
  else return;
  event.preventDefault();
}

function fillPoints() {
  byId("front-section").hidden = data.front.length < 2;
  const known = timed.length ? "" : " Times are unknown because the speed of the device is unknown.";
  byId("front-text").textContent =
    `The fastest plan found for each amount of memory.${known} ` +
    "Simulated: traced with its moves applied. Assumed: computed from the trace of the unchanged step.";
  const table = byId("points");
  heads(table, [["memory", true], ["time", true], ["moves"], ["origin"]]);
  const body = node("tbody", { parent: table });
  for (const [peak, , time, label, chosen, origin] of data.front) {
    const name = chosen ? `${label} (the plan)` : label;
    addRow(body, [[formatSize(peak), "number"], [time, "number"], name, [origin, "quiet"]], chosen ? "chosen" : "");
  }
}
