"""A real server's traces: a request among others is told down to its ops, adds up, and leaves by OTLP and Perfetto."""

from __future__ import annotations

import asyncio
import itertools
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from oteltap import OtelTapHttpProtobufReceiver, OtelTapHttpProtobufReceiverSettings
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

from ai_engine.testing.process import Server, free_port
from tests.integration.client import RUNNING, metrics, send, until

pytestmark = pytest.mark.usefixtures("no_connection_left")
NUM_OTHERS = 8


def body(num_tokens: int, **fields: Any) -> dict[str, Any]:
    return {
        "model": "tiny", "prompt": [5, 17, 3, 88] * 5, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True,
    } | fields  # fmt: skip


async def ask(url: str, num_tokens: int, **fields: Any) -> tuple[str, float]:
    """(trace id, seconds as the client saw them)."""
    started = time.monotonic()
    exchange = await send(url, "/v1/completions", body(num_tokens, **fields))
    assert await exchange.head() == 200
    await exchange.body()
    return exchange.headers["x-ai-trace-id"], time.monotonic() - started


async def trace_of(url: str, trace_id: str, step: str = "") -> dict[str, Any]:
    """The one request of a trace, once it is there: the record is made a moment after the last byte."""
    for _ in range(100):
        exchange = await send(url, f"/traces/{trace_id}?step={step}", method="GET")
        if await exchange.head() == 200:
            found: dict[str, Any] = (await exchange.json())["requests"][0]
            return found
        await exchange.close()
        await asyncio.sleep(0.02)
    raise AssertionError(f"no trace {trace_id}")


async def all_run(url: str) -> bool:
    return (await metrics(url))[RUNNING] >= NUM_OTHERS


