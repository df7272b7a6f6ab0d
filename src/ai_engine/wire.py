"""A port over a Unix socket: length-prefixed MessagePack frames between the gateway and the worker.

    frame = length (4 bytes, big-endian) + one message     both sides start with Hello(version, port)

Framing and Link know no port. A port is then: its messages down and up, a client that implements the Protocol in the
gateway, a `serve_*` that calls the real one in the worker. Here: serving, with telemetry riding along. One Batch per
step goes up: all chunks and events of the step. A malformed frame ends the connection; a lost peer ends every request:
the gateway fails what is open, the worker cancels it and returns. Errors cross by code. Owns no process and no policy.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Final, Generic, TypeVar, cast

import msgspec

from ai_engine.ports.errors import AiEngineError, BodyTooLarge, EngineError, InvalidRequest, NotReady, error_from_code
from ai_engine.ports.serving import Chunk, GenerateRequest, Health, Serving
from ai_engine.ports.streams import ChunkBuffer, ChunkStream
from ai_engine.ports.telemetry import Event, Telemetry

VERSION: Final = 1
MAX_FRAME_BYTES: Final = 64 << 20
_HEADER: Final = struct.Struct(">I")
_WRITE_HIGH_BYTES: Final = 4 << 20  # beyond this the worker reads no more chunks: they merge where they are made
_EVENTS_DELAY_S: Final = 0.02  # events that no chunk took along wait this long
_CALL_TIMEOUT_S: Final = 5.0
_CLOSE_TIMEOUT_S: Final = 1.0
_CONNECT_RETRY_S: Final = 0.02

Incoming = TypeVar("Incoming")


class FrameError(Exception):
    """The peer sent what is no frame or no message of this port, or a message of ours is too large for a frame."""


# frames


def frame(payload: bytes) -> bytes:
    if len(payload) > MAX_FRAME_BYTES:
        raise FrameError(f"a message of {len(payload)} bytes; a frame holds {MAX_FRAME_BYTES}")
    return _HEADER.pack(len(payload)) + payload


class FrameReader:
    """Cuts a byte stream into payloads. Holds at most one frame and one read."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_bytes = max_bytes
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the payloads that ``data`` completes. Raises FrameError at the first bad length."""
        self._data += data
        start = 0
        try:
            while len(self._data) - start >= _HEADER.size:
                (size,) = _HEADER.unpack_from(self._data, start)
                if not 0 < size <= self._max_bytes:
                    raise FrameError(f"a frame of {size} bytes; expected 1 to {self._max_bytes}")
                end = start + _HEADER.size + size
                if len(self._data) < end:
                    return
                payload = bytes(self._data[start + _HEADER.size : end])
                start = end
                yield payload
        finally:
            del self._data[:start]


class Link(asyncio.Protocol, Generic[Incoming]):
    """One end of a connection: messages of ``incoming`` in, any message out. ``on_lost(reason)`` is called once."""

    def __init__(
        self,
        incoming: Any,
        on_message: Callable[[Incoming], None],
        on_lost: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._decoder: msgspec.msgpack.Decoder[Incoming] = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()
        self._reader = FrameReader()
        self._on_message = on_message
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self.reason = "the peer closed the connection"  # of the end, once `lost` is set
        self._writable = asyncio.Event()
        self._writable.set()
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of no class of asyncio
        self._transport.set_write_buffer_limits(high=_WRITE_HIGH_BYTES)

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._reader.feed(data):
                self._on_message(self._decoder.decode(payload))
        except (FrameError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self.close(f"malformed frame: {error}", at_once=True)

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self.reason = f"connection lost: {exc}"
        self._writable.set()
        self.lost.set()
        self._on_lost(self.reason)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    async def writable(self) -> None:
        """Wait while the peer reads more slowly than we write."""
        await self._writable.wait()

    def send(self, message: msgspec.Struct) -> None:
        """Write one frame; nothing when the connection is lost. Raises FrameError when it would be too large."""
        data = frame(self._encoder.encode(message))
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def close(self, reason: str, *, at_once: bool = False) -> None:
        """End the connection after what was sent, or without it."""
        if self._transport is None or self.lost.is_set():
            return
        self.reason = reason
        if at_once:
            self._transport.abort()
        else:
            self._transport.close()


# messages


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    version: int
    port: str

    def check(self, port: str) -> None:
        if (self.version, self.port) != (VERSION, port):
            raise FrameError(f"the peer speaks {self.port} version {self.version}; expected {port} version {VERSION}")


class ErrorInfo(msgspec.Struct, frozen=True, array_like=True):
    """An error of the tree, as it crosses."""

    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    details: dict[str, str | float] = {}

    @classmethod
    def of(cls, error: BaseException) -> ErrorInfo:
        if not isinstance(error, AiEngineError):
            error = EngineError(f"{type(error).__name__}: {error}")
        return cls(error.code, error.message, error.param, error.retry_after_s, dict(error.details))

    def error(self) -> AiEngineError:
        error = error_from_code(self.code, self.message, param=self.param)
        error.retry_after_s, error.details = self.retry_after_s, self.details
        return error


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    call: int
    request: GenerateRequest


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    request_id: str
    index: int | None = None
    stopped: bool = False


class AskHealth(msgspec.Struct, frozen=True, tag="health"):
    call: int


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    call: int
    deadline_s: float


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    call: int
    health: Health | None = None
    error: ErrorInfo | None = None


class Batch(msgspec.Struct, frozen=True, tag="batch"):
    """What one step made."""

    chunks: list[Chunk]
    events: list[Event] = []
    lost_events: int = 0  # ever


ServingDown = Hello | Submit | Cancel | AskHealth | Drain
ServingUp = Hello | Reply | Batch


# the gateway's side


class ServingClient:
    """Implements ports.serving.Serving on a worker's socket; forwards the worker's events to ``telemetry``."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._link: Link[ServingUp] = Link(ServingUp, self._on_message, self._on_lost)
        self._loop = asyncio.get_running_loop()
        self._greeted = asyncio.Event()
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._num_calls = 0
        self._buffers: dict[str, ChunkBuffer] = {}
        self._lost_because = ""
        self.lost_events = 0

    @classmethod
    async def connect(cls, path: str, *, telemetry: Telemetry, timeout_s: float = 60.0) -> ServingClient:
        """Wait for the worker's socket and greet it. Raises NotReady when it does not answer in time."""
        client = cls(telemetry)
        try:
            async with asyncio.timeout(timeout_s):
                await client._dial(path)
                client._link.send(Hello(VERSION, "serving"))
                await client._greeted.wait()
        except TimeoutError:
            client._link.close("the worker did not answer")
            raise NotReady(f"no worker answered on {path} within {timeout_s:g} s") from None
        client._check_link()
        return client

    async def _dial(self, path: str) -> None:
        while True:
            try:
                await self._loop.create_unix_connection(lambda: self._link, path)
                return
            except (FileNotFoundError, ConnectionRefusedError):
                await asyncio.sleep(_CONNECT_RETRY_S)

    @property
    def lost(self) -> asyncio.Event:
        """Set when the worker is gone."""
        return self._link.lost

    async def submit(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        self._check_link()
        request_id = request.request_id
        if request_id in self._buffers:
            raise InvalidRequest(f"request id {request_id!r} is in use", param="request_id")
        buffer = self._buffers[request_id] = ChunkBuffer(request.n)
        accepted = False
        try:
            await self._call(lambda call: Submit(call, request))
            accepted = True
        except FrameError as error:
            raise BodyTooLarge(str(error)) from error
        except asyncio.CancelledError:
            self._send_cancel(request_id)
            raise
        finally:
            if not accepted:
                self._buffers.pop(request_id, None)
        return ChunkStream(buffer, lambda: self._abandon(request_id))

    async def cancel(self, request_id: str, index: int | None = None, *, stopped: bool = False) -> None:
        if request_id in self._buffers:
            self._link.send(Cancel(request_id, index, stopped))

    async def health(self) -> Health:
        if self._lost_because:
            return Health(live=False, ready=False, reason=self._lost_because)
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                reply = await self._call(AskHealth)
        except TimeoutError:
            return Health(live=True, ready=False, reason=f"the worker did not answer within {_CALL_TIMEOUT_S:g} s")
        except NotReady as error:
            return Health(live=False, ready=False, reason=error.message)
        assert reply.health is not None
        return reply.health

    async def drain(self, deadline_s: float) -> None:
        try:
            async with asyncio.timeout(deadline_s + _CALL_TIMEOUT_S):
                await self._call(lambda call: Drain(call, deadline_s))
        except (NotReady, TimeoutError):
            self._link.close("the worker did not drain in time")  # fails what is open

    async def close(self) -> None:
        """Hang up: the worker cancels what runs and exits."""
        self._link.close("the gateway closed")
        try:
            await asyncio.wait_for(self._link.lost.wait(), _CLOSE_TIMEOUT_S)
        except TimeoutError:  # the worker reads nothing
            self._link.close("the gateway closed", at_once=True)

    async def _call(self, make: Callable[[int], msgspec.Struct]) -> Reply:
        self._check_link()
        self._num_calls += 1
        call, future = self._num_calls, self._loop.create_future()
        self._calls[call] = future
        try:
            self._link.send(make(call))
            reply: Reply = await future
        finally:
            del self._calls[call]
        if reply.error is not None:
            raise reply.error.error()
        return reply

    def _check_link(self) -> None:
        if self._lost_because:
            raise NotReady(self._lost_because)

    def _send_cancel(self, request_id: str) -> None:
        self._link.send(Cancel(request_id))

    def _abandon(self, request_id: str) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._send_cancel, request_id)

    def _on_message(self, message: ServingUp) -> None:
        if isinstance(message, Batch):
            for event in message.events:
                self._telemetry.emit(event)
            self.lost_events = message.lost_events
            for chunk in message.chunks:
                buffer = self._buffers.get(chunk.request_id)
                if buffer is not None:
                    buffer.push(chunk)
                    if buffer.ended:
                        del self._buffers[chunk.request_id]
        elif isinstance(message, Reply):
            future = self._calls.get(message.call)
            if future is not None and not future.done():
                future.set_result(message)
        else:
            message.check("serving")
            self._greeted.set()

    def _on_lost(self, reason: str) -> None:
        self._lost_because = f"the worker is gone: {reason}"
        for future in self._calls.values():
            if not future.done():
                future.set_exception(NotReady(self._lost_because))
        for request_id, buffer in self._buffers.items():
            buffer.fail(request_id, EngineError.code, self._lost_because)
        self._buffers.clear()
        self._greeted.set()


