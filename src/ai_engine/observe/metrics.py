"""Metrics: the Telemetry port as the families of catalogue.py.

Owns which event moves which family, and bounded labels. Does not own the events (ports.telemetry), the families nor who
serves the text. Emitting adds to plain numbers under a lock (a step event costs a few microseconds); Prometheus objects
are built only when somebody looks, by the collector of a registry of our own. What nobody emits (memory, threads, what
traces hold) is asked of probes at that moment.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ai_engine.observe.catalogue import FAMILIES, MAX_HISTOGRAMS, MAX_SERIES, Family
from ai_engine.ports.clock import Clock, SystemClock
from ai_engine.ports.errors import ERRORS_BY_CODE
from ai_engine.ports.telemetry import (
    ClockPair,
    EngineReady,
    Event,
    HttpDone,
    HttpStarted,
    KeysRead,
    LoopLag,
    MemorySet,
    PhaseDone,
    RequestQueued,
    RequestRefused,
    RequestScheduled,
    RequestTraced,
    SequenceOpened,
    SequencePreempted,
    StepDone,
    StepSampled,
    TokensSent,
    TokenTimes,
)

OUTCOMES = ("stop", "length", "cancelled", "failed")
OPEN_ROUTES = frozenset({"/livez", "/readyz", "/health"})
Probe = Callable[[], Iterable[tuple[str, float, tuple[str, ...]]]]
"""(family, its value now, label values)"""


class Histogram:
    """Counts per bucket; the last one is beyond all bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def copy(self) -> Histogram:
        other = Histogram(self.bounds)
        other.counts, other.total = self.counts[:], self.total
        return other

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add_all(self, values: Sequence[float]) -> None:
        bounds, counts = self.bounds, self.counts
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        self.total += sum(values)

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound as text, number at or below it) pairs, as the exposition format wants them."""
        rows: list[tuple[str, float]] = []
        running = 0
        for bound, count in zip([*map(_bound_text, self.bounds), "+Inf"], self.counts, strict=True):
            running += count
            rows.append((bound, running))
        return rows


def _bound_text(bound: float) -> str:
    return str(float(f"{bound:.6g}"))


class Series:
    """Numbers of one family by label values; a family without labels has the one key ()."""

    def __init__(self, labels: tuple[str, ...]) -> None:
        self.labels = labels
        self.values: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}

    def key(self, values: tuple[str, ...]) -> tuple[str, ...]:
        if values in self.values or len(self.values) < MAX_SERIES:
            return values
        return ("other",) * len(self.labels)

    def add(self, amount: float, *values: str) -> None:
        key = self.key(values)
        self.values[key] = self.values.get(key, 0.0) + amount

    def set(self, value: float, *values: str) -> None:
        self.values[self.key(values)] = value


class Histograms:
    """Histograms of one family by label values."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.values: dict[tuple[str, ...], Histogram] = {} if family.labels else {(): Histogram(family.buckets)}

    def of(self, *values: str) -> Histogram:
        found = self.values.get(values)
        if found is None:
            key = values if len(self.values) < MAX_HISTOGRAMS else ("other",) * len(values)
            found = self.values.setdefault(key, Histogram(self.family.buckets))
        return found


