// Live figures: tiles, four plots over the last five minutes, the map of KV pages.

import uPlot from "./vendor/uPlot.esm.js";
import { getJson, getText } from "./door.js";
import { bytes, count, digits, h, percent, seconds } from "./dom.js";
import { NAMES, buckets, parse, quantiles, total } from "./metrics.js";
import { kvMap } from "./kvmap.js";

const EVERY_MS = 1000;
const KEEP = 300; // points of a plot
const WINDOW = 15; // readings that percentiles look back

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** A plot of several lines over wall time. */
function plot(title, hint, lines, format) {
  const box = h("div");
  const panel = h("section", { class: "panel" }, h("h2", {}, title, h("span", { class: "muted" }, hint)), box);
  const data = [[], ...lines.map(() => [])];
  const axis = { stroke: css("--muted"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false } };
  const chart = new uPlot(
    {
      width: 400,
      height: 190,
      series: [
        { label: "time", value: (_, at) => (at == null ? "–" : new Date(at * 1000).toLocaleTimeString("en-GB")) },
        ...lines.map(([label, colour]) => ({
          label,
          stroke: css(colour),
          width: 1.8,
          spanGaps: true,
          points: { show: false },
          value: (_, value) => (value == null ? "–" : format(value)),
        })),
      ],
      axes: [axis, { ...axis, size: 62, values: (_, ticks) => ticks.map(format) }],
      scales: { y: { range: (_, low, high) => [0, Math.max(high ?? 0, 1e-9) * 1.12] } },
      cursor: { drag: { x: false, y: false } },
    },
    data,
    box,
  );
  const fit = new ResizeObserver(() => chart.setSize({ width: Math.max(box.clientWidth, 200), height: 190 }));
  fit.observe(box);
  return {
    panel,
    add(at, values) {
      data[0].push(at);
      values.forEach((value, index) => data[index + 1].push(value));
      if (data[0].length > KEEP) data.forEach((column) => column.shift());
      chart.setData(data);
    },
    close() {
      fit.disconnect();
      chart.destroy();
    },
  };
}

function tile(name) {
  const value = h("b", {}, "–");
  const small = h("small", {}, " ");
  return {
    box: h("div", { class: "tile" }, h("small", {}, name), value, small),
    set(text, hint = " ") {
      value.textContent = text;
      small.textContent = hint;
    },
  };
}

export function show(root, say) {
  const tiles = {
    out: tile("output"), in: tile("prompts"), running: tile("running"), queued: tile("queued"), ttft: tile("time to first token"),
    gap: tile("gap between tokens"), step: tile("step"), kv: tile("KV pages held"), hits: tile("prefix hits"), memory: tile("memory"),
  };
  const plots = {
    tokens: plot("Tokens through the model", "per second", [["decode", "--decode"], ["prefill", "--prefill"]], count),
    ttft: plot("Time to first token", `over ${WINDOW} s`, [["p50", "--decode"], ["p95", "--prefill"], ["p99", "--bad"]], seconds),
    gap: plot("Gaps between tokens", `over ${WINDOW} s`, [["p50", "--decode"], ["p95", "--prefill"], ["p99", "--bad"]], seconds),
    queue: plot("Requests", "", [["running", "--decode"], ["queued", "--queue"]], digits),
  };
  const map = kvMap();
  root.append(
    h("div", { class: "tiles" }, Object.values(tiles).map((each) => each.box)),
    h("div", { class: "grid" }, Object.values(plots).map((each) => each.panel)),
    h("div", { style: { height: "14px" } }),
    map.panel,
  );
  const readings = [];
  let timer = 0;
  let gone = false;

  async function tick() {
    try {
      const [text, pages] = await Promise.all([getText("metrics"), getJson("console/kv")]);
      if (gone) return;
      say("");
      readings.push({ at: performance.now() / 1000, families: parse(text) });
      if (readings.length > WINDOW + 1) readings.shift();
      draw(Date.now() / 1000);
      map.draw(pages);
    } catch (error) {
      if (!gone) say(error.status === 401 || error.status === 403 ? `Live figures tell of everybody: they need an admin's key. (${error.message})` : `No figures: ${error.message}`);
    }
    if (!gone) timer = setTimeout(tick, EVERY_MS);
  }

  function draw(now) {
    const last = readings[readings.length - 1];
    const before = readings[Math.max(0, readings.length - 2)];
    const oldest = readings[0];
    const passed = Math.max(last.at - before.at, 1e-3);
    const rate = (name, labels) => Math.max(0, (total(last.families, name, labels) - total(before.families, name, labels)) / passed);
    const over = (name) => quantiles(buckets(oldest.families, name), buckets(last.families, name), [0.5, 0.95, 0.99]);
    const first = before === last;
    const decode = first ? null : rate(NAMES.tokens, { kind: "decode" });
    const prefill = first ? null : rate(NAMES.tokens, { kind: "prefill" });
    const value = (name) => total(last.families, name);
    const [ttft, gap, step] = [over(NAMES.ttft), over(NAMES.gap), over(NAMES.step)];
    const looked = value(NAMES.queryTokens);
    tiles.out.set(first ? "–" : `${count(Math.round(decode))}`, "tokens/s decoded");
    tiles.in.set(first ? "–" : `${count(Math.round(prefill))}`, "tokens/s prefilled");
    tiles.running.set(count(value(NAMES.running)), "sequences with pages");
    tiles.queued.set(count(value(NAMES.queued)), `${count(value(NAMES.queuedTokens))} tokens wait`);
    tiles.ttft.set(seconds(ttft[0]), `p95 ${seconds(ttft[1])}`);
    tiles.gap.set(seconds(gap[0]), `p99 ${seconds(gap[2])}`);
    tiles.step.set(seconds(step[0]), first ? " " : `${count(Math.round(rate(NAMES.steps)))} steps/s`);
    tiles.kv.set(percent(value(NAMES.kvUsage)), `${count(value(NAMES.preempted))} preemptions`);
    tiles.hits.set(looked ? percent(value(NAMES.hitTokens) / looked) : "–", "of prompt tokens so far");
    tiles.memory.set(bytes(value(NAMES.memory)), "in all categories");
    plots.tokens.add(now, [decode, prefill]);
    plots.ttft.add(now, ttft);
    plots.gap.add(now, gap);
    plots.queue.add(now, [value(NAMES.running), value(NAMES.queued)]);
  }

  tick();
  return () => {
    gone = true;
    clearTimeout(timer);
    Object.values(plots).forEach((each) => each.close());
    map.close();
  };
}
