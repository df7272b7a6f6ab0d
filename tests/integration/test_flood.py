"""One key floods a real model over real HTTP; another key's request hardly notices."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from ai_engine.api.keys import add_key
from ai_engine.testing.process import free_port
from tests.integration.client import Exchange, metrics, send, until
from tests.integration.test_server_life import serving

pytestmark = [pytest.mark.usefixtures("no_connection_left"), pytest.mark.integration]

NUM_FLOOD = 200
SAMPLES = 7
STEP = "ai_engine_l5_sched_step_seconds"


def completion(draw: random.Random, num_in: int, num_out: int) -> dict[str, Any]:
    prompt = [draw.randrange(100, 40_000) for _ in range(num_in)]
    return {"prompt": prompt, "max_tokens": num_out, "ignore_eos": True, "stream": True, "temperature": 0}


async def flood(url: str, key: str, draw: random.Random) -> list[Exchange]:
    asked = (send(url, "/v1/completions", completion(draw, 128, 128), headers=bearer(key)) for _ in range(NUM_FLOOD))
    return list(await asyncio.gather(*asked))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def ttft_s(url: str, key: str, draw: random.Random) -> float:
    """Seconds from asking to the first event of a prompt of 32 tokens that nobody has sent before."""
    started = time.monotonic()
    exchange = await send(url, "/v1/completions", completion(draw, 32, 4), headers=bearer(key))
    async for _ in exchange.events():
        seconds = time.monotonic() - started
        await exchange.close()
        return seconds
    raise AssertionError("no event")


async def beside_the_flood(url: str, scrape: str, key: str, draw: random.Random) -> tuple[list[float], float]:
    """Times to the first token, and the mean step meanwhile."""

    async def is_full() -> bool:
        return (await metrics(scrape)).get("ai_engine_l5_sched_batch_running_requests", 0) >= 20

    during, before = [await ttft_s(url, key, draw)], await metrics(scrape)
    await until(is_full, "most seats taken", 60)
    for _ in range(SAMPLES - 1):
        during.append(await ttft_s(url, key, draw))
        await asyncio.sleep(0.2)
    after = await metrics(scrape)
    assert after["ai_engine_l5_sched_queue_requests"] > 100, "the flood was over"
    steps = after[f"{STEP}_count"] - before[f"{STEP}_count"]
    return during, (after[f"{STEP}_sum"] - before[f"{STEP}_sum"]) / steps


async def test_a_flood_of_one_key_costs_another_at_most_a_step(smollm2: Path, tmp_path: Path) -> None:
    """A: 200 requests of 128 in, 128 out. B's time to the first token of 32 in: at most twice what it takes alone, and
    a step. Medians, alone before and after: other work on the machine must not decide."""
    path, port, draw = tmp_path / "keys.json", free_port(), random.Random(7)
    a, b = add_key(path, {"name": "a"}), add_key(path, {"name": "b"})
    with serving(smollm2, "--keys", str(path), "--metrics-addr", f"127.0.0.1:{port}") as server:
        url, scrape = server.url, f"http://127.0.0.1:{port}"
        await ttft_s(url, b, draw)
        alone = [await ttft_s(url, b, draw) for _ in range(SAMPLES)]
        flooding = await flood(url, a, draw)
        try:
            during, step_s = await beside_the_flood(url, scrape, b, draw)
        finally:
            for exchange in flooding:
                exchange.abort()

        async def is_quiet() -> bool:
            return not (await metrics(scrape))["ai_engine_l5_sched_batch_running_requests"]

        await until(is_quiet, "the end of the flood", 30)
        alone += [await ttft_s(url, b, draw) for _ in range(SAMPLES)]
    figures = {"alone": alone, "during": during, "step": step_s}
    assert statistics.median(during) <= 2 * statistics.median(alone) + step_s, figures
