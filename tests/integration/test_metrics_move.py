"""A scripted workload moves the catalogue's families, on a server in two processes; those that stayed are listed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ai_engine.api.keys import add_key
from ai_engine.observe.catalogue import FAMILIES, SERIES_BUDGET, Family
from ai_engine.testing.process import Server
from tests.integration.client import QUEUED, RUNNING, send, until

pytestmark = pytest.mark.usefixtures("no_connection_left")

ADMIN = "sk-admin"
MAY_STAY = {
    "l2_jit_compiles", "l2_jit_compile_seconds",  # the kernels may be in the cache
    "l3_model_forward_mbu_ratio", "l3_model_forward_mfu_ratio",  # need `ai-engine bench machine`
    "l3_model_memory_bytes", "l3_model_reserved_bytes",
    "l3_model_weights_bytes", "l3_kv_pool_bytes", "l3_model_registry_loaded",
    "l2_team_threads", "l3_kv_pool_capacity_pages", "l3_kv_pool_page_tokens", "l7_door_auth_active_keys",
    "l7_door_auth_keys_stale", "l6_ops_build_info", "l6_ops_startup_phase_seconds", "l6_ops_startup_ready_seconds",
    "l6_ops_worker_starts", "l3_model_weights_load_seconds",  # set while the server starts
    "l6_ops_telemetry_lost_events", "l6_ops_trace_failures", "l6_ops_trace_coverage_ratio",  # nothing failed
    "l7_api_stream_errors_midstream", "l6_ops_drain_state", "l6_ops_health_ready",
    "l6_ops_log_suppressed", "l6_slo_state", "l6_slo_burn_rate_ratio", "l6_slo_events",
    "l1_host_cpu_steal_ratio", "l1_host_cpu_throttled_seconds", "l1_host_cpu_quota_cores",  # the machine's
    "l1_host_cpu_utilisation_ratio", "l1_host_process_pss_bytes", "l1_host_memory_available_bytes",
    "l6_ops_trace_exported_spans",  # the collector is gone, on purpose
}  # fmt: skip
"""Families that a healthy server need not move; each has a test of its own or is said once."""


@pytest.fixture
def server(tiny_model: Path, tmp_path: Path) -> Iterator[tuple[Server, str]]:
    """With the key of somebody who may ask once a minute."""
    limited = add_key(tmp_path / "keys.json", {"name": "limited", "requests_per_minute": 1})
    running = Server(
        str(tiny_model), "--served-name", "tiny", "--api-key", ADMIN, "--keys", str(tmp_path / "keys.json"),
        "--kv-memory", "2M", "--max-context", "1024",
        "--max-seqs", "8", "--max-queue-requests", "6", "--otlp-endpoint", "http://127.0.0.1:9",
    )  # fmt: skip
    yield running, limited
    assert running.stop() == 0


def headers(key: str = ADMIN, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", **more}


async def call(server: Server, path: str, body: Any = None, status: int = 200, **more: Any) -> bytes:
    more.setdefault("headers", headers())
    exchange = await send(server.url, path, body, **more)
    assert await exchange.head() == status, await exchange.body()
    return await exchange.body()


def completion(num_tokens: int, **fields: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": [5, 17, 3, 88],
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
    } | fields


async def scrape(server: Server) -> dict[str, float]:
    text = (await call(server, "/metrics")).decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in text if line[:1] != "#")}


async def workload(server: Server, limited: str) -> None:
    """A bit of everything that a server meets."""
    for path in ("/livez", "/readyz", "/v1/models"):
        await call(server, path)
    await call(server, "/v1/models", status=401, headers=headers("sk-wrong"))
    await call(server, "/nowhere", status=404)
    for status in (200, 429):
        await call(server, "/v1/completions", completion(2), status=status, headers=headers(limited))
    await call(server, "/v1/completions", completion(4, temperature=9), status=400)
    await call(server, "/v1/completions", completion(4, user="someone", metadata={"a": "b"}))
    await call(server, "/v1/models", headers=headers(traceparent="00-bad"))
    await call(server, "/v1/chat/completions", {
        "model": "tiny", "messages": [{"role": "user", "content": "hello there " * 20}], "max_tokens": 40, "n": 2,
        "temperature": 1, "seed": 3,
    })  # fmt: skip
    fox = completion(30, prompt="the fox", temperature=1, seed=5)
    said = json.loads(await call(server, "/v1/completions", fox))["choices"][0]["text"]
    stop = next(char for char in said[2:] if char.isascii() and char.isprintable())
    await call(server, "/v1/completions", {**fox, "stop": [stop], "stream": True})
    for _ in range(2):  # the second time its prefix is cached
        await call(server, "/v1/completions", completion(120, prompt=[7, 9, 11, 13] * 40, stream=True))
    left = await send(
        server.url, "/v1/completions", completion(900, stream=True, temperature=1, seed=2), headers=headers()
    )
    assert await left.head() == 200
    left.abort()
    await until(lambda: is_idle(server), "the server lets go of who left")
    for _ in range(10):  # until somebody was seen waiting: a small model is quick
        if await crowd(server):
            break


async def crowd(server: Server) -> bool:
    """More requests than fit at once, and more than the queue takes; whether a scrape saw some wait."""
    many = [completion(900, prompt=[n + 3] * 100, stream=True, temperature=1, seed=n) for n in range(24)]
    sent = await asyncio.gather(*[send(server.url, "/v1/completions", one, headers=headers()) for one in many])
    seen = [await is_queued(server) for _ in range(5)]
    statuses = {await exchange.head() for exchange in sent}
    assert {200} < statuses <= {200, 503}, statuses
    for exchange in sent:
        await exchange.body()
    return any(seen)


async def is_queued(server: Server) -> bool:
    return (await scrape(server))[QUEUED] > 0


async def is_idle(server: Server) -> bool:
    return (await scrape(server))[RUNNING] == 0


async def has_dropped(server: Server) -> bool:
    return (await scrape(server))['ai_engine_l6_ops_trace_dropped_total{what="spans"}'] > 0


def moved(family: Family, before: dict[str, float], after: dict[str, float]) -> bool:
    """Whether any sample of the family changed, or came."""
    names = [name for name in after if name.partition("{")[0] in (
        family.exposed, f"{family.exposed}_count", f"{family.exposed}_sum")]  # fmt: skip
    return any(after[name] != before.get(name, 0.0) for name in names)


async def test_the_workload_moves_a_hundred_families(server: tuple[Server, str]) -> None:
    await move_them(*server)


async def move_them(server: Server, limited: str) -> None:
    before = await scrape(server)
    during: dict[str, float] = {}

    async def watch() -> None:
        while True:
            for name, value in (await scrape(server)).items():
                if value != before.get(name, 0.0):
                    during[name] = value
            await asyncio.sleep(0.1)

    watching = asyncio.create_task(watch())
    await workload(server, limited)
    await asyncio.sleep(0.6)  # a step is sampled twice a second
    await call(server, "/v1/completions", completion(200))
    await until(lambda: has_dropped(server), "the exporter counts what the collector did not take")
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
    after = (await scrape(server)) | during
    still = [family.name for family in FAMILIES if not moved(family, before, after)]
    done = [family.name for family in FAMILIES if family.name not in still and not family.name.startswith("l1_host")]
    assert len(done) >= 100, f"only {len(done)} moved; still: {still}"
    assert set(still) <= MAY_STAY, sorted(set(still) - MAY_STAY)
    assert len(after) < SERIES_BUDGET
    tool = shutil.which("promtool")
    if tool is not None:
        text = await call(server, "/metrics")
        checked = await asyncio.to_thread(
            subprocess.run, [tool, "check", "metrics"], input=text, capture_output=True, timeout=30
        )
        assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")
