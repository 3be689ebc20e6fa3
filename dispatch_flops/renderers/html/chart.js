// The module tree as an icicle or treemap below one module, limited to what can be seen.

const MOST_LEVELS = 7;      // drawn below the module in focus
const LEAST_COLUMN = 120;   // pixels of an icicle's column
const MOST_AREAS = 420;     // drawn at once; more are slow and cannot be distinguished
const MOST_SIBLINGS = 40;
const LINE_HEIGHT = 15;     // pixels
const CHARACTER = 6.6;      // mean width in pixels
const WHOLE = 0.995;        // a share that reads 100 % in whole percent

// Returns the areas to draw below one module, opening the largest first up to the limit. Modules
// beyond it are drawn as one area per parent. Each is {id, parent, index, size, level}, and rest is
// the number of modules that such an area stands for.
function visible(tree, focus, size, mostLevels) {
  const areas = [{ id: String(focus), parent: "", index: focus, size: size(focus), level: 0 }];
  const open = [areas[0]];
  while (open.length && areas.length < MOST_AREAS) {
    const area = open.splice(largest(open), 1)[0];
    const below = tree.inner(area.index).filter((child) => size(child) > 0);
    const room = Math.min(MOST_SIBLINGS, MOST_AREAS - areas.length);
    const kept = below.length <= room ? below : heaviest(below, size, room);
    for (const child of kept) {
      const made = { id: String(child), parent: area.id, index: child, size: size(child), level: area.level + 1 };
      areas.push(made);
      if (made.level < mostLevels) open.push(made);
    }
    if (kept.length < below.length) {
      const shown = new Set(kept);
      const rest = below.filter((child) => !shown.has(child));
      const total = rest.reduce((sum, child) => sum + size(child), 0);
      areas.push({ id: `rest ${area.id}`, parent: area.id, index: area.index, size: total, level: area.level + 1, rest: rest.length });
    }
  }
  return areas;
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

// Follows modules that hold all of their parent's cost: the path names them, no column shows them.
function settled(tree, focus, size) {
  let at = focus;
  for (;;) {
    const next = tree.inner(at).find((child) => size(child) >= WHOLE * size(at));
    if (next === undefined || !(size(at) > 0) || !tree.inner(next).some((child) => size(child) > 0)) return at;
    at = next;
  }
}

// -- layouts: each gives its areas x, y, width and height ---------------------------------------

// Columns are levels; the heights are shares.
function layOutIcicle(areas, width, height) {
  const column = width / (1 + Math.max(...areas.map((area) => area.level)));
  const byId = new Map(), next = new Map();
  for (const area of areas) {
    const parent = byId.get(area.parent);
    area.x = area.level * column;
    area.width = column;
    area.y = parent ? next.get(parent.id) : 0;
    area.height = parent ? parent.height * area.size / parent.size : height;
    if (parent) next.set(parent.id, area.y + area.height);
    next.set(area.id, area.y);
    byId.set(area.id, area);
  }
}

// Areas lie inside their parent's, below its title.
function layOutTreemap(areas, width, height, title = LINE_HEIGHT + 5, gap = 2) {
  const below = new Map(areas.map((area) => [area.id, []]));
  for (const area of areas) below.get(area.parent)?.push(area);
  Object.assign(areas[0], { x: 0, y: 0, width, height });
  const open = [areas[0]];
  while (open.length) {
    const area = open.pop();
    const head = area.height > 2 * title ? title : gap;
    const room = { x: area.x + gap, y: area.y + head, width: Math.max(area.width - 2 * gap, 0), height: Math.max(area.height - head - gap, 0) };
    // What is the module's own stays empty.
    const inside = below.get(area.id);
    const part = inside.reduce((sum, child) => sum + child.size, 0) / area.size;
    if (room.width > room.height) room.width *= part; else room.height *= part;
    squarify([...inside].sort((a, b) => b.size - a.size), room);
    open.push(...inside);
  }
}

// Bruls, Huizing, van Wijk: Squarified Treemaps, 2000. Rows are laid along the shorter side, and
// take one more area as long as that makes their worst aspect ratio better.
function squarify(areas, room) {
  let { x, y, width, height } = room;
  let left = areas.reduce((sum, area) => sum + area.size, 0);
  for (let start = 0; start < areas.length;) {
    const scale = left > 0 ? width * height / left : 0;
    const side = Math.min(width, height);
    let end = start, sum = 0, worst = Infinity;
    while (end < areas.length) {
      const total = (sum + areas[end].size) * scale;
      const ratios = [areas[start], areas[end]].map((area) => Math.max(side * side * area.size * scale / (total * total), total * total / (side * side * area.size * scale)));
      const now = Math.max(...ratios);
      if (end > start && !(now <= worst)) break;
      worst = now;
      sum += areas[end].size;
      end += 1;
    }
    const depth = side > 0 ? sum * scale / side : 0;
    let at = 0;
    for (const area of areas.slice(start, end)) {
      const length = sum > 0 ? side * area.size / sum : 0;
      Object.assign(area, width >= height ? { x, y: y + at, width: depth, height: length } : { x: x + at, y, width: length, height: depth });
      at += length;
    }
    if (width >= height) { x += depth; width -= depth; } else { y += depth; height -= depth; }
    left -= sum;
    start = end;
  }
}

// -- drawing -----------------------------------------------------------------------------------

// Draws areas with up to two lines of text each, as far as these fit. lines(area) has the name, what
// may follow it on its line, and a number.
function drawAreas(place, width, height, areas, { fill, lines, hover, isTop }) {
  const groups = areas.filter((area) => area.width > 0.4 && area.height > 0.4).map((area) => drawn("g", { class: "area", "data-id": area.id, "data-size": area.size, title: hover(area) },
    drawn("rect", { x: area.x, y: area.y, width: area.width, height: area.height, class: fill(area) }),
    ...textLines(area, lines(area), isTop(area))));
  place.replaceChildren(drawing(width, height, ...groups));
}

function textLines(area, lines, isTop) {
  const characters = Math.floor((area.width - 10) / CHARACTER);
  if (characters < 4) return [];
  const room = isTop ? Math.min(area.height, LINE_HEIGHT + 5) : area.height;
  const fitting = Math.floor((room - 2) / LINE_HEIGHT);
  if (fitting < 1) return [];
  const [name, more, number] = lines;
  const fits = (line) => line.length <= characters;
  const first = more && fits(`${name} · ${more}`) ? `${name} · ${more}` : name;
  const both = [`${first}  ${number}`, `${name}  ${number}`].find(fits);
  const shown = fitting === 1 ? [both ?? name] : [first, ...(fits(number) ? [number] : [])];
  const text = drawn("text", { x: area.x + 5 });
  const start = area.y + (isTop ? 0 : Math.max(0, (area.height - shown.length * LINE_HEIGHT) / 2));
  shown.forEach((line, position) => text.append(drawn("tspan", { x: area.x + 5, y: start + position * LINE_HEIGHT + 12, text: clipped(line, characters) })));
  return [text];
}

function fillOf(tree, area, classes) {
  const rank = area.rest || area.index === TOP ? -1 : classes.indexOf(plainClass(tree.columns.class_name[area.index]));
  return rank >= 0 ? `fill-${rank}` : "fill-plain";
}

function areaLines(tree, area, share, write) {
  if (area.rest) return [`… ${exactText(area.rest)} more`, "", ""];
  const { columns } = tree, i = area.index;
  const aClass = i === TOP || !columns.name[i] || columns.name[i] === columns.class_name[i] ? "" : columns.class_name[i];
  const number = [write(i), share === null ? "" : fractionText(share)].filter(Boolean).join(" · ");
  return [tree.label(i), aClass, number];
}

function areaHover(tree, area, view, share) {
  if (area.rest) return `${exactText(area.rest)} smaller modules\n${fractionText(share)} of all\nClick to list them below`;
  if (area.index === TOP) return tree.label(TOP);
  const { columns } = tree, i = area.index;
  const figure = (metric, write) => tree.text(i, metric, view, write);
  return [
    clipped(tree.isRun(i) ? tree.label(i) : columns.fqn[i] || columns.class_name[i]),
    clipped(`${columns.class_name[i]}(${columns.extra_repr[i]})`),
    tree.times[i] > 1 ? `one of ${exactText(tree.times[i])} alike; the area is that of all` : "",
    `FLOPs ${figure("flops", countText)} · MACs ${figure("macs", countText)}`,
    `Params ${paramsText(columns.params[i])} · Bytes ${figure("bytes", bytesText)}`,
    `Latency ${figure("latency", secondsText)} · Calls ${exactText(columns.calls[i])}`,
    share === null ? "" : `${fractionText(share)} of all`,
  ].filter(Boolean).join("\n");
}

// state: {focus, metric, view, shape}. Returns the areas that were drawn.
function drawTree(place, tree, state, classes, write) {
  const width = place.clientWidth, height = place.clientHeight;
  const size = tree.areas(state.metric, state.view);
  const whole = size(tree.top);
  const shareOf = (area) => (area.rest ? ratio(area.size, whole) : tree.share(area.index, state.metric, state.view, tree.times[area.index]));
  const isIcicle = state.shape === "icicle";
  const levels = isIcicle ? Math.max(1, Math.min(MOST_LEVELS, Math.floor(width / LEAST_COLUMN) - 1)) : MOST_LEVELS;
  const areas = visible(tree, state.focus, size, levels);
  (isIcicle ? layOutIcicle : layOutTreemap)(areas, width, height);
  const parents = new Set(areas.map((area) => area.parent));
  drawAreas(place, width, height, areas[0].size > 0 ? areas : [], {
    fill: (area) => fillOf(tree, area, classes),
    lines: (area) => areaLines(tree, area, shareOf(area), write),
    hover: (area) => areaHover(tree, area, state.view, shareOf(area)),
    isTop: (area) => !isIcicle && parents.has(area.id),
  });
  place.dataset.shape = state.shape;
  return areas;
}
