// What charts share: curves from their differences, axes of sizes, and paths.

function accumulate(differences) {
  let value = 0;
  return differences.map((change) => (value += change));
}

/** Index of the last of `ticks` at or before a tick. */
function lastAt(ticks, tick) {
  let low = 0;
  let high = ticks.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (ticks[middle] <= tick) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** A round step that divides `range` into about `count`; of sizes, round in the unit of labels up to `top`. */
function niceStep(range, count, binary, top = range) {
  const unit = binary ? (UNITS.find(([, factor]) => top >= factor) || ["B", 1])[1] : 1;
  const raw = range / unit / count;
  const power = 10 ** Math.floor(Math.log10(raw || 1));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= raw) * power * unit;
  return binary ? step : Math.max(1, step);
}

function axisLabel(bytes, top) {
  const [unit, factor] = UNITS.find(([, size]) => top >= size) || ["B", 1];
  return `${+(bytes / factor).toFixed(3)} ${unit}`;
}

/** Per pixel column only the highest and the lowest sample: what a screen can show, and no peak lost. */
function visible({ ticks, live, numTicks, peakTick }, width) {
  const columns = new Map();
  ticks.forEach((tick, index) => {
    const column = Math.floor((tick * width) / numTicks);
    const [high, low] = columns.get(column) || [index, index];
    columns.set(column, [live[index] > live[high] ? index : high, live[index] < live[low] ? index : low]);
  });
  const chosen = new Set([lastAt(ticks, peakTick)]);
  for (const pair of columns.values()) pair.forEach((index) => chosen.add(index));
  return [...chosen].sort((a, b) => a - b);
}

// Memory stays at its level until the next event, so curves are steps, not slopes.
function stepPath(ticks, indices, values, x, y, end) {
  const points = indices.map((index) => [x(ticks[index]).toFixed(1), y(values(index)).toFixed(1)]);
  return points.map(([px, py], i) => (i ? `H${px}V${py}` : `M${px} ${py}`)).join("") + `H${end.toFixed(1)}`;
}

function areaPath(ticks, indices, lower, upper, x, y, end) {
  let path = stepPath(ticks, indices, upper, x, y, end);
  for (let i = indices.length - 1; i >= 0; i--) {
    path += `V${y(lower(indices[i])).toFixed(1)}H${x(ticks[indices[i]]).toFixed(1)}`;
  }
  return `${path}Z`;
}

/** Bands of the phases above a chart, with their names where there is room. */
function drawPhaseBands(plot, marks, numTicks, x) {
  marks.forEach(([tick, phase, step], index) => {
    const end = index + 1 < marks.length ? marks[index + 1][0] : numTicks;
    if (end <= tick) return;
    const [left, right] = [x(tick), x(end)];
    const name = step ? `${phase} ${step}` : phase;
    const band = shape("rect", { class: `band ${phase}`, x: left, y: 0, width: right - left, height: 18, rx: 3 }, plot);
    shape("title", {}, band, step ? `${phase}, step ${step}` : phase);
    // About 6.2 pixels a letter at this size.
    const label = [name, name[0].toUpperCase() + (step || "")].find((text) => text.length * 6.2 + 8 <= right - left);
    if (label) shape("text", { class: "phase", x: (left + right) / 2, y: 13, "text-anchor": "middle" }, plot, label);
  });
}

/** Areas of the categories, stacked on the context, and lines such as that of reserved memory. */
function drawAreas(plot, curves, lines, x, y, width) {
  const { ticks, series, categories, context, contextName, numTicks, stopTick = null } = curves;
  const indices = visible(curves, width);
  const end = x(numTicks);
  const base = new Float64Array(ticks.length).fill(context);
  const area = (name, d) => (shape("path", { class: "area", "data-name": name, d }, plot).style.fill = colour(name));
  if (context) area(contextName, areaPath(ticks, indices, () => 0, () => context, x, y, end));
  series.forEach((values, category) => {
    area(categories[category], areaPath(ticks, indices, (i) => base[i], (i) => base[i] + values[i], x, y, end));
    values.forEach((value, i) => (base[i] += value));
  });
  for (const [name, values] of lines) {
    const known = indices.filter((index) => index < values.length);
    if (!known.length) continue;
    const stop = values.length < ticks.length ? x(stopTick ?? ticks[values.length - 1]) : end;
    const d = stepPath(ticks, known, (i) => values[i] + context, x, y, stop);
    shape("path", { class: `line ${name}`, "data-name": name, d }, plot);
  }
}

/** Lines and labels of sizes from 0 to `top`. */
function drawSizes(plot, y, top, left, right) {
  const step = niceStep(top, 5, true);
  for (let bytes = 0; bytes <= top; bytes += step) {
    shape("line", { class: bytes ? "grid" : "axis", x1: left, x2: right, y1: y(bytes), y2: y(bytes) }, plot);
    shape("text", { x: left - 8, y: y(bytes) + 4, "text-anchor": "end" }, plot, bytes ? axisLabel(bytes, top) : "0");
  }
}
