"""The approximate output head (--approximate-head): how often its answer differs from the exact head's, and its speed.

    python -m bench.approximate_head [--model smollm2] [--positions 100000] [--rounds 9]

At every position of a long text the most likely token is asked for twice in the same step, screened and exact; at every
fifth window also a seeded draw at temperature 1 and top_k 32. Then decoding steps at batch 1 and 8 with and without the
flag, interleaved: medians and the ratio of rounds. The text: the conformance documents, this project's pages and the
sources of Python's standard library, in windows of 512 tokens. Writes bench/results/approximate-head-MODEL.json.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from ai_engine.data.models import resolve
from ai_engine.ports.kernels import I32, StepBatch
from ai_engine.ports.runtime import SequenceSpec, StepPlan, Work
from ai_engine.ports.sampling import SamplingParams
from ai_engine.runtime.engine import Engine
from bench.machine import save
from tests.conformance.programs import sampling
from tests.golden.engine import engine_of, tokenize

ROOT = Path(__file__).resolve().parent.parent
WINDOW, STEP_TOKENS = 512, 128
STEPS = 16


def texts() -> Iterator[Path]:
    yield from sorted((ROOT / "tests" / "golden" / "text").glob("*.txt"))
    yield from sorted([ROOT / "LICENSE", ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    yield from sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def some_ids(path: Path, count: int) -> list[int]:
    ids: list[int] = []
    for source in texts():
        ids += tokenize(path, source.read_text(encoding="utf-8", errors="replace"), False)
        if len(ids) >= count:
            break
    return ids[: -(-count // WINDOW) * WINDOW]


def both_answers(engine: Engine, window: list[int], first: int, **fields: Any) -> tuple[I32, I32]:
    """Tokens after each of STEP_TOKENS tokens of a window, screened and exact: one step, each row listed twice."""
    end = min(first + STEP_TOKENS, len(window))
    rows = np.arange(end - first, dtype=np.int32)
    pages = -(-end // engine.plan.kv_shape.page_tokens)
    wants_logprobs = np.repeat([-1, 0], len(rows)).astype(np.int32)  # only an exact row can have them
    sample = sampling(2 * len(rows), engine.limits.vocab_size, num_top=wants_logprobs, **fields)
    sample.position = sample.seed = np.tile(first + rows, 2).astype(np.int32)
    sample.seed = sample.seed.astype(np.uint64)
    batch = StepBatch(
        token_ids=np.array(window[first:end], np.int32),
        positions=np.arange(first, end, dtype=np.int32),
        seq_start=np.array([0, end - first], np.int32),
        context_len=np.array([end], np.int32),
        page_table=np.arange(pages, dtype=np.int32)[None],
        logit_rows=np.tile(rows, 2),
        sample=sample,
    )
    tokens = engine.kernels.run(engine.program, batch).token
    return tokens[: len(rows)].copy(), tokens[len(rows) :].copy()


def disagreement(path: Path, count: int, threads: int) -> dict[str, Any]:
    ids = some_ids(path, count)
    found = {"greedy": [0, 0], "top_k 32": [0, 0]}  # positions, differences
    with engine_of(
        path, threads=threads, approximate_head=True, max_context=WINDOW, max_step_tokens=2 * STEP_TOKENS,
        max_seqs=STEP_TOKENS, kv_memory=64 << 20,
    ) as engine:  # fmt: skip
        for start in range(0, len(ids), WINDOW):
            kinds: dict[str, dict[str, Any]] = {"greedy": {}}
            if start // WINDOW % 5 == 0:
                kinds["top_k 32"] = {"temperature": 1.0, "top_k": 32}
            for first in range(0, WINDOW, STEP_TOKENS):
                for kind, fields in kinds.items():
                    screened, exact = both_answers(engine, ids[start : start + WINDOW], first, **fields)
                    found[kind][0] += len(exact)
                    found[kind][1] += int((screened != exact).sum())
            sys.stderr.write(f"\r{found}")
    sys.stderr.write("\n")
    digest = hashlib.sha256(np.array(ids, np.int32).tobytes()).hexdigest()
    rates = {kind: {"positions": n, "different": d, "share": d / n} for kind, (n, d) in found.items()}
    return {"ids_sha256": digest, **rates}


def step_seconds(engine: Engine, seqs: list[int]) -> float:
    started = time.perf_counter()
    engine.step(StepPlan(0, [Work(seq_id, 1) for seq_id in seqs]))
    return time.perf_counter() - started


def speed(path: Path, rounds: int, threads: int) -> dict[str, Any]:
    table: dict[str, Any] = {}
    with ExitStack() as stack:
        engines = [
            stack.enter_context(
                engine_of(path, threads=threads, approximate_head=flag, max_context=1024, prefix_cache=False)
            )
            for flag in (False, True)
        ]
        for size in (1, 8):
            seqs = list(range(1, size + 1))
            params = SamplingParams(temperature=0.0, seed=1, max_tokens=1000)
            for engine in engines:
                for seq_id in seqs:
                    engine.open(SequenceSpec(seq_id=seq_id, tokens=[100 + seq_id] * 8, prompt_len=8, params=params))
                engine.step(StepPlan(0, [Work(seq_id, 8) for seq_id in seqs]))
            times = [
                [statistics.median(step_seconds(engine, seqs) for _ in range(STEPS)) for engine in engines]
                for _ in range(rounds)
            ]
            for engine in engines:
                engine.step(StepPlan(0, [], seqs))
            ratios = sorted(exact / screened for exact, screened in times)
            medians = [round(1000 * statistics.median(column), 3) for column in zip(*times, strict=True)]
            table[f"batch {size}"] = {
                "exact_ms": medians[0], "approximate_ms": medians[1], "speed_up": round(statistics.median(ratios), 3),
                "low": round(ratios[0], 3), "high": round(ratios[-1], 3),
            }  # fmt: skip
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--positions", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    path = resolve(args.model)
    table = speed(path, args.rounds, args.threads)
    for name, row in table.items():
        sys.stdout.write(
            f"{name}: {row['exact_ms']} -> {row['approximate_ms']} ms a step, {row['speed_up']} x "
            f"({row['low']} to {row['high']})\n"
        )
    found = disagreement(path, args.positions, args.threads)
    for kind in ("greedy", "top_k 32"):
        row = found[kind]
        sys.stdout.write(f"{kind}: {row['different']} of {row['positions']} positions differ ({row['share']:.4%})\n")
    result = {"model": path.name, "threads": args.threads, "rounds": args.rounds, "disagreement": found, "step": table}
    sys.stdout.write(f"written: {save('approximate-head-' + args.model, result).name}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
