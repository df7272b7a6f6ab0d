"""Runs single kernels in this process: aligned memory, a step header and one or several thread contexts."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ai_engine.kernels.cpu import abi, build
from ai_engine.kernels.cpu.lang import CONTEXT, HEADER, KernelDef, Target

U8 = npt.NDArray[np.uint8]


def aligned(nbytes: int) -> U8:
    """Zeroed bytes from a multiple of 64."""
    raw = np.zeros(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]


class Rig:
    def __init__(self, target: Target, kernels: Sequence[KernelDef]) -> None:
        self.target = target
        self.loaded = build.jit(kernels, target)

    def run(self, name: str, args: npt.NDArray[np.uint64], *, threads: int = 1, **header: int) -> None:
        """The kernel on ``threads`` threads that share its work counters; ``header`` fields default to 0."""
        counters, sleepers = aligned(abi.COUNTER_STRIDE), aligned(64)
        words = HEADER.pack(**{**dict.fromkeys(HEADER.types, 0), **header})
        scratch = [aligned(abi.SCRATCH_BYTES) for _ in range(threads)]
        fixed = {
            "num_threads": threads,
            "header": words.ctypes.data,
            "counters": counters.ctypes.data,
            "sleepers": sleepers.ctypes.data,
        }
        contexts = [
            CONTEXT.pack(**{**dict.fromkeys(CONTEXT.types, 0), **fixed, "thread": t, "scratch": s.ctypes.data})
            for t, s in enumerate(scratch)
        ]
        pool = [
            threading.Thread(target=self.loaded.call, args=(name, args.ctypes.data, c.ctypes.data))
            for c in contexts[1:]
        ]
        for thread in pool:
            thread.start()
        self.loaded.call(name, args.ctypes.data, contexts[0].ctypes.data)
        for thread in pool:
            thread.join()
