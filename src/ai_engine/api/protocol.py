"""HTTP/1.1 on a connection, with limits on what comes before a body: uvicorn's protocol, bounded.

Owns the number of connections, the size of a request's head, the time it may take, and the shape of errors about HTTP
itself. Bodies are bounded by http.py, requests by app.py. A client that closes its sending half is taken as gone, as
one that closed altogether: few do the former, and no server can tell them apart.
"""

from __future__ import annotations

import asyncio
import os
import resource
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 64 << 10
HEAD_TIMEOUT_S = 30.0
MAX_CONNECTIONS = 4096
"""At once; fewer where the process may not have so many descriptors."""
_SPARE_DESCRIPTORS = 128
"""For files, pipes and the worker's socket."""
REASONS = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}
CODES = {408: "request_timeout", 503: "server_overloaded"}


def connection_limit() -> int:
    """How many connections there may be, after asking the system for as many descriptors as it gives."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + _SPARE_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return (
        MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, max(16, soft - _SPARE_DESCRIPTORS))
    )


class BoundedHttp(HttpToolsProtocol):
    """A client that sends no end of headers, or takes its time over them, loses its connection and nothing else."""

    _head_bytes = 0
    _in_head = True
    _timer: asyncio.TimerHandle | None = None
    max_connections = MAX_CONNECTIONS

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._cycles: list[RequestResponseCycle] = []  # requests that came on it; more than one when they are pipelined
        if len(self.connections) > self.max_connections:
            self._refuse(
                503, f"There are {self.max_connections} connections, the most that are taken. Try again later."
            )
            return
        self._start_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        self._tell_all()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        if not self._in_head:  # a further request on this connection
            self._start_head()
        super().on_message_begin()
        # for http.py: a client that does not read, or has just left
        self.scope["extensions"] = {"connection": {"abort": self.transport.abort, "is_closing": self._is_closing}}

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()
        if self.cycle is not None:
            self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete] + [self.cycle]

    def _is_closing(self) -> bool:
        """Whether nobody listens any more, which the requests are told later: uvloop says so in its next round."""
        closing = self.transport.is_closing()
        if closing:
            self._tell_all()
        return closing

    def _tell_all(self) -> None:
        """Every request on this connection hears that its client has gone; uvicorn tells the last one only."""
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, f"The request's headers are larger than {MAX_HEAD_BYTES} bytes. Send fewer.")

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, f"{msg} Expected HTTP/1.1.")

    def _start_head(self) -> None:
        self._end_head()
        self._in_head, self._head_bytes = True, 0
        self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self._late)

    def _end_head(self) -> None:
        self._in_head = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        if not self.transport.is_closing():
            self._refuse(408, f"The request's headers did not end within {HEAD_TIMEOUT_S:g} s.")

    def _refuse(self, status: int, message: str) -> None:
        """An answer and the end of the connection; only the end while an earlier request on it is being answered, whose
        answer this would be taken for. That one's client has left then: it sent what nobody can read."""
        if any(not cycle.response_complete for cycle in self._cycles):
            self._tell_all()
            self.transport.close()
            return
        kind = "server_error" if status == 503 else "invalid_request_error"
        error: dict[str, Any] = {"message": message, "type": kind, "param": None}
        body = msgspec.json.encode({"error": error | {"code": CODES.get(status, "invalid_http")}})
        ids = f"x-request-id: req-{os.urandom(12).hex()}\r\nx-ai-trace-id: {os.urandom(16).hex()}\r\n"
        retry = "retry-after: 2\r\n" if status == 503 else ""
        head = f"HTTP/1.1 {status} {REASONS[status]}\r\ncontent-type: application/json\r\n{ids}{retry}"
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()


def bounded_http(limit: int) -> type[BoundedHttp]:
    """The protocol for a listener that takes so many connections at once."""

    class Bounded(BoundedHttp):
        max_connections = limit

    return Bounded