def command(*args: str) -> str:
    """What `ai-engine ...` prints."""
    done = subprocess.run([sys.executable, "-m", "ai_engine.cli", *args], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_a_request_among_eight_others_is_told_down_to_its_ops(tiny_server: Server, tmp_path: Path) -> None:
    url = tiny_server.url
    others = [
        asyncio.create_task(ask(url, 1500, prompt=[7 + n] * 30, temperature=1, seed=n)) for n in range(NUM_OTHERS)
    ]
    await until(lambda: all_run(url), "the others run")
    trace_id, client_s = await ask(url, 60, stream=True)
    await asyncio.gather(*others)
    request = await trace_of(url, trace_id, "all")
    assert request["seconds"] <= client_s
    assert abs(request["unaccounted_seconds"]) <= max(0.02 * request["seconds"], 0.001)
    assert sum(part["seconds"] for part in request["parts"]) == pytest.approx(request["parts_seconds"])
    assert {part["name"] for part in request["parts"]} >= {"contract", "queue", "prefill", "decode", "send"}
    decodes = [step for step in request["steps"] if step["part"] == "decode"]
    assert 0 < len(decodes) <= 59, "a step may bring several tokens"
    assert max(len(step["links"]) for step in decodes) > 2, "steps that serve several requests"
    for step in request["steps"]:
        assert trace_id in {link["trace_id"] for link in step["links"]}
        (layers,) = step["runs"]
        ops = [op for layer in layers for op in layer["ops"]]
        assert [op["slot"] for op in ops] == list(range(len(ops)))
        assert {"embed", "matmul", "attention", "rope_store", "sample"} <= {op["op"] for op in ops}
        slack = 20e-6  # of the two clocks
        assert step["at"] - slack <= min(op["at"] for op in ops)
        assert max(op["at"] + op["seconds"] for op in ops) <= step["at"] + step["seconds"] + slack
        assert step["kernel_seconds"] <= step["seconds"] + slack
    chosen = decodes[len(decodes) // 2]
    shown = await asyncio.to_thread(command, "trace", "show", trace_id, "--url", url, "--step", str(chosen["step"]))
    for op in (op for layer in chosen["runs"][0] for op in layer["ops"]):
        assert f"{op['slot']:>4} {op['op']:<12} {op['shape']}" in shown
    path = tmp_path / "trace.pftrace"
    await asyncio.to_thread(command, "trace", "export", trace_id, "--url", url, "--out", str(path))
    check_perfetto(path, num_slots=len(ops), num_steps=len(request["steps"]))


def check_perfetto(path: Path, *, num_slots: int, num_steps: int) -> None:
    """One track per thread, no slices that overlap, every op there."""
    trace = Trace.FromString(path.read_bytes())
    threads = {
        packet.track_descriptor.uuid
        for packet in trace.packet
        if packet.HasField("track_descriptor") and packet.track_descriptor.HasField("thread")
    }
    assert threads
    edges: dict[int, list[tuple[int, int]]] = {}
    for packet in trace.packet:
        if packet.HasField("track_event"):
            edges.setdefault(packet.track_event.track_uuid, []).append((packet.timestamp, packet.track_event.type))
    for track, track_edges in edges.items():
        kinds = [kind for _, kind in track_edges]
        assert kinds == [TrackEvent.TYPE_SLICE_BEGIN, TrackEvent.TYPE_SLICE_END] * (len(kinds) // 2), track
        times = [at for at, _ in track_edges]
        assert all(a <= b for a, b in itertools.pairwise(times)), track
    for thread in threads:
        assert len(edges[thread]) == 2 * num_slots * num_steps


async def test_the_parts_of_nearly_every_request_add_up(tiny_server: Server) -> None:
    """|end to end - sum| <= max(2 %, 1 ms) for 99 % of 200 requests, short and long, streamed and whole."""
    trace_ids: list[str] = []
    for start in range(0, 200, 10):
        asked = [ask(tiny_server.url, 1 + n * 3, stream=bool(n % 2), prompt=[start + n] * 20) for n in range(10)]
        trace_ids += [trace_id for trace_id, _ in await asyncio.gather(*asked)]
    off = 0
    for trace_id in trace_ids:
        request = await trace_of(tiny_server.url, trace_id)
        off += abs(request["unaccounted_seconds"]) > max(0.02 * request["seconds"], 0.001)
        assert all(part["seconds"] >= 0 for part in request["parts"])
    assert off <= 2, f"{off} of {len(trace_ids)} do not add up"


async def test_every_span_reaches_a_collector(tiny_model: Path) -> None:
    port = free_port()
    settings = OtelTapHttpProtobufReceiverSettings(http_port=port)
    received: dict[str, Any] = {}

    async def listen(receiver: OtelTapHttpProtobufReceiver) -> None:
        async for span in receiver.stream_traces():
            received[span.span_id.hex()] = span

    async with OtelTapHttpProtobufReceiver(settings) as receiver:
        listening = asyncio.create_task(listen(receiver))
        server = await asyncio.to_thread(
            Server, str(tiny_model), "--served-name", "tiny", "--otlp-endpoint", f"http://127.0.0.1:{port}"
        )
        try:
            asked = await asyncio.gather(*[ask(server.url, 10 + n, stream=True) for n in range(4)])
            requests = [await trace_of(server.url, trace_id) for trace_id, _ in asked]
            expected = {request["span_id"] for request in requests}
            for request in requests:
                expected |= {part["span_id"] for part in request["parts"]}
                expected |= {step["span_id"] for step in request["steps"]}
            deadline = time.monotonic() + 20
            while not expected <= received.keys():
                assert time.monotonic() < deadline, f"{len(expected - received.keys())} of {len(expected)} did not come"
                await asyncio.sleep(0.05)
        finally:
            await asyncio.to_thread(server.stop)
            listening.cancel()
    for request in requests:
        assert received[request["span_id"]].trace_id.hex() == request["trace_id"]
        for part in request["parts"]:
            assert received[part["span_id"]].parent_span_id.hex() == request["span_id"]
        for step in request["steps"]:
            links = {(link.trace_id.hex(), link.span_id.hex()) for link in received[step["span_id"]].links}
            assert {(link["trace_id"], link["span_id"]) for link in step["links"]} == links
            for trace_id, span_id in links:
                assert received[span_id].trace_id.hex() == trace_id, "a link that leads to a span that was sent"


async def test_a_collector_that_does_not_answer_slows_nobody(tiny_model: Path) -> None:
    """The endpoint takes connections and never reads."""
    silent = socket.create_server(("127.0.0.1", 0))  # the kernel takes what connects
    port = silent.getsockname()[1]
    server = await asyncio.to_thread(
        Server, str(tiny_model), "--served-name", "tiny", "--otlp-endpoint", f"http://127.0.0.1:{port}"
    )
    try:
        seconds = [(await ask(server.url, 20))[1] for _ in range(20)]
        assert max(seconds) < 4.0, "the export's own time limit is 5 s"
    finally:
        await asyncio.to_thread(server.stop)
        silent.close()
