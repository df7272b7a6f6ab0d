"""The serving port: what every placement of every implementation must do. Service in process and over a socket."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ai_engine.ports.clock import SystemClock
from ai_engine.ports.errors import ContextLengthExceeded, InvalidValue, Overloaded, ShuttingDown
from ai_engine.ports.runtime import Limits, SequenceSpec, StepPlan
from ai_engine.ports.sampling import SamplingParams
from ai_engine.ports.serving import Chunk, GenerateRequest, Serving
from ai_engine.ports.telemetry import MemorySet, RequestQueued, RequestRefused, RequestScheduled, StepDone, TokenTimes
from ai_engine.serving.config import ServingConfig
from ai_engine.serving.service import Service
from ai_engine.testing import FakeRuntime, HashModel, MemoryTelemetry
from ai_engine.testing.runtime import solo
from ai_engine.wire import ServingClient, TelemetryClient, serve_serving

LIMITS = Limits(max_context=512, max_step_tokens=64, max_seqs=8, max_logit_rows=16, vocab_size=1000)
EOS = 7


class Gate:
    """Holds the runtime in a step: ``close``, wait until ``entered``, then ``open``."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.entered = threading.Event()
        self.fail: Callable[[StepPlan], bool] = lambda plan: False
        self.step_s = 0.0

    def __call__(self, plan: StepPlan) -> None:
        self.entered.set()
        assert self._open.wait(10), "nobody opened the gate"
        if self.step_s:
            threading.Event().wait(self.step_s)
        if plan.work and self.fail(plan):
            raise RuntimeError("injected")

    def close(self) -> None:
        self.entered.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def wait_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, 10)


class Bench:
    """A placement under test: the port, and the parts behind it."""

    def __init__(self, serving: Serving, service: Service, runtime: FakeRuntime, gate: Gate) -> None:
        self.serving = serving
        self.service = service
        self.runtime = runtime
        self.gate = gate
        self.telemetry = MemoryTelemetry()
        self._ids = 0

    def request(self, prompt: list[int] | None = None, **options: Any) -> GenerateRequest:
        self._ids += 1
        fields = {key: options.pop(key) for key in ("n", "timeout_s", "tenant", "priority") if key in options}
        params = SamplingParams(**({"seed": 1, "max_tokens": 8} | options))
        return GenerateRequest(
            request_id=f"r{self._ids}", trace_id="0" * 32, prompt=prompt or [1, 2, 3], params=params, **fields
        )

    def expected(self, request: GenerateRequest, index: int = 0) -> list[int]:
        """What this choice gives alone."""
        assert request.params.seed is not None
        params = SamplingParams(seed=request.params.seed + index, max_tokens=request.params.max_tokens)
        spec = SequenceSpec(seq_id=0, tokens=request.prompt, prompt_len=len(request.prompt), params=params)
        tokens = solo(self.runtime, spec)
        return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens

    async def settled(self) -> None:
        """Wait until the step loop sleeps; then nothing may be left."""
        for _ in range(1000):
            if self.service.loop.idle:
                break
            await asyncio.sleep(0.005)
        assert self.service.loop.idle
        self.service.loop.check_integrity()
        self.runtime.check_integrity()
        assert self.runtime.open_sequences == 0
        assert self.runtime.budget().held == 0
        assert self.service.queued_requests == self.service.queued_tokens == 0


@asynccontextmanager
async def bench(placement: str, tmp_path: Path, *, num_pages: int = 64, **config: Any) -> AsyncIterator[Bench]:
    gate = Gate()
    model = HashModel(LIMITS.vocab_size, eos_id=EOS, eos_per_mille=10)
    runtime = FakeRuntime(model, limits=LIMITS, num_pages=num_pages, clock=SystemClock(), on_step=gate)
    events = TelemetryClient() if placement == "wire" else None
    memory = MemoryTelemetry()
    service = Service(runtime, telemetry=events or memory, config=ServingConfig(**config), eos_ids=frozenset({EOS}))
    await service.start()
    serving: Serving = service
    if placement == "wire":
        path = str(tmp_path / "serving")
        server = asyncio.create_task(serve_serving(path, service, telemetry=events))
        serving = await ServingClient.connect(path, telemetry=memory)
    under_test = Bench(serving, service, runtime, gate)
    under_test.telemetry = memory
    try:
        yield under_test
    finally:
        gate.open()
        if isinstance(serving, ServingClient):
            await serving.close()
            await server
        await service.close()


