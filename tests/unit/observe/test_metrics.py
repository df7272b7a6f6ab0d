"""Every event moves its families; the text is well-formed Prometheus exposition; names and series stay bounded."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ai_engine.observe.catalogue import BY_NAME, FAMILIES, MAX_SERIES, SERIES_BUDGET, SHORT_SECONDS, page
from ai_engine.observe.metrics import Metrics
from ai_engine.ports import telemetry as ev
from ai_engine.ports.telemetry import Event
from ai_engine.ports.trace import Part
from tests.unit.observe.rig import traced

NAMES = Path(__file__).parents[2] / "vectors" / "metric-names.txt"
STEP = ev.StepDone(
    step=1, started_s=1.0, ended_s=1.03, plan_s=0.0002, num_seqs=3, prefill_tokens=64, decode_tokens=2, kept_rows=3,
    running=3, queued_requests=2, queued_tokens=900, pages_total=100, pages_free=50, pages_cached=20, pages_held=30,
    evicted_pages=4, preempted=1,
)  # fmt: skip
TIMES = ev.TokenTimes(
    request_id="r", trace_id="t", finish="stop", ttft_s=0.2, e2e_s=1.2, queue_s=0.05, prompt_tokens=10,
    cached_tokens=8, completion_tokens=11, gaps_s=[0.1] * 9 + [0.3],
)  # fmt: skip


def samples(sink: Metrics) -> dict[str, float]:
    """name{label=value,...} -> value."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(sink.render().decode()):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            key = sample.name.removeprefix("ai_engine_") + (f"{{{labels}}}" if labels else "")
            assert key not in found, key
            found[key] = sample.value
    return found


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (
            STEP,
            {
                "l5_sched_step_total": 1,
                "l5_sched_step_seconds_bucket{le=0.02}": 0,
                "l5_sched_step_seconds_bucket{le=0.05}": 1,
                "l5_sched_step_plan_seconds_sum": 0.0002,
                "l5_sched_batch_size_sum": 3,
                "l5_sched_batch_step_tokens_sum": 66,
                "l3_model_forward_tokens_total{kind=prefill}": 64,
                "l3_model_forward_tokens_total{kind=decode}": 2,
                "l5_sched_queue_requests": 2,
                "l5_sched_queue_tokens": 900,
                "l5_sched_batch_running_requests": 3,
                "l3_kv_pool_capacity_pages": 100,
                "l3_kv_pool_free_pages": 50,
                "l3_kv_pool_cached_pages": 20,
                "l3_kv_pool_used_pages": 30,
                "l3_kv_pool_usage_ratio": 0.3,
                "l3_kv_evict_pages_total": 4,
            },
        ),
        (
            TIMES,
            {
                "l5_request_lifecycle_finished_total{outcome=stop}": 1,
                "l5_request_lifecycle_finished_total{outcome=failed}": 0,
                "l5_request_lifecycle_ttft_seconds_sum": 0.2,
                "l5_request_lifecycle_tpot_seconds_sum": 0.1,
                "l5_request_lifecycle_itl_seconds_count": 10,
                "l5_request_lifecycle_itl_seconds_bucket{le=0.1}": 9,
                "l5_request_lifecycle_max_itl_seconds_sum": 0.3,
                "l5_request_lifecycle_e2e_seconds_sum": 1.2,
                "l5_request_lifecycle_queue_seconds_count": 1,
                "l5_request_shape_output_tokens_sum": 11,
                "l6_cost_usage_tokens_total{kind=cached}": 8,
            },
        ),
        (
            ev.RequestQueued("r", "t", 40, 2),
            {
                "l5_request_lifecycle_started_total": 1,
                "l5_request_shape_prompt_tokens_sum": 40,
                "l5_request_shape_n_choices_sum": 2,
            },
        ),
        (
            ev.RequestScheduled("r", 0.5, 40, 32),
            {
                "l5_sched_queue_wait_seconds_sum": 0.5,
                "l3_kv_prefix_query_tokens_total": 40,
                "l3_kv_prefix_hit_tokens_total": 32,
                "l3_kv_prefix_hit_ratio": 0.8,
            },
        ),
        (ev.SequencePreempted(3, "r", 0, "kv_pages", 70, 5, 1, 100), {"l5_sched_preempt_total{reason=kv_pages}": 1}),
        (
            ev.RequestRefused("server_overloaded"),
            {"l7_door_admission_rejections_total{reason=server_overloaded}": 1},
        ),
        (ev.RequestRefused('\n"made up"'), {"l7_door_admission_rejections_total{reason=other}": 1}),
        (ev.MemorySet("kv", 4096), {"l3_model_reserved_bytes{category=kv}": 4096, "l3_kv_pool_bytes": 4096}),
        (ev.MemorySet("weights", 7), {"l3_model_weights_bytes": 7}),
        (ev.PhaseDone("compile", 1.5), {"l6_ops_startup_phase_seconds{phase=compile}": 1.5}),
        (
            ev.HttpDone("/chat/completions", "POST", 499, 0.01),
            {
                "l7_api_http_requests_total{method=POST,route=/chat/completions}": 1,
                "l7_api_http_responses_total{route=/chat/completions,status=499}": 1,
                "l7_api_http_client_disconnects_total": 1,
                "l7_api_http_request_duration_seconds_count{route=/chat/completions}": 1,
            },
        ),
    ],
)
def test_each_event_moves_its_families(event: Event, expected: dict[str, float]) -> None:
    sink = Metrics("1.2.3")
    sink.emit(event)
    found = samples(sink)
    assert {key: found.get(key) for key in expected} == pytest.approx(expected)


