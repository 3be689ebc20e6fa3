// The module tree as an icicle or treemap below one module, limited to what can be seen.

const MOST_LEVELS = 7;      // drawn below the module in focus
const MOST_AREAS = 420;     // drawn at once; more are slow and cannot be distinguished
const MOST_SIBLINGS = 40;
const LINE_HEIGHT = 14;     // pixels
const CHARACTER = 6.4;      // mean width in pixels
const TOP = -1;             // above the model and what ran outside it, if anything did

const FILLS = {
  light: ["#9cc0e4", "#f3bf8a", "#aad6a3", "#e6a4b0", "#c9b0dc", "#e0d080", "#97d4cc", "#d0b3a6"],
  dark: ["#386693", "#93602a", "#417540", "#8a4456", "#6a4e84", "#776922", "#2f746d", "#6f5a51"],
};
const PLAIN = { light: ["#e9edf2", "#dfe5ec"], dark: ["#262c35", "#2f3641"] };

const theme = () => (document.documentElement.dataset.theme === "dark" ? "dark" : "light");
const cssColour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const plainClass = (name) => name.replace(/^\d+ x /, "");  // of folded layers

// Wraps the columns of modules with the queries that the chart makes.
function makeTree(columns) {
  const below = columns.parent.map(() => []);
  const tops = [];
  columns.parent.forEach((parent, index) => (parent < 0 ? tops : below[parent]).push(index));
  const children = (index) => (index === TOP ? tops : below[index]);
  const sets = (views) => Object.fromEntries(Object.entries(views).map(([view, list]) => [view, new Set(list)]));
  const bounds = sets(columns.lower_bound), inexact = sets(columns.inexact);
  const column = (metric, view) => (metric === "params" ? columns.params : columns[metric][view] ?? columns[metric].all);
  const value = (index, metric, view) => column(metric, view)[index];
  const isLowerBound = (index, view) => (bounds[view] ?? bounds.all).has(index);
  const isInexact = (index, view) => (inexact[view] ?? inexact.all).has(index);
  const text = (index, metric, view, write) => {
    const written = write(value(index, metric, view));
    if (metric === "latency") return about(written, isInexact(index, view));
    return metric === "params" ? written : atLeast(written, isLowerBound(index, view));
  };
  const label = (index) => (index === TOP ? "Everything that ran" : columns.name[index] || columns.class_name[index]);

  // Areas must add up, but measured times and shared parameters need not. So an area is at least
  // the sum of the areas in it. Parents precede their children, hence the reverse order.
  const sizes = new Map();
  function areas(metric, view) {
    const key = `${metric}/${view}`;
    if (!sizes.has(key)) {
      const size = column(metric, view).map((v) => v ?? 0);
      const sums = new Float64Array(size.length);
      for (let i = size.length - 1; i >= 0; i -= 1) {
        size[i] = Math.max(size[i], sums[i]);
        if (columns.parent[i] >= 0) sums[columns.parent[i]] += size[i];
      }
      sizes.set(key, size);
    }
    const size = sizes.get(key);
    return (index) => (index === TOP ? tops.reduce((sum, top) => sum + size[top], 0) : size[index]);
  }

  return {
    columns, children, value, text, areas, label, isLowerBound,
    top: tops.length === 1 ? tops[0] : TOP,
    parent: (index) => (index === TOP ? null : columns.parent[index] >= 0 ? columns.parent[index] : tops.length === 1 ? null : TOP),
    hasAny: (metric, view) => (metric === "params" ? columns.params : columns[metric][view] ?? []).some((v) => v),
  };
}

// Returns the areas to draw below one module, opening the largest first up to the limit. Modules
// beyond it are drawn as one area per parent. Each is {id, parent, index, size, level}, and rest is
// the number of modules that such an area stands for.
function visible(tree, focus, size) {
  const drawn = [{ id: String(focus), parent: "", index: focus, size: size(focus), level: 0 }];
  const open = [drawn[0]];
  while (open.length && drawn.length < MOST_AREAS) {
    const area = open.splice(largest(open), 1)[0];
    const below = tree.children(area.index).filter((child) => size(child) > 0);
    const room = Math.min(MOST_SIBLINGS, MOST_AREAS - drawn.length);
    const kept = below.length <= room ? below : heaviest(below, size, room);
    for (const child of kept) {
      const made = { id: String(child), parent: area.id, index: child, size: size(child), level: area.level + 1 };
      drawn.push(made);
      if (made.level < MOST_LEVELS) open.push(made);
    }
    if (kept.length < below.length) {
      const shown = new Set(kept);
      const rest = below.filter((child) => !shown.has(child));
      const total = rest.reduce((sum, child) => sum + size(child), 0);
      drawn.push({ id: `rest ${area.id}`, parent: area.id, index: area.index, size: total, level: area.level + 1, rest: rest.length });
    }
  }
  return drawn;
}

function largest(areas) {
  let best = 0;
  for (let i = 1; i < areas.length; i += 1) if (areas[i].size > areas[best].size) best = i;
  return best;
}

// Returns the n largest, in the model's order.
function heaviest(indices, size, n) {
  const kept = new Set([...indices].sort((a, b) => size(b) - size(a)).slice(0, n));
  return indices.filter((index) => kept.has(index));
}

