// Builds the report of a profile from the page's data.

const METRICS = {
  flops: ["FLOPs", countText], macs: ["MACs", countText], params: ["Params", paramsText],
  bytes: ["Bytes", bytesText], latency: ["Latency", secondsText],
};
const RUN_LABELS = { Comm: "Communication", Memory: "Peak memory" };
const trees = { full: makeTree(data.modules), folded: data.folded && makeTree(data.folded) };
let tree = trees.folded ?? trees.full;
const state = { focus: tree.top, metric: "flops", view: "all", shape: "icicle" };
let moduleTable = null, heldTable = null;

// -- top of the page ---------------------------------------------------------------------------

function fillHeader() {
  const { facts, phases, run } = data;
  const above = new Set(run.map(([label]) => label));
  byId("subtitle").textContent = phases.length ? phases.map(viewName).join(", ").toLowerCase() : "nothing ran";
  byId("run").replaceChildren(...described(run.map(([label, text]) => [RUN_LABELS[label] ?? label, text.replaceAll(">=", "≥")])));
  byId("facts").replaceChildren(...described(facts.filter(([label]) => !above.has(label))));
  byId("notes").replaceChildren(...data.notes.map((text) => element("li", { text })));
  byId("notes").hidden = !data.notes.length;
}

function fillHeadline() {
  const top = data.headline, bound = top.lower_bound;
  const lessParams = [];
  if (top.trainable_params !== top.params) lessParams.push(`${paramsText(top.trainable_params)} trainable`);
  if (top.active_params !== top.params) lessParams.push(`${paramsText(top.active_params)} active`);
  const phases = data.split.map((part) => `${part.phase} ${atLeast(countText(part.flops), part.lower_bound)}`).join(", ");
  const cards = [
    ["Parameters", paramsText(top.params), [exactText(top.params), ...lessParams]],
    ["MACs", atLeast(countText(top.macs), bound), [exactText(top.macs)]],
    ["FLOPs", atLeast(countText(top.hardware_flops), bound), [exactText(top.hardware_flops), data.split.length > 1 ? phases : ""]],
    ["Bytes moved", atLeast(bytesText(top.bytes_total), bound), top.bytes_total ? [`${numberText(ratio(top.hardware_flops, top.bytes_total))} FLOPs/byte`] : []],
    ["Latency", about(secondsText(top.seconds), top.seconds_are_inexact), [top.seconds_of, top.seconds ? atLeast(rateText(ratio(top.hardware_flops, top.seconds)), bound) : ""]],
    ["MFU", atLeast(fractionText(top.mfu), top.mfu_is_lower_bound), [top.mfu === null ? top.why_no_mfu : `hardware: ${atLeast(fractionText(top.hfu), top.hfu_is_lower_bound)}`, top.warning]],
  ];
  byId("headline").replaceChildren(...cards.map(([label, value, details]) => element("div", {},
    element("dt", { text: label }),
    element("dd", { text: value, className: "value" }),
    ...details.filter(Boolean).map((text) => element("dd", { text, className: "detail" })))));
}

function fillUncounted() {
  const rows = data.uncounted;
  if (!rows.length) return;
  byId("uncounted").hidden = false;
  byId("uncounted-title").textContent = `Lower bound: ${exactText(rows.length)} operator${rows.length > 1 ? "s have" : " has"} no known cost; shares are of what was counted`;
  makeTable(byId("uncounted-table"), {
    caption: "Numbers marked ≥ do not include their calls", rows,
    columns: [
      { ...textColumn("Operator", (row) => row.op, "name"), isHeader: true },
      { label: "Uncounted calls", value: (row) => row.calls, text: (row) => exactText(row.calls) },
      textColumn("Why", (row) => row.why, "name"),
    ],
  });
}

