// Builds the page from its data.

const data = JSON.parse(byId("data").textContent);
const METRICS = {
  flops: ["FLOPs", countText], macs: ["MACs", countText], params: ["Params", paramsText],
  bytes: ["Bytes", bytesText], latency: ["Latency", secondsText],
};
const VIEW_NAMES = { all: "All", forward: "Forward", backward: "Backward", recompute: "Recompute", optimizer: "Optimizer" };
const viewName = (view) => VIEW_NAMES[view] ?? view;
const trees = { full: makeTree(data.modules), folded: data.folded && makeTree(data.folded) };
let tree = trees.folded ?? trees.full;
const state = { focus: tree.top, metric: "flops", view: "all", shape: "icicle" };
let moduleTable = null;
let listening = false;

// -- top of the page ---------------------------------------------------------------------------

function fillHeader() {
  const { facts, phases } = data;
  byId("title").textContent = data.title;
  const where = facts.filter(([label]) => ["Device", "torch"].includes(label)).map(([label, text]) => (label === "torch" ? `torch ${text}` : text));
  byId("subtitle").textContent = [...where, phases.length ? phases.join(" + ") : "nothing ran"].join(" · ");
  byId("facts").replaceChildren(...facts.flatMap(([label, text]) => [element("dt", { text: label }), element("dd", { text })]));
  byId("notes").replaceChildren(...data.notes.map((text) => element("li", { text })));
  byId("notes").hidden = !data.notes.length;
}

