"""Rings, programs and steps made by hand: what an engine would leave, without an engine."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from ai_engine.app import cost_of
from ai_engine.observe.steps import StepStore
from ai_engine.observe.traces import Traces
from ai_engine.ports import telemetry as ev
from ai_engine.ports.kernels import Buffer, BufferType, Call, KvShape, WeightSpec
from ai_engine.ports.model import DType
from ai_engine.ports.trace import Part, ProgramInfo, RingsHandle, TraceContext, TraceSource

HEADER_BYTES = 128
CYCLES_PER_US = 1000
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


class FakeRings:
    """Rings in shared memory with the engine's layout, written entry by entry."""

    def __init__(self, num_threads: int = 2, entries: int = 64) -> None:
        stride = HEADER_BYTES + 32 * entries
        self.fd = os.memfd_create("rings")
        os.ftruncate(self.fd, num_threads * stride)
        self.handle = RingsHandle(f"/proc/self/fd/{self.fd}", num_threads, entries, HEADER_BYTES)
        self._map = mmap.mmap(self.fd, num_threads * stride)
        self._words = np.frombuffer(self._map, np.int64).reshape(num_threads, stride // 8)
        self.entries = entries

    def write(self, thread: int, step: int, slot: int, start: int, end: int) -> None:
        written = int(self._words[thread, 0])
        at = HEADER_BYTES // 8 + written % self.entries * 4
        self._words[thread, at : at + 4] = step, slot, start, end
        self._words[thread, 0] = written + 1

    def close(self) -> None:
        del self._words
        self._map.close()
        os.close(self.fd)


def buffer(cols: int, rows: str = "tokens") -> Buffer:
    return Buffer("x", BufferType("f32", cols, "logits" if rows == "logits" else "tokens"), 0)


PROGRAM = ProgramInfo(
    device="cpu-test",
    calls=[
        Call(op="embed", outputs=(buffer(64),), weights=("table",)),
        Call(op="matmul", inputs=(buffer(64),), outputs=(buffer(32),), weights=("w0",), layer=0),
        Call(op="add", inputs=(buffer(32), buffer(32)), outputs=(buffer(32),), layer=0, barrier=False),
        Call(op="matmul", inputs=(buffer(64),), outputs=(buffer(32),), weights=("w1",), layer=1),
        Call(op="sample", inputs=(buffer(128, "logits"),)),
    ],
    kernels=["embed_f32", "matmul_f32", "add", "matmul_f32", "sample"],
    weights={
        "table": WeightSpec("table", DType.F32, 128, 64),
        "w0": WeightSpec("w0", DType.F32, 32, 64),
        "w1": WeightSpec("w1", DType.F32, 32, 64),
    },
    kv_shape=KvShape(num_layers=2, kv_heads=1, head_dim=32, page_tokens=32),
)
NUM_SLOTS = len(PROGRAM.calls)


def step_done(step: int, started_s: float, ended_s: float, work: Sequence[ev.StepWork] = ()) -> ev.StepDone:
    return ev.StepDone(
        step=step, started_s=started_s, ended_s=ended_s, plan_s=0.0001, num_seqs=len(work),
        prefill_tokens=sum(w.prefill for w in work), decode_tokens=sum(w.decode for w in work), kept_rows=len(work),
        running=len(work), queued_requests=0, queued_tokens=0, pages_total=10, pages_free=5, pages_cached=2,
        pages_held=3, evicted_pages=0, preempted=0, work=list(work),
    )  # fmt: skip


def cycles(seconds: float) -> int:
    return round(seconds * 1e6 * CYCLES_PER_US)


def write_step(rings: FakeRings, step: int, started_s: float, slot_s: float = 1e-4) -> None:
    """Every slot takes ``slot_s`` on both threads, the second one a microsecond behind."""
    for slot in range(NUM_SLOTS):
        for thread in range(rings.handle.num_threads):
            start = started_s + slot * slot_s + thread * 1e-6
            rings.write(thread, step, slot, cycles(start), cycles(start + slot_s - 2e-6))


def clock_pairs(traces: Traces) -> None:
    for second in (0.0, 1000.0):
        traces.emit(ev.ClockPair(cycles(second), round(second * 1e9)))


def traced(
    started_s: float, ended_s: float, parts: Sequence[Part], *, key: str = "", request: str = "r1", trace: str = TRACE
) -> ev.RequestTraced:
    return ev.RequestTraced(
        context=TraceContext(trace, "00f067aa0ba902b7"), route="/chat/completions", method="POST", status=200,
        started_s=started_s, ended_s=ended_s, wall_s=1_700_000_000.0, parts=list(parts), key=key, requests=[request],
        attributes={"gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "gen_ai.request.stream": True,
                    "gen_ai.response.finish_reasons": ["stop"], "gen_ai.usage.output_tokens": 3},
    )  # fmt: skip


@contextmanager
def recording(max_bytes: int = 1 << 20, num_threads: int = 2, entries: int = 64) -> Iterator[tuple[Traces, FakeRings]]:
    rings = FakeRings(num_threads, entries)
    store = StepStore(max_bytes, cost_of)
    traces = Traces(store, seed=b"12345678")
    store.attach(TraceSource(rings.handle, PROGRAM))
    clock_pairs(traces)
    yield traces, rings
    store.stop()
    rings.close()


def play(
    traces: Traces, rings: FakeRings, *, key: str = "", parts: Sequence[Part] | None = None, until: float = 10.155
) -> None:
    """One request of a prompt chunk and two decode steps, beside another request in the last step. ``parts`` are what
    the gateway saw."""
    traces.emit(ev.SequenceOpened(7, "r1", TRACE, 0, 10.02, 20, 0))
    traces.emit(ev.SequenceOpened(8, "r2", "f" * 32, 0, 10.15, 5, 0))
    works = [
        [ev.StepWork(7, 20, 0, 0, 20)],
        [ev.StepWork(7, 0, 1, 0, 21)],
        [ev.StepWork(7, 0, 1, 0, 22), ev.StepWork(8, 3, 0, 0, 3)],
    ]
    for number, work in enumerate(works, 1):
        started = 10.0 + number * 0.05
        write_step(rings, number, started)
        traces.emit(step_done(number, started, started + 0.001, work))
    traces.emit(
        ev.TokenTimes(
            request_id="r1", trace_id=TRACE, finish="stop", ttft_s=0.04, e2e_s=0.141, queue_s=0.02, prompt_tokens=20,
            cached_tokens=0, completion_tokens=3, gaps_s=[0.05, 0.05], ended_s=10.151, index=0,
        )
    )  # fmt: skip
    parts = parts or [
        Part("receive", 10.0, 10.002, 0.002), Part("contract", 10.002, 10.006, 0.004),
        Part("submit", 10.006, 10.012, 0.006), Part("first_token", 10.012, 10.052, 0.04),
        Part("decode", 10.053, 10.153, 0.098, 2), Part("detokenise", 10.052, 10.154, 0.002, 3),
        Part("send", 10.052, 10.155, 0.003, 3),
    ]  # fmt: skip
    traces.emit(traced(10.0, until, parts, key=key))
