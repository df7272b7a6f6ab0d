"""The engine over the reference kernels: right numbers, and the same answer in any company."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from ai_engine.data.safetensors import SafetensorsDir
from ai_engine.kernels.reference.backend import ReferenceKernels
from ai_engine.ports.errors import ConfigError, EngineError, StaleHandle, UnsupportedModel
from ai_engine.ports.kernels import Program, SampleOut, StepBatch
from ai_engine.ports.model import DType
from ai_engine.ports.runtime import StepPlan, Work
from ai_engine.runtime.engine import Engine
from ai_engine.runtime.inspect import describe_graph, inspect_model, inspection_text, teacher_forced_logits
from ai_engine.runtime.passes import DEFAULT_PASSES, PLAIN_PASSES
from ai_engine.runtime.plan import EngineOptions, make_plan
from ai_engine.testing.arena import PlainArena
from ai_engine.testing.model import RandomModel
from tests.unit.runtime.support import (
    FREE_BYTES,
    LLAMA,
    TINY,
    ScriptedKernels,
    config,
    generate,
    make_engine,
    prefill,
    run_one,
    spec,
)

PROMPT = [5, 17, 3, 88, 41, 2, 9, 63] * 5 + [7]


@pytest.fixture(scope="module")
def shared_engine() -> Engine:
    return make_engine()


@pytest.fixture
def engine(shared_engine: Engine) -> Engine:
    """One engine for all tests that leave it idle; its cache is emptied first."""
    assert shared_engine.budget().held == 0
    shared_engine.pool.drop_cache()
    return shared_engine


@pytest.fixture(scope="module")
def solo(shared_engine: Engine) -> list[int]:
    tokens = generate(shared_engine, spec(1, PROMPT), 24)
    assert len(set(tokens)) > 4
    return tokens


# --- right numbers


@pytest.mark.parametrize("name", sorted(folder.name for folder in TINY.iterdir() if folder.is_dir()))
def test_logits_of_tiny_models(name: str) -> None:
    with np.load(TINY / name / "golden.npz") as golden:
        ids, expected = golden["input_ids"].tolist(), golden["logits"]
    engine = make_engine(SafetensorsDir(TINY / name))
    assert np.abs(teacher_forced_logits(engine, ids, 27) - expected).max() < 1e-3


@pytest.mark.parametrize("name", ["llama-tied", "qwen2-tied", "gemma3-layer-types"])
def test_passes_change_nothing(name: str) -> None:
    ids = list(range(40))
    fast, plain = (make_engine(SafetensorsDir(TINY / name), passes=p) for p in (DEFAULT_PASSES, PLAIN_PASSES))
    assert len(fast.plan.lowered.calls) < len(plain.plan.lowered.calls)
    assert np.abs(teacher_forced_logits(fast, ids) - teacher_forced_logits(plain, ids)).max() < 1e-4


def test_passes_change_nothing_when_quantised() -> None:
    fast, plain = make_engine(), make_engine(passes=PLAIN_PASSES)
    assert np.abs(teacher_forced_logits(fast, PROMPT) - teacher_forced_logits(plain, PROMPT)).max() < 1e-4


# --- the same answer in any company


@pytest.mark.parametrize("chunk", [1, 3, 7, 32, 33])
def test_chunks(engine: Engine, solo: list[int], chunk: int) -> None:
    assert generate(engine, spec(1, PROMPT), 24, chunk) == solo


def test_batches(engine: Engine, solo: list[int]) -> None:
    prompts = {1: PROMPT, 2: PROMPT[:11], 3: PROMPT[3:], 4: [1]}
    alone = {i: generate(engine, spec(i, prompt), 12) for i, prompt in prompts.items()}
    assert alone[1] == solo[:12]
    engine.pool.drop_cache()
    together: dict[int, list[int]] = {i: [] for i in prompts}
    left = {i: len(prompt) - engine.open(spec(i, prompt)) for i, prompt in prompts.items()}
    draw = random.Random(3)
    while any(len(tokens) < 12 for tokens in together.values()):
        work = []
        for i in draw.sample(sorted(prompts), draw.randint(1, 4)):
            if len(together[i]) < 12:
                work.append(Work(i, draw.randint(1, min(9, left[i])) if left[i] else 1))
        result = engine.step(StepPlan(1, work))
        for item, output in zip(work, result.outputs, strict=True):
            left[item.seq_id] = max(0, left[item.seq_id] - item.num_tokens)
            together[item.seq_id] += output.tokens
        engine.check_integrity()
    engine.step(StepPlan(1, release=list(prompts)))
    assert together == alone


def test_prefix_hit(engine: Engine, solo: list[int]) -> None:
    generate(engine, spec(1, PROMPT), 2)
    request = spec(2, PROMPT)
    cached = engine.open(request)
    assert cached == 32
    tokens = prefill(engine, 2, len(PROMPT) - cached)
    assert tokens + [run_one(engine, 2, 1).tokens[0] for _ in range(23)] == solo
    engine.step(StepPlan(1, release=[2]))
    assert engine.open(spec(3, PROMPT, namespace="someone else")) == 0
    assert engine.open(spec(4, PROMPT, prompt_logprobs=0)) == 0, "prompt logprobs need every row"
    engine.step(StepPlan(1, release=[3, 4]))


def test_forks(engine: Engine, solo: list[int]) -> None:
    engine.open(spec(1, PROMPT))
    first = prefill(engine, 1, len(PROMPT))
    for _ in range(5):
        first += run_one(engine, 1, 1).tokens
    assert first == solo[:6]
    copies = engine.pool.num_copied
    assert engine.open(spec(2, PROMPT, fork_of=1)) == len(PROMPT) - 1
    assert engine.open(spec(3, [*PROMPT, *solo[:3], 55], prompt_len=len(PROMPT), fork_of=1)) == len(PROMPT) + 3
    assert engine.open(spec(4, PROMPT, fork_of=1, namespace="b")) == 0, "another namespace shares nothing"
    assert engine.open(spec(5, PROMPT, fork_of=99)) == 32, "a donor that is gone: the cache is asked"
    engine.open(spec(6, [1, 2, 3], fork_of=1))
    assert engine.open(spec(7, PROMPT, fork_of=6)) == 32, "a donor with less than the cache: the cache gives"
    second = [run_one(engine, 2, 1).tokens[0] for _ in range(24)]
    assert second == solo
    run_one(engine, 3, 1)
    assert first + [run_one(engine, 1, 1).tokens[0] for _ in range(18)] == solo
    assert engine.pool.num_copied > copies
    engine.check_integrity()
    engine.step(StepPlan(1, release=[1, 2, 3, 4, 5, 6, 7]))


def test_preemption(engine: Engine, solo: list[int]) -> None:
    engine.open(spec(1, PROMPT))
    tokens = prefill(engine, 1, len(PROMPT))
    tokens += [run_one(engine, 1, 1).tokens[0] for _ in range(9)]
    engine.step(StepPlan(1, preempt=[1]))
    assert engine.budget().held == 0
    with pytest.raises(StaleHandle):
        engine.pages_needed(1, 1)
    again = spec(7, PROMPT + tokens, prompt_len=len(PROMPT))
    left = len(again.tokens) - engine.open(again)
    tokens += prefill(engine, 7, left)
    tokens += [run_one(engine, 7, 1).tokens[0] for _ in range(24 - len(tokens))]
    assert tokens == solo
    engine.step(StepPlan(1, release=[7]))


def test_drafts(engine: Engine, solo: list[int]) -> None:
    """Right, half right and wrong guesses, in mixed lengths, give the same tokens in fewer steps."""
    draw = random.Random(5)
    engine.open(spec(1, PROMPT))
    tokens = prefill(engine, 1, len(PROMPT))
    steps = 0
    while len(tokens) < 20:
        right = draw.randint(0, 4)
        draft = (*solo[len(tokens) : len(tokens) + right], *[0] * draw.randint(0, 2))
        output = run_one(engine, 1, 1, draft)
        assert len(output.tokens) >= min(right, 23 - len(tokens)) + 1
        tokens += output.tokens
        steps += 1
        engine.check_integrity()
    assert tokens == solo[: len(tokens)]
    assert steps < 15
    engine.step(StepPlan(1, release=[1]))


def test_seeded_sampling_does_not_depend_on_company(engine: Engine) -> None:
    fields: dict[str, Any] = {
        "temperature": 1.5,
        "seed": 11,
        "top_k": 30,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
    }
    alone = generate(engine, spec(1, PROMPT, **fields), 12)
    engine.pool.drop_cache()
    engine.open(spec(1, PROMPT, **fields))
    engine.open(spec(2, PROMPT[1:], **(fields | {"seed": 12})))
    tokens = prefill(engine, 2, len(PROMPT) - 1) and prefill(engine, 1, len(PROMPT), 5)
    while len(tokens) < 12:
        guess = tuple(alone[len(tokens) : len(tokens) + 2])
        outputs = engine.step(StepPlan(1, [Work(2, 1), Work(1, 1, guess)])).outputs
        tokens += outputs[1].tokens
    engine.step(StepPlan(1, release=[1, 2]))
    assert tokens[:12] == alone


def test_work_beyond_the_limits_is_cut_into_runs(solo: list[int]) -> None:
    engine = make_engine(max_step_tokens=5, max_seqs=2)
    for seq_id in (1, 2, 3):
        engine.open(spec(seq_id, PROMPT, prompt_logprobs=0 if seq_id == 2 else None))
    result = engine.step(StepPlan(1, [Work(seq_id, len(PROMPT)) for seq_id in (1, 2, 3)]))
    assert [output.tokens for output in result.outputs] == [solo[:1]] * 3
    assert len(result.outputs[1].prompt_logprobs or []) == len(PROMPT) - 1


# --- what the sampler is told


def test_logprobs(engine: Engine) -> None:
    engine.open(spec(1, PROMPT, logprobs=3, prompt_logprobs=1))
    first, second = run_one(engine, 1, 10), run_one(engine, 1, len(PROMPT) - 10)
    scores = (first.prompt_logprobs or []) + (second.prompt_logprobs or [])
    assert [score.token for score in scores] == PROMPT[1:]
    assert all(len(score.top) == 1 for score in scores)
    assert first.logprobs is None
    (chosen,) = second.logprobs or []
    assert chosen.token == second.tokens[0] == chosen.top[0][0]
    assert [p for _, p in chosen.top] == sorted((p for _, p in chosen.top), reverse=True)
    later = run_one(engine, 1, 1, (1, 2))
    assert len(later.logprobs or []) == len(later.tokens)
    assert later.prompt_logprobs is None
    engine.step(StepPlan(1, release=[1]))
    logits = teacher_forced_logits(engine, PROMPT).astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert np.allclose([s.logprob for s in scores], expected[np.arange(len(PROMPT) - 1), PROMPT[1:]], atol=1e-4)


def test_bias_and_penalties(engine: Engine, solo: list[int]) -> None:
    assert generate(engine, spec(1, PROMPT, logit_bias={solo[0]: -100.0, 4: 100.0}), 3) == [4, 4, 4]
    strong = generate(engine, spec(1, PROMPT, presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=50.0), 20)
    assert len(set(strong)) == 20, "nothing is said twice"
    assert not set(strong) & set(PROMPT)


def test_min_tokens_holds_ends_back(solo: list[int]) -> None:
    engine = make_engine(eos_ids=(solo[0],))
    stops = (solo[1], solo[2])
    held = generate(engine, spec(1, PROMPT, min_tokens=6, stop_token_ids=stops), 6)
    assert not {solo[0], *stops} & set(held)
    free = generate(engine, spec(1, PROMPT, min_tokens=6, stop_token_ids=stops, ignore_eos=True), 1)
    assert free == solo[:1]
    bias = ScriptedKernels(lambda token, position: 1)
    engine = make_engine(kernels=bias)
    engine.open(spec(1, PROMPT, min_tokens=2, stop_token_ids=(9,)))
    prefill(engine, 1, len(PROMPT))
    run_one(engine, 1, 1, (1, 1, 1))
    sample = bias.batches[-1].sample
    assert sample.bias_start.tolist() == [0, 1, 1, 1, 1], "from the third output token on, token 9 is free"


# --- the port's rules


class Poisoned(ReferenceKernels):
    """Reports that the second row's logits are not finite."""

    def run(self, program: Program, batch: StepBatch) -> SampleOut:
        out = super().run(program, batch)
        if len(out.token) > 1:
            out.token[1] = -1
        return out


