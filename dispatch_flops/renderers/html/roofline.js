// Modules and operators against the machine's limits, both axes logarithmic.

const AXES = { left: 62, right: 14, top: 12, bottom: 46 };
const DASHES = ["none", "7 4", "2 3", "9 3 2 3"];

function drawRoofline(place, data) {
  const width = place.clientWidth, height = place.clientHeight;
  const points = pointsOf(data).filter(rateOf);
  const peaks = Object.entries(data.peaks);
  const intensities = [...points.map((point) => point.intensity), ...peaks.map(([, peak]) => peak / data.bytes_per_s)];
  const x = logScale(intensities, AXES.left, width - AXES.right);
  const y = logScale([...points.map(rateOf), ...peaks.map(([, peak]) => peak)], height - AXES.bottom, AXES.top);
  place.replaceChildren(drawing(width, height,
    ...axis(x, (at) => ({ x1: at, x2: at, y1: AXES.top, y2: height - AXES.bottom }), (at) => ({ x: at, y: height - AXES.bottom + 16, "text-anchor": "middle" }), powerText, width / 90),
    ...axis(y, (at) => ({ x1: AXES.left, x2: width - AXES.right, y1: at, y2: at }), (at) => ({ x: AXES.left - 6, y: at + 4, "text-anchor": "end" }), (value) => scaled(value).trimEnd(), height / 40),
    drawn("text", { x: (AXES.left + width) / 2, y: height - 8, "text-anchor": "middle", text: "Arithmetic intensity, FLOPs per byte" }),
    drawn("text", { x: 4, y: AXES.top + 8, text: "FLOP/s" }),
    ...peaks.map(([dtype, peak], index) => roof(dtype, peak, data.bytes_per_s, x, y, DASHES[index % DASHES.length])),
    ...points.map((point) => mark(point, x(point.intensity), y(rateOf(point))))));
}

// Returns the position of a value between two pixels, with a third of a decade around the values.
function logScale(values, from, to) {
  const low = Math.log10(Math.min(...values)) - 0.33, high = Math.log10(Math.max(...values)) + 0.33;
  const scale = (value) => from + (to - from) * (Math.log10(value) - low) / (high - low);
  return Object.assign(scale, { low, high });
}

// A power of ten with all its digits.
const powerText = (value) => String(Number(value.toPrecision(1)));

function axis(scale, line, at, write, most) {
  const step = Math.max(1, Math.ceil((scale.high - scale.low) / most));
  const parts = [];
  for (let power = Math.ceil(scale.low); power <= scale.high; power += step) {
    const where = scale(10 ** power);
    parts.push(drawn("line", { ...line(where), class: "grid" }), drawn("text", { ...at(where), text: write(10 ** power) }));
  }
  return parts;
}

// The slope of the bandwidth up to the ridge, then the peak.
function roof(dtype, peak, bytesPerS, x, y, dash) {
  const low = Math.max(10 ** x.low, 10 ** y.low / bytesPerS), ridge = peak / bytesPerS, high = 10 ** x.high;
  const corners = [[low, low * bytesPerS], [ridge, peak], [high, peak]].map(([at, rate]) => `${x(at)},${y(rate)}`);
  return drawn("g", { title: `${dtype} roof, ${rateText(peak)}` }, drawn("polyline", { points: corners.join(" "), class: "roof", "stroke-dasharray": dash }));
}

const pointsOf = (data) => [...data.modules.map((point) => ({ ...point, kind: "module" })), ...data.operators.map((point) => ({ ...point, kind: "operator" }))];
const rateOf = (point) => point.achieved ?? point.attainable;
const isAbove = (point) => point.achieved !== null && point.attainable !== null && point.achieved > point.attainable;

// Circles are modules, diamonds operators; unmeasured points are hollow, at the attainable FLOP/s.
function mark(point, x, y) {
  const kind = `point ${point.kind}${point.achieved === null ? " hollow" : ""}${isAbove(point) ? " above" : ""}`;
  const shape = point.kind === "module" ? drawn("circle", { cx: x, cy: y, r: 4.5 }) : drawn("path", { d: `M${x} ${y - 6}l6 6l-6 6l-6-6z` });
  return drawn("g", { class: kind, title: pointText(point) }, shape);
}

