"""`bench compare`: our engine beside llama.cpp on the same file with the same threads, A B A B, ratios with intervals.

Owns the engine comparison (in process beside llama-bench and llama-batched-bench) and the reports of both; the server
comparison's rounds are versus.py's. Nothing is compared across runs: the two sides of a round see the same machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ai_engine import app
from ai_engine.bench import llamacpp, versus
from ai_engine.bench.ceilings import QUICK_BYTES, READ_BYTES, Prober
from ai_engine.bench.engine import START, Driver, share_of_limit
from ai_engine.bench.host import LoadWatch
from ai_engine.bench.llamacpp import LlamaCpp
from ai_engine.bench.report import Deadline, Report, file_name
from ai_engine.bench.stats import Interval, median, median_interval, ratio_of_rounds
from ai_engine.bench.svg import Bar, bars
from ai_engine.hardware.machine import read_machine
from ai_engine.progress import ProgressBar

BATCH, BATCH_STEPS = 16, 32
VOID_BELOW_GB_S = 20.0
MUSTS: dict[str, dict[str, float]] = {
    "Q4_1": {"decode 1": 1.9, "prefill 512": 3.9, "decode 16": 4.0},
    "Q4_0": {"decode 1": 1.7, "prefill 512": 2.0, "decode 16": 2.1},
    "Q4_K_M": {"decode 1": 1.45, "prefill 512": 2.0, "decode 16": 2.0},
}
"""The ratios that are asked for, by a mark in the file's name."""


def asked_for(model: Path, musts: Mapping[str, dict[str, float]] = MUSTS) -> dict[str, float]:
    """The row of ``musts`` whose mark comes last in the file's name (a requantised file's name has both)."""
    name = model.name.upper()
    last = max(musts, key=name.rfind)
    return musts[last] if last in name else {}


def run(args: argparse.Namespace) -> int:
    deadline, watch, progress = Deadline(args.minutes), LoadWatch(), ProgressBar()
    model = app.find_model(args.model, offline=False, progress=progress)
    llama = llamacpp.find(args.llama_bin, model, progress)
    label = args.model
    source = model
    if args.requantize:
        model = llamacpp.requantised(llama, model, args.requantize)
        label = f"{file_name(args.model)}-{args.requantize}"
    report = Report(f"compare-{args.what}-{file_name(label)}", args.out, args.json)
    threads = args.threads or read_machine().default_threads
    facts: dict[str, Any] = {
        "model": model.name, "sha256": llamacpp.digest(model), "made_from": source.name if model != source else None,
        "threads": threads, "quick": args.quick, "llama_cpp": llama.version(),
    }  # fmt: skip
    report.say(
        f"{model.name} (sha256 {facts['sha256'][:16]}...), {threads} threads, beside llama.cpp {facts['llama_cpp']}"
    )
    if args.what == "engine":
        result = engine_rounds(report, llama, model, threads, args, deadline)
    else:
        result = versus.run(report, llama, model, threads, args, deadline, watch)
    report.finish(facts | result | {"load": watch.report()})
    return 0


def engine_rounds(
    report: Report, llama: LlamaCpp, model: Path, threads: int, args: argparse.Namespace, deadline: Deadline
) -> dict[str, Any]:
    """Rounds of ours, theirs, read limit; the order of the two sides alternates (A B, B A)."""
    rounds, generate, prompt = (2, 16, 128) if args.quick else (args.rounds or 7, 128, 512)
    steps = 8 if args.quick else BATCH_STEPS
    progress = ProgressBar()
    sides: dict[str, dict[str, list[float]]] = {"ours": {}, "llama.cpp": {}}
    reads: list[float] = []
    with Driver(model, threads) as driver, Prober(threads, QUICK_BYTES if args.quick else READ_BYTES) as prober:

        def ours() -> None:
            mine = sides["ours"]
            mine.setdefault(f"prefill {prompt}", []).append(driver.prefill(prompt))
            mine.setdefault("decode 1", []).append(driver.decode(1, generate))
            mine.setdefault(f"decode {BATCH}", []).append(driver.decode(BATCH, steps))

        def theirs() -> None:
            other = sides["llama.cpp"]
            bound = min(300.0, deadline.left_s + 60)
            single = llama.bench(model, threads, prompt=prompt, generate=generate, timeout_s=bound)
            other.setdefault(f"prefill {prompt}", []).append(single["prefill"])
            other.setdefault("decode 1", []).append(single["decode"])
            batched = llama.batched(model, threads, BATCH, steps, START, timeout_s=bound)
            other.setdefault(f"decode {BATCH}", []).append(batched)

        done = 0
        while done < rounds and not (done and deadline.passed):
            for side in (ours, theirs) if done % 2 == 0 else (theirs, ours):
                side()
            reads.append(prober.read_gb_s(3 if args.quick else 20))
            done += 1
            progress("compare", done / rounds)
        step_bytes = {batch: driver.step_bytes(batch, START + generate // 2) for batch in (1, BATCH)}
    limit = median_interval(reads)
    shares = {
        side: median_interval([share_of_limit(v, 1, step_bytes[1], limit.value) for v in by["decode 1"]])
        for side, by in sides.items()
    }
    musts = {} if args.quick else asked_for(model)
    table = {
        name: {
            "ours": median(values),
            "llama.cpp": median(sides["llama.cpp"][name]),
            "ratio": ratio_of_rounds(values, sides["llama.cpp"][name]),
            "must": musts.get(name),
        }
        for name, values in sides["ours"].items()
    }
    show_ratios(report, f"tokens/s, {done} rounds", table)
    note = "" if limit.value >= VOID_BELOW_GB_S else f" (below {VOID_BELOW_GB_S:g} GB/s: the share does not count here)"
    report.say(
        f"memory limit {limit.text()} GB/s{note}; {step_bytes[1] / 1e6:.0f} MB a token; decode's share of it: "
        f"ours {shares['ours'].text()}, llama.cpp {shares['llama.cpp'].text()}"
    )
    return {
        "rounds": done, "tokens_per_s": table, "samples": sides, "read_gb_s": limit, "reads": reads,
        "bytes_per_token": step_bytes[1], "share_of_limit": shares, "share_counts": limit.value >= VOID_BELOW_GB_S,
    }  # fmt: skip


def show_ratios(report: Report, title: str, table: dict[str, dict[str, Any]]) -> None:
    """The table and the plot of ratios; rows hold ours, llama.cpp, ratio (an Interval) and must."""
    rows = []
    for name, row in table.items():
        ratio, must = row["ratio"], row.get("must")
        met = None if must is None else ("met" if meets(ratio, must, row.get("at_most", False)) else "MISSED")
        rows.append([name, row["ours"], row["llama.cpp"], ratio.text(), must, met])
    report.table(title, ["case", "ours", "llama.cpp", "ratio [95 %]", "must", ""], rows)
    shown = [
        Bar(name, row["ratio"].value, row["ratio"].low, row["ratio"].high, row.get("must"))
        for name, row in table.items()
    ]
    report.plot("ratios", bars("ours / llama.cpp", "ratio, 95 % interval; the mark is what is asked for", shown))


def meets(ratio: Interval, must: float, at_most: bool) -> bool:
    return ratio.value <= must if at_most else ratio.value >= must