def test_logits_that_are_not_finite_fail_one_sequence_only(solo: list[int]) -> None:
    engine = make_engine(kernels=Poisoned())
    for seq_id in (1, 2, 3):
        prefill(engine, seq_id, len(PROMPT) - engine.open(spec(seq_id, PROMPT)))
    outputs = engine.step(StepPlan(1, [Work(seq_id, 1) for seq_id in (1, 2, 3)])).outputs
    assert [output.failed is not None for output in outputs] == [False, True, False]
    assert [output.tokens for output in outputs] == [solo[1:2], [], solo[1:2]]
    engine.step(StepPlan(1, release=[2]))
    assert run_one(engine, 1, 1).tokens == solo[2:3]
    engine.check_integrity()


class Broken(ReferenceKernels):
    """Raises once told to."""

    broken = False

    def run(self, program: Program, batch: StepBatch) -> SampleOut:
        if self.broken:
            raise ZeroDivisionError("boom")
        return super().run(program, batch)


def test_a_failed_step_is_an_engine_error_and_the_engine_goes_on(solo: list[int]) -> None:
    kernels = Broken()
    engine = make_engine(kernels=kernels)
    engine.open(spec(1, PROMPT))
    kernels.broken = True
    with pytest.raises(EngineError, match="boom"):
        engine.step(StepPlan(1, [Work(1, 4)]))
    kernels.broken = False
    engine.step(StepPlan(2, release=[1, 1, 77]))
    assert engine.budget().held == 0
    assert generate(engine, spec(2, PROMPT), 3) == solo[:3]


