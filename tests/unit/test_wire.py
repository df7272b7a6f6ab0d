"""wire.py: frames and messages come back as they went, hostile bytes end the connection cleanly, death is answered."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from ai_engine import wire
from ai_engine.ports.errors import (
    ERRORS_BY_CODE,
    BodyTooLarge,
    ContextLengthExceeded,
    EngineError,
    InvalidRequest,
    NotReady,
    Overloaded,
)
from ai_engine.ports.sampling import SamplingParams
from ai_engine.ports.serving import Chunk, GenerateRequest, Health, TokenLogprob, Usage
from ai_engine.ports.telemetry import Event, MemorySet, RequestQueued, StepDone, TokenTimes
from ai_engine.serving.service import Service
from ai_engine.testing import HANG, FakeRuntime, HashModel, MemoryTelemetry, ScriptedServing, answer
from ai_engine.wire import (
    Batch,
    Cancel,
    ErrorInfo,
    FrameError,
    FrameReader,
    Hello,
    Link,
    Reply,
    ServingClient,
    ServingDown,
    ServingUp,
    Submit,
    TelemetryClient,
    frame,
    serve_serving,
)

texts = st.text(max_size=10)
ids = st.integers(0, 1 << 20)
floats = st.floats(allow_nan=False, allow_infinity=False)
logprobs = st.builds(TokenLogprob, ids, floats, st.lists(st.tuples(ids, floats), max_size=3))
chunks = st.builds(
    Chunk,
    request_id=texts,
    index=ids,
    tokens=st.lists(ids, max_size=5),
    logprobs=st.none() | st.lists(logprobs, max_size=3),
    prompt_logprobs=st.none() | st.lists(logprobs, max_size=3),
    finish=st.sampled_from([None, "stop", "length", "cancelled", "failed"]),
    stop_token=st.none() | ids,
    error_code=st.none() | st.sampled_from(sorted(ERRORS_BY_CODE)),
    error_message=st.none() | texts,
    usage=st.none() | st.builds(Usage, ids, ids, ids),
    step=ids,
)
events: st.SearchStrategy[Event] = st.one_of(
    st.builds(StepDone, ids, floats, floats, floats, *[ids] * 13),
    st.builds(RequestQueued, texts, texts, ids, ids),
    st.builds(TokenTimes, *[texts] * 3, st.none() | floats, floats, floats, *[ids] * 3, st.lists(floats, max_size=4)),
    st.builds(MemorySet, texts, ids),
)
requests = st.builds(
    GenerateRequest,
    request_id=texts,
    trace_id=texts,
    prompt=st.lists(ids, max_size=8),
    params=st.builds(
        SamplingParams,
        temperature=floats,
        logit_bias=st.dictionaries(ids, floats, max_size=3),
        seed=st.none() | st.integers(0, (1 << 64) - 1),
        stop_token_ids=st.lists(ids, max_size=3).map(tuple),
    ),
    n=st.integers(1, 8),
    tenant=texts,
    timeout_s=st.none() | floats,
)
downs = st.one_of(
    st.builds(Hello, ids, texts),
    st.builds(Submit, ids, requests),
    st.builds(Cancel, texts, st.none() | ids),
    st.builds(wire.AskHealth, ids),
    st.builds(wire.Drain, ids, floats),
)
ups = st.one_of(
    st.builds(Batch, st.lists(chunks, max_size=4), st.lists(events, max_size=3), ids),
    st.builds(
        Reply, ids, st.none() | st.builds(Health), st.none() | st.builds(ErrorInfo, texts, texts, st.none() | texts)
    ),
)


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=8), st.lists(st.integers(0, 60), max_size=20))
@settings(deadline=None)
def test_frames_come_back_however_the_stream_is_cut(payloads: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(frame(payload) for payload in payloads)
    reader, got = FrameReader(), []
    for size in [*cuts, len(stream)]:
        got += list(reader.feed(stream[:size]))
        stream = stream[size:]
    assert got == payloads


@given(downs)
@settings(deadline=None)
def test_messages_down_come_back(message: Any) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ServingDown) == message


@given(ups)
@settings(deadline=None)
def test_messages_up_come_back(message: Any) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ServingUp) == message


class FakeTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.closed = False
        self.written = b""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close


def feed(data: bytes, kind: Any) -> tuple[list[Any], bool]:
    """What a Link makes of these bytes: messages, and whether it hung up."""
    got: list[Any] = []
    link: Link[Any] = Link(kind, got.append)
    transport = FakeTransport()
    link.connection_made(transport)
    link.data_received(data)
    return got, transport.closed


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_hostile_bytes_end_the_connection_at_most(data: bytes) -> None:
    feed(data, ServingDown)
    got, closed = feed(frame(data or b"\0"), ServingDown)
    assert closed == (not got)


@given(downs, st.data())
@settings(max_examples=200, deadline=None)
def test_a_damaged_message_ends_the_connection_at_most(message: Any, data: st.DataObject) -> None:
    payload = bytearray(msgspec.msgpack.encode(message))
    payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    got, closed = feed(frame(bytes(payload)), ServingDown)
    assert closed == (not got)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff",  # four gigabytes
        (wire.MAX_FRAME_BYTES + 1).to_bytes(4, "big"),
        b"\0\0\0\0",  # nothing
        frame(b"\x91" * 100_000 + b"\xc0"),  # deep nesting
        frame(b"\x81\xa4type\xa5nosuc"),  # cut short inside
        frame(msgspec.msgpack.encode({"type": "submit", "call": "x"})),
        frame(b"\x81\xa4type\xa2\xff\xfe"),  # not UTF-8
    ],
)
def test_known_attacks(data: bytes) -> None:
    assert feed(data, ServingDown) == ([], True)


def test_a_message_too_large_for_a_frame_is_not_sent() -> None:
    with pytest.raises(FrameError, match="a frame holds"):
        frame(bytes(wire.MAX_FRAME_BYTES + 1))


def test_on_uvloop(tmp_path: Path) -> None:
    async def run() -> None:
        def script(r: GenerateRequest) -> list[Any]:
            return [*answer(r, [1, 2, 3])[:2], HANG]

        async with connected(tmp_path, ScriptedServing(script)) as (client, server):
            stream = await client.submit(request())
            assert [(await anext(stream)).tokens for _ in range(2)] == [[1], [2]]
            server.cancel()
            assert [c.finish for c in [chunk async for chunk in stream]][-1] in ("failed", "cancelled")

    uvloop.run(asyncio.wait_for(run(), 20))


@pytest.mark.parametrize("code", sorted(ERRORS_BY_CODE))
def test_errors_cross_by_code(code: str) -> None:
    sent = ERRORS_BY_CODE[code]("what happened", param="prompt", retry_after_s=3.0)
    got = msgspec.msgpack.decode(msgspec.msgpack.encode(ErrorInfo.of(sent)), type=ErrorInfo).error()
    assert type(got) is type(sent)
    assert (got.message, got.param, got.retry_after_s) == ("what happened", "prompt", 3.0)


def request(request_id: str = "r", prompt: list[int] | None = None, n: int = 1, **params: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        trace_id="0" * 32,
        prompt=prompt or [1, 2],
        params=SamplingParams(**({"seed": 1} | params)),
        n=n,
    )


@asynccontextmanager
async def connected(
    tmp_path: Path, serving: Any, telemetry: TelemetryClient | None = None
) -> AsyncIterator[tuple[ServingClient, asyncio.Task[str]]]:
    path = str(tmp_path / "s")
    server = asyncio.create_task(serve_serving(path, serving, telemetry=telemetry))
    client = await ServingClient.connect(path, telemetry=MemoryTelemetry())
    try:
        yield client, server
    finally:
        await client.close()
        await asyncio.gather(server, return_exceptions=True)


async def test_a_scripted_stream_crosses_and_a_broken_one_fails(tmp_path: Path) -> None:
    def script(r: GenerateRequest) -> list[Any]:
        if r.request_id == "breaks":
            return [*answer(r, [5, 6, 7])[:2], RuntimeError("lost")]
        return answer(r, [1, 2, 3])

    async with connected(tmp_path, ScriptedServing(script)) as (client, _):
        good = [c async for c in await client.submit(request("good"))]
        assert [t for c in good for t in c.tokens] == [1, 2, 3]
        bad = [c async for c in await client.submit(request("breaks"))]
        assert [t for c in bad for t in c.tokens] == [5, 6]
        assert [c.error_code for c in bad if c.finish] == ["engine_error"]


async def test_refusals_cross_and_ids_are_unique(tmp_path: Path) -> None:
    serving = ScriptedServing(lambda r: [HANG], refusal=Overloaded("full", retry_after_s=7))
    async with connected(tmp_path, serving) as (client, _):
        with pytest.raises(Overloaded, match="full") as caught:
            await client.submit(request())
        assert caught.value.retry_after_s == 7
        serving.refusal = ContextLengthExceeded("long", param="prompt")
        with pytest.raises(ContextLengthExceeded):
            await client.submit(request())
        serving.refusal = None
        stream = await client.submit(request())
        with pytest.raises(InvalidRequest, match="in use"):
            await client.submit(request())
        await client.cancel("r")
        assert (await anext(stream)).finish == "cancelled"


async def test_a_submit_given_up_is_cancelled(tmp_path: Path) -> None:
    class Slow(ScriptedServing):
        async def submit(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
            await asyncio.sleep(0.05)
            return await super().submit(request)

    serving = Slow(lambda r: [HANG])
    async with connected(tmp_path, serving) as (client, _):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.submit(request()), 0.02)
        for _ in range(100):
            if serving.requests and not serving.open_requests:
                break
            await asyncio.sleep(0.01)
        assert serving.cancelled == [("r", None)]
        assert serving.open_requests == 0


async def test_worker_death_fails_each_open_choice_once(tmp_path: Path) -> None:
    serving = ScriptedServing(lambda r: [*answer(r, [1, 2, 3])[:1], HANG])
    async with connected(tmp_path, serving) as (client, server):
        streams = [await client.submit(request(f"r{i}", n=2)) for i in range(3)]
        assert (await anext(streams[0])).tokens == [1]
        server.cancel()
        for stream in streams:
            ends = [c for c in [chunk async for chunk in stream] if c.finish]
            assert sorted(c.index for c in ends) == [0, 1]
            assert {c.error_code for c in ends} <= {"engine_error", "cancelled"}
        await client.lost.wait()
        health = await client.health()
        assert (health.live, health.ready) == (False, False)
        assert "gone" in health.reason
        with pytest.raises(NotReady):
            await client.submit(request("late"))
        await client.cancel("r0")
        await client.drain(1)


WORKER = """
import asyncio, sys
from ai_engine.serving.service import Service
from ai_engine.ports.clock import SystemClock
from ai_engine.testing import FakeRuntime, HashModel
from ai_engine.wire import TelemetryClient, serve_serving
import time
async def main():
    telemetry = TelemetryClient()
    runtime = FakeRuntime(HashModel(), clock=SystemClock(), on_step=lambda plan: time.sleep(0.002))
    service = Service(runtime, telemetry=telemetry)
    await service.start()
    await serve_serving(sys.argv[1], service, telemetry=telemetry)
    await service.close()
    assert runtime.open_sequences <= 8
