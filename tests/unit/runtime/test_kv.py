"""The page pool against a plain model: every open sequence can read back exactly its own tokens at any time."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ai_engine.ports.errors import ConfigError, EngineError, StaleHandle
from ai_engine.runtime.buddy import BuddyRuns
from ai_engine.runtime.eviction import make_policy
from ai_engine.runtime.kv import PagePool

PAGE = 4


class World:
    """A pool, the memory it stands for, and what each sequence should read."""

    def __init__(self, num_pages: int = 24, policy: str = "lru", *, share: bool = True, max_pages: int = 12) -> None:
        self.memory = np.full((num_pages, PAGE), -1)
        self.pool = PagePool(num_pages, PAGE, max_pages, make_policy(policy), self._copy, share_prefixes=share)
        self.max_tokens = max_pages * PAGE
        self.tokens: dict[int, list[int]] = {}
        self.space: dict[int, str] = {}
        self.dead: list[int] = []

    def _copy(self, source: int, target: int) -> None:
        self.memory[target] = self.memory[source]

    def open(self, prompt: list[int], space: str = "") -> int:
        handle, cached = self.pool.open(space, np.array(prompt, np.int32), expect_tokens=len(prompt) + 8)
        assert cached % PAGE == 0
        assert cached < len(prompt) or not prompt
        self.tokens[handle], self.space[handle] = prompt[:cached], space
        return handle

    def append(self, handle: int, new: list[int]) -> bool:
        """Compute more tokens, as a step does; False when there are no pages for it."""
        need, before = self.pool.pages_needed(handle, len(new)), self.pool.budget()
        try:
            self.pool.extend(handle, len(new))
        except EngineError:
            assert need > before.available
            assert self.pool.budget() == before
            return False
        after = self.pool.budget()
        assert before.available - after.available <= need <= before.available
        pages, known = self.pool.pages(handle), self.tokens[handle]
        for at, token in enumerate(new, len(known)):
            self.memory[pages[at // PAGE], at % PAGE] = token
        known.extend(new)
        self.pool.commit(handle, np.array(known, np.int32), len(new))
        return True

    def fork(self, handle: int, num_tokens: int) -> int:
        new = self.pool.fork(handle, self.space[handle], num_tokens)
        self.tokens[new], self.space[new] = self.tokens[handle][:num_tokens], self.space[handle]
        return new

    def release(self, handle: int) -> None:
        self.pool.release(handle)
        del self.tokens[handle]
        self.dead.append(handle)

    def read(self, handle: int) -> list[int]:
        pages = self.pool.pages(handle)
        row = self.pool.table[self.pool.slot(handle)]
        assert row[: len(pages)].tolist() == pages
        return [int(self.memory[pages[at // PAGE], at % PAGE]) for at in range(self.pool.num_tokens(handle))]

    def check(self) -> None:
        self.pool.check_integrity()
        budget = self.pool.budget()
        assert budget.free + budget.cached + budget.held == budget.total
        for handle, tokens in self.tokens.items():
            assert self.read(handle) == tokens


class PoolMachine(RuleBasedStateMachine):
    policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.world = World(policy=self.policy)

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.world.tokens)))

    @rule(prompt=st.lists(st.integers(0, 1), max_size=30), space=st.sampled_from(["", "b"]))
    def open(self, prompt: list[int], space: str) -> None:
        self.world.open(prompt, space)

    @precondition(lambda self: self.world.tokens)
    @rule(data=st.data(), new=st.lists(st.integers(0, 1), max_size=14))
    def append(self, data: st.DataObject, new: list[int]) -> None:
        handle = self.pick(data)
        self.world.append(handle, new[: self.world.max_tokens - len(self.world.tokens[handle])])

    @precondition(lambda self: self.world.tokens)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        handle = self.pick(data)
        self.world.fork(handle, data.draw(st.integers(0, len(self.world.tokens[handle]))))

    @precondition(lambda self: self.world.tokens)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.world.release(self.pick(data))

    @rule()
    def drop_cache(self) -> None:
        self.world.pool.drop_cache()
        assert self.world.pool.budget().cached == 0

    @precondition(lambda self: self.world.dead)
    @rule(data=st.data())
    def stale(self, data: st.DataObject) -> None:
        with pytest.raises(StaleHandle):
            self.world.pool.release(data.draw(st.sampled_from(self.world.dead)))

    @invariant()
    def consistent(self) -> None:
        self.world.check()


class FifoMachine(PoolMachine):
    policy = "fifo"


class HybridMachine(PoolMachine):
    policy = "hybrid"


_RUNS = settings(max_examples=70, stateful_step_count=50, deadline=None)
TestLru = PoolMachine.TestCase
TestLru.settings = _RUNS
TestFifo = FifoMachine.TestCase
TestFifo.settings = _RUNS
TestHybrid = HybridMachine.TestCase
TestHybrid.settings = _RUNS


def random_walk(seed: int, num_ops: int, policy: str, *, share: bool = True, check_every: int = 1000) -> World:
    """A long random history of a small pool under pressure."""
    draw = random.Random(seed)
    world = World(64, policy, share=share, max_pages=16)
    for step in range(num_ops):
        kind, handles = draw.random(), list(world.tokens)
        if not handles or (kind < 0.15 and len(handles) < 12):
            world.open([draw.randrange(2) for _ in range(draw.randrange(40))], draw.choice(("", "b")))
            continue
        handle = draw.choice(handles)
        if kind < 0.75:
            room = world.max_tokens - len(world.tokens[handle])
            fits = world.append(handle, [draw.randrange(2) for _ in range(min(room, draw.choice((1, 1, 1, 5, 9))))])
            if not fits or room == 0:
                world.release(handle)
        elif kind < 0.85:
            if len(handles) < 12:
                world.fork(handle, draw.randint(0, len(world.tokens[handle])))
        else:
            world.release(handle)
        if step % check_every == 0:
            world.check()
    world.check()
    return world


@pytest.mark.parametrize("policy", ["lru", "fifo", "hybrid"])
def test_random_walk(policy: str) -> None:
    world = random_walk(1, 33_000, policy)
    assert world.pool.num_evicted > 100
    assert world.pool.num_copied > 100
    assert world.pool.num_hit_tokens > 100


def test_random_walk_without_sharing() -> None:
    world = random_walk(2, 10_000, "lru", share=False)
    assert world.pool.budget().cached == 0


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_a_million_operations(seed: int) -> None:
    random_walk(seed, 250_000, ("lru", "fifo", "hybrid", "lru")[seed], check_every=10_000)


def fill(world: World, prompt: list[int], space: str = "") -> int:
    handle = world.open(prompt, space)
    assert world.append(handle, prompt[len(world.tokens[handle]) :])
    return handle


def test_prefix_is_shared_while_running_and_after() -> None:
    world = World()
    prompt = list(range(10))
    first = fill(world, prompt)
    second = world.open(prompt)
    assert len(world.tokens[second]) == 8
    assert world.pool.pages(second) == world.pool.pages(first)[:2]
    world.release(first)
    world.release(second)
    assert world.pool.budget().cached == 2, "full pages stay, the partial one is free at once"
    assert len(world.tokens[world.open(prompt)]) == 8
    assert len(world.tokens[world.open(prompt[:8])]) == 4, "the last token is always computed"


def test_prefix_is_not_shared_across_namespaces() -> None:
    world = World()
    fill(world, list(range(10)), "alice")
    assert world.tokens[world.open(list(range(10)), "bob")] == []


def test_equal_pages_computed_side_by_side_become_one() -> None:
    world = World()
    a, b = world.open([1, 2, 3, 4, 5]), world.open([1, 2, 3, 4, 5])
    world.append(a, [1, 2, 3, 4, 5])
    world.append(b, [1, 2, 3, 4, 5])
    assert world.pool.pages(a)[0] == world.pool.pages(b)[0]
    world.check()


def test_fork_copies_only_the_partial_page_and_only_when_written() -> None:
    world = World()
    origin = fill(world, list(range(10)))
    fork = world.fork(origin, 9)
    assert world.pool.num_copied == 0
    assert world.pool.pages_needed(fork, 1) == 1
    world.append(fork, [77])
    assert world.pool.num_copied == 1
    assert world.pool.pages(fork)[:2] == world.pool.pages(origin)[:2]
    world.check()
    assert world.pool.pages_needed(origin, 1) == 0, "the origin is alone on its page again"


def test_long_requests_get_neighbouring_pages() -> None:
    world = World(64, max_pages=16)
    small = fill(world, [9, 9, 9])
    long = world.open(list(range(33)))
    for start in range(0, 33, 3):
        world.append(long, list(range(start, start + 3)))
        world.append(small, [1])
    pages = world.pool.pages(long)
    assert pages == list(range(pages[0], pages[0] + len(pages)))
    assert 0 <= world.pool.fragmentation() < 1


def test_pages_set_aside_serve_others_in_need() -> None:
    world = World(16, max_pages=16)
    world.open(list(range(16)))
    assert world.pool.budget().free == 16
    hungry = world.open([1])
    assert world.append(hungry, [1] * 64)
    assert world.pool.budget().held == 16


def test_eviction_order() -> None:
    def survivors(policy: str) -> list[bool]:
        world = World(6, policy)
        old, popular, new = [0] * 5, [1] * 5, [2] * 5
        for prompt in (old, popular, new):
            world.release(fill(world, prompt))
        for prompt in (popular, popular, new, old):
            world.release(world.open(prompt))
        assert world.append(world.open([9]), [9] * 16)
        return [bool(world.pool.open("", np.array(prompt, np.int32))[1]) for prompt in (old, popular, new)]

    assert survivors("lru") == [True, False, True]
    assert survivors("fifo") == [False, True, True]
    assert survivors("hybrid")[1]


def test_unknown_policy_names_the_flag() -> None:
    with pytest.raises(ConfigError, match="--eviction"):
        make_policy("random")


def test_stale_handles() -> None:
    world = World()
    handle = fill(world, [1, 2, 3])
    world.pool.release(handle)
    for call in (world.pool.release, world.pool.slot, world.pool.num_tokens, lambda h: world.pool.extend(h, 1)):
        with pytest.raises(StaleHandle):
            call(handle)
    again = world.open([1, 2, 3])
    assert again != handle
    assert world.pool.slot(again) == 0, "the slot is used again under a new generation"


def test_buddy_runs_merge_back() -> None:
    buddy = BuddyRuns(13)
    taken = [buddy.take() for _ in range(13)]
    assert sorted(page for page in taken if page is not None) == list(range(13))
    assert buddy.take() is None
    for page in taken:
        assert page is not None
        buddy.put(page)
    assert buddy.largest_run == 8
    assert sorted(buddy.pages()) == list(range(13))
    assert buddy.take(3) == 0
    assert buddy.take(2) == 8
    assert buddy.take(2) is None
    buddy.put_run(0, 7)
    assert buddy.largest_run == 4
