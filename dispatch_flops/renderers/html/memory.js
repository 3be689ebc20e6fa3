// Memory over the run, peaks by phase and role, a treemap of the highest, and what modules hold.

const ROLE_COLOURS = 10;     // roles of another release of dispatch_flops have none

const roleFill = (role, memory) => (memory.roles.indexOf(role) < ROLE_COLOURS ? `fill-${memory.roles.indexOf(role)}` : "fill-plain");

// As marked_bytes does in a printout.
const markedBytes = (count, memory) => (memory.approximate ? about(bytesText(count), true) : atLeast(bytesText(count), memory.lower_bound));

// tables: what the table of modules has in common with the one of costs.
// Returns the table of what modules hold; null where no memory was followed.
function fillMemory(data, tables) {
  const { memory } = data;
  if (!memory) return null;
  byId("memory-section").hidden = false;
  const notes = [`Peak ${memory.text.replace(">=", "≥")}.`];
  if (memory.decomposed.length) notes.push(`These ran on the meta device by other operators than a device's kernels: ${memory.decomposed.join(", ")}.`);
  if (memory.unseen.length) notes.push(`What these kernels allocate for themselves is not known: ${memory.unseen.join(", ")}.`);
  byId("memory-note").textContent = notes.join(" ");
  const roles = memory.roles.filter((role) => memory.peaks.some((peak) => peak.roles[role]));
  byId("memory-legend").replaceChildren(...roles.map((role) => element("span", {}, swatch(roleFill(role, memory)), role)));
  fillTimelines(byId("memory-timelines"), memory);
  const isOneDevice = memory.peaks.every((peak) => peak.device === memory.device);
  byId("memory-peaks").replaceChildren(...memory.peaks.map((peak) => {
    const parts = roles.filter((role) => peak.roles[role]).map((role) => {
      const part = element("span", { className: roleFill(role, memory), title: `${role}: ${bytesText(peak.roles[role])}` });
      part.style.width = `${100 * peak.roles[role] / memory.peak}%`;
      return part;
    });
    const label = `${peak.phase}${isOneDevice ? "" : ` on ${peak.device}`}`;
    const listed = roles.filter((role) => peak.roles[role]).map((role) => `${role} ${bytesText(peak.roles[role])}`).join(", ");
    return element("div", {}, element("dt", { text: `${label}: ${markedBytes(peak.bytes, memory)}` }), element("dd", {}, element("div", { className: "bar", role: "img", "aria-label": listed }, ...parts)));
  }));
  drawOnResize(byId("memory-map"), () => drawMemory(byId("memory-map"), memory));
  makeTable(byId("memory-table"), {
    caption: `What was allocated at the peak on ${memory.device}, the largest first`, rows: memory.uses,
    placeholder: "Search by role or module", found: (use) => `${use.role} ${use.module} ${use.phase}`,
    columns: [
      { label: "Role", isText: true, isHeader: true, value: (use) => use.role, cell: (use) => [swatch(roleFill(use.role, memory)), use.role] },
      textColumn("Module", (use) => use.module, "name"),
      { label: "% Peak", value: (use) => use.bytes, cell: (use) => barCell(fractionText(ratio(use.bytes, memory.peak)), ratio(use.bytes, memory.peak)) },
      { label: "Bytes", value: (use) => use.bytes, text: (use) => bytesText(use.bytes), exact: (use) => exactText(use.bytes) },
      textColumn("Allocated in", (use) => use.phase),
    ],
  });
  return data.modules.held && fillHeld(data, tables);
}

// What each module holds, with all below it.
function fillHeld({ memory }, tables) {
  byId("memory-held").hidden = false;
  const held = (of, index) => memory.held.reduce((sum, [name]) => sum + of.columns.held[name][index], 0);
  const share = (of, index) => ratio(held(of, index), held(of, of.columns.fqn.indexOf("")));
  const bytes = (label, value, write = bytesText) => ({ label, value, text: (of, index) => (value(of, index) === null ? "" : write(value(of, index))), exact: (of, index) => (value(of, index) === null ? "" : exactText(value(of, index))) });
  return makeTreeTable(byId("memory-modules"), {
    ...tables,
    caption: "What modules hold, with all below them. Activations are those kept for backward. Peak: the most that was allocated, by any module, while the module ran",
    sorted: 0,
    columns: [
      { label: "Held", value: held, cell: (of, index) => barCell(bytesText(held(of, index)), share(of, index)), exact: (of, index) => exactText(held(of, index)) },
      ...memory.held.map(([name, label]) => bytes(label, (of, index) => of.columns.held[name][index])),
      bytes("Peak", (of, index) => of.columns.peak[index], (count) => markedBytes(count, memory)),
    ],
  });
}

// The peak's roles, and in each the modules that allocated it.
function drawMemory(place, memory) {
  const areas = [{ id: "peak", parent: "", size: memory.peak, lines: ["Peak", "", markedBytes(memory.peak, memory)], fill: "fill-plain" }];
  const roles = Map.groupBy(memory.uses, (use) => use.role);
  for (const [role, uses] of roles) {
    const size = uses.reduce((sum, use) => sum + use.bytes, 0);
    const id = `role ${role}`;
    areas.push({ id, parent: "peak", size, lines: [role, "", `${bytesText(size)} · ${fractionText(ratio(size, memory.peak))}`], fill: roleFill(role, memory) });
    const drawnUses = uses.slice(0, MOST_SIBLINGS);
    drawnUses.forEach((use, index) => areas.push({ id: `${index} of ${id}`, parent: id, size: use.bytes, lines: [use.module || "before the run", "", bytesText(use.bytes)], fill: roleFill(role, memory) }));
    const rest = uses.slice(MOST_SIBLINGS);
    if (rest.length) areas.push({ id: `rest of ${id}`, parent: id, size: rest.reduce((sum, use) => sum + use.bytes, 0), lines: [`… ${exactText(rest.length)} more`, "", ""], fill: roleFill(role, memory) });
  }
  layOutTreemap(areas, place.clientWidth, place.clientHeight);
  const parents = new Set(areas.map((area) => area.parent));
  drawAreas(place, place.clientWidth, place.clientHeight, areas, { fill: (area) => area.fill, lines: (area) => area.lines, hover: (area) => area.lines.filter(Boolean).join("\n"), isTop: (area) => parents.has(area.id) });
}
