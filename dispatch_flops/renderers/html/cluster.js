// Builds the page of a cluster: figures over ranks, mesh dimensions, groups and modules by stage.

const WRITE = { macs: countText, flops: countText, bytes: bytesText, communication: bytesText, memory: bytesText, time: secondsText, params: paramsText };
const MOST_BARS = 512;       // ranks with a bar each; beyond, each set of equal ranks has one
const MOST_COLOURS = 10;     // stages that can be distinguished
const BAR_AXES = { left: 66, right: 14, top: 26, bottom: 36 };
const figureNames = new Map(data.figures);
const shownState = { figure: figureNames.has("flops") ? "flops" : data.figures[0]?.[0], view: data.views[0] };
const stages = [...new Set(data.ranks.map((row) => row.stage))].filter((stage) => stage !== null).sort((a, b) => a - b);
const stageFill = (stage) => (stage === null || stages.length > MOST_COLOURS ? "fill-0" : `fill-${stages.indexOf(stage)}`);

function fillHeader() {
  byId("subtitle").textContent = data.subtitle;
  byId("warnings").hidden = !data.warnings.length;
  byId("warnings").replaceChildren(...data.warnings.map((text) => element("p", { text })));
  byId("notes").hidden = !data.notes.length;
  byId("notes").replaceChildren(...data.notes.map((text) => element("li", { text })));
}

// -- figures over ranks --------------------------------------------------------------------------

const fromTo = (least, most) => (least === most ? most : `${least} to ${most}`);
const spreadText = (spread, part, write) => (spread ? `${spread.mark}${write(spread[part])}` : UNKNOWN);
const rangeText = (spread, write) => fromTo(spreadText(spread, "minimum", write), spreadText(spread, "maximum", write));
// Columns of what is uneven, where anything is; spreadOf(row) may be null.
function unevenColumns(rows, spreadOf) {
  if (!rows.some((row) => (spreadOf(row)?.straggler ?? null) !== null)) return [];
  const straggler = (row) => spreadOf(row)?.straggler ?? null;
  return [
    { label: "Max / mean", value: (row) => spreadOf(row)?.imbalance ?? null, text: (row) => numberText(spreadOf(row)?.imbalance) },
    { label: "Straggler", isText: true, value: straggler, text: (row) => (straggler(row) === null ? "" : `rank ${straggler(row)}`) },
  ];
}

function fillCards() {
  byId("headline").replaceChildren(...data.figures.map(([figure, label]) => {
    const spread = data.spreads[figure][shownState.view], write = WRITE[figure];
    const isShared = figure === "params" || figure === "time";  // replicas hold the same; ranks run at once
    const details = !spread ? [] : [
      spread.straggler === null && isShared ? "" : `a rank: ${rangeText(spread, write)}`,
      spread.straggler === null ? "equal on all ranks" : `max / mean ${numberText(spread.imbalance)}, straggler rank ${spread.straggler}`,
    ];
    return element("div", {},
      element("dt", { text: isShared ? `${label}, most of a rank` : `${label}, all ranks` }),
      element("dd", { text: spreadText(spread, isShared ? "maximum" : "total", write), className: "value" }),
      ...details.filter(Boolean).map((text) => element("dd", { text, className: "detail" })));
  }));
}

function fillControls() {
  segments("figure", data.figures, shownState.figure, (figure) => { shownState.figure = figure; showFigure(); });
  segments("view", data.views.map((view) => [view, viewName(view)]), shownState.view, (view) => { shownState.view = view; showFigure(); });
  byId("view").hidden = data.views.length < 2;
}

function showFigure() {
  fillCards();
  fillRanks();
  drawBars();
  fillMesh();
  fillGroups();
  moduleTable.redraw();
}

const valueOf = (row, figure = shownState.figure) => row.values[figure][shownState.view];
const valueText = (row, figure = shownState.figure) => {
  const text = WRITE[figure](valueOf(row, figure));
  return text === UNKNOWN ? text : `${row.marks[figure][shownState.view]}${text}`;
};
const chosen = () => ({ label: figureNames.get(shownState.figure), write: WRITE[shownState.figure], spread: data.spreads[shownState.figure][shownState.view] });

function fillRanks() {
  const { label, write, spread } = chosen();
  const dims = data.mesh.filter(({ is_stage }) => !is_stage).map(({ dim }) => dim);
  const isEven = !spread || spread.straggler === null;
  byId("ranks-note").textContent = !spread ? `${label} was not measured.`
    : isEven ? `${label}: ${spreadText(spread, "maximum", write)} on every rank.`
      : `${label}: ${rangeText(spread, write)}. Maximum / mean is ${numberText(spread.imbalance)}; rank ${spread.straggler} is the straggler.`;
  const others = data.figures.filter(([figure]) => figure !== shownState.figure);
  makeTable(byId("ranks"), {
    caption: "Ranks of one stage with equal figures share a row", rows: data.ranks,
    placeholder: "Search by rank or stage", found: (row) => `${row.ranks.map((rank) => `rank${rank} ${rank}`).join(" ")} stage${row.stage}`,
    columns: [
      { label: "Rank", isHeader: true, isText: true, value: (row) => row.ranks[0], cell: (row) => [swatch(stageFill(row.stage)), row.text] },
      ...(stages.length ? [{ label: "Stage", value: (row) => row.stage, text: (row) => String(row.stage) }] : []),
      { label, value: (row) => valueOf(row), cell: (row) => barCell(valueText(row), ratio(valueOf(row), spread?.maximum)), exact: (row) => exactValue(shownState.figure, valueOf(row)) },
      ...others.map(([figure, name]) => ({ label: name, value: (row) => valueOf(row, figure), text: (row) => valueText(row, figure), exact: (row) => exactValue(figure, valueOf(row, figure)) })),
      ...dims.map((dim) => textColumn(dim, (row) => row.at[dim] ?? "")),
    ],
  });
}