@pytest.fixture(params=["in process", "wire"])
def placement(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def read(serving: Serving, request: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in await serving.submit(request)]


def tokens_of(chunks: list[Chunk], index: int = 0) -> list[int]:
    return [token for chunk in chunks if chunk.index == index for token in chunk.tokens]


def terminals(chunks: list[Chunk]) -> dict[int, Chunk]:
    """The terminal chunk of each choice; asserts that it is the choice's only and last one."""
    ends: dict[int, Chunk] = {}
    for chunk in chunks:
        assert chunk.index not in ends, chunk
        if chunk.finish is not None:
            assert chunk.usage is not None or chunk.finish == "failed"
            ends[chunk.index] = chunk
    return ends


async def test_an_answer(placement: str, tmp_path: Path) -> None:
    async with bench(placement, tmp_path) as b:
        request = b.request(list(range(100, 150)), max_tokens=20, logprobs=2, prompt_logprobs=1)
        chunks = await read(b.serving, request)
        expected = b.expected(request)
        assert tokens_of(chunks) == expected
        end = terminals(chunks)[0]
        assert end.finish == ("stop" if expected[-1] == EOS else "length")
        assert end.usage is not None
        assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (50, len(expected))
        assert [lp.token for c in chunks for lp in c.logprobs or ()] == expected
        assert [lp.token for c in chunks for lp in c.prompt_logprobs or ()] == request.prompt[1:]
        await b.settled()


async def test_telemetry(placement: str, tmp_path: Path) -> None:
    async with bench(placement, tmp_path) as b:
        request = b.request(max_tokens=5)
        chunks = await read(b.serving, request)
        await b.settled()
        await asyncio.sleep(0.1 if placement == "wire" else 0)
        assert [e.category for e in b.telemetry.of(MemorySet)] == ["weights", "kv", "activations", "workspace"]
        assert [e.request_id for e in b.telemetry.of(RequestQueued)] == [request.request_id]
        assert [e.request_id for e in b.telemetry.of(RequestScheduled)] == [request.request_id]
        steps = b.telemetry.of(StepDone)
        assert [e.step for e in steps] == list(range(1, len(steps) + 1))
        assert sum(e.prefill_tokens for e in steps) == 3
        [times] = b.telemetry.of(TokenTimes)
        usage = terminals(chunks)[0].usage
        assert usage is not None
        assert len(times.gaps_s) == usage.completion_tokens - 1
        assert times.ttft_s is not None
        assert 0 <= times.queue_s <= times.ttft_s <= times.e2e_s


async def test_choices_share_the_prompt_and_sample_on_their_own(placement: str, tmp_path: Path) -> None:
    async with bench(placement, tmp_path) as b:
        request = b.request(list(range(40)), n=4, max_tokens=12, temperature=1.0)
        chunks = await read(b.serving, request)
        assert set(terminals(chunks)) == {0, 1, 2, 3}
        for index in range(4):
            assert tokens_of(chunks, index) == b.expected(request, index)
        prompt_tokens = [end.usage.prompt_tokens for end in terminals(chunks).values() if end.usage]
        assert sum(prompt_tokens) == 40
        rows = sum(work.num_tokens for plan in b.runtime.plans for work in plan.work)
        assert rows < 40 + 4 * 12 + 4, "the prompt was computed more than once"
        await b.settled()


async def test_cancel_of_one_choice_leaves_the_others(placement: str, tmp_path: Path) -> None:
    async with bench(placement, tmp_path) as b:
        b.gate.step_s = 0.002
        request = b.request(list(range(40)), n=3, max_tokens=60, ignore_eos=True)
        chunks = []
        async for chunk in await b.serving.submit(request):
            chunks.append(chunk)
            if chunk.index == 0 and len(tokens_of(chunks)) == 2:
                await b.serving.cancel(request.request_id, 0)
        ends = terminals(chunks)
        assert {i: end.finish for i, end in ends.items()} == {0: "cancelled", 1: "length", 2: "length"}
        assert len(tokens_of(chunks, 1)) == 60
        await b.settled()


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
async def test_cancel_frees_within_one_step(placement: str, tmp_path: Path, phase: str) -> None:
    async with bench(placement, tmp_path, max_running=1 if phase == "queued" else 0, min_prefill_tokens=4) as b:
        b.gate.step_s = 0.01
        prompt = list(range(300)) if phase == "prefill" else [5, 6]
        blocker = None
        if phase == "queued":
            b.gate.close()
            blocker = asyncio.create_task(read(b.serving, b.request(max_tokens=4)))
            await b.gate.wait_entered()
        request = b.request(prompt, max_tokens=100, ignore_eos=True)
        stream = await b.serving.submit(request)
        if phase == "decode":
            await anext(stream)
        b.gate.close()
        if phase != "queued":
            await b.gate.wait_entered()
        await b.serving.cancel(request.request_id)
        await asyncio.sleep(0.05)  # it has reached the intake; the step still runs
        before = len(b.runtime.plans)
        b.gate.open()
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].finish == "cancelled"
        assert chunks[-1].error_code == "cancelled"
        if blocker is not None:
            await blocker
        await b.settled()
        mine = [plan for plan in b.runtime.plans[before:] if plan.work]
        if phase != "queued":
            assert not mine, "it ran on after the cancel"


