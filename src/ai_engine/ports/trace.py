"""What traces are made of: the stamps of one HTTP request, where the threads' rings lie, what the slots are.

Times are monotonic seconds (CLOCK_MONOTONIC, one clock for every process of the machine). Nothing here holds text of a
prompt or an answer, and nothing that holds traces may: counts, times, names of parameters and shapes only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import msgspec

from ai_engine.ports.kernels import Call, KvShape, WeightSpec

PartName = Literal[
    "receive", "contract", "encode_wait", "template", "tokenise", "submit", "first_token", "queue", "prefill", "decode",
    "detokenise", "send",
]  # fmt: skip
"""The parts of a request, in order. ``first_token`` is what the gateway sees of submit, queue and prefill; whoever
assembles a trace replaces it by the worker's own stamps."""


class Part(msgspec.Struct, array_like=True):
    """One part: from its first beginning to its last end, ``seconds`` of which it was what the request did."""

    name: str
    started_s: float
    ended_s: float
    seconds: float
    count: int = 1


class Parts:
    """A stopwatch that is always in one part: entering one ends the one before, so no moment is counted twice and none
    is left out. Costs well under a microsecond an entry."""

    __slots__ = ("_began_s", "_name", "_now", "parts")

    def __init__(self, now_s: Callable[[], float], name: PartName = "receive") -> None:
        self._now = now_s
        self._name: PartName = name
        self._began_s = now_s()
        self.parts: dict[str, Part] = {}

    def enter(self, name: PartName, at_s: float | None = None) -> float:
        """The part before ends and ``name`` begins, now or at an earlier stamp; returns the moment."""
        now = self._now() if at_s is None else max(at_s, self._began_s)
        part = self.parts.get(self._name)
        if part is None:
            self.parts[self._name] = Part(self._name, self._began_s, now, now - self._began_s)
        else:
            part.ended_s, part.seconds, part.count = now, part.seconds + now - self._began_s, part.count + 1
        self._name, self._began_s = name, now
        return now

    def encoded(self, stamps: tuple[float, float, float] | None) -> None:
        """A prompt is ids. ``stamps``: taken up by the encoder, template rendered, ids made; None: took no time."""
        if stamps is not None:
            begun_s, rendered_s, ended_s = stamps
            if rendered_s > begun_s:
                self.enter("template", begun_s)
            self.enter("tokenise", rendered_s)
            self.enter("contract", ended_s)
        self.enter("contract")

    def end(self, at_s: float | None = None) -> list[Part]:
        """The last part ends, now or at an earlier stamp; all of them, in order of their beginning."""
        self.enter(self._name, at_s)
        return sorted(self.parts.values(), key=lambda part: part.started_s)


class TraceContext(msgspec.Struct, frozen=True):
    """W3C trace context of a request. ``parent_id`` is the caller's span or ""; ``state`` its tracestate, passed on."""

    trace_id: str
    span_id: str
    parent_id: str = ""
    sampled: bool = True
    state: str = ""


class RingsHandle(msgspec.Struct, frozen=True):
    """Where the threads' rings lie: a file that any process of this user can map.

    Ring t begins at t * (header_bytes + entries * 32): i64 entries ever written, i64 capacity, i64 thread; then
    ``entries`` of four i64: step, slot, start and end in cycles. Entry n lies at n mod capacity. One writer each."""

    path: str
    num_threads: int
    entries: int
    header_bytes: int


class PagesHandle(msgspec.Struct, frozen=True):
    """Where the states of the KV pages lie, a byte each (runtime.kv: free, cached, held, shared): a file as above."""

    path: str
    num_pages: int
    page_tokens: int


class ProgramInfo(msgspec.Struct, frozen=True):
    """The program behind the slots: call i is slot i, run by kernel ``kernels[i]``."""

    device: str
    calls: list[Call]
    kernels: list[str]
    weights: dict[str, WeightSpec]
    kv_shape: KvShape


class OpCost(Protocol):
    """Implementation: kernels.catalog.Cost."""

    @property
    def nbytes(self) -> int: ...

    @property
    def flops(self) -> int: ...


class CostOf(Protocol):
    """What a call moves and computes in a step of ``tokens`` rows, ``logit_rows`` kept rows and sequences of (rows,
    context). Implementation: app.cost_of, which asks kernels.catalog."""

    def __call__(
        self, call: Call, program: ProgramInfo, tokens: int, logit_rows: int, sequences: Sequence[tuple[int, int]]
    ) -> OpCost: ...


class TraceSource(msgspec.Struct, frozen=True):
    """What a reader of traces needs to know of an engine; None where it leaves no stamps (the reference kernels)."""

    rings: RingsHandle
    program: ProgramInfo
    pages: PagesHandle | None = None
    max_step_tokens: int = 1
    pid: int = 0  # of the engine's process
    arenas: dict[str, tuple[int, int]] = {}  # its large memory by what it is for: address, bytes


class TraceReader(Protocol):
    """Traces as the doors hand them out, as plain JSON values. Implementation: observe.traces.Traces."""

    def recent(self, *, key: str | None, limit: int) -> list[dict[str, Any]]:
        """One summary per request, newest first; of one key only, or of all (None)."""
        ...

    def tree(self, trace_id: str, *, key: str | None, steps: Sequence[int] | Literal["all"]) -> dict[str, Any] | None:
        """A request's tree; the named steps with their layers and ops. None: no such trace, or another key's."""
        ...


class PagesReader(Protocol):
    """The pool of KV pages as the console draws it. Implementation: observe.pages.PageReader."""

    def read(self) -> tuple[int, str]:
        """(tokens a page, a digit for each page: 0 free, 1 cached, 2 held, 3 shared); (0, "") without an engine."""
        ...
