"""What a server says of itself: memory by category, tokens one by one, objectives, and bytes over time."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ai_engine.observe.host import memory_by_category, pss_bytes
from ai_engine.testing.process import Server
from tests.integration.client import metrics, send, until
from tests.integration.test_tracing import trace_of

pytestmark = pytest.mark.usefixtures("no_connection_left")

OBJECTIVES = """
[[objective]]
name = "quick"
signal = "ttft"
percentile = 50
threshold_s = 30
min_events = 10

[[objective]]
name = "impossible"
signal = "e2e"
percentile = 50
threshold_s = 0.000001
min_events = 10
"""


@pytest.fixture
def server(tiny_model: Path, tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "slo.toml").write_text(OBJECTIVES, encoding="utf-8")
    running = Server(str(tiny_model), "--served-name", "tiny", "--slo", str(tmp_path / "slo.toml"))
    yield running
    assert running.stop() == 0


def completion(num_tokens: int, **fields: Any) -> dict[str, Any]:
    return {
        "model": "tiny", "prompt": [5, 17, 3, 88], "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True,
    } | fields  # fmt: skip


async def ask(server: Server, body: dict[str, Any], **headers: str) -> str:
    """The request's trace id."""
    exchange = await send(server.url, "/v1/completions", body, headers=headers)
    assert await exchange.head() == 200
    await exchange.body()
    return exchange.headers["x-ai-trace-id"]


def log_of(server: Server, event: str, trace_id: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in list(server.lines) if line.startswith("{")]
    return [line for line in lines if line["event"] == event and line["trace"] == trace_id]


async def test_the_categories_of_memory_add_up_to_the_process(server: Server) -> None:
    """Within 5 % of the proportional set size that the kernel tells, while requests hold pages."""
    long = [completion(4000, prompt=[n + 3] * 200, stream=True) for n in range(6)]
    running = [await send(server.url, "/v1/completions", body) for body in long]
    await asyncio.gather(*[exchange.head() for exchange in running])
    name = "ai_engine_l3_model_memory_bytes"
    found = {key: value for key, value in (await metrics(server.url)).items() if key.startswith(name)}
    worker = max(server.pids(), key=pss_bytes)
    whole = pss_bytes(worker)
    categories = {key.split('"')[1] for key in found}
    assert categories >= {
        "weights", "activations", "workspace", "kv in use", "kv cached", "kv fragmentation", "kv free", "code",
        "shared", "heap",
    }  # fmt: skip
    assert sum(found.values()) == pytest.approx(whole, rel=0.05)
    assert sum(memory_by_category(worker, {}).values()) == pytest.approx(whole, rel=0.05)
    assert found[f'{name}{{category="weights"}}'] > 1e6
    for exchange in running:
        exchange.abort()


async def test_a_token_line_names_the_step_and_the_trace(server: Server) -> None:
    quiet = await ask(server, completion(5))
    asked = await ask(server, completion(12, logprobs=0), **{"x-ai-log-tokens": "1"})

    async def is_told() -> bool:
        return len(log_of(server, "token", asked)) == 12 and all(log_of(server, "request", t) for t in (quiet, asked))

    await until(is_told, "a line a token")
    assert log_of(server, "token", quiet) == []
    assert len(log_of(server, "request", asked)) == 1, "one line a request"
    steps = {step["step"] for step in (await trace_of(server.url, asked))["steps"]}
    lines = log_of(server, "token", asked)
    assert {line["step"] for line in lines} <= steps
    assert all(isinstance(line["token"], int) and "text" not in line for line in lines)


async def test_objectives_are_judged_while_the_server_runs(server: Server, tmp_path: Path) -> None:
    asked = [await ask(server, completion(2)) for _ in range(12)]

    async def are_logged() -> bool:
        return all(log_of(server, "request", trace_id) for trace_id in asked)

    await until(are_logged, "a line for each")

    def check(*more: str) -> subprocess.CompletedProcess[str]:
        words = ["slo", "check", str(tmp_path / "slo.toml"), *more]
        return subprocess.run(
            [sys.executable, "-m", "ai_engine.cli", *words], capture_output=True, text=True, timeout=60
        )

    done = await asyncio.to_thread(check, "--url", server.url)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("met          quick")
    assert "missed       impossible" in done.stdout
    log = tmp_path / "server.log"
    log.write_text("".join(server.lines), encoding="utf-8")
    again = await asyncio.to_thread(check, "--log", str(log))
    assert (again.returncode, again.stdout.count("burn rate")) == (1, 2)


async def test_achieved_bandwidth_is_bytes_over_time(tiny_model: Path) -> None:
    """Computed here from the model's own sizes and the thread's stamps, within 10 %. On one thread: of several, one may
    come when the work is done."""
    server = await asyncio.to_thread(Server, str(tiny_model), "--served-name", "tiny", "--threads", "1")
    try:
        trace_id = await ask(server, completion(20, temperature=1, seed=4))
        check_bandwidth((await trace_of(server.url, trace_id, "all"))["steps"])
    finally:
        await asyncio.to_thread(server.stop)


def check_bandwidth(steps: list[dict[str, Any]]) -> None:
    checked = 0
    for step in steps:
        rows = step["all_rows"]
        for op in (op for layer in step["runs"][0] for op in layer["ops"]):
            if op["op"] != "matmul" or op["dtype"] != "Q8_0" or not op["shape"].startswith("T x"):
                continue
            cols, outputs = (int(part) for part in op["shape"].removeprefix("T x ").split(" -> "))
            weights = outputs * cols // 32 * 34  # 32 values in 34 bytes
            inputs, result = rows * cols // 32 * 64, rows * outputs * 4
            (thread,) = op["threads"]
            assert op["gb_per_s"] == pytest.approx((weights + inputs + result) / thread["seconds"] / 1e9, rel=0.1)
            checked += 1
    assert checked >= 5