asyncio.run(main())
"""


async def worker(path: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-c", WORKER, path)


async def test_a_killed_process(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    process = await worker(path)
    client = await ServingClient.connect(path, telemetry=MemoryTelemetry(), timeout_s=30)
    stream = await client.submit(request(max_tokens=4000, ignore_eos=True))
    await anext(stream)
    process.send_signal(signal.SIGKILL)
    got = [chunk async for chunk in stream]
    assert [c.error_code for c in got if c.finish] == ["engine_error"]
    assert await process.wait() == -signal.SIGKILL
    assert not (await client.health()).ready


async def test_the_worker_exits_when_its_gateway_is_gone(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    process = await worker(path)
    client = await ServingClient.connect(path, telemetry=MemoryTelemetry(), timeout_s=30)
    stream = await client.submit(request(max_tokens=4000, ignore_eos=True))
    await anext(stream)
    client._link.close("gone", at_once=True)
    assert await asyncio.wait_for(process.wait(), 10) == 0
    assert not os.path.lexists(path)  # noqa: ASYNC240 - a look at a local socket


async def test_gateway_death_cancels_what_it_had(tmp_path: Path) -> None:
    serving = ScriptedServing(lambda r: [HANG])
    async with connected(tmp_path, serving) as (client, server):
        for i in range(3):
            await client.submit(request(f"r{i}"))
        client._link.close("gone", at_once=True)
        assert await server in (
            "the peer closed the connection",
            "connection lost: [Errno 104] Connection reset by peer",
        )
        assert sorted(serving.cancelled) == [("r0", None), ("r1", None), ("r2", None)]
        gc.collect()
        await asyncio.sleep(0.01)
        assert serving.open_requests == 0


async def test_garbage_from_a_gateway_ends_the_session(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    server = asyncio.create_task(serve_serving(path, ScriptedServing()))
    await asyncio.sleep(0.05)
    assert os.stat(path).st_mode & 0o777 == 0o600
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    assert await reader.read() == b""
    assert "malformed" in await server
    writer.close()


async def test_another_version_is_turned_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "s")
    server = asyncio.create_task(serve_serving(path, ScriptedServing()))
    monkeypatch.setattr(Hello, "check", lambda self, port: (_ for _ in ()).throw(FrameError("speaks version 2")))
    with pytest.raises(NotReady, match="version"):
        await ServingClient.connect(path, telemetry=MemoryTelemetry())
    assert "malformed" in await server or "closed" in await server


async def test_nobody_comes(tmp_path: Path) -> None:
    with pytest.raises(NotReady, match="no gateway"):
        await serve_serving(str(tmp_path / "s"), ScriptedServing(), accept_timeout_s=0.02)
    with pytest.raises(NotReady, match="no worker"):
        await ServingClient.connect(str(tmp_path / "s"), telemetry=MemoryTelemetry(), timeout_s=0.05)
    assert os.listdir(tmp_path) == []


async def test_one_frame_per_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    telemetry = TelemetryClient()
    runtime = FakeRuntime(HashModel(), on_step=lambda plan: time.sleep(0.002))
    service = Service(runtime, telemetry=telemetry)
    await service.start()
    path = str(tmp_path / "s")
    frames: list[int] = []
    real = wire.frame

    def counted(payload: bytes) -> bytes:
        frames.append(len(payload))
        return real(payload)

    monkeypatch.setattr(wire, "frame", counted)
    server = asyncio.create_task(serve_serving(path, service, telemetry=telemetry))
    memory = MemoryTelemetry()
    client = await ServingClient.connect(path, telemetry=memory)

    async def read(i: int) -> int:
        got = [c async for c in await client.submit(request(f"r{i}", max_tokens=60, ignore_eos=True))]
        return sum(len(c.tokens) for c in got)

    assert await asyncio.gather(*map(read, range(16))) == [60] * 16
    steps = len(memory.of(StepDone))
    other = 2 + 2 * 16  # greetings, submits and their replies
    assert len(frames) - other <= 1.3 * steps, (len(frames), steps)
    assert client.lost_events == 0
    await client.close()
    await server
    await service.close()


async def test_large_batches_are_split_and_large_prompts_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 2000)
    serving = ScriptedServing(lambda r: answer(r, list(range(400)), tokens_per_chunk=50, finish="length"))
    async with connected(tmp_path, serving) as (client, _):
        got = [c async for c in await client.submit(request(max_tokens=1000))]
        assert [t for c in got for t in c.tokens] == list(range(400))
        with pytest.raises(BodyTooLarge):
            await client.submit(request("big", prompt=[70_000] * 1000))
        serving = ScriptedServing()
    huge = ScriptedServing(lambda r: answer(r, [70_000] * 2000, tokens_per_chunk=2000))
    async with connected(tmp_path, huge) as (client, _):
        got = [c async for c in await client.submit(request("huge", max_tokens=5000))]
        assert [c.error_code for c in got] == ["engine_error"]


def test_telemetry_is_bounded_and_counts_its_losses() -> None:
    client = TelemetryClient(max_events=3)
    for i in range(5):
        client.emit(MemorySet("kv", i))
    assert len(client.take()) == 3
    assert client.lost == 2
    assert client.take() == []


async def test_events_without_chunks_go_up_soon(tmp_path: Path) -> None:
    telemetry = TelemetryClient()
    path = str(tmp_path / "s")
    server = asyncio.create_task(serve_serving(path, ScriptedServing(), telemetry=telemetry))
    memory = MemoryTelemetry()
    client = await ServingClient.connect(path, telemetry=memory)
    await asyncio.to_thread(telemetry.emit, MemorySet("kv", 1))
    for _ in range(100):
        if memory.events:
            break
        await asyncio.sleep(0.01)
    assert memory.events == [MemorySet("kv", 1)]
    await client.close()
    await server


def test_unknown_errors_become_engine_errors() -> None:
    assert isinstance(ErrorInfo.of(ValueError("x")).error(), EngineError)
