"""Steps as they ran: the collector that copies rings while steps run, what it keeps, and what entries mean.

Owns the copying thread (every 10 ms while there is something to copy, asleep otherwise), retention bounded in bytes,
and decoding, which happens when somebody reads. Does not own requests (traces.py) nor the rings (rings.py). Nothing
here is ever waited for by a step: whatever is late or too much is overwritten, given up, and counted.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from ai_engine.observe.rings import Entries, RingReader
from ai_engine.ports.kernels import Call
from ai_engine.ports.telemetry import ClockPair, StepDone
from ai_engine.ports.trace import CostOf, OpCost, ProgramInfo, TraceSource

logger = logging.getLogger(__name__)
PERIOD_S = 0.01
QUIET_PERIODS = 20
"""Periods without a new entry after which the collector sleeps until it is woken."""
_STEP_BYTES, _WORK_BYTES = 400, 150  # what a StepDone and a StepWork take, about
StepKey = tuple[int, int]
"""(life of the worker, number of the step)."""


class Op(msgspec.Struct, frozen=True):
    """One op of one step. ``started_s`` is when the first thread began, ``ended_s`` when its work was done: when the
    last thread was, but no later than anybody began what had to wait for it. (Work is shared out as threads come: one
    that was kept off its core finds it done, passes through late, and holds nobody up.)"""

    slot: int
    started_s: float
    ended_s: float
    threads: list[tuple[int, float, float]]  # (thread, start, end)
    cost: OpCost

    @property
    def seconds(self) -> float:
        return self.ended_s - self.started_s


class CycleClock:
    """Cycles as monotonic seconds, by moments at which both were read. The counter is the machine's: all workers' pairs
    are of one clock."""

    def __init__(self) -> None:
        self._first: ClockPair | None = None
        self._pairs: deque[ClockPair] = deque(maxlen=4096)

    def add(self, pair: ClockPair) -> None:
        self._first = self._first or pair
        self._pairs.append(pair)

    def to_seconds(self, cycles: npt.NDArray[np.int64]) -> npt.NDArray[np.float64] | None:
        """None before two moments are known. Rate: over all the time known; offset: the pair nearest before."""
        pairs, first = list(self._pairs), self._first
        if first is None or pairs[-1].cycles <= first.cycles:
            return None
        ns_per_cycle = (pairs[-1].monotonic_ns - first.monotonic_ns) / (pairs[-1].cycles - first.cycles)
        at = bisect_right(pairs, int(cycles.flat[0]), key=lambda pair: pair.cycles)
        near = pairs[max(0, at - 1)]
        return np.asarray((near.monotonic_ns + (cycles - near.cycles) * ns_per_cycle) / 1e9)


class Engine:
    """One life of the worker: its program, and its rings while it lives."""

    def __init__(self, life: int, source: TraceSource | None, cost_of: CostOf) -> None:
        self.life = life
        self.program: ProgramInfo | None = source.program if source else None
        self._cost_of = cost_of
        self.reader: RingReader | None = None
        self.problem = "" if source else "this engine leaves no stamps"
        if source is not None:
            try:
                self.reader = RingReader(source.rings)
            except (OSError, ValueError) as error:
                self.problem = f"the rings cannot be mapped: {error}"
        self._classes, self._samples = _cost_classes(self.program)
        self.next_stage = _next_stages(self.program)

    def costs(self, step: StepDone) -> list[OpCost]:
        """By slot. Slots that cost the same are asked for once."""
        if self.program is None:
            return []
        sequences = [(work.rows, work.context) for work in step.work]
        tokens = sum(rows for rows, _ in sequences)
        found = [self._cost_of(call, self.program, tokens, step.kept_rows, sequences) for call in self._samples]
        return [found[index] for index in self._classes]


def _next_stages(program: ProgramInfo | None) -> npt.NDArray[np.int64]:
    """For each slot, the first slot behind the next barrier: nobody begins it before this slot's work is done."""
    calls = program.calls if program is not None else []
    stages = np.full(len(calls), len(calls), np.int64)
    for slot in range(len(calls) - 2, -1, -1):
        stages[slot] = slot + 1 if calls[slot].barrier else stages[slot + 1]
    return stages