function fillSplit() {
  if (data.split.length < 2) return;
  const whole = data.split.reduce((sum, part) => sum + part.flops, 0);
  const share = (part) => fractionText(ratio(part.flops, whole));
  byId("split").hidden = false;
  byId("split-bar").setAttribute("aria-label", data.split.map((part) => `${part.phase} ${share(part)}`).join(", "));
  byId("split-bar").replaceChildren(...data.split.filter((part) => part.flops).map((part) => {
    const piece = element("span", { className: phaseFill(part.phase), title: `${part.phase}: ${share(part)} of FLOPs` });
    piece.style.flex = `${ratio(part.flops, whole)} 1 0`;
    return piece;
  }));
  const figure = (label, key, write) => ({
    label, value: (part) => part[key], text: (part) => (key === "seconds" ? about(write(part[key]), part.inexact) : atLeast(write(part[key]), part.lower_bound)), exact: (part) => (part[key] === null ? "" : String(part[key])),
  });
  makeTable(byId("split-table"), {
    caption: "Cost of each phase, inside and outside the model", rows: data.split,
    columns: [
      { label: "Phase", isText: true, isHeader: true, value: (part) => part.phase, cell: (part) => [swatch(phaseFill(part.phase)), viewName(part.phase)] },
      figure("MACs", "macs", countText), figure("FLOPs", "flops", countText),
      { label: "% FLOPs", value: (part) => part.flops, cell: (part) => barCell(share(part), ratio(part.flops, whole)) },
      figure("Bytes", "bytes", bytesText),
      ...(data.split.some((part) => part.seconds !== null) ? [figure("Latency", "seconds", secondsText)] : []),
    ],
  });
}

// -- modules -----------------------------------------------------------------------------------

function fillControls() {
  const choices = {
    metric: Object.keys(METRICS).map((key) => [key, METRICS[key][0]]),
    view: data.views.map((view) => [view, viewName(data.views.length > 1 ? view : data.phases[0] ?? "all")]),
    shape: [["icicle", "Icicle"], ["treemap", "Treemap"]],
  };
  for (const [name, options] of Object.entries(choices)) segments(name, options, state[name], (value) => { state[name] = value; showModules(); });
  byId("fold-label").hidden = !trees.folded;
  byId("fold").addEventListener("change", () => { useTree(byId("fold").checked ? trees.folded : trees.full); });
}

function useTree(chosen) {
  tree = chosen;
  byId("fold").checked = tree === trees.folded;
  moduleTable.redraw();
  heldTable?.redraw();
  zoomTo(tree.top);
}

// Draws a module, or the first below it that does not hold all of its cost.
function zoomTo(index) {
  focusOn(settled(tree, index, tree.areas(state.metric, state.view)));
}

function focusOn(index) {
  state.focus = index;
  drawChart();
}

// Disables choices without data; a current choice without data falls back to the first with data.
function allowChoices() {
  for (const input of document.querySelectorAll("input[name=metric]")) {
    input.disabled = input.value === "latency" && !data.views.some((view) => trees.full.hasAny("latency", view));
    input.parentElement.title = input.disabled ? "not measured" : "";
  }
  const views = [...document.querySelectorAll("input[name=view]")];
  for (const input of views) {
    input.disabled = state.metric === "params" || (state.metric === "latency" && !trees.full.hasAny("latency", input.value));
    input.parentElement.title = !input.disabled ? "" : state.metric === "params" ? "parameters do not belong to a phase" : "not measured";
  }
  const chosen = views.find((input) => input.value === state.view);
  if (chosen.disabled && state.metric !== "params") {
    const fallback = views.find((input) => !input.disabled) ?? chosen;
    state.view = fallback.value;
    fallback.checked = true;
  }
}

function showModules() {
  allowChoices();
  moduleTable.relabel(SHARE, `% ${METRICS[state.metric][0]}`);
  moduleTable.redraw();
  zoomTo(state.focus);
}

function drawChart() {
  const write = (index) => (index === TOP ? "" : tree.text(index, state.metric, state.view, METRICS[state.metric][1], tree.times[index]));
  const areas = drawTree(byId("tree"), tree, state, data.classes, write);
  drawCrumbs();
  drawLegend(areas);
  byId("tree-note").textContent = chartNote(areas);
}

