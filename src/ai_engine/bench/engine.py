"""`bench model`: prefill, decode and batches of a loaded model, driven a step at a time in this process.

Owns `Driver`, which compare.py uses too, and the share of the memory limit: the bytes that a decode step must read
(weights by the catalog's cost of the program's calls, and keys and values at that depth) at the read bandwidth that was
measured between the same rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path
from typing import Any

import numpy as np

from ai_engine import app
from ai_engine.bench.ceilings import QUICK_BYTES, READ_BYTES, Prober
from ai_engine.bench.host import LoadWatch
from ai_engine.bench.report import Deadline, Report, file_name
from ai_engine.bench.stats import median_interval
from ai_engine.config import EngineConfig
from ai_engine.data.models import open_model
from ai_engine.hardware.machine import read_machine
from ai_engine.kernels import catalog
from ai_engine.ports.progress import no_progress
from ai_engine.ports.runtime import SequenceSpec, StepPlan, Work
from ai_engine.ports.sampling import SamplingParams
from ai_engine.progress import ProgressBar
from ai_engine.runtime.engine import Engine

PREFILLS = (128, 512)
BATCHES = (1, 4, 16)
DEPTHS = (0, 512, 2048)
START = 16
"""Tokens in the cache before a decode at depth 0 begins."""


class Driver:
    """The engine in this process, driven as the scheduler would: one plan a step, whole prompts. Close it."""

    def __init__(self, path: Path, threads: int, *, max_context: int = 0, quiet: bool = True) -> None:
        with contextlib.closing(open_model(path)) as file:
            config = EngineConfig(threads=threads, prefix_cache=False, max_seqs=16, max_context=max_context)
            progress = no_progress if quiet else ProgressBar()
            runtime = app.build_runtime(file, config, progress, app.NoTelemetry(), frozenset())
        assert isinstance(runtime, Engine)
        self.engine = runtime
        self._rng = np.random.default_rng(0)
        self._step = self._seq = 0

    def _run(self, work: list[Work], release: list[int] | None = None) -> float:
        self._step += 1
        started = time.perf_counter()
        self.engine.step(StepPlan(self._step, work, release or []))
        return time.perf_counter() - started

    def _open(self, num_tokens: int, max_tokens: int = 1) -> int:
        self._seq += 1
        tokens = self._rng.integers(100, self.engine.limits.vocab_size - 100, num_tokens).tolist()
        params = SamplingParams(temperature=0.0, seed=1, max_tokens=max_tokens)
        self.engine.open(SequenceSpec(seq_id=self._seq, tokens=tokens, prompt_len=num_tokens, params=params))
        return self._seq

    def prefill(self, num_tokens: int) -> float:
        """Tokens per second of one prompt."""
        seq = self._open(num_tokens)
        seconds = self._run([Work(seq, num_tokens)])
        self._run([], [seq])
        return num_tokens / seconds

    def decode(self, batch: int, num_steps: int, depth: int = START) -> float:
        """Tokens per second of ``batch`` sequences together, each with ``depth`` tokens before the first step."""
        seqs = [self._open(depth, num_steps + 1) for _ in range(batch)]
        for seq in seqs:
            self._run([Work(seq, depth)])
        seconds = sum(self._run([Work(seq, 1) for seq in seqs]) for _ in range(num_steps))
        self._run([], seqs)
        return batch * num_steps / seconds

    def step_bytes(self, batch: int, depth: int) -> int:
        """Bytes of weights, keys and values that a decode step of ``batch`` sequences must read."""
        plan = self.engine.plan
        specs = {name: spec for name, (spec, _) in self.engine.resources.weights.items()}
        shape = catalog.StepShape(tokens=batch, logit_rows=batch, sequences=((1, depth + 1),) * batch)
        costs = [catalog.cost(call, specs, plan.kv_shape, shape) for call in plan.lowered.calls]
        return sum(cost.weight_bytes + cost.kv_bytes for cost in costs)

    def fits(self, batch: int, depth: int) -> bool:
        limits, budget = self.engine.limits, self.engine.budget()
        room = min(limits.max_context, budget.total * budget.page_tokens // batch - budget.page_tokens)
        return depth <= room and batch <= limits.max_seqs

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def share_of_limit(tokens_per_s: float, batch: int, step_bytes: int, read_gb_s: float) -> float:
    """Of the steps a second that memory would allow."""
    return tokens_per_s / batch * step_bytes / (read_gb_s * 1e9)


def run(args: argparse.Namespace) -> int:
    report = Report(f"model-{file_name(args.model)}", args.out, args.json)
    deadline, watch = Deadline(args.minutes), LoadWatch()
    path = app.find_model(args.model, offline=False, progress=ProgressBar())
    counts = [int(n) for n in args.thread_counts.split(",")] if args.thread_counts else [
        args.threads or read_machine().default_threads
    ]  # fmt: skip
    rounds, steps = (2, 8) if args.quick else (args.rounds or 7, args.steps)
    result: dict[str, Any] = {"model": path.name, "file_bytes": path.stat().st_size, "quick": args.quick, "threads": {}}
    for threads in counts:
        measured = measure(path, threads, rounds, steps, deadline, decode_only=args.decode_only, quick=args.quick)
        result["threads"][threads] = measured
        rows = [
            [name, row["tokens_per_s"].text(), row.get("step_mb"), row["share"].text() if "share" in row else None]
            for name, row in measured["cases"].items()
        ]
        report.table(
            f"{path.name}, {threads} threads, {measured['rounds']} rounds; limit {measured['read_gb_s'].text()} GB/s",
            ["case", "tokens/s", "MB a step", "share of the limit"],
            rows,
        )
        if deadline.passed:
            break
    report.finish(result | {"load": watch.report()})
    return 0


def measure(
    path: Path, threads: int, rounds: int, steps: int, deadline: Deadline, *, decode_only: bool, quick: bool
) -> dict[str, Any]:
    """Medians with intervals of every case at one number of threads; a read pass of the limit after each round."""
    progress = ProgressBar()
    speeds: dict[str, list[float]] = {}
    reads: list[float] = []
    shapes: dict[str, tuple[int, int]] = {}
    with Driver(path, threads, quiet=False) as driver, Prober(threads, QUICK_BYTES if quick else READ_BYTES) as prober:
        for batch in BATCHES[: 1 if decode_only else None]:
            for depth in DEPTHS[: 1 if decode_only or quick else None]:
                if driver.fits(batch, depth + steps + START):
                    shapes[f"decode {batch} @ {depth}"] = (batch, max(depth, START))
        prefills = [n for n in PREFILLS if not decode_only and driver.fits(1, n)]
        done = 0
        while done < rounds and not (done and deadline.passed):
            for num in prefills:
                speeds.setdefault(f"prefill {num}", []).append(driver.prefill(num))
            for name, (batch, depth) in shapes.items():
                speeds.setdefault(name, []).append(driver.decode(batch, steps, depth))
            reads.append(prober.read_gb_s())
            done += 1
            progress("model", done / rounds)
        step_bytes = {n: driver.step_bytes(batch, depth + steps // 2) for n, (batch, depth) in shapes.items()}
    limit = median_interval(reads)
    cases: dict[str, dict[str, Any]] = {}
    for name, values in speeds.items():
        cases[name] = {"tokens_per_s": median_interval(values), "rounds": values}
        if name in shapes:
            shares = [share_of_limit(v, shapes[name][0], step_bytes[name], limit.value) for v in values]
            cases[name] |= {"step_mb": step_bytes[name] / 1e6, "share": median_interval(shares)}
    return {"rounds": done, "read_gb_s": limit, "reads": reads, "cases": cases}
