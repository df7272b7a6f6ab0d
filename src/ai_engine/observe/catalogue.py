"""Every metric family, once: name, kind, what it tells, labels, buckets. The code's objects and docs/metrics.md are
made from this table.

    python -m ai_engine.observe.catalogue > docs/metrics.md

Names are ``ai_engine_{layer}_{component}_{metric}`` with base units; a counter is exposed with ``_total`` behind it.
Owns the table and the page. Does not own what moves a family (metrics.py, sampled.py, host.py).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

PREFIX: Final = "ai_engine_"
MAX_SERIES: Final = 100
"""Label sets of one family; further ones are counted under "other"."""
MAX_HISTOGRAMS: Final = 32
"""As MAX_SERIES, of a histogram, which is a series for each bucket."""
SERIES_BUDGET: Final = 5000
"""Series of the whole page at most, whatever clients, keys and models there are; a test holds it."""

SECONDS: Final = tuple(base * 10.0**power for power in range(-4, 3) for base in (1.0, 2.0, 5.0))
"""100 us to 500 s, three to a decade."""
SHORT_SECONDS: Final = tuple(base * 10.0**power for power in range(-6, 1) for base in (1.0, 2.0, 5.0))
"""1 us to 5 s: single ops."""
TOKENS: Final = tuple(float(1 << power) for power in range(18))
"""1 to 131072, powers of two."""
COUNTS: Final = tuple(float(1 << power) for power in range(9))
BYTES: Final = tuple(float(1 << power) for power in range(6, 25, 2))
"""64 B to 16 MiB, powers of four."""
RATIOS: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

Kind = Literal["counter", "gauge", "histogram"]


class Family(msgspec.Struct, frozen=True):
    """``labels`` take values from small sets; ``buckets`` are a histogram's upper bounds."""

    name: str  # without PREFIX, and without the counter's _total
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def exposed(self) -> str:
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"

    @property
    def unit(self) -> str:
        for unit in ("seconds", "bytes", "ratio", "tokens", "pages", "hertz", "cores"):
            if self.name.endswith((f"_{unit}", f"_{unit}_requested")):
                return unit
        return "bytes/second" if self.name.endswith("_per_second") else "1"


def counter(name: str, help: str, *labels: str) -> Family:
    return Family(name, "counter", help, labels)


def gauge(name: str, help: str, *labels: str) -> Family:
    return Family(name, "gauge", help, labels)


def histogram(name: str, help: str, *labels: str, buckets: tuple[float, ...] = SECONDS) -> Family:
    return Family(name, "histogram", help, labels, buckets)


