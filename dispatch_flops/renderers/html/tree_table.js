// The modules as a table whose rows can be collapsed; siblings are sorted, and a search shows the
// modules that it finds below the modules that hold them.

const FIRST_MODULES = 40;   // rows that are shown at first
const MOST_INDENT = 14;     // levels; deeper rows are not indented further

// columns: as of makeTable, of (tree, index). tree(): the folded or the full tree. searched: the
// tree that is searched, of every module. onName(tree, index) is called when a name is clicked; names
// are plain text without it.
function makeTreeTable(place, { caption, columns, placeholder, tree, searched, found, sorted, onName }) {
  place.classList.add("tree-table");
  const opened = new Map();  // tree -> set of the rows whose children are shown
  const isOpen = (of) => {
    if (!opened.has(of)) {
      const levels = levelsThatFit(of);
      opened.set(of, new Set(of.columns.fqn.keys().filter((index) => of.levels[index] < levels)));
    }
    return opened.get(of);
  };
  const openAll = element("button", { type: "button", className: "plain", text: "Expand all" });
  const closeAll = element("button", { type: "button", className: "plain", text: "Collapse all" });
  openAll.addEventListener("click", () => { opened.set(tree(), new Set(tree().columns.fqn.keys())); draw(); });
  closeAll.addEventListener("click", () => { opened.set(tree(), new Set()); draw(); });
  const nameColumn = { label: "Module", isText: true, title: "In the model's order", value: (of, index) => index };
  const every = [nameColumn, ...columns];
  const frame = tableFrame(place, { caption, columns: every, placeholder, noun: "modules", firstRows: FIRST_MODULES, buttons: [openAll, closeAll] }, draw);
  const matches = searcher(found);
  frame.sortBy(1 + sorted, true);
  let shownTree = tree();

  function draw() {
    const { state } = frame, of = state.query ? searched : tree();
    shownTree = of;
    openAll.disabled = closeAll.disabled = Boolean(state.query);
    const total = searched.columns.fqn.length;
    const kept = state.query ? withHolders(of, state.query) : null;
    const rows = flattened(of, kept);
    frame.show(rows, (index) => drawRow(of, index, kept), kept ? kept.matched : total, total);
  }

  // The set of modules that were found and of those that hold them.
  function withHolders(of, query) {
    const kept = new Set();
    kept.matched = 0;
    for (let index = 0; index < of.columns.fqn.length; index += 1) {
      if (!matches(index, query)) continue;
      kept.matched += 1;
      for (let at = index; at >= 0 && !kept.has(at); at = of.columns.parent[at]) kept.add(at);
    }
    return kept;
  }

  function flattened(of, kept) {
    const { value } = every[frame.state.sorted];
    const order = comparing((index) => value(of, index), frame.state.descending);
    const siblings = (index) => of.children(index).filter((child) => !kept || kept.has(child)).sort(order).reverse();
    const rows = [], stack = siblings(TOP), open = isOpen(of);
    while (stack.length) {
      const index = stack.pop();
      rows.push(index);
      if (kept || open.has(index)) stack.push(...siblings(index));
    }
    return rows;
  }

  function drawRow(of, index, kept) {
    const name = element("th", { scope: "row", className: "text name" }, ...nameParts(of, index, kept));
    name.style.setProperty("--level", Math.min(of.levels[index], MOST_INDENT));
    return element("tr", {}, name, ...columns.map((column) => cellOf({
      ...column, cell: column.cell && (() => column.cell(of, index)), text: () => column.text(of, index), exact: column.exact && (() => column.exact(of, index)),
    }, index)));
  }

  function nameParts(of, index, kept) {
    const label = of.label(index), { columns: of_ } = of;
    const show = onName ? element("button", { type: "button", className: "link", text: label, title: `Show ${of_.fqn[index] || label} in the chart` }) : element("span", { className: "label", text: label });
    if (onName) show.addEventListener("click", () => { onName(of, index); });
    const about_ = of_.class_name[index] === label ? "" : of_.class_name[index];
    return [
      element("span", { className: "sr-only", text: `Level ${of.levels[index]}: ` }),
      of.children(index).length && !kept ? toggle(of, index, label) : element("span", { className: "toggle", "aria-hidden": "true" }),
      show,
      ...(about_ ? [" ", element("span", { className: "class", text: about_ })] : []),
      ...(of_.extra_repr[index] && !of.isRun(index) ? [" ", element("span", { className: "extra", text: of_.extra_repr[index] })] : []),
    ];
  }

  function toggle(of, index, label) {
    const open = isOpen(of), shown = open.has(index);
    const button = element("button", { type: "button", className: "toggle", "aria-expanded": String(shown), "aria-label": `Modules in ${label}`, "data-row": index });
    button.addEventListener("click", () => {
      if (shown) open.delete(index); else open.add(index);
      draw();
      frame.body.querySelector(`[data-row="${index}"]`)?.focus({ preventScroll: true });
    });
    return button;
  }

  function relabel(position, label) {
    frame.head.children[1 + position].querySelector("span").textContent = label;
  }

  draw();
  return { redraw: draw, setQuery: frame.setQuery, relabel, get tree() { return shownTree; } };
}

// Returns how many levels have children that are shown at first: as many as few rows allow.
function levelsThatFit(tree) {
  const rows = [];
  for (const level of tree.levels) rows[level] = (rows[level] ?? 0) + 1;
  let shown = rows[0], levels = 0;
  while (levels + 1 < rows.length && shown + rows[levels + 1] <= FIRST_MODULES) shown += rows[levels += 1];
  return Math.max(levels, 1);
}
