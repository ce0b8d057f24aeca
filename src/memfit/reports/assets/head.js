// What the heads and feet of all pages have in common.

function fillVerdict() {
  const [sign, tone] = data.fits === null ? ["?", "unsure"] : data.fits ? ["\u2713", "good"] : ["\u2715", "bad"];
  byId("headline").textContent = data.headline;
  byId("verdict").textContent = data.demand;
  byId("badge").textContent = `${sign} ${data.answer}`;
  byId("badge").classList.add(tone);
  const list = byId("figures");
  for (const [label, value, origin] of data.figures) {
    const entry = node("div", { parent: list });
    node("dt", { text: label, parent: entry });
    const field = node("dd", { text: value, parent: entry });
    if (origin) node("span", { text: origin, className: "origin", parent: field });
  }
}

function fillNotes() {
  const notes = byId("notes");
  for (const [code, text, source] of data.notes) {
    const item = node("li", { text: `${text} `, parent: notes });
    node("code", { text: source ? `${code}, ${source}` : code, parent: item });
  }
  if (!data.notes.length) node("li", { text: "None.", parent: notes });
}
