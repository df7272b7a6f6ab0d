"""The runtime port: every implementation keeps its rules, and the real one gives the same answer in any company."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from ai_engine.hardware.arena import MappedArena
from ai_engine.hardware.team import NativeTeam
from ai_engine.kernels.cpu.backend import CpuKernels
from ai_engine.ports.clock import SystemClock
from ai_engine.ports.model import DType
from ai_engine.ports.runtime import Limits, Runtime, StepPlan, Work
from ai_engine.runtime.engine import Engine, build_engine
from ai_engine.runtime.plan import EngineOptions
from ai_engine.testing.kernels import NullKernels
from ai_engine.testing.model import RandomModel
from ai_engine.testing.runtime import FakeRuntime
from tests.unit.runtime.support import LLAMA, config, make_engine, prefill, run_one, spec
from tests.unit.runtime.walk import WALK_OPTIONS, Walk

PAGE = 32


@pytest.fixture(params=["engine", "fake"])
def runtime(request: pytest.FixtureRequest) -> Runtime:
    """40 pages of 32 tokens, empty."""
    if request.param == "engine":
        return make_engine(kernels=NullKernels(), **WALK_OPTIONS)
    limits = Limits(max_context=192, max_step_tokens=64, max_seqs=6, max_logit_rows=64, vocab_size=97)
    return FakeRuntime(limits=limits, num_pages=40, page_tokens=PAGE)


def compute(runtime: Runtime, seq_id: int, num_tokens: int) -> list[int]:
    tokens: list[int] = []
    while num_tokens:
        take = min(num_tokens, 64)
        need, before = runtime.pages_needed(seq_id, take), runtime.budget()
        result = runtime.step(StepPlan(1, [Work(seq_id, take)]))
        assert result.budget == runtime.budget()
        assert before.available - result.budget.available == need
        assert result.budget.free + result.budget.cached + result.budget.held == result.budget.total
        tokens, num_tokens = result.outputs[0].tokens, num_tokens - take
    return tokens


def test_a_prompt_is_done_when_its_last_token_is_computed(runtime: Runtime) -> None:
    assert runtime.open(spec(1, [1] * 100)) == 0
    assert runtime.pages_needed(1, 100) == 4
    assert compute(runtime, 1, 60) == []
    assert len(compute(runtime, 1, 40)) == 1
    assert runtime.pages_needed(1, 28) == 0
    assert runtime.pages_needed(1, 29) == 1
    assert len(compute(runtime, 1, 1)) == 1


def test_release_keeps_full_pages_as_cache(runtime: Runtime) -> None:
    prompt = list(range(90))
    runtime.open(spec(1, prompt, namespace="a"))
    compute(runtime, 1, 90)
    budget = runtime.step(StepPlan(2, release=[1])).budget
    assert (budget.cached, budget.held) == (2, 0)
    assert runtime.open(spec(2, prompt, namespace="a")) == 64
    assert runtime.open(spec(3, prompt, namespace="b")) == 0
    assert runtime.open(spec(4, prompt, namespace="a", prompt_logprobs=0)) == 0
    assert runtime.open(spec(5, prompt[:64], namespace="a")) == 32, "one token is always left to compute"


def test_a_fork_shares_what_is_computed(runtime: Runtime) -> None:
    prompt = list(range(50))
    runtime.open(spec(1, prompt))
    first = compute(runtime, 1, 50)
    assert runtime.open(spec(2, prompt, fork_of=1)) == 49
    assert runtime.pages_needed(2, 1) == 1, "a copy of the shared last page"
    assert compute(runtime, 2, 1) == first
    assert runtime.open(spec(3, [*prompt[:40], 96, 96], fork_of=1)) == 40


def test_preempted_and_unknown_sequences_are_closed(runtime: Runtime) -> None:
    runtime.open(spec(1, [1] * 40))
    compute(runtime, 1, 40)
    assert runtime.step(StepPlan(2, preempt=[1])).budget.held == 0
    assert runtime.step(StepPlan(3, release=[1, 99])).outputs == []
    runtime.open(spec(1, [1] * 40))
    assert runtime.pages_needed(1, 1) >= 0


def test_an_open_that_fails_pins_no_page(runtime: Runtime) -> None:
    prompt = list(range(90))
    runtime.open(spec(1, prompt))
    compute(runtime, 1, 90)
    before = runtime.step(StepPlan(2, release=[1])).budget
    if isinstance(runtime, Engine):
        with pytest.raises(OverflowError):
            runtime.open(spec(2, prompt, top_k=1 << 31))
        runtime.check_integrity()
    assert runtime.budget() == before
    assert runtime.open(spec(2, prompt)) == 64


def test_drafts_and_logprobs(runtime: Runtime) -> None:
    runtime.open(spec(1, [1] * 10, logprobs=2, prompt_logprobs=0))
    result = runtime.step(StepPlan(1, [Work(1, 10)]))
    (output,) = result.outputs
    assert result.kept_rows == 10
    assert [score.token for score in output.prompt_logprobs or []] == [1] * 9
    assert [len(score.top) for score in output.logprobs or []] == [2]
    result = runtime.step(StepPlan(1, [Work(1, 1, (96, 95))]))
    (output,) = result.outputs
    assert result.kept_rows == 3
    assert 1 <= len(output.tokens) <= 3
    assert len(output.logprobs or []) == len(output.tokens)


# --- the same answer in any company, on real kernels


@pytest.fixture(scope="module")
def team() -> Iterator[NativeTeam]:
    team = NativeTeam(2)
    yield team
    team.close()


def cpu_engine(team: NativeTeam, file: RandomModel, **options: Any) -> Engine:
    return build_engine(
        file, CpuKernels(team), MappedArena, 1 << 30, SystemClock(), EngineOptions(**(WALK_OPTIONS | options)),
        warm_up=False,
    )  # fmt: skip


class Solo:
    """The next token of a sequence that runs alone, without a cache, its context computed at once."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.known: dict[tuple[int, ...], int] = {}

    def __call__(self, tokens: Sequence[int]) -> int:
        key = tuple(tokens)
        if key not in self.known:
            self.engine.open(spec(1, tokens, max_tokens=1))
            self.known[key] = prefill(self.engine, 1, len(tokens))[0]
            self.engine.step(StepPlan(1, release=[1]))
        return self.known[key]


