"""A raw HTTP/1.1 client on asyncio streams, the metrics page as numbers, and what /proc says of a process.

Owns no assertion. A connection carries one exchange; leaving early is `Exchange.abort`. Whoever uses `send` takes the
fixture ``no_connection_left`` (conftest.py), which ends what a test left open.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

POOL = "ai_engine_l3_kv_pool_used_pages"
RUNNING = "ai_engine_l5_sched_batch_running_requests"
QUEUED = "ai_engine_l5_sched_queue_requests"


OPEN: set[Exchange] = set()
"""Connections that a test has not closed yet."""


class Exchange:
    """A request that was sent; the response is read when it is asked for."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.status = 0
        self.headers: dict[str, str] = {}
        OPEN.add(self)

    async def head(self) -> int:
        """Read status and headers, once."""
        if not self.status:
            line, *rest = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            self.status = int(line.split()[1])
            self.headers = {name.lower(): value.strip() for name, _, value in (row.partition(":") for row in rest)}
        return self.status

    async def body(self) -> bytes:
        """Everything after the headers; the connection is closed."""
        await self.head()
        try:
            if self.headers.get("transfer-encoding") == "chunked":
                return b"".join([part async for part in self._chunks()])
            return await self._reader.readexactly(int(self.headers.get("content-length", 0)))
        finally:
            await self.close()

    async def json(self) -> Any:
        return json.loads(await self.body())

    async def events(self) -> AsyncIterator[str]:
        """The data of each server-sent event, "[DONE]" included."""
        await self.head()
        text = b""
        async for part in self._chunks():
            text += part
            while b"\n\n" in text:
                event, _, text = text.partition(b"\n\n")
                if event.startswith(b"data: "):
                    yield event[6:].decode()

    async def _chunks(self) -> AsyncIterator[bytes]:
        while size := int(await self._reader.readline(), 16):
            yield await self._reader.readexactly(size)
            await self._reader.readexactly(2)
        await self._reader.readexactly(2)

    def abort(self) -> None:
        """Leave without a word."""
        OPEN.discard(self)
        self._writer.transport.abort()

    async def close(self) -> None:
        OPEN.discard(self)
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            return


async def send(
    url: str,
    path: str,
    body: Any = None,
    *,
    method: str = "",
    headers: dict[str, str] | None = None,
    receive_bytes: int = 0,
) -> Exchange:
    """Connect and send a request: POST with a JSON body when there is one, else GET. With ``receive_bytes`` the kernel
    and this reader hold about as much of the answer; the rest waits with the server until it is read."""
    where = urlsplit(url)
    sock = socket.socket()
    sock.setblocking(False)
    if receive_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    try:
        await asyncio.get_running_loop().sock_connect(sock, (where.hostname, where.port))
    except BaseException:
        sock.close()
        raise
    reader, writer = await asyncio.open_connection(sock=sock, limit=receive_bytes or 1 << 20)
    data = b"" if body is None else json.dumps(body).encode()
    fields = {"host": where.netloc, "connection": "close", **(headers or {})}
    if body is not None:
        fields |= {"content-type": "application/json", "content-length": str(len(data))}
    verb = method or ("GET" if body is None else "POST")
    lines = [f"{verb} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    writer.write("\r\n".join(lines).encode() + data)
    return Exchange(reader, writer)


async def ask(url: str, body: dict[str, Any], path: str = "/v1/completions") -> Any:
    """The JSON of a request that must succeed."""
    exchange = await send(url, path, body)
    done = await exchange.json()
    assert exchange.status == 200, done
    return done


async def stream_text(exchange: Exchange) -> tuple[str, str | None, list[str]]:
    """(text, finish reason, codes of error events) of a completion stream of one choice; it must end in [DONE]."""
    text, finish, errors, last = "", None, [], ""
    async for last in exchange.events():
        if last != "[DONE]":
            event = json.loads(last)
            if "error" in event:
                errors.append(str(event["error"]["code"]))
            for choice in event.get("choices", []):
                text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
                finish = choice["finish_reason"] or finish
    assert last == "[DONE]", last
    await exchange.close()
    return text, finish, errors


async def metrics(url: str) -> dict[str, float]:
    """Every sample of /metrics by its name with labels."""
    exchange = await send(url, "/metrics")
    lines = (await exchange.body()).decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}


async def until(holds: Callable[[], Awaitable[bool]], what: str, timeout_s: float = 30.0) -> float:
    """Poll until it holds; returns the seconds that took."""
    started = time.monotonic()
    while not await holds():
        assert time.monotonic() - started < timeout_s, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.01)
    return time.monotonic() - started


async def is_idle(url: str) -> bool:
    """Nothing runs, nothing waits, no page is held."""
    found = await metrics(url)
    return not any(found.get(name, 0.0) for name in (POOL, RUNNING, QUEUED))


async def gone(*pids: int, timeout_s: float = 15.0) -> None:
    """Wait until these processes have ended."""

    async def all_ended() -> bool:
        return not any(alive(pid) for pid in pids)

    await until(all_ended, f"the end of {pids}", timeout_s)


# what the kernel says of a process


def alive(pid: int) -> bool:
    """Whether it runs; a zombie that nobody has waited for yet does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in ("Z", "X")


def num_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def num_threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"process {pid} has no memory")
