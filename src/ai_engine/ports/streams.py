"""The chunk stream that every Serving implementation hands out: a bounded buffer and the reader's end of it.

A slow reader costs only itself: at most one unread chunk per choice is kept, later ones are merged into it. Owns no
thread: push and read belong to one event loop. Does not decide when a request ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ai_engine.ports.serving import Chunk, TokenLogprob


def merge_chunks(first: Chunk, second: Chunk) -> Chunk:
    """One chunk that says what both said. Takes over (and grows) the lists of ``first``: amortised O(len(second))."""
    assert first.finish is None, "nothing follows a terminal chunk"
    first.tokens.extend(second.tokens)
    return Chunk(
        request_id=first.request_id,
        index=first.index,
        tokens=first.tokens,
        logprobs=_joined(first.logprobs, second.logprobs),
        prompt_logprobs=_joined(first.prompt_logprobs, second.prompt_logprobs),
        finish=second.finish,
        stop_token=second.stop_token,
        error_code=second.error_code,
        error_message=second.error_message,
        usage=second.usage,
        step=second.step,
    )


def _joined(first: list[TokenLogprob] | None, second: list[TokenLogprob] | None) -> list[TokenLogprob] | None:
    if first is None:
        return second
    first.extend(second or ())
    return first


class ChunkBuffer:
    """What has come and was not read yet. The writer keeps this, the reader a ChunkStream."""

    def __init__(self, num_choices: int) -> None:
        self._unread: dict[int, Chunk] = {}  # by choice, oldest first
        self._open = set(range(num_choices))  # choices whose terminal chunk has not come
        self._waiter: asyncio.Future[None] | None = None

    @property
    def ended(self) -> bool:
        """Every choice's terminal chunk has come."""
        return not self._open

    def push(self, chunk: Chunk) -> None:
        """Add a chunk; one for a choice that has ended is dropped."""
        if chunk.index not in self._open:
            return
        if chunk.finish is not None:
            self._open.discard(chunk.index)
        unread = self._unread.get(chunk.index)
        self._unread[chunk.index] = chunk if unread is None else merge_chunks(unread, chunk)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, request_id: str, code: str, message: str) -> None:
        """End every open choice as failed."""
        for index in sorted(self._open):
            self.push(
                Chunk(request_id=request_id, index=index, finish="failed", error_code=code, error_message=message)
            )

    async def take(self) -> Chunk | None:
        """The next chunk, or None after the last one. One reader at a time."""
        while not self._unread:
            if self.ended:
                return None
            assert self._waiter is None, "two readers of one stream"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._unread.pop(next(iter(self._unread)))


class ChunkStream:
    """The reader's end: an async iterator of chunks. Closing it, or dropping it, before the last chunk was made calls
    ``on_abandon`` once, from whatever thread that happens in. Cancelling a pending read does not: the read can be
    tried again (so a reader may wait with a time limit)."""

    def __init__(self, buffer: ChunkBuffer, on_abandon: Callable[[], None]) -> None:
        self._buffer: ChunkBuffer | None = buffer
        self._on_abandon = on_abandon

    def __aiter__(self) -> ChunkStream:
        return self

    async def __anext__(self) -> Chunk:
        chunk = None if self._buffer is None else await self._buffer.take()
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def aclose(self) -> None:
        self._abandon()

    def __del__(self) -> None:
        self._abandon()

    def _abandon(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is not None and not buffer.ended:
            self._on_abandon()