class Metrics(Collector):
    """Implements ports.telemetry.Telemetry; ``render`` is what /metrics sends. Safe to use from any thread."""

    def __init__(self, version: str, *, clock: Clock | None = None) -> None:
        self.lost = 0  # events of a kind that is not known here
        self.probes: list[Probe] = []
        self._clock = clock or SystemClock()
        self._born_s = self._clock.now_s()
        self._lock = threading.Lock()
        self._h = {family.name: Histograms(family) for family in FAMILIES if family.kind == "histogram"}
        self._c = {family.name: Series(family.labels) for family in FAMILIES if family.kind == "counter"}
        self._g = {family.name: Series(family.labels) for family in FAMILIES if family.kind == "gauge"}
        self._g["l6_ops_build_info"].set(1.0, version)
        for outcome in OUTCOMES:
            self._c["l5_request_lifecycle_finished"].add(0.0, outcome)
        self._step: StepDone | None = None
        self._engine: EngineReady | None = None
        self._launches: list[tuple[tuple[str, ...], int]] = []  # of one run of the program, by op
        self._opened: dict[tuple[str, int], None] = {}  # choices that have had pages: opened again, they were preempted
        self._takers: dict[type, Callable[..., None]] = {
            StepDone: self._step_taker(),
            TokenTimes: self._on_tokens,
            RequestQueued: self._on_queued,
            RequestScheduled: self._on_scheduled,
            RequestRefused: self._on_refused,
            MemorySet: self._on_memory,
            PhaseDone: self._on_phase,
            HttpStarted: self._on_http_started,
            HttpDone: self._on_http,
            ClockPair: _ignore,
            SequenceOpened: self._on_opened,
            SequencePreempted: self._on_preempted,
            RequestTraced: self._on_traced,
            KeysRead: self._on_keys,
            EngineReady: self._on_engine,
            StepSampled: self._on_sampled,
            LoopLag: self._on_lag,
            TokensSent: _ignore,
        }
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def emit(self, event: Event) -> None:
        taker = self._takers.get(type(event))
        with self._lock:
            if taker is None:
                self.lost += 1
            else:
                taker(event)

    def render(self) -> bytes:
        """All families as exposition text."""
        started_s = self._clock.now_s()
        text: bytes = generate_latest(self.registry)
        with self._lock:
            self._g["l6_ops_metrics_series"].set(sum(line[:1] != b"#" for line in text.splitlines()))
            self._g["l6_ops_metrics_scrape_seconds"].set(self._clock.now_s() - started_s)
        return text

    def pages_now(self) -> tuple[int, int, int, float]:
        """Held, cached and all KV pages of the last step, and the share of the held ones' room that no token fills."""
        step, engine = self._step, self._engine
        if step is None or engine is None:
            return 0, 0, 0, 0.0
        return step.pages_held, step.pages_cached, step.pages_total, _unfilled(step, engine)

    # --- what each event moves ---

    def _step_taker(self) -> Callable[[StepDone], None]:
        """The hot one: looks everything up once."""
        h, c = {name: family.values.get(()) for name, family in self._h.items()}, self._c
        named = [
            h[f"l5_sched_{name}"]
            for name in (
                "step_seconds", "step_plan_seconds", "batch_size", "batch_step_tokens", "batch_prefill_tokens",
                "batch_decode_tokens", "step_prediction_error_ratio",
            )
        ]  # fmt: skip
        seconds, plan, size, step_tokens, prefill, decode, error = (n for n in named if n is not None)
        steps, forwards, rows = (
            c[name].values for name in ("l5_sched_step", "l3_model_forward", "l3_sample_sampler_tokens")
        )
        idle, bubble = c["l5_sched_step_idle_seconds"].values, c["l5_sched_step_bubble_seconds"].values
        cpu, launches = c["l6_cost_usage_cpu_seconds"].values, c["l2_kernel_launches"]
        tokens = c["l3_model_forward_tokens"].values
        tokens.update({("prefill",): 0.0, ("decode",): 0.0})

        def take(event: StepDone) -> None:
            before, self._step = self._step, event
            took = event.ended_s - event.started_s
            if before is not None and event.started_s > before.ended_s:
                gap = event.started_s - before.ended_s
                (bubble if before.running else idle)[()] += gap
            steps[()] += 1
            plan.add(event.plan_s)
            if not event.num_seqs:  # it only closed sequences
                return
            forwards[()] += 1
            rows[()] += event.kept_rows
            seconds.add(took)
            size.add(event.num_seqs)
            step_tokens.add(event.prefill_tokens + event.decode_tokens)
            if event.prefill_tokens:
                prefill.add(event.prefill_tokens)
                tokens[("prefill",)] += event.prefill_tokens
            if event.decode_tokens:
                decode.add(event.decode_tokens)
                tokens[("decode",)] += event.decode_tokens
            if event.predicted_s and took > 0:
                error.add(abs(event.predicted_s - took) / took)
            if self._engine is not None:
                cpu[()] += took * self._engine.threads
                for key, count in self._launches:
                    launches.values[key] = launches.values.get(key, 0.0) + count
            if event.evicted_pages or event.drafted:
                self._on_rare(event)

        return take

    def _on_rare(self, event: StepDone) -> None:
        self._c["l3_kv_evict_pages"].add(event.evicted_pages)
        self._c["l3_sample_spec_drafts"].add(sum(work.draft > 0 for work in event.work))
        self._c["l3_sample_spec_draft_tokens"].add(event.drafted)
        self._c["l3_sample_spec_accepted_tokens"].add(event.accepted)

    def _on_preempted(self, event: SequencePreempted) -> None:
        self._c["l5_sched_preempt"].add(1, event.reason)

    def _on_tokens(self, event: TokenTimes) -> None:
        h, c = self._h, self._c
        self._opened.pop((event.request_id, event.index), None)
        c["l5_request_lifecycle_finished"].add(1, event.finish if event.finish in OUTCOMES else "other")
        if event.finish == "cancelled":
            c["l5_request_lifecycle_cancelled"].add(1)
        h["l5_request_lifecycle_e2e_seconds"].of().add(event.e2e_s)
        h["l5_request_lifecycle_queue_seconds"].of().add(event.queue_s)
        h["l5_request_shape_output_tokens"].of().add(event.completion_tokens)
        usage = c["l6_cost_usage_tokens"]
        usage.add(event.prompt_tokens, "prompt")
        usage.add(event.cached_tokens, "cached")
        usage.add(event.completion_tokens, "completion")
        if event.ttft_s is not None:
            decode_s = event.e2e_s - event.ttft_s
            h["l5_request_lifecycle_ttft_seconds"].of().add(event.ttft_s)
            h["l5_request_lifecycle_prefill_seconds"].of().add(max(0.0, event.ttft_s - event.queue_s))
            h["l5_request_lifecycle_decode_seconds"].of().add(decode_s)
            if event.completion_tokens > 1:
                h["l5_request_lifecycle_tpot_seconds"].of().add(decode_s / (event.completion_tokens - 1))
        if event.gaps_s:
            h["l5_request_lifecycle_itl_seconds"].of().add_all(event.gaps_s)
            h["l5_request_lifecycle_max_itl_seconds"].of().add(max(event.gaps_s))

    def _on_queued(self, event: RequestQueued) -> None:
        self._c["l5_request_lifecycle_started"].add(1)
        self._h["l5_request_shape_prompt_tokens"].of().add(event.prompt_tokens)
        self._h["l5_request_shape_n_choices"].of().add(event.n)

    def _on_scheduled(self, event: RequestScheduled) -> None:
        self._h["l5_sched_queue_wait_seconds"].of().add(event.queue_s)
        self._h["l5_request_shape_cached_prompt_tokens"].of().add(event.cached_tokens)
        self._c["l3_kv_prefix_query_tokens"].add(event.prompt_tokens)
        self._c["l3_kv_prefix_hit_tokens"].add(event.cached_tokens)

    def _on_opened(self, event: SequenceOpened) -> None:
        choice = event.request_id, event.index
        if choice in self._opened:
            self._c["l5_sched_preempt_recomputed_tokens"].add(event.known_tokens - event.cached_tokens)
        elif len(self._opened) < 1 << 16:  # each leaves when it ends
            self._opened[choice] = None

    def _on_refused(self, event: RequestRefused) -> None:
        reason = event.reason if event.reason in ERRORS_BY_CODE else "other"
        self._c["l7_door_admission_rejections"].add(1, reason)

    def _on_memory(self, event: MemorySet) -> None:
        self._g["l3_model_reserved_bytes"].set(event.nbytes, event.category)
        if event.category == "kv":
            self._g["l3_kv_pool_bytes"].set(event.nbytes)
        elif event.category == "weights":
            self._g["l3_model_weights_bytes"].set(event.nbytes)

    def _on_phase(self, event: PhaseDone) -> None:
        self._g["l6_ops_startup_phase_seconds"].set(event.seconds, event.phase)
        if event.phase == "load weights":
            self._g["l3_model_weights_load_seconds"].set(event.seconds)
        elif event.phase == "build kernels":
            self._c["l2_jit_compiles"].add(1)
            self._g["l2_jit_compile_seconds"].set(event.seconds)

    def _on_engine(self, event: EngineReady) -> None:
        self._c["l6_ops_worker_starts"].add(1)
        if self._engine is None:
            self._g["l6_ops_startup_ready_seconds"].set(self._clock.now_s() - self._born_s)
        self._engine = event
        self._launches = [((op,), count) for op, count in Counter(event.ops).items()]
        self._g["l2_team_threads"].set(event.threads)
        self._g["l3_kv_pool_page_tokens"].set(event.page_tokens)
        self._g["l3_model_registry_loaded"].set(1)

    def _on_sampled(self, event: StepSampled) -> None:
        h, c, g = self._h, self._c, self._g
        h["l3_model_forward_seconds"].of().add(event.kernel_s)
        h["l3_model_forward_host_seconds"].of().add(max(0.0, event.step_s - event.kernel_s))
        h["l3_model_layer_seconds"].of().add_all(event.layers_s)
        h["l2_team_wait_seconds"].of().add(event.wait_s)
        c["l2_team_late_passes"].add(event.late_passes)
        seconds: dict[str, float] = {}
        nbytes: dict[str, int] = {}
        for op, took, moved, flops in event.ops:
            h["l2_kernel_seconds"].of(op).add(took)
            c["l2_kernel_sampled_bytes"].add(moved, op)
            c["l2_kernel_sampled_flops"].add(flops, op)
            seconds[op], nbytes[op] = seconds.get(op, 0.0) + took, nbytes.get(op, 0) + moved
            if op == "sample":
                h["l3_sample_sampler_seconds"].of().add(took)
        for op, took in seconds.items():
            g["l2_kernel_achieved_bandwidth_bytes_per_second"].set(nbytes[op] / took if took else 0.0, op)
        if event.mbu is not None and event.mfu is not None:
            g["l3_model_forward_mbu_ratio"].set(event.mbu)
            g["l3_model_forward_mfu_ratio"].set(event.mfu)

    def _on_lag(self, event: LoopLag) -> None:
        self._h["l7_api_http_event_loop_lag_seconds"].of().add(event.seconds)

    def _on_keys(self, event: KeysRead) -> None:
        self._g["l7_door_auth_active_keys"].set(event.num_keys)
        self._g["l7_door_auth_keys_stale"].set(not event.good)

    def _on_http_started(self, event: HttpStarted) -> None:
        self._g["l7_api_http_requests_in_flight"].values[()] += 1

    def _on_http(self, event: HttpDone) -> None:
        h, c = self._h, self._c
        self._g["l7_api_http_requests_in_flight"].values[()] -= 1
        c["l7_api_http_requests"].add(1, event.route, event.method)
        c["l7_api_http_responses"].add(1, event.route, str(event.status))
        h["l7_api_http_request_duration_seconds"].of(event.route).add(event.seconds)
        h["l7_api_http_response_body_bytes"].of().add(event.response_bytes)
        if event.request_bytes:
            h["l7_api_http_request_body_bytes"].of().add(event.request_bytes)
        if event.malformed_trace:
            c["l6_ops_trace_malformed"].add(1)
        if event.route in OPEN_ROUTES:
            h["l6_ops_health_probe_seconds"].of().add(event.seconds)
        else:
            c["l7_door_auth_attempts"].add(1)
        if event.checked:
            c["l7_door_contract_checks"].add(1)
            if event.status in (400, 404, 413, 415, 422):
                c["l7_door_contract_violations"].add(1, str(event.status))
        if event.status == 401:
            c["l7_door_auth_failures"].add(1)
        elif event.status == 429:
            c["l7_door_limit_rejections"].add(1)
        elif event.status == 499:
            c["l7_api_http_client_disconnects"].add(1)

    def _on_traced(self, event: RequestTraced) -> None:
        h, c, said = self._h, self._c, event.attributes
        parts = {part.name: part for part in event.parts}
        for name, family in PART_FAMILIES:
            if name in parts:
                h[family].of().add(parts[name].seconds)
        if "send" in parts:
            h["l7_api_http_response_first_byte_seconds"].of().add(parts["send"].started_s - event.started_s)
        if said.get("gen_ai.request.stream") is True and "send" in parts:
            h["l7_api_stream_backpressure_seconds"].of().add(parts["send"].seconds)
            c["l7_api_stream_events"].add(parts["send"].count)
            c["l7_api_stream_bytes"].add(event.response_bytes)
            if event.status == 200 and said.get("ai_engine.failed") is True:
                c["l7_api_stream_errors_midstream"].add(1)
        into, out = _number(said.get("gen_ai.usage.input_tokens")), _number(said.get("gen_ai.usage.output_tokens"))
        c["l4_text_tokenizer_encode_tokens"].add(into)
        c["l6_cost_key_tokens"].add(into, event.key, "input")
        c["l6_cost_key_tokens"].add(out, event.key, "output")
        if not event.requests:  # it was refused at the door
            return
        c["l6_ops_trace_requests"].add(1)
        c["l6_ops_trace_spans"].add(1 + len(event.parts))
        h["l5_request_shape_max_tokens_requested"].of().add(_number(said.get("gen_ai.request.max_tokens")))
        c["l3_sample_sampler_greedy"].add(said.get("gen_ai.request.temperature") == 0)
        c["l7_door_contract_warnings"].add(_number(said.get("ai_engine.warnings")))
        c["l4_text_stop_matches"].add(_number(said.get("ai_engine.stop_matches")))

    # --- when somebody looks ---

    def collect(self) -> Iterator[Metric]:
        """Families from a copy of the numbers: emitting waits for the copy at most, a hundred microseconds."""
        found = [item for probe in list(self.probes) for item in probe()]
        with self._lock:
            for name, value, labels in found:
                (self._c if name in self._c else self._g)[name].set(value, *labels)
            self._c["l6_ops_telemetry_lost_events"].set(self.lost, "kind")
            self._derive_gauges()
            histograms = {
                name: {key: one.copy() for key, one in family.values.items()} for name, family in self._h.items()
            }
            plain = {name: dict(series.values) for name, series in (*self._c.items(), *self._g.items())}
        for family in FAMILIES:
            yield _metric(family, histograms.get(family.name, {}), plain.get(family.name, {}))

    def _derive_gauges(self) -> None:
        g, step = self._g, self._step
        for ratio, part, whole in (
            ("l3_kv_prefix_hit_ratio", "l3_kv_prefix_hit_tokens", "l3_kv_prefix_query_tokens"),
            ("l3_sample_spec_acceptance_ratio", "l3_sample_spec_accepted_tokens", "l3_sample_spec_draft_tokens"),
        ):
            total = self._c[whole].values[()]
            g[ratio].set(self._c[part].values[()] / total if total else 0.0)
        if step is None:
            return
        g["l5_sched_watchdog_heartbeat_timestamp_seconds"].set(
            self._clock.wall_s() - (self._clock.now_s() - step.ended_s)
        )
        g["l5_sched_queue_requests"].set(step.queued_requests)
        g["l5_sched_queue_tokens"].set(step.queued_tokens)
        g["l5_sched_batch_running_requests"].set(step.running)
        g["l3_kv_pool_capacity_pages"].set(step.pages_total)
        g["l3_kv_pool_used_pages"].set(step.pages_held)
        g["l3_kv_pool_free_pages"].set(step.pages_free)
        g["l3_kv_pool_cached_pages"].set(step.pages_cached)
        g["l3_kv_pool_usage_ratio"].set(step.pages_held / step.pages_total if step.pages_total else 0.0)
        engine = self._engine
        if engine is not None:
            g["l5_sched_batch_occupancy_ratio"].set(sum(work.rows for work in step.work) / engine.max_step_tokens)
            g["l3_kv_pool_fragmentation_ratio"].set(_unfilled(step, engine))


