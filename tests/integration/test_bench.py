"""`ai-engine bench` as a person runs it: quick runs on a small model end in tables, JSON and plots; Ctrl-C ends a run
and all that it started."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ai_engine.testing.process import Server, process_tree
from tests.conftest import ROOT
from tests.integration.client import alive


def bench(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ai_engine.cli", "bench", *args],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240, cwd=ROOT,
    )  # fmt: skip


def test_serve_starts_a_server_and_measures_it(tiny_model: Path, tmp_path: Path) -> None:
    done = bench("serve", str(tiny_model), "--quick", "--workload", "S1,S2,S5,S6,S8", "--out", str(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    [name] = [path.stem for path in tmp_path.glob("*.json")]
    assert json.loads((tmp_path / f"{name}.json").read_text()) == found
    together = found["together"]
    assert set(together) == {"S1", "S2", "S5 alone", "S5", "S6", "S8"}
    for row in together.values():
        assert row["failures"] == 0, row["errors"]
        assert row["tokens_per_s"] > 0
    assert any(row["server_cpu_s_per_1000_tokens"] for row in together.values())  # the kernel counts by 10 ms
    assert together["S2"]["output_tokens"] == 6 * 24
    assert together["S1"]["cached_tokens"] == 0  # every prompt is salted
    assert together["S6"]["cached_tokens"] >= 5 * 96  # 128 shared, in pages of 32
    assert found["client"]["failures"] == 0
    [intruder] = found["rounds"]["S5"]
    assert intruder["intruder_ttft_ratio"] > 0
    assert 0 <= found["load"]["steal_share"] <= 1
    answers = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
    assert len(answers) == sum(row["requests"] for row in together.values())
    assert all(row["texts_s"] == sorted(row["texts_s"]) for row in answers)
    for plot in ("gaps", "ttft", "time"):
        assert (tmp_path / f"{name}-{plot}.svg").read_text().startswith("<svg")


def test_serve_measures_a_server_that_runs(tiny_server: Server) -> None:
    pid = str(tiny_server.process.pid)
    done = bench("serve", "--url", tiny_server.url, "--pid", pid, "--quick", "--workload", "S4")
    assert done.returncode == 0, done.stderr
    assert "S4 most" in done.stdout
    assert "S4 30%" in done.stdout


def test_what_cannot_be_measured_is_said() -> None:
    done = bench("serve", "--url", "http://127.0.0.1:1", "--quick")
    assert done.returncode == 1
    assert "does not answer as an OpenAI server" in done.stderr
    assert "Traceback" not in done.stderr


def test_machine_model_and_kernels_run(tiny_model: Path, tmp_path: Path) -> None:
    for args in (
        ("machine",),
        ("model", str(tiny_model)),
        ("kernels", "--types", "Q4_0,F16", "--matmul-only"),
    ):
        done = bench(*args, "--quick", "--out", str(tmp_path))
        assert done.returncode == 0, done.stderr
    limits = json.loads((tmp_path / "machine.json").read_text())["ceilings"]["limits"]
    assert min(limits["read"]["1"]["value"], limits["fma"]["1"]["value"], limits["dot"]["1"]["value"]) > 0.1
    cases = json.loads((tmp_path / "kernels.json").read_text())["cases"]
    assert {(row["case"], row["rows"]) for row in cases} >= {("Q4_0", 1), ("Q4_0", 512), ("F16", 16)}
    assert all(row["gb_s"] > 0 for row in cases)
    [model] = tmp_path.glob("model-*.json")
    [measured] = json.loads(model.read_text())["threads"].values()
    assert measured["cases"]["decode 1 @ 0"]["share"]["value"] > 0
    assert measured["cases"]["prefill 128"]["tokens_per_s"]["value"] > 0
    assert len(list(tmp_path.glob("*.svg"))) == 2


LLAMA_BENCH = """#!/bin/sh
case "$*" in *--version*) echo "version: 1 (fake)"; exit 0;; esac
echo '[{"n_prompt": 128, "avg_ts": 200.0}, {"n_prompt": 0, "avg_ts": 50.0}]'
"""
LLAMA_BATCHED = """#!/bin/sh
echo '{"pl": 16, "speed_tg": 80.0}'
"""
LLAMA_SERVER = f"""#!/bin/sh
model=$2
while [ $# -gt 0 ]; do [ "$1" = --port ] && port=$2; shift; done
exec {sys.executable} -m ai_engine.cli serve "$model" --port "$port" --no-prefix-cache
"""


@pytest.fixture
def fake_llama(tmp_path: Path) -> Path:
    """llama.cpp's folder, with tools that answer at once and, as its server, our own."""
    folder = tmp_path / "bin"
    folder.mkdir()
    scripts = {"llama-bench": LLAMA_BENCH, "llama-batched-bench": LLAMA_BATCHED, "llama-server": LLAMA_SERVER}
    for name, script in {**scripts, "llama-quantize": "#!/bin/sh\nexit 1\n"}.items():
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    return folder


def test_compare_engine_divides_by_what_llama_cpp_says(tiny_model: Path, fake_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("--quick", "--llama-bin", str(fake_llama), "--out", str(out))
    done = bench("compare", "llama.cpp", str(tiny_model), *words)
    assert done.returncode == 0, done.stderr
    [path] = out.glob("compare-engine-*.json")
    found = json.loads(path.read_text())
    assert found["llama_cpp"] == "version: 1 (fake)"
    assert len(found["sha256"]) == 64
    for name, theirs in (("prefill 128", 200.0), ("decode 1", 50.0), ("decode 16", 80.0)):
        row, ours = found["tokens_per_s"][name], found["samples"]["ours"][name]
        assert row["llama.cpp"] == theirs
        assert row["ratio"]["value"] == pytest.approx(sum(ours) / len(ours) / theirs, rel=1e-3)  # of two rounds
        assert row["ratio"]["low"] <= row["ratio"]["value"] <= row["ratio"]["high"]
    assert found["share_of_limit"]["ours"]["value"] > 0
    assert "<svg" in next(out.glob("*-ratios.svg")).read_text()


def test_compare_servers_asks_both_the_same(tiny_model: Path, fake_llama: Path) -> None:
    """Against ourselves: the same tokens, no failure, tuned settings recorded."""
    words = ("--what", "server", "--workload", "single", "--quick", "--json", "--llama-bin", str(fake_llama))
    done = bench("compare", "llama.cpp", str(tiny_model), *words)
    assert done.returncode == 0, done.stderr
    load = json.loads(done.stdout)["loads"]["single"]
    assert load["setting"] == "base"
    assert load["failures"] == {"ours": 0, "llama.cpp": 0}
    [ours], [theirs] = load["runs"]["ours"], load["runs"]["llama.cpp"]
    for name in ("prompt_tokens", "output_tokens", "cached_tokens"):
        assert ours[name] == theirs[name]
    assert ours["prompt_tokens"] == 128
    assert "--cache-ram" in load["command"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_and_its_server(tiny_model: Path, number: signal.Signals) -> None:
    command = [
        sys.executable,
        "-m",
        "ai_engine.cli",
        "bench",
        "serve",
        str(tiny_model),
        "--workload",
        "S1",
        "--rounds",
        "99",
    ]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
    try:
        pids: list[int] = []
        end = time.monotonic() + 60
        while time.monotonic() < end and len(pids) < 3:  # itself, gateway, worker
            time.sleep(0.2)
            with contextlib.suppress(FileNotFoundError):
                pids = process_tree(child.pid)
        assert len(pids) >= 3
        time.sleep(1.0)
        pids = process_tree(child.pid)
        child.send_signal(number)
        assert child.wait(40) == 130
        assert not any(alive(pid) for pid in pids)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