# the worker's side


class TelemetryClient:
    """Implements ports.telemetry.Telemetry in the worker: events wait here for the next frame. Any thread may emit."""

    def __init__(self, max_events: int = 8192) -> None:
        self._events: deque[Event] = deque()
        self._max_events = max_events
        self.lost = 0
        self.on_event: Callable[[], None] = lambda: None

    def emit(self, event: Event) -> None:
        if len(self._events) >= self._max_events:
            self.lost += 1
            return
        self._events.append(event)
        self.on_event()

    def take(self) -> list[Event]:
        return [self._events.popleft() for _ in range(len(self._events))]


class _Running:
    """A request of the gateway. A cancel that overtakes its submit waits here."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.open = set(range(request.n))
        self.submitted = False
        self.early_cancels: list[Cancel] = []


class _ServingSession:
    """One gateway's connection, from the worker's side."""

    def __init__(self, serving: Serving, telemetry: TelemetryClient) -> None:
        self._serving = serving
        self._telemetry = telemetry
        self.link: Link[ServingDown] = Link(ServingDown, self._on_message)
        self._loop = asyncio.get_running_loop()
        self._running: dict[str, _Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._pumps: set[asyncio.Task[None]] = set()  # those of requests
        self._chunks: list[Chunk] = []
        self._timer_set = False
        self._greeted = False

    def _on_message(self, message: ServingDown) -> None:
        if isinstance(message, Hello):
            self.link.send(Hello(VERSION, "serving"))
            message.check("serving")
            self._greeted = True
            self._telemetry.on_event = self._wake_for_events
            self._wake_for_events()
        elif not self._greeted:
            raise FrameError("the first message must be hello")
        elif isinstance(message, Submit):
            pump = self._spawn(self._run(message))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)
        elif isinstance(message, Cancel):
            self._cancel(message)
        elif isinstance(message, AskHealth):
            self._spawn(self._health(message.call))
        else:
            self._spawn(self._drain(message))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _drain(self, message: Drain) -> None:
        """Answer when every chunk has gone up."""
        await self._serving.drain(message.deadline_s)
        if self._pumps:
            await asyncio.wait(self._pumps, timeout=_CALL_TIMEOUT_S / 2)
        self._flush()
        self.link.send(Reply(message.call))

    async def _health(self, call: int) -> None:
        self.link.send(Reply(call, health=await self._serving.health()))

    def _cancel(self, message: Cancel) -> None:
        running = self._running.get(message.request_id)
        if running is not None and not running.submitted:
            running.early_cancels.append(message)
        elif running is not None:
            self._spawn(self._cancel_now(message))

    async def _cancel_now(self, message: Cancel) -> None:
        await self._serving.cancel(message.request_id, message.index, stopped=message.stopped)

    async def _run(self, message: Submit) -> None:
        """Submit, answer, and put the request's chunks into the next batches."""
        request = message.request
        running = self._running[request.request_id] = _Running(request)
        try:
            try:
                stream = await self._serving.submit(request)
            except Exception as error:  # a refusal, or a bug: either way this request's answer
                self.link.send(Reply(message.call, error=ErrorInfo.of(error)))
                return
            self.link.send(Reply(message.call))
            running.submitted = True
            for early in running.early_cancels:
                await self._cancel_now(early)
            await self._pump(running, stream)
        finally:
            self._running.pop(request.request_id, None)

    async def _pump(self, running: _Running, stream: AsyncIterator[Chunk]) -> None:
        try:
            async for chunk in stream:
                if chunk.finish is not None:
                    running.open.discard(chunk.index)
                self._put(chunk)
                await self.link.writable()
        except Exception as error:  # the stream broke: end what it left open
            info = ErrorInfo.of(error)
            self._fail(running, info.code, info.message)
        self._fail(running, EngineError.code, "the stream ended without a terminal chunk")

    def _fail(self, running: _Running, code: str, message: str) -> None:
        request_id = running.request.request_id
        for index in sorted(running.open):
            self._put(
                Chunk(request_id=request_id, index=index, finish="failed", error_code=code, error_message=message)
            )
        running.open.clear()

    def _put(self, chunk: Chunk) -> None:
        """All readers that a step wakes run before the flush that the first of them asks for: one frame per step."""
        if not self._chunks:
            self._loop.call_soon(self._flush)
        self._chunks.append(chunk)

    def _wake_for_events(self) -> None:
        """From any thread: see that the events go up soon, with chunks or without."""
        if not self._timer_set and not self._loop.is_closed():
            self._timer_set = True
            self._loop.call_soon_threadsafe(self._loop.call_later, _EVENTS_DELAY_S, self._on_timer)

    def _on_timer(self) -> None:
        self._timer_set = False
        self._flush()

    def _flush(self) -> None:
        chunks, self._chunks = self._chunks, []
        events = self._telemetry.take()
        if chunks or events:
            self._send_batch(chunks, events)

    def _send_batch(self, chunks: list[Chunk], events: list[Event]) -> None:
        try:
            self.link.send(Batch(chunks, events, self._telemetry.lost))
        except FrameError:
            if events:
                self._send_batch(chunks, [])
            elif len(chunks) > 1:
                self._send_batch(chunks[: len(chunks) // 2], [])
                self._send_batch(chunks[len(chunks) // 2 :], [])
            else:
                self._spawn(self._cancel_now(Cancel(chunks[0].request_id, chunks[0].index)))
                self._send_batch([_too_large(chunks[0])], [])

    async def end(self) -> None:
        """The gateway is gone: cancel all that it had running."""
        self._telemetry.on_event = lambda: None
        for request_id in list(self._running):
            await self._serving.cancel(request_id)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _too_large(chunk: Chunk) -> Chunk:
    return Chunk(
        request_id=chunk.request_id,
        index=chunk.index,
        finish="failed",
        error_code=EngineError.code,
        error_message="an answer's chunk is too large for a frame; ask for fewer logprobs",
        usage=chunk.usage,
        step=chunk.step,
    )


async def serve_serving(
    path: str, serving: Serving, *, telemetry: TelemetryClient | None = None, accept_timeout_s: float = 60.0
) -> str:
    """Serve one gateway on the socket ``path`` (made here, for this user only) until it is gone; returns why it went.

    What the gateway had running is cancelled. Raises NotReady when no gateway comes within ``accept_timeout_s``.
    """
    loop = asyncio.get_running_loop()
    accepted: asyncio.Future[_ServingSession] = loop.create_future()

    def accept() -> asyncio.Protocol:
        if accepted.done():
            return _Refuse()
        session = _ServingSession(serving, telemetry or TelemetryClient())
        accepted.set_result(session)
        return session.link

    server = await loop.create_unix_server(accept, path, start_serving=False)
    try:
        os.chmod(path, 0o600)
        await server.start_serving()
        async with asyncio.timeout(accept_timeout_s):
            session = await accepted
    except TimeoutError:
        raise NotReady(f"no gateway connected to {path} within {accept_timeout_s:g} s") from None
    finally:
        server.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    try:
        await session.link.lost.wait()
    finally:
        session.link.close("the worker stopped")
        await session.end()
    return session.link.reason


class _Refuse(asyncio.Protocol):
    """A second gateway is shown out."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()
