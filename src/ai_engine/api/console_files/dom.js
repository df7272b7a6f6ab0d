// Elements from values, and numbers as people read them.

/** h("div", {class: "x", onclick: f}, child, ...): strings become text, null and false nothing. */
export function h(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function s(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value != null && value !== false) element.setAttribute(name, value);
  }
  for (const child of children.flat(Infinity)) {
    if (child != null && child !== false) element.append(child);
  }
  return element;
}

/** 0.00123 -> "1.23 ms"; three digits, from nanoseconds to minutes. */
export function seconds(value) {
  if (value == null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 120) return `${(value / 60).toFixed(1)} min`;
  if (size >= 1) return `${digits(value)} s`;
  if (size >= 1e-3) return `${digits(value * 1e3)} ms`;
  return `${digits(value * 1e6)} µs`;
}

export function count(value) {
  if (value == null || !Number.isFinite(value)) return "–";
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e4]]) {
    if (Math.abs(value) >= size) return `${digits(value / (unit === "k" ? 1e3 : size))} ${unit}`;
  }
  return Number.isInteger(value) ? value.toLocaleString("en") : digits(value);
}

export function bytes(value) {
  if (value == null || !Number.isFinite(value)) return "–";
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (value >= size) return `${digits(value / size)} ${unit}`;
  }
  return `${value} B`;
}

export const percent = (value) => (value == null || !Number.isFinite(value) ? "–" : `${digits(100 * value)} %`);

export function digits(value) {
  const size = Math.abs(value);
  return value.toFixed(size >= 100 || size === 0 ? 0 : size >= 10 ? 1 : 2);
}

export const clock = (unix) => new Date(unix * 1000).toLocaleTimeString("en-GB");