def test_every_event_type_is_taken() -> None:
    sink = Metrics("1")
    kinds: tuple[type, ...] = Event.__args__
    for kind in kinds:
        values: list[Any] = [_example(f.type) for f in msgspec.structs.fields(kind)]
        sink.emit(kind(*values))
    assert sink.lost == 0
    sink.emit("not an event")  # type: ignore[arg-type]
    assert sink.lost == 1


def _example(hint: Any) -> Any:
    """A value of the type; structs and containers empty or made of their own fields."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return hint(*[_example(f.type) for f in msgspec.structs.fields(hint)])
    origin = getattr(hint, "__origin__", hint)
    plain = {int: 1, float: 0.5, str: "x", bool: True, list: [], dict: {}}
    return plain.get(origin, 0.5)


def test_histograms_are_well_formed_and_buckets_start_at_100_us() -> None:
    sink = Metrics("1")
    for event in (STEP, TIMES, ev.HttpDone("/models", "GET", 200, 900.0)):
        sink.emit(event)
    for family in text_string_to_metric_families(sink.render().decode()):
        if family.type != "histogram" or not family.samples:
            continue
        buckets = [s for s in family.samples if s.name.endswith("_bucket")]
        values = [s.value for s in buckets]
        assert values == sorted(values)
        assert buckets[-1].labels["le"] == "+Inf"
        assert next(s.value for s in family.samples if s.name.endswith("_count")) == values[-1]
        if family.name.endswith("_seconds"):
            own = BY_NAME[family.name.removeprefix("ai_engine_")]
            assert float(buckets[0].labels["le"]) == (1e-6 if own.buckets is SHORT_SECONDS else 1e-4)


def test_build_info_and_own_cost_are_there() -> None:
    sink = Metrics("9.9")
    sink.render()
    found = samples(sink)
    assert found["l6_ops_build_info{version=9.9}"] == 1
    assert found["l6_ops_metrics_series"] > 100
    assert found["l6_ops_metrics_scrape_seconds"] >= 0


def test_label_sets_are_bounded() -> None:
    sink = Metrics("1")
    for i in range(1000):
        sink.emit(ev.HttpDone(f"/made-up/{i}", "GET", 200, 0.1))
    found = samples(sink)
    routes = [key for key in found if key.startswith("l7_api_http_requests_total")]
    assert len(routes) <= MAX_SERIES + 1
    assert found["l7_api_http_requests_total{method=other,route=other}"] == 1000 - MAX_SERIES


def test_two_hundred_keys_and_models_stay_within_the_budget() -> None:
    sink = Metrics("1")
    sink.emit(ev.EngineReady(2, 32, 512, ["matmul", "attention", "sample"]))
    for n in range(200):
        for status in (200, 400, 401, 404, 429, 499, 500, 503):
            sink.emit(ev.HttpDone(f"/route/{n}", "POST", status, 0.1, checked=True))
        sink.emit(msgspec.structs.replace(traced(1.0, 2.0, [], key=f"key-{n}"), attributes={
            "gen_ai.request.model": f"model-{n}", "gen_ai.usage.input_tokens": 5, "gen_ai.usage.output_tokens": 2,
        }))  # fmt: skip
        sink.emit(ev.RequestRefused(f"reason-{n}"))
        sink.emit(ev.MemorySet(f"category-{n}", n))
        sink.emit(ev.PhaseDone(f"phase-{n}", 1.0))
        sink.emit(ev.StepSampled(0.1, 0.1, 0.0, 0, [0.1], [(f"op-{n}", 0.1, 5, 6)]))
        sink.emit(STEP)
    sink.render()
    found = samples(sink)
    assert len(found) <= SERIES_BUDGET, len(found)
    assert sum(key.startswith("l6_cost_key_tokens") for key in found) <= MAX_SERIES + 1
    total = sum(value for key, value in found.items() if key.startswith("l6_cost_key_tokens"))
    assert total == 200 * 7, "nothing is lost: what has no series of its own is counted as other"


def test_names_are_those_of_the_list_or_said_here() -> None:
    """The list is a choice to take from; what it does not have is ours to name, by the same rules."""
    listed = set(NAMES.read_text().split())
    own = {family.exposed for family in FAMILIES} - listed
    assert own == OWN_NAMES
    for family in FAMILIES:
        assert re.fullmatch(r"ai_engine_l[1-7]_[a-z]+_[a-z0-9_]+", family.exposed), family.exposed
        assert not family.exposed.endswith(("_ms", "_us", "_milliseconds", "_percent"))
        assert (family.kind == "histogram") == bool(family.buckets)
        assert family.help.endswith(".")


_OWN = """
    l1_host_process_pss_bytes l2_kernel_sampled_bytes_total l2_kernel_sampled_flops_total l2_team_late_passes_total
    l2_team_threads l2_team_wait_seconds l3_model_forward_host_seconds l3_model_memory_bytes
    l3_model_reserved_bytes
    l4_text_tokenizer_wait_seconds l5_sched_step_prediction_error_ratio l6_cost_key_tokens_total
    l6_ops_log_lines_total l6_ops_log_suppressed_total l6_ops_telemetry_lost_events_total
    l6_ops_trace_exported_spans_total l6_ops_trace_failures_total l6_ops_trace_malformed_total
    l6_ops_trace_requests_total l6_ops_trace_retained_bytes l6_ops_trace_ring_entries_total
    l6_ops_worker_starts_total l6_slo_burn_rate_ratio l6_slo_events l6_slo_state l7_api_http_receive_seconds
    l7_api_worker_submit_seconds l7_door_auth_keys_stale
