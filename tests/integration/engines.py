"""Engines on compiled kernels, and answers made with them by hand, through the runtime port alone.

Owns how these tests write tiny models, build an engine of them and drive sequences; what must be equal is the tests'.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ai_engine.ports.runtime import SeqOutput, SequenceSpec, StepPlan, Work
from ai_engine.ports.sampling import SamplingParams
from ai_engine.ports.serving import TokenLogprob
from ai_engine.runtime.engine import Engine
from tests.golden import engine as adapter
from tests.golden import tiny_gguf

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
VOCAB = 301
SIZES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 24},
    "gemma3_text": {"layers": 6},  # five local layers and a global one
}


def write_model(folder: Path, architecture: str, type_name: str, **sizes: Any) -> Path:
    """A tiny random model of one storage type; contexts to 512, windows of 24."""
    path = folder / f"{architecture}-{type_name}.gguf"
    if not path.exists():
        tiny_gguf.write_random(path, type_name, architecture, **{**SIZES.get(architecture, {}), **sizes})
    return path


def host_targets() -> list[str]:
    """The instruction sets that this machine can run, best first."""
    from ai_engine.kernels.cpu.build import host_target

    best = host_target().name
    return ["avx512", "avx2"] if best == "avx512" else [best]


def needs_target(target: str) -> None:
    """Skips a test whose instruction set this machine lacks; "auto" is the best here."""
    if target not in ("auto", *host_targets()):
        pytest.skip(f"this CPU does not run {target} kernels")


@contextmanager
def engine_of(path: Path, **options: Any) -> Iterator[Engine]:
    """An engine with room for the tests' batches; ``options`` are those of tests.golden.engine.engine_of."""
    fields: dict[str, Any] = {"max_seqs": 16, "max_step_tokens": 256, "max_context": 512, "kv_memory": 32 << 20}
    with adapter.engine_of(path, **{**fields, **options}) as built:
        yield built


class Ask(msgspec.Struct, frozen=True):
    """A prompt and how to sample."""

    prompt: tuple[int, ...]
    params: SamplingParams


class Answer(msgspec.Struct):
    """Tokens and their logprobs; equal when every bit is."""

    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []

    def take(self, output: SeqOutput) -> None:
        assert output.failed is None, output.failed
        self.tokens += output.tokens
        self.logprobs += output.logprobs or []

    @property
    def bits(self) -> bytes:
        return msgspec.msgpack.encode(self)


def asks(count: int, num_tokens: int, *, vocab: int = VOCAB, longest: int = 75, seed: int = 0) -> list[Ask]:
    """Prompts of 1 to ``longest`` tokens; greedy and seeded take turns, both with logprobs."""
    draw = random.Random(seed)
    made = []
    for number in range(count):
        length = (longest, 1, 33, 32, 31, 64, 65, 17)[number] if number < 8 else draw.randint(1, longest)
        params = SamplingParams(temperature=0.0, logprobs=3, max_tokens=num_tokens, seed=number)
        if number % 2:
            params = SamplingParams(
                temperature=1.0,
                top_p=0.9,
                repetition_penalty=1.1,
                presence_penalty=0.4,
                frequency_penalty=0.3,
                logprobs=5,
                max_tokens=num_tokens,
                seed=1000 + number,
            )
        made.append(Ask(tuple(draw.randrange(3, vocab) for _ in range(min(length, longest))), params))
    return made


def open_ask(engine: Engine, seq_id: int, ask: Ask, so_far: Sequence[int] = (), fork_of: int | None = None) -> int:
    """Open the sequence; returns the tokens that are left to compute."""
    tokens = [*ask.prompt, *so_far]
    spec = SequenceSpec(seq_id=seq_id, tokens=tokens, prompt_len=len(ask.prompt), params=ask.params, fork_of=fork_of)
    return len(tokens) - engine.open(spec)


def step(engine: Engine, work: Sequence[Work]) -> list[SeqOutput]:
    outputs = engine.step(StepPlan(1, list(work))).outputs
    assert [output.seq_id for output in outputs] == [item.seq_id for item in work]
    return outputs