MODELS = {
    "llama Q8_0": (LLAMA, DType.Q8_0),
    "gemma3 F16": (config(arch="gemma3", num_layers=3, window_pattern=2, sliding_window=40, rope_base_local=5000.0,
                          rope_interleaved=False), DType.F16),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_same_answer_in_any_company(team: NativeTeam, name: str) -> None:
    """Random batches, chunks, drafts, forks, preemptions, prefix hits and evictions: each token equals the solo one."""
    model, dtype = MODELS[name]
    file = RandomModel(model, dtype=dtype)
    solo = Solo(cpu_engine(team, file, prefix_cache=False, max_step_tokens=192, max_seqs=1))
    pages = 40 * PAGE * 128 * model.num_layers
    walk = Walk(1, cpu_engine(team, file, kv_memory=pages), solo)
    for _ in range(80):
        walk.step()
    walk.engine.check_integrity()
    assert walk.num_accepted > 20
    assert walk.engine.pool.num_hit_tokens > 0
    assert len(set(solo.known.values())) > 5
    walk.engine.close()
    solo.engine.close()


def test_seeded_answer_does_not_depend_on_threads_or_chunks() -> None:
    file = RandomModel(LLAMA, dtype=DType.Q8_0)
    prompt = [7, 1, 88, 3] * 12
    answers = []
    for threads, chunk in ((1, 48), (2, 48), (2, 5), (3, 17)):
        team = NativeTeam(threads)
        engine = cpu_engine(team, file)
        engine.open(spec(1, prompt, temperature=1.2, seed=5, top_p=0.95, repetition_penalty=1.1))
        tokens = prefill(engine, 1, len(prompt), chunk)
        answers.append(tokens + [run_one(engine, 1, 1).tokens[0] for _ in range(20)])
        engine.close()
        team.close()
    assert answers == answers[:1] * 4
