// Bars on a time axis that can be zoomed (wheel), moved (drag) and set back (double click).

import { s, seconds } from "./dom.js";

const LEFT = 118;
const RIGHT = 14;
const ROW = 24;
const AXIS = 20;
const MIN_PIXELS = 1.2; // a shorter bar is drawn this wide, so that it can be seen

/**
 * rows: [{name, note, bars: [{at, seconds, cls, title, opacity, id, pick}]}]; times in seconds, 0 to `end` shown at first.
 * `picked` is the id of the bar that is drawn as chosen.
 */
export function timeline(rows, end, picked = null) {
  const height = AXIS + rows.length * ROW + 4;
  const svg = s("svg", { class: "wave", height });
  let [from, to] = [0, Math.max(end, 1e-9)];
  let dragged = null;

  function draw() {
    const width = svg.clientWidth || 900;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const scale = (width - LEFT - RIGHT) / (to - from);
    const x = (at) => LEFT + (at - from) * scale;
    const parts = [s("clipPath", { id: "plot" }, s("rect", { x: LEFT, y: 0, width: width - LEFT - RIGHT, height }))];
    for (const at of ticks(from, to, Math.max(2, Math.floor((width - LEFT) / 120)))) {
      parts.push(
        s("line", { class: "row", x1: x(at), x2: x(at), y1: AXIS - 4, y2: height }),
        s("text", { class: "muted", x: x(at) + 3, y: 12 }, seconds(at) === "0 µs" ? "0" : seconds(at)),
      );
    }
    rows.forEach((row, index) => {
      const y = AXIS + index * ROW;
      parts.push(s("line", { class: "row", x1: 0, x2: width, y1: y, y2: y }), s("text", { x: 2, y: y + 16 }, row.name));
      const bars = s("g", { "clip-path": "url(#plot)" });
      for (const bar of row.bars) {
        if (bar.at + bar.seconds < from || bar.at > to) continue;
        bars.append(
          s("rect", {
            class: `${bar.cls} ${bar.pick ? "pick" : ""} ${bar.id !== undefined && bar.id === picked ? "on" : ""}`,
            x: x(bar.at), y: y + (bar.thin ? 6 : 3), height: ROW - (bar.thin ? 11 : 6),
            width: Math.max(bar.seconds * scale - (bar.pick ? 0.4 : 0), MIN_PIXELS),
            opacity: bar.opacity, rx: 1.5, "data-id": bar.id, onclick: bar.pick && (() => dragged?.moved || bar.pick()),
          }, s("title", {}, bar.title)),
        );
      }
      parts.push(bars);
      if (row.note) {
        const last = row.bars[row.bars.length - 1];
        const end = last ? x(last.at + last.seconds) + 6 : LEFT;
        const inside = end > width - 90;
        parts.push(s("text", { class: "muted note", x: inside ? width - RIGHT - 4 : Math.max(end, LEFT + 4), y: y + 16, "text-anchor": inside ? "end" : "start" }, row.note));
      }
    });
    svg.replaceChildren(...parts);
  }

  const at = (event) => {
    const box = svg.getBoundingClientRect();
    return from + ((event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT)) * (to - from);
  };
  svg.addEventListener("wheel", (event) => {
    event.preventDefault();
    const middle = at(event);
    const factor = Math.exp(Math.sign(event.deltaY) * 0.25);
    [from, to] = [middle - (middle - from) * factor, middle + (to - middle) * factor];
    keepIn();
  }, { passive: false });
  svg.addEventListener("pointerdown", (event) => (dragged = { at: at(event), x: event.clientX, moved: false }));
  svg.addEventListener("pointermove", (event) => {
    if (!dragged || !event.buttons) return;
    if (Math.abs(event.clientX - dragged.x) > 4) dragged.moved = true;
    if (!dragged.moved) return;
    const by = dragged.at - at(event);
    [from, to] = [from + by, to + by];
    keepIn();
  });
  svg.addEventListener("dblclick", () => {
    [from, to] = [0, Math.max(end, 1e-9)];
    draw();
  });

  function keepIn() {
    const span = Math.min(to - from, end);
    from = Math.min(Math.max(from, 0), end - span);
    to = from + Math.max(span, 1e-6);
    draw();
  }

  const fit = new ResizeObserver(draw);
  fit.observe(svg);
  return { svg, close: () => fit.disconnect() };
}

/** Round marks: 1, 2 or 5 times a power of ten apart. */
function ticks(from, to, most) {
  const rough = (to - from) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const marks = [];
  for (let n = Math.ceil(from / step); n * step <= to; n++) marks.push(n * step);
  return marks;
}