def test_pages_run_out() -> None:
    engine = make_engine(kv_memory=5 * 32 * 256, max_context=160)
    assert engine.budget().total == 5
    engine.open(spec(1, [1] * 150))
    engine.open(spec(2, [2] * 40))
    assert (engine.pages_needed(1, 150), engine.pages_needed(2, 40)) == (5, 2)
    prefill(engine, 1, 128, 32)
    with pytest.raises(EngineError, match="KV pages"):
        engine.step(StepPlan(1, [Work(2, 40)]))
    engine.step(StepPlan(1, release=[1]))
    assert engine.budget().available == 5
    prefill(engine, 2, 40)
    assert engine.step(StepPlan(1)).evicted_pages == 0
    engine.step(StepPlan(1, release=[2]))
    engine.open(spec(3, [3] * 150))
    assert engine.step(StepPlan(1, [Work(3, 150)])).evicted_pages > 0


def test_pages_needed_is_what_a_step_takes(engine: Engine) -> None:
    draw = random.Random(1)
    engine.open(spec(1, [draw.randrange(97) for _ in range(200)]))
    left = 200
    while left:
        take = min(left, draw.randint(1, 40))
        need, before = engine.pages_needed(1, take), engine.budget()
        after = engine.step(StepPlan(1, [Work(1, take)])).budget
        assert before.available - after.available == need
        left -= take
    engine.step(StepPlan(1, release=[1]))


