// Tables with search and sortable columns, which draw part of their rows until all are asked for.

const FIRST_ROWS = 20;

// Creates what a table and a tree of rows share. draw(state) is called after each change.
// columns: {label, title, isText}. noun: what the rows are.
function tableFrame(place, { caption, columns, placeholder, noun, firstRows = FIRST_ROWS, buttons = [] }, draw) {
  const state = { sorted: null, descending: true, query: "", isWhole: false };
  const head = element("tr"), body = element("tbody");
  const search = element("input", { type: "search", placeholder, "aria-label": placeholder, spellcheck: "false" });
  const count = element("output", { "aria-live": "polite" });
  const all = element("button", { type: "button", className: "plain more" });

  columns.forEach((column, index) => {
    const button = element("button", { type: "button" }, element("span", { text: column.label }));
    if (column.title) button.title = column.title;
    button.addEventListener("click", () => { sortBy(index, state.sorted === index ? !state.descending : !column.isText); draw(); });
    head.append(element("th", { scope: "col", className: column.isText ? "text" : "" }, button));
  });
  search.addEventListener("input", () => { setQuery(search.value); });
  all.addEventListener("click", () => { state.isWhole = true; draw(); body.querySelector("button")?.focus({ preventScroll: true }); });
  const title = element("p", { className: "caption", text: caption, id: `${place.id}-caption` });
  const labelled = { "aria-labelledby": title.id };
  const table = element("table", labelled, element("thead", {}, head), body);
  place.replaceChildren(
    ...(placeholder ? [element("div", { className: "tools" }, search, ...buttons, count)] : []),
    title,
    element("div", { className: "scroll", role: "region", tabindex: "0", ...labelled }, table),
    all,
  );

  function sortBy(index, descending) {
    state.sorted = index;
    state.descending = descending;
    [...head.children].forEach((cell, i) => {
      if (i === index) cell.setAttribute("aria-sort", descending ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
  }

  function setQuery(query) {
    state.query = query.trim().toLowerCase();
    if (search.value !== query) search.value = query;
    draw();
  }

  // rows: to show; found: how many of the total were found.
  function show(rows, drawRow, found, total) {
    const shown = state.isWhole ? rows : rows.slice(0, firstRows);
    body.replaceChildren(...shown.map(drawRow));
    count.textContent = found === total ? `${exactText(total)} ${noun}` : `${exactText(found)} of ${exactText(total)} ${noun}`;
    all.hidden = shown.length === rows.length;
    all.textContent = `Show all ${exactText(rows.length)}`;
  }

  return { state, body, head, show, sortBy, setQuery };
}

// columns: {label, title, value(row), text(row), cell(row), isText}. Rows are sorted by value, and
// show cell or else text. found(row): the text to search; without it, there is no search box.
function makeTable(place, { caption, columns, rows, found, placeholder }) {
  const frame = tableFrame(place, { caption, columns, placeholder: found && placeholder, noun: "rows" }, draw);
  const matches = searcher(found);

  function draw() {
    const { sorted, descending, query } = frame.state;
    const kept = rows.filter((row) => matches(row, query));
    if (sorted !== null) kept.sort(comparing(columns[sorted].value, descending));
    frame.show(kept, (row) => element("tr", {}, ...columns.map((column) => cellOf(column, row))), kept.length, rows.length);
  }

  draw();
}

function cellOf(column, row) {
  const cell = element(column.isHeader ? "th" : "td", { className: [column.isText ? "text" : "", column.className ?? ""].join(" ").trim() });
  if (column.isHeader) cell.setAttribute("scope", "row");
  if (column.cell) cell.append(...column.cell(row));
  else cell.textContent = column.text(row);
  const exact = column.exact?.(row);
  if (exact) cell.title = exact;
  return cell;
}

const textColumn = (label, read, className = "") => ({ label, isText: true, className, value: read, text: read });

// Returns matches(row, query): whether each word of the query is in the row's text.
function searcher(found) {
  const texts = new Map();
  return (row, query) => {
    if (!query) return true;
    if (!texts.has(row)) texts.set(row, found(row).toLowerCase());
    return query.split(/\s+/).every((word) => texts.get(row).includes(word));
  };
}

// Unknown values come last in both directions.
function comparing(value, descending) {
  const sign = descending ? -1 : 1;
  return (rowA, rowB) => {
    const a = value(rowA), b = value(rowB);
    if (a === null || b === null) return (a === null) - (b === null);
    return sign * (typeof a === "string" ? a.localeCompare(b) : a - b);
  };
}

// A number over a bar that shows its share of the whole.
function barCell(text, share) {
  const bar = element("span", { className: "share", "aria-hidden": "true" });
  bar.style.width = `${100 * Math.min(share ?? 0, 1)}%`;
  return [element("span", { className: "share-track" }, bar), element("span", { className: "share-text", text })];
}
