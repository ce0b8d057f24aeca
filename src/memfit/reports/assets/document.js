// What every part of the page builds on: the data, elements that hold text only, and the wording of numbers.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const NAMESPACE = byId("plot").namespaceURI;

// Names reach the document through this function only, and as text only.
function node(tag, { text, className, parent, title } = {}) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  if (title) element.title = title;
  if (parent) parent.appendChild(element);
  return element;
}

function shape(tag, attributes, parent, text) {
  const element = document.createElementNS(NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  parent.appendChild(element);
  return element;
}

const UNITS = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];

function formatSize(bytes) {
  if (bytes === null) return "unknown";
  const size = Math.abs(bytes);
  for (const [unit, factor] of UNITS) {
    if (size >= factor) return `${(bytes / factor).toFixed(size < 10 * factor ? 2 : 1)} ${unit}`;
  }
  return `${bytes} B`;
}

function formatShare(share) {
  return share > 0 && share < 0.001 ? "<0.1%" : `${(100 * share).toFixed(1)}%`;
}

const colour = (category) => `var(--${category.toLowerCase().replaceAll(" ", "-")})`;
const byName = (a, b) => a.localeCompare(b, "en", { numeric: true });
const clear = (element) => element.replaceChildren();

function swatch(parent, category, className = "") {
  const element = node("span", { className: `swatch ${className}`, parent });
  if (category) element.style.background = colour(category);
}

function heads(table, columns) {
  const row = node("tr", { parent: node("thead", { parent: table }) });
  return columns.map(([text, number]) => {
    const head = node("th", { text, className: number ? "number" : "", parent: row });
    head.scope = "col";
    return head;
  });
}

/** A row of a table: of each cell its text, or its text and its class. Returns the cells. */
function addRow(body, cells, className = "") {
  const row = node("tr", { className, parent: body });
  return cells.map((cell) => {
    const [text, name] = Array.isArray(cell) ? cell : [cell];
    return node("td", { text, className: name, parent: row });
  });
}

/** The name of a category with its colour; the overheads have none. */
function nameCategory(cell, name, isCategory = !data.overheads.includes(name)) {
  if (isCategory) swatch(cell, name);
  node("span", { text: name, parent: cell });
}

function legendEntry(text, category, className) {
  const item = node("span", { parent: byId("legend") });
  swatch(item, category, className);
  node("span", { text, parent: item });
}

function rowsOf(parent, title, columns, className = "") {
  node("h3", { text: title, parent });
  const box = node("div", { className: "scroll", parent });
  box.tabIndex = 0;
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", title);
  const table = node("table", { className, parent: box });
  heads(table, columns);
  return node("tbody", { parent: table });
}

/** On a narrow screen each row of a table with many columns is a card, whose cells know their titles; bars are left out. */
function nameCells(table) {
  const titles = [...table.querySelectorAll("thead th")].map((head) => head.textContent);
  table.classList.toggle("barred", titles.length > 1 && !titles.at(-1));
  if (titles.filter(Boolean).length < 4) return;
  table.classList.add("cards");
  for (const row of table.querySelectorAll("tbody tr")) {
    [...row.cells].forEach((cell, index) => (cell.dataset.title = titles[index] || ""));
  }
}

new MutationObserver((records) => {
  new Set(records.map(({ target }) => target.closest("table"))).forEach((table) => table && nameCells(table));
}).observe(document.body, { childList: true, subtree: true });

function fillHead() {
  const [sign, tone] = data.fits === null ? ["?", "unsure"] : data.fits ? ["\u2713", "good"] : ["\u2715", "bad"];
  byId("headline").textContent = data.headline;
  byId("verdict").textContent = data.demand;
  byId("badge").textContent = `${sign} ${data.answer}`;
  byId("badge").classList.add(tone);
  for (const text of data.details ?? [data.certainty]) if (text) node("li", { text, parent: byId("details") });
  byId("failure").textContent = data.failure ?? "";
  byId("failure").hidden = !data.failure;
  for (const [label, value, origin] of data.figures) {
    const entry = node("div", { parent: byId("figures") });
    node("dt", { text: label, parent: entry });
    const field = node("dd", { text: value, parent: entry });
    if (origin) node("span", { text: origin, className: "origin", parent: field });
  }
}

/** The notes, and the lines at the foot of the page. */
function fillFoot(lines) {
  const notes = byId("notes");
  for (const [code, text, source] of data.notes) {
    const item = node("li", { text: `${text} `, parent: notes });
    node("code", { text: source ? `${code}, ${source}` : code, parent: item });
  }
  if (!data.notes.length) node("li", { text: "None.", parent: notes });
  for (const text of data.ranges ?? []) node("li", { text, parent: byId("ranges") });
  if (data.ranges?.length) byId("assumed").hidden = false;
  for (const text of lines) node("p", { text, parent: byId("footer") });
}

const ORIGINS = "Simulated: computed from a trace of the step. Measured: read on a device. Assumed: a documented guess.";

function redrawOnResize(redraw) {
  let drawnWidth = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth === drawnWidth) return;
    drawnWidth = window.innerWidth;
    redraw();
  });
}
