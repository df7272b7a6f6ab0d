"""Metrics: the Telemetry port as Prometheus families ``ai_engine_{layer}_{component}_{metric}``.

Owns which event moves which family, buckets, and bounded labels. Does not own the events (ports.telemetry) or who
serves the text. Emitting adds to plain numbers under a lock (a step event costs a few microseconds); Prometheus
objects are built only when somebody looks, by the collector of a registry of our own.

Units are in the names. Outcomes and latencies count choices (a request with n = 2 has two). Labels come from small
fixed sets; a family never has more than MAX_SERIES label sets, further ones are counted under "other".
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ai_engine.ports.clock import Clock, SystemClock
from ai_engine.ports.errors import ERRORS_BY_CODE
from ai_engine.ports.telemetry import (
    ClockPair,
    Event,
    HttpDone,
    KeysRead,
    MemorySet,
    PhaseDone,
    RequestQueued,
    RequestRefused,
    RequestScheduled,
    RequestTraced,
    SequenceOpened,
    StepDone,
    TokenTimes,
)

MAX_SERIES = 100
OUTCOMES = ("stop", "length", "cancelled", "failed")
SECONDS = tuple(base * 10.0**power for power in range(-4, 3) for base in (1.0, 2.0, 5.0))
"""100 us to 500 s, three to a decade."""
TOKENS = tuple(float(1 << power) for power in range(18))
"""1 to 131072, powers of two."""
COUNTS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)

HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "l5_request_lifecycle_ttft_seconds": ("Arrival to first token.", SECONDS),
    "l5_request_lifecycle_tpot_seconds": ("Mean time per output token after the first.", SECONDS),
    "l5_request_lifecycle_itl_seconds": ("Gap between consecutive deliveries of a choice.", SECONDS),
    "l5_request_lifecycle_max_itl_seconds": ("Longest gap of a choice.", SECONDS),
    "l5_request_lifecycle_e2e_seconds": ("Arrival to last token.", SECONDS),
    "l5_request_lifecycle_queue_seconds": ("Arrival to first step, of finished choices.", SECONDS),
    "l5_request_lifecycle_prefill_seconds": ("First step to first token.", SECONDS),
    "l5_request_lifecycle_decode_seconds": ("First token to last token.", SECONDS),
    "l5_request_shape_prompt_tokens": ("Tokens of a prompt.", TOKENS),
    "l5_request_shape_output_tokens": ("Tokens of a finished choice.", TOKENS),
    "l5_request_shape_cached_prompt_tokens": ("Prompt tokens found in the prefix cache.", TOKENS),
    "l5_request_shape_n_choices": ("Choices asked for.", COUNTS),
    "l5_sched_queue_wait_seconds": ("Arrival to first step.", SECONDS),
    "l5_sched_batch_size": ("Sequences in a step.", COUNTS),
    "l5_sched_batch_step_tokens": ("Tokens computed in a step.", TOKENS),
    "l5_sched_batch_prefill_tokens": ("Prompt tokens computed in a step.", TOKENS),
    "l5_sched_batch_decode_tokens": ("Output tokens computed in a step.", TOKENS),
    "l5_sched_step_seconds": ("Duration of a step.", SECONDS),
    "l5_sched_step_plan_seconds": ("Time the scheduler took to plan a step.", SECONDS),
}

COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "l7_api_http_requests": ("HTTP requests.", ("route", "method")),
    "l7_api_http_responses": ("HTTP responses.", ("route", "status")),
    "l7_api_http_client_disconnects": ("Clients that left before their answer.", ()),
    "l7_door_auth_failures": ("Requests without a good API key.", ()),
    "l7_door_admission_rejections": ("Requests refused at admission, by error code.", ("reason",)),
    "l5_request_lifecycle_started": ("Requests taken in.", ()),
    "l5_request_lifecycle_finished": ("Choices ended, by outcome.", ("outcome",)),
    "l5_request_lifecycle_cancelled": ("Choices cancelled.", ()),
    "l5_sched_step": ("Steps run.", ()),
    "l5_sched_preempt": ("Sequences that lost their pages.", ()),
    "l3_kv_prefix_query_tokens": ("Prompt tokens looked up in the prefix cache.", ()),
    "l3_kv_prefix_hit_tokens": ("Prompt tokens found there.", ()),
    "l3_kv_evict_pages": ("Cached pages given up for new ones.", ()),
    "l3_model_forward": ("Forward passes.", ()),
    "l3_model_forward_tokens": ("Tokens through the model, by kind.", ("kind",)),
    "l3_sample_sampler_tokens": ("Logits rows sampled.", ()),
    "l6_cost_usage_tokens": ("Tokens of finished choices, by kind.", ("kind",)),
}

GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "l7_door_auth_active_keys": ("API keys in force.", ()),
    "l7_door_auth_keys_stale": ("1 while the keys file is broken and older keys are in force.", ()),
    "l5_sched_queue_requests": ("Requests waiting.", ()),
    "l5_sched_queue_tokens": ("Tokens waiting.", ()),
    "l5_sched_batch_running_requests": ("Sequences that hold pages.", ()),
    "l3_kv_pool_capacity_pages": ("KV pages in all.", ()),
    "l3_kv_pool_used_pages": ("KV pages held by running sequences.", ()),
    "l3_kv_pool_free_pages": ("KV pages with nothing in them.", ()),
    "l3_kv_pool_cached_pages": ("KV pages that can be evicted.", ()),
    "l3_kv_pool_usage_ratio": ("Held pages over all pages.", ()),
    "l3_kv_prefix_hit_ratio": ("Hit tokens over looked-up tokens since the start.", ()),
    "l3_kv_pool_bytes": ("Memory of the KV pool.", ()),
    "l3_model_weights_bytes": ("Memory of the weights.", ()),
    "l3_model_memory_bytes": ("Memory by category.", ("category",)),
    "l6_ops_startup_phase_seconds": ("Duration of a start-up phase.", ("phase",)),
    "l6_ops_build_info": ("1, with the build in the labels.", ("version",)),
    "l6_ops_metrics_series": ("Series in the last scrape.", ()),
    "l6_ops_metrics_scrape_seconds": ("Time the last scrape took to render.", ()),
}


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


class Metrics(Collector):
    """Implements ports.telemetry.Telemetry; ``render`` is what /metrics sends. Safe to use from any thread."""

    def __init__(self, version: str, *, clock: Clock | None = None) -> None:
        self.lost = 0  # events of a kind that is not known here
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self._http_seconds: dict[str, Histogram] = {}
        self._counters = {name: Series(labels) for name, (_, labels) in COUNTERS.items()}
        self._gauges = {name: Series(labels) for name, (_, labels) in GAUGES.items()}
        self._gauges["l6_ops_build_info"].set(1.0, version)
        for outcome in OUTCOMES:
            self._counters["l5_request_lifecycle_finished"].add(0.0, outcome)
        self._step: StepDone | None = None
        self._takers: dict[type, Callable[..., None]] = {
            StepDone: self._step_taker(),
            TokenTimes: self._on_tokens,
            RequestQueued: self._on_queued,
            RequestScheduled: self._on_scheduled,
            RequestRefused: self._on_refused,
            MemorySet: self._on_memory,
            PhaseDone: self._on_phase,
            HttpDone: self._on_http,
            ClockPair: _ignore,
            SequenceOpened: _ignore,
            RequestTraced: _ignore,
            KeysRead: self._on_keys,
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
            self._gauges["l6_ops_metrics_series"].set(sum(line[:1] != b"#" for line in text.splitlines()))
            self._gauges["l6_ops_metrics_scrape_seconds"].set(self._clock.now_s() - started_s)
        return text

    # --- what each event moves ---

    def _step_taker(self) -> Callable[[StepDone], None]:
        """The hot one: looks everything up once."""
        h, c = self._histograms, self._counters
        add_seconds, add_plan = h["l5_sched_step_seconds"].add, h["l5_sched_step_plan_seconds"].add
        add_size, add_tokens = h["l5_sched_batch_size"].add, h["l5_sched_batch_step_tokens"].add
        add_prefill, add_decode = h["l5_sched_batch_prefill_tokens"].add, h["l5_sched_batch_decode_tokens"].add
        steps, forwards, rows = (
            c[name].values for name in ("l5_sched_step", "l3_model_forward", "l3_sample_sampler_tokens")
        )
        preempted, evicted = c["l5_sched_preempt"].values, c["l3_kv_evict_pages"].values
        tokens = c["l3_model_forward_tokens"].values
        tokens.update({("prefill",): 0.0, ("decode",): 0.0})

        def take(event: StepDone) -> None:
            self._step = event
            steps[()] += 1
            forwards[()] += 1
            rows[()] += event.kept_rows
            add_seconds(event.ended_s - event.started_s)
            add_plan(event.plan_s)
            add_size(event.num_seqs)
            add_tokens(event.prefill_tokens + event.decode_tokens)
            if event.prefill_tokens:
                add_prefill(event.prefill_tokens)
                tokens[("prefill",)] += event.prefill_tokens
            if event.decode_tokens:
                add_decode(event.decode_tokens)
                tokens[("decode",)] += event.decode_tokens
            if event.preempted:
                preempted[()] += event.preempted
            if event.evicted_pages:
                evicted[()] += event.evicted_pages

        return take

    def _on_tokens(self, event: TokenTimes) -> None:
        h, c = self._histograms, self._counters
        c["l5_request_lifecycle_finished"].add(1, event.finish if event.finish in OUTCOMES else "other")
        if event.finish == "cancelled":
            c["l5_request_lifecycle_cancelled"].add(1)
        h["l5_request_lifecycle_e2e_seconds"].add(event.e2e_s)
        h["l5_request_lifecycle_queue_seconds"].add(event.queue_s)
        h["l5_request_shape_output_tokens"].add(event.completion_tokens)
        usage = c["l6_cost_usage_tokens"]
        usage.add(event.prompt_tokens, "prompt")
        usage.add(event.cached_tokens, "cached")
        usage.add(event.completion_tokens, "completion")
        if event.ttft_s is not None:
            decode_s = event.e2e_s - event.ttft_s
            h["l5_request_lifecycle_ttft_seconds"].add(event.ttft_s)
            h["l5_request_lifecycle_prefill_seconds"].add(max(0.0, event.ttft_s - event.queue_s))
            h["l5_request_lifecycle_decode_seconds"].add(decode_s)
            if event.completion_tokens > 1:
                h["l5_request_lifecycle_tpot_seconds"].add(decode_s / (event.completion_tokens - 1))
        if event.gaps_s:
            h["l5_request_lifecycle_itl_seconds"].add_all(event.gaps_s)
            h["l5_request_lifecycle_max_itl_seconds"].add(max(event.gaps_s))

    def _on_queued(self, event: RequestQueued) -> None:
        self._counters["l5_request_lifecycle_started"].add(1)
        self._histograms["l5_request_shape_prompt_tokens"].add(event.prompt_tokens)
        self._histograms["l5_request_shape_n_choices"].add(event.n)

    def _on_scheduled(self, event: RequestScheduled) -> None:
        self._histograms["l5_sched_queue_wait_seconds"].add(event.queue_s)
        self._histograms["l5_request_shape_cached_prompt_tokens"].add(event.cached_tokens)
        self._counters["l3_kv_prefix_query_tokens"].add(event.prompt_tokens)
        self._counters["l3_kv_prefix_hit_tokens"].add(event.cached_tokens)

    def _on_refused(self, event: RequestRefused) -> None:
        reason = event.reason if event.reason in ERRORS_BY_CODE else "other"
        self._counters["l7_door_admission_rejections"].add(1, reason)

    def _on_memory(self, event: MemorySet) -> None:
        self._gauges["l3_model_memory_bytes"].set(event.nbytes, event.category)
        if event.category == "kv":
            self._gauges["l3_kv_pool_bytes"].set(event.nbytes)
        elif event.category == "weights":
            self._gauges["l3_model_weights_bytes"].set(event.nbytes)

    def _on_phase(self, event: PhaseDone) -> None:
        self._gauges["l6_ops_startup_phase_seconds"].set(event.seconds, event.phase)

    def _on_keys(self, event: KeysRead) -> None:
        self._gauges["l7_door_auth_active_keys"].set(event.num_keys)
        self._gauges["l7_door_auth_keys_stale"].set(not event.good)

    def _on_http(self, event: HttpDone) -> None:
        c = self._counters
        c["l7_api_http_requests"].add(1, event.route, event.method)
        c["l7_api_http_responses"].add(1, event.route, str(event.status))
        if event.status == 401:
            c["l7_door_auth_failures"].add(1)
        if event.status == 499:
            c["l7_api_http_client_disconnects"].add(1)
        route = event.route if event.route in self._http_seconds or len(self._http_seconds) < MAX_SERIES else "other"
        self._http_seconds.setdefault(route, Histogram(SECONDS)).add(event.seconds)

    # --- when somebody looks ---

    def collect(self) -> Iterator[Metric]:
        """Families from a copy of the numbers: emitting waits for the copy at most, tens of microseconds."""
        with self._lock:
            self._derive_gauges()
            histograms = {name: histogram.copy() for name, histogram in self._histograms.items()}
            by_route = {(route,): histogram.copy() for route, histogram in self._http_seconds.items()}
            counters = {name: dict(series.values) for name, series in self._counters.items()}
            gauges = {name: dict(series.values) for name, series in self._gauges.items()}
        for name, (text, _) in HISTOGRAMS.items():
            yield _histogram(name, text, (), {(): histograms[name]})
        yield _histogram("l7_api_http_request_duration_seconds", "Duration of an HTTP exchange.", ("route",), by_route)
        for name, (text, labels) in COUNTERS.items():
            counter = CounterMetricFamily(f"ai_engine_{name}", text, labels=labels)
            for key, value in counters[name].items():
                counter.add_metric(key, value)
            yield counter
        for name, (text, labels) in GAUGES.items():
            gauge = GaugeMetricFamily(f"ai_engine_{name}", text, labels=labels)
            for key, value in gauges[name].items():
                gauge.add_metric(key, value)
            yield gauge

    def _derive_gauges(self) -> None:
        g, step = self._gauges, self._step
        queried = self._counters["l3_kv_prefix_query_tokens"].values[()]
        hits = self._counters["l3_kv_prefix_hit_tokens"].values[()]
        g["l3_kv_prefix_hit_ratio"].set(hits / queried if queried else 0.0)
        if step is None:
            return
        g["l5_sched_queue_requests"].set(step.queued_requests)
        g["l5_sched_queue_tokens"].set(step.queued_tokens)
        g["l5_sched_batch_running_requests"].set(step.running)
        g["l3_kv_pool_capacity_pages"].set(step.pages_total)
        g["l3_kv_pool_used_pages"].set(step.pages_held)
        g["l3_kv_pool_free_pages"].set(step.pages_free)
        g["l3_kv_pool_cached_pages"].set(step.pages_cached)
        g["l3_kv_pool_usage_ratio"].set(step.pages_held / step.pages_total if step.pages_total else 0.0)


def _ignore(event: Event) -> None:
    """Of no use to metrics; traces take it."""


def _histogram(name: str, text: str, labels: Iterable[str], series: Mapping[Any, Histogram]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(f"ai_engine_{name}", text, labels=list(labels))
    for key, histogram in series.items():
        family.add_metric(list(key), histogram.cumulative(), histogram.total)
    return family