FAMILIES: Final[tuple[Family, ...]] = (
    # L7: HTTP
    counter("l7_api_http_requests", "HTTP requests.", "route", "method"),
    counter("l7_api_http_responses", "HTTP responses.", "route", "status"),
    gauge("l7_api_http_requests_in_flight", "Exchanges that have begun and not ended."),
    histogram("l7_api_http_request_duration_seconds", "Duration of an HTTP exchange.", "route"),
    histogram("l7_api_http_request_body_bytes", "Bytes of a request's body as sent.", buckets=BYTES),
    histogram("l7_api_http_response_body_bytes", "Bytes of a response's body.", buckets=BYTES),
    histogram("l7_api_http_response_first_byte_seconds", "Arrival to the first byte of an answer of the model."),
    histogram("l7_api_http_receive_seconds", "Head of a request to the end of its body."),
    gauge("l7_api_http_connections_open", "TCP connections to the doors."),
    counter("l7_api_http_client_disconnects", "Clients that left before their answer."),
    histogram("l7_api_http_event_loop_lag_seconds", "How late the event loop runs what is due, sampled."),
    counter("l7_api_stream_events", "Writes of streamed answers."),
    counter("l7_api_stream_bytes", "Bytes of streamed answers."),
    histogram("l7_api_stream_backpressure_seconds", "Time that one streamed answer spent in writing to its client."),
    counter("l7_api_stream_errors_midstream", "Streams that broke after they had begun."),
    histogram("l7_api_worker_submit_seconds", "Asking the worker to take a request, until it has."),
    # L7: the door
    counter("l7_door_auth_attempts", "Requests that needed a key or would have."),
    counter("l7_door_auth_failures", "Requests without a good API key."),
    gauge("l7_door_auth_active_keys", "API keys in force."),
    gauge("l7_door_auth_keys_stale", "1 while the keys file is broken and older keys are in force."),
    counter("l7_door_contract_checks", "Bodies checked against their contract."),
    counter("l7_door_contract_violations", "Bodies refused, by status.", "status"),
    counter("l7_door_contract_warnings", "Warnings given for fields that were taken and not used."),
    histogram("l7_door_contract_validation_seconds", "Decoding and checking a body, and deciding what it asks."),
    counter("l7_door_limit_rejections", "Requests refused because their key's limits are used up."),
    counter("l7_door_admission_rejections", "Requests refused at admission, by error code.", "reason"),
    # L6
    counter("l6_cost_usage_tokens", "Tokens of finished choices, by kind.", "kind"),
    counter("l6_cost_key_tokens", "Tokens of finished requests, by key and direction.", "key", "direction"),
    counter("l6_cost_usage_cpu_seconds", "Compute threads times the seconds of the steps they ran."),
    gauge("l6_ops_startup_phase_seconds", "Duration of a start-up phase.", "phase"),
    gauge("l6_ops_startup_ready_seconds", "Process start to the first moment of readiness."),
    gauge("l6_ops_drain_state", "1 while the server drains."),
    gauge("l6_ops_health_ready", "1 while an engine is attached that takes work."),
    histogram("l6_ops_health_probe_seconds", "Duration of a health probe."),
    counter("l6_ops_worker_starts", "Workers started, the first included."),
    counter("l6_ops_trace_requests", "Requests whose trace was recorded."),
    counter("l6_ops_trace_spans", "Spans of requests and their parts that were recorded."),
    counter("l6_ops_trace_malformed", "Requests whose traceparent broke the rules; they got a new trace."),
    counter("l6_ops_trace_ring_entries", "Entries copied from the threads' rings."),
    counter("l6_ops_trace_dropped", "What traces lack: ring entries, steps, requests or exported spans.", "what"),
    counter("l6_ops_trace_exported_spans", "Spans that the OpenTelemetry collector took."),
    counter("l6_ops_trace_failures", "Failures of the collector of rings, which cost entries at most."),
    gauge("l6_ops_trace_retained_bytes", "Memory of what traces are made from.", "what"),
    gauge("l6_ops_trace_coverage_ratio", "Ring entries read over those written since the engine was attached."),
    counter("l6_ops_telemetry_lost_events", "Events lost between worker and gateway, or of an unknown kind.", "where"),
    counter("l6_ops_log_lines", "Lines logged, by level.", "level"),
    counter("l6_ops_log_suppressed", "Lines not logged to keep the rate."),
    gauge("l6_ops_build_info", "1, with the build in the labels.", "version"),
    gauge("l6_ops_metrics_series", "Series in the last scrape."),
    gauge("l6_ops_metrics_scrape_seconds", "Time the last scrape took to render."),
    gauge("l6_slo_state", "Of each objective: 1 met, 0 missed, -1 not enough to tell.", "objective"),
    gauge("l6_slo_burn_rate_ratio", "Share of bad events over the share that the objective allows.", "objective"),
    gauge("l6_slo_events", "Events that the objective was judged by.", "objective"),
    # L5: requests
    counter("l5_request_lifecycle_started", "Requests taken in."),
    counter("l5_request_lifecycle_finished", "Choices ended, by outcome.", "outcome"),
    counter("l5_request_lifecycle_cancelled", "Choices cancelled."),
    histogram("l5_request_lifecycle_ttft_seconds", "Arrival to first token."),
    histogram("l5_request_lifecycle_tpot_seconds", "Mean time per output token after the first."),
    histogram("l5_request_lifecycle_itl_seconds", "Gap between consecutive deliveries of a choice."),
    histogram("l5_request_lifecycle_max_itl_seconds", "Longest gap of a choice."),
    histogram("l5_request_lifecycle_e2e_seconds", "Arrival to last token."),
    histogram("l5_request_lifecycle_queue_seconds", "Arrival to first step, of finished choices."),
    histogram("l5_request_lifecycle_prefill_seconds", "First step to first token."),
    histogram("l5_request_lifecycle_decode_seconds", "First token to last token."),
    histogram("l5_request_shape_prompt_tokens", "Tokens of a prompt.", buckets=TOKENS),
    histogram("l5_request_shape_output_tokens", "Tokens of a finished choice.", buckets=TOKENS),
    histogram("l5_request_shape_cached_prompt_tokens", "Prompt tokens found in the prefix cache.", buckets=TOKENS),
    histogram("l5_request_shape_max_tokens_requested", "Output tokens that a request allows itself.", buckets=TOKENS),
    histogram("l5_request_shape_n_choices", "Choices asked for.", buckets=COUNTS),
    # L5: scheduling
    gauge("l5_sched_queue_requests", "Requests waiting."),
    gauge("l5_sched_queue_tokens", "Tokens waiting."),
    histogram("l5_sched_queue_wait_seconds", "Arrival to first step."),
    gauge("l5_sched_batch_running_requests", "Sequences that hold pages."),
    histogram("l5_sched_batch_size", "Sequences in a step.", buckets=COUNTS),
    histogram("l5_sched_batch_step_tokens", "Tokens computed in a step.", buckets=TOKENS),
    histogram("l5_sched_batch_prefill_tokens", "Prompt tokens computed in a step.", buckets=TOKENS),
    histogram("l5_sched_batch_decode_tokens", "Output tokens computed in a step.", buckets=TOKENS),
    gauge("l5_sched_batch_occupancy_ratio", "Rows of the last step over the rows that a step may have."),
    counter("l5_sched_step", "Steps run."),
    histogram("l5_sched_step_seconds", "Duration of a step."),
    histogram("l5_sched_step_plan_seconds", "Time the scheduler took to plan a step."),
    histogram(
        "l5_sched_step_prediction_error_ratio", "|predicted - actual| over actual duration of a step.", buckets=RATIOS
    ),
    counter("l5_sched_step_idle_seconds", "Time between steps with nobody running."),
    counter("l5_sched_step_bubble_seconds", "Time between steps with somebody running."),
    counter("l5_sched_preempt", "Sequences that lost their pages, by why.", "reason"),
    counter("l5_sched_preempt_recomputed_tokens", "Tokens computed again after a preemption."),
    gauge("l5_sched_watchdog_heartbeat_timestamp_seconds", "Unix time of the last step."),
    # L4
    histogram("l4_text_template_render_seconds", "Rendering a conversation by the model's template."),
    histogram("l4_text_tokenizer_encode_seconds", "Text to ids."),
    histogram("l4_text_tokenizer_wait_seconds", "Waiting for the encoder's thread."),
    counter("l4_text_tokenizer_encode_tokens", "Ids that prompts became."),
    histogram("l4_text_detokenizer_decode_seconds", "Ids to text, stop strings and shapes, of a whole request."),
    counter("l4_text_stop_matches", "Choices that a stop string ended."),
    # L3: KV pages
    gauge("l3_kv_pool_capacity_pages", "KV pages in all."),
    gauge("l3_kv_pool_used_pages", "KV pages held by running sequences."),
    gauge("l3_kv_pool_free_pages", "KV pages with nothing in them."),
    gauge("l3_kv_pool_cached_pages", "KV pages that can be evicted."),
    gauge("l3_kv_pool_usage_ratio", "Held pages over all pages."),
    gauge("l3_kv_pool_fragmentation_ratio", "Room in held pages that no token of the last step fills."),
    gauge("l3_kv_pool_page_tokens", "Tokens of a KV page."),
    gauge("l3_kv_pool_bytes", "Memory of the KV pool."),
    counter("l3_kv_prefix_query_tokens", "Prompt tokens looked up in the prefix cache."),
    counter("l3_kv_prefix_hit_tokens", "Prompt tokens found there."),
    gauge("l3_kv_prefix_hit_ratio", "Hit tokens over looked-up tokens since the start."),
    counter("l3_kv_evict_pages", "Cached pages given up for new ones."),
    # L3: the model
    gauge("l3_model_registry_loaded", "Models that are loaded."),
    gauge("l3_model_weights_bytes", "Memory of the weights."),
    gauge("l3_model_weights_load_seconds", "Reading and packing the weights."),
    gauge(
        "l3_model_memory_bytes", "Memory that the engine's process takes, by category; their sum is all.", "category"
    ),
    gauge("l3_model_reserved_bytes", "Memory that the engine set aside when it was built, by category.", "category"),
    counter("l3_model_forward", "Forward passes."),
    counter("l3_model_forward_tokens", "Tokens through the model, by kind.", "kind"),
    histogram("l3_model_forward_seconds", "Time in kernels of a sampled step."),
    histogram("l3_model_forward_host_seconds", "Time of a sampled step outside the kernels."),
    histogram("l3_model_layer_seconds", "Time of one layer of a sampled step.", buckets=SHORT_SECONDS),
    gauge("l3_model_forward_mbu_ratio", "Bytes of the last sampled step over what memory could bring meanwhile."),
    gauge("l3_model_forward_mfu_ratio", "Operations of the last sampled step over what the cores could do meanwhile."),
    counter("l3_sample_sampler_tokens", "Logits rows sampled."),
    counter("l3_sample_sampler_greedy", "Requests that took the likeliest token (temperature 0)."),
    histogram("l3_sample_sampler_seconds", "Sampling in a sampled step.", buckets=SHORT_SECONDS),
    counter("l3_sample_spec_drafts", "Guesses at what comes next that a step verified, by sequence."),
    counter("l3_sample_spec_draft_tokens", "Tokens guessed."),
    counter("l3_sample_spec_accepted_tokens", "Guessed tokens that were right."),
    gauge("l3_sample_spec_acceptance_ratio", "Right over guessed tokens since the start."),
    # L2
    counter("l2_kernel_launches", "Ops run, by op.", "op"),
    histogram("l2_kernel_seconds", "Time of one op of a sampled step.", "op", buckets=SHORT_SECONDS),
    counter("l2_kernel_sampled_bytes", "Bytes that the sampled ops had to move at least.", "op"),
    counter("l2_kernel_sampled_flops", "Operations of the sampled ops.", "op"),
    gauge("l2_kernel_achieved_bandwidth_bytes_per_second", "Of an op in the last sampled step.", "op"),
    histogram("l2_team_wait_seconds", "Thread time between ops of a sampled step: waiting for one another."),
    counter("l2_team_late_passes", "Threads that came to a sampled op when its work was done."),
    gauge("l2_team_threads", "Compute threads."),
    counter("l2_jit_compiles", "Builds of the kernels for this machine."),
    gauge("l2_jit_compile_seconds", "Duration of the last build of the kernels."),
    # L1
    gauge("l1_host_cpu_utilisation_ratio", "Busy share of the machine's cores since the last scrape."),
    gauge("l1_host_cpu_steal_ratio", "Share that the hypervisor gave to others since the last scrape."),
    counter("l1_host_cpu_throttled_seconds", "Time that the cgroup's quota kept our threads off the cores."),
    gauge("l1_host_cpu_quota_cores", "Cores that the affinity mask and the cgroup allow."),
    gauge("l1_host_memory_available_bytes", "Memory that could be taken without swapping."),
    counter("l1_host_process_cpu_seconds", "CPU time.", "process"),
    gauge("l1_host_process_resident_bytes", "Resident memory.", "process"),
    gauge("l1_host_process_pss_bytes", "Proportional memory: shared pages divided by who shares them.", "process"),
    gauge("l1_host_process_threads", "Threads.", "process"),
    gauge("l1_host_process_open_fds", "Open file descriptors.", "process"),
)

