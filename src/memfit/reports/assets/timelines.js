// Memory over time before and after, one above the other on the same scale.

const TIMELINE_MARGIN = { left: 62, right: 12, top: 26, bottom: 10 };
const timelines = data.timelines.map((timeline) => {
  const ticks = accumulate(timeline.ticks);
  const series = timeline.series.map(accumulate);
  const live = ticks.map((_, index) => series.reduce((sum, values) => sum + values[index], 0));
  return { ...timeline, ticks, series, live, reserved: accumulate(timeline.reserved), numTicks: Math.max(1, timeline.numTicks) };
});

function fillTimelines() {
  byId("timelines-section").hidden = !timelines.length;
  if (!timelines.length) return;
  const legend = byId("legend");
  const entry = (text, category, className) => {
    const item = node("span", { parent: legend });
    swatch(item, category, className);
    node("span", { text, parent: item });
  };
  const names = [...new Set(timelines.flatMap(({ categories }) => [...categories].reverse()))];
  for (const name of names) entry(name, name);
  if (timelines[0].context) entry(timelines[0].contextName, timelines[0].contextName);
  entry(`reserved${timelines[0].context ? " + context" : ""}`, null, "line dashed");
  entry(`budget: ${formatSize(data.budget)}${budgetShown() ? "" : " (above the chart)"}`, null, "line limit");
  for (const timeline of timelines) {
    const box = node("div", { className: "timeline", parent: byId("timelines") });
    node("h3", { text: timeline.title, parent: box });
    timeline.plot = shape("svg", { role: "img", "aria-label": timeline.title }, box);
  }
}

const highest = () => Math.max(1, ...timelines.map(({ peak }) => peak));
const budgetShown = () => data.budget <= 1.8 * highest();

function drawTimelines() {
  const top = 1.06 * Math.max(highest(), budgetShown() ? data.budget : 0);
  for (const timeline of timelines) {
    const { plot: target, numTicks } = timeline;
    clear(target);
    const width = Math.max(240, target.parentNode.clientWidth);
    const height = width < 600 ? 190 : 230;
    const inner = { width: width - TIMELINE_MARGIN.left - TIMELINE_MARGIN.right, height: height - TIMELINE_MARGIN.top - TIMELINE_MARGIN.bottom };
    const x = (tick) => TIMELINE_MARGIN.left + (tick / numTicks) * inner.width;
    const y = (bytes) => TIMELINE_MARGIN.top + inner.height * (1 - bytes / top);
    target.setAttribute("viewBox", `0 0 ${width} ${height}`);
    target.setAttribute("height", height);
    drawBands(timeline, x);
    drawSizes(target, y, top, TIMELINE_MARGIN.left, TIMELINE_MARGIN.left + inner.width);
    if (timeline.ticks.length) drawAreas(timeline, x, y, inner.width);
    if (budgetShown()) {
      shape("line", { class: "capacity", x1: x(0), x2: x(numTicks), y1: y(data.budget), y2: y(data.budget) }, target);
    }
  }
}

function drawBands({ marks, numTicks, plot: target }, x) {
  marks.forEach(([tick, phase, step], index) => {
    const end = index + 1 < marks.length ? marks[index + 1][0] : numTicks;
    if (end <= tick) return;
    const band = shape("rect", { class: `band ${phase}`, x: x(tick), y: 0, width: x(end) - x(tick), height: 16, rx: 3 }, target);
    const name = step ? `${phase} ${step}` : phase;
    shape("title", {}, band, name);
    // About 6.2 pixels a letter at this size.
    if (name.length * 6.2 + 8 <= x(end) - x(tick)) {
      shape("text", { class: "phase", x: (x(tick) + x(end)) / 2, y: 12, "text-anchor": "middle" }, target, name);
    }
  });
}

function drawAreas(timeline, x, y, width) {
  const { ticks, series, categories, context, contextName, reserved, numTicks, plot: target } = timeline;
  const indices = visible(timeline, width);
  const end = x(numTicks);
  const base = new Float64Array(ticks.length).fill(context);
  const area = (name, d) => (shape("path", { class: "area", "data-name": name, d }, target).style.fill = colour(name));
  if (context) area(contextName, areaPath(ticks, indices, () => 0, () => context, x, y, end));
  series.forEach((values, category) => {
    area(categories[category], areaPath(ticks, indices, (i) => base[i], (i) => base[i] + values[i], x, y, end));
    values.forEach((value, i) => (base[i] += value));
  });
  const known = indices.filter((index) => index < reserved.length);
  if (known.length) {
    const stop = reserved.length < ticks.length ? x(ticks[reserved.length - 1]) : end;
    shape("path", { class: "line reserved", d: stepPath(ticks, known, (i) => reserved[i] + context, x, y, stop) }, target);
  }
}
