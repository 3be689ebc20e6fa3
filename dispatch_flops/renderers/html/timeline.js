// Memory over the operators of a run: bytes of each role, stacked, with the peak and the capacity.

const TIME_AXES = { left: 66, right: 14, top: 26, bottom: 50 };
const PHASE_STRIP = 7;       // pixels of the strip that shows the phases
const MOST_CAPACITY = 4;     // times the peak; a higher capacity is named, and not drawn

// The device with the highest peak is shown; others are shown on request.
function fillTimelines(place, memory) {
  memory.timelines.forEach((timeline, index) => {
    const title = `Over the run, on ${timeline.device}`;
    const part = element("div", { id: `memory-timeline-${index}` });
    place.append(...(index ? [element("details", {}, element("summary", { text: title }), part)] : [element("h3", { text: title }), part]));
    fillTimeline(part, timeline, memory);
  });
}

// Fills a place with the chart of one device, its legend, and a table of the same numbers.
function fillTimeline(place, timeline, memory) {
  const roles = memory.roles.filter((role) => timeline.bytes[role]);
  const chart = element("div", { className: "plot small", role: "img", "aria-label": `Memory over the operators that ran; ${peakText(timeline)}. The table below has the same numbers` });
  const table = element("div", { id: `${place.id}-table` });
  const phases = [...new Set(timeline.moments.map(([, phase]) => phase))];
  place.replaceChildren(
    ...(timeline.capacity ? [element("p", { className: "quiet", text: capacityNote(timeline) })] : []),
    element("div", { className: "legend" },
      ...roles.toReversed().map((role) => element("span", {}, swatch(roleFill(role, memory)), role)),
      element("span", { text: "Phase:" }), ...phases.map((phase) => element("span", {}, swatch(phaseFill(phase)), phase))),
    chart,
    element("details", {}, element("summary", { text: "Moments as a table" }), table));
  drawOnResize(chart, () => drawTimeline(chart, timeline, roles, memory));
  makeTable(table, {
    caption: `The most memory in each interval of operators, in order, on ${timeline.device}`,
    rows: timeline.operators.map((operators, index) => ({ operators, index })),
    placeholder: "Search by module, operator or phase", found: ({ index }) => momentAt(timeline, index).join(" "),
    columns: [
      { label: "Operators run", isHeader: true, value: (row) => row.operators, text: (row) => exactText(row.operators) },
      { label: "Bytes", value: (row) => timeline.total[row.index], text: (row) => bytesText(timeline.total[row.index]), exact: (row) => exactText(timeline.total[row.index]) },
      ...roles.map((role) => ({ label: role, value: (row) => timeline.bytes[role][row.index], text: (row) => bytesText(timeline.bytes[role][row.index]), exact: (row) => exactText(timeline.bytes[role][row.index]) })),
      ...["Module", "Phase", "Operator"].map((label, part) => textColumn(label, (row) => momentAt(timeline, row.index)[part], part === 0 ? "name" : "")),
    ],
  });
}

const momentAt = (timeline, index) => timeline.moments[timeline.at[index]];
const peakText = (timeline) => {
  const [module, phase, operator] = momentAt(timeline, timeline.peak);
  return `peak ${bytesText(timeline.total[timeline.peak])} at ${[module, phase, operator].filter(Boolean).join(", ")}`;
};

function capacityNote({ capacity, total, peak }) {
  const share = fractionText(ratio(total[peak], capacity.bytes));
  return `The peak takes ${share} of the ${bytesText(capacity.bytes)} of ${capacity.name}${total[peak] > capacity.bytes ? ": it does not fit" : ""}.`;
}