PART_FAMILIES = (
    ("receive", "l7_api_http_receive_seconds"),
    ("contract", "l7_door_contract_validation_seconds"),
    ("encode_wait", "l4_text_tokenizer_wait_seconds"),
    ("template", "l4_text_template_render_seconds"),
    ("tokenise", "l4_text_tokenizer_encode_seconds"),
    ("submit", "l7_api_worker_submit_seconds"),
    ("detokenise", "l4_text_detokenizer_decode_seconds"),
)


def _unfilled(step: StepDone, engine: EngineReady) -> float:
    room = step.pages_held * engine.page_tokens
    return max(0.0, 1 - sum(work.context for work in step.work) / room) if room and step.work else 0.0


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _ignore(event: Event) -> None:
    """Of no use to metrics; traces take it."""


def _metric(
    family: Family, histograms: Mapping[tuple[str, ...], Histogram], plain: Mapping[tuple[str, ...], float]
) -> Metric:
    name, text, labels = f"ai_engine_{family.name}", family.help, list(family.labels)
    if family.kind == "histogram":
        made = HistogramMetricFamily(name, text, labels=labels)
        for key, histogram in histograms.items():
            made.add_metric(list(key), histogram.cumulative(), histogram.total)
        return made
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    found = kind(name, text, labels=labels)
    for key, value in plain.items():
        found.add_metric(list(key), value)
    return found
