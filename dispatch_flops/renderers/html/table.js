// A table with search and sortable columns, which draws part of its rows at a time.

const FIRST_ROWS = 20;
const MORE_ROWS = 500;

// columns: {label, title, value(row), text(row), cell(row), isText}. Rows are sorted by value, and
// show cell or else text. found(row): the text to search; without it, there is no search box.
function makeTable(place, { caption, columns, rows, found, placeholder }) {
  const state = { rows, sorted: null, descending: true, query: "", shown: FIRST_ROWS };
  const head = element("tr"), body = element("tbody");
  const search = element("input", { type: "search", placeholder, "aria-label": placeholder, spellcheck: "false" });
  const count = element("output", { "aria-live": "polite" });
  const more = element("button", { type: "button", className: "plain more" });
  const texts = new Map();

  columns.forEach((column, index) => {
    const button = element("button", { type: "button", text: column.label });
    if (column.title) button.title = column.title;
    button.addEventListener("click", () => sortBy(index));
    head.append(element("th", { scope: "col", className: column.isText ? "text" : "" }, button));
  });
  search.addEventListener("input", () => { setQuery(search.value); });
  more.addEventListener("click", () => { state.shown += MORE_ROWS; draw(); });
  place.replaceChildren(
    ...(found ? [element("div", { className: "tools" }, search, count)] : []),
    element("div", { className: "scroll" }, element("table", {}, element("caption", { text: caption }), element("thead", {}, head), body)),
    more,
  );
  draw();

  function sortBy(index) {
    state.descending = state.sorted === index ? !state.descending : !columns[index].isText;
    state.sorted = index;
    state.shown = FIRST_ROWS;
    [...head.children].forEach((cell, i) => {
      if (i === index) cell.setAttribute("aria-sort", state.descending ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
    draw();
  }

  function setQuery(query) {
    state.query = query.trim().toLowerCase();
    state.shown = FIRST_ROWS;
    if (search.value !== query) search.value = query;
    draw();
  }

  function searchable(row) {
    if (!texts.has(row)) texts.set(row, found(row).toLowerCase());
    return texts.get(row);
  }

  function selected() {
    const words = state.query.split(/\s+/).filter(Boolean);
    const kept = words.length ? state.rows.filter((row) => words.every((word) => searchable(row).includes(word))) : [...state.rows];
    return state.sorted === null ? kept : kept.sort(comparing(columns[state.sorted], state.descending));
  }

  function draw() {
    const kept = selected();
    body.replaceChildren(...kept.slice(0, state.shown).map(drawRow));
    count.textContent = kept.length === state.rows.length ? `${exactText(kept.length)} rows` : `${exactText(kept.length)} of ${exactText(state.rows.length)} rows`;
    const rest = kept.length - state.shown;
    more.hidden = rest <= 0;
    more.textContent = `Show ${exactText(Math.min(rest, MORE_ROWS))} more of ${exactText(Math.max(rest, 0))}`;
  }

  function drawRow(row) {
    return element("tr", {}, ...columns.map((column) => {
      const cell = element("td", { className: [column.isText ? "text" : "", column.className ?? ""].join(" ").trim() });
      if (column.cell) cell.append(...column.cell(row));
      else cell.textContent = column.text(row);
      if (column.exact) cell.title = column.exact(row);
      return cell;
    }));
  }

  return { redraw: draw, setQuery };
}

const textColumn = (label, read, className = "") => ({ label, isText: true, className, value: read, text: read });

// Unknown values come last in both directions.
function comparing({ value }, descending) {
  const sign = descending ? -1 : 1;
  return (rowA, rowB) => {
    const a = value(rowA), b = value(rowB);
    if (a === null || b === null) return (a === null) - (b === null);
    return sign * (typeof a === "string" ? a.localeCompare(b) : a - b);
  };
}
