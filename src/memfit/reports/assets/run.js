// What happened to the script: where it ran out, what would help, how its batches vary.

function fillRun() {
  const run = data.run;
  if (!run) return;
  const parts = byId("run-parts");
  if (run.failure) addFailure(parts, run.failure);
  for (const text of run.details) node("li", { text, parent: byId("run-details") });
  if (run.scan.length) {
    node("h3", { text: "Batches of the script's loader", parent: parts });
    const list = node("ul", { className: "notes", parent: parts });
    for (const text of run.scan) node("li", { text, parent: list });
  }
  if (run.scanFailure) addFailure(parts, run.scanFailure);
  if (run.advice.length) addAdvice(parts, run.advice);
  if (run.redirected.length) {
    const title = "Files that went elsewhere, so that yours were not overwritten";
    const body = rowsOf(parts, title, [["the script's path"], ["where it is"]]);
    for (const paths of run.redirected) {
      addRow(body, paths.map((text) => [text, "mono"]));
    }
  }
  byId("run").hidden = !run.details.length && !parts.children.length;
}

function addFailure(parent, failure) {
  if (failure.code) node("pre", { text: `${failure.source}  ${failure.code}`, parent });
  node("p", { text: failure.message, className: "quiet", parent });
  const body = rowsOf(parent, failure.title, [["category"], ["bytes", true], ["share", true], [""]]);
  for (const [name, size, share] of failure.rows) {
    const cells = addRow(body, ["", [formatSize(size), "number"], [formatShare(share), "number"], ""]);
    nameCategory(cells[0], name);
    const bar = node("span", { parent: node("span", { className: "track", parent: cells[3] }) });
    bar.style.width = `${100 * share}%`;
    if (!data.overheads.includes(name)) bar.style.background = colour(name);
  }
}

function addAdvice(parent, advice) {
  const columns = [["change"], ["saves", true], ["leaves", true], ["results"], ["origin"], ["how"]];
  const body = rowsOf(parent, "Changes that would save most, each alone", columns, "wide");
  for (const [title, saves, leaves, fits, keeps, origin, how] of advice) {
    const cells = addRow(body, [title, [saves, "number"], [leaves, "number"], keeps, [origin, "quiet"], [how, "mono"]]);
    if (fits === null) continue;
    node("br", { parent: cells[2] });
    node("span", { text: fits ? "fits" : "too much", className: fits ? "good" : "bad", parent: cells[2] });
  }
}
