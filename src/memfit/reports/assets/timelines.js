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
  const names = [...new Set(timelines.flatMap(({ categories }) => [...categories].reverse()))];
  for (const name of names) legendEntry(name, name);
  if (timelines[0].context) legendEntry(timelines[0].contextName, timelines[0].contextName);
  legendEntry(`reserved${timelines[0].context ? " + context" : ""}`, null, "line dashed");
  legendEntry(`budget: ${formatSize(data.budget)}${budgetShown() ? "" : " (above the chart)"}`, null, "line limit");
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
    drawPhaseBands(target, timeline.marks, numTicks, x);
    drawSizes(target, y, top, TIMELINE_MARGIN.left, TIMELINE_MARGIN.left + inner.width);
    if (timeline.ticks.length) drawAreas(target, timeline, [["reserved", timeline.reserved]], x, y, inner.width);
    if (budgetShown()) {
      shape("line", { class: "capacity", x1: x(0), x2: x(numTicks), y1: y(data.budget), y2: y(data.budget) }, target);
    }
  }
}
