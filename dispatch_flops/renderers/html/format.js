// Numbers to text, as in dispatch_flops/units.py; a browser test compares the two.

const LARGE = ["", "K", "M", "G", "T", "P", "E", "Z", "Y"];
const SMALL = ["", "m", "u", "n"];
const UNKNOWN = "n/a";

function rounded(value) {
  if (Math.abs(value) >= 1e21) return value.toExponential(2);
  let text = value.toFixed(2);
  // Round half to even, as Python does; only odd eighths are halfway between two texts.
  if (Number.isInteger(value * 8) && value * 8 % 2 !== 0) {
    const below = Math.floor(value * 100);
    text = ((below + Math.abs(below % 2)) / 100).toFixed(2);
  }
  text = text.replace(/0+$/, "").replace(/\.$/, "");
  return text === "-0" ? "0" : text;
}

function scaled(value) {
  let size = Math.abs(value), step = 0;
  while (Number(rounded(size)) >= 1000 && step < LARGE.length - 1) { size /= 1000; step += 1; }
  while (size > 0 && Number(rounded(size)) < 1 && step > 1 - SMALL.length) { size *= 1000; step -= 1; }
  return `${value < 0 ? "-" : ""}${numberText(size)} ${step >= 0 ? LARGE[step] : SMALL[-step]}`;
}

const known = (write) => (value) => (value === null || value === undefined ? UNKNOWN : write(value));
const countText = known((value) => scaled(value).trimEnd());
const paramsText = known((value) => countText(value).replace("G", "B"));
const bytesText = known((value) => `${scaled(value)}B`);
const secondsText = known((value) => `${scaled(value)}s`);
const rateText = known((value) => `${scaled(value)}FLOP/s`);
const numberText = known((value) => {
  const text = rounded(value);
  return text === "0" && value > 0 ? "<0.01" : text;
});
const fractionText = known((value) => `${numberText(100 * value)}%`);
const ratio = (part, whole) => (part === null || part === undefined || !whole ? null : part / whole);
const about = (text, isInexact) => (isInexact && text !== UNKNOWN ? `~${text}` : text);
const atLeast = (text, isLowerBound) => (isLowerBound && text !== UNKNOWN ? `≥ ${text}` : text);

// All digits, if JavaScript's numbers hold them exactly.
const exactText = (value) => (Number.isSafeInteger(value) ? value.toLocaleString("en") : scaled(value).trimEnd());

// Returns at most so many characters of a name, on one line.
function clipped(name, longest = 120) {
  const letters = [...name.replace(/\s+/g, " ")];
  return letters.length > longest ? `${letters.slice(0, Math.max(longest - 1, 0)).join("")}…` : letters.join("");
}

// Creates an element with text and children; names are inserted as text only.
function element(tag, { text, className, ...attributes } = {}, ...children) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const byId = (id) => document.getElementById(id);

// Creates an element of a drawing; text becomes its text or, as title, what is shown on hover.
function drawn(tag, { text, title, ...attributes } = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  if (title) made.append(drawn("title", { text: title }));
  if (text !== undefined) made.append(text);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const drawing = (width, height, ...children) => drawn("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" }, ...children);
