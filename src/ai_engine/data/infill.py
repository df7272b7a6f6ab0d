"""Infilling: a prompt that asks for the text between two others. Owns which control tokens say so, model by model."""

from __future__ import annotations

from typing import Final

from ai_engine.data.tokenizer import ModelTokenizer
from ai_engine.ports.errors import UnsupportedParameter
from ai_engine.ports.text import Encoded

MARKS: Final = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
)
"""(before the prefix, before the suffix, before the middle): all these models learned prefix, suffix, middle."""


def encode_infill(tokenizer: ModelTokenizer, prefix: str, suffix: str) -> Encoded:
    """The ids of a prompt whose answer goes between the two. Their text never becomes a control token. Raises
    UnsupportedParameter when the vocabulary has none of the marks."""
    for marks in MARKS:
        if all(_is_one_token(tokenizer, mark) for mark in marks):
            before, between, middle = marks
            segments = [(before, True), (prefix, False), (between, True), (suffix, False), (middle, True)]
            return tokenizer.encode_segments(segments)
    raise UnsupportedParameter(
        "suffix: this model's vocabulary has no tokens for infilling. Fix: leave it out, or serve a model of code.",
        param="suffix",
    )


def _is_one_token(tokenizer: ModelTokenizer, mark: str) -> bool:
    ids = tokenizer.encode(mark, add_special=False).ids
    return len(ids) == 1 and tokenizer.piece(ids[0], skip_special=False) == mark.encode()
