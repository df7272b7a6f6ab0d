"""Constraints compiled beside the loop: deadline, bound, refusals, and requests without one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from ai_engine.ports.errors import InvalidJsonSchema, InvalidValue, Overloaded, UnsupportedParameter
from ai_engine.ports.grammar import Constraint, Grammar, Matcher
from ai_engine.ports.sampling import SamplingParams
from ai_engine.ports.serving import GenerateRequest
from ai_engine.ports.telemetry import MemorySet
from ai_engine.serving.compiling import Compilers
from ai_engine.serving.config import ServingConfig
from ai_engine.serving.service import Service
from ai_engine.testing import FakeRuntime, MemoryTelemetry


class FakeGrammar:
    def __init__(self, min_tokens: int) -> None:
        self.min_tokens = min_tokens

    def open(self) -> Matcher:
        raise AssertionError("not opened here")


class FakeGrammars:
    """Implements ports.grammar.Grammars: what ``act`` does."""

    nbytes = 1000

    def __init__(self, act: Callable[[Constraint], Grammar]) -> None:
        self.compile = act


def request(constraint: Constraint | None, max_tokens: int = 16) -> GenerateRequest:
    params = SamplingParams(seed=1, max_tokens=max_tokens)
    return GenerateRequest(request_id="r", trace_id="0" * 32, prompt=[1, 2], params=params, constraint=constraint)


ASKED = Constraint(kind="json_object", param="guided_json")


async def test_a_request_without_a_constraint_has_no_grammar_and_one_with_it_gets_its_own() -> None:
    made = FakeGrammar(4)
    compilers = Compilers(FakeGrammars(lambda constraint: made), ServingConfig())
    assert await compilers.compile(request(None)) is None
    assert await compilers.compile(request(ASKED)) is made
    with pytest.raises(InvalidValue, match="found 3, expected at least 4") as refused:
        await compilers.compile(request(ASKED, max_tokens=3))
    assert refused.value.param == "max_tokens"
    compilers.close()
    with pytest.raises(UnsupportedParameter) as unsupported:
        await Compilers(None, ServingConfig()).compile(request(ASKED))
    assert unsupported.value.param == "guided_json"


async def test_the_deadline_refuses_and_a_full_queue_is_an_overload() -> None:
    go_on = threading.Event()

    def slow(constraint: Constraint) -> Grammar:
        assert go_on.wait(10)
        return FakeGrammar(0)

    config = ServingConfig(compile_deadline_s=0.05, compile_threads=2, max_compiling=3)
    compilers = Compilers(FakeGrammars(slow), config)
    results: list[Any] = await asyncio.gather(
        *(compilers.compile(request(ASKED)) for _ in range(5)), return_exceptions=True
    )
    assert [type(result) for result in results] == [InvalidJsonSchema] * 2 + [Overloaded] * 3
    assert results[0].param == "guided_json"
    assert ["no thread" in str(result) for result in results] == [False, False, True, False, False]
    with pytest.raises(Overloaded, match="no thread"):  # those given up still hold the threads
        await compilers.compile(request(ASKED))
    go_on.set()
    for _ in range(100):
        await asyncio.sleep(0.01)
        if not compilers._waiting:
            break
    assert await compilers.compile(request(ASKED)) is not None
    compilers.close()


async def test_the_vocabulary_is_counted_when_it_is_there() -> None:
    telemetry = MemoryTelemetry()
    service = Service(FakeRuntime(), telemetry=telemetry, grammars=FakeGrammars(lambda constraint: FakeGrammar(1)))
    await service.start()
    for number in range(2):
        async for _ in await service.submit(msgspec.structs.replace(request(ASKED), request_id=str(number))):
            pass
    await service.close()
    assert [e for e in telemetry.events if isinstance(e, MemorySet)][-1:] == [MemorySet("grammars", 1000)]
    assert sum(isinstance(e, MemorySet) and e.category == "grammars" for e in telemetry.events) == 1


async def test_the_service_refuses_before_it_queues() -> None:
    def refuse(constraint: Constraint) -> Grammar:
        raise InvalidJsonSchema("guided_json: 'not' at '/not'", param="guided_json")

    service = Service(FakeRuntime(), telemetry=MemoryTelemetry(), grammars=FakeGrammars(refuse))
    await service.start()
    with pytest.raises(InvalidJsonSchema, match="'not' at '/not'"):
        await service.submit(request(ASKED))
    assert (await service.health()).queued_requests == 0
    async for chunk in await service.submit(request(None)):
        assert chunk.finish != "failed"
    await service.close()
