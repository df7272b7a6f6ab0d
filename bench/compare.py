"""Decode and prefill beside llama-bench on the same file and threads, A B A B, ratios of medians.

    LLAMA_BENCH=/path/to/llama-bench python -m bench.compare [--model smollm2] [--rounds 7] [--threads 2]

llama-bench is built from the llama-cpp-python source distribution (vendor/llama.cpp, cmake). Owns in-process speed of
the engine and the ratio to llama.cpp; the serving benchmark comes later. Each side loads the model once per round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from ai_engine import app
from ai_engine.config import EngineConfig
from ai_engine.data.models import open_model, resolve
from ai_engine.ports.progress import no_progress
from ai_engine.ports.runtime import Runtime, SequenceSpec, StepPlan, Work
from ai_engine.ports.sampling import SamplingParams
from bench.machine import save


class Ours:
    """The engine in this process, driven a step at a time as the scheduler would."""

    def __init__(self, path: Path, threads: int) -> None:
        file = open_model(path)
        config = EngineConfig(threads=threads, prefix_cache=False, max_seqs=16)
        self.engine: Runtime = app.build_runtime(file, config, no_progress, app.NoTelemetry(), frozenset())
        self._rng = np.random.default_rng(0)
        self._step = self._seq = 0

    def _run(self, work: list[Work], release: list[int] | None = None) -> float:
        self._step += 1
        started = time.perf_counter()
        self.engine.step(StepPlan(self._step, work, release or []))
        return time.perf_counter() - started

    def _open(self, num_tokens: int) -> int:
        self._seq += 1
        tokens = self._rng.integers(100, self.engine.limits.vocab_size - 100, num_tokens).tolist()
        params = SamplingParams(temperature=0.0, seed=1, max_tokens=1)
        self.engine.open(SequenceSpec(seq_id=self._seq, tokens=tokens, prompt_len=num_tokens, params=params))
        return self._seq

    def prefill(self, num_tokens: int) -> float:
        """Tokens per second of one prompt."""
        seq = self._open(num_tokens)
        seconds = self._run([Work(seq, num_tokens)])
        self._run([], [seq])
        return num_tokens / seconds

    def decode(self, batch: int, num_steps: int) -> float:
        """Tokens per second of ``batch`` sequences from an empty context, as llama-bench's tg."""
        seqs = [self._open(1) for _ in range(batch)]
        self._run([Work(seq, 1) for seq in seqs])
        seconds = sum(self._run([Work(seq, 1) for seq in seqs]) for _ in range(num_steps))
        self._run([], seqs)
        return batch * num_steps / seconds


def theirs(bench: str, path: Path, threads: int) -> dict[str, float]:
    out = subprocess.run(
        [bench, "-m", str(path), "-t", str(threads), "-p", "128,512", "-n", "128", "-r", "1", "-o", "json"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return {(f"prefill {r['n_prompt']}" if r["n_prompt"] else "decode 1"): r["avg_ts"] for r in json.loads(out.stdout)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    bench, path = os.environ.get("LLAMA_BENCH", ""), resolve(args.model)
    ours = Ours(path, args.threads)
    samples: dict[str, list[tuple[float, float]]] = {}
    for round_number in range(args.rounds):
        mine = {"prefill 128": ours.prefill(128), "prefill 512": ours.prefill(512), "decode 1": ours.decode(1, 128)}
        mine |= {f"decode {batch}": ours.decode(batch, 32) for batch in (4, 16)}
        other = theirs(bench, path, args.threads) if bench else {}
        for name, speed in mine.items():
            samples.setdefault(name, []).append((speed, other.get(name, float("nan"))))
        sys.stderr.write(f"\rround {round_number + 1} of {args.rounds}")
    sys.stderr.write("\n")
    table: dict[str, Any] = {}
    for name, pairs in samples.items():
        a, b = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratios = sorted(x / y for x, y in pairs)
        table[name] = {"ours": round(a, 1), "llama.cpp": round(b, 1), "ratio": round(statistics.median(ratios), 3)}
        table[name] |= {"ratio_low": round(ratios[0], 3), "ratio_high": round(ratios[-1], 3)}
        sys.stdout.write(f"{name:<12} ours {a:8.1f}  llama.cpp {b:8.1f} tok/s  ratio {table[name]['ratio']:.2f}\n")
    result = {"model": path.name, "threads": args.threads, "rounds": args.rounds, "tokens_per_s": table}
    sys.stdout.write(f"written: {save('compare-' + args.model, result).name}\n")
    ours.engine.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
