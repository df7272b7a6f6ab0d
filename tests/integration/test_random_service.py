"""Random workloads through the real service and the real engine with too few pages.

Preemptions, evictions, forks, cancels, deadlines of nothing, guesses and prompt logprobs mixed: every choice that
finishes says what it says alone and without guesses, bit by bit, and the page pool is whole after each step.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from ai_engine.app import NoTelemetry
from ai_engine.ports.runtime import KvBudget, Limits, MemoryReport, SequenceSpec, StepPlan, StepResult
from ai_engine.ports.sampling import SamplingParams
from ai_engine.ports.serving import Chunk, GenerateRequest, TokenLogprob
from ai_engine.runtime.engine import Engine
from ai_engine.serving.config import ServingConfig
from ai_engine.serving.service import Service
from tests.integration.engines import VOCAB, engine_of, write_model

MAX_CONTEXT = 192
NUM_PAGES = 14


class Checked:
    """Implements ports.runtime.Runtime by an engine whose pages are checked after each step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.broken: list[AssertionError] = []
        self.num_preempted = self.num_evicted = self.num_steps = self.num_guesses = self.num_accepted = 0

    @property
    def limits(self) -> Limits:
        return self.engine.limits

    @property
    def memory(self) -> MemoryReport:
        return self.engine.memory

    def budget(self) -> KvBudget:
        return self.engine.budget()

    def open(self, spec: SequenceSpec) -> int:
        return self.engine.open(spec)

    def pages_needed(self, seq_id: int, num_tokens: int) -> int:
        return self.engine.pages_needed(seq_id, num_tokens)

    def step(self, plan: StepPlan) -> StepResult:
        result = self.engine.step(plan)
        self.num_steps += 1
        self.num_preempted += len(plan.preempt)
        self.num_evicted += result.evicted_pages
        self.num_guesses += sum(len(work.draft) for work in plan.work)
        self.num_accepted += sum(max(0, len(output.tokens) - 1) for output in result.outputs)
        try:
            self.engine.pool.check_integrity()
            budget = result.budget
            assert budget.free + budget.cached + budget.held == budget.total
        except AssertionError as error:
            self.broken.append(error)
        return result

    def close(self) -> None:
        self.engine.close()


class Said(msgspec.Struct):
    """All of one choice."""

    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[TokenLogprob] = []
    finish: str | None = None

    def take(self, chunk: Chunk) -> None:
        assert self.finish is None, "something came after the terminal chunk"
        self.tokens += chunk.tokens
        self.logprobs += chunk.logprobs or []
        self.prompt_logprobs += chunk.prompt_logprobs or []
        self.finish = chunk.finish


def random_request(draw: random.Random, number: int) -> GenerateRequest:
    """Prompts begin alike in a few ways; half of them are longer than a page."""
    base = [draw.choice((7, 9))] * draw.choice((0, 31, 32, 40, 64))
    prompt = base + [draw.randrange(3, VOCAB) for _ in range(draw.randint(1, 34))]
    fields: dict[str, Any] = {"temperature": draw.choice((0.0, 0.0, 0.7, 1.0)), "seed": draw.randrange(1 << 40)}
    if draw.random() < 0.3:
        fields |= {"top_p": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.2}
    if draw.random() < 0.2:
        fields |= {"logit_bias": {draw.randrange(VOCAB): 4.0 for _ in range(3)}, "min_tokens": draw.randint(0, 30)}
    if draw.random() < 0.5:
        fields["logprobs"] = draw.choice((0, 2))
    if draw.random() < 0.2:
        fields["prompt_logprobs"] = 1
    if draw.random() < 0.3:
        fields["stop_token_ids"] = tuple(draw.randrange(VOCAB) for _ in range(30))
    return GenerateRequest(
        request_id=f"r{number}",
        trace_id=f"{number:032x}",
        prompt=prompt,
        params=SamplingParams(max_tokens=draw.choice((1, 20, 60, 90)), **fields),
        n=draw.choice((1, 1, 1, 2, 4)),
        priority=draw.choice((0, 0, 0, 1)),
        tenant=draw.choice(("", "", "b")),
    )


