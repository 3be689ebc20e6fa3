// Builds the page of a plan: its choices side by side.

const roleFill = (role) => (data.roles.includes(role) ? `fill-${data.roles.indexOf(role)}` : "fill-plain");
const readable = (text) => text.replaceAll(">=", "≥").replaceAll("<=", "≤");

function fillChoices() {
  byId("choices").replaceChildren(...data.choices.map((choice) => element("div", {},
    element("dt", { text: choice.label }),
    element("dd", { text: readable(choice.value), className: "value" }),
    element("dd", { text: readable(choice.fit), className: choice.fits === false ? "detail unknown" : "detail" }),
    ...choice.details.map((text) => element("dd", { text: readable(text), className: "detail" })))));
}

// A bar of parts, and what is said of it beside it and to a screen reader.
function barRow(label, text, said, ...parts) {
  return element("div", {}, element("dt", { text: `${label}: ${text}` }),
    element("dd", {}, element("div", { className: "track", role: "img", "aria-label": said }, ...parts)));
}

function part(className, start, width, title = "") {
  const made = element("span", { className, ...(title && { title }) });
  made.style.left = `${100 * start}%`;
  if (width !== null) made.style.width = `${100 * width}%`;
  return made;
}

function fillMemory() {
  const { capacity } = data;
  const most = Math.max(capacity ?? 0, ...data.choices.map((choice) => choice.peak)) || 1;
  const held = (role) => data.choices.some((choice) => choice.roles[role]);
  const roles = [...new Set([...data.roles, ...data.choices.flatMap((choice) => Object.keys(choice.roles))])].filter(held);
  byId("memory-note").textContent = capacity === null ? "The capacity of the device is not known." : `The line is at the device's ${bytesText(capacity)}.`;
  byId("memory-legend").replaceChildren(...roles.map((role) => element("span", {}, swatch(roleFill(role)), role)));
  byId("memory").replaceChildren(...data.choices.map((choice) => {
    let start = 0;
    const parts = roles.filter((role) => choice.roles[role]).map((role) => {
      const bytes = choice.roles[role], made = part(roleFill(role), start / most, bytes / most, `${role}: ${bytesText(bytes)}`);
      start += bytes;
      return made;
    });
    if (capacity !== null) parts.push(part("mark", capacity / most, null));
    const said = roles.filter((role) => choice.roles[role]).map((role) => `${role} ${bytesText(choice.roles[role])}`).join(", ");
    return barRow(choice.label, readable(choice.memory), said, ...parts);
  }));
}

function fillTimes() {
  const names = [...new Set(data.choices.flatMap((choice) => Object.keys(choice.times)))];
  byId("times").replaceChildren(...names.flatMap((name) => {
    const shown = data.choices.filter((choice) => choice.times[name]);
    const most = Math.max(...shown.map((choice) => choice.times[name].high ?? 0)) || 1;
    const rows = shown.map((choice) => {
      const { low, middle, high } = choice.times[name];
      if (low === null || high === null) return barRow(choice.label, UNKNOWN, UNKNOWN);
      const said = `at least ${secondsText(low)}, unfused ${secondsText(middle)}, with nothing hidden ${secondsText(high)}`;
      return barRow(choice.label, `${secondsText(low)} to ${secondsText(high)}`, said,
        part("time-least", 0, low / most), part("time-range", low / most, (high - low) / most), part("mark", middle / most, null));
    });
    return [element("h3", { text: name }), element("dl", { className: "peaks" }, ...rows)];
  }));
}

function fillFigures() {
  const head = element("tr", {}, element("td"), ...data.choices.map((choice) => element("th", { scope: "col", text: choice.label })));
  const rows = data.rows.map(([name, texts]) => element("tr", {},
    element("th", { scope: "row", className: name.startsWith(" ") ? "text part" : "text", text: name.trim() }),
    ...texts.map((text) => element("td", { text: readable(text) }))));
  byId("figures").replaceChildren(element("table", { className: "figures", "aria-labelledby": "figures-caption" }, element("thead", {}, head), element("tbody", {}, ...rows)));
}

byId("subtitle").textContent = data.subtitle;
byId("notes").replaceChildren(...data.assumptions.map((text) => element("li", { text })));
fillChoices();
fillMemory();
fillTimes();
fillFigures();
