"""One HTTP exchange over ASGI: the request's headers, ids and body, and the response, started once.

Owns limits (body size and time, a client that does not read), content types, gzip bodies, request and trace ids,
common headers, disconnects. A client that closes its sending half has left. Does not own routes, keys or what errors
mean (app.py).
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar
from urllib.parse import parse_qs

import msgspec

from ai_engine.api.keys import ANYBODY, Key
from ai_engine.api.limits import Pass
from ai_engine.api.trace_context import read_context, response_header
from ai_engine.contracts.json_text import decode_json
from ai_engine.ports.errors import BodyTooLarge, InvalidRequest, InvalidValue, RequestTimeout, UnsupportedMediaType
from ai_engine.ports.trace import Parts

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Header = tuple[bytes, bytes]
T = TypeVar("T")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_MAX_QUERY_BYTES = 8192
_DISCARD_FACTOR = 4
"""A body over the limit is read and dropped up to this many limits, so that the client gets to read the answer."""


class ApiConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the doors. Those without a default are the operator's (config.ServeConfig has their defaults)."""

    strict: bool  # unknown and unused fields are errors, whatever the key
    max_body_bytes: int
    request_timeout_s: float | None  # from arrival at serving; None: no limit
    cors_origins: tuple[str, ...]  # exact origins, or "*"; none means no CORS headers at all
    max_open_requests: int = 0  # generations inside at once; 0: no bound
    log_tokens: tuple[str, ...] = ()  # names of keys whose tokens are logged one by one; "*": all
    body_timeout_s: float = 30.0
    write_timeout_s: float = 60.0  # a client that reads nothing for so long is gone
    health_timeout_s: float = 1.0
    ping_s: float = 10.0  # silence in a stream before a keep-alive comment
    retry_after_s: float = 2.0


class ClientDisconnected(Exception):
    """Nobody is listening any more. Not an error of ours: nothing is sent, status 499 is counted."""


def _query(scope: Scope) -> dict[str, str]:
    """The last value of each name of the query."""
    raw: bytes = scope.get("query_string", b"")
    found = parse_qs(raw[:_MAX_QUERY_BYTES].decode("latin-1"), keep_blank_values=True)
    return {name: values[-1] for name, values in found.items()}


