"""A server's life as its users and its operator see it: start, readiness, signals, deaths, refusals, cancellation.

Real processes over real sockets; a tiny model, except where a long prompt has to take a while. Waits are generous:
what is checked is that things happen, and that they happen by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ai_engine.testing.process import Server, cpu_seconds
from tests.conftest import ROOT
from tests.integration.client import (
    POOL,
    QUEUED,
    RUNNING,
    Exchange,
    ask,
    gone,
    is_idle,
    metrics,
    send,
    stream_text,
    until,
)

pytestmark = pytest.mark.usefixtures("no_connection_left")

LONG = 2000
"""Output tokens that take seconds on the tiny model."""


@contextmanager
def serving(model: Path, *args: str, env: dict[str, str] | None = None, wait: bool = True) -> Iterator[Server]:
    """A server that has gone at the end; nothing it printed is a traceback. It does not guess: a tiny model repeats
    itself, and long answers would be over before anybody looks."""
    server = Server(str(model), "--served-name", "tiny", "--speculation", "off", *args, env=env, wait=wait)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()
    assert "Traceback" not in server.output, server.output
    assert "Exception" not in server.output, server.output


def sockets(folder: Path, pattern: str = "*") -> list[Path]:
    """What servers keep in a temporary folder: one folder each, for the worker's socket."""
    return list(folder.glob(f"ai-engine-{pattern}"))


def body(num_tokens: int, **fields: Any) -> dict[str, Any]:
    """A completion of exactly that many tokens."""
    return {
        "model": "tiny", "prompt": [5, 17, 3, 88], "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True
    } | fields  # fmt: skip


async def open_stream(url: str, num_tokens: int = LONG, **fields: Any) -> Exchange:
    """A stream that has begun."""
    exchange = await send(url, "/v1/completions", body(num_tokens, stream=True, **fields))
    assert await exchange.head() == 200
    return exchange


async def error_of(exchange: Exchange) -> dict[str, Any]:
    found: dict[str, Any] = (await exchange.json())["error"]
    return found


# --- start


async def listening(url: str) -> None:
    async def answers() -> bool:
        try:
            return (await (await send(url, "/livez")).body()) != b""
        except ConnectionError:
            return False

    await until(answers, "an open port", 60)


async def test_while_loading(tiny_model: Path, tmp_path: Path) -> None:
    """Kernels are compiled first here (an empty cache): alive, not ready, and Ctrl-C does not wait for them."""
    with serving(tiny_model, env={"AI_ENGINE_CACHE": str(tmp_path)}, wait=False) as server:
        await listening(server.url)
        live = await send(server.url, "/livez")
        assert (await live.head(), await live.json()) == (200, {"status": "live"})
        for path, sent in (("/readyz", None), ("/health", None), ("/v1/completions", body(1))):
            exchange = await send(server.url, path, sent)
            error = await error_of(exchange)
            assert (exchange.status, error["code"]) == (503, "not_ready")
            assert "loading" in error["message"]
            assert int(exchange.headers["retry-after"]) >= 1
            assert exchange.headers["x-request-id"]
            assert exchange.headers["x-ai-trace-id"]
        pids = server.pids()
        assert len(pids) > 1
        server.signal(signal.SIGINT)
        assert server.wait(10) == 0
        await gone(*pids)