def _cost_classes(program: ProgramInfo | None) -> tuple[list[int], list[Call]]:
    """Each slot's class, and a call of each class: calls that differ in layer and names only cost the same."""
    classes: dict[str, int] = {}
    samples: list[Call] = []
    index = []
    for call in program.calls if program is not None else ():
        assert program is not None
        weights = [program.weights[name] for name in call.weights]
        attrs = {name: value for name, value in call.attrs.items() if name != "layer"}
        key = repr((
            call.op, [b.type for b in call.inputs], [b.type for b in call.outputs],
            [(w.dtype, w.rows, w.cols) for w in weights], attrs,
        ))  # fmt: skip
        if key not in classes:
            classes[key] = len(samples)
            samples.append(call)
        index.append(classes[key])
    return index, samples


class StepStore:
    """What is known of past steps, at most ``max_bytes`` of it: raw ring entries and who ran in each step.

    ``start`` begins the thread; `emit`-side calls (`add_step`, `add_pair`) come from any one thread at a time."""

    def __init__(self, max_bytes: int, cost_of: CostOf, sleep: Callable[[float], None] = time.sleep) -> None:
        self.max_bytes = max_bytes
        self._cost_of, self._sleep = cost_of, sleep
        self._lock = threading.Lock()
        self.clock = CycleClock()
        self._engines: dict[int, Engine] = {}
        self._now: Engine = Engine(0, None, cost_of)
        self._chunks: deque[tuple[int, int, Entries]] = deque()  # (life, thread, entries)
        self._steps: dict[StepKey, StepDone] = {}  # oldest first
        self.raw_bytes = self.step_bytes = 0
        self.entries_read = self.failures = self.steps_dropped = 0
        self.lost_in_past_lives = 0
        self.on_period: Callable[[], None] = lambda: None  # called by the collector's thread after each copy
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None

    # the engine

    def attach(self, source: TraceSource | None) -> None:
        """A worker's new life; what the last one left stays."""
        with self._lock:
            self._end_life()
            self._now = Engine(self._now.life + 1, source, self._cost_of)
            self._engines[self._now.life] = self._now
            kept = {life for life, _, _ in self._chunks} | {life for life, _ in self._steps} | {self._now.life}
            self._engines = {life: engine for life, engine in self._engines.items() if life in kept}

    def _end_life(self) -> None:
        reader = self._now.reader
        if reader is not None:
            self._collect(reader)
            self.lost_in_past_lives += reader.lost
            self._now.reader = None
            reader.close()

    @property
    def life(self) -> int:
        return self._now.life

    @property
    def program(self) -> ProgramInfo | None:
        return self._now.program

    def engine(self, life: int) -> Engine | None:
        return self._engines.get(life)

    @property
    def lost(self) -> int:
        """Ring entries that were overwritten before they were copied."""
        with self._lock:
            reader = self._now.reader
            return self.lost_in_past_lives + (reader.lost if reader is not None else 0)

    # what comes

    def add_pair(self, pair: ClockPair) -> None:
        self.clock.add(pair)

    def add_step(self, step: StepDone) -> None:
        with self._lock:
            self._steps[self._now.life, step.step] = step
            self.step_bytes += _step_bytes(step)
            while self.step_bytes > self.max_bytes // 4:
                oldest = self._steps.pop(next(iter(self._steps)))
                self.step_bytes -= _step_bytes(oldest)
                self.steps_dropped += 1
        self.wake()

    # the collector

    def start(self) -> None:
        self._thread = threading.Thread(target=self.run, name="trace-collector", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There will be steps."""
        if not self._wake.is_set():
            self._wake.set()

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(5.0)
        with self._lock:
            self._end_life()

    def run(self) -> None:
        """The thread's life. An error of ours costs the entries of one period, which are counted as lost if they are
        not caught up with."""
        while not self._stopping:
            self._wake.wait()
            self._wake.clear()
            quiet = 0
            while quiet < QUIET_PERIODS and not self._stopping:
                self._sleep(PERIOD_S)
                try:
                    quiet = 0 if self.collect() else quiet + 1
                    self.on_period()
                except Exception:
                    self.failures += 1
                    quiet += 1
                    if self.failures == 1:
                        logger.exception("the trace collector failed; requests are not affected")

    def collect(self) -> int:
        """Copy what is new; returns the number of entries."""
        with self._lock:
            reader = self._now.reader
            return 0 if reader is None else self._collect(reader)

    def _collect(self, reader: RingReader) -> int:
        count = 0
        for thread, entries in reader.read_new():
            count += len(entries)
            self._chunks.append((self._now.life, thread, entries))
            self.raw_bytes += entries.nbytes
        self.entries_read += count
        while self.raw_bytes > self.max_bytes // 2:
            self.raw_bytes -= self._chunks.popleft()[2].nbytes
        return count

    # what is read

    def steps(self) -> list[tuple[StepKey, StepDone]]:
        """All that are kept, oldest first."""
        with self._lock:
            return list(self._steps.items())

    def newest(self, before_s: float) -> tuple[StepKey, StepDone] | None:
        """The last step that ran anything and ended before then."""
        with self._lock:
            for key in reversed(self._steps):
                step = self._steps[key]
                if step.work and step.ended_s < before_s:
                    return key, step
        return None

    def step(self, key: StepKey) -> StepDone | None:
        return self._steps.get(key)

    def ops(self, key: StepKey) -> list[list[Op]]:
        """The ops of a step, for each run of the program in it (nearly always one); [] when its stamps are gone or
        have not come yet."""
        life, number = key
        engine, step = self.engine(life), self._steps.get(key)
        if engine is None or engine.program is None or step is None:
            return []
        with self._lock:
            if life == self._now.life and self._now.reader is not None:
                self._collect(self._now.reader)
            chunks = [(thread, entries) for owner, thread, entries in self._chunks if owner == life]
        by_thread: dict[int, list[Entries]] = {}
        for thread, entries in chunks:
            if entries[0, 0] <= number <= entries[-1, 0]:
                first, last = np.searchsorted(entries[:, 0], [number, number + 1])
                if first < last:
                    by_thread.setdefault(thread, []).append(entries[first:last])
        return list(_decode(self.clock, engine, step, {t: np.concatenate(parts) for t, parts in by_thread.items()}))

    def status(self) -> dict[str, int | float | bool | str]:
        return {
            "alive": self.alive, "max_bytes": self.max_bytes, "raw_bytes": self.raw_bytes,
            "step_bytes": self.step_bytes, "steps": len(self._steps), "entries_read": self.entries_read,
            "entries_lost": self.lost, "failures": self.failures, "problem": self._now.problem,
        }  # fmt: skip


def _step_bytes(step: StepDone) -> int:
    return _STEP_BYTES + _WORK_BYTES * len(step.work)


def _decode(clock: CycleClock, engine: Engine, step: StepDone, by_thread: dict[int, Entries]) -> Iterator[list[Op]]:
    """Runs of the program, each a list of ops by slot; a run that lost entries at the front of a ring is left out."""
    assert engine.program is not None
    num_slots = len(engine.program.calls)
    threads = sorted(by_thread)
    runs = [_runs(by_thread[thread], num_slots) for thread in threads]
    if not runs or len({len(run) for run in runs}) != 1:
        return
    costs = engine.costs(step)
    for number in range(len(runs[0])):
        stamps = clock.to_seconds(np.stack([run[number] for run in runs]))  # [thread, slot, 2]
        if stamps is None:
            return
        starts, ends = stamps[:, :, 0], stamps[:, :, 1]
        began = starts.min(axis=0)
        limit = np.append(began, np.inf)[engine.next_stage]
        done = np.where(starts < limit, np.minimum(ends, limit), -np.inf).max(axis=0)
        each, begins, dones = stamps.tolist(), began.tolist(), done.tolist()
        yield [
            Op(slot, begins[slot], dones[slot], [(t, *each[row][slot]) for row, t in enumerate(threads)], costs[slot])
            for slot in range(num_slots)
        ]


def _runs(entries: Entries, num_slots: int) -> list[npt.NDArray[np.int64]]:
    """Whole walks over the slots: i64[num_slots, 2] of start and end each."""
    begins = np.flatnonzero(entries[:, 1] == 0)
    whole = [entries[at : at + num_slots] for at in begins.tolist()]
    return [walk[:, 2:] for walk in whole if len(walk) == num_slots and walk[-1, 1] == num_slots - 1]


def kernel_seconds(ops: Sequence[Op]) -> float:
    """Time in which at least one thread was in an op."""
    total, reached = 0.0, float("-inf")
    for op in sorted(ops, key=lambda op: op.started_s):
        total += max(0.0, op.ended_s - max(op.started_s, reached))
        reached = max(reached, op.ended_s)
    return total
