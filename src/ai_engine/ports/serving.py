"""The serving port: one GenerateRequest in, a stream of Chunk out, exactly one of which is terminal."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Literal, Protocol

import msgspec

from ai_engine.ports.grammar import Constraint
from ai_engine.ports.sampling import SamplingParams


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and ``n`` choices. Text never enters the worker: token ids only.

    ``request_id`` is unique per server. Prefixes are shared only within one ``cache_scope``, which is the server's to
    choose. Choice ``i`` samples with ``params.seed + i``.
    """

    request_id: str
    trace_id: str  # 32 hex digits (W3C trace context)
    prompt: list[int]
    params: SamplingParams
    n: int = 1
    model: str = ""
    tenant: str = ""  # who pays: the queue and the steps are shared fairly between tenants
    weight: float = 1.0  # the tenant's share against others
    cache_scope: str = ""
    adapter: str = ""
    priority: int = 0  # lower runs first
    constraint: Constraint | None = None  # what every choice's text must match
    timeout_s: float | None = None  # from arrival at serving; the request then fails with deadline_exceeded


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural log probabilities of the model's own distribution (before temperature, penalties and masks)."""

    token: int
    logprob: float
    top: list[tuple[int, float]] = []  # best first


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """Of one choice or summed over several. The prompt is counted once, on choice 0, so that choices add up."""

    prompt_tokens: int
    completion_tokens: int  # the end-of-sequence token counts
    cached_tokens: int = 0
    reasoning_tokens: int | None = None  # None: the model has no reasoning part


Terminal = Literal["stop", "length", "cancelled", "failed"]


class Chunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step gave one choice. ``finish`` is set on the choice's last chunk and on no other.

    ``stop_token`` is the end-of-sequence or stop token that ended the choice; it is the last of ``tokens`` too.
    ``prompt_logprobs`` (position 1 onwards) come in one or more chunks before the first token, on choice 0.
    """

    request_id: str
    index: int = 0
    tokens: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    finish: Terminal | None = None
    stop_token: int | None = None
    error_code: str | None = None  # set when finish == "failed" or "cancelled"
    error_message: str | None = None
    usage: Usage | None = None  # on the terminal chunk
    step: int = 0  # number of the step that made it


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """``ready`` is weights loaded, kernels ready, step loop beating, not draining; ``reason`` says what is missing."""

    live: bool
    ready: bool
    reason: str = ""
    queued_requests: int = 0
    queued_tokens: int = 0
    running_requests: int = 0


class Serving(Protocol):
    """Implementations: serving.service.Service (in process), wire.ServingClient (over a Unix socket), testing fakes."""

    async def submit(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Admit the request and return its chunks; each choice ends in exactly one terminal chunk.

        Raises (before any chunk): Overloaded when the queue is full, ShuttingDown while draining,
        ContextLengthExceeded when it could never run.
        """
        ...

    async def cancel(self, request_id: str, index: int | None = None, *, stopped: bool = False) -> None:
        """End one choice (or all). Takes effect within one step; unknown or ended ids are ignored. ``stopped``: a stop
        string was found in the text, so it finishes with "stop" and counts as such, not as cancelled."""
        ...

    async def health(self) -> Health: ...

    async def drain(self, deadline_s: float) -> None:
        """Refuse new work, finish what runs; after ``deadline_s`` fail the rest with shutting_down."""
        ...
