"""The slot loop, work sharing, barriers and rings, with more threads than cores too."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from ai_engine.hardware.team import NativeTeam
from ai_engine.kernels.cpu.executor import Contexts, Harness
from ai_engine.kernels.cpu.lang import Kernel, kernel


@kernel()
def exec_nothing(k: Kernel) -> None:
    pass


@kernel(out="ptr", n="i64", grain="i64")
def exec_count(k: Kernel) -> None:
    """Adds one to each element, in two independent loops over work."""
    out = k.array(k.arg.out, "i64")
    for half in range(2):
        with k.work_items(k.arg.n, k.arg.grain, counter=half) as i:
            at = i + k.arg.n * half
            out[at] = out[at] + 1


@kernel(flags="ptr", seen="ptr", rounds="i64")
def exec_barriers(k: Kernel) -> None:
    """Each round every thread publishes the round; after a barrier all threads must see it of all others."""
    flags, seen = k.array(k.arg.flags, "i64"), k.array(k.arg.seen, "i64")
    me, threads = k.context.thread, k.context.num_threads
    with k.loop(0, k.arg.rounds) as r:
        flags[me * 16] = r + 1
        k.barrier()
        with k.loop(0, threads) as t, k.if_(flags[t * 16].eq(r + 1)):
            seen[me * 16] = seen[me * 16] + 1
        k.barrier()


@kernel(out="ptr")
def exec_header(k: Kernel) -> None:
    out = k.array(k.arg.out, "i64")
    h = k.header
    out[0], out[1], out[2] = h.T, h.R, h.step
    k.store(k.scratch + k.context.thread * 0, k.i64(1))


@kernel(source="ptr", out="ptr", n="i64")
def exec_mix(k: Kernel) -> None:
    """out[i] = source[i] + source[7 i mod n]: wrong unless all of the source is there. In two loops, the second of
    which adds what the first one wrote elsewhere."""
    source, out, n = k.array(k.arg.source, "i64"), k.array(k.arg.out, "i64"), k.arg.n
    with k.work_items(n, 3) as i:
        out[i] = source[i] + source[i * 7 % n]
    k.wait_items(0)
    with k.work_items(n, counter=1) as i:
        out[i + n] = out[i] + out[i * 5 % n]


KERNELS = [exec_mix, exec_nothing, exec_count, exec_barriers, exec_header]


@pytest.fixture(params=[1, 2, 3, 5])
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    team = NativeTeam(request.param)
    h = Harness(KERNELS, team=team)
    yield h
    h.close()
    team.close()


def test_each_work_item_runs_exactly_once(harness: Harness) -> None:
    for n, grain in ((1000, 1), (7, 3), (0, 1)):
        out = np.zeros(2 * n, np.int64)
        call = ("exec_count", {"out": out.ctypes.data, "n": n, "grain": grain})
        for _ in range(20):
            harness.run_all([call, ("exec_nothing", {}), call])
        np.testing.assert_array_equal(out, 40)


def test_slots_and_loops_see_what_came_before(harness: Harness) -> None:
    n = 101
    buffers = np.zeros((31, 2 * n), np.int64)
    for _ in range(20):
        buffers[:] = 0
        buffers[0, :n] = np.arange(n)
        harness.run_all(
            [
                ("exec_mix", {"source": a.ctypes.data, "out": b.ctypes.data, "n": n})
                for a, b in itertools.pairwise(buffers)
            ]
        )
        at = np.arange(n)
        for source, out in itertools.pairwise(buffers):
            np.testing.assert_array_equal(out[:n], source[:n] + source[at * 7 % n])
            np.testing.assert_array_equal(out[n:], out[:n] + out[at * 5 % n])


def test_barrier_makes_writes_visible(harness: Harness) -> None:
    threads = harness.contexts.num_threads
    flags, seen = np.zeros((2, threads * 16), np.int64)
    harness.run("exec_barriers", None, flags=flags.ctypes.data, seen=seen.ctypes.data, rounds=300)
    np.testing.assert_array_equal(seen[::16], 300 * threads)


def test_rings_stamp_every_slot_and_wrap(harness: Harness) -> None:
    rings = harness.contexts.rings
    for step in range(rings.entries // 50 + 2):
        harness.run_all([("exec_nothing", {})] * 50, {"step": step})
    for thread in range(harness.contexts.num_threads):
        entries = rings.read(thread)
        assert len(entries) == rings.entries - 1
        np.testing.assert_array_equal(entries[-50:, 1], np.arange(50))
        assert (entries[-50:, 0] == step).all()
        assert (entries[:, 3] >= entries[:, 2]).all()
        assert (np.diff(entries[:, 2]) > 0).all()


def test_header_and_empty_program() -> None:
    h = Harness(KERNELS)
    out = np.zeros(3, np.int64)
    h.run("exec_header", {"T": 5, "R": 0, "step": 9}, out=out.ctypes.data)
    assert out.tolist() == [5, 0, 9]
    h.run_all([])
    h.close()


def test_contexts_reject_too_few_counters() -> None:
    c = Contexts(1, 1000.0)
    with pytest.raises(AssertionError):
        c.use(np.zeros((3, 4), np.uint64), np.zeros(16, np.int64))
    c.close()
