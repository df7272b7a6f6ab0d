"""500 requests at once over real HTTP, 40 % of which hang up at random.

Every survivor's answer equals its solo answer; afterwards pages, seats, descriptors and threads are what they were,
and memory stays. Everything has an end: a storm that does not settle in time fails.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ai_engine.testing.process import Server
from tests.integration.client import (
    POOL,
    is_idle,
    metrics,
    num_descriptors,
    num_threads,
    resident_bytes,
    send,
    stream_text,
    until,
)

pytestmark = pytest.mark.usefixtures("no_connection_left")

NUM_REQUESTS = 500
NUM_LEAVING = 200
TOKENS_IN, TOKENS_OUT = 32, 32


def requests_of(count: int, vocab: int, seed: int = 1) -> list[dict[str, Any]]:
    """Different prompts of 32 tokens, greedy and seeded in turn."""
    draw = random.Random(seed)
    made = []
    for number in range(count):
        sampling: dict[str, Any] = {"temperature": 0}
        if number % 2:
            sampling = {"temperature": 1, "top_p": 0.9, "seed": number}
        prompt = [draw.randrange(3, vocab) for _ in range(TOKENS_IN)]
        made.append(
            {"model": "storm", "prompt": prompt, "max_tokens": TOKENS_OUT, "ignore_eos": True, "stream": True}
            | sampling
        )
    return made


async def answer(url: str, body: dict[str, Any]) -> str:
    exchange = await send(url, "/v1/completions", body)
    assert await exchange.head() == 200
    text, finish, errors = await stream_text(exchange)
    assert (finish, errors) == ("length", [])
    return text


async def leave(url: str, body: dict[str, Any], draw: random.Random, longest_s: float) -> None:
    """Hang up: before the first token, or after some events."""
    after_s, after_events = draw.random() * longest_s, draw.randint(1, TOKENS_OUT)
    exchange = await send(url, "/v1/completions", body)
    if draw.random() < 0.5:
        await asyncio.sleep(after_s)
    else:
        async for _ in exchange.events():
            after_events -= 1
            if not after_events:
                break
    exchange.abort()


async def storm(url: str, bodies: list[dict[str, Any]], solo: list[str], seed: int, longest_s: float) -> None:
    draw = random.Random(seed)
    leaving = set(draw.sample(range(NUM_REQUESTS), NUM_LEAVING))
    work = []
    for number in range(NUM_REQUESTS):
        body = bodies[number % len(bodies)]
        work.append(leave(url, body, draw, longest_s) if number in leaving else answer(url, body))
    async with asyncio.timeout(150):
        said = await asyncio.gather(*work)
    for number, text in enumerate(said):
        assert number in leaving or text == solo[number % len(bodies)], f"request {number} is not what it is alone"


def footprint(server: Server) -> list[tuple[int, int]]:
    """(descriptors, threads) of gateway and worker."""
    return [(num_descriptors(pid), num_threads(pid)) for pid in server.pids()]


async def settle(server: Server, baseline: list[tuple[int, int]]) -> dict[str, float]:
    """Wait until everything is as it was; the metrics then."""

    async def is_settled() -> bool:
        now = footprint(server)
        return await is_idle(server.url) and all(
            have <= had for one, other in zip(now, baseline, strict=True) for have, had in zip(one, other, strict=True)
        )

    await until(is_settled, f"pages, descriptors and threads as before ({baseline})", 20)
    found = await metrics(server.url)
    pages = [found[POOL.replace("used", kind)] for kind in ("free", "cached", "capacity")]
    assert pages[0] + pages[1] == pages[2] > 0
    return found


ARGS = ("--served-name", "storm", "--max-queue-requests", "600", "--trace-memory", "2M")  # full after the first round


@pytest.fixture(scope="module")
def smollm2_storm_server(smollm2: Path) -> Iterator[Server]:
    server = Server(str(smollm2), *ARGS)
    yield server
    assert server.stop() == 0
    assert "Traceback" not in server.output, server.output


@pytest.fixture(scope="module")
def tiny_storm_server(tiny_model: Path) -> Iterator[Server]:
    # so few pages that the first round has touched all of them
    server = Server(str(tiny_model), *ARGS, "--max-context", "512", "--kv-memory", "4M")
    yield server
    assert server.stop() == 0
    assert "Traceback" not in server.output, server.output


async def warm_up(server: Server, bodies: list[dict[str, Any]]) -> list[str]:
    """Solo answers. The metrics page starts a thread of the event loop's pool: it is asked before the baseline."""
    solo = [await answer(server.url, body) for body in bodies]
    await asyncio.gather(*(metrics(server.url) for _ in range(64)))
    return solo


@pytest.mark.integration
@pytest.mark.timeout(300)
async def test_smollm2(smollm2_storm_server: Server) -> None:
    server = smollm2_storm_server
    bodies = requests_of(16, 49152)
    solo = await warm_up(server, bodies)
    assert len(set(solo)) == len(solo)
    baseline = footprint(server)
    await storm(server.url, bodies, solo, seed=1, longest_s=15)
    found = await settle(server, baseline)
    outcome = 'ai_engine_l5_request_lifecycle_finished_total{{outcome="{}"}}'.format
    assert found[outcome("failed")] == 0
    assert found[outcome("length")] >= len(bodies) + NUM_REQUESTS - NUM_LEAVING
    assert found[outcome("cancelled")] > NUM_LEAVING / 4
    assert found[outcome("length")] + found[outcome("cancelled")] == len(bodies) + NUM_REQUESTS
    assert [await answer(server.url, body) for body in bodies[:4]] == solo[:4], "the server has taken no harm"


@pytest.mark.timeout(300)
async def test_three_rounds(tiny_storm_server: Server) -> None:
    """100 different prompts; memory of gateway and worker after each round within 5 MB."""
    server = tiny_storm_server
    bodies = requests_of(100, 300)
    solo = await warm_up(server, bodies)
    baseline = footprint(server)
    resident = []
    for round_number in range(6):  # the first ones take the buffers that a storm needs
        await storm(server.url, bodies, solo, seed=round_number, longest_s=3)
        await settle(server, baseline)
        resident.append([resident_bytes(pid) for pid in server.pids()])
    for after in resident[3:]:  # nine rounds in a row: the worker +11 MB over the first four, then level within 1 MB
        for one, other in zip(resident[2], after, strict=True):
            assert abs(other - one) <= 5_000_000, resident