"""
OWN_NAMES = {f"ai_engine_{name}" for name in _OWN.split()}


def test_the_page_is_the_catalogues() -> None:
    path = Path(__file__).parents[3] / "docs" / "metrics.md"
    assert path.read_text(encoding="utf-8") == page(), "python -m ai_engine.observe.catalogue > docs/metrics.md"


def test_promtool_finds_nothing_to_say() -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    sink = Metrics("1.2.3")
    for event in (STEP, TIMES, ev.HttpDone("/models", "GET", 200, 0.5), ev.PhaseDone("load weights", 1.0),
                  ev.StepSampled(0.1, 0.1, 0.0, 0, [0.1], [("matmul", 0.1, 5, 6)]), ev.MemorySet("kv", 5),
                  traced(1.0, 2.0, [Part("receive", 1.0, 2.0, 1.0)])):  # fmt: skip
        sink.emit(event)
    done = subprocess.run([tool, "check", "metrics"], input=sink.render(), capture_output=True, timeout=30)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


def test_emitting_from_many_threads_loses_nothing() -> None:
    sink = Metrics("1")

    def work() -> None:
        for _ in range(2000):
            sink.emit(STEP)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    sink.render()
    for thread in threads:
        thread.join()
    assert samples(sink)["l5_sched_step_total"] == 8000


def test_emitting_is_cheap() -> None:
    sink = Metrics("1")
    best_s = min(_time_of(lambda: sink.emit(STEP)) for _ in range(5))
    assert best_s < 20e-6, f"{best_s * 1e6:.1f} us per step event; aim 10"


def _time_of(work: Any, repeats: int = 1000) -> float:
    started = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - started) / repeats
