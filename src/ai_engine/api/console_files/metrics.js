// /metrics read as numbers: the last figures, rates between two readings, percentiles of what fell in between.

/** Families that the console reads; a test holds them against the server's catalogue. */
export const NAMES = {
  running: "ai_engine_l5_sched_batch_running_requests",
  queued: "ai_engine_l5_sched_queue_requests",
  queuedTokens: "ai_engine_l5_sched_queue_tokens",
  tokens: "ai_engine_l3_model_forward_tokens_total",
  steps: "ai_engine_l5_sched_step_total",
  preempted: "ai_engine_l5_sched_preempt_total",
  kvUsage: "ai_engine_l3_kv_pool_usage_ratio",
  hitTokens: "ai_engine_l3_kv_prefix_hit_tokens_total",
  queryTokens: "ai_engine_l3_kv_prefix_query_tokens_total",
  memory: "ai_engine_l3_model_memory_bytes",
  responses: "ai_engine_l7_api_http_responses_total",
  ttft: "ai_engine_l5_request_lifecycle_ttft_seconds",
  gap: "ai_engine_l5_request_lifecycle_itl_seconds",
  step: "ai_engine_l5_sched_step_seconds",
};

const LINE = /^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"/g;

/** Exposition text -> Map(name -> [{labels, value}]). */
export function parse(text) {
  const families = new Map();
  for (const line of text.split("\n")) {
    const found = LINE.exec(line);
    if (!found) continue;
    const labels = {};
    for (const [, name, value] of (found[2] ?? "").matchAll(LABEL)) labels[name] = value;
    if (!families.has(found[1])) families.set(found[1], []);
    families.get(found[1]).push({ labels, value: Number(found[3]) });
  }
  return families;
}

/** The sum of a family's series, of those whose labels match. */
export function total(families, name, labels = {}) {
  let sum = 0;
  for (const series of families.get(name) ?? []) {
    if (Object.entries(labels).every(([key, value]) => series.labels[key] === value)) sum += series.value;
  }
  return sum;
}

/** Cumulative counts by bound, summed over the other labels: [[bound, count], ...] in order. */
export function buckets(families, name) {
  const sums = new Map();
  for (const { labels, value } of families.get(`${name}_bucket`) ?? []) {
    const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
    sums.set(bound, (sums.get(bound) ?? 0) + value);
  }
  return [...sums].sort((a, b) => a[0] - b[0]);
}

/** Quantiles of what was observed between two readings, linear within a bucket; null when nothing was. */
export function quantiles(before, after, shares) {
  const old = new Map(before);
  const grown = after.map(([bound, value]) => [bound, value - (old.get(bound) ?? 0)]);
  const all = grown.length ? grown[grown.length - 1][1] : 0;
  if (!(all > 0)) return shares.map(() => null);
  return shares.map((share) => {
    let low = 0;
    let below = 0;
    for (const [bound, value] of grown) {
      if (value >= share * all) {
        if (bound === Infinity) return low;
        return low + (bound - low) * ((share * all - below) / Math.max(value - below, 1e-9));
      }
      low = bound;
      below = value;
    }
    return low;
  });
}
