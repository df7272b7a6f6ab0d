"""The roofline of docs/kernels.md: draws docs/roofline.svg from bench/results/roofline.json; --measure makes that anew.

    python -m bench.roofline [--measure] [--threads N] [--rounds N]

On a quiet machine `ai-engine bench kernels --matmul-only --out DIR` gives the same in wall time. This one serves where
others use the cores: CPU time of our threads, median of the rounds, all cases' rounds interleaved.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from ai_engine import app
from ai_engine.bench.ceilings import Prober
from ai_engine.bench.kernels import ROWS, STREAMED_BYTES, Maker
from ai_engine.bench.stats import median
from ai_engine.bench.svg import roofline
from ai_engine.config import EngineConfig
from ai_engine.hardware.machine import read_machine
from ai_engine.ports.model import DType
from ai_engine.progress import ProgressBar
from bench.machine import RESULTS, save

PLOT = RESULTS.parents[1] / "docs" / "roofline.svg"
TYPES = ("Q4_1", "Q8_0", "Q3_K")
TOKENS = (1, 16, 512)


def draw(result: dict[str, Any]) -> str:
    """The SVG of what `measure` found."""
    points = [
        (f"{case['type']} x {case['tokens']}", case["ops_per_byte"], 2 * case["gmac_s"])
        for case in result["cases"] if case["type"] in TYPES and case["tokens"] in TOKENS
    ]  # fmt: skip
    return roofline(result["read_gb_s"], result["fma_gflop_s"], result["dot_gop_s"], points)


def measure(threads: int, rounds: int) -> dict[str, Any]:
    """Rates of every weight type at `ROWS` and the ceilings, in CPU time."""
    kernels = app.build_kernels(EngineConfig(threads=threads))
    maker, progress = Maker(kernels, STREAMED_BYTES), ProgressBar()
    ceilings: dict[str, list[float]] = {"read_gb_s": [], "fma_gflop_s": [], "dot_gop_s": []}

    def clock() -> float:
        return time.process_time() / threads

    try:
        kernels.prepare(progress)
        cases = [maker.matmul(dtype, rows) for dtype in DType for rows in ROWS]
        with Prober(threads, clock=clock) as prober:
            for done in range(rounds):
                for case in cases:
                    started = clock()
                    kernels.run(case.program, case.batch)
                    case.seconds.append(clock() - started)
                for name, values in ceilings.items():
                    values.append(getattr(prober, name)(1))
                progress("roofline", (done + 1) / rounds)
    finally:
        maker.close()
        kernels.close()
    rows = []
    for case in cases:
        seconds = median(case.seconds)
        rows.append({
            "type": case.label, "tokens": case.rows, "gb_s": round(case.nbytes / seconds / 1e9, 2),
            "gmac_s": round(case.flops / 2 / seconds / 1e9, 1), "ops_per_byte": round(case.flops / case.nbytes, 2),
        })  # fmt: skip
    return {
        "method": f"CPU time of {threads} threads, median of {rounds} interleaved rounds; {STREAMED_BYTES >> 20} MB of "
        "weights up to 16 rows, four matrices of 1536 x 1536 beyond",
        "target": kernels.name, "threads": threads, **{name: round(median(v), 1) for name, v in ceilings.items()},
        "cases": rows,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="make bench/results/roofline.json anew")
    parser.add_argument("--threads", type=int, default=0, help="default: cores in the affinity mask and cgroup quota")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    if args.measure:
        save("roofline", measure(args.threads or read_machine().default_threads, max(1, args.rounds)))
    PLOT.write_text(draw(json.loads((RESULTS / "roofline.json").read_text(encoding="utf-8"))), encoding="utf-8")
    print(f"written: {PLOT}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