function clicked(id) {
  if (id.startsWith("rest ")) {
    const parent = Number(id.slice(5));
    moduleTable.setQuery(parent === TOP ? "" : tree.columns.fqn[parent]);
    byId("modules").scrollIntoView();
  } else if (Number(id) === state.focus) {
    const parent = tree.parent(state.focus);
    if (parent !== null) focusOn(parent);
  } else if (tree.inner(Number(id)).length) {
    zoomTo(Number(id));
  }
}

function chartNote(areas) {
  if (!(areas[0].size > 0)) return "Nothing to show.";
  const notes = ["Click an area to zoom in, or the first one to zoom out."];
  const hidden = areas.reduce((sum, area) => sum + (area.rest ?? 0), 0);
  if (hidden) notes.push(`${exactText(hidden)} small modules are drawn together.`);
  if (state.metric === "latency") notes.push(latencyNote());
  if (state.metric === "params") notes.push("Parameters do not belong to a phase.");
  return notes.join(" ");
}

function latencyNote() {
  if (state.view !== "all" || !data.phases.includes("backward")) return "";
  return lacksBackward() ? "Latency of the forward pass; the backward pass was not measured per module." : "Latency of the forward and backward passes.";
}

const lacksBackward = () => data.phases.includes("backward") && !trees.full.columns.latency.backward?.some((seconds) => seconds !== null);

function drawCrumbs() {
  const path = [];
  for (let at = state.focus; at !== null; at = tree.parent(at)) path.unshift(at);
  const named = (at) => {
    const share = tree.share(at, state.metric, state.view, tree.times[at]);
    return share === null ? tree.label(at) : `${tree.label(at)} ${fractionText(share)}`;
  };
  // A long path shows its first and last modules.
  const shown = path.length > 9 ? [...path.slice(0, 2), null, ...path.slice(-6)] : path;
  byId("crumbs").replaceChildren(...shown.flatMap((at, position) => {
    const separator = position ? [element("span", { text: "›", "aria-hidden": "true" })] : [];
    if (at === null) return [...separator, "…"];
    if (at === state.focus) return [...separator, element("strong", { text: named(at), "aria-current": "true", "data-label": tree.label(at) })];
    const button = element("button", { type: "button", className: "link", text: named(at) });
    button.addEventListener("click", () => { focusOn(at); byId("crumbs").querySelector("button")?.focus(); });
    return [...separator, button];
  }));
}

function drawLegend(areas) {
  const seen = new Set(areas.filter((area) => !area.rest && area.index !== TOP).map((area) => plainClass(tree.columns.class_name[area.index])));
  const named = data.classes.flatMap((name, rank) => (seen.has(name) ? [element("span", {}, swatch(`fill-${rank}`), name)] : []));
  const others = [...seen].some((name) => !data.classes.includes(name));
  byId("legend").replaceChildren(...(named.length ? [element("span", { text: "Class:" }), ...named] : []), ...(named.length && others ? [element("span", {}, swatch("fill-plain"), "other classes")] : []));
}

const SHARE = 0;  // position of the column of shares
const sharedByTrees = {
  placeholder: "Search modules by name or class",
  tree: () => tree, searched: trees.full,
  found: (i) => `${trees.full.columns.fqn[i]} ${trees.full.columns.class_name[i]}`,
  onName: (of, i) => {
    if (of !== tree) useTree(of);
    zoomTo(of.isEach(i) ? of.parent(i) : i);
    byId("modules-title").scrollIntoView();
  },
};

