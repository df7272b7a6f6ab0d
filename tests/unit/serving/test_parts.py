"""The fair queue, the cost model and the merging stream, alone."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ai_engine.ports.serving import Chunk, TokenLogprob, Usage
from ai_engine.ports.streams import ChunkBuffer, ChunkStream, merge_chunks
from ai_engine.serving.cost import CostModel, Load, prior_s
from ai_engine.serving.queue import FairQueue


def test_a_flooding_tenant_waits_behind_itself_only() -> None:
    queue: FairQueue[str] = FairQueue()
    for i in range(50):
        queue.push(f"flood{i}", f"flood{i}", tenant="flood", cost_tokens=100)
    queue.push("late", "late", tenant="other", cost_tokens=100)
    order = [queue.pop() for _ in range(51)]
    assert order.index("late") <= 1


def test_shares_are_by_tokens_not_by_requests() -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for i in range(100):
        queue.push(f"big{i}", ("big", 400), tenant="big", cost_tokens=400)
        queue.push(f"small{i}", ("small", 100), tenant="small", cost_tokens=100)
    served = {"big": 0, "small": 0}
    for _ in range(100):
        tenant, tokens = queue.pop()
        served[tenant] += tokens
    assert abs(served["big"] - served["small"]) <= 500


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50), st.integers(0, 2), st.booleans()), max_size=40))
@settings(deadline=None)
def test_everyone_leaves_once_in_order_of_priority(items: list[tuple[str, int, int, bool]]) -> None:
    queue: FairQueue[int] = FairQueue()
    for i, (tenant, cost, priority, _) in enumerate(items):
        queue.push(str(i), i, tenant=tenant, cost_tokens=cost, priority=priority)
    for i, item in enumerate(items):
        if item[3]:
            queue.remove(str(i))
    left = []
    while (head := queue.peek()) is not None:
        assert queue.pop() == head
        left.append(head)
    assert sorted(left) == [i for i, item in enumerate(items) if not item[3]]
    priorities = [items[i][2] for i in left]
    assert priorities == sorted(priorities)
    for tenant in "abc":  # within a tenant and a priority: as they came
        for priority in range(3):
            own = [i for i in left if items[i][0] == tenant and items[i][2] == priority]
            assert own == sorted(own)
    assert len(queue) == 0


PRIOR_S = prior_s(100 << 20, 24 << 10)


def _true_s(load: Load) -> float:
    return 0.004 + 0.0003 * load.rows + 0.0002 * load.logit_rows + 2e-8 * load.attended + 1e-7 * load.context


def _load(rng: random.Random) -> Load:
    load = Load()
    for _ in range(rng.randrange(1, 9)):
        load.add(1, 1, rng.randrange(2000))
    if rng.random() < 0.5:
        load.add(rng.randrange(1, 200), 0, rng.randrange(2000))
    return load


def test_the_cost_model_learns_the_machine_through_outliers() -> None:
    rng, model = random.Random(1), CostModel(PRIOR_S)
    for _ in range(400):
        load = _load(rng)
        noise = rng.gauss(1, 0.03) * (8 if rng.random() < 0.03 else 1)
        model.observe(load, _true_s(load) * noise)
    errors = [abs(model.predict_s(load) / _true_s(load) - 1) for load in (_load(rng) for _ in range(200))]
    assert sorted(errors)[180] < 0.15


def test_the_cost_model_follows_drift() -> None:
    rng, model = random.Random(2), CostModel(PRIOR_S)
    for factor in (1.0, 2.5):
        for _ in range(600):
            load = _load(rng)
            model.observe(load, factor * _true_s(load) * rng.gauss(1, 0.03))
        load = _load(rng)
        assert model.predict_s(load) == pytest.approx(factor * _true_s(load), rel=0.2)


def test_long_decode_does_not_unlearn_what_prefill_costs() -> None:
    rng, model = random.Random(3), CostModel(PRIOR_S)
    for _ in range(100):
        load = _load(rng)
        model.observe(load, _true_s(load))
    chunk = Load()
    chunk.add(150, 1, 0)
    before = model.predict_s(chunk)
    for depth in range(3000):
        load = Load()
        load.add(1, 1, depth % 500)
        model.observe(load, _true_s(load) * rng.gauss(1, 0.05))
    assert model.predict_s(chunk) == pytest.approx(before, rel=0.25)


def test_a_price_that_is_far_off_is_unlearned_through_outliers() -> None:
    """After steps of one row, in which rows cannot be told from the rest, chunks come that cost a fraction of what was
    thought: the first differ so much that they count as outliers, and yet each is a step towards the truth."""
    rng = random.Random(4)
    model = CostModel(prior_s(1_200_000_000, 23_040))

    def step(rows: int) -> tuple[Load, float]:
        load = Load()
        load.add(rows, 1, 100)
        return load, (0.09 + 0.001 * rows) * rng.gauss(1, 0.03)

    for _ in range(40):
        model.observe(*step(1))
    for _ in range(80):
        model.observe(*step(9))
    for rows in (1, 9, 40):
        load, seconds = step(rows)
        assert model.predict_s(load) == pytest.approx(seconds, rel=0.15)


@given(st.floats(0, 1), st.integers(0, 100), st.integers(0, 100_000))
@settings(deadline=None)
def test_rows_within_is_what_predict_says(seconds: float, rows: int, depth: int) -> None:
    model = CostModel(PRIOR_S)
    load = Load()
    load.add(rows, 1, 10)
    fits = model.rows_within(seconds, load, depth)
    more = msgspec.structs.replace(load)
    more.add(fits, 0, depth)
    assert fits == 0 or model.predict_s(more) <= seconds + 1e-9
    more = msgspec.structs.replace(load)
    more.add(fits + 1, 0, depth)
    assert model.predict_s(more) > seconds - 1e-6


def chunk(tokens: list[int], index: int = 0, *, end: bool = False) -> Chunk:
    return Chunk(
        request_id="r",
        index=index,
        tokens=list(tokens),
        logprobs=[TokenLogprob(token, -1.0) for token in tokens],
        finish="length" if end else None,
        usage=Usage(1, 1) if end else None,
    )


def test_merged_chunks_say_what_both_said() -> None:
    merged = merge_chunks(merge_chunks(chunk([1, 2]), chunk([3])), chunk([4], end=True))
    assert merged == chunk([1, 2, 3, 4], end=True)


async def test_an_unread_stream_keeps_one_chunk_per_choice() -> None:
    buffer = ChunkBuffer(2)
    abandoned: list[int] = []
    stream = ChunkStream(buffer, lambda: abandoned.append(1))
    for i in range(1000):
        buffer.push(chunk([i], index=i % 2))
    buffer.push(chunk([7], index=0, end=True))
    buffer.push(chunk([8], index=0, end=True))  # after the end: dropped
    got = [await anext(stream), await anext(stream)]
    assert [len(c.tokens) for c in got] == [501, 500]
    assert [c.finish for c in got] == ["length", None]
    buffer.fail("r", "engine_error", "x")
    assert (await anext(stream)).error_code == "engine_error"
    assert [c async for c in stream] == []
    await stream.aclose()
    assert abandoned == []


async def test_an_abandoned_stream_says_so_once() -> None:
    abandoned: list[int] = []
    stream = ChunkStream(ChunkBuffer(1), lambda: abandoned.append(1))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(stream), 0.01)
    assert abandoned == []
    await stream.aclose()
    await stream.aclose()
    del stream
    assert abandoned == [1]
