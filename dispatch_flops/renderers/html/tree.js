// Wraps the columns of modules with the queries that the chart and the table make.

const TOP = -1;             // above the model and what ran outside it, if anything did

const plainClass = (name) => name.replace(/^\d+ x /, "");  // of identical layers

function makeTree(columns) {
  const below = columns.parent.map(() => []);
  const tops = [];
  columns.parent.forEach((parent, index) => (parent < 0 ? tops : below[parent]).push(index));
  const children = (index) => (index === TOP ? tops : below[index]);
  const sets = (views) => Object.fromEntries(Object.entries(views).map(([view, list]) => [view, new Set(list)]));
  const bounds = sets(columns.lower_bound), inexact = sets(columns.inexact);
  const isCost = (metric) => ["flops", "macs", "bytes"].includes(metric);
  const column = (metric, view) => (isCost(metric) || metric === "latency" ? columns[metric][view] ?? columns[metric].all : columns[metric]);
  const value = (index, metric, view) => column(metric, view)[index];
  // factor: of several identical modules, of which the value is one's.
  const text = (index, metric, view, write, factor = 1) => {
    const found = value(index, metric, view);
    const written = write(found === null ? null : found * factor);
    if (metric === "latency") return about(written, (inexact[view] ?? inexact.all).has(index));
    return isCost(metric) ? atLeast(written, (bounds[view] ?? bounds.all).has(index)) : written;
  };
  // The part that a module has of everything; those of siblings may add up to more, where they
  // share parameters.
  const share = (index, metric, view, factor = 1) => {
    const whole = tops.reduce((sum, top) => sum + value(top, metric, view), 0);
    const part = index === TOP ? whole : value(index, metric, view);
    return part === null ? null : ratio(part * factor, whole);
  };
  const label = (index) => (index === TOP ? "Everything that ran" : columns.name[index] || columns.class_name[index]);

  // A row below a run of identical modules has the figures of one: times is how many there are.
  const times = columns.parent.map(() => 1);
  const levels = columns.parent.map(() => 0);
  columns.parent.forEach((parent, index) => {
    if (parent < 0) return;
    times[index] = times[parent] * columns.modules[parent];
    levels[index] = levels[parent] + 1;
  });

  // Areas must add up, but measured times and shared parameters need not. So an area is at least
  // the sum of the areas in it. Parents precede their children, hence the reverse order.
  const sizes = new Map();
  function areas(metric, view) {
    const key = `${metric}/${view}`;
    if (!sizes.has(key)) {
      const size = column(metric, view).map((v, index) => (v ?? 0) * times[index]);
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

  const isRun = (index) => index !== TOP && columns.modules[index] > 1;
  // The chart draws a run as one area: the row "each" below it is not an area of its own.
  const inner = (index) => (isRun(index) ? below[below[index][0]] : children(index));
  const above = (index) => (columns.parent[index] >= 0 ? columns.parent[index] : tops.length === 1 ? null : TOP);
  const parent = (index) => {
    if (index === TOP) return null;
    const found = above(index);
    return found !== null && found !== TOP && columns.parent[found] >= 0 && isRun(columns.parent[found]) ? columns.parent[found] : found;
  };

  return {
    columns, children, inner, parent, value, text, share, areas, label, isRun, times, levels,
    top: tops.length === 1 ? tops[0] : TOP,
    isEach: (index) => columns.parent[index] >= 0 && isRun(columns.parent[index]),
    hasAny: (metric, view) => (column(metric, view) ?? []).some((v) => v),
  };
}
