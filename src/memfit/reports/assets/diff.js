// The page of a real device's snapshot and its simulation: what differs, by kind, operator and line.

function fillTable(title, titles, rows, className, numMono) {
  const columns = titles.map((name) => [name.replace(/^[>|]/, ""), name.startsWith(">")]);
  const body = rowsOf(byId("groups"), title, columns, className);
  for (const cells of rows) {
    addRow(body, cells.map((text, index) => [text, columns[index][1] ? "number" : index < numMono ? "mono" : ""]));
  }
}

fillTable("Memory", ...data.levels, "", 0);
for (const [title, rows] of data.kinds) fillTable(title, data.columns, rows, "wide", 3);
fillHead();
fillFoot([`Made by memfit, version ${data.memfit}.`, "Measured: from the snapshot of a real device. Simulated: computed for the same program."]);
