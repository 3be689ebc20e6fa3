// Modules and operators against the machine's limits, both axes logarithmic.

function drawRoofline(place, data) {
  const points = [...data.modules, ...data.operators];
  const spots = points.map((point) => point.intensity);
  const ridges = Object.values(data.peaks).map((peak) => peak / data.bytes_per_s);
  const low = Math.min(...spots, ...ridges) / 3, high = Math.max(...spots, ...ridges) * 3;
  const traces = [
    ...roofs(data, low, high),
    ...series("Modules", "circle", cssColour("--phase-forward"), data.modules),
    ...series("Operators", "diamond", cssColour("--phase-backward"), data.operators),
  ];
  const axis = { type: "log", gridcolor: cssColour("--line"), zeroline: false, linecolor: cssColour("--quiet"), exponentformat: "SI", dtick: 1 };
  const layout = {
    margin: { t: 10, l: 70, r: 20, b: 55 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: cssColour("--ink") },
    xaxis: { ...axis, title: { text: "Arithmetic intensity, FLOPs per byte" }, range: [Math.log10(low), Math.log10(high)] },
    yaxis: { ...axis, title: { text: "FLOP/s" } },
    legend: { orientation: "h", y: 1.08 },
    hovermode: "closest",
    hoverlabel: hoverLabel(),
    modebar: modeBar(),
  };
  return Plotly.react(place, traces, layout, PLOT_CONFIG);
}

// One roof per dtype: the slope of the bandwidth up to the ridge, then the peak.
function roofs(data, low, high) {
  const styles = ["solid", "dash", "dot", "dashdot"];
  return Object.entries(data.peaks).map(([dtype, peak], index) => {
    const ridge = peak / data.bytes_per_s;
    return {
      type: "scatter", mode: "lines", name: `${plotText(dtype)} roof, ${rateText(peak)}`,
      x: [low, ridge, high], y: [low * data.bytes_per_s, peak, peak],
      line: { color: cssColour("--quiet"), width: 2, dash: styles[index % styles.length] },
      hoverinfo: "skip",
    };
  });
}

// Measured points are filled; unmeasured ones are hollow, at the attainable FLOP/s.
function series(name, symbol, colour, points) {
  const traces = [[true, name], [false, `${name}, not measured: at the roof`]].map(([measured, label]) => {
    const some = points.filter((point) => (point.achieved !== null) === measured && (measured || point.attainable !== null));
    return {
      type: "scatter", mode: "markers", name: label,
      x: some.map((point) => point.intensity),
      y: some.map((point) => (measured ? point.achieved : point.attainable)),
      customdata: some.map(pointHover),
      hovertemplate: "%{customdata}<extra></extra>",
      marker: { symbol: measured ? symbol : `${symbol}-open`, color: colour, size: 9, opacity: 0.8, line: { width: measured ? 0 : 1.5, color: colour } },
    };
  });
  return traces.filter((trace) => trace.x.length);
}

function pointHover(point) {
  return [
    `<b>${plotText(point.name)}</b>`,
    plotText(point.about),
    `${countText(point.flops)} FLOPs · ${numberText(point.intensity)} FLOPs/B`,
    `achieved ${rateText(point.achieved)} of ${rateText(point.attainable)} attainable`
      + (ratio(point.achieved, point.attainable) === null ? "" : ` (${fractionText(ratio(point.achieved, point.attainable))})`),
    point.bound ? `bound by ${point.bound}` : "",
  ].filter(Boolean).join("<br>");
}
