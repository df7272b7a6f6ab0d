"""Rings are read without the writer's help: order, overwrites counted, retention in bytes, times, and failures that
stay where they happen."""

from __future__ import annotations

import time

import numpy as np
import pytest

from ai_engine.app import cost_of
from ai_engine.observe.recorder import PAIR_EVERY_S, Fanout, Recorder
from ai_engine.observe.rings import RingReader
from ai_engine.observe.steps import StepStore, kernel_seconds
from ai_engine.ports import telemetry as ev
from ai_engine.ports.trace import RingsHandle, TraceSource
from ai_engine.testing import MemoryTelemetry
from tests.unit.observe.rig import NUM_SLOTS, PROGRAM, FakeRings, cycles, recording, step_done, write_step


def test_a_reader_gets_every_entry_once_and_in_order() -> None:
    rings = FakeRings(entries=8)
    rings.write(0, 1, 0, 5, 6)  # before anybody looked
    reader = RingReader(rings.handle)
    assert reader.read_new() == []
    seen = []
    for round in range(10):
        for entry in range(5):
            rings.write(0, round, entry, 0, 0)
        seen += [(int(e[0]), int(e[1])) for _, entries in reader.read_new() for e in entries]
    assert seen == [(round, entry) for round in range(10) for entry in range(5)]
    assert reader.lost == 0
    reader.close()
    rings.close()


@pytest.mark.parametrize(("written", "kept"), [(8, 7), (9, 7), (30, 7), (7, 7)])
def test_overwritten_entries_are_counted_and_never_shown(written: int, kept: int) -> None:
    """The writer may be inside the entry after its last, so one entry of a full ring is never trusted."""
    rings = FakeRings(num_threads=1, entries=8)
    reader = RingReader(rings.handle)
    for entry in range(written):
        rings.write(0, 1, entry, 0, 0)
    assert reader.lost == max(0, written - 8), "known before anybody reads"
    ((_, entries),) = reader.read_new()
    assert entries[:, 1].tolist() == list(range(written - kept, written))
    assert reader.lost == written - kept
    reader.close()
    rings.close()


def test_ops_have_the_times_of_the_stamps_and_the_catalogs_cost() -> None:
    with recording() as (traces, rings):
        write_step(rings, 3, 50.0, slot_s=1e-4)
        traces.emit(step_done(3, 50.0, 50.001, [ev.StepWork(1, 0, 1, 0, 9)]))
        (walk,) = traces.store.ops((1, 3))
        assert [op.slot for op in walk] == list(range(NUM_SLOTS))
        for op in walk:
            assert op.started_s == pytest.approx(50.0 + op.slot * 1e-4, abs=2e-6)
            assert 95e-6 < op.seconds < 101e-6
            assert [thread for thread, _, _ in op.threads] == [0, 1]
        assert walk[1].cost.flops == 2 * 32 * 64
        assert walk[1].cost.nbytes == 32 * 64 * 4 + 4 * (64 + 32)
        assert kernel_seconds(walk) == pytest.approx(NUM_SLOTS * 1e-4, rel=0.05)


def test_a_thread_that_came_when_all_was_done_makes_no_op_longer() -> None:
    """Thread 1 loses its core for a second in slot 0; thread 0 does all the work meanwhile."""
    with recording() as (traces, rings):
        for slot in range(NUM_SLOTS):
            rings.write(0, 1, slot, cycles(9.0 + slot * 1e-4), cycles(9.0 + slot * 1e-4 + 9e-5))
            rings.write(1, 1, slot, cycles(10.0 + slot * 1e-6), cycles(10.0 + slot * 1e-6 + 5e-7))
        traces.emit(step_done(1, 9.0, 10.1, [ev.StepWork(1, 0, 1, 0, 9)]))
        (walk,) = traces.store.ops((1, 1))
        assert all(op.seconds < 2.1e-4 for op in walk[:-1]), [op.seconds for op in walk]
        assert walk[-1].seconds > 0.9, "nothing waits for the last slot: it ends with the last thread"
        assert walk[0].threads[1][1] == pytest.approx(10.0), "the stamps themselves stay as they were"


def test_a_step_that_ran_the_program_twice_has_two_walks() -> None:
    with recording() as (traces, rings):
        write_step(rings, 5, 20.0)
        write_step(rings, 5, 20.1)
        traces.emit(step_done(5, 20.0, 20.2, [ev.StepWork(1, 40, 0, 0, 40)]))
        first, second = traces.store.ops((1, 5))
        assert second[0].started_s - first[0].started_s == pytest.approx(0.1, abs=1e-5)


