"""A serving layer that plays a script, for tests of the doors. Owns no queue and no model.

A script is a list per request: a Chunk is delivered, a float waits that many seconds, HANG waits until the request
is cancelled, an exception is raised out of the stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

from ai_engine.ports.errors import AiEngineError
from ai_engine.ports.serving import Chunk, GenerateRequest, Health, Terminal, TokenLogprob, Usage

HANG: Final = float("inf")
Script = Sequence[Chunk | float | BaseException]


def _usage(request: GenerateRequest, index: int, num_tokens: int) -> Usage:
    return Usage(len(request.prompt) if index == 0 else 0, num_tokens)


def answer(
    request: GenerateRequest,
    tokens: Sequence[int],
    *,
    index: int = 0,
    finish: Terminal = "stop",
    tokens_per_chunk: int = 1,
    stop_token: int | None = None,
) -> list[Chunk]:
    """Chunks that give ``tokens`` (cut at max_tokens: finish "length") to one choice; the last one is terminal."""
    if len(tokens) > request.params.max_tokens:
        tokens, finish, stop_token = tokens[: request.params.max_tokens], "length", None
    pieces = [list(tokens[i : i + tokens_per_chunk]) for i in range(0, len(tokens), tokens_per_chunk)] or [[]]
    k = request.params.logprobs
    chunks = []
    for i, piece in enumerate(pieces):
        last = i == len(pieces) - 1
        chunks.append(
            Chunk(
                request_id=request.request_id,
                index=index,
                tokens=piece,
                logprobs=None if k is None else [fake_logprob(token, k) for token in piece],
                finish=finish if last else None,
                stop_token=stop_token if last else None,
                usage=_usage(request, index, len(tokens)) if last else None,
                step=i + 1,
            )
        )
    return chunks


def fake_logprob(token: int, k: int) -> TokenLogprob:
    """The token at -0.5 nats, and the k best: itself and small ids after it, 1 nat apart."""
    others = [t for t in range(k + 1) if t != token][: max(0, k - 1)]
    top = [(token, -0.5), *((t, -1.5 - i) for i, t in enumerate(others))][:k]
    return TokenLogprob(token, -0.5, top)


def failing(
    request: GenerateRequest, tokens: Sequence[int], code: str = "engine_error", message: str = "the step failed"
) -> list[Chunk]:
    """Chunks that give ``tokens`` and then end as failed."""
    chunks = answer(request, tokens)[: len(tokens)]
    last = Chunk(
        request_id=request.request_id,
        finish="failed",
        error_code=code,
        error_message=message,
        usage=_usage(request, 0, len(tokens)),
        step=len(tokens) + 1,
    )
    return [Chunk(request_id=c.request_id, tokens=c.tokens, logprobs=c.logprobs, step=c.step) for c in chunks] + [last]


class ScriptedServing:
    """Implements ports.serving.Serving. ``requests`` and ``cancelled`` record what came; submit raises ``refusal``.

    The default script answers every choice with ``tokens`` (b"Hello" unless given) and finish "stop".
    """

    def __init__(
        self,
        script: Callable[[GenerateRequest], Script] | None = None,
        *,
        tokens: Sequence[int] = tuple(b"Hello"),
        refusal: AiEngineError | None = None,
        health: Health | None = None,
    ) -> None:
        self._script = script or (lambda r: [c for i in range(r.n) for c in answer(r, tokens, index=i)])
        self.refusal = refusal
        self.health_value = health or Health(live=True, ready=True)
        self.requests: list[GenerateRequest] = []
        self.cancelled: list[tuple[str, int | None]] = []
        self.drained_s: float | None = None
        self._cancels: dict[str, asyncio.Event] = {}
        self._cancelled_choices: dict[str, set[int]] = {}

    @property
    def open_requests(self) -> int:
        """Streams whose choices have not all ended."""
        return len(self._cancels)

    async def submit(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        self._cancels[request.request_id] = asyncio.Event()
        self._cancelled_choices[request.request_id] = set()
        return self._play(request, self._script(request))

    async def _play(self, request: GenerateRequest, script: Script) -> AsyncIterator[Chunk]:
        request_id = request.request_id
        cancelled, choices = self._cancels[request_id], self._cancelled_choices[request_id]
        ended: set[int] = set()
        given = dict.fromkeys(range(request.n), 0)
        try:
            for item in script:
                for chunk in self._cancel_chunks(request, choices - ended, given):
                    ended.add(chunk.index)
                    yield chunk
                if isinstance(item, BaseException):
                    raise item
                if isinstance(item, Chunk):
                    if item.index in ended:
                        continue
                    given[item.index] += len(item.tokens)
                    if item.finish is not None:
                        ended.add(item.index)
                    yield item
                    await asyncio.sleep(0)
                else:
                    await self._wait(cancelled, item)
                if len(ended) == request.n:
                    return
            for chunk in self._cancel_chunks(request, choices - ended, given):
                yield chunk
        finally:
            self._cancels.pop(request_id, None)
            self._cancelled_choices.pop(request_id, None)

    @staticmethod
    async def _wait(cancelled: asyncio.Event, seconds: float) -> None:
        try:
            await asyncio.wait_for(cancelled.wait(), None if seconds == HANG else seconds)
        except TimeoutError:
            return

    @staticmethod
    def _cancel_chunks(request: GenerateRequest, choices: set[int], given: dict[int, int]) -> list[Chunk]:
        return [
            Chunk(
                request_id=request.request_id,
                index=i,
                finish="cancelled",
                error_code="cancelled",
                usage=_usage(request, i, given[i]),
            )
            for i in sorted(choices)
        ]

    async def cancel(self, request_id: str, index: int | None = None, *, stopped: bool = False) -> None:
        self.cancelled.append((request_id, index))
        if request_id in self._cancels:
            n = next(r.n for r in self.requests if r.request_id == request_id)
            self._cancelled_choices[request_id].update(range(n) if index is None else (index,))
            self._cancels[request_id].set()

    async def health(self) -> Health:
        return self.health_value

    async def drain(self, deadline_s: float) -> None:
        self.drained_s = deadline_s
