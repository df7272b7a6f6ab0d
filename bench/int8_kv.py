"""Keys and values as int8 beside f16: how far the answers move, and the speed at depth.

    python -m bench.int8_kv [--model smollm2] [--rounds 9] [--depths 128,1024,4096]

KL(f16 || int8) and the agreement of the most likely ids at every position of the conformance text (tests/golden/text);
then one decoding step at several depths, both kinds interleaved, the median of a round's steps and the ratio of rounds.
Writes bench/results/int8-kv-MODEL.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from ai_engine.data.models import resolve
from ai_engine.ports.runtime import SequenceSpec, StepPlan, Work
from ai_engine.ports.sampling import SamplingParams
from ai_engine.runtime.engine import Engine
from ai_engine.runtime.inspect import teacher_forced_logits
from bench.machine import save
from tests.golden import goldens
from tests.golden.engine import engine_of
from tests.golden.reference import kl_divergence, top1

KINDS = ("f16", "int8")
STEPS = 16


def accuracy(path: Path, model: str, threads: int) -> dict[str, Any]:
    """Over every document of the model's golden."""
    kl, same = [], []
    with ExitStack() as stack:
        options = {"threads": threads, "max_context": 1024, "max_step_tokens": 256, "max_seqs": 128}
        engines = [stack.enter_context(engine_of(path, prefix_cache=False, kv_type=kind, **options)) for kind in KINDS]
        for document in goldens.load(model).documents:
            exact, got = (teacher_forced_logits(engine, document.ids, 256) for engine in engines)
            for first in range(0, len(exact), 16):
                kl.append(kl_divergence(exact[first : first + 16], got[first : first + 16]))
            same.append(top1(exact) == top1(got))
        sizes = [engine.plan.kv_bytes_per_token for engine in engines]
    divergence = np.concatenate(kl)
    return {
        "positions": int(divergence.size),
        "kl_mean": float(divergence.mean()),
        "kl_p99": float(np.percentile(divergence, 99)),
        "top1_agreement": float(np.concatenate(same).mean()),
        "bytes_per_token": dict(zip(KINDS, sizes, strict=True)),
    }


def step_seconds(engine: Engine, seq_id: int, number: int) -> float:
    started = time.perf_counter()
    engine.step(StepPlan(number, [Work(seq_id, 1)]))
    return time.perf_counter() - started


def speed(path: Path, depths: list[int], rounds: int, threads: int) -> dict[str, Any]:
    """Milliseconds of one decoding step at each depth."""
    longest = max(depths) + (rounds + 1) * STEPS + 8
    table: dict[str, Any] = {}
    with ExitStack() as stack:
        engines = [
            stack.enter_context(
                engine_of(
                    path, threads=threads, kv_type=kind, max_context=longest, prefix_cache=False, kv_memory=1 << 30
                )
            )
            for kind in KINDS
        ]
        for seq_id, depth in enumerate(depths, 1):
            tokens = np.random.default_rng(depth).integers(100, 40_000, depth).tolist()
            params = SamplingParams(temperature=0.0, seed=1, max_tokens=longest)
            for engine in engines:
                engine.open(SequenceSpec(seq_id=seq_id, tokens=tokens, prompt_len=depth, params=params))
                engine.step(StepPlan(0, [Work(seq_id, depth)]))
            times: list[list[float]] = []
            for number in range(rounds):
                times.append(
                    [statistics.median(step_seconds(e, seq_id, number) for _ in range(STEPS)) for e in engines]
                )
            for engine in engines:
                engine.step(StepPlan(0, [], [seq_id]))
            ratios = sorted(f16 / int8 for f16, int8 in times)
            row = {kind: round(1000 * statistics.median(column), 3) for kind, column in zip(KINDS, zip(*times, strict=True), strict=True)}  # fmt: skip # noqa: E501
            table[str(depth)] = {"step_ms": row, "speed_up": round(statistics.median(ratios), 3)}
            table[str(depth)] |= {"low": round(ratios[0], 3), "high": round(ratios[-1], 3)}
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", choices=goldens.MODELS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--depths", default="128,1024,4096")
    args = parser.parse_args()
    path = resolve(args.model)
    found = accuracy(path, args.model, args.threads)
    sizes = found["bytes_per_token"]
    sys.stdout.write(
        f"{found['positions']} positions: KL(f16 || int8) mean {found['kl_mean']:.2e}, p99 {found['kl_p99']:.2e}, "
        f"same most likely id {found['top1_agreement']:.2%}; {sizes['f16']} -> {sizes['int8']} bytes a token\n"
    )
    table = speed(path, [int(d) for d in args.depths.split(",")], args.rounds, args.threads)
    for depth, row in table.items():
        times = ", ".join(f"{kind} {ms:.2f} ms" for kind, ms in row["step_ms"].items())
        sys.stdout.write(f"depth {depth:>5}: {times}; int8 {row['speed_up']:.2f} x ({row['low']} to {row['high']})\n")
    result = {"model": path.name, "threads": args.threads, "rounds": args.rounds, "accuracy": found, "decode": table}
    sys.stdout.write(f"written: {save('int8-kv-' + args.model, result).name}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
