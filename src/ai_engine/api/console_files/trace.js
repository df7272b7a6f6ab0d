// One request's trace: its parts, the steps it ran in, and the layers and kernels of a chosen step.

import { getJson } from "./door.js";
import { bytes, clock, count, digits, h, percent, seconds } from "./dom.js";
import { colour, opColour } from "./parts.js";
import { timeline } from "./timeline.js";

export function show(root, say, id, step) {
  const closing = [];
  let gone = false;
  load();
  return () => {
    gone = true;
    closing.forEach((close) => close());
  };

  async function load() {
    root.append(h("p", { class: "empty" }, "reading the trace…"));
    try {
      const tree = await getJson(`traces/${id}${step === null ? "" : `?step=${step}`}`);
      if (gone) return;
      root.replaceChildren(h("p", { class: "crumbs" }, h("a", { href: "#/requests" }, "requests"), " / ", h("span", { class: "mono" }, id)));
      for (const request of tree.requests) root.append(...requestPanels(id, request, step, closing));
    } catch (error) {
      root.replaceChildren(h("p", { class: "empty" }, "no trace to show"));
      say(`Trace ${id}: ${error.message}`);
    }
  }
}

function requestPanels(id, request, step, closing) {
  const chosen = request.steps.find((each) => each.step === step);
  const panels = [waterfall(id, request, step, closing)];
  if (chosen) panels.push(stepPanel(chosen, closing));
  else panels.push(h("p", { class: "muted" }, "Click a step (a bar in prefill or decode) to see its layers and kernels. Wheel zooms, drag moves, double click sets back."));
  if (request.ops.length) panels.push(opsPanel(request.ops));
  return panels;
}

function waterfall(id, request, step, closing) {
  const facts = request.attributes ?? {};
  const rows = [{ name: "request", note: seconds(request.seconds), bars: [bar(0, request.seconds, "c-other", "the whole request")] }];
  for (const part of request.parts) {
    const steps = request.steps.filter((each) => each.part === part.name);
    const cls = colour(part.name);
    const title = `${part.name}: ${seconds(part.seconds)}${part.count > 1 ? ` in ${part.count} pieces` : ""}`;
    const bars = steps.length
      ? [{ ...bar(part.at, part.until - part.at, cls, title), opacity: 0.22 }, ...steps.map((each) => stepBar(id, each, cls))]
      : [{ ...bar(part.at, part.until - part.at, cls, title), opacity: part.count > 1 ? 0.55 : 1 }];
    rows.push({ name: part.name, note: seconds(part.seconds), bars });
  }
  const drawn = timeline(rows, request.seconds, step === null ? null : `step-${step}`);
  closing.push(drawn.close);
  return h("section", { class: "panel", id: "waterfall" },
    h("h2", {}, `${request.method} ${request.route}`, h("span", { class: "muted" }, `${request.status} at ${clock(request.started_unix)}`)),
    factList({
      "in all": seconds(request.seconds),
      "sum of parts": `${seconds(request.parts_seconds)} (${percent(request.parts_seconds / request.seconds)})`,
      key: request.key || "none",
      prompt: count(facts["gen_ai.usage.input_tokens"]), cached: count(facts["gen_ai.usage.cache_read.input_tokens"]), output: count(facts["gen_ai.usage.output_tokens"]),
      steps: count(request.steps.length),
      "longest gap": seconds(Math.max(...request.choices.map((choice) => choice.max_gap_seconds ?? 0))),
    }),
    drawn.svg);
}

const bar = (at, length, cls, title) => ({ at, seconds: length, cls, title });

function stepBar(id, step, cls) {
  const rows = Object.entries(step.rows).filter(([, value]) => value).map(([name, value]) => `${value} ${name}`).join(", ");
  return {
    ...bar(step.at, step.seconds, cls, `step ${step.step}: ${seconds(step.seconds)}, own rows ${rows}, of ${step.all_rows} in all (share ${percent(step.share)})`),
    id: `step-${step.step}`,
    thin: true,
    pick: () => (location.hash = `#/trace/${id}/step/${step.step}`),
  };
}

