"""Start-up, memory, idle CPU, installed size, and the 1.5-billion-parameter model. Prints each figure beside its bound.

    python -m bench.footprint [--quick]

Owns the running of `ai-engine serve` from outside, as an operator sees it. Speed is compare.py's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from ai_engine.data.models import resolve
from ai_engine.testing.process import Server, cpu_seconds, process_tree
from bench import random_model
from bench.machine import pss_bytes, save

MB = 1_000_000


class Figures:
    """Collects (figure, bound) and says at once how they stand."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}

    def add(self, name: str, value: float, bound: float, unit: str) -> None:
        met = value <= bound
        self.rows[name] = {"value": round(value, 4), "bound": bound, "unit": unit, "met": met}
        sys.stdout.write(f"{name:<44} {value:>10.3f} {unit:<6} bound {bound:>8.3f}  {'ok' if met else 'MISSED'}\n")
        sys.stdout.flush()


def ask(url: str, prompt: Any, max_tokens: int) -> dict[str, Any]:
    body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}).encode()
    request = urllib.request.Request(url + "/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as reply:
        answer: dict[str, Any] = json.load(reply)
        return answer


def start_up(figures: Figures, name: str, first_s: float, again_s: float) -> None:
    path = str(resolve(name))
    with tempfile.TemporaryDirectory() as cache:
        env = {"AI_ENGINE_CACHE": cache}
        cold = Server(path, env=env)
        cold.stop()
        warm = []
        for _ in range(3):
            server = Server(path, env=env)
            warm.append(server.ready_s)
            server.stop()
    ready = sorted(warm)[1]
    figures.add(f"{name}: ready, kernels cached", ready, again_s, "s")
    figures.add(f"{name}: first start takes longer by", cold.ready_s - ready, first_s, "s")


def memory_and_idle(figures: Figures, name: str, idle_s: float) -> None:
    path = resolve(name)
    kv_tokens = 8192
    server = Server(str(path), "--kv-memory", str(kv_bytes(str(path)) * kv_tokens))
    try:
        ask(server.url, list(range(100, 600)), 200)
        before = cpu_seconds(server.pids())
        time.sleep(idle_s)
        idle = (cpu_seconds(server.pids()) - before) / idle_s
        pss = pss_bytes(server.pids())
    finally:
        server.stop()
    kv = kv_bytes(str(path)) * kv_tokens
    figures.add(f"{name}: idle CPU of all processes over {idle_s:g} s", 100 * idle, 1.0, "%")
    figures.add(f"{name}: PSS of all processes", pss / MB, (1.1 * path.stat().st_size + kv) / MB + 200, "MB")


def kv_bytes(path: str) -> int:
    """KV bytes per token, from `ai-engine inspect`."""
    out = subprocess.run(
        [sys.executable, "-m", "ai_engine.cli", "inspect", path, "--json"], check=True, capture_output=True, text=True
    )
    return int(json.loads(out.stdout)["kv_bytes_per_token"])


def installed_size(figures: Figures) -> None:
    """The core alone, in a venv of its own made by scripts/setup.sh's lock."""
    root = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [f"{folder}/bin/python", "-m", "pip", "install", "-qq", "--require-hashes", "--no-deps"]
        subprocess.run([*pip, "-r", str(root / "requirements.lock")], check=True)
        site = Path(sysconfig.get_path("purelib", vars={"base": folder, "platbase": folder}))
        skip = ("pip", "setuptools", "_distutils_hack", "distutils-precedence", "pkg_resources")
        total = sum(
            file.stat().st_blocks * 512
            for file in site.rglob("*")
            if file.is_file() and not file.relative_to(site).parts[0].startswith(skip)
        )
    figures.add("core site-packages", total / MB, 330, "MB")


def big_model(figures: Figures) -> None:
    """Load time, peak PSS while loading and serving, and an 8k prompt."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "big.gguf"
        random_model.write(path)
        kv = kv_bytes(str(path)) * 8192
        peak, done = 0, threading.Event()
        server_pids: list[int] = []

        def watch() -> None:
            nonlocal peak
            while not done.wait(0.1):
                try:
                    pids = server_pids or process_tree(os.getpid())[1:]
                    peak = max(peak, pss_bytes(pids))
                except (FileNotFoundError, ProcessLookupError):
                    continue

        watcher = threading.Thread(target=watch)
        watcher.start()
        server = Server(str(path), "--kv-memory", str(kv), "--max-context", "8192")
        try:
            server_pids += server.pids()
            started = time.monotonic()
            ask(server.url, [100 + i % 20000 for i in range(8000)], 16)
            took = time.monotonic() - started
        finally:
            done.set()
            watcher.join()
            server.stop()
        size = path.stat().st_size
    figures.add("1.5B: ready", server.ready_s, 15, "s")
    figures.add("1.5B: peak PSS", peak / MB, (1.2 * size + kv) / MB, "MB")
    figures.add("1.5B: 8,000-token prompt and 16 tokens", took, 600, "s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="10 s of idling instead of 60, no 1.5B model")
    args = parser.parse_args()
    figures = Figures()
    start_up(figures, "smollm2", first_s=15, again_s=3)
    start_up(figures, "gemma3-270m", first_s=15, again_s=4)
    memory_and_idle(figures, "smollm2", 10 if args.quick else 60)
    installed_size(figures)
    if not args.quick:
        big_model(figures)
    sys.stdout.write(f"written: {save('footprint', {'figures': figures.rows}).name}\n")
    return 0 if all(row["met"] for row in figures.rows.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