async def answers(service: Service, request: GenerateRequest, leave_after: int | None = None) -> list[Said]:
    """Every choice's chunks; ``leave_after`` so many chunks one choice is cancelled, or all."""
    said = [Said() for _ in range(request.n)]
    stream = await service.submit(request)
    count = 0
    async for chunk in stream:
        said[chunk.index].take(chunk)
        count += 1
        if count == leave_after:
            await service.cancel(request.request_id, None if len(request.prompt) % 2 else chunk.index)
    assert all(one.finish is not None for one in said)
    return said


async def solo(service: Service, request: GenerateRequest) -> list[Said]:
    """Each choice as a request of its own, one after the other."""
    said = []
    for index in range(request.n):
        params = msgspec.structs.replace(request.params, seed=(request.params.seed or 0) + index)
        alone = msgspec.structs.replace(request, request_id=f"{request.request_id}-{index}", n=1, params=params)
        said += await answers(service, alone)
    return said


@asynccontextmanager
async def service_of(
    path: Path, speculation: Literal["off", "lookup"] = "lookup", **options: Any
) -> AsyncIterator[tuple[Service, Checked]]:
    with engine_of(path, max_context=MAX_CONTEXT, **options) as engine:
        runtime = Checked(engine)
        # Optimistic admission: preemption has to make room.
        config = ServingConfig(growth_tokens=0, speculation=speculation)
        service = Service(runtime, telemetry=NoTelemetry(), config=config)
        await service.start()
        try:
            yield service, runtime
        finally:
            await service.close()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
async def test_random_workload(architecture: str, seed: int, tmp_path: Path) -> None:
    path = write_model(tmp_path, architecture, ("Q8_0", "Q4_K", "F16", "Q4_0")[seed])
    draw = random.Random(seed)
    requests = [random_request(draw, number) for number in range(40)]
    leave_after = [draw.randint(1, 12) if draw.random() < 0.3 else None for _ in requests]
    pauses_s = [draw.random() * 0.1 for _ in requests]

    async def at_some_time(service: Service, number: int) -> list[Said]:
        await asyncio.sleep(pauses_s[number])
        return await answers(service, requests[number], leave_after[number])

    async with service_of(path, "off", prefix_cache=False) as (service, plain):
        expected = [await solo(service, request) for request in requests]
        assert plain.num_guesses == 0
    with engine_of(path, max_context=MAX_CONTEXT) as probe:
        page_bytes = probe.plan.page_bytes
    options: dict[str, Any] = {
        "kv_memory": NUM_PAGES * page_bytes,
        "max_step_tokens": 48,
        "eviction": ("lru", "fifo", "hybrid")[seed % 3],
    }
    async with service_of(path, **options) as (service, runtime):
        async with asyncio.timeout(120):
            got = await asyncio.gather(*(at_some_time(service, number) for number in range(len(requests))))
        assert not runtime.broken, runtime.broken[0]
        # Preemptions depend on how arrivals and steps fall together; the fakes' tests force them.
        assert min(runtime.num_evicted, runtime.engine.pool.num_copied) > 0
        assert runtime.engine.pool.num_hit_tokens > 0
        assert 0 < runtime.num_accepted < runtime.num_guesses, "both right and wrong guesses"
        service.loop.check_integrity()
        health = await service.health()
        assert (health.queued_requests, health.running_requests) == (0, 0)
    num_whole = 0
    for request, had, want in zip(requests, got, expected, strict=True):
        for one, other in zip(had, want, strict=True):
            if one.finish == "cancelled":
                assert one.tokens == other.tokens[: len(one.tokens)]
                continue
            if one is not had[0]:  # prompt logprobs come with choice 0
                other.prompt_logprobs = []
            assert msgspec.msgpack.encode(one) == msgspec.msgpack.encode(other), request
            num_whole += 1
    assert num_whole > 30
