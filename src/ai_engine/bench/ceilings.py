"""`bench machine`: what this machine can do at best, measured with kernels of our own kernel language.

Owns three loops (read memory, multiply-add f32, dot int8) and how a limit is taken from them. The figures are stored
through hardware/ceilings.py, from where anybody reads them with `load_ceilings()`.

The limit of reading is the median over rounds of each round's best of PASSES passes over at least 512 MB in 2 MB pages,
by wide loads with prefetch on pinned threads. Where the last-level cache is larger than that, part of it is cache:
`bytes_read` is in the result, and the same loop over smaller working sets is shown beside it.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ai_engine.bench.host import LoadWatch
from ai_engine.bench.report import Deadline, Report
from ai_engine.bench.stats import Interval, median_interval
from ai_engine.bench.svg import roofline
from ai_engine.hardware.arena import MappedArena
from ai_engine.hardware.ceilings import Ceilings, save_ceilings
from ai_engine.hardware.machine import read_machine
from ai_engine.hardware.team import NativeTeam
from ai_engine.kernels.cpu.executor import Harness
from ai_engine.kernels.cpu.lang import Kernel, kernel
from ai_engine.progress import ProgressBar

READ_BYTES = 512 << 20
QUICK_BYTES = 64 << 20
ITEM_BYTES = 1 << 20
PASSES = 20
ROUNDS = 7
CHAINS = 8
ARITHMETIC_CHAINS = 12
ARITHMETIC_STEPS = 1 << 16
ARITHMETIC_ITEMS = 16
WORKING_SETS = (1 << 20, 16 << 20, 128 << 20)
"""Of the same memory: at most all of it."""


@kernel(data="ptr", items="i64")
def ceiling_read(k: Kernel) -> None:
    """Sum of ``items`` blocks of ITEM_BYTES: eight accumulators, each line prefetched once, 4 KiB ahead."""
    n, total = k.lanes, k.var(k.i32(0, k.lanes))
    with k.work_items(k.arg.items) as item:
        base = k.arg.data + item * ITEM_BYTES
        sums = [k.var(k.i32(0, n)) for _ in range(CHAINS)]
        with k.loop(0, ITEM_BYTES, CHAINS * 4 * n) as at:
            for i, x in enumerate(sums):
                if 4 * n * i % 64 == 0:
                    k.prefetch(base + at + (4096 + 4 * n * i))
                x.v = x.v + k.load(base + at + 4 * n * i, "i32", n)
        for x in sums:
            total.v = total.v + x.v
    k.store(k.scratch, total.v)


@kernel(items="i64")
def ceiling_fma(k: Kernel) -> None:
    """ARITHMETIC_STEPS times ARITHMETIC_CHAINS independent multiply-adds of a vector, in registers."""
    n = k.lanes
    with k.work_items(k.arg.items) as item:
        sums = [k.var(k.f32(0, n) + k.splat(item.to_f32(), n)) for _ in range(ARITHMETIC_CHAINS)]
        scale = k.load(k.scratch, "f32", n)
        with k.loop(0, ARITHMETIC_STEPS):
            for x in sums:
                x.v = k.fma(x.v, scale, scale)
        for i, x in enumerate(sums):
            k.store(k.scratch + (64 + 4 * n * i), x.v)


@kernel(items="i64")
def ceiling_dot(k: Kernel) -> None:
    """The same with the machine's best u8 x s8 dot product (vpdpbusd, vpmaddubsw or sdot)."""
    n = k.lanes
    with k.work_items(k.arg.items) as item:
        sums = [k.var(k.i32(0, n) + k.splat(item.trunc("i32"), n)) for _ in range(ARITHMETIC_CHAINS)]
        a, b = k.load(k.scratch, "i8", 4 * n), k.load(k.scratch + 64, "i8", 4 * n)
        with k.loop(0, ARITHMETIC_STEPS):
            for x in sums:
                x.v = k.dot_u8s8(x.v, a, b, max_u=15)
            k.keep_order()
        for i, x in enumerate(sums):
            k.store(k.scratch + (128 + 4 * n * i), x.v)


