"""`bench tune`: measures the variants of each kernel and records which are faster here; `--show` prints what is used.

Owns what is measured and when a variant has won. What variants there are, and the table, are the registry's
(kernels/cpu/registry.py); cases are `bench kernels`'s. All variants of a case run once a round, in a new order each
time, with the default twice: a variant is chosen only where it beats the default by more than MARGIN and by more than
the default differs from itself, with the whole interval.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from ai_engine import app
from ai_engine.bench.host import LoadWatch
from ai_engine.bench.kernels import STREAMED_BYTES, Case, Maker, Spans
from ai_engine.bench.report import Deadline, Report
from ai_engine.bench.stats import ratio_of_rounds
from ai_engine.config import EngineConfig
from ai_engine.hardware.machine import read_machine
from ai_engine.kernels.cpu import registry
from ai_engine.kernels.cpu.backend import CpuKernels, CpuProgram
from ai_engine.kernels.cpu.registry import Entry, Key, Registry
from ai_engine.ports.errors import ConfigError
from ai_engine.ports.model import DType
from ai_engine.progress import ProgressBar

MARGIN = 0.02
AGAIN = "default again"
TOKENS = {"few": 1, "some": 16, "many": 128}
SIZES = {"layer": (1536, 1536), "head": (768, 16 * 768)}  # columns, rows
HEADS = {"narrow": (9, 3, 64), "wide": (4, 1, 256)}
SPANS: dict[str, Spans] = {"few": [(1, 2048)], "some": [(1, 2048)] * 8, "many": [(128, 2048)]}


def make_case(maker: Maker, key: Key) -> Case:
    if key.op == "matmul":
        return maker.matmul(DType(key.format), TOKENS[key.rows], *SIZES[key.shape])
    return maker.attention(*HEADS[key.shape], "", SPANS[key.rows], "int8" if key.format == "int8" else "f16")


def measure(kernels: CpuKernels, case: Case, key: Key, rounds: int, rng: np.random.Generator) -> dict[str, list[float]]:
    """Seconds of each round by variant; each runs once unmeasured first."""
    program = case.program
    assert isinstance(program, CpuProgram)
    named = registry.variants(key.op, key.rows)
    programs = {}
    for name, values in {**named, AGAIN: named["default"]}.items():
        kernels.choices = registry.Forced(values)
        programs[name] = kernels.compile(program.calls, program.resources)
        kernels.run(programs[name], case.batch)
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name in rng.permutation(list(programs)).tolist():
            started = time.perf_counter()
            kernels.run(programs[name], case.batch)
            seconds[name].append(time.perf_counter() - started)
    return seconds


def choose(key: Key, seconds: dict[str, list[float]], when: str) -> Entry:
    """The variant of the best median of the rounds' ratios to the default, if it has surely won; else the default."""
    default = seconds["default"]
    noise = ratio_of_rounds(default, seconds[AGAIN])
    gains = {name: ratio_of_rounds(default, each) for name, each in seconds.items() if name not in ("default", AGAIN)}
    best = max(gains, key=lambda name: gains[name].value)
    gain = gains[best]
    has_won = gain.low > max(1 + MARGIN, noise.high, 1 / noise.low)
    return Entry(
        key=key, variant=best if has_won else "default", best=best, gain=(gain.value, gain.low, gain.high),
        noise=(noise.value, noise.low, noise.high), rounds=len(default), when=when,
    )  # fmt: skip


def why(entry: Entry | None) -> str:
    """The figures behind a choice."""
    if entry is None:
        return "not measured"
    gain, noise = ("{:.3f} [{:.3f}, {:.3f}]".format(*numbers) for numbers in (entry.gain, entry.noise))
    lead = "" if entry.variant == entry.best else f"{entry.best} did not win: "
    return f"{lead}{gain} x the default, itself {noise}; {entry.rounds} rounds, {entry.when}"


def show(report: Report, choices: Registry, machine: str, keys: list[Key]) -> None:
    measured = [key for key in keys if key in choices.entries]
    report.say(machine)
    for op, values in registry.DEFAULTS.items():
        report.say(f"default of {op}: " + ", ".join(f"{name}={value}" for name, value in values.items()))
    if measured:
        entries = [choices.entries[key] for key in measured]
        report.table(
            f"measured, of {len(keys)} kernels", ["kernel", "variant", "why"],
            [[" ".join(entry.key), entry.variant, why(entry)] for entry in entries],
        )  # fmt: skip
    if len(measured) < len(keys):
        report.say(f"{len(keys) - len(measured)} kernels: default, {why(None)}")


def wanted(types: str) -> list[Key]:
    """The keys of these weight formats, or all. Heads have no steps of many rows."""
    names = types.split(",") if types else [*registry.FORMATS["matmul"], *registry.FORMATS["attention"]]
    known = {name for formats in registry.FORMATS.values() for name in formats}
    for name in names:
        if name not in known:
            raise ConfigError(f"--types names {name!r}; known are {', '.join(sorted(known))}", param="types")
    return [key for key in registry.every_key() if key.format in names and (key.shape, key.rows) != ("head", "many")]


def run(args: argparse.Namespace) -> int:
    report, deadline, watch = Report("tune", args.out, args.json), Deadline(args.minutes), LoadWatch()
    machine = read_machine()
    threads = args.threads or machine.default_threads
    keys = wanted(args.types)
    kernels = app.build_kernels(EngineConfig(threads=threads, cpu=args.cpu))
    assert isinstance(kernels, CpuKernels)
    here = f"{kernels.name} on {registry.machine_text(machine, threads)}"
    try:
        choices = kernels.choices
        if not args.show:
            choices = Registry([*choices.entries.values(), *_measure_all(kernels, keys, args, deadline)])
            if not args.quick:
                _store(report, choices, kernels, threads)
    finally:
        kernels.close()
    show(report, choices, here, keys)
    entries = [choices.entries[key] for key in keys if key in choices.entries]
    report.finish({
        "target": kernels.name, "threads": threads, "quick": args.quick, "load": watch.report(),
        "variants": [{"kernel": " ".join(e.key), "variant": e.variant, "best": e.best, "gain": e.gain, "noise": e.noise,
                      "rounds": e.rounds, "when": e.when} for e in entries],
    })  # fmt: skip
    return 0


def _measure_all(kernels: CpuKernels, keys: list[Key], args: argparse.Namespace, deadline: Deadline) -> list[Entry]:
    kernels.prepare(ProgressBar())
    progress, rng, when = ProgressBar(), np.random.default_rng(0), time.strftime("%Y-%m-%d")
    found: list[Entry] = []
    for done, key in enumerate(keys):
        if found and deadline.passed:
            break
        maker = Maker(kernels, STREAMED_BYTES // 8 if args.quick else STREAMED_BYTES)
        try:
            case = make_case(maker, key)
            seconds = measure(kernels, case, key, 3 if args.quick else args.rounds or 15, rng)
        finally:
            maker.close()
        found.append(choose(key, seconds, when))
        progress("variants", (done + 1) / len(keys))
    return found


def _store(report: Report, choices: Registry, kernels: CpuKernels, threads: int) -> None:
    try:
        path = registry.store(choices, kernels.target, read_machine(), threads)
    except OSError as error:
        raise ConfigError(f"the kernel cache cannot be written: {error}; set AI_ENGINE_CACHE", param="") from None
    report.say(f"written: {path}; the next start uses it")