def test_a_step_whose_front_was_overwritten_shows_nothing_wrong() -> None:
    with recording(entries=8) as (traces, rings):
        write_step(rings, 1, 20.0)
        write_step(rings, 2, 20.1)
        for number in (1, 2):
            traces.emit(step_done(number, 20.0, 20.2, [ev.StepWork(1, 0, 1, 0, 9)]))
        assert traces.store.ops((1, 1)) == []
        assert len(traces.store.ops((1, 2))) == 1
        assert traces.store.lost == 2 * (2 * NUM_SLOTS - 7)


def test_what_is_kept_stays_within_its_bytes() -> None:
    limit = 1 << 20
    with recording(max_bytes=limit, entries=4096) as (traces, rings):
        for number in range(1, 6000):
            write_step(rings, number, float(number))
            traces.emit(step_done(number, float(number), number + 0.5, [ev.StepWork(1, 0, 1, 0, 9)]))
            if number % 100 == 0:
                traces.store.collect()
        store = traces.store
        assert store.lost == 0
        assert limit // 3 < store.raw_bytes + store.step_bytes <= limit * 3 // 4
        assert store.steps_dropped > 0
        assert store.ops((1, 5999)), "the newest is there"
        assert store.step((1, 1)) is None, "the oldest is not"


def test_the_collector_sleeps_when_idle_and_catches_up_when_woken() -> None:
    with recording() as (traces, rings):
        store = traces.store
        store.start()
        write_step(rings, 1, 1.0)
        time.sleep(0.05)
        assert store.entries_read == 0, "nobody said that there are steps"
        store.wake()
        deadline = time.monotonic() + 5
        while store.entries_read < 2 * NUM_SLOTS:
            assert time.monotonic() < deadline
            time.sleep(0.005)


def test_a_failing_collector_costs_entries_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    with recording(entries=16) as (traces, rings):
        store = traces.store
        broken = True

        def collect() -> int:
            if broken:
                raise MemoryError("no room")
            return StepStore.collect(store)

        monkeypatch.setattr(store, "collect", collect)
        store.start()
        for number in range(1, 11):
            write_step(rings, number, float(number))
            traces.emit(step_done(number, float(number), number + 0.5))
        deadline = time.monotonic() + 5
        while store.failures < 2:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert store.alive
        assert store.lost == 2 * (10 * NUM_SLOTS - 16)
        broken = False
        store.wake()
        while store.entries_read == 0:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert store.entries_read + store.lost == 2 * 10 * NUM_SLOTS


def test_rings_that_cannot_be_mapped_leave_steps_without_ops() -> None:
    store = StepStore(1 << 20, cost_of)
    store.attach(TraceSource(RingsHandle("/proc/self/fd/999999", 2, 64, 128), PROGRAM))
    store.add_step(step_done(1, 1.0, 1.1))
    assert store.ops((1, 1)) == []
    assert "cannot be mapped" in str(store.status()["problem"])


def test_a_second_life_keeps_the_steps_of_the_first() -> None:
    with recording() as (traces, rings):
        write_step(rings, 1, 5.0)
        traces.emit(step_done(1, 5.0, 5.001, [ev.StepWork(1, 0, 1, 0, 9)]))
        other = FakeRings()
        traces.store.attach(TraceSource(other.handle, PROGRAM))
        write_step(other, 1, 6.0)
        traces.emit(step_done(1, 6.0, 6.001, [ev.StepWork(1, 0, 1, 0, 9)]))
        assert traces.store.ops((1, 1))[0][0].started_s == pytest.approx(5.0, abs=1e-5)
        assert traces.store.ops((2, 1))[0][0].started_s == pytest.approx(6.0, abs=1e-5)
        traces.store.attach(None)
        other.close()


def test_the_recorder_adds_clock_pairs_now_and_then() -> None:
    memory, pairs = MemoryTelemetry(), iter((n, 10 * n) for n in range(1, 100))
    recorder = Recorder(memory, lambda: next(pairs))
    for number in range(10):
        recorder.emit(step_done(number, 0.0, 1.0 + number * 0.6 * PAIR_EVERY_S))
    assert len(memory.of(ev.StepDone)) == 10
    assert len(memory.of(ev.ClockPair)) == 1 + 5


def test_one_broken_sink_does_not_cost_the_others() -> None:
    class Broken:
        def emit(self, event: ev.Event) -> None:
            raise RuntimeError

    memory = MemoryTelemetry()
    fanout = Fanout(Broken(), memory)
    fanout.emit(ev.PhaseDone("load", 1.0))
    fanout.emit(ev.PhaseDone("load", 1.0))
    assert len(memory.events) == fanout.failures == 2


def test_cycles_become_time_by_the_pairs_around_them() -> None:
    """A counter of 1 GHz whose rate is known, and an offset that the nearest pair corrects."""
    with recording() as (traces, _):
        clock = traces.store.clock
        found = clock.to_seconds(np.array([cycles(1.5), cycles(999.0)]))
        assert found is not None
        assert found.tolist() == pytest.approx([1.5, 999.0])
