"""Sequences that draw under a grammar: masks per row and per guess, failures, min_tokens."""

from __future__ import annotations

import numpy as np
import pytest

from ai_engine.ports.errors import EngineError
from ai_engine.ports.grammar import U32, Grammar
from ai_engine.ports.runtime import SequenceSpec, StepPlan, Work
from ai_engine.ports.sampling import SamplingParams
from ai_engine.runtime.engine import Engine
from tests.unit.runtime.support import LLAMA, generate, make_engine, run_one

END = 3
PROMPT = [5, 6, 7, 8]


class Thirds:
    """Token i of the text is i modulo 3, so 0, 1, 2, 0 ...; the end is allowed from ``ends`` tokens on and must come at
    ``last``. Breaks at ``breaks``. Implements ports.grammar.Grammar and, opened, Matcher."""

    min_tokens = 1

    def __init__(self, ends: int = 1000, last: int = 1000, breaks: int = 1000) -> None:
        self.ends, self.last, self.breaks = ends, last, breaks
        self.tokens: list[int] = []
        self.asked: list[int] = []  # tokens left, of each mask

    def open(self) -> Thirds:
        return Thirds(self.ends, self.last, self.breaks)

    @property
    def ended(self) -> bool:
        return self.tokens[-1:] == [END]

    def allows(self, token: int) -> bool:
        count = len(self.tokens)
        if token == END:
            return count >= self.ends and not self.ended
        return token % 3 == count % 3 and count < self.last and not self.ended

    def fill(self, row: U32, tokens_left: int) -> None:
        if len(self.tokens) == self.breaks:
            raise EngineError("too complex")
        self.asked.append(tokens_left)
        bits = np.zeros(len(row) * 32, bool)
        bits[[token for token in range(LLAMA.vocab_size) if self.allows(token)]] = True
        row[:] = np.packbits(bits, bitorder="little").view(np.uint32)

    def accept(self, token: int) -> bool:
        if not self.allows(token):
            return False
        self.tokens.append(token)
        return True

    def rollback(self, num_tokens: int) -> None:
        del self.tokens[len(self.tokens) - num_tokens :]


def spec(seq_id: int, grammar: Grammar | None, tokens: list[int] | None = None, **params: object) -> SequenceSpec:
    fields = SamplingParams(**({"temperature": 1.0, "seed": 7, "max_tokens": 20} | params))  # type: ignore[arg-type]
    known = tokens or PROMPT
    return SequenceSpec(seq_id=seq_id, tokens=known, prompt_len=len(PROMPT), params=fields, grammar=grammar)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine(eos_ids=(END,))


def test_every_token_is_one_of_the_masks_and_neighbours_are_free(engine: Engine) -> None:
    free = generate(engine, spec(1, None), 9)
    assert [token % 3 for token in generate(engine, spec(1, Thirds()), 9)] == [0, 1, 2] * 3
    engine.open(spec(1, None))
    engine.open(spec(2, Thirds()))
    tokens: dict[int, list[int]] = {1: [], 2: []}
    for step in range(9):
        rows = 1 if step else len(PROMPT)
        for output in engine.step(StepPlan(step, [Work(1, rows), Work(2, rows)])).outputs:
            tokens[output.seq_id] += output.tokens
    engine.step(StepPlan(9, release=[1, 2]))
    assert tokens[1] == free
    assert [token % 3 for token in tokens[2]] == [0, 1, 2] * 3


def test_guesses_right_wrong_and_against_the_grammar_change_nothing(engine: Engine) -> None:
    expected = generate(engine, spec(1, Thirds()), 12)
    off_by_three = [(token + 3) % 96 for token in expected]
    for wrong_at in range(4):
        for wrong in (off_by_three, [token + 1 for token in expected]):  # allowed but not drawn; not allowed
            engine.open(spec(1, Thirds()))
            tokens = run_one(engine, 1, len(PROMPT)).tokens
            while len(tokens) < 12:
                at = len(tokens)
                draft = expected[at : at + wrong_at] + wrong[at + wrong_at : at + 4]
                new = run_one(engine, 1, 1, tuple(draft)).tokens
                assert len(new) > min(wrong_at, len(draft) - 1)
                tokens += new
            engine.step(StepPlan(1, release=[1]))
            engine.check_integrity()
            assert tokens[:12] == expected


def test_nothing_is_taken_after_the_end(engine: Engine) -> None:
    grammar = Thirds(ends=2, last=2)
    expected = generate(engine, spec(1, grammar), 3)
    assert expected[2] == END
    engine.open(spec(1, grammar))
    first = run_one(engine, 1, len(PROMPT)).tokens
    output = run_one(engine, 1, 1, (expected[1], END, END, END))
    assert first + output.tokens == expected
    engine.step(StepPlan(1, release=[1]))


def test_a_sequence_opened_again_goes_on_where_it_was(engine: Engine) -> None:
    expected = generate(engine, spec(1, Thirds()), 8)
    rest = generate(engine, spec(2, Thirds(), PROMPT + expected[:5]), 3)
    assert rest == expected[5:]
    with pytest.raises(EngineError, match="does not take token"):
        engine.open(spec(3, Thirds(), [*PROMPT, 1]))
    engine.check_integrity()


def test_a_grammar_that_breaks_fails_its_own_sequence(engine: Engine) -> None:
    free = generate(engine, spec(1, None), 4)
    engine.open(spec(1, None))
    engine.open(spec(2, Thirds(breaks=2)))
    tokens: list[int] = []
    failed = None
    for step in range(4):
        rows = 1 if step else len(PROMPT)
        work = [Work(1, rows), *([Work(2, rows)] if failed is None else [])]
        for output in engine.step(StepPlan(step, work, release=[2] if failed else [])).outputs:
            if output.seq_id == 1:
                tokens += output.tokens
            elif output.failed is not None:
                failed = (step, output.failed, output.tokens)
    assert failed == (2, "too complex", [])
    assert tokens == free
    engine.step(StepPlan(5, release=[1]))
    engine.check_integrity()


def test_tokens_left_count_down_and_min_tokens_gives_way_where_only_the_end_may_come(engine: Engine) -> None:
    grammar = Thirds(ends=1, last=4)
    engine.open(spec(1, grammar, max_tokens=9, min_tokens=8))
    tokens = run_one(engine, 1, len(PROMPT)).tokens
    while tokens[-1] != END:
        tokens += run_one(engine, 1, 1).tokens
    matcher = engine._sequences[1].matcher
    assert isinstance(matcher, Thirds)
    assert matcher.asked == [9, 8, 7, 6, 5]
    assert [token % 3 for token in tokens] == [0, 1, 2, 0, END % 3]
    engine.step(StepPlan(1, release=[1]))
