// The last requests; a click opens a request's trace.

import { getJson } from "./door.js";
import { clock, count, h, seconds } from "./dom.js";
import { colour } from "./parts.js";

const EVERY_MS = 2000;

export function show(root, say) {
  const body = h("tbody");
  const empty = h("p", { class: "empty" }, "No request yet. Send one, or use “Try it”.");
  root.append(
    h("section", { class: "panel scroll" },
      h("h2", {}, "Requests", h("span", { class: "muted" }, "newest first; a click opens the trace")),
      h("table", { id: "requests" },
        h("thead", {}, h("tr", {}, ["time", "trace", "route", "key", "status"].map((name) => h("th", {}, name)),
          ["prompt", "cached", "output", "first token", "in all"].map((name) => h("th", { class: "num" }, name)), h("th", {}, "where the time went"))),
        body),
      empty),
  );
  let timer = 0;
  let gone = false;

  async function tick() {
    try {
      const { data: traces } = await getJson("traces?limit=100");
      if (gone) return;
      say("");
      empty.hidden = traces.length > 0;
      body.replaceChildren(...traces.map(row));
    } catch (error) {
      if (!gone) say(`No traces: ${error.message}`);
    }
    if (!gone) timer = setTimeout(tick, EVERY_MS);
  }
  tick();
  return () => {
    gone = true;
    clearTimeout(timer);
  };
}

function row(trace) {
  const facts = trace.attributes ?? {};
  const open = () => (location.hash = `#/trace/${trace.trace_id}`);
  return h("tr", { class: "link", "data-trace": trace.trace_id, tabindex: 0, onclick: open, onkeydown: (event) => event.key === "Enter" && open() },
    h("td", {}, clock(trace.started_unix)),
    h("td", { class: "mono" }, `${trace.trace_id.slice(0, 12)}…`),
    h("td", {}, trace.route),
    h("td", {}, trace.key || "–"),
    h("td", {}, h("span", { class: `pill ${trace.status < 400 ? "good" : "bad"}` }, String(trace.status))),
    ["input_tokens", "cache_read.input_tokens", "output_tokens"].map((name) => h("td", { class: "num" }, count(facts[`gen_ai.usage.${name}`]))),
    h("td", { class: "num" }, seconds(trace.ttft_seconds ?? facts.ttft_seconds)),
    h("td", { class: "num" }, seconds(trace.seconds)),
    h("td", {}, stack(trace.parts, trace.seconds)));
}

/** A bar as long as the request, cut by its parts. */
function stack(parts, whole) {
  return h("span", { class: "stack", title: Object.entries(parts).map(([name, value]) => `${name} ${seconds(value)}`).join("\n") },
    Object.entries(parts).map(([name, value]) => h("i", { class: colour(name), style: { width: `${(100 * value) / Math.max(whole, 1e-9)}%` } })));
}