function drawTimeline(place, timeline, roles, memory) {
  const width = place.clientWidth, height = place.clientHeight;
  const { left, right, top, bottom } = TIME_AXES;
  const { operators, total, peak, capacity } = timeline;
  const most = total[peak];
  const hasCapacity = Boolean(capacity) && capacity.bytes <= MOST_CAPACITY * most;
  const ceiling = 1.04 * Math.max(most, hasCapacity ? capacity.bytes : 0) || 1;
  const edges = edgesOf(operators);
  const x = (value) => left + (width - left - right) * (value - edges[0]) / (edges.at(-1) - edges[0]);
  const y = (bytes) => height - bottom - (height - top - bottom) * bytes / ceiling;
  const at = edges.map((edge) => x(edge).toFixed(1));
  let lower = operators.map(() => 0);
  const bands = roles.map((role) => {
    const upper = lower.map((bytes, index) => bytes + timeline.bytes[role][index]);
    const band = drawn("path", { d: bandPath(at, upper.map(y), lower.map(y)), class: `band ${roleFill(role, memory)}` });
    lower = upper;
    return band;
  });
  const moments = operators.map((_, index) => drawn("rect", { class: "moment", x: at[index], y: top, width: Math.max(at[index + 1] - at[index], 0.1), height: height - top - bottom, title: momentText(timeline, roles, index) }));
  place.replaceChildren(drawing(width, height,
    ...ticks(ceiling, Math.max(2, height / 70)).map((value) => drawn("g", {}, drawn("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }), drawn("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end", text: bytesText(value) }))),
    ...bands,
    ...phaseStrip(timeline, at, height - bottom + 3),
    ...ticks(operators.at(-1), Math.max(2, width / 130)).filter((value) => value >= edges[0]).map((value) => drawn("text", { x: x(value), y: height - bottom + PHASE_STRIP + 18, "text-anchor": "middle", text: countText(value) })),
    drawn("text", { x: (left + width) / 2, y: height - 6, "text-anchor": "middle", text: "Operators that ran" }),
    ...(hasCapacity ? [capacityLine(capacity, left, width - right, y(capacity.bytes))] : []),
    ...peakMark(x(operators[peak]), y(most), height - bottom, width, bytesText(most)),
    ...moments));
}

// The borders of the intervals: halfway between the operators of two points.
function edgesOf(operators) {
  const inner = operators.slice(1).map((value, index) => (operators[index] + value) / 2);
  return [operators[0] - 0.5, ...inner, operators.at(-1) + 0.5];
}

// A band of steps: along the upper border, and back along the lower one.
function bandPath(at, upper, lower) {
  const last = upper.length - 1;
  const forth = upper.map((value, index) => `V${value.toFixed(1)}H${at[index + 1]}`);
  const back = lower.map((_, index) => `V${lower[last - index].toFixed(1)}H${at[last - index]}`);
  return `M${at[0]} ${lower[0].toFixed(1)}${forth.join("")}${back.join("")}Z`;
}

function phaseStrip(timeline, at, y) {
  const phases = timeline.at.map((moment) => timeline.moments[moment][1]);
  const starts = phases.flatMap((phase, index) => (phase === phases[index - 1] ? [] : [index]));
  return starts.map((start, position) => drawn("rect", { class: `phase-mark ${phaseFill(phases[start])}`, x: at[start], y, width: Math.max(at[starts[position + 1] ?? phases.length] - at[start], 0.5), height: PHASE_STRIP, title: phases[start] }));
}

function capacityLine(capacity, from, to, y) {
  return drawn("g", { class: "capacity" }, drawn("line", { x1: from, x2: to, y1: y, y2: y }), drawn("text", { x: from + 6, y: y - 5, text: `capacity ${bytesText(capacity.bytes)}` }));
}

function peakMark(x, y, bottom, width, text) {
  const isLeft = x < width / 2;
  return [drawn("g", { class: "peak-mark" },
    drawn("line", { x1: x, x2: x, y1: y, y2: bottom }), drawn("circle", { cx: x, cy: y, r: 4 }),
    drawn("text", { x: x + (isLeft ? 8 : -8), y: y - 8, "text-anchor": isLeft ? "start" : "end", text: `peak ${text}` }))];
}

function momentText(timeline, roles, index) {
  const [module, phase, operator] = momentAt(timeline, index);
  return [
    `${bytesText(timeline.total[index])} after ${exactText(timeline.operators[index])} operators`,
    clipped([module, phase, operator].filter(Boolean).join(", ")),
    ...roles.toReversed().filter((role) => timeline.bytes[role][index]).map((role) => `${role} ${bytesText(timeline.bytes[role][index])}`),
  ].join("\n");
}