def test_tokens_must_be_the_models(engine: Engine) -> None:
    for tokens in ([97], [-1], [0] * 257):
        with pytest.raises(EngineError):
            engine.open(spec(1, tokens))
    with pytest.raises(StaleHandle):
        engine.step(StepPlan(1, [Work(55, 1)]))


def test_warm_up_leaves_nothing_behind() -> None:
    engine = make_engine(warm_up=True)
    budget = engine.budget()
    assert (budget.held, budget.cached, budget.free) == (0, 0, budget.total)


def test_close_gives_memory_back() -> None:
    arenas: list[PlainArena] = []

    def make(nbytes: int) -> PlainArena:
        arenas.append(PlainArena(nbytes))
        return arenas[-1]

    from ai_engine.ports.clock import SystemClock
    from ai_engine.runtime.engine import build_engine

    phases: list[tuple[str, float]] = []
    engine = build_engine(
        RandomModel(LLAMA), ReferenceKernels(), make, FREE_BYTES, SystemClock(), EngineOptions(kv_memory=1 << 20),
        progress=lambda phase, fraction: phases.append((phase, fraction)),
    )  # fmt: skip
    ended = [phase for phase, fraction in phases if fraction == 1.0]
    assert (ended.count("load weights"), ended.count("warm up")) == (1, 1), "a phase ends once"
    memory = engine.memory
    assert [arena.nbytes for arena in arenas] == [memory.weights, memory.activations, memory.kv]
    assert memory.kv_bytes_per_token == 2 * 2 * 2 * 2 * 16
    engine.close()
    assert all(arena.closed for arena in arenas)


