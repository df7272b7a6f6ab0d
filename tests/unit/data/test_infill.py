"""Infilling prompts: marks by vocabulary, text that stays text."""

from __future__ import annotations

import pytest

from ai_engine.data.infill import MARKS, encode_infill
from ai_engine.data.tokenizer import CONTROL, ModelTokenizer
from ai_engine.ports.errors import UnsupportedParameter
from tests.unit.data.test_tokenizer import spm

BYTE_0 = 3
"""Id of byte 0 in the vocabulary."""


def with_marks(marks: tuple[str, ...], **changes: object) -> ModelTokenizer:
    plain = spm()
    tokens, types = [*plain.tokens, *marks], [*plain.token_types, *[CONTROL] * len(marks)]
    scores = [*plain.scores, *[0.0] * len(marks)]
    return ModelTokenizer(spm(tokens=tokens, token_types=types, scores=scores, add_space_prefix=False, **changes))


@pytest.mark.parametrize("marks", MARKS, ids=lambda marks: marks[0])
def test_prefix_suffix_middle_in_the_model_s_own_tokens(marks: tuple[str, str, str]) -> None:
    tokenizer = with_marks(marks)
    before, between, middle = range(tokenizer.vocab_size - 3, tokenizer.vocab_size)
    ids = encode_infill(tokenizer, "X", "YZ").ids
    assert ids == [1, before, BYTE_0 + ord("X"), between, BYTE_0 + ord("Y"), BYTE_0 + ord("Z"), middle]


def test_what_the_client_writes_is_never_a_mark() -> None:
    tokenizer = with_marks(MARKS[0])
    ids = encode_infill(tokenizer, MARKS[0][2] + "</s>", MARKS[0][0]).ids
    assert [token for token in ids if token == 2 or token >= tokenizer.vocab_size - 3] == [
        tokenizer.vocab_size - 3,
        tokenizer.vocab_size - 2,
        tokenizer.vocab_size - 1,
    ]


def test_a_vocabulary_without_all_three_is_refused() -> None:
    for tokenizer in (with_marks(()), with_marks(MARKS[0][:2])):
        with pytest.raises(UnsupportedParameter, match="no tokens for infilling") as caught:
            encode_infill(tokenizer, "a", "b")
        assert caught.value.param == "suffix"
