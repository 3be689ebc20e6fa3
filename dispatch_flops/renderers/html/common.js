// What every page has: its data, its title, the theme, and small parts of markup.

const packed = Uint8Array.from(atob(byId("data").textContent), (character) => character.charCodeAt(0));
const data = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"))).json();

const swatch = (fill) => element("span", { className: `swatch ${fill}`, "aria-hidden": "true" });

// The terms of a list of facts: [label, text] each.
const described = (pairs) => pairs.flatMap(([label, text]) => [element("dt", { text: label }), element("dd", { text })]);

// Draws now, and again whenever the width changes.
function drawOnResize(place, draw) {
  let width = null;
  new ResizeObserver(() => {
    if (place.clientWidth === width || !place.clientWidth) return;
    width = place.clientWidth;
    draw();
  }).observe(place);
}

// The colours follow the reader's preference until the button is pressed.
function switchTheme() {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
}

byId("title").textContent = data.title;
byId("theme").addEventListener("click", switchTheme);
