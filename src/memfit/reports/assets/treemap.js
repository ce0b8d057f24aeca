// The treemap: the peak by module, nested as the model is.

function buildTree() {
  const root = { name: "model", size: 0, children: new Map() };
  for (const [path, size] of data.breakdown.module) {
    const whole = data.overheads.includes(path) || path.startsWith("(");
    let place = root;
    root.size += size;
    for (const part of whole ? [path] : path.split(".")) {
      if (!place.children.has(part)) place.children.set(part, { name: part, size: 0, children: new Map(), parent: place });
      place = place.children.get(part);
      place.size += size;
      place.overhead = data.overheads.includes(path);
    }
    place.own = size;
  }
  return root;
}

/** Children to draw, largest first; a chain of only children becomes one, bytes of the module itself get a cell. */
function parts(place) {
  const found = [...place.children.values()].map((child) => {
    let name = child.name;
    let end = child;
    while (end.children.size === 1 && !end.own) {
      end = [...end.children.values()][0];
      name += `.${end.name}`;
    }
    return { name, size: end.size, overhead: end.overhead && !end.children.size, place: end.children.size ? end : null };
  });
  if (place.own && place.children.size) found.push({ name: "(itself)", size: place.own, place: null });
  return found.filter((part) => part.size > 0).sort((a, b) => b.size - a.size || byName(a.name, b.name));
}

/** Parts of which none is nearly everything: one that is gives way to its own, or the map would be one rectangle. */
function opened(place) {
  let found = parts(place);
  for (;;) {
    const own = found.filter((part) => !part.overhead);
    const total = own.reduce((sum, part) => sum + part.size, 0);
    const [largest] = own;
    if (!largest || !largest.place || largest.size < 0.6 * total) return found;
    const inside = parts(largest.place).map((part) => ({ ...part, name: `${largest.name}.${part.name}` }));
    found = [...found.filter((part) => part !== largest), ...inside].sort((a, b) => b.size - a.size || byName(a.name, b.name));
  }
}

/** Rectangles as square as possible: rows are filled along the shorter side while that improves their worst shape. */
function squarify(items, box) {
  const total = items.reduce((sum, item) => sum + item.size, 0);
  const scale = total ? (box.width * box.height) / total : 0;
  let { left, top, width, height } = box;
  const placed = [];
  let start = 0;
  while (start < items.length) {
    const side = Math.min(width, height);
    const worst = (end, area) => Math.max(...[items[start], items[end]].map((item) => {
      const cell = item.size * scale;
      const ratio = (side * side * cell) / (area * area);
      return Math.max(ratio, 1 / ratio);
    }));
    let end = start;
    let area = items[start].size * scale;
    while (end + 1 < items.length) {
      const next = area + items[end + 1].size * scale;
      if (worst(end + 1, next) > worst(end, area)) break;
      end += 1;
      area = next;
    }
    const depth = side ? area / side : 0;
    let offset = 0;
    for (const item of items.slice(start, end + 1)) {
      const length = depth ? (item.size * scale) / depth : 0;
      placed.push(width >= height
        ? { item, left, top: top + offset, width: depth, height: length }
        : { item, left: left + offset, top, width: length, height: depth });
      offset += length;
    }
    if (width >= height) { left += depth; width -= depth; } else { top += depth; height -= depth; }
    start = end + 1;
  }
  return placed;
}

const tree = buildTree();
let zoomed = tree;

function position(element, cell) {
  for (const side of ["left", "top", "width", "height"]) element.style[side] = `${Math.max(0, cell[side])}px`;
}

function tint(element, part) {
  const share = data.peakBytes ? part.size / data.peakBytes : 0;
  element.style.background = part.overhead ? "var(--cuda-context)" : `rgba(var(--map), ${(0.14 + 0.5 * Math.sqrt(share)).toFixed(3)})`;
}

/** A name as far as it fits: modules are told apart by its end. */
function ending(part, width) {
  // About 7.6 pixels a letter at this size.
  const most = Math.max(3, Math.floor((width - 16) / 7.6));
  return part.overhead || part.name.length <= most ? part.name : `\u2026${part.name.slice(1 - most)}`;
}

function drawMap() {
  const map = byId("map");
  clear(map);
  const box = { left: 0, top: 0, width: map.clientWidth, height: map.clientHeight };
  for (const cell of squarify(opened(zoomed), box)) {
    if (cell.width < 2 || cell.height < 2) continue;
    const part = cell.item;
    const label = `${part.name}: ${formatSize(part.size)}, ${formatShare(part.size / (data.peakBytes || 1))}`;
    const element = node("button", { className: `cell${part.place ? " opens" : ""}`, title: label, parent: map });
    element.type = "button";
    element.setAttribute("aria-label", label + (part.place ? ", look inside" : ""));
    position(element, cell);
    tint(element, part);
    if (cell.width > 40 && cell.height > 20) node("span", { text: ending(part, cell.width), parent: element });
    if (cell.width > 60 && cell.height > 38 && !(part.place && cell.height < 80)) node("span", { text: formatSize(part.size), parent: element });
    if (!part.place) continue;
    element.addEventListener("click", () => zoom(part.place));
    if (cell.width > 60 && cell.height > 80) drawInside(element, part.place, cell);
  }
  drawCrumbs();
}

function drawInside(element, place, cell) {
  const inside = { left: 4, top: 40, width: cell.width - 10, height: cell.height - 46 };
  for (const inner of squarify(parts(place), inside)) {
    if (inner.width < 3 || inner.height < 3) continue;
    const child = node("span", { className: "inner", parent: element });
    position(child, inner);
    tint(child, inner.item);
    if (inner.width > 34 && inner.height > 16) node("span", { text: inner.item.name, parent: child });
  }
}

function zoom(place) {
  zoomed = place;
  drawMap();
  byId("crumbs").lastChild.focus?.();
}

function drawCrumbs() {
  const crumbs = byId("crumbs");
  clear(crumbs);
  const path = [];
  for (let place = zoomed; place; place = place.parent) path.unshift(place);
  path.forEach((place, index) => {
    if (index) node("span", { text: "\u203a", parent: crumbs });
    const button = node("button", { text: index ? place.name : "whole peak", parent: crumbs });
    button.type = "button";
    if (place === zoomed) button.setAttribute("aria-current", "true");
    button.addEventListener("click", () => zoom(place));
  });
  node("span", { text: formatSize(zoomed.size), className: "quiet", parent: crumbs });
}