async def test_closing_or_dropping_the_stream_cancels(placement: str, tmp_path: Path) -> None:
    async with bench(placement, tmp_path) as b:
        b.gate.step_s = 0.002
        stream: Any = await b.serving.submit(b.request(max_tokens=400, ignore_eos=True))
        await anext(stream)
        await stream.aclose()
        dropped: Any = await b.serving.submit(b.request(max_tokens=400, ignore_eos=True))
        await anext(dropped)
        del dropped
        gc.collect()
        await asyncio.sleep(0.05)
        await b.settled()
        assert len(b.runtime.plans) < 200


async def test_a_read_with_a_time_limit_can_be_tried_again(placement: str, tmp_path: Path) -> None:
    async with bench(placement, tmp_path) as b:
        b.gate.close()
        request = b.request()
        stream = await b.serving.submit(request)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.02)
        b.gate.open()
        assert tokens_of([chunk async for chunk in stream]) == b.expected(request)


async def test_deadline_in_the_queue_and_while_running(placement: str, tmp_path: Path) -> None:
    async with bench(placement, tmp_path, max_running=1) as b:
        b.gate.step_s = 0.005
        running = b.request(max_tokens=400, ignore_eos=True, timeout_s=0.15)
        queued = b.request(timeout_s=0.05)
        results = await asyncio.gather(read(b.serving, running), read(b.serving, queued))
        for chunks in results:
            assert terminals(chunks)[0].error_code == "deadline_exceeded"
        assert tokens_of(results[0])
        assert not tokens_of(results[1])
        await b.settled()


async def test_refusals(placement: str, tmp_path: Path) -> None:
    async with bench(placement, tmp_path) as b:
        with pytest.raises(ContextLengthExceeded, match=r"500 tokens.* is 20.* 520.* 512"):
            await b.serving.submit(b.request([1] * 500, max_tokens=20))
        with pytest.raises(InvalidValue, match="token id 1000") as caught:
            await b.serving.submit(b.request([1, 1000]))
        assert caught.value.param == "prompt"
        assert (await b.serving.health()).queued_requests == 0
        await asyncio.sleep(0.1 if placement == "wire" else 0)
        refused = [event.reason for event in b.telemetry.of(RequestRefused)]
        assert refused == ["context_length_exceeded", "invalid_value"]
        await b.settled()


async def test_a_request_larger_than_the_pool_is_refused(placement: str, tmp_path: Path) -> None:
    async with bench(placement, tmp_path, num_pages=4) as b:
        with pytest.raises(ContextLengthExceeded, match="64"):
            await b.serving.submit(b.request([1] * 60, max_tokens=10))


@pytest.mark.parametrize("bound", [{"max_queue_requests": 2}, {"max_queue_tokens": 24}])
async def test_overload(placement: str, tmp_path: Path, bound: dict[str, int]) -> None:
    async with bench(placement, tmp_path, **bound) as b:
        b.gate.close()
        tasks = [asyncio.create_task(read(b.serving, b.request()))]
        await b.gate.wait_entered()
        tasks += [asyncio.create_task(read(b.serving, b.request())) for _ in range(2)]
        await asyncio.sleep(0.05)
        assert (await b.serving.health()).queued_requests == 2
        with pytest.raises(Overloaded) as caught:
            await b.serving.submit(b.request())
        assert caught.value.code == "server_overloaded"
        assert caught.value.retry_after_s is not None
        assert 1 <= caught.value.retry_after_s <= 60
        b.gate.open()
        assert all(terminals(chunks) for chunks in await asyncio.gather(*tasks))
        await b.settled()