function stepPanel(step, closing) {
  const layers = (step.runs ?? []).flat();
  const ops = layers.flatMap((layer) => layer.ops.map((op) => ({ ...op, layer: layer.layer })));
  const panel = h("section", { class: "panel", id: "step" },
    h("h2", {}, `Step ${step.step}`, h("span", { class: "muted" }, `${seconds(step.seconds)}, ${step.part} for this request`)),
    factList({
      "share (by rows)": percent(step.share),
      "own rows": Object.entries(step.rows).filter(([, value]) => value).map(([name, value]) => `${value} ${name}`).join(", "),
      "all rows": `${step.all_rows} of ${step.sequences} sequences`,
      context: `${count(step.context)} tokens`,
      kernels: seconds(step.kernel_seconds), "outside kernels": seconds(step.host_seconds), planning: seconds(step.plan_seconds),
      queued: count(step.queued), preempted: count(step.preempted),
    }),
    h("p", { class: "muted" }, "It ran for ", step.links.map((link, index) => [index ? ", " : "",
      h("a", { href: `#/trace/${link.trace_id}/step/${step.step}`, class: "mono" }, link.trace_id.slice(0, 8)), ` (${link.rows})`]), "."));
  if (!ops.length) {
    panel.append(h("p", { class: "empty" }, "The stamps of this step are no longer kept (or the kernels leave none)."));
    return panel;
  }
  const begun = Math.min(...ops.map((op) => op.at));
  const end = Math.max(...ops.map((op) => op.at + op.seconds)) - begun;
  const lanes = new Map();
  for (const op of ops) {
    for (const own of op.threads) {
      if (!lanes.has(own.thread)) lanes.set(own.thread, []);
      lanes.get(own.thread).push(bar(own.at - begun, own.seconds, opColour(op.op), `${opName(op)}\n${op.shape}, ${op.dtype}\n${seconds(own.seconds)} on thread ${own.thread}`));
    }
  }
  const drawn = timeline([...lanes].sort((a, b) => a[0] - b[0]).map(([thread, bars]) => ({ name: `thread ${thread}`, bars })), end);
  closing.push(drawn.close);
  const longest = Math.max(...ops.map((op) => op.seconds));
  panel.append(drawn.svg, opLegend(ops), h("div", { id: "layers" }, layers.map((layer) => layerDetails(layer, longest, layers.length <= 4))));
  return panel;
}

const opName = (op) => `${op.layer >= 0 ? `layer ${op.layer} ` : ""}${op.op}${op.weights.length ? ` ${op.weights.join(", ")}` : ""}`;

function opLegend(ops) {
  const names = new Map();
  for (const op of ops) names.set(opColour(op.op), (names.get(opColour(op.op)) ?? new Set()).add(op.op));
  return h("div", { class: "legend" }, [...names].map(([cls, kinds]) => h("span", {}, h("i", { class: cls }), [...kinds].join(", "))));
}

function layerDetails(layer, longest, open) {
  const name = layer.layer >= 0 ? `layer ${layer.layer}` : "outside the layers";
  return h("details", { open },
    h("summary", {}, name, h("span", { class: "muted" }, ` ${layer.ops.length} ops, ${seconds(layer.seconds)}`)),
    h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, ["op", "kernel", "weights", "shape", "type"].map((each) => h("th", {}, each)),
        ["time", "bytes", "GB/s", "GFLOP/s"].map((each) => h("th", { class: "num" }, each)), h("th", {}))),
      h("tbody", {}, layer.ops.map((op) => h("tr", { "data-op": op.op },
        h("td", {}, op.op), h("td", { class: "mono" }, op.kernel), h("td", { class: "mono" }, op.weights.join(", ")),
        h("td", { class: "mono" }, op.shape), h("td", { class: "mono" }, op.dtype),
        h("td", { class: "num" }, seconds(op.seconds)), h("td", { class: "num" }, bytes(op.bytes)),
        h("td", { class: "num" }, rate(op.gb_per_s)), h("td", { class: "num" }, rate(op.gflop_per_s)),
        h("td", {}, h("i", { class: `bar ${opColour(op.op)}`, style: { width: `${Math.max(2, (140 * op.seconds) / longest)}px` } }))))))));
}

function opsPanel(ops) {
  const whole = ops.reduce((sum, op) => sum + op.seconds, 0);
  return h("section", { class: "panel scroll", id: "ops" },
    h("h2", {}, "Kernels of all its steps", h("span", { class: "muted" }, "longest first; the share is this request's by rows")),
    h("table", {},
      h("thead", {}, h("tr", {}, ["op", "shape", "type"].map((each) => h("th", {}, each)),
        ["calls", "time", "of all", "share", "longest", "GB/s", "GFLOP/s"].map((each) => h("th", { class: "num" }, each)))),
      h("tbody", {}, ops.map((op) => h("tr", {},
        h("td", {}, op.op), h("td", { class: "mono" }, op.shape), h("td", { class: "mono" }, op.dtype), h("td", { class: "num" }, count(op.count)),
        h("td", { class: "num" }, seconds(op.seconds)), h("td", { class: "num" }, percent(op.seconds / whole)),
        h("td", { class: "num" }, seconds(op.share_seconds)), h("td", { class: "num" }, seconds(op.max_seconds)),
        h("td", { class: "num" }, rate(op.gb_per_s)), h("td", { class: "num" }, rate(op.gflop_per_s)))))));
}

const rate = (value) => (value == null ? "–" : digits(value));

function factList(facts) {
  return h("dl", { class: "facts" }, Object.entries(facts).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}