async def test_gateway_killed_while_loading(tiny_model: Path, tmp_path: Path) -> None:
    """The worker and the compilers that it started end by themselves."""
    with serving(tiny_model, env={"AI_ENGINE_CACHE": str(tmp_path)}, wait=False) as server:
        await listening(server.url)

        async def compiles() -> bool:
            return len(server.pids()) > 2

        await until(compiles, "compilers")
        pids = server.pids()
        server.signal(signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL
        await gone(*pids)


async def test_worker_killed_while_loading(tiny_model: Path, tmp_path: Path) -> None:
    """A first start that fails is not tried again: one line says what happened."""
    with serving(tiny_model, env={"AI_ENGINE_CACHE": str(tmp_path)}, wait=False) as server:

        async def has_a_worker() -> bool:
            return len(server.pids()) > 2

        await until(has_a_worker, "compilers")
        pids = server.pids()
        os.kill(pids[1], signal.SIGKILL)
        assert server.wait() == 1
        assert "ai-engine: the worker ended with status -9 before it was ready" in server.output
        await gone(*pids)


def run_serve(*args: str) -> subprocess.CompletedProcess[str]:
    """A start that must fail."""
    return subprocess.run(
        [sys.executable, "-m", "ai_engine.cli", "serve", *args],
        capture_output=True, text=True, timeout=60, cwd=ROOT,
    )  # fmt: skip


def test_port_in_use(tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_serve(str(tiny_model), "--port", str(port))
    assert done.returncode == 2
    assert f"127.0.0.1:{port}" in done.stderr
    assert "--port" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_no_open_door_on_a_public_address(tiny_model: Path) -> None:
    done = run_serve(str(tiny_model), "--host", "0.0.0.0", "--port", "0")
    assert done.returncode == 2
    assert "--api-key" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


async def test_keys(tiny_model: Path) -> None:
    with serving(tiny_model, "--api-key", "sesame") as server:
        for path in ("/livez", "/readyz", "/health"):
            assert await (await send(server.url, path)).head() == 200
        closed = [("/v1/models", None), ("/v1/models/tiny", None), ("/metrics", None), ("/v1/nothing", None)]
        for path, sent in [*closed, ("/v1/completions", body(1)), ("/v1/chat/completions", {})]:
            for key in ({}, {"authorization": "Bearer wrong"}):
                exchange = await send(server.url, path, sent, headers=key)
                error = await error_of(exchange)
                assert (exchange.status, error["code"]) == (401, "invalid_api_key"), path
        for key in ({"authorization": "Bearer sesame"}, {"x-api-key": "sesame"}):
            assert await (await send(server.url, "/v1/completions", body(1), headers=key)).head() == 200
            assert await (await send(server.url, "/metrics", headers=key)).head() == 200


async def test_every_response_has_its_ids(tiny_server: Server) -> None:
    url = tiny_server.url
    cases: list[tuple[str, Any, str, int]] = [
        ("/livez", None, "", 200),
        ("/readyz", None, "", 200),
        ("/metrics", None, "", 200),
        ("/v1/models", None, "HEAD", 200),
        ("/v1/models/other", None, "", 404),
        ("/nothing", None, "", 404),
        ("/v1/completions", None, "DELETE", 405),
        ("/v1/completions", [], "", 400),
        ("/v1/completions", body(1, temperature=9), "", 400),
        ("/v1/completions", body(1 << 20), "", 400),
        ("/v1/completions", body(1, model="other"), "", 404),
        ("/v1/completions", body(1), "", 200),
        ("/v1/completions", body(1, stream=True), "", 200),
    ]
    seen = set()
    for path, sent, method, status in cases:
        exchange = await send(url, path, sent, method=method)
        assert await exchange.head() == status, path
        seen.add((exchange.headers["x-request-id"], exchange.headers["x-ai-trace-id"]))
        assert len(exchange.headers["x-ai-trace-id"]) == 32
        await exchange.close()
    assert len(seen) == len(cases), "every response has its own"
    trace = "0af7651916cd43dd8448eb211c80319c"
    given = {"x-request-id": "mine-1", "traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    exchange = await send(url, "/v1/completions", body(1), headers=given)
    await exchange.body()
    assert (exchange.headers["x-request-id"], exchange.headers["x-ai-trace-id"]) == ("mine-1", trace)


# --- the end


@pytest.mark.parametrize("extra", [(), ("--in-process",)], ids=["worker", "in-process"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains(
    number: signal.Signals, extra: tuple[str, ...], tiny_model: Path, tmp_path: Path
) -> None:
    """What runs is finished, what comes is refused, nothing is left behind."""
    with serving(tiny_model, *extra, env={"TMPDIR": str(tmp_path)}) as server:
        pids = server.pids()
        assert len(pids) == (1 if extra else 2)
        assert len(sockets(tmp_path)) == (0 if extra else 1)
        assert not sockets(tmp_path, "*/*.sock"), "the socket has no name once the gateway is connected"
        stream = await open_stream(server.url)
        whole = await send(server.url, "/v1/completions", body(LONG, seed=2))
        reading = asyncio.gather(stream_text(stream), whole.json())

        async def both_run() -> bool:
            return (await metrics(server.url))[RUNNING] == 2

        await until(both_run, "two running")
        server.signal(number)

        async def refuses() -> bool:
            exchange = await send(server.url, "/v1/completions", body(1))
            refused = await exchange.json()
            if exchange.status == 200:  # it overtook the signal
                return False
            assert (exchange.status, refused["error"]["code"]) == (503, "shutting_down")
            assert int(exchange.headers["retry-after"]) >= 1
            return True

        await until(refuses, "a refusal")
        ready = await send(server.url, "/readyz")
        assert (await ready.head(), (await error_of(ready))["code"]) == (503, "shutting_down")
        assert await (await send(server.url, "/livez")).head() == 200
        (_, finish, errors), answer = await reading
        assert (finish, errors) == ("length", [])
        assert answer["usage"]["completion_tokens"] == LONG
        assert server.wait() == 0
        assert re.search(r"draining: [23] running", server.output), "the probe that overtook the signal may still run"
        await gone(*pids)
        assert not sockets(tmp_path)


async def test_drain_has_an_end(tiny_model: Path) -> None:
    """What does not finish in time is told why."""
    with serving(tiny_model, "--drain-s", "0.2") as server:
        stream = await open_stream(server.url, 8000)
        whole = await send(server.url, "/v1/completions", body(8000))
        server.signal(signal.SIGTERM)
        _, finish, errors = await stream_text(stream)
        assert (finish, errors) == (None, ["shutting_down"])
        assert (await error_of(whole))["code"] == "shutting_down"
        assert whole.status == 503
        assert server.wait() == 0


@pytest.mark.parametrize("extra", [(), ("--in-process",)], ids=["worker", "in-process"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_stops_at_once(
    number: signal.Signals, extra: tuple[str, ...], tiny_model: Path, tmp_path: Path
) -> None:
    with serving(tiny_model, *extra, env={"TMPDIR": str(tmp_path)}) as server:
        pids = server.pids()
        reading = asyncio.create_task(stream_text(await open_stream(server.url, 8000)))
        server.signal(number)

        async def drains() -> bool:
            return "draining" in server.output

        await until(drains, "the first signal's line")
        server.signal(number)
        assert server.wait(10) == 128 + number
        assert "stopping now" in server.output
        _, finish, errors = await reading
        assert (finish, len(errors)) == (None, 1), "the stream's end is told"
        await gone(*pids)
        assert not sockets(tmp_path)


async def test_a_client_that_does_not_read(tiny_model: Path) -> None:
    """It cannot hold the server up for long."""
    with serving(tiny_model) as server:
        deaf = await send(server.url, "/v1/completions", body(2000, stream=True, logprobs=5, n=8), receive_bytes=4096)
        await deaf.head()

        async def is_made() -> bool:
            return await is_idle(server.url)

        await until(is_made, "the answer", 60)
        pids = server.pids()
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        await gone(*pids)


async def test_gateway_killed(tiny_model: Path) -> None:
    with serving(tiny_model) as server:
        pids = server.pids()
        assert len(pids) == 2
        await open_stream(server.url)
        server.signal(signal.SIGKILL)
        server.wait()
        await gone(*pids)


async def test_worker_killed(tiny_model: Path) -> None:
    """Open streams end with an error and [DONE]; another worker comes and says the same as the first."""
    with serving(tiny_model) as server:
        url = server.url
        before = (await ask(url, body(40)))["choices"]
        stream, whole = await open_stream(url), await send(url, "/v1/completions", body(LONG))
        reading = asyncio.gather(stream_text(stream), whole.json())
        await asyncio.sleep(0.1)
        gateway, worker = server.pids()
        os.kill(worker, signal.SIGKILL)
        (text, finish, errors), answer = await reading
        assert (finish, errors) == (None, ["engine_error"])
        assert text
        assert (whole.status, answer["error"]["code"]) == (500, "engine_error")
        ready = await send(url, "/readyz")
        error = await error_of(ready)
        assert (ready.status, error["code"]) == (503, "not_ready"), "another worker takes longer than this to start"
        refused = await send(url, "/v1/completions", body(1))
        assert (await error_of(refused))["code"] == "not_ready"
        assert refused.status == 503

        async def is_ready() -> bool:
            return await (await send(url, "/readyz")).head() == 200

        await until(is_ready, "another worker", 60)
        assert (await ask(url, body(40)))["choices"] == before
        found = server.pids()
        assert found[0] == gateway
        assert len(found) == 2
        assert worker not in found
        assert "starting another" in server.output
        assert server.stop() == 0
        await gone(*found)


# --- refusals


async def test_overload(tiny_model: Path) -> None:
    """One runs, two wait, everybody else is told so without delay."""
    with serving(tiny_model, "--max-seqs", "1", "--max-queue-requests", "2") as server:
        url = server.url
        running = await open_stream(url)
        waiting = [await send(url, "/v1/completions", body(3, stream=True)) for _ in range(2)]

        async def are_queued() -> bool:
            return bool((await (await send(url, "/readyz")).json())["queued_requests"] == 2)

        await until(are_queued, "two in the queue")
        seconds = []
        for stream in (False, True) * 10:
            started = time.monotonic()
            exchange = await send(url, "/v1/completions", body(3, stream=stream))
            error = await error_of(exchange)
            seconds.append(time.monotonic() - started)
            assert (exchange.status, error["code"]) == (503, "server_overloaded")
            assert 1 <= int(exchange.headers["retry-after"]) <= 60
            assert "limit 2" in error["message"]
        assert statistics.median(seconds) < 0.1, seconds
        running.abort()
        for exchange in waiting:
            assert (await stream_text(exchange))[1] == "length"
        found = await metrics(url)
        assert found['ai_engine_l7_door_admission_rejections_total{reason="server_overloaded"}'] == 20


async def test_deadline(tiny_model: Path) -> None:
    with serving(tiny_model, "--request-timeout-s", "0.5", "--max-seqs", "2") as server:
        streams = [await open_stream(server.url, 8000) for _ in range(2)]
        waiting = await send(server.url, "/v1/completions", body(8000))
        for stream in streams:
            text, finish, errors = await stream_text(stream)
            assert text
            assert (finish, errors) == (None, ["deadline_exceeded"])
        error = await error_of(waiting)
        assert (waiting.status, error["code"]) == (504, "deadline_exceeded")
        await until(lambda: is_idle(server.url), "no page held")
        assert (await ask(server.url, body(5)))["usage"]["completion_tokens"] == 5


# --- cancellation


@pytest.fixture(scope="module")
def one_at_a_time(smollm2: Path) -> Iterator[Server]:
    """SmolLM2 with a single seat: who comes second waits; a long prompt takes seconds."""
    server = Server(str(smollm2), "--served-name", "tiny", "--max-seqs", "1", "--no-prefix-cache")
    yield server
    assert server.stop() == 0
    assert "Traceback" not in server.output, server.output


async def leave(exchange: Exchange, url: str) -> None:
    """Hang up, and see pages and seats come back."""
    cancelled = (await metrics(url))["ai_engine_l5_request_lifecycle_cancelled_total"]
    exchange.abort()
    await until(lambda: is_idle(url), "no page held after the client left", 10)
    assert (await metrics(url))["ai_engine_l5_request_lifecycle_cancelled_total"] == cancelled + 1


@pytest.mark.integration
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
class TestLeaving:
    async def test_in_decode(self, one_at_a_time: Server, stream: bool) -> None:
        url = one_at_a_time.url
        before = (await metrics(url))['ai_engine_l3_model_forward_tokens_total{kind="decode"}']
        exchange = await send(url, "/v1/completions", body(4000, stream=stream))

        async def decodes() -> bool:
            found = await metrics(url)
            return found[POOL] > 0 and found['ai_engine_l3_model_forward_tokens_total{kind="decode"}'] > before + 2

        await until(decodes, "decode steps")
        await leave(exchange, url)

    async def test_in_the_prompt(self, one_at_a_time: Server, stream: bool) -> None:
        url = one_at_a_time.url
        before = await metrics(url)
        exchange = await send(url, "/v1/completions", body(4, stream=stream, prompt=[5 + n % 900 for n in range(8000)]))

        async def prefills() -> bool:
            return (await metrics(url))[POOL] > 0

        await until(prefills, "prompt steps")
        await leave(exchange, url)
        after = await metrics(url)
        kind = 'ai_engine_l3_model_forward_tokens_total{{kind="{}"}}'.format
        assert 0 < after[kind("prefill")] - before[kind("prefill")] < 8000, "the prompt was finished"
        assert after[kind("decode")] == before[kind("decode")]

    async def test_in_the_queue(self, one_at_a_time: Server, stream: bool) -> None:
        url = one_at_a_time.url
        first = await send(url, "/v1/completions", body(4000, stream=True))
        await first.head()
        second = await send(url, "/v1/completions", body(4, stream=stream))

        async def waits() -> bool:
            return (await metrics(url))[QUEUED] == 1

        await until(waits, "a request in the queue")
        second.abort()

        async def is_out() -> bool:
            return (await metrics(url))[QUEUED] == 0

        await until(is_out, "an empty queue", 10)
        assert (await metrics(url))[RUNNING] == 1
        await leave(first, url)


# --- rest


async def idle_share(server: Server, seconds: float) -> float:
    """CPU time of all processes over wall time while nothing is asked."""
    await until(lambda: is_idle(server.url), "nothing to do")
    await asyncio.sleep(0.5)
    pids = server.pids()
    before = cpu_seconds(pids)
    await asyncio.sleep(seconds)
    return (cpu_seconds(pids) - before) / seconds


@pytest.mark.integration
async def test_idle_costs_nothing(server: Server) -> None:
    await ask(server.url, body(8, model="smollm2"))
    assert await idle_share(server, 5) < 0.01


@pytest.mark.full
async def test_a_minute_of_idle_costs_nothing(server: Server) -> None:
    await ask(server.url, body(8, model="smollm2"))
    assert await idle_share(server, 60) < 0.01


async def test_malformed_http_does_not_hurt(tiny_server: Server) -> None:
    """Noise on the port is answered or hung up on; the server goes on."""
    port = int(tiny_server.url.rsplit(":", 1)[1])
    for noise in (
        b"\x16\x03\x01\x02\x00",
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: x\r\n\r\n",
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(noise)
        writer.write_eof()
        await asyncio.wait_for(reader.read(), 10)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    said = await ask(tiny_server.url, body(4))
    assert said["usage"]["completion_tokens"] == 4