async def test_drain_finishes_what_runs(placement: str, tmp_path: Path) -> None:
    async with bench(placement, tmp_path) as b:
        b.gate.step_s = 0.002
        task = asyncio.create_task(read(b.serving, b.request(max_tokens=20, ignore_eos=True)))
        await b.gate.wait_entered()
        drain = asyncio.create_task(b.serving.drain(10))
        await asyncio.sleep(0.01)
        assert not (await b.serving.health()).ready
        with pytest.raises(ShuttingDown):
            await b.serving.submit(b.request())
        await drain
        assert terminals(await task)[0].finish == "length"


async def test_drain_fails_the_rest_at_its_deadline(placement: str, tmp_path: Path) -> None:
    async with bench(placement, tmp_path, drain_grace_s=0.1) as b:
        b.gate.step_s = 0.002
        slow = asyncio.create_task(read(b.serving, b.request(max_tokens=500, ignore_eos=True)))
        await b.gate.wait_entered()
        await b.serving.drain(0.05)
        assert terminals(await slow)[0].error_code == "shutting_down"
        await b.settled()


async def test_drain_ends_though_a_step_is_stuck(placement: str, tmp_path: Path) -> None:
    async with bench(placement, tmp_path, drain_grace_s=0.05) as b:
        b.gate.close()
        stuck = asyncio.create_task(read(b.serving, b.request()))
        await b.gate.wait_entered()
        await b.serving.drain(0.05)
        assert terminals(await stuck)[0].error_code == "shutting_down"


async def test_a_failed_step_fails_its_sequences_only(placement: str, tmp_path: Path) -> None:
    async with bench(placement, tmp_path, max_running=2) as b:
        b.gate.close()
        first = [b.request(max_tokens=30, ignore_eos=True) for _ in range(2)]
        tasks = [asyncio.create_task(read(b.serving, r)) for r in first]
        await b.gate.wait_entered()
        waiting = b.request(max_tokens=5)
        tasks.append(asyncio.create_task(read(b.serving, waiting)))
        await asyncio.sleep(0.05)
        failed: list[int] = []
        b.gate.fail = lambda plan: len(plan.work) == 2 and not failed and not failed.append(plan.step)  # type: ignore[func-returns-value]
        b.gate.open()
        *broken, survivor = await asyncio.gather(*tasks)
        for chunks in broken:
            assert terminals(chunks)[0].error_code == "engine_error"
        assert tokens_of(survivor) == b.expected(waiting)
        assert (await b.serving.health()).ready
        await b.settled()


async def test_steps_that_keep_failing_make_it_not_ready_until_one_succeeds(placement: str, tmp_path: Path) -> None:
    async with bench(placement, tmp_path, max_failed_steps=3) as b:
        b.gate.fail = lambda plan: True
        for _ in range(3):
            chunks = await read(b.serving, b.request())
            assert terminals(chunks)[0].error_code == "engine_error"
        health = await b.serving.health()
        assert (health.live, health.ready) == (True, False)
        assert "injected" in health.reason
        b.gate.fail = lambda plan: False
        request = b.request()
        assert tokens_of(await read(b.serving, request)) == b.expected(request)
        assert (await b.serving.health()).ready
        await b.settled()


async def test_a_poisoned_sequence_fails_alone(placement: str, tmp_path: Path) -> None:
    async with bench(placement, tmp_path) as b:
        b.runtime.poison = lambda spec: spec.tokens[0] == 13
        bad, good = b.request([13, 1]), b.request([14, 1])
        results = await asyncio.gather(read(b.serving, bad), read(b.serving, good))
        assert terminals(results[0])[0].error_code == "engine_error"
        assert tokens_of(results[1]) == b.expected(good)
        await b.settled()


async def test_a_stuck_step_is_not_ready(placement: str, tmp_path: Path) -> None:
    async with bench(placement, tmp_path, stall_s=0.05) as b:
        assert (await b.serving.health()).ready
        b.gate.close()
        task = asyncio.create_task(read(b.serving, b.request()))
        await b.gate.wait_entered()
        await asyncio.sleep(0.1)
        health = await b.serving.health()
        assert (health.live, health.ready) == (True, False)
        b.gate.open()
        await task
        await b.settled()
        assert (await b.serving.health()).ready


