"""A small vocabulary, grammars over it, and a model that draws at random under their masks. Shared by tests."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np

from ai_engine.data.grammar import LlGrammar, LlGrammars, LlMatcher
from ai_engine.data.tokenizer import TokenPieces
from ai_engine.ports.grammar import Constraint, ConstraintKind

WORDS = [
    b'{"', b'":', b'": ', b'","', b'", "', b'"}', b'"]', b"},", b'},{"', b'":[{"', b"]}", b"}}", b"[[", b"true",
    b"false", b"null", b"the", b" cat", b"12", b"00", b"name", b"na", b"age", b"\xc3\xa9t", b"\xf0\x9f", b"\\n",
    b'\\"', b"    ",    b"\n\n", b"2024-", b"think", b"</", b'a","b":',
]  # fmt: skip
"""Beside the 256 bytes: tokens that span what a parser tells apart."""
EOS, EOT, THINK_END = 256 + len(WORDS), 257 + len(WORDS), 258 + len(WORDS)
PIECES = TokenPieces(
    [bytes([byte]) for byte in range(256)] + WORDS + [b"<eos>", b"<eot>", b"</think>"], frozenset({EOS, EOT, THINK_END})
)
NUM_LOGITS = len(PIECES.pieces) + 5  # a model's rows may be padded


def grammars() -> LlGrammars:
    return LlGrammars(lambda: PIECES, frozenset({EOS, EOT}), NUM_LOGITS)


SHARED = grammars()


def compiled(schema: Any, kind: ConstraintKind = "json_schema", **fields: Any) -> LlGrammar:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return SHARED.compile(Constraint(kind=kind, text=text, **fields))


def allowed(matcher: LlMatcher, tokens_left: int = 1 << 30) -> list[int]:
    """The tokens of the mask."""
    row = np.full(-(-NUM_LOGITS // 32), 0xFFFFFFFF, np.uint32)
    matcher.fill(row, tokens_left)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def walk(grammar: LlGrammar, max_tokens: int, draw: random.Random) -> tuple[bytes, bool]:
    """(text, whether it ended by itself) of a model without preferences."""
    matcher, tokens = grammar.open(), list[int]()
    for taken in range(max_tokens):
        token = draw.choice(allowed(matcher, max_tokens - taken))
        assert matcher.accept(token), (tokens, token)
        if matcher.ended:
            return b"".join(PIECES.pieces[token] for token in tokens), True
        tokens.append(token)
    return b"".join(PIECES.pieces[token] for token in tokens), False


def takes(grammar: LlGrammar, text: str) -> bool:
    """Whether this is a whole text of the grammar, spelt in bytes."""
    matcher = grammar.open()
    return all(matcher.accept(byte) for byte in text.encode()) and matcher.accept(EOS)
