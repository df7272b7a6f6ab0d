"""One native call per thread and step: the loop over a program's slots, and the memory that it needs per thread.

Owns `run_slots`, thread contexts (scratch, work counters, barrier flags) and the trace rings. Does not own the threads
(ports.hardware.ThreadTeam), what the slots are (backend.py), nor the layouts in memory (abi.py).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ai_engine.kernels.cpu import abi
from ai_engine.kernels.cpu.build import Loaded, jit
from ai_engine.kernels.cpu.lang import CONTEXT, HEADER, Kernel, KernelDef, Number, Target, kernel
from ai_engine.ports.hardware import ThreadTeam

SPIN_US = 50
"""How long a thread waits at a barrier before it sleeps."""

RING_ENTRIES = 8192


@kernel(**abi.CONTEXT_FIELDS)
def run_slots(k: Kernel) -> None:
    """Walk the slots. Called with the thread's context as its only argument. A negative step leaves no stamps."""
    c = k.arg
    k.ctx = c.self
    ring = c.ring
    written = k.var(k.load(ring, "i64"))
    last = k.load(ring + 8, "i64") - 1
    step = k.load(c.header + 8 * HEADER.index["step"], "i64")
    incomplete = k.var(k.i64(0))  # first slot since the last barrier
    epoch = k.var(c.epoch)
    with k.loop(0, c.num_slots) as i:
        slot = c.slots + i * (8 * abi.SLOT_WORDS)
        k.context.set("counters", c.counter_base + i * abi.COUNTER_STRIDE)
        entry = ring + abi.RING_HEADER_BYTES + (written.v & last) * (8 * abi.RING_ENTRY_WORDS)
        with k.if_(step >= 0):
            for word, value in enumerate((step, i, k.cycles())):
                k.store(entry + 8 * word, value)
        k.call_address(k.load(slot, "ptr"), k.load(slot + 8, "ptr"), k.ctx)
        with k.if_(step >= 0):
            k.store(entry + 24, k.cycles())
            written.v = written.v + 1
            k.store_release(ring, written.v)
        with k.if_((k.load(slot + 16, "i64") & abi.SLOT_BARRIER).ne(0)):
            # A kernel that had its threads meet may have worked by thread number: then all must come. Otherwise all
            # items must be done, and a late thread need not come.
            with k.if_else(k.context.epoch.ne(epoch.v)) as (together, items):
                with together:
                    k.barrier()
                with items, k.loop(incomplete.v, i + 1) as s:
                    k.wait_slot(c.counter_base + s * abi.COUNTER_STRIDE)
            incomplete.v = i + 1
            epoch.v = k.context.epoch


@kernel(out="ptr")
def read_cycles(k: Kernel) -> None:
    k.store(k.arg.out, k.cycles())


KERNELS: tuple[KernelDef, ...] = (run_slots, read_cycles)