async def test_a_step_that_does_not_end_is_told_and_fails_only_its_requests(
    placement: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with bench(placement, tmp_path, stall_s=0.05, fail_stuck_s=0.2, max_running=1) as b:
        b.gate.close()
        stuck, waiting = b.request([11, 12, 13], n=2), b.request(max_tokens=5)
        stuck_task = asyncio.create_task(read(b.serving, stuck))
        await b.gate.wait_entered()
        waiting_task = asyncio.create_task(read(b.serving, waiting))
        ends = terminals(await asyncio.wait_for(stuck_task, 10))
        assert {index: end.error_code for index, end in ends.items()} == {0: "engine_error", 1: "engine_error"}
        assert "has not ended" in (ends[0].error_message or "")
        assert not waiting_task.done(), "it runs in no step"
        (told,) = [record.getMessage() for record in caplog.records if record.name == "ai_engine.serving.watchdog"]
        assert f"of {stuck.request_id}: 3 tokens after 0" in told, "the batch"
        assert "thread step-loop" in told, "the stacks"
        assert "nobody opened the gate" in told, "down to the line that waits"
        b.gate.open()
        assert tokens_of(await waiting_task) == b.expected(waiting)
        await b.settled()


async def test_a_slow_reader_costs_only_itself(placement: str, tmp_path: Path) -> None:
    async with bench(placement, tmp_path) as b:
        slow, fast = (b.request(p, max_tokens=200, ignore_eos=True, logprobs=1) for p in ([1, 2], [3, 4]))
        slow_stream = await b.serving.submit(slow)
        fast_chunks = await read(b.serving, fast)
        await b.settled()
        await asyncio.sleep(0.1 if placement == "wire" else 0)
        chunks = [chunk async for chunk in slow_stream]
        assert len(tokens_of(fast_chunks)) == 200
        assert len(chunks) <= 2, "unread chunks merge"
        assert len(tokens_of(chunks)) == 200
        assert len([lp for chunk in chunks for lp in chunk.logprobs or ()]) == 200


async def test_idle_costs_no_cpu(placement: str, tmp_path: Path) -> None:
    async with bench(placement, tmp_path) as b:
        await read(b.serving, b.request())
        await b.settled()
        await asyncio.sleep(0.05)
        start = os.times()
        await asyncio.sleep(0.3)
        used = os.times()
        assert used.user + used.system - start.user - start.system <= 0.02


async def test_500_requests_with_random_cancels(placement: str, tmp_path: Path) -> None:
    rng = random.Random(5)
    open_fds = len(os.listdir("/proc/self/fd"))
    async with bench(placement, tmp_path, num_pages=20, growth_tokens=0, max_queue_requests=600) as b:
        requests = [_random_request(b, rng) for _ in range(500)]

        async def run(request: GenerateRequest, cancel_after: int | None) -> list[Chunk]:
            await asyncio.sleep(rng.random() * 0.3)
            stream = await b.serving.submit(request)
            if cancel_after == 0:
                await b.serving.cancel(request.request_id)
            chunks = []
            async for chunk in stream:
                chunks.append(chunk)
                if len(chunks) == cancel_after:
                    await b.serving.cancel(request.request_id)
            return chunks

        cancels = [rng.randrange(4) if rng.random() < 0.4 else None for _ in requests]
        results = await asyncio.gather(*map(run, requests, cancels))
        for request, chunks, cancel in zip(requests, results, cancels, strict=True):
            ends = terminals(chunks)
            assert set(ends) == set(range(request.n))
            for index, end in ends.items():
                expected, got = b.expected(request, index), tokens_of(chunks, index)
                if cancel is None or end.finish != "cancelled":
                    assert end.finish in ("stop", "length")
                    assert got == expected
                else:
                    assert got == expected[: len(got)]
        await b.settled()
        assert sum(len(plan.preempt) for plan in b.runtime.plans) > 0, "the pool was meant to be short"
    assert len(asyncio.all_tasks()) == 1
    assert len(os.listdir("/proc/self/fd")) <= open_fds
    assert not [t for t in threading.enumerate() if t.name == "step-loop"]


def _random_request(b: Bench, rng: random.Random) -> GenerateRequest:
    shared = [1] * rng.choice([0, 16, 32])
    prompt = shared + [rng.randrange(1000) for _ in range(rng.choice([1, 3, 20]))]
    return b.request(
        prompt,
        max_tokens=rng.choice([1, 4, 20, 60]),
        seed=rng.randrange(1000),
        n=rng.choice([1, 1, 1, 3]),
        tenant=rng.choice(["", "a"]),
        priority=rng.choice([0, 0, 1]),
    )
