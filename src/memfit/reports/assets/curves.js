// Memory over time: what was live at each tick, and which event made it so.

// An empty timeline still has an axis.
const numTicks = Math.max(1, data.numTicks);
const ticks = accumulate(data.ticks);
const series = data.series.map(accumulate);
const allocated = accumulate(data.allocated);
const reserved = accumulate(data.reserved);
const live = ticks.map((_, index) => series.reduce((sum, values) => sum + values[index], 0));
const curve = { ...data, ticks, live, numTicks, series, stopTick: data.failureTick };
const complete = data.numLeftOut === 0;
const events = new Map();
for (const block of data.blocks) {
  events.set(block[1], { block, born: true });
  if (block[2] !== null) events.set(block[2], { block, born: false });
}

/** Index of the last sample at or before a tick. */
const sampleAt = (tick) => lastAt(ticks, tick);

function liveBlocks(tick) {
  return data.blocks.filter((b) => b[1] <= tick && (b[2] === null || b[2] > tick)).sort((a, b) => b[0] - a[0]);
}

function totalsAt(tick) {
  if (!complete || ticks[sampleAt(tick)] === tick) return series.map((values) => values[sampleAt(tick)]);
  const totals = data.categories.map(() => 0);
  for (const block of liveBlocks(tick)) totals[block[3]] += block[0];
  return totals;
}

/** A tick the page can answer for exactly: any, unless blocks had to be left out. */
function valid(tick) {
  const within = Math.max(0, Math.min(numTicks - 1, tick));
  return complete ? within : ticks[sampleAt(within)];
}

function phaseAt(tick) {
  let current = [0, "setup", 0];
  for (const mark of data.marks) if (mark[0] <= tick) current = mark;
  return current[2] ? `${current[1]}, step ${current[2]}` : current[1];
}

function describe(tick) {
  const event = events.get(tick);
  if (!event) return complete ? "no event" : `a block too small to be listed here (${data.leftOutUpTo} or less)`;
  const [size, , , category, module, op, source] = event.block;
  const words = [`${event.born ? "allocates" : "frees"} ${formatSize(size)}`, data.categories[category]];
  for (const code of [op, module, source]) if (data.strings[code]) words.push(data.strings[code]);
  return words.join(" \u00b7 ");
}