class Exchange:
    """One request and its response. ``params`` are the route's path parameters, ``key`` who asks, ``quota`` what that
    key may still use (None: not asked). ``parts`` is its stopwatch; ``requests`` (ids in serving) and ``attributes``
    (names and numbers, no text) are what its trace says."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        config: ApiConfig,
        entropy: Callable[[int], bytes],
        now_s: Callable[[], float],
    ) -> None:
        self.parts = Parts(now_s)
        self._now_s = now_s
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.config = config
        self.key: Key = ANYBODY
        self.quota: Pass | None = None
        self.params: dict[str, str] = {}
        self.status = 0
        self.ended = False  # the whole response is out
        self.sent_s = 0.0  # when its last byte was
        self.common: list[Header] = []
        self._receive = receive
        self._send = send
        self._connection: dict[str, Callable[[], Any]] = scope.get("extensions", {}).get("connection", {})
        self.body_read = False
        self.request_bytes = self.response_bytes = 0  # of the bodies
        self.request_id = self._inbound_id() or f"req-{entropy(12).hex()}"
        self.context, self.malformed_trace = read_context(
            scope["headers"], lambda: entropy(16).hex(), self.request_id, repr(now_s())
        )
        self.trace_id = self.context.trace_id
        self.query = _query(scope)
        self.requests: list[str] = []
        self.attributes: dict[str, str | int | float | bool | list[str]] = {}
        self.common += [
            (b"x-request-id", self.request_id.encode()),
            (b"x-ai-trace-id", self.trace_id.encode()),
            (b"traceresponse", response_header(self.context)),
        ]

    def header(self, name: bytes) -> str:
        return self.headers.get(name, b"").decode("latin-1").strip()

    @property
    def timeout_s(self) -> float | None:
        """The server's limit, or what the client's ``x-request-timeout`` (seconds) asks if that is less. Raises
        InvalidValue."""
        found, limit = self.header(b"x-request-timeout"), self.config.request_timeout_s
        if not found:
            return limit
        try:
            wanted = float(found)
        except ValueError:
            wanted = 0.0
        if not 0 < wanted < float("inf"):
            raise InvalidValue(
                f"x-request-timeout: found {found[:40]!r}, expected seconds, more than 0.", param="x-request-timeout"
            )
        return wanted if limit is None else min(wanted, limit)

    @property
    def logs_tokens(self) -> bool:
        """Whether this request's tokens are logged one by one: its client or the operator asks for it."""
        asked = self.header(b"x-ai-log-tokens").lower() in ("1", "true", "yes")
        return asked or self.key.name in self.config.log_tokens or "*" in self.config.log_tokens

    def _inbound_id(self) -> str:
        found = self.header(b"x-request-id")
        return found if _REQUEST_ID.fullmatch(found) else ""

    # --- request ---

    async def json(self) -> Any:
        """The body as JSON. Raises from the error tree, or ClientDisconnected."""
        self._check_content_type()
        encoding = self.header(b"content-encoding").lower()
        if encoding not in ("", "identity", "gzip"):
            raise UnsupportedMediaType(
                f"Content-Encoding {encoding[:40]!r} is not supported. Fix: send the body plain or gzipped."
            )
        body = await self._body()
        self.parts.enter("contract")
        return decode_json(self._gunzip(body) if encoding == "gzip" else body)

    def _check_content_type(self) -> None:
        kind, *options = [part.strip().lower() for part in self.header(b"content-type").split(";")]
        if kind and kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            raise UnsupportedMediaType(
                f"Content-Type {kind[:80]!r} is not supported. Fix: send 'Content-Type: application/json'."
            )
        for option in options:
            name, _, value = option.partition("=")
            if name.strip() == "charset" and value.strip().strip('"') not in ("utf-8", "utf8", "us-ascii"):
                raise UnsupportedMediaType(f"Charset {value[:40]!r} is not supported. Fix: send the JSON as UTF-8.")

    async def _body(self) -> bytes:
        self.body_read = True
        limit = self.config.max_body_bytes
        length = self.header(b"content-length")
        if length.isdecimal() and int(length) > limit * _DISCARD_FACTOR:
            raise self._too_large(f"{length} bytes")
        chunks: list[bytes] = []
        num_bytes = 0
        more = True
        try:
            async with asyncio.timeout(self.config.body_timeout_s):
                while more:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnected
                    chunk = message.get("body", b"")
                    num_bytes += len(chunk)
                    self.request_bytes = num_bytes
                    more = message.get("more_body", False)
                    if num_bytes <= limit:
                        chunks.append(chunk)
                    elif num_bytes > limit * _DISCARD_FACTOR:
                        break
        except TimeoutError:
            self.common.append((b"connection", b"close"))
            raise RequestTimeout(
                f"The request body did not arrive within {self.config.body_timeout_s:g} s ({num_bytes} bytes came). "
                "Fix: send it whole, or check Content-Length."
            ) from None
        if num_bytes > limit:
            raise self._too_large(f"more than {limit} bytes" if more else f"{num_bytes} bytes", close=more)
        return b"".join(chunks)

    def _too_large(self, found: str, *, close: bool = True) -> BodyTooLarge:
        if close:
            self.common.append((b"connection", b"close"))
        return BodyTooLarge(f"The request body has {found}; the limit is {self.config.max_body_bytes}. Fix: send less.")

    def _gunzip(self, body: bytes) -> bytes:
        unpacker = zlib.decompressobj(wbits=31)
        try:
            plain = unpacker.decompress(body, self.config.max_body_bytes + 1)
        except zlib.error as error:
            raise InvalidRequest(f"The gzip body is damaged: {error}. Fix: send it again, or send it plain.") from None
        if len(plain) > self.config.max_body_bytes:
            raise self._too_large("more than the limit after unpacking", close=False)
        if not unpacker.eof or unpacker.unused_data:
            raise InvalidValue(
                "The gzip body is cut short or has bytes after its end. Fix: send one whole gzip stream."
            )
        return plain

    async def unless_disconnected(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work``; when the client leaves first, cancel it and raise ClientDisconnected."""
        task = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(self._gone())
        try:
            await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ClientDisconnected
        finally:
            watch.cancel()
            task.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    # --- response ---

    @property
    def started(self) -> bool:
        return self.status != 0

    async def reply(
        self, status: int, body: bytes, *, content_type: bytes = b"application/json", headers: Sequence[Header] = ()
    ) -> None:
        """A whole response. A HEAD request gets the headers only."""
        self.parts.enter("send")
        head = [(b"content-length", b"%d" % len(body)), *headers]
        if body:
            head.append((b"content-type", content_type))
        await self._start(status, head)
        await self._write(b"" if self.method == "HEAD" else body, more=False)

    async def start_stream(self) -> None:
        self.parts.enter("send")
        await self._start(
            200,
            [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
            ],
        )

    async def write(self, data: bytes) -> None:
        """Part of a stream; waits while the client does not read."""
        self.parts.enter("send")
        await self._write(data, more=True)

    async def end(self) -> None:
        await self._write(b"", more=False)

    async def _write(self, data: bytes, *, more: bool) -> None:
        """Raises ClientDisconnected when the client has read nothing for long: the connection is cut, with what it
        never read, for a close would wait for that."""
        self.response_bytes += len(data)
        try:
            async with asyncio.timeout(self.config.write_timeout_s):
                await self._deliver({"type": "http.response.body", "body": data, "more_body": more})
                self.ended = not more
            self.sent_s = self._now_s()
        except TimeoutError:
            if self._connection:
                self._connection["abort"]()
            raise ClientDisconnected from None

    async def _deliver(self, message: dict[str, Any]) -> None:
        """To the server, unless the connection has just been closed and it does not know yet."""
        if self._connection and self._connection["is_closing"]():
            raise ClientDisconnected
        await self._send(message)

    async def _start(self, status: int, headers: list[Header]) -> None:
        assert not self.started, "a response starts once"
        self.status = status
        limits = [] if self.quota is None else self.quota.headers()
        await self._deliver(
            {"type": "http.response.start", "status": status, "headers": headers + self.common + limits}
        )
