"""One streamed request over HTTP/1.1, and what came back when.

Owns the connection, the moments at which bytes came, and their reading as server-sent events afterwards: while a run is
on, the client only stores bytes with their time, so that it takes little of the cores it shares with the server. Does
not decide what to send or when (load.py).

The first token is the first event with text in it (not an empty chunk, not a role); the answer ends with the last such
event, not at [DONE]. Counts of tokens are the server's usage, without which an answer is a failure.
"""

from __future__ import annotations

import asyncio
import bisect
import json
import time
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec

Part = tuple[float, bytes]  # when, what


class Answer(msgspec.Struct, kw_only=True):
    """What one request saw, in seconds of the monotonic clock. ``error`` is "" for a whole answer; an answer that this
    client left has ``aborted`` and no error. ``texts_s``: the moment of each event with text."""

    name: str = ""
    intended_s: float = 0.0
    sent_s: float = 0.0
    ended_s: float = 0.0
    texts_s: list[float] = []
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    aborted: bool = False
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error and not self.aborted

    @property
    def ttft_s(self) -> float:
        """To the first text, from the moment the request was meant to be sent."""
        return self.texts_s[0] - self.intended_s

    @property
    def latency_s(self) -> float:
        return self.texts_s[-1] - self.intended_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds a token after the first; None for answers of one token."""
        if self.completion_tokens < 2 or len(self.texts_s) < 2:
            return None
        return (self.texts_s[-1] - self.texts_s[0]) / (self.completion_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.texts_s, self.texts_s[1:], strict=False)]


def payload(url: str, path: str, body: dict[str, Any], key: str = "") -> bytes:
    """A whole HTTP request; made before the run."""
    where, data = urlsplit(url), msgspec.json.encode(body)
    head = [
        f"POST {where.path.rstrip('/')}{path} HTTP/1.1", f"host: {where.netloc}", "content-type: application/json",
        "accept: text/event-stream", "connection: close", f"content-length: {len(data)}",
    ]  # fmt: skip
    if key:
        head.append(f"authorization: Bearer {key}")
    return "\r\n".join([*head, "", ""]).encode() + data


class _Stream(asyncio.Protocol):
    """Sends one payload, keeps what comes, and leaves after [DONE] or at the end of the connection."""

    def __init__(self, data: bytes, on_part: Callable[[int], None] | None) -> None:
        self._data, self._on_part = data, on_part
        self.parts: list[Part] = []
        self.sent_s = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.sent_s = time.monotonic()
        self._transport.write(self._data)

    def data_received(self, data: bytes) -> None:
        self.parts.append((time.monotonic(), data))
        self._tail = (self._tail + data)[-64:]
        if self._on_part is not None:
            self._on_part(len(self.parts))
        if b"data: [DONE]" in self._tail:
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish()

    def _finish(self) -> None:
        if self._transport is not None:
            self._transport.close()
        if not self.done.done():
            self.done.set_result(None)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


async def send(
    url: str, data: bytes, *, name: str = "", intended_s: float | None = None, abort_after_s: float | None = None,
    timeout_s: float = 120.0, on_part: Callable[[int], None] | None = None,
) -> Answer:  # fmt: skip
    """Send one request and wait for its answer. Never raises for what the server does: that is the answer's error.
    ``on_part(n)`` is called with the number of pieces received so far."""
    where = urlsplit(url)
    begun = time.monotonic()
    answer = Answer(name=name, intended_s=begun if intended_s is None else intended_s, sent_s=begun)
    loop = asyncio.get_running_loop()
    try:
        transport, stream = await loop.create_connection(
            lambda: _Stream(data, on_part), where.hostname or "127.0.0.1", where.port or 80
        )
    except OSError as error:
        answer.ended_s, answer.error = time.monotonic(), f"no connection: {error}"
        return answer
    answer.sent_s = stream.sent_s
    try:
        await asyncio.wait_for(asyncio.shield(stream.done), timeout_s if abort_after_s is None else abort_after_s)
    except TimeoutError:
        answer.aborted = abort_after_s is not None
        answer.error = "" if answer.aborted else f"no end within {timeout_s:.0f} s"
        stream.abort()
    finally:
        if not transport.is_closing():
            transport.abort()
    answer.ended_s = time.monotonic()
    read_answer(answer, stream.parts)
    return answer


def read_answer(answer: Answer, parts: list[Part]) -> None:
    """Fill in what the bytes say."""
    try:
        status, events, body = read_events(parts)
        if status != 200:
            answer.error = answer.error or f"HTTP {status}: {body[:200].decode('utf-8', 'replace')}"
            return
        whole = False
        for at, data in events:
            if data == "[DONE]":
                whole = True
                break
            _read_event(answer, at, json.loads(data))
    except (ValueError, IndexError, TypeError) as error:
        if not answer.aborted:  # who leaves early may have seen nothing that can be read
            answer.error = answer.error or f"the answer cannot be read: {error}"
        return
    if answer.error or answer.aborted:
        return
    if not whole:
        answer.error = "the stream ended without [DONE]"
    elif not answer.completion_tokens:
        answer.error = "the stream has no usage"
    elif not answer.texts_s:
        answer.error = "the stream has no text"


def _read_event(answer: Answer, at: float, event: dict[str, Any]) -> None:
    if "error" in event:
        answer.error = str(event["error"])[:200]
    for choice in event.get("choices") or []:
        delta = choice.get("delta") or {}
        if choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"):
            answer.texts_s.append(at)
    usage = event.get("usage")
    if usage:
        answer.prompt_tokens = int(usage.get("prompt_tokens", 0))
        answer.completion_tokens = int(usage.get("completion_tokens", 0))
        answer.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def read_events(parts: list[Part]) -> tuple[int, list[tuple[float, str]], bytes]:
    """(status, [(when its last byte came, data)], body) of a response; chunked transfer coding is undone. ValueError
    where there is no response."""
    raw = b"".join(data for _, data in parts)
    ends, total = [], 0
    for _, data in parts:
        total += len(data)
        ends.append(total)
    head, separator, _ = raw.partition(b"\r\n\r\n")
    if not separator:
        raise ValueError("the connection ended before the response's head")
    status = int(head.split(b" ", 2)[1])
    chunked = b"transfer-encoding: chunked" in head.lower()
    pieces = _chunks(raw, len(head) + 4) if chunked else [(len(head) + 4, len(raw))]
    body = b"".join(raw[start:end] for start, end in pieces)
    starts = [0]
    for start, end in pieces:
        starts.append(starts[-1] + end - start)
    events, at = [], 0
    text = body.replace(b"\r\n\r\n", b"\n\n  ")  # same length: offsets stay
    while (end := text.find(b"\n\n", at)) >= 0:
        block = text[at:end].strip()
        at = end + 2
        if block.startswith(b"data:"):
            piece = bisect.bisect_right(starts, end) - 1
            offset = pieces[min(piece, len(pieces) - 1)][0] + end - starts[min(piece, len(pieces) - 1)]
            events.append((parts[bisect.bisect_right(ends, offset)][0], block[5:].strip().decode()))
    return status, events, body


def _chunks(raw: bytes, at: int) -> list[tuple[int, int]]:
    """(start, end) of each chunk's data; a chunk that was cut off counts as far as it came."""
    found = []
    while (line := raw.find(b"\r\n", at)) >= 0:
        size = int(raw[at:line].split(b";")[0], 16)
        if size == 0:
            break
        found.append((line + 2, min(line + 2 + size, len(raw))))
        at = line + 2 + size + 2
    return found