function fillHeadline() {
  const top = data.headline, bound = top.lower_bound;
  const lessParams = [];
  if (top.trainable_params !== top.params) lessParams.push(`${paramsText(top.trainable_params)} trainable`);
  if (top.active_params !== top.params) lessParams.push(`${paramsText(top.active_params)} active`);
  const phases = data.split.map((part) => `${part.phase} ${countText(part.flops)}`).join(", ");
  const cards = [
    ["Parameters", paramsText(top.params), [exactText(top.params), ...lessParams]],
    ["MACs", atLeast(countText(top.macs), bound), [exactText(top.macs)]],
    ["FLOPs", atLeast(countText(top.hardware_flops), bound), [exactText(top.hardware_flops), data.split.length > 1 ? phases : ""]],
    ["Bytes moved", atLeast(bytesText(top.bytes_total), bound), top.bytes_total ? [`${numberText(ratio(top.hardware_flops, top.bytes_total))} FLOPs/B`] : []],
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
  byId("uncounted-title").textContent = `Lower bound: ${exactText(rows.length)} operator${rows.length > 1 ? "s have" : " has"} no known cost`;
  makeTable(byId("uncounted-table"), {
    caption: "Numbers marked ≥ do not include their calls", rows,
    columns: [
      textColumn("Operator", (row) => row.op, "name"),
      { label: "Uncounted calls", value: (row) => row.calls, text: (row) => exactText(row.calls) },
      textColumn("Why", (row) => row.why, "name"),
    ],
  });
}

function fillSplit() {
  if (data.split.length < 2) return;
  const whole = data.split.reduce((sum, part) => sum + part.flops, 0);
  const colour = (part) => `var(--phase-${part.phase}, #888)`;
  const share = (part) => fractionText(ratio(part.flops, whole));
  byId("split").hidden = false;
  byId("split-bar").setAttribute("aria-label", data.split.map((part) => `${part.phase} ${share(part)}`).join(", "));
  byId("split-bar").replaceChildren(...data.split.filter((part) => part.flops).map((part) => {
    const piece = element("span", { title: `${part.phase}: ${share(part)} of FLOPs` });
    piece.style.flex = `${ratio(part.flops, whole)} 1 0`;
    piece.style.background = colour(part);
    return piece;
  }));
  const figure = (label, key, write) => ({
    label, value: (part) => part[key], text: (part) => (key === "seconds" ? about(write(part[key]), part.inexact) : atLeast(write(part[key]), part.lower_bound)), exact: (part) => (part[key] === null ? "" : String(part[key])),
  });
  makeTable(byId("split-table"), {
    caption: "Cost of each phase, inside and outside the model", rows: data.split,
    columns: [
      { label: "Phase", isText: true, value: (part) => part.phase, cell: (part) => {
        const swatch = element("span", { className: "swatch" });
        swatch.style.background = colour(part);
        return [swatch, viewName(part.phase)];
      } },
      figure("MACs", "macs", countText), figure("FLOPs", "flops", countText),
      { label: "% FLOPs", value: (part) => part.flops, text: share },
      figure("Bytes", "bytes", bytesText), figure("Latency", "seconds", secondsText),
    ],
  });
}

// -- modules -----------------------------------------------------------------------------------

function fillControls() {
  choices("metric", Object.keys(METRICS).map((key) => [key, METRICS[key][0]]));
  choices("view", data.views.map((view) => [view, viewName(data.views.length > 1 ? view : data.phases[0] ?? "all")]));
  choices("shape", [["icicle", "Icicle"], ["treemap", "Treemap"]]);
  byId("fold-label").hidden = !trees.folded;
  byId("fold").addEventListener("change", () => { useTree(byId("fold").checked ? trees.folded : trees.full); });
}

function choices(name, options) {
  for (const [value, label] of options) {
    const input = element("input", { type: "radio", name, value });
    input.checked = state[name] === value;
    input.addEventListener("change", () => { state[name] = value; showModules(); });
    byId(name).append(element("label", {}, input, element("span", { text: label })));
  }
}

function useTree(chosen, focus = chosen.top) {
  tree = chosen;
  byId("fold").checked = tree === trees.folded;
  focusOn(focus);
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
  for (const input of document.querySelectorAll("input[name=view]")) {
    input.disabled = state.metric === "params" || (state.metric === "latency" && !trees.full.hasAny("latency", input.value));
    input.parentElement.title = !input.disabled ? "" : state.metric === "params" ? "parameters do not belong to a phase" : "not measured";
  }
  const chosen = document.querySelector(`input[name=view][value=${state.view}]`);
  if (chosen.disabled && state.metric !== "params") {
    const fallback = document.querySelector("input[name=view]:not(:disabled)") ?? chosen;
    state.view = fallback.value;
    fallback.checked = true;
  }
}

function showModules() {
  allowChoices();
  drawChart();
  moduleTable.redraw();
}

async function drawChart() {
  const write = (index) => (index === TOP ? "" : tree.text(index, state.metric, state.view, METRICS[state.metric][1]));
  const areas = await drawTree(byId("tree"), tree, state, data.classes, write);
  drawCrumbs();
  drawLegend(areas);
  byId("tree-note").textContent = chartNote(areas);
  if (!listening) {
    listening = true;
    for (const shape of ["icicle", "treemap"]) byId("tree").on(`plotly_${shape}click`, clicked);
  }
}

function clicked(event) {
  const id = String(event.points[0].id);
  if (id.startsWith("rest ")) {
    const parent = Number(id.slice(5));
    moduleTable.setQuery(parent === TOP ? "" : tree.columns.fqn[parent]);
    byId("modules").scrollIntoView({ behavior: "smooth" });
  } else if (Number(id) === state.focus) {
    const parent = tree.parent(state.focus);
    if (parent !== null) focusOn(parent);
  } else if (tree.children(Number(id)).length) {
    focusOn(Number(id));
  }
  return false;  // the page moves the focus, not plotly
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
  // A long path shows its first and last modules.
  const shown = path.length > 9 ? [...path.slice(0, 2), null, ...path.slice(-6)] : path;
  byId("crumbs").replaceChildren(...shown.flatMap((at, position) => {
    const separator = position ? [element("span", { text: "›", "aria-hidden": "true" })] : [];
    if (at === null) return [...separator, "…"];
    if (at === state.focus) return [...separator, element("strong", { text: tree.label(at), "aria-current": "true" })];
    const button = element("button", { type: "button", className: "link", text: tree.label(at) });
    button.addEventListener("click", () => focusOn(at));
    return [...separator, button];
  }));
}

function drawLegend(areas) {
  const seen = new Set(areas.filter((area) => !area.rest && area.index !== TOP).map((area) => plainClass(tree.columns.class_name[area.index])));
  byId("legend").replaceChildren(...data.classes.flatMap((name, rank) => {
    if (!seen.has(name)) return [];
    const swatch = element("span", { className: "swatch" });
    swatch.style.background = FILLS[theme()][rank % FILLS.light.length];
    return [element("span", {}, swatch, name)];
  }));
}

function fillModules() {
  const { full } = trees, { columns } = full;
  const figure = (label, metric, write) => ({
    label,
    value: (i) => full.value(i, metric, state.view),
    text: (i) => full.text(i, metric, state.view, write),
    exact: (i) => (full.value(i, metric, state.view) === null ? "" : exactText(full.value(i, metric, state.view))),
  });
  const share = (i) => ratio(full.value(i, "flops", state.view), full.areas("flops", state.view)(full.top));
  moduleTable = makeTable(byId("modules"), {
    caption: "Inclusive figures of each module in the phase chosen above, initially in the model's order",
    placeholder: "Search modules by name or class",
    rows: columns.fqn.map((_, index) => index),
    found: (i) => `${columns.fqn[i]} ${columns.class_name[i]}`,
    columns: [
      { label: "Module", isText: true, className: "name", value: (i) => columns.fqn[i], cell: (i) => {
        const button = element("button", { type: "button", className: "link", text: columns.fqn[i] || columns.class_name[i], title: "Show in the chart" });
        button.addEventListener("click", () => { useTree(full, i); byId("modules-title").scrollIntoView({ behavior: "smooth" }); });
        return [button, ...(columns.extra_repr[i] ? [element("span", { className: "extra", text: columns.extra_repr[i] })] : [])];
      } },
      textColumn("Class", (i) => columns.class_name[i]),
      { label: "Calls", value: (i) => columns.calls[i], text: (i) => exactText(columns.calls[i]) },
      figure("Params", "params", paramsText), figure("MACs", "macs", countText), figure("FLOPs", "flops", countText),
      { label: "% FLOPs", value: share, text: (i) => fractionText(share(i)) },
      figure("Bytes", "bytes", bytesText), figure(lacksBackward() ? "Fwd latency" : "Latency", "latency", secondsText),
    ],
  });
}

// -- operators and roofline --------------------------------------------------------------------

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
      textColumn("Operator", (row) => row.op, "name"),
      { label: "Kind", isText: true, value: (row) => row.kind, cell: (row) => [element("span", { text: kindText(row), className: row.uncounted ? "unknown" : "" })] },
      textColumn("Phases", (row) => row.phases),
      textColumn("Dtype", (row) => row.dtype ?? ""),
      { label: "Calls", value: (row) => row.calls, text: (row) => exactText(row.calls) },
      figure("MACs", "macs", countText), figure("FLOPs", "flops", countText),
      { label: "% FLOPs", value: (row) => row.share, text: (row) => fractionText(row.share) },
      figure("Bytes", "bytes", bytesText),
      { label: "FLOPs/B", title: "Arithmetic intensity", value: (row) => row.intensity, text: (row) => numberText(row.intensity) },
      ...(rows.some((row) => row.latency !== null) ? [figure("Time", "latency", secondsText)] : []),
    ],
  });
}

