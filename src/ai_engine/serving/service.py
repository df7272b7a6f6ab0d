"""The serving port in this process: checks a request, bounds the queue, hands out its stream, reports health, drains.

Owns the border between the event loop and the step loop's thread: requests and cancels go down through the intake,
chunks come up once per step. Does not schedule (loop.py, scheduler.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from ai_engine.ports.clock import Clock, SystemClock
from ai_engine.ports.errors import (
    AiEngineError,
    ContextLengthExceeded,
    EngineError,
    InvalidRequest,
    InvalidValue,
    NotReady,
    Overloaded,
    ShuttingDown,
)
from ai_engine.ports.grammar import Grammars
from ai_engine.ports.runtime import Runtime
from ai_engine.ports.serving import Chunk, GenerateRequest, Health
from ai_engine.ports.streams import ChunkBuffer, ChunkStream
from ai_engine.ports.telemetry import MemorySet, RequestQueued, RequestRefused, Telemetry
from ai_engine.serving.compiling import Compilers
from ai_engine.serving.config import ServingConfig
from ai_engine.serving.loop import Arrive, Cancel, FailAll, StepLoop
from ai_engine.serving.state import Group
from ai_engine.serving.watchdog import Watchdog


class Service:
    """Implements ports.serving.Serving. Call `start` in the event loop that will use it, `close` at the end."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        telemetry: Telemetry,
        clock: Clock | None = None,
        config: ServingConfig | None = None,
        eos_ids: frozenset[int] = frozenset(),
        grammars: Grammars | None = None,
    ) -> None:
        self._runtime = runtime
        self._telemetry = telemetry
        self._clock = clock or SystemClock()
        self._config = config or ServingConfig()
        self._limits = runtime.limits
        budget = runtime.budget()
        self._kv_tokens = budget.total * budget.page_tokens
        self.loop = StepLoop(
            runtime, self._deliver, config=self._config, clock=self._clock, telemetry=telemetry, eos_ids=eos_ids
        )
        self._compilers = Compilers(grammars, self._config)
        self._grammar_bytes = 0
        self._buffers: dict[str, ChunkBuffer] = {}
        self._events: asyncio.AbstractEventLoop | None = None
        self._watchdog = Watchdog(self.loop, self._clock, self._config, self._fail_stuck)
        self._watching: asyncio.Task[None] | None = None
        self._draining = False
        self._empty = asyncio.Event()
        self._empty.set()
        self._entered_requests = 0  # ever; the step loop counts those that left
        self._entered_tokens = 0

    async def start(self) -> None:
        self._events = asyncio.get_running_loop()
        memory = self._runtime.memory
        for category in ("weights", "kv", "activations", "workspace"):
            self._telemetry.emit(MemorySet(category, getattr(memory, category)))
        self.loop.start()
        self._watching = asyncio.create_task(self._watchdog.watch())

    def _tell_memory(self) -> None:
        """Of the vocabulary, when the first constraint has loaded it."""
        nbytes = self._compilers.nbytes
        if nbytes != self._grammar_bytes:
            self._grammar_bytes = nbytes
            self._telemetry.emit(MemorySet("grammars", nbytes))

    async def close(self) -> None:
        """Stop the step loop; what is open fails with shutting_down. Does not close the runtime."""
        self._draining = True
        if self._watching is not None:
            self._watching.cancel()
        await asyncio.to_thread(self.loop.stop, self._config.stall_s)
        self._fail_open(ShuttingDown("the server stopped"))
        self._compilers.close()

    # requests

    async def submit(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        expected = self._expected_tokens(request)
        try:
            self._check_admission(expected)
            self._check_request(request)
            grammar = await self._compilers.compile(request)
            if grammar is not None:  # that took time
                self._tell_memory()
                self._check_admission(expected)
                self._check_request(request)
        except AiEngineError as error:
            self._telemetry.emit(RequestRefused(error.code))
            raise
        group = Group(request, self._clock.now_s(), expected, grammar)
        buffer = self._buffers[request.request_id] = ChunkBuffer(request.n)
        self._empty.clear()
        self._entered_requests += 1
        self._entered_tokens += expected
        self._telemetry.emit(RequestQueued(request.request_id, request.trace_id, len(request.prompt), request.n))
        self.loop.post(Arrive(group))
        return ChunkStream(buffer, lambda: self.loop.post(Cancel(request.request_id)))

    async def cancel(self, request_id: str, index: int | None = None, *, stopped: bool = False) -> None:
        if request_id in self._buffers:
            self.loop.post(Cancel(request_id, index, stopped))

    def _expected_tokens(self, request: GenerateRequest) -> int:
        output = min(request.params.max_tokens, self._config.expected_output_tokens)
        return len(request.prompt) + request.n * output

    def _check_admission(self, expected_tokens: int) -> None:
        if self._draining:
            raise ShuttingDown("the server is shutting down and takes no new requests")
        if not self.loop.alive:
            raise NotReady("the step loop is not running")
        requests, tokens, config = self.queued_requests, self.queued_tokens, self._config
        fits = tokens + expected_tokens <= config.max_queue_tokens or requests == 0
        if requests >= config.max_queue_requests or not fits:
            wait_s = self._wait_s(tokens)
            raise Overloaded(
                f"the queue is full: {requests} requests (limit {config.max_queue_requests}) with about {tokens} tokens"
                f" (limit {config.max_queue_tokens}) wait; try again in {wait_s:.0f} s",
                retry_after_s=wait_s,
                details={"queue": "full" if fits else "short of tokens", "queued_requests": requests},
            )

    def _wait_s(self, tokens: int) -> float:
        """Seconds until what waits now has run, from the speed of late."""
        seconds = tokens / self.loop.tokens_per_s if self.loop.tokens_per_s > 0 else 0.0
        return min(max(seconds, self._config.min_retry_after_s), self._config.max_retry_after_s)

    def _check_request(self, request: GenerateRequest) -> None:
        params, prompt, vocab = request.params, request.prompt, self._limits.vocab_size
        if request.request_id in self._buffers:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
        if request.n < 1:
            raise InvalidValue(f"n is {request.n}; it must be at least 1", param="n")
        if params.seed is None:
            raise InvalidValue("seed is not set; the door that took the request draws one", param="seed")
        if params.max_tokens < 1:
            raise InvalidValue(f"max_tokens is {params.max_tokens}; it must be at least 1", param="max_tokens")
        if not prompt:
            raise InvalidValue("the prompt has no tokens; send at least one", param="prompt")
        if min(prompt) < 0 or max(prompt) >= vocab:
            wrong = next(token for token in prompt if not 0 <= token < vocab)
            raise InvalidValue(
                f"the prompt holds token id {wrong}; this model's ids are 0 to {vocab - 1}", param="prompt"
            )
        for name, tokens in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            for token in tokens:  # the sampler writes to the logits of these without looking again
                if not 0 <= token < vocab:
                    raise InvalidValue(
                        f"{name} names token id {token}; this model's ids are 0 to {vocab - 1}", param=name
                    )
        room = min(self._limits.max_context, self._kv_tokens)
        total = len(prompt) + params.max_tokens
        if total > room:
            raise ContextLengthExceeded(
                f"the prompt has {len(prompt)} tokens and max_tokens is {params.max_tokens}, together {total};"
                f" a request may have {room}. Shorten the prompt or lower max_tokens",
                param="prompt",
            )

    # chunks, in the step loop's thread and then in the event loop

    def _deliver(self, chunks: list[Chunk]) -> None:
        assert self._events is not None
        if not self._events.is_closed():
            self._events.call_soon_threadsafe(self._receive, chunks)

    def _receive(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            buffer = self._buffers.get(chunk.request_id)
            if buffer is not None:
                buffer.push(chunk)
                if buffer.ended:
                    self._forget(chunk.request_id)

    def _forget(self, request_id: str) -> None:
        del self._buffers[request_id]
        if not self._buffers:
            self._empty.set()

    def _fail_open(self, error: AiEngineError) -> None:
        for request_id, buffer in list(self._buffers.items()):
            buffer.fail(request_id, error.code, error.message)
            self._forget(request_id)

    def _fail_stuck(self, request_ids: Sequence[str], seconds: float) -> None:
        """Those that run in a step which does not end; they are cancelled for the case that it does."""
        error = EngineError(f"the step that computes this has not ended for {seconds:.0f} s")
        for request_id in request_ids:
            buffer = self._buffers.get(request_id)
            if buffer is not None:
                buffer.fail(request_id, error.code, error.message)
                self._forget(request_id)
                self.loop.post(Cancel(request_id))

    # health and the end

    @property
    def queued_requests(self) -> int:
        return self._entered_requests - self.loop.left_queue_requests

    @property
    def queued_tokens(self) -> int:
        return self._entered_tokens - self.loop.left_queue_tokens

    async def health(self) -> Health:
        reason = self._not_ready_because()
        return Health(
            live=self.loop.alive,
            ready=not reason,
            reason=reason,
            queued_requests=self.queued_requests,
            queued_tokens=self.queued_tokens,
            running_requests=max(0, len(self._buffers) - self.queued_requests),
        )

    def _not_ready_because(self) -> str:
        loop, config = self.loop, self._config
        silent_s = self._clock.now_s() - loop.beat_s
        if not loop.alive:
            return "the step loop is not running"
        if self._draining:
            return "draining"
        if not loop.idle and silent_s > config.stall_s:
            return f"the step loop has been in one step for {silent_s:.0f} s (limit {config.stall_s:g} s)"
        if loop.failed_steps >= config.max_failed_steps:
            return f"the last {loop.failed_steps} steps failed: {loop.last_error}"
        return ""

    async def drain(self, deadline_s: float) -> None:
        self._draining = True
        error = ShuttingDown(f"the server is shutting down and did not finish this within {deadline_s:g} s")
        try:
            await asyncio.wait_for(self._empty.wait(), deadline_s)
        except TimeoutError:
            self.loop.post(FailAll(error))
            try:
                await asyncio.wait_for(self._empty.wait(), self._config.drain_grace_s)
            except TimeoutError:  # the step loop is stuck in a step
                self._fail_open(error)
