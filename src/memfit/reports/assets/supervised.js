// The page of a supervised run: memory over time with its limit and events, attempts, and the start of everything.

const MEMORY_MARGIN = { left: 66, right: 14, top: 44, bottom: 28 };
const BAD_MARKS = ["out of memory", "killed"];
const chart = byId("memory");
const plot = byId("plot");
const tip = byId("tip");
let current = null;
let scale = null;

function formatSeconds(seconds) {
  if (seconds < 60) return `${+seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

const highest = () => Math.max(1, ...data.series.flatMap(([, values]) => values.map((value) => value || 0)));
const limitShown = () => data.limit !== null && data.limit <= 3 * highest();

function fillLegend() {
  const entry = (text, className) => legendEntry(text, null, className);
  data.series.forEach(([name], index) => entry(name, `line series-${seriesClass(name, index)}`));
  if (data.limit !== null) {
    entry(`${data.limitName}: ${formatSize(data.limit)}${limitShown() ? "" : " (above the chart)"}`, "line limit");
  }
  const kinds = data.marks.map(([, kind]) => kind);
  if (kinds.some((kind) => BAD_MARKS.includes(kind))) entry("memory ran out", "sign bad");
  if (kinds.includes("checkpoint")) entry("checkpoint", "sign good");
}

const seriesClass = (name, index) => (name === "whole container" ? 2 : index);

/** Samples of one attempt after another: nothing ran between them, and no line crosses the gap. */
function stretches() {
  return data.spans.map(([start, end]) => data.times.map((time, index) => [time, index]).filter(([time]) => time >= start && time <= end).map(([, index]) => index));
}

function drawMemory() {
  clear(plot);
  const width = Math.max(280, chart.clientWidth);
  const height = width < 600 ? 280 : 360;
  const right = width - MEMORY_MARGIN.right;
  const bottom = height - MEMORY_MARGIN.bottom;
  const top = 1.08 * Math.max(highest(), limitShown() ? data.limit : 0);
  const span = Math.max(0.1, data.seconds, ...data.times);
  const x = (seconds) => MEMORY_MARGIN.left + (seconds / span) * (right - MEMORY_MARGIN.left);
  const y = (bytes) => bottom - (bytes / top) * (bottom - MEMORY_MARGIN.top);
  scale = { x, y, span, bottom };
  plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
  plot.setAttribute("height", height);
  drawSizes(plot, y, top, MEMORY_MARGIN.left, right);
  drawTimes(x, span, bottom);
  drawSpans(x);
  for (const indices of stretches()) {
    if (!indices.length) continue;
    data.series.forEach(([name, values], series) => drawLine(indices, values, seriesClass(name, series), x, y));
  }
  if (limitShown()) {
    shape("line", { class: "capacity", x1: x(0), x2: right, y1: y(data.limit), y2: y(data.limit) }, plot);
    drawLimitName(x, y, right);
  }
  drawMarks(x, bottom);
}

/** The name of the limit above its line, at the end where nothing else is drawn; the legend has it in any case. */
function drawLimitName(x, y, right) {
  const text = `${data.limitName}: ${formatSize(data.limit)}`;
  // About 7.2 pixels a letter at this size.
  const [left, length] = [x(0), 7.2 * text.length];
  const isFree = (from, to) =>
    !data.marks.some(([seconds, kind]) => kind !== "start" && kind !== "restart" && x(seconds) > from - 8 && x(seconds) < to + 8) &&
    !data.times.some((time, index) => x(time) >= from - 4 && x(time) <= to + 4 && data.series.some(([, values]) => (values[index] || 0) > data.limit));
  const ends = [["end", right, right - length, right], ["start", left + 4, left, left + length]];
  const end = ends.find(([, , from, to]) => isFree(from, to));
  if (end) shape("text", { class: "limit", x: end[1], y: y(data.limit) - 7, "text-anchor": end[0] }, plot, text);
}

function drawTimes(x, span, bottom) {
  const steps = [0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400];
  const step = steps.find((size) => span / size <= 8) || 86400 * Math.ceil(span / 86400 / 8);
  for (let time = 0; time <= span; time += step) {
    const anchor = time && time + step > span ? "end" : "middle";
    shape("text", { x: Math.min(x(time), x(span)), y: bottom + 18, "text-anchor": anchor }, plot, formatSeconds(time));
  }
}

function drawSpans(x) {
  data.spans.forEach(([start, end], index) => {
    const width = Math.max(1, x(end) - x(start));
    const band = shape("rect", { class: `attempt ${index % 2 ? "odd" : ""}`, x: x(start), y: 0, width, height: 18, rx: 3 }, plot);
    shape("title", {}, band, `attempt ${index + 1}`);
    const name = width > 80 ? `attempt ${index + 1}` : `${index + 1}`;
    if (name.length * 6.2 + 6 <= width) {
      shape("text", { class: "phase", x: x(start) + width / 2, y: 13, "text-anchor": "middle" }, plot, name);
    }
  });
}

function drawLine(indices, values, series, x, y) {
  const known = indices.filter((index) => values[index] !== null);
  if (!known.length) return;
  const points = known.map((index) => `${x(data.times[index]).toFixed(1)} ${y(values[index]).toFixed(1)}`);
  if (series === 0) {
    const [first, last] = [x(data.times[known[0]]).toFixed(1), x(data.times[known.at(-1)]).toFixed(1)];
    shape("path", { class: "fill series-0", d: `M${first} ${y(0)}L${points.join("L")}L${last} ${y(0)}Z` }, plot);
  }
  if (points.length === 1) shape("circle", { class: "dot", cx: x(data.times[known[0]]), cy: y(values[known[0]]), r: 3 }, plot);
  else shape("path", { class: `line series-${series}`, d: `M${points.join("L")}` }, plot);
}

function drawMarks(x, bottom) {
  for (const [seconds, kind, text] of data.marks) {
    if (kind === "start" || kind === "restart") continue;
    const tone = BAD_MARKS.includes(kind) ? "bad" : kind === "checkpoint" ? "good" : "";
    const at = Math.min(x(seconds), x(scale.span));
    if (tone !== "good") shape("line", { class: `mark ${tone}`, x1: at, x2: at, y1: 30, y2: bottom }, plot);
    const sign = shape("circle", { class: `sign ${tone}`, cx: at, cy: 30, r: 5 }, plot);
    shape("title", {}, sign, `${formatSeconds(seconds)}: ${text}`);
  }
}

function showAt(index) {
  current = Math.max(0, Math.min(data.times.length - 1, index));
  const time = data.times[current];
  plot.querySelectorAll(".cursor").forEach((line) => line.remove());
  shape("line", { class: "cursor", x1: scale.x(time), x2: scale.x(time), y1: 30, y2: scale.bottom }, plot);
  clear(tip);
  node("p", { text: formatSeconds(time), parent: tip });
  data.series.forEach(([name, values], series) => {
    const row = node("div", { className: "row", parent: tip });
    const label = node("span", { parent: row });
    swatch(label, null, `line series-${seriesClass(name, series)}`);
    node("span", { text: name, parent: label });
    node("span", { text: formatSize(values[current]), parent: row });
  });
  tip.hidden = false;
  const left = scale.x(time) + 14;
  tip.style.left = `${left + 270 > chart.clientWidth ? Math.max(0, left - 298) : left}px`;
}

function hideTip() {
  current = null;
  tip.hidden = true;
  plot.querySelectorAll(".cursor").forEach((line) => line.remove());
}

function nearest(event) {
  const box = plot.getBoundingClientRect();
  const share = (event.clientX - box.left - MEMORY_MARGIN.left) / (box.width - MEMORY_MARGIN.left - MEMORY_MARGIN.right);
  return lastAt(data.times, share * scale.span);
}

function onMemoryKey(event) {
  const steps = { ArrowLeft: -1, ArrowRight: 1 };
  if (event.key === "Escape") hideTip();
  if (!(event.key in steps)) return;
  event.preventDefault();
  showAt(current === null ? 0 : current + steps[event.key]);
}

function fillAttempts() {
  const table = byId("attempts");
  heads(table, [["attempt", true], ["run with"], ["time", true], ["peak", true], ["steps"], ["started from"], ["ended"]]);
  const body = node("tbody", { parent: table });
  for (const [number, settings, time, peak, steps, whence, cause, text] of data.attempts) {
    const cells = addRow(body, [[number, "number"], settings, [time, "number"], [peak, "number"], steps, whence, cause]);
    if (text) node("span", { text, className: "quiet", parent: cells.at(-1) });
  }
}

function fillEvents() {
  const table = byId("events");
  heads(table, [["time", true], ["what"]]);
  const body = node("tbody", { parent: table });
  for (const [seconds, kind, text] of data.marks) {
    addRow(body, [[formatSeconds(seconds), "number"], [text, BAD_MARKS.includes(kind) ? "bad" : ""]]);
  }
}

fillHead();
fillLegend();
byId("memory-section").hidden = !data.times.length;
if (data.times.length) drawMemory();
fillAttempts();
fillEvents();
fillFoot([
  `Supervised for ${formatSeconds(data.seconds)} by memfit, version ${data.memfit}.`,
  "Memory is sampled five times a second: a shorter peak may be missing.",
]);
chart.addEventListener("pointermove", (event) => showAt(nearest(event)));
chart.addEventListener("pointerleave", hideTip);
chart.addEventListener("blur", hideTip);
chart.addEventListener("keydown", onMemoryKey);
redrawOnResize(() => {
  hideTip();
  if (data.times.length) drawMemory();
});
