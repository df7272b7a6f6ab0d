"""Whatever bytes come over the socket: an answer below 500 or a closed connection, and a server that is as it was.

Requests that are right, and what mutation makes of them, cut into pieces anywhere, several on a connection, with
clients that leave at any moment. `make test` does this for seconds, `make full` for a quarter of an hour, with another
seed each time. With schemathesis installed (it brings many dependencies: `pip install schemathesis`, or its path in
AI_ENGINE_SCHEMATHESIS) the OpenAPI document is turned against us too.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import random
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from ai_engine.testing.process import Server
from tests.integration.client import is_idle, num_descriptors, resident_bytes, send, until
from tests.integration.test_server_life import serving

pytestmark = pytest.mark.usefixtures("no_connection_left")

CLIENTS = 8
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
GROWTH_BYTES = 12_000_000
"""Memory that gateway and worker may gain after the first part: allocators, traces (bounded to 1 MiB)."""
ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
    "/v1/tokenize",
    "/v1/models/a%2Fb",
)
WORDS = (
    b"Content-Length: 99999999999999999999\r\n", b"Content-Length: -1\r\n", b"Content-Length: 5\r\n", b"ffffffff\r\n",
    b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip, chunked\r\n", b"Expect: 100-continue\r\n", b"\x00",
    b"Content-Encoding: gzip\r\n", b"Connection: upgrade\r\nUpgrade: websocket\r\n", b"Content-Type: text/xml\r\n",
    b"Authorization: Bearer \xff\xfe\r\n", b"Traceparent: 00-0-0-zz\r\n", b"X-Request-Timeout: nan\r\n", b"Host:\r\n",
    b"Origin: null\r\n", b" HTTP/9.9\r\n", b"%00%ff/../..", b"0\r\n\r\n", b'{"a":' * 70, b"1e999", b"\\ud800",
)  # fmt: skip


@pytest.fixture
def door(tiny_model: Path) -> Iterator[Server]:
    with serving(tiny_model, "--trace-memory", "1M", "--max-body-bytes", "100000", "--max-context", "512") as server:
        yield server


def good_body(path: str, draw: random.Random) -> dict[str, Any]:
    text = draw.choice(["Hi", "é😀", "a" * draw.randrange(300), ""])
    if path in ("/v1/completions", "/v1/tokenize"):
        body: dict[str, Any] = {"prompt": text or "x"}
    elif path == "/v1/responses":
        body = {"input": text or "x"}
    else:
        body = {"messages": [{"role": "user", "content": text or "x"}]}
    if path != "/v1/tokenize":
        limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        body |= {"model": "tiny", limit: draw.randint(1, 3), "stream": draw.random() < 0.5}
    if draw.random() < 0.5:
        name = draw.choice(["temperature", "n", "stop", "seed", "top_p", "logit_bias", "model", "tools"])
        body[name] = draw.choice([0, 1, -1, 1e300, None, True, "x", [], {}, [{}], {"1": 1}, "\ud800"])
    return body


def good_request(draw: random.Random) -> bytes:
    """A request as clients write it, its body plain, in chunks or gzipped."""
    if draw.random() < 0.2:
        path = draw.choice(["/livez", "/readyz", "/metrics", "/v1/models", "/traces", "/openapi.json", "/console"])
        return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    path = draw.choice(ROUTES)
    body = json.dumps(good_body(path, draw)).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    kind = draw.random()
    if kind < 0.2:
        pieces = [body[i : i + 40] for i in range(0, len(body), 40)]
        chunked = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
        return head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + chunked + b"0\r\n\r\n"
    if kind < 0.35:
        body = gzip.compress(body)
        head += "Content-Encoding: gzip\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def mutated(data: bytes, draw: random.Random) -> bytes:
    for _ in range(draw.choice([0, 0, 1, 1, 2, 5, 20])):
        at = draw.randrange(len(data) + 1)
        end = min(len(data), at + draw.choice([1, 1, 4, 30]))
        data = draw.choice(
            [
                data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :],
                data[:at] + data[end:],
                data[:at] + data[at:end] * draw.choice([2, 3, 50]) + data[end:],
                data[:at] + draw.choice(WORDS) + data[at:],
                data.replace(b"\r\n", b"\r\n" + draw.choice(WORDS), 1),
                data[:at] + draw.randbytes(draw.choice([1, 8, 200])) + data[at:],
                data[:at],
            ]
        )
    return data


async def one_connection(where: tuple[str, int], draw: random.Random, seen: Counter[int]) -> None:
    data = b"".join(mutated(good_request(draw), draw) for _ in range(draw.choice([1, 1, 1, 2, 4])))
    reader, writer = await asyncio.open_connection(*where)
    try:
        while data:
            size = draw.choice([1, 7, 100, 5000, len(data)])
            writer.write(data[:size])
            data = data[size:]
            await writer.drain()
            if draw.random() < 0.05:
                await asyncio.sleep(draw.random() * 0.01)
            if draw.random() < 0.02:
                return  # leaves in the middle
        if draw.random() < 0.3:
            writer.write_eof()
        answer = b""
        while draw.random() < 0.98:
            part = await asyncio.wait_for(reader.read(1 << 16), draw.choice([0.02, 0.3]))
            if not part:
                break
            answer += part
        for status in STATUS.findall(answer):
            seen[int(status)] += 1
            if int(status) >= 500:
                assert b'"server_overloaded"' in answer, answer[:600]
    except (TimeoutError, OSError):
        return
    finally:
        writer.transport.abort()


async def fuzz(server: Server, seconds: float, seed: int, seen: Counter[int]) -> int:
    address = urlsplit(server.url)
    where, until_s = (str(address.hostname), int(address.port or 0)), time.monotonic() + seconds

    async def client(number: int) -> int:
        count = 0
        while time.monotonic() < until_s:
            await one_connection(where, random.Random(f"{seed}.{number}.{count}"), seen)
            count += 1
        return count

    async with asyncio.timeout(seconds + 60):
        return sum(await asyncio.gather(*(client(number) for number in range(CLIENTS))))


async def run(server: Server, seconds: float, seed: int) -> None:
    pids, seen = server.pids(), Counter[int]()
    await fuzz(server, seconds / 4, seed, seen)
    await until(lambda: is_idle(server.url), "an idle engine", 20)
    before = [(resident_bytes(pid), num_descriptors(pid)) for pid in pids]
    done = await fuzz(server, seconds * 3 / 4, seed + 1, seen)
    await until(lambda: is_idle(server.url), "an idle engine", 20)

    async def descriptors_are_back() -> bool:
        return all(num_descriptors(pid) <= had[1] for pid, had in zip(pids, before, strict=True))

    await until(descriptors_are_back, "as many descriptors as before", 20)
    story = f"seed {seed}, {done} connections, {dict(sorted(seen.items()))}"
    assert server.pids() == pids, f"a process ended: {story}"
    for pid, had in zip(pids, before, strict=True):
        assert resident_bytes(pid) - had[0] <= GROWTH_BYTES, (had, resident_bytes(pid), story)
    assert seen[200] >= 20, f"some of it was right: {story}"
    assert seen[400] >= 20, f"and some was not: {story}"
    body = {"prompt": "Hi", "max_tokens": 2, "temperature": 0}
    assert await (await send(server.url, "/v1/completions", body)).head() == 200


async def test_any_bytes_on_the_socket(door: Server) -> None:
    await run(door, 16, seed=int(os.environ.get("AI_ENGINE_SEED", "1")))


@pytest.mark.full
@pytest.mark.timeout(1300)
async def test_any_bytes_on_the_socket_for_a_quarter_of_an_hour(door: Server) -> None:
    await run(door, 900, seed=int(os.environ.get("AI_ENGINE_SEED", str(time.time_ns() % 10**6))))


def schemathesis() -> str:
    found = os.environ.get("AI_ENGINE_SCHEMATHESIS") or shutil.which("schemathesis")
    if found is None:
        if os.environ.get("CI") == "true":
            raise AssertionError("CI has to install schemathesis (.ci/run)")
        pytest.skip("schemathesis is not here: pip install schemathesis, or set AI_ENGINE_SCHEMATHESIS to its path")
    return found


def run_schemathesis(server: Server, folder: Path, phases: str, examples: int, seconds: float) -> None:
    command = [
        schemathesis(), "run", f"{server.url}/openapi.json", "--checks", "not_a_server_error", "--mode", "all",
        "--phases", phases, "--max-examples", str(examples), "--seed", "1", "--workers", "2",
        "--request-timeout", "30",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, cwd=folder)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_the_openapi_document_turned_against_us(door: Server, tmp_path: Path) -> None:
    pids = door.pids()
    run_schemathesis(door, tmp_path, "examples,fuzzing", 5, 120)
    assert door.pids() == pids


@pytest.mark.full
@pytest.mark.timeout(1300)
def test_the_openapi_document_turned_against_us_at_length(door: Server, tmp_path: Path) -> None:
    pids = door.pids()
    run_schemathesis(door, tmp_path, "examples,coverage,fuzzing,stateful", 400, 1200)
    assert door.pids() == pids