class Prober:
    """The loops on one number of pinned threads, timed by ``clock``. Close it."""

    def __init__(self, threads: int, nbytes: int = READ_BYTES, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.threads, self.nbytes = threads, nbytes // ITEM_BYTES * ITEM_BYTES
        others = set(threading.enumerate())
        self._team = NativeTeam(threads)
        helpers = [thread.native_id for thread in threading.enumerate() if thread not in others]
        self._pinned = Pinned([0, *(number for number in helpers if number)])
        self._harness = Harness([ceiling_read, ceiling_fma, ceiling_dot], None, self._team)
        self._arena = MappedArena(self.nbytes + ITEM_BYTES)  # prefetches run past the end
        self._arena.data[:] = 1  # untouched pages would all be the one zero page

    @property
    def target(self) -> str:
        return self._harness.loaded.target.name

    @property
    def lanes(self) -> int:
        return self._harness.loaded.target.lanes

    def _seconds(self, name: str, **args: int) -> float:
        started = self._clock()
        self._harness.run(name, **args)
        return self._clock() - started

    def read_gb_s(self, passes: int = PASSES, nbytes: int = 0) -> float:
        """One round: the best of ``passes`` over the first ``nbytes`` (all of them: 0)."""
        items = (nbytes or self.nbytes) // ITEM_BYTES
        with self._pinned:
            best = min(
                self._seconds("ceiling_read", data=self._arena.address, items=items) for _ in range(max(1, passes))
            )
        return items * ITEM_BYTES / best / 1e9

    def fma_gflop_s(self, passes: int = PASSES) -> float:
        return self._arithmetic("ceiling_fma", 2 * self.lanes, passes)

    def dot_gop_s(self, passes: int = PASSES) -> float:
        return self._arithmetic("ceiling_dot", 8 * self.lanes, passes)

    def _arithmetic(self, name: str, operations: int, passes: int) -> float:
        items = ARITHMETIC_ITEMS * self.threads
        with self._pinned:
            best = min(self._seconds(name, items=items) for _ in range(max(1, passes)))
        return items * ARITHMETIC_STEPS * ARITHMETIC_CHAINS * operations / best / 1e9

    def close(self) -> None:
        self._harness.close()
        self._team.close()
        self._arena.close()

    def __enter__(self) -> Prober:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Pinned:
    """Each of these threads (0: the caller) on a core of its own, for a while."""

    def __init__(self, threads: Sequence[int]) -> None:
        self._threads = threads

    def __enter__(self) -> None:
        self._before = os.sched_getaffinity(0)
        cores = sorted(self._before)
        for i, thread in enumerate(self._threads):
            os.sched_setaffinity(thread, {cores[i % len(cores)]})

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            os.sched_setaffinity(thread, self._before)


def thread_counts(most: int) -> list[int]:
    """1, 2, 4, ... and ``most`` itself."""
    counts = [1]
    while counts[-1] * 2 <= most:
        counts.append(counts[-1] * 2)
    return counts if counts[-1] == most else [*counts, most]


def measure(
    counts: Sequence[int], rounds: int, passes: int, nbytes: int, deadline: Deadline
) -> tuple[Ceilings, dict[str, Any]]:
    """The ceilings at each number of threads, rounds of all of them interleaved; and the details for the result."""
    machine, progress = read_machine(), ProgressBar()
    probers = {count: Prober(count, nbytes) for count in counts}
    taken: dict[str, dict[int, list[float]]] = {kind: {n: [] for n in counts} for kind in ("read", "fma", "dot")}
    sets = [size for size in WORKING_SETS if size < nbytes]
    small: dict[int, dict[int, list[float]]] = {size: {n: [] for n in counts} for size in sets}
    try:
        for round_number in range(rounds):
            if round_number and deadline.passed:
                break
            for count, prober in probers.items():
                taken["read"][count].append(prober.read_gb_s(passes))
                taken["fma"][count].append(prober.fma_gflop_s(passes // 2))
                taken["dot"][count].append(prober.dot_gop_s(passes // 2))
                for size in sets:
                    small[size][count].append(prober.read_gb_s(passes, size))
            progress("machine", (round_number + 1) / rounds)
        target = probers[counts[0]].target
    finally:
        for prober in probers.values():
            prober.close()
    limits = {kind: {n: median_interval(values) for n, values in by.items()} for kind, by in taken.items()}

    def value_of(by: dict[int, Interval]) -> dict[int, float]:
        return {n: interval.value for n, interval in by.items()}

    ceilings = Ceilings(
        cpu_name=machine.cpu_name,
        cores=machine.cores,
        measured_s=time.time(),
        target=target,
        read_gb_s=value_of(limits["read"]),
        fma_gflop_s=value_of(limits["fma"]),
        dot_gop_s=value_of(limits["dot"]),
    )
    by_mib = {size >> 20: {n: float(np.median(v)) for n, v in by.items()} for size, by in small.items()}
    return ceilings, {"bytes_read": nbytes, "limits": limits, "rounds": taken, "read_gb_s_by_mib": by_mib}


def run(args: argparse.Namespace) -> int:
    report, deadline, watch = Report("machine", args.out, args.json), Deadline(args.minutes), LoadWatch()
    quick = args.quick
    counts = thread_counts(args.threads or read_machine().default_threads)
    ceilings, detail = measure(
        counts,
        1 if quick else args.rounds or ROUNDS,
        3 if quick else PASSES,
        QUICK_BYTES if quick else READ_BYTES,
        deadline,
    )
    limits = detail["limits"]
    units = (("read", "read GB/s"), ("fma", "f32 FMA GFLOP/s"), ("dot", "int8 dot GOP/s"))
    report.table(
        f"ceilings, {ceilings.target}, {ceilings.cpu_name}",
        ["threads", *(title for _, title in units), *(f"read {mib} MiB" for mib in detail["read_gb_s_by_mib"])],
        [[n, *(limits[kind][n].text() for kind, _ in units), *(by[n] for by in detail["read_gb_s_by_mib"].values())]
         for n in counts],
    )  # fmt: skip
    if not quick:
        report.say(f"stored: {save_ceilings(ceilings)}")
    most = counts[-1]
    report.plot(
        "roofline", roofline(ceilings.read_gb_s[most], ceilings.fma_gflop_s[most], ceilings.dot_gop_s[most], [])
    )
    report.finish(
        {"threads": counts, "quick": quick, "load": watch.report(), "ceilings": detail, "target": ceilings.target}
    )
    return 0
