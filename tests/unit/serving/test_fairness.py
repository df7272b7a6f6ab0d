"""Tenants beside each other: nobody's flood is anybody else's wait, and weights are shares. On a virtual clock."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from ai_engine.ports.serving import GenerateRequest
from ai_engine.ports.telemetry import RequestScheduled, StepDone, TokenTimes
from ai_engine.serving.queue import FairQueue
from ai_engine.serving.shares import Shares, seats_of_one
from ai_engine.testing import FakeRuntime, HashModel, VirtualClock
from ai_engine.testing.runtime import DEFAULT_LIMITS
from tests.unit.serving.test_loop import Rig, request

STEP_S, ROW_S = 0.004, 0.0007
"""A small model on two cores: a step and a row of it."""


def rig(num_pages: int = 1024, **limits: Any) -> Rig:
    clock = VirtualClock()
    runtime = FakeRuntime(
        HashModel(),
        limits=msgspec.structs.replace(DEFAULT_LIMITS, **{"max_step_tokens": 512, **limits}),
        num_pages=num_pages,
        clock=clock,
        seconds_per_step=STEP_S,
        seconds_per_row=ROW_S,
    )
    made = Rig(runtime)
    made.clock = made.loop._clock = clock
    return made


def of(tenant: str, number: int, num_prompt: int, max_tokens: int, weight: float = 1.0) -> GenerateRequest:
    draw = random.Random(f"{tenant}{number}")
    prompt = [draw.randrange(900) for _ in range(num_prompt)]
    made = request(f"{tenant}{number}", prompt, max_tokens=max_tokens, ignore_eos=True)
    return msgspec.structs.replace(made, tenant=tenant, cache_scope=tenant, weight=weight)


def ttft_s(rig: Rig, request_id: str) -> float:
    (times,) = [event for event in rig.telemetry.of(TokenTimes) if event.request_id == request_id]
    assert times.ttft_s is not None
    return times.ttft_s


def until_first_token(rig: Rig, request_id: str) -> None:
    while not rig.tokens(request_id):
        rig.once()


@pytest.mark.parametrize("steps_before", [0, 1, 3, 10, 40, 150, 400])
@pytest.mark.parametrize(("num_in", "num_out"), [(128, 128), (4, 1000)])
def test_a_flood_of_one_key_costs_another_one_step(steps_before: int, num_in: int, num_out: int) -> None:
    """A: 200 requests of 128 in, 128 out; or answers that all sit for long. B: one prompt of 32. Its first token takes
    at most twice what it takes alone, and a step, whenever it comes."""
    alone = rig()
    alone.submit(of("b", 0, 32, 1))
    alone.run()
    flooded = rig(4096)
    for number in range(200):
        flooded.submit(of("a", number, num_in, num_out))
    for _ in range(steps_before):
        flooded.once()
    assert steps_before == 0 or len(flooded.loop.state.running) > 7, "the flood is not over"
    flooded.submit(of("b", 0, 32, 1))
    until_first_token(flooded, "b0")
    step_s = max(event.ended_s - event.started_s for event in flooded.telemetry.of(StepDone))
    assert ttft_s(flooded, "b0") <= 2 * ttft_s(alone, "b0") + step_s


def test_a_flood_does_not_slow_another_key_s_stream() -> None:
    """Once it runs, B's gaps are steps: nobody takes its seat."""
    flooded = rig()
    for number in range(200):
        flooded.submit(of("a", number, 128, 128))
    for _ in range(50):
        flooded.once()
    flooded.submit(of("b", 0, 32, 100))
    while flooded.loop.state.has_work and len(flooded.tokens("b0")) < 100:
        flooded.once()
    (times,) = [event for event in flooded.telemetry.of(TokenTimes) if event.request_id == "b0"]
    assert max(times.gaps_s) <= 2 * flooded.loop.state.config.step_target_s


def test_weights_are_shares_of_the_tokens() -> None:
    """Both always want more: the tokens that are computed for them are as 1 to 3."""
    both = rig()
    for number in range(300):
        both.submit(of("a", number, 64, 64, weight=1.0))
        both.submit(of("b", number, 64, 64, weight=3.0))
    given: Counter[str] = Counter()
    owner: dict[int, str] = {}
    for step in range(500):
        both.once()
        owner |= {choice.seq_id: choice.tenant for choice in both.loop.state.running}
        if step > 100:
            for work in both.runtime.plans[-1].work:
                given[owner.get(work.seq_id, "")] += work.num_tokens
    assert len(both.loop.state.queue) > 100, "both still want more"
    assert given["b"] / given["a"] == pytest.approx(3, rel=0.15)


