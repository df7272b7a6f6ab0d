// The KV pool as a picture: one cell a page, coloured by its state.

import { h } from "./dom.js";

const STATES = ["free", "cached", "held", "shared"];
const CELL = 9;

/** {panel, draw(pages), close()}: pages = {page_tokens, states: "0012..." with a digit per page}. */
export function kvMap() {
  const canvas = h("canvas", { class: "kv", role: "img" });
  const sum = h("span", { class: "muted" });
  const legend = STATES.map((name) => h("span", {}, h("i", { class: `c-${name}` }), h("span", { "data-state": name }, name)));
  const panel = h(
    "section",
    { class: "panel" },
    h("h2", {}, "KV pages", sum),
    canvas,
    h("div", { class: "legend" }, legend),
  );
  let latest = null;

  function draw(pages) {
    latest = pages;
    const width = canvas.clientWidth || 800;
    const columns = Math.max(1, Math.floor(width / CELL));
    const rows = Math.max(1, Math.ceil(pages.states.length / columns));
    const ratio = window.devicePixelRatio || 1;
    canvas.width = width * ratio;
    canvas.height = rows * CELL * ratio;
    canvas.style.height = `${rows * CELL}px`;
    const style = getComputedStyle(document.documentElement);
    const colours = STATES.map((name) => style.getPropertyValue(`--${name}`).trim());
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    const counts = [0, 0, 0, 0];
    for (let page = 0; page < pages.states.length; page++) {
      const state = Number(pages.states[page]);
      counts[state] += 1;
      context.fillStyle = colours[state];
      context.fillRect((page % columns) * CELL, Math.floor(page / columns) * CELL, CELL - 1, CELL - 1);
    }
    sum.textContent = `${pages.states.length} pages of ${pages.page_tokens} tokens`;
    STATES.forEach((name, index) => {
      panel.querySelector(`[data-state=${name}]`).textContent = `${name} ${counts[index]}`;
    });
    canvas.setAttribute("aria-label", STATES.map((name, index) => `${counts[index]} pages ${name}`).join(", "));
  }

  const again = () => latest && draw(latest);
  window.addEventListener("resize", again);
  return { panel, draw, close: () => window.removeEventListener("resize", again) };
}