function kindText(row) {
  return row.uncounted && row.uncounted < row.calls ? `${row.kind}, ${exactText(row.uncounted)} uncounted` : row.kind;
}

function fillRoofline() {
  const roofline = data.roofline;
  if (!roofline) {
    byId("roofline-note").textContent = "Peak FLOP/s and bandwidth of this device are not known. Name a machine when you make the report.";
    return;
  }
  const notes = [`${roofline.machine}, ${scaled(roofline.bytes_per_s)}B/s. Points of modules are their own operators in the forward pass; points of operators are all their calls.`];
  if (roofline.modules_left_out) notes.push(`The ${exactText(roofline.modules_left_out)} modules with the fewest FLOPs are not drawn.`);
  if (roofline.no_peak.length) notes.push(`No peak is known for ${roofline.no_peak.join(", ")}.`);
  byId("roofline-note").textContent = notes.join(" ");
  byId("roofline").hidden = false;
  drawRoofline(byId("roofline"), roofline);
}

// -- light and dark ----------------------------------------------------------------------------

function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
}

function fillCommunication() {
  const rows = data.communication;
  if (!rows.length) return;
  byId("communication-section").hidden = false;
  const number = (label, key, write) => ({ label, value: (row) => row[key], text: (row) => write(row[key]) });
  makeTable(byId("communication"), {
    caption: "What this rank sends and receives, by the module that causes it", rows,
    columns: [
      textColumn("Module", (row) => row.module, "name"),
      ...["phase", "kind", "group", "dtype"].map((key) => textColumn(`${key[0].toUpperCase()}${key.slice(1)}`, (row) => row[key])),
      number("Calls", "calls", exactText),
      number("Payload", "payload", bytesText),
      number("On the bus", "bus", bytesText),
    ],
  });
}

function redrawPlots() {
  drawChart();
  if (data.roofline) drawRoofline(byId("roofline"), data.roofline);
}

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
setTheme(prefersDark.matches);
prefersDark.addEventListener("change", (event) => { setTheme(event.matches); redrawPlots(); });
byId("theme").addEventListener("click", () => { setTheme(theme() === "light"); redrawPlots(); });
// Print in the light theme.
let themeOnScreen = null;
addEventListener("beforeprint", () => { themeOnScreen = theme(); if (themeOnScreen === "dark") { setTheme(false); redrawPlots(); } });
addEventListener("afterprint", () => { if (themeOnScreen === "dark") { setTheme(true); redrawPlots(); } });

fillHeader();
fillUncounted();
fillHeadline();
fillSplit();
fillControls();
fillModules();
showModules();
fillOperators();
fillCommunication();
fillRoofline();
window.dispatchFlops = { countText, paramsText, bytesText, secondsText, fractionText, rateText };
