"""Typed events and the port that takes them. Emitting never blocks, never raises; a full sink counts its losses."""

from __future__ import annotations

from typing import Protocol

import msgspec


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


class MemorySet(msgspec.Struct, frozen=True, tag="memory", array_like=True):
    """Bytes by category: weights, kv, activations, workspace."""

    category: str
    nbytes: int


class PhaseDone(msgspec.Struct, frozen=True, tag="phase", array_like=True):
    """A start-up phase of the runtime: build kernels, load kernels, load weights, warm up."""

    phase: str
    seconds: float


class HttpDone(msgspec.Struct, frozen=True, tag="http", array_like=True):
    route: str
    method: str
    status: int
    seconds: float


Event = StepDone | RequestQueued | RequestScheduled | RequestRefused | TokenTimes | MemorySet | PhaseDone | HttpDone


class Telemetry(Protocol):
    """Implementations: observe.metrics.Metrics, wire.TelemetryClient, app.NoTelemetry,
    testing.MemoryTelemetry."""

    def emit(self, event: Event) -> None: ...
