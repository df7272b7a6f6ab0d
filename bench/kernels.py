"""Speed of the matmul kernels: GB/s of weights at few tokens, GMAC/s at many, beside this machine's read bandwidth.

    python bench/kernels.py [--target avx2] [--types Q4_1,Q8_0] [--tokens 1,4,128] [--threads 1,2] [--rounds 15]

Each figure is the best of its rounds, by CPU time, and rounds of all cases are interleaved, so that they share whatever
else the machine does. Up to 16 tokens weights are larger than the caches (``--mbytes``); the limit is a plain loop
of vector loads over as much memory. Prints a table, and one JSON line with ``--json``.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ai_engine.kernels.cpu import abi, build, matmul
from ai_engine.kernels.cpu.formats import QUANTISED, ActLayout
from ai_engine.kernels.cpu.lang import CONTEXT, HEADER, TARGETS, Kernel, KernelDef, Record, Target
from ai_engine.kernels.cpu.pack import PackedLayout
from ai_engine.ports.kernels import WeightSpec
from ai_engine.ports.model import DType

U8 = npt.NDArray[np.uint8]
READ = Record(data="ptr", items="i64")
READ_BYTES = 256 << 10


def _emit_read(k: Kernel) -> None:
    """Sum of everything, READ_BYTES at a time; four accumulators, prefetched."""
    n, total = k.lanes, k.var(k.i32(0, k.lanes))
    with k.work_items(k.arg.items) as item:
        base = k.arg.data + item * READ_BYTES
        sums = [k.var(k.i32(0, n)) for _ in range(4)]
        with k.loop(0, READ_BYTES, 16 * n) as at:
            for i, x in enumerate(sums):
                if 4 * n * i % 64 == 0:
                    k.prefetch(base + at + (1024 + 4 * n * i))
                x.v = x.v + k.load(base + at + 4 * n * i, "i32", n)
        for x in sums:
            total.v = total.v + x.v
    k.store(k.scratch, total.v)


def aligned(nbytes: int) -> U8:
    raw = np.zeros(nbytes + 4096, np.uint8)
    start = -raw.ctypes.data % 4096
    return raw[start : start + nbytes]


class Threads:
    """Run one kernel on n threads at once, as a step does."""

    def __init__(self, loaded: build.Loaded, num_threads: int) -> None:
        self.loaded, self.n = loaded, num_threads
        self.counters, self.sleepers = aligned(abi.COUNTER_STRIDE), aligned(64)
        self.header = HEADER.pack(**dict.fromkeys(HEADER.types, 0))
        self.scratch = [aligned(abi.SCRATCH_BYTES) for _ in range(num_threads)]
        zero = dict.fromkeys(CONTEXT.types, 0)
        shared = {
            "num_threads": num_threads,
            "header": self.header.ctypes.data,
            "counters": self.counters.ctypes.data,
            "sleepers": self.sleepers.ctypes.data,
        }
        self.contexts = [
            CONTEXT.pack(**{**zero, **shared, "thread": t, "scratch": s.ctypes.data})
            for t, s in enumerate(self.scratch)
        ]

    def run(self, name: str, args: npt.NDArray[np.uint64], num_tokens: int) -> float:
        """Mean CPU seconds of the threads: what it would take if no other process used these cores."""
        self.counters[:] = 0
        self.header[HEADER.index["T"]] = num_tokens
        spent = [0.0] * self.n

        def work(t: int) -> None:
            start = time.thread_time()
            self.loaded.call(name, args.ctypes.data, self.contexts[t].ctypes.data)
            spent[t] = time.thread_time() - start

        others = [threading.Thread(target=work, args=(t,)) for t in range(1, self.n)]
        for thread in others:
            thread.start()
        work(0)
        for thread in others:
            thread.join()
        return sum(spent) / self.n


@dataclass
class Case:
    label: str
    kernel: str
    args: npt.NDArray[np.uint64]
    tokens: int
    nbytes: int
    macs: int
    keep: tuple[Any, ...] = ()
    best: float = float("inf")


def matmul_case(dtype: DType, target: Target, rows: int, cols: int, tokens: int, rng: np.random.Generator) -> Case:
    spec = WeightSpec("w", dtype, rows, cols)
    layout = PackedLayout.of(spec, target.lanes)
    packed = aligned(layout.nbytes)
    noise = rng.integers(0, 256, 1 << 20, dtype=np.uint8) & 0x37  # any finite scales
    packed[:] = np.resize(noise | 0x30 if layout.is_float else noise, packed.size)  # and no denormal floats
    x = rng.standard_normal((tokens, cols)).astype(np.float32)
    out = np.zeros((tokens, rows + 16), np.float32)
    act = aligned(ActLayout(cols).nbytes(tokens))
    act[:] = ActLayout(cols).quantize(x)
    quantised = dtype in QUANTISED
    name, args = matmul.bind(
        spec, target.lanes, x=(act if quantised else x).ctypes.data, x_stride=0 if quantised else cols,
        w=packed.ctypes.data, out=out.ctypes.data, out_stride=rows + 16,
    )  # fmt: skip
    macs = rows * cols * tokens
    return Case(f"{dtype.value}", name, matmul.ARGS.pack(**args), tokens, packed.nbytes, macs, (packed, x, out, act))


def measure(
    target: Target, types: list[DType], tokens: list[int], threads: int, rounds: int, mbytes: int, cols: int
) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    read = KernelDef("read", READ, _emit_read)
    names = {matmul.kernel_name(t) for t in types}
    loaded = build.jit([read, *(d for d in matmul.KERNELS if d.name in names)], target)
    team = Threads(loaded, threads)
    data = aligned((mbytes << 20) + 4096)
    data[:] = 1  # untouched pages would all be the one zero page
    items = (mbytes << 20) // READ_BYTES
    cases = [Case("read", "read", READ.pack(data=data.ctypes.data, items=items), 1, items * READ_BYTES, 0, (data,))]
    for dtype in types:
        for count in tokens:
            unit = PackedLayout(dtype, target.lanes, cols, target.lanes).nbytes / target.lanes
            rows = int((mbytes << 20) / unit) if count <= 16 else 1536
            cases.append(matmul_case(dtype, target, rows // 64 * 64, cols, count, rng))
    for _ in range(rounds):
        for case in cases:
            case.best = min(case.best, team.run(case.kernel, case.args, case.tokens))
    return [
        {
            "target": target.name, "threads": threads, "type": c.label, "tokens": c.tokens,
            "gb_s": round(c.nbytes / c.best / 1e9, 2), "gmac_s": round(c.macs / c.best / 1e9, 1),
        }
        for c in cases
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="")
    parser.add_argument("--types", default=",".join(t.value for t in DType))
    parser.add_argument("--tokens", default="1,4,16,128")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mbytes", type=int, default=64)
    parser.add_argument("--cols", type=int, default=1536)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    tokens = [int(t) for t in options.tokens.split(",")]
    types = [DType(t) for t in options.types.split(",")]
    targets = [TARGETS[t] for t in options.target.split(",")] if options.target else [build.host_target()]
    for target in targets:
        for threads in [int(t) for t in options.threads.split(",")]:
            rows = measure(target, types, tokens, threads, options.rounds, options.mbytes, options.cols)
            if options.json:
                print(json.dumps(rows))
                continue
            limit = rows[0]["gb_s"]
            print(f"\n{target.name}, {threads} threads, K = {options.cols}; reads {limit} GB/s")
            print(f"{'type':8}" + "".join(f"{f'T={t}':>16}" for t in tokens))
            for dtype in types:
                cells = []
                for row in rows[1:]:
                    if row["type"] != dtype.value:
                        continue
                    if row["tokens"] <= 16:
                        cells.append(f"{row['gb_s']:6.1f} GB/s {100 * row['gb_s'] / limit:3.0f}%")
                    else:
                        cells.append(f"{row['gmac_s']:9.1f} GMAC/s")
                print(f"{dtype.value:8}" + "".join(f"{c:>16}" for c in cells))


if __name__ == "__main__":
    main()