def release(engine: Engine, *seq_ids: int) -> None:
    engine.step(StepPlan(1, release=list(seq_ids)))
    engine.pool.check_integrity()


def compute(engine: Engine, seq_id: int, left: int, chunk: int, answer: Answer, count: int) -> None:
    """Run a sequence alone until ``answer`` has ``count`` tokens."""
    while left:
        take = min(chunk, left)
        answer.take(step(engine, [Work(seq_id, take)])[0])
        left -= take
    while len(answer.tokens) < count:
        answer.take(step(engine, [Work(seq_id, 1)])[0])


def alone(engine: Engine, ask: Ask, *, chunk: int = 256, cold: bool = True) -> Answer:
    """The answer with nothing else in the engine."""
    if cold:
        engine.pool.drop_cache()
    answer = Answer()
    compute(engine, 1, open_ask(engine, 1, ask), chunk, answer, ask.params.max_tokens)
    release(engine, 1)
    return answer


def guessed(engine: Engine, ask: Ask, solo: Answer, seed: int) -> Answer:
    """Alone, with guesses in every step: none to four of them, right ones up to a wrong one here and there."""
    draw = random.Random(seed)
    engine.pool.drop_cache()
    answer, count = Answer(), ask.params.max_tokens
    left = open_ask(engine, 1, ask)
    while len(answer.tokens) < count:
        at = len(answer.tokens)
        draft = solo.tokens[at : min(at + draw.randrange(5), count - 1)]
        if draft and draw.random() < 0.5:
            wrong = draw.randrange(len(draft))
            draft[wrong] = (draft[wrong] + 1) % VOCAB
        (output,) = step(engine, [Work(1, left, tuple(draft))])
        right = next((i for i, (a, b) in enumerate(zip(draft, solo.tokens[at:], strict=False)) if a != b), len(draft))
        assert len(output.tokens) == right + 1, (draft, output.tokens)
        answer.take(output)
        left = 1
    release(engine, 1)
    return answer


def in_company(engine: Engine, asked: Sequence[Ask], seed: int) -> list[Answer]:
    """All at once: every step runs a random choice of sequences, prompts in random chunks beside outputs."""
    draw = random.Random(seed)
    engine.pool.drop_cache()
    answers = [Answer() for _ in asked]
    left = [open_ask(engine, number, ask) for number, ask in enumerate(asked)]
    whole_batch = True
    while unfinished := [n for n, ask in enumerate(asked) if len(answers[n].tokens) < ask.params.max_tokens]:
        chosen = unfinished if whole_batch else draw.sample(unfinished, draw.randint(1, len(unfinished)))
        room, work = engine.limits.max_step_tokens - len(chosen), []
        for number in chosen:
            extra = draw.randint(0, max(0, min(left[number] - 1, room, 40)))
            room -= extra
            work.append(Work(number, 1 + extra))
        for item, output in zip(work, step(engine, work), strict=True):
            left[item.seq_id] = max(1, left[item.seq_id] - item.num_tokens)
            answers[item.seq_id].take(output)
        whole_batch = draw.random() < 0.7
    release(engine, *range(len(asked)))
    return answers


def preempted(engine: Engine, ask: Ask, at: Mapping[str, int]) -> Answer:
    """Preempted in the prompt after ``at["prompt"]`` tokens and again after ``at["output"]`` tokens of the answer."""
    engine.pool.drop_cache()
    answer = Answer()
    count = ask.params.max_tokens
    open_ask(engine, 1, ask)
    if 0 < at["prompt"] < len(ask.prompt):
        step(engine, [Work(1, at["prompt"])])
    engine.step(StepPlan(1, preempt=[1]))
    compute(engine, 2, open_ask(engine, 2, ask), 256, answer, at["output"])
    engine.step(StepPlan(1, preempt=[2]))
    engine.pool.drop_cache()  # others took its pages
    compute(engine, 3, open_ask(engine, 3, ask, answer.tokens), 19, answer, count)
    release(engine, 3)
    return answer