class Clock:
    """Cycle counter to time: a pair taken at start and one taken when asked."""

    def __init__(self, loaded: Loaded) -> None:
        self._read = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(loaded.address("read_cycles"))
        self._out = np.zeros(1, np.uint64)
        self._args = read_cycles.args.pack(out=self._out.ctypes.data)
        self._start = self.now()
        time.sleep(0.002)

    def now(self) -> tuple[int, int]:
        """(cycles, nanoseconds of CLOCK_MONOTONIC) at one moment, to a microsecond unless the thread was kept waiting
        in all of three tries."""
        best = 1 << 62
        for _ in range(3):
            before = time.monotonic_ns()
            self._read(self._args.ctypes.data)
            after = time.monotonic_ns()
            if after - before < best:
                best, pair = after - before, (int(self._out[0]), (before + after) // 2)
            if best < 5_000:
                break
        return pair

    def cycles_per_us(self) -> float:
        cycles, ns = self.now()
        return (cycles - self._start[0]) / (ns - self._start[1]) * 1e3


class Rings:
    """The threads' trace rings in shared memory (a memfd, so that another process can map ``fd``)."""

    def __init__(self, num_threads: int, entries: int = RING_ENTRIES) -> None:
        assert entries & (entries - 1) == 0, entries
        self.num_threads, self.entries = num_threads, entries
        self.stride = abi.RING_HEADER_BYTES + entries * 8 * abi.RING_ENTRY_WORDS
        self.fd = os.memfd_create("ai-engine-rings", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, num_threads * self.stride)
        self._map = mmap.mmap(self.fd, num_threads * self.stride)
        self._words = np.frombuffer(self._map, np.int64).reshape(num_threads, self.stride // 8)
        self._words[:, 1] = entries
        self._words[:, 2] = np.arange(num_threads)

    def address(self, thread: int) -> int:
        return int(self._words[thread].ctypes.data)

    def read(self, thread: int) -> npt.NDArray[np.int64]:
        """The last entries of one thread, oldest first: i64[n, 4] of step, slot, start and end cycles. Entries that
        may have been overwritten while reading are left out."""
        words = self._words[thread]
        end = int(words[0])
        entries = words[abi.RING_HEADER_BYTES // 8 :].reshape(self.entries, abi.RING_ENTRY_WORDS).copy()
        first = max(0, int(words[0]) + 1 - self.entries)  # the writer may be inside the entry after its last
        return np.asarray(entries[np.arange(min(first, end), end) % self.entries])

    def close(self) -> None:
        os.close(self.fd)
        del self._words
        self._map.close()


class Contexts:
    """The contexts of ``num_threads`` threads: header, scratch, barrier flags, rings."""

    def __init__(self, num_threads: int, cycles_per_us: float, spin_us: float = SPIN_US) -> None:
        self.num_threads = num_threads
        self.rings = Rings(num_threads)
        self.header = np.zeros(len(HEADER), np.uint64)
        self._flags = aligned((num_threads + 1) * abi.FLAG_STRIDE, 128)
        self._scratch = [aligned(abi.SCRATCH_BYTES, 64) for _ in range(num_threads)]
        self._blocks = aligned(num_threads * 256, 128).view(np.uint64).reshape(num_threads, 32)
        assert len(CONTEXT) <= 32
        if num_threads > len(os.sched_getaffinity(0)):
            spin_us = 0  # who spins may keep the awaited one off the core
        libc = ctypes.CDLL(None)
        for thread, block in enumerate(self._blocks):
            block[: len(CONTEXT)] = CONTEXT.pack(
                self=block.ctypes.data,
                thread=thread,
                num_threads=num_threads,
                header=self.header.ctypes.data,
                slots=0,
                num_slots=0,
                scratch=self._scratch[thread].ctypes.data,
                flags=self._flags.ctypes.data,
                sleepers=self._flags.ctypes.data + num_threads * abi.FLAG_STRIDE,
                epoch=0,
                spin_cycles=int(spin_us * cycles_per_us),
                syscall=ctypes.cast(libc.syscall, ctypes.c_void_p).value or 0,
                counter_base=0,
                counters=0,
                ring=self.rings.address(thread),
            )
        self.addresses = [int(block.ctypes.data) for block in self._blocks]

    def use(self, slots: npt.NDArray[np.uint64], counters: npt.NDArray[np.int64]) -> None:
        """Point every thread at a slot table uint64[n, SLOT_WORDS] and at the slots' work counters, COUNTER_STRIDE
        bytes each, which the caller zeroes before each step. Both must stay alive."""
        assert slots.shape[1] == abi.SLOT_WORDS, slots.shape
        assert counters.nbytes >= len(slots) * abi.COUNTER_STRIDE, (len(slots), counters.nbytes)
        self._blocks[:, CONTEXT.index["slots"]] = slots.ctypes.data
        self._blocks[:, CONTEXT.index["num_slots"]] = len(slots)
        self._blocks[:, CONTEXT.index["counter_base"]] = counters.ctypes.data

    def close(self) -> None:
        self.rings.close()


def aligned(nbytes: int, align: int) -> npt.NDArray[np.uint8]:
    """Zeroed bytes whose address is a multiple of ``align``. Large ones are mappings of their own: in the allocator's
    per-thread heaps, workspaces of models that come and go left 4 MB each behind."""
    large = nbytes >= 1 << 20
    raw = np.frombuffer(mmap.mmap(-1, nbytes + align), np.uint8) if large else np.zeros(nbytes + align, np.uint8)
    start = -raw.ctypes.data % align
    return raw[start : start + nbytes]


class Harness:
    """Runs single kernels in tests and benchmarks, on as many threads as the team has, with a header filled by hand::

    h = Harness([rms_norm], target)
    h.run("rms_norm", {"T": 3}, x=address, ...)
    """

    def __init__(
        self, kernels: Sequence[KernelDef], target: Target | None = None, team: ThreadTeam | None = None
    ) -> None:
        self.definitions = {d.name: d for d in kernels}
        self.loaded = jit([*kernels, *KERNELS], target)
        self.team = team
        self.clock = Clock(self.loaded)
        self.contexts = Contexts(team.size if team else 1, self.clock.cycles_per_us())

    def run(self, name: str, header: Mapping[str, Number] | None = None, /, **args: Number) -> None:
        self.run_all([(name, args)], header)

    def run_all(
        self, calls: Sequence[tuple[str, Mapping[str, Number]]], header: Mapping[str, Number] | None = None
    ) -> None:
        """Several kernels as one step, a barrier after each."""
        c = self.contexts
        for field, value in (header or {}).items():
            c.header[HEADER.index[field]] = HEADER.word(field, value)
        blocks = [self.definitions[name].args.pack(**args) for name, args in calls]
        slots = np.array(
            [
                [self.loaded.address(name), block.ctypes.data, abi.SLOT_BARRIER, i]
                for i, ((name, _), block) in enumerate(zip(calls, blocks, strict=True))
            ],
            np.uint64,
        ).reshape(-1, abi.SLOT_WORDS)
        counters = aligned(len(calls) * abi.COUNTER_STRIDE, 128).view(np.int64)
        c.use(slots, counters)
        function = self.loaded.address("run_slots")
        if self.team:
            self.team.run(function, c.addresses)
        else:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(c.addresses[0])

    def close(self) -> None:
        self.contexts.close()