def test_short_prompts_one_after_another_do_not_stop_a_long_one() -> None:
    """The other way round: B's next prompt is always there, and A's long one gets half of the rows."""
    shared = rig(4096, max_context=8192)
    shared.submit(of("a", 0, 6000, 1))
    shared.once()
    prefilled = {"a": 0, "b": 0}
    for number in range(60):
        shared.submit(of("b", number, 400, 1))
        while not shared.tokens(f"b{number}"):
            shared.once()
            for work in shared.runtime.plans[-1].work:
                tenant = next((c.tenant for c in shared.loop.state.running if c.seq_id == work.seq_id), "b")
                prefilled[tenant] += work.num_tokens
        if shared.tokens("a0"):
            break
    assert shared.tokens("a0"), "the long prompt is through"
    assert prefilled["a"] >= 0.3 * prefilled["b"]


def test_one_tenant_leaves_seats_and_nobody_in_particular_does_not() -> None:
    for tenant, seats in (("a", seats_of_one(32)), ("", 32)):
        full = rig()
        for number in range(100):
            full.submit(of(tenant, number, 4, 200))
        for _ in range(40):
            full.once()
        assert len(full.loop.state.running) == seats
    assert seats_of_one(32) == 28
    assert [seats_of_one(most) for most in (1, 2, 3, 8, 64)] == [1, 1, 2, 7, 56]


def test_choices_of_a_full_tenant_do_not_hold_up_the_queue() -> None:
    """Forks that wait for a seat of their tenant let others pass."""
    full = rig()
    for number in range(4):
        made = of("a", number, 32, 300)
        full.submit(msgspec.structs.replace(made, n=16))
    for _ in range(60):
        full.once()
    assert full.loop.state.parked
    full.submit(of("b", 0, 32, 1))
    until_first_token(full, "b0")
    assert ttft_s(full, "b0") < 1.0
    full.run()


def test_a_prefix_is_shared_within_its_scope_only() -> None:
    shared = rig()
    prompt = list(range(200))
    for name, scope in (("a0", "a"), ("a1", "a"), ("b0", "b"), ("s0", "s"), ("b1", "s")):
        made = request(name, prompt, max_tokens=1)
        shared.submit(msgspec.structs.replace(made, tenant=name[0], cache_scope=scope))
        shared.run()
    cached = {event.request_id: event.cached_tokens for event in shared.telemetry.of(RequestScheduled)}
    assert cached["a0"] == cached["b0"] == cached["s0"] == 0
    assert cached["a1"] == cached["b1"] >= 160


# --- the parts ---


def test_twice_the_weight_is_twice_the_tokens_through_the_queue() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(200):
        for tenant, weight in (("a", 1.0), ("b", 2.0), ("c", 0.5)):
            queue.push(f"{tenant}{number}", tenant, tenant=tenant, cost_tokens=100, weight=weight)
    first = Counter(queue.pop() for _ in range(140))
    assert first == {"a": 40, "b": 80, "c": 20}


def test_the_queue_passes_over_who_may_not_go() -> None:
    queue: FairQueue[str] = FairQueue()
    for key in ("a0", "a1", "b0", "c0"):
        queue.push(key, key, tenant=key[0], cost_tokens=10)
    assert queue.peek({"a"}) == "b0"
    assert queue.pop({"a", "b"}) == "c0"
    assert queue.peek({"a", "b"}) is None
    assert queue.pop({"a"}) == "b0"
    assert [queue.pop(), queue.pop()] == ["a0", "a1"]
    assert queue.peek() is None


def test_a_newcomer_starts_where_the_least_served_is() -> None:
    shares = Shares()
    shares.serve({"a": 100.0, "b": 40.0}, ["a", "b"])
    assert shares.served("new") == 40.0
    shares.serve({"new": 5.0, "a": 1.0}, ["a", "new"])
    assert [shares.served(tenant) for tenant in ("a", "new")] == [101.0, 45.0]
    shares.serve({}, [])
    assert shares.served("a") == 0.0, "what is not there any more is forgotten"