function fillModules() {
  const viewOf = (metric) => (metric === "latency" && lacksBackward() ? "forward" : state.view);
  const figure = (label, metric, write) => ({
    label, metric,
    value: (of, i) => of.value(i, metric, viewOf(metric)),
    text: (of, i) => (of.value(i, metric, viewOf(metric)) === null ? "" : of.text(i, metric, viewOf(metric), write)),
    exact: (of, i) => (of.value(i, metric, viewOf(metric)) === null || metric === "latency" ? "" : exactText(of.value(i, metric, viewOf(metric)))),
  });
  const share = (of, i) => of.share(i, state.metric, state.view);
  const numbers = [
    figure("FLOPs", "flops", countText), figure("MACs", "macs", countText), figure("Params", "params", paramsText),
    figure("Bytes", "bytes", bytesText), figure("Payload", "payload", bytesText), figure(lacksBackward() ? "Forward" : "Latency", "latency", secondsText),
    figure("Calls", "calls", exactText),
  ].filter(({ metric }) => (metric === "latency" ? data.views : ["all"]).some((view) => trees.full.hasAny(metric, view)));
  const outputs = trees.full.columns.output.some(Boolean) ? [{ ...textColumn("Output", (of, i) => of.columns.output[i]), value: (of, i) => of.columns.output[i] }] : [];
  moduleTable = makeTreeTable(byId("modules"), {
    ...sharedByTrees,
    caption: "Modules with all below them, in the phase chosen above, by cost. A row \u201ceach\u201d is one of several identical modules.",
    sorted: SHARE,
    columns: [
      { label: "% FLOPs", value: share, cell: (of, i) => barCell(fractionText(share(of, i)), share(of, i)) },
      ...numbers, ...outputs,
    ],
  });
}

// -- operators and communication ------------------------------------------------------------------

function fillOperators() {
  const rows = data.operators;
  const figure = (label, key, write, title) => ({
    label, title, value: (row) => row[key], text: (row) => atLeast(write(row[key]), row.uncounted > 0 && key !== "latency"),
    exact: (row) => (row[key] === null ? "" : key === "latency" ? String(row[key]) : exactText(row[key])),
  });
  makeTable(byId("operators"), {
    caption: "Every operator that ran, in the model and outside it, by compute dtype; initially most FLOPs first",
    placeholder: "Search operators by name, phase or dtype", rows,
    found: (row) => `${row.op} ${row.kind} ${row.phases} ${row.dtype ?? ""}`,
    columns: [
      { ...textColumn("Operator", (row) => row.op, "name"), isHeader: true },
      { label: "% FLOPs", value: (row) => row.share, cell: (row) => barCell(fractionText(row.share), row.share) },
      figure("FLOPs", "flops", countText), figure("MACs", "macs", countText), figure("Bytes", "bytes", bytesText),
      { label: "FLOPs/byte", title: "Arithmetic intensity", value: (row) => row.intensity, text: (row) => numberText(row.intensity) },
      ...(rows.some((row) => row.latency !== null) ? [figure("Time", "latency", secondsText)] : []),
      { label: "Kind", isText: true, value: (row) => row.kind, cell: (row) => [element("span", { text: kindText(row), className: row.uncounted ? "unknown" : "" })] },
      textColumn("Phases", (row) => row.phases),
      textColumn("Dtype", (row) => row.dtype ?? ""),
      { label: "Calls", value: (row) => row.calls, text: (row) => exactText(row.calls) },
    ],
  });
}

function kindText(row) {
  return row.uncounted && row.uncounted < row.calls ? `${row.kind}, ${exactText(row.uncounted)} uncounted` : row.kind;
}

function fillCommunication() {
  const rows = data.communication;
  if (!rows.length) return;
  byId("communication-section").hidden = false;
  const number = (label, key, write) => ({ label, value: (row) => row[key], text: (row) => write(row[key]) });
  makeTable(byId("communication"), {
    caption: "What this rank sends and receives, by the module that causes it", rows,
    columns: [
      { ...textColumn("Module", (row) => row.module, "name"), isHeader: true },
      ...["phase", "kind", "group", "dtype"].map((key) => textColumn(`${key[0].toUpperCase()}${key.slice(1)}`, (row) => row[key])),
      number("Calls", "calls", exactText),
      number("Payload", "payload", bytesText),
      number("On the bus", "bus", bytesText),
    ],
  });
}

fillHeader();
fillUncounted();
fillHeadline();
fillSplit();
fillControls();
fillModules();
showModules();
fillOperators();
heldTable = fillMemory(data, sharedByTrees);
fillCommunication();
fillRoofline(data);
byId("tree").addEventListener("click", (event) => { const area = event.target.closest(".area"); if (area) clicked(area.dataset.id); });
drawOnResize(byId("tree"), drawChart);
window.dispatchFlops = { numberText, countText, paramsText, bytesText, secondsText, fractionText, rateText };