const exactValue = (figure, value) => (value === null || value === undefined ? "" : figure === "time" ? String(value) : exactText(value));

// A bar for each rank; the straggler has a border, and a line is the mean.
function drawBars() {
  const place = byId("bars"), width = place.clientWidth, height = place.clientHeight;
  const { label, write, spread } = chosen();
  const few = data.ranks.reduce((sum, row) => sum + row.ranks.length, 0) <= MOST_BARS;
  const bars = few ? data.ranks.flatMap((row) => row.ranks.map((rank) => ({ name: `rank ${rank}`, first: rank, row }))) : data.ranks.map((row) => ({ name: `ranks ${row.text}`, first: row.ranks[0], row }));
  bars.sort((a, b) => a.first - b.first);
  place.hidden = !spread || !(spread.maximum > 0);
  if (place.hidden) return;
  place.setAttribute("aria-label", `${label} of each rank. ${byId("ranks-note").textContent} The table below has the same numbers`);
  const { left, right, top, bottom } = BAR_AXES;
  const step = (width - left - right) / bars.length;
  const y = (value) => height - bottom - (height - top - bottom) * value / (1.04 * spread.maximum);
  const every = Math.max(1, Math.ceil(44 / step));
  const mean = spread.total / data.ranks.reduce((sum, row) => sum + (valueOf(row) === null ? 0 : row.ranks.length), 0);
  place.replaceChildren(drawing(width, height,
    ...ticks(1.04 * spread.maximum, 4).map((value) => drawn("g", {}, drawn("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }), drawn("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end", text: write(value) }))),
    ...bars.map(({ name, first, row }, index) => {
      const value = valueOf(row) ?? 0, isStraggler = spread.straggler === first;
      const gap = Math.min(6, step / 5), thick = Math.min(step - gap, 64);
      const at = left + index * step + (step - thick) / 2;
      const stage = row.stage === null ? "" : `, stage ${row.stage}`;
      return drawn("g", { class: `rank-bar ${stageFill(row.stage)}${isStraggler ? " straggler" : ""}`, "data-rank": first, title: `${name}${stage}: ${valueText(row)}${isStraggler ? ", the straggler" : ""}` },
        drawn("rect", { x: at, y: y(value), width: Math.max(thick, 0.5), height: Math.max(height - bottom - y(value), 0) }),
        ...(index % every ? [] : [drawn("text", { x: at + thick / 2, y: height - bottom + 15, "text-anchor": "middle", text: String(first) })]));
    }),
    drawn("text", { x: (left + width) / 2, y: height - 4, "text-anchor": "middle", text: few ? "Rank" : "First of the ranks with equal figures" }),
    ...(spread.straggler === null ? [] : [drawn("line", { class: "mean", x1: left, x2: width - right, y1: y(mean), y2: y(mean) })])));
  byId("ranks-legend").replaceChildren(
    ...(stages.length && stages.length <= MOST_COLOURS ? [element("span", { text: "Stage:" }), ...stages.map((stage) => element("span", {}, swatch(stageFill(stage)), String(stage)))] : []),
    ...(spread.straggler === null ? [] : [element("span", { text: `Framed: the straggler, rank ${spread.straggler}. Dashed: the mean, ${spread.mark}${write(mean)}.` })]));
}

// -- mesh dimensions and groups ------------------------------------------------------------------

function fillMesh() {
  byId("mesh-section").hidden = !data.mesh.length;
  const { label, write, spread: whole } = chosen();
  const spreadOf = (row, figure) => row.spreads[figure][shownState.view];
  byId("mesh").replaceChildren(...data.mesh.flatMap(({ dim, is_stage }, index) => [
    element("h3", { text: is_stage ? `Along ${dim}, the stages of the pipeline` : `Along ${dim}` }), element("div", { id: `mesh-${index}` }),
  ]));
  data.mesh.forEach(({ dim, rows }, index) => makeTable(byId(`mesh-${index}`), {
    caption: `Figures of one rank at each position of ${dim}; positions with equal figures share a row`, rows,
    columns: [
      { label: dim, isHeader: true, isText: true, value: (row) => row.first, text: (row) => row.text },
      { label, value: (row) => spreadOf(row, shownState.figure)?.maximum ?? null, cell: (row) => barCell(rangeText(spreadOf(row, shownState.figure), write), ratio(spreadOf(row, shownState.figure)?.maximum, whole?.maximum)) },
      ...unevenColumns(rows, (row) => spreadOf(row, shownState.figure)),
      ...data.figures.filter(([figure]) => figure !== shownState.figure).map(([figure, name]) => ({ label: name, value: (row) => spreadOf(row, figure)?.maximum ?? null, text: (row) => rangeText(spreadOf(row, figure), WRITE[figure]) })),
    ],
  }));
}

function fillGroups() {
  const rows = data.groups[shownState.view];
  byId("groups-section").hidden = !Object.values(data.groups).some((found) => found.length);
  const most = Math.max(...rows.map((row) => row.payload.maximum), 0);
  makeTable(byId("groups"), {
    caption: "What the ranks send and receive, by the groups of each mesh dimension and kind", rows,
    columns: [
      { ...textColumn("Group", (row) => row.group), isHeader: true },
      textColumn("Kind", (row) => row.kind),
      { label: "Size", title: "Ranks in a group", value: (row) => row.size, text: (row) => exactText(row.size) },
      { label: "Payload of a rank", value: (row) => row.payload.maximum, cell: (row) => barCell(rangeText(row.payload, bytesText), ratio(row.payload.maximum, most)) },
      ...unevenColumns(rows, (row) => row.payload),
      { label: "All ranks", title: "Payload of all ranks together", value: (row) => row.payload.total, text: (row) => bytesText(row.payload.total), exact: (row) => exactText(row.payload.total) },
      { label: "On the bus", title: "Of all ranks together", value: (row) => row.bus, text: (row) => bytesText(row.bus), exact: (row) => exactText(row.bus) },
      { label: "Calls", title: "Of all ranks together", value: (row) => row.calls, text: (row) => exactText(row.calls) },
    ],
  });
}

// -- modules -------------------------------------------------------------------------------------

// A cell has a number where the ranks agree, else minimum, maximum, imbalance and straggler.
const cellAt = (of, index, figure) => (of.columns.spreads[figure][shownState.view] ?? [])[index] ?? null;
const maximumOf = (cell) => (Array.isArray(cell) ? cell[1] : cell);

function makeModules() {
  const tree = makeTree(data.modules);
  const { left_out: leftOut } = data.modules;
  byId("modules-note").hidden = !leftOut;
  byId("modules-note").textContent = `${exactText(leftOut)} modules of deeper levels are not shown.`;
  const text = (figure) => (of, index) => {
    const cell = cellAt(of, index, figure), isBound = figure === "flops" && of.columns.lower_bound[shownState.view].includes(index);
    const write = (value) => atLeast(WRITE[figure](value), isBound);
    return cell === null ? "" : Array.isArray(cell) ? fromTo(write(cell[0]), write(cell[1])) : write(cell);
  };
  const whole = (of, index) => {
    let at = index;
    while (of.columns.parent[at] >= 0) at = of.columns.parent[at];
    return maximumOf(cellAt(of, at, "flops"));
  };
  const share = (of, index) => ratio(maximumOf(cellAt(of, index, "flops")), whole(of, index));
  const figure = (name, label) => ({ label, value: (of, index) => maximumOf(cellAt(of, index, name)), text: text(name) });
  const has = (name) => Object.values(data.modules.spreads[name]).some(Boolean);
  const isUneven = Object.values(data.modules.spreads.flops).some((column) => column?.some(Array.isArray));
  const uneven = (part) => (of, index) => { const cell = cellAt(of, index, "flops"); return Array.isArray(cell) ? cell[part] : null; };
  return makeTreeTable(byId("modules"), {
    caption: `Modules${stages.length ? " of each stage" : ""}, of one rank: with all below them, communication their own. Shares are of ${stages.length ? "the stage" : "the model"}; max / mean and straggler are of FLOPs`,
    placeholder: "Search modules by name or class", tree: () => tree, searched: tree, sorted: 0,
    found: (index) => `${data.modules.fqn[index]} ${data.modules.class_name[index]} ${data.modules.stage[index] === null ? "" : `stage ${data.modules.stage[index]}`}`,
    columns: [
      { label: "% FLOPs", value: share, cell: (of, index) => barCell(fractionText(share(of, index)), share(of, index)) },
      figure("flops", "FLOPs"),
      ...(isUneven ? [
        { label: "Max / mean", value: uneven(2), text: (of, index) => (uneven(2)(of, index) === null ? "" : numberText(uneven(2)(of, index))) },
        { label: "Straggler", isText: true, value: uneven(3), text: (of, index) => (uneven(3)(of, index) === null ? "" : `rank ${uneven(3)(of, index)}`) },
      ] : []),
      ...[["communication", "Own communication"], ["params", "Params"], ["time", "Time"]].filter(([name]) => has(name)).map(([name, label]) => figure(name, label)),
    ],
  });
}

fillHeader();
fillControls();
const moduleTable = makeModules();
showFigure();
drawOnResize(byId("bars"), drawBars);
