"""What only a real connection shows: keep-alive, chunked bodies, closing connections, unread bodies."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator

import pytest

from ai_engine.ports.clock import SystemClock
from ai_engine.testing import HANG, ScriptedServing, answer
from tests.unit.api.doors import InThread, make_api

CHAT = "/v1/chat/completions"
BODY = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
JSON = {"content-type": "application/json"}


@pytest.fixture
def hanging() -> ScriptedServing:
    """Says two letters, then nothing until it is cancelled."""
    return ScriptedServing(lambda r: [*answer(r, b"abc")[:2], HANG])


@pytest.fixture
def connect(hanging: ScriptedServing) -> Iterator[tuple[http.client.HTTPConnection, str]]:
    server = InThread(make_api(hanging, clock=SystemClock(), max_body_bytes=100_000))
    address = server.url.removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=10)
    yield connection, address
    connection.close()
    server.stop()


def until(condition: object, *, seconds: float = 5.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
def test_closing_the_connection_cancels(
    connect: tuple[http.client.HTTPConnection, str], hanging: ScriptedServing, stream: bool
) -> None:
    connection, _ = connect
    body = json.dumps({**json.loads(BODY), "stream": stream})
    connection.request("POST", CHAT, body, JSON)
    if stream:
        reply = connection.getresponse()
        assert reply.readline().startswith(b"data: ")
        reply.close()
    until(lambda: hanging.open_requests == 1)
    connection.close()
    until(lambda: hanging.cancelled)
    until(lambda: hanging.open_requests == 0)


def test_one_connection_takes_many_requests_and_chunked_bodies(
    connect: tuple[http.client.HTTPConnection, str],
) -> None:
    connection, _ = connect
    for path, body, status in (
        (CHAT, b"{", 400),
        (CHAT, b"x" * 200_000, 413),
        ("/v1/models", None, 200),
        (CHAT, b"", 400),
    ):
        connection.request("POST" if body is not None else "GET", path, body, JSON)
        reply = connection.getresponse()
        assert reply.status == status
        assert json.loads(reply.read())
    pieces = iter([b'{"temperature', b'": 9, "messages": [', b"]}"])
    connection.request("POST", CHAT, pieces, JSON, encode_chunked=True)
    error = json.loads(connection.getresponse().read())["error"]
    assert error["param"] == "temperature"


def test_a_body_that_is_refused_unread_does_not_break_the_connection(
    connect: tuple[http.client.HTTPConnection, str],
) -> None:
    connection, _ = connect
    connection.request("POST", CHAT, b"x" * 90_000, {"content-type": "text/plain"})
    reply = connection.getresponse()
    assert reply.status == 415
    reply.read()
    connection.request("GET", "/livez")
    assert connection.getresponse().status == 200


def test_a_length_that_claims_too_much_is_answered_at_once(connect: tuple[http.client.HTTPConnection, str]) -> None:
    _, address = connect
    host, _, port = address.partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\nxyz")
        reply = raw.makefile("rb").read()
    assert reply.startswith(b"HTTP/1.1 413")
    assert b"connection: close" in reply