BY_NAME: Final = {family.name: family for family in FAMILIES}
assert len(BY_NAME) == len(FAMILIES)

LAYERS: Final = {
    "l7": "L7 api", "l6": "L6 observe", "l5": "L5 serving", "l4": "L4 data", "l3": "L3 runtime", "l2": "L2 kernels",
    "l1": "L1 hardware",
}  # fmt: skip

INFERENCE_EXTENSION: Final = (
    ("TotalQueuedRequests", "l5_sched_queue_requests"),
    ("TotalRunningRequests", "l5_sched_batch_running_requests"),
    ("KVCacheUtilization", "l3_kv_pool_usage_ratio"),
    ("BlockSize", "l3_kv_pool_page_tokens"),
    ("NumGPUBlocks (pages in all)", "l3_kv_pool_capacity_pages"),
)
"""What the model-server protocol of the Kubernetes Gateway API inference extension asks for, and where it is."""

HEAD: Final = """# Metrics

`GET /metrics` in Prometheus exposition format; `--metrics-addr HOST:PORT` serves it on a listener of its own, without
keys.
Made from `src/ai_engine/observe/catalogue.py` by `python -m ai_engine.observe.catalogue > docs/metrics.md`.

Every figure is of both processes together: the worker's events ride to the gateway with each step. Latencies and
outcomes count choices (a request with n = 2 has two). Histograms start at 100 us, single ops at 1 us, three buckets to
a decade. A family has at most {series} label sets, a histogram {histograms} (more are counted under `other`), the page
at most {budget} series whatever clients send.
*Sampled* families come from two steps a second at most, decoded from the threads' stamps.

## Kubernetes inference extension

| its metric | ours |
|---|---|
"""


def page() -> str:
    """docs/metrics.md."""
    lines = [HEAD.format(series=MAX_SERIES, histograms=MAX_HISTOGRAMS, budget=SERIES_BUDGET)]
    lines += [f"| {theirs} | `{BY_NAME[ours].exposed}` |\n" for theirs, ours in INFERENCE_EXTENSION]
    for layer, title in LAYERS.items():
        lines.append(f"\n## {title}\n\n| name | type | unit | labels | what it tells |\n|---|---|---|---|---|\n")
        lines += [_row(family) for family in FAMILIES if family.name.startswith(f"{layer}_")]
    return "".join(lines)


def _row(family: Family) -> str:
    labels = ", ".join(family.labels)
    text = family.help.replace("|", "\\|")
    return f"| `{family.exposed}` | {family.kind} | {family.unit} | {labels} | {text} |\n"


def main(arguments: Sequence[str] = ()) -> None:
    sys.stdout.write(page())


if __name__ == "__main__":
    main()
