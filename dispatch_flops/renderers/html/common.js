// What every page has: its data, its title, the theme, and small parts of markup.

const packed = Uint8Array.from(atob(byId("data").textContent), (character) => character.charCodeAt(0));
const data = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"))).json();

const swatch = (fill) => element("span", { className: `swatch ${fill}`, "aria-hidden": "true" });

const COLOURED_PHASES = ["forward", "backward", "recompute", "optimizer"];
const phaseFill = (phase) => `phase-${COLOURED_PHASES.includes(phase) ? phase : "other"}`;
const viewName = (view) => `${view.slice(0, 1).toUpperCase()}${view.slice(1)}`;

// The terms of a list of facts: [label, text] each.
const described = (pairs) => pairs.flatMap(([label, text]) => [element("dt", { text: label }), element("dd", { text })]);

// Adds options to a fieldset, of which one is chosen: [value, label] each.
function segments(name, options, chosen, onChange) {
  for (const [value, label] of options) {
    const input = element("input", { type: "radio", name, value });
    input.checked = value === chosen;
    input.addEventListener("change", () => { onChange(value); });
    byId(name).append(element("label", {}, input, element("span", { text: label })));
  }
}

// Round values up to a limit, at most so many.
function ticks(limit, most) {
  const least = limit / most, power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= least);
  return Array.from({ length: Math.floor(limit / step) + 1 }, (_, index) => index * step);
}

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
