"""Typed events and the port that takes them. Emitting never blocks, never raises; a full sink counts its losses."""

from __future__ import annotations

from typing import Protocol

import msgspec

from ai_engine.ports.trace import Part, TraceContext


class StepWork(msgspec.Struct, frozen=True, array_like=True):
    """One sequence's rows of a step; ``context`` counts the positions behind its last row."""

    seq_id: int
    prefill: int
    decode: int
    draft: int
    context: int

    @property
    def rows(self) -> int:
        return self.prefill + self.decode + self.draft


class StepDone(msgspec.Struct, frozen=True, tag="step", array_like=True):
    """One step of the engine."""

    step: int
    started_s: float
    ended_s: float
    plan_s: float  # time the scheduler took
    num_seqs: int
    prefill_tokens: int
    decode_tokens: int
    kept_rows: int
    running: int
    queued_requests: int
    queued_tokens: int
    pages_total: int
    pages_free: int
    pages_cached: int
    pages_held: int
    evicted_pages: int
    preempted: int
    work: list[StepWork] = []  # which sequence ran how many rows
    predicted_s: float = 0.0  # what the scheduler thought the step would take
    drafted: int = 0  # guesses that were verified
    accepted: int = 0  # of those, how many were right


class ClockPair(msgspec.Struct, frozen=True, tag="clock", array_like=True):
    """The cycle counter of the rings and the monotonic clock at one moment."""

    cycles: int
    monotonic_ns: int


class SequenceOpened(msgspec.Struct, frozen=True, tag="opened", array_like=True):
    """A choice got pages: when it was first scheduled, and again after each preemption. Its steps name ``seq_id``."""

    seq_id: int
    request_id: str
    trace_id: str
    index: int
    opened_s: float
    known_tokens: int
    cached_tokens: int


class SequencePreempted(msgspec.Struct, frozen=True, tag="preempted", array_like=True):
    """A choice lost its pages and is opened again later. ``reason`` is kv_pages: an older sequence could not go on
    without them. ``computed_tokens`` are those that are computed again unless the cache still has them."""

    seq_id: int
    request_id: str
    index: int
    reason: str
    computed_tokens: int
    output_tokens: int
    pages_free: int  # free or cached, when it was decided
    pages_total: int


class RequestQueued(msgspec.Struct, frozen=True, tag="queued", array_like=True):
    request_id: str
    trace_id: str
    prompt_tokens: int
    n: int


class RequestScheduled(msgspec.Struct, frozen=True, tag="scheduled", array_like=True):
    """First time the request ran."""

    request_id: str
    queue_s: float
    prompt_tokens: int
    cached_tokens: int


class RequestRefused(msgspec.Struct, frozen=True, tag="refused", array_like=True):
    reason: str  # error code


class TokenTimes(msgspec.Struct, frozen=True, tag="tokens", array_like=True):
    """What serving saw for one finished choice. ``gaps_s`` between consecutive deliveries, one per delivery."""

    request_id: str
    trace_id: str
    finish: str
    ttft_s: float | None
    e2e_s: float
    queue_s: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    gaps_s: list[float]
    ended_s: float = 0.0  # monotonic: the other times lead back from here
    index: int = 0


class MemorySet(msgspec.Struct, frozen=True, tag="memory", array_like=True):
    """Bytes by category: weights, kv, activations, workspace, grammars."""

    category: str
    nbytes: int


class PhaseDone(msgspec.Struct, frozen=True, tag="phase", array_like=True):
    """A start-up phase of the runtime: build kernels, load kernels, load weights, warm up."""

    phase: str
    seconds: float


class HttpStarted(msgspec.Struct, frozen=True, tag="http-started", array_like=True):
    """An exchange began; one HttpDone will follow."""


class HttpDone(msgspec.Struct, frozen=True, tag="http", array_like=True):
    route: str
    method: str
    status: int
    seconds: float
    malformed_trace: bool = False  # its traceparent broke the rules
    request_bytes: int = 0  # of the bodies
    response_bytes: int = 0
    checked: bool = False  # its body was held against a contract


class RequestTraced(msgspec.Struct, frozen=True, tag="traced", array_like=True):
    """An HTTP exchange as its door saw it, with the parts that it was in. ``attributes`` are names and numbers (model,
    limits asked for, token counts, finish), never text of a prompt or an answer. Stays in the gateway."""

    context: TraceContext
    route: str
    method: str
    status: int
    started_s: float
    ended_s: float
    wall_s: float  # Unix time of started_s
    parts: list[Part]
    key: str = ""  # name of the API key
    requests: list[str] = []  # request ids in serving
    attributes: dict[str, str | int | float | bool | list[str]] = {}
    response_bytes: int = 0


class TokensSent(msgspec.Struct, frozen=True, tag="sent", array_like=True):
    """Tokens of a choice whose log somebody asked for, as they came from the step that made them."""

    trace_id: str
    key: str
    request_id: str
    index: int
    step: int
    tokens: list[int]


class EngineReady(msgspec.Struct, frozen=True, tag="engine", array_like=True):
    """An engine is there and takes work. ``ops`` are the ops of its program, slot by slot."""

    threads: int
    page_tokens: int
    max_step_tokens: int
    ops: list[str]


class StepSampled(msgspec.Struct, frozen=True, tag="sampled", array_like=True):
    """One step, decoded from its stamps. ``ops``: (op, seconds, bytes, operations). ``wait_s``: thread time in no op.
    ``mbu`` and ``mfu``: shares of the machine's measured ceilings; None: nobody measured them."""

    step_s: float
    kernel_s: float
    wait_s: float
    late_passes: int
    layers_s: list[float]
    ops: list[tuple[str, float, int, int]]
    mbu: float | None = None
    mfu: float | None = None


class LoopLag(msgspec.Struct, frozen=True, tag="lag", array_like=True):
    """How late the gateway's event loop ran a timer."""

    seconds: float


class KeysRead(msgspec.Struct, frozen=True, tag="keys", array_like=True):
    """The keys file was read: how many keys are in force now; not ``good``: it is broken, and they are the old ones."""

    num_keys: int
    good: bool


Event = (
    StepDone
    | RequestQueued
    | RequestScheduled
    | RequestRefused
    | TokenTimes
    | MemorySet
    | PhaseDone
    | HttpDone
    | KeysRead
    | ClockPair
    | SequenceOpened
    | SequencePreempted
    | RequestTraced
    | HttpStarted
    | EngineReady
    | StepSampled
    | LoopLag
    | TokensSent
)


class Telemetry(Protocol):
    """Implementations: observe.metrics.Metrics, observe.traces.Traces, wire.TelemetryClient, app.NoTelemetry,
    testing.MemoryTelemetry."""

    def emit(self, event: Event) -> None: ...
