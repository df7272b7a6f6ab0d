"""What comes before a body is bounded: no end of headers and no end of waiting, and the error has our shape."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import pytest

from ai_engine.api import protocol
from ai_engine.testing.process import Server

pytestmark = pytest.mark.integration


async def exchange(url: str, *parts: bytes) -> bytes:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        return await asyncio.wait_for(reader.read(), 20)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def test_endless_headers_are_refused(tiny_server: Server) -> None:
    line = b"x-filler: " + b"a" * 8000 + b"\r\n"
    answer = await exchange(tiny_server.url, b"GET /livez HTTP/1.1\r\nhost: x\r\n", *[line] * 40)
    if answer:  # the reset may overtake the answer
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 431")
        assert b"x-ai-trace-id: " in head
        assert json.loads(body)["error"]["code"] == "invalid_http"
    assert (await exchange(tiny_server.url, b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")).startswith(
        b"HTTP/1.1 200"
    )


async def test_what_is_no_http_gets_the_error_shape(tiny_server: Server) -> None:
    answer = await exchange(tiny_server.url, b"\x16\x03\x01 this is TLS\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert b"x-request-id: " in head
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


async def test_requests_share_a_connection(tiny_server: Server) -> None:
    """The head's limits begin anew with each request."""
    one = b"GET /livez HTTP/1.1\r\nhost: x\r\nx-filler: " + b"a" * 30000 + b"\r\n\r\n"
    last = b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    answer = await exchange(tiny_server.url, one, one, one, last)
    assert answer.count(b"HTTP/1.1 200") == 4


def test_the_limits_are_what_the_page_says() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    limits = f"headers {protocol.MAX_HEAD_BYTES >> 10} KiB and {protocol.HEAD_TIMEOUT_S:g} s"
    assert limits in page