function pointText(point) {
  return [
    clipped(point.name),
    clipped(point.about),
    `${atLeast(countText(point.flops), point.lower_bound)} FLOPs · ${numberText(point.intensity)} FLOPs/byte`,
    `achieved ${atLeast(rateText(point.achieved), point.lower_bound)} of ${rateText(point.attainable)} attainable`
      + (ratio(point.achieved, point.attainable) === null ? "" : ` (${atLeast(fractionText(ratio(point.achieved, point.attainable)), point.lower_bound)})`),
    isAbove(point) ? "above the roof" : point.bound ? `bound by ${point.bound}` : "",
  ].filter(Boolean).join("\n");
}

function fillRoofline(data) {
  const roofline = data.roofline;
  if (!roofline) {
    byId("roofline-note").textContent = "Peak FLOP/s and bandwidth of this device are not known. Name a machine when you make the report.";
    return;
  }
  const points = pointsOf(roofline);
  const notes = [`${roofline.machine}, ${scaled(roofline.bytes_per_s)}B/s. Points of modules are their own operators in the forward pass; points of operators are all their calls.`];
  if (roofline.modules_left_out) notes.push(`The ${exactText(roofline.modules_left_out)} modules with the fewest FLOPs are not drawn.`);
  if (points.some((point) => point.lower_bound)) notes.push("Points with the mark ≥ have operators of no known cost; FLOPs per byte and attainable rates are of what was counted.");
  if (roofline.no_peak.length) notes.push(`No peak is known for ${roofline.no_peak.join(", ")}.`);
  byId("roofline-note").textContent = notes.join(" ");
  const above = points.filter(isAbove).length;
  byId("roofline-above").hidden = !above;
  byId("roofline-above").textContent = `${exactText(above)} ${above === 1 ? "point lies" : "points lie"} above the roof (ringed). `
    + "Bytes are counted as if every operator read and wrote memory: tensors that stay in a cache, and operators that are fused, move fewer. "
    + "A point above a flat roof means that a count, the time or the peak is wrong.";
  if (!points.some(rateOf)) return;
  byId("roofline").hidden = false;
  byId("roofline-legend").replaceChildren(
    ...[["module", "Module"], ["operator", "Operator"], ["module hollow", "Hollow: not measured, drawn at the roof"]].map(([kind, text]) => element("span", {}, drawing(14, 14, drawn("g", { class: `point ${kind}` }, kind === "operator" ? drawn("path", { d: "M7 1l6 6l-6 6l-6-6z" }) : drawn("circle", { cx: 7, cy: 7, r: 4.5 }))), text)),
    ...Object.entries(roofline.peaks).map(([dtype, peak], index) => element("span", {}, drawing(30, 14, drawn("line", { x1: 0, x2: 28, y1: 7, y2: 7, class: "roof", "stroke-dasharray": DASHES[index % DASHES.length] })), `${dtype} roof, ${rateText(peak)}`)));
  drawOnResize(byId("roofline"), () => drawRoofline(byId("roofline"), roofline));
  byId("roofline-points").hidden = false;
  const number = (label, key, write) => ({ label, value: (row) => row[key], text: (row) => write(row[key]) });
  const counted = (label, key, write) => ({ ...number(label, key, write), text: (row) => atLeast(write(row[key]), row.lower_bound) });
  makeTable(byId("roofline-table"), {
    caption: "The points of the roofline, the most FLOPs first", rows: [...points].sort((a, b) => b.flops - a.flops),
    columns: [
      { ...textColumn("Name", (row) => row.name, "name"), isHeader: true }, textColumn("Kind", (row) => row.kind), textColumn("About", (row) => row.about),
      counted("FLOPs", "flops", countText), number("FLOPs/byte", "intensity", numberText),
      counted("Achieved", "achieved", rateText), number("Attainable", "attainable", rateText),
      textColumn("Bound by", (row) => (isAbove(row) ? "above the roof" : row.bound ?? "")),
    ],
  });
}