# --- planning and looking


def plan_text(free: int = FREE_BYTES, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        make_plan(RandomModel(LLAMA), ReferenceKernels(), EngineOptions(**options), free)
    return caught.value.message


def test_memory_is_planned_and_errors_name_the_flag() -> None:
    plan = make_plan(RandomModel(LLAMA), ReferenceKernels(), EngineOptions(), FREE_BYTES)
    assert plan.limits.max_context == 256
    assert plan.num_pages == 8 * 8
    assert "64 pages" in plan.sum_text() or "2048 tokens" in plan.sum_text()
    small = make_plan(RandomModel(LLAMA), ReferenceKernels(), EngineOptions(kv_memory=6 * 32 * 256), FREE_BYTES)
    assert small.limits.max_context == 192, "a context that nobody asked for shrinks to what fits"
    assert "--max-context" in plan_text(max_context=512)
    assert "--kv-memory" in plan_text(max_context=256, kv_memory=6 * 32 * 256)
    assert "--kv-memory" in plan_text(kv_memory=1000)
    assert "not enough memory" in plan_text(free=1 << 19)
    assert "--kv-memory" in plan_text(kv_memory=1 << 31)


def test_partial_rotation_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="whole heads"):
        make_plan(RandomModel(config(rope_dim=8)), ReferenceKernels(), EngineOptions(), FREE_BYTES)


def test_inspection() -> None:
    file = RandomModel(LLAMA, dtype=DType.Q8_0)
    found = inspect_model(file, ReferenceKernels(), EngineOptions(), FREE_BYTES)
    engine = make_engine(file, max_step_tokens=512, max_seqs=32, kv_memory=0)
    assert found.memory["weights"] == engine.memory.weights
    assert found.memory["kv"] == engine.memory.kv
    assert found.kv_bytes_per_token == engine.memory.kv_bytes_per_token
    assert found.memory["total"] == sum(n for name, n in found.memory.items() if name != "total")
    assert found.problem == ""
    text = inspection_text(found, list(file.tensors.values()))
    assert "blk.1.ffn_down.weight" in text
    broke = inspect_model(file, ReferenceKernels(), EngineOptions(kv_memory=1000), FREE_BYTES)
    assert "--kv-memory" in broke.problem
    assert "problem" in inspection_text(broke)


def test_graph_text() -> None:
    file = RandomModel(LLAMA, dtype=DType.Q8_0)
    last = describe_graph(file, ReferenceKernels(), EngineOptions())
    every = describe_graph(file, ReferenceKernels(), EngineOptions(), every_pass=True, num_layers=1)
    assert last.count("builtin.module") == 1
    assert every.count("builtin.module") == 7
    assert "blk.1." not in every
    assert "// program: 16 calls" in every