function areaColour(tree, area, classes) {
  const rank = area.rest || area.index === TOP ? -1 : classes.indexOf(plainClass(tree.columns.class_name[area.index]));
  return rank >= 0 ? FILLS[theme()][rank % FILLS.light.length] : PLAIN[theme()][area.level % 2];
}

// Returns as much of name, class and number as fits on up to three lines, or "".
// room: {characters, pixels} of the area. Plotly hides text that is too large all the same.
function areaText(tree, area, whole, write, room) {
  if (room.pixels < LINE_HEIGHT) return "";
  if (area.rest) return `… ${exactText(area.rest)} more`;
  const { columns } = tree, i = area.index;
  const label = tree.label(i), aClass = i === TOP || !columns.name[i] ? "" : columns.class_name[i];
  const fits = (text) => text.length <= room.characters;
  const clipped = (text) => plotText(text, room.characters);
  const together = aClass && fits(`${label} · ${aClass}`);
  const name = together ? clipped(`${label} · ${aClass}`) : clipped(label);
  const number = [write(i), fractionText(ratio(area.size, whole))].filter(Boolean).join(" · ");
  if (aClass && !together && room.pixels >= 3 * LINE_HEIGHT + 4) return `${name}<br>${clipped(aClass)}<br>${number}`;
  if (room.pixels >= 2 * LINE_HEIGHT + 2) return `${name}<br>${number}`;
  return fits(`${label}  ${number}`) ? `${plotText(label)}  ${number}` : name;
}

// An icicle's columns are equally wide and its heights are shares; a treemap's areas vary.
function roomOf(place, shape, areas) {
  if (shape !== "icicle") return () => ({ characters: 40, pixels: Infinity });
  const levels = 1 + Math.max(...areas.map((area) => area.level));
  const characters = Math.max(8, Math.floor(((place.clientWidth - 34) / levels - 8) / CHARACTER));
  return (area) => ({ characters, pixels: place.clientHeight * area.size / areas[0].size });
}

function areaHover(tree, area, view, whole) {
  if (area.rest) return `${exactText(area.rest)} smaller modules<br>${fractionText(ratio(area.size, whole))} of all<br>click to list them below`;
  if (area.index === TOP) return tree.label(TOP);
  const { columns } = tree, i = area.index;
  const figure = (metric, write) => tree.text(i, metric, view, write);
  const lines = [
    `<b>${plotText(columns.fqn[i] || columns.class_name[i])}</b>`,
    plotText(`${columns.class_name[i]}(${columns.extra_repr[i]})`),
    "",
    `FLOPs ${figure("flops", countText)} · MACs ${figure("macs", countText)}`,
    `Params ${paramsText(columns.params[i])} · Bytes ${figure("bytes", bytesText)}`,
    `Latency ${figure("latency", secondsText)} · Calls ${exactText(columns.calls[i])}`,
    `${fractionText(ratio(area.size, whole))} of all`,
  ];
  return lines.join("<br>");
}

// state: {focus, metric, view, shape}. Resolves to the areas that were drawn.
async function drawTree(place, tree, state, classes, write) {
  const size = tree.areas(state.metric, state.view);
  const whole = size(tree.top);
  const areas = visible(tree, state.focus, size);
  const room = roomOf(place, state.shape, areas);
  const trace = {
    type: state.shape,
    ids: areas.map((area) => area.id),
    labels: areas.map((area) => (area.rest ? "…" : plotText(tree.label(area.index), 40))),
    parents: areas.map((area) => area.parent),
    values: areas.map((area) => area.size),
    text: areas.map((area) => areaText(tree, area, whole, write, room(area))),
    customdata: areas.map((area) => areaHover(tree, area, state.view, whole)),
    hovertemplate: "%{customdata}<extra></extra>",
    textinfo: "text",
    branchvalues: "total",
    sort: false,
    pathbar: { visible: false },
    marker: { colors: areas.map((area) => areaColour(tree, area, classes)), line: { width: areas.length > 150 ? 0.5 : 1, color: cssColour("--panel") }, pad: { t: 22, l: 3, r: 3, b: 3 } },
    tiling: state.shape === "icicle" ? { orientation: "h", pad: 0 } : { packing: "squarify", pad: 2 },
    textfont: { color: cssColour("--ink") },
    textposition: state.shape === "icicle" ? "middle left" : "top left",
    leaf: { opacity: 1 },
  };
  const layout = {
    margin: { t: 4, l: 0, r: 34, b: 4 },
    paper_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: cssColour("--ink") },
    uniformtext: { minsize: 11, mode: "hide" },
    hoverlabel: hoverLabel(),
    modebar: modeBar(),
  };
  await Plotly.react(place, [trace], layout, PLOT_CONFIG);
  return areas;
}

const PLOT_CONFIG = { responsive: true, displaylogo: false, modeBarButtons: [["toImage"]] };
const modeBar = () => ({ bgcolor: "rgba(0,0,0,0)", color: cssColour("--quiet"), activecolor: cssColour("--ink") });
const hoverLabel = () => ({ align: "left", bgcolor: cssColour("--panel"), bordercolor: cssColour("--quiet"), font: { color: cssColour("--ink"), size: 13 } });
