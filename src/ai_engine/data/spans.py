"""Span: what a stage of the output path says of a stretch of its input. Owns the message and the stages' Protocol.

Stages are small automata in a row (reasoning.py, tools.py). Each reads text in pieces cut anywhere, holds back only
what may still change meaning, and answers with spans in order that cover all it has decided on: so whoever counts the
widths knows what has become of every character.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from ai_engine.ports.text import ToolDelta


class Span(NamedTuple):
    """``width`` characters of input: visible ``text`` (just as long), or ``reasoning``, or part of a ``call``, or, when
    it is none of them, markup that nobody sees."""

    width: int
    text: str = ""
    reasoning: str = ""
    call: ToolDelta | None = None


def visible(text: str) -> list[Span]:
    return [Span(len(text), text)] if text else []


def hidden(width: int) -> list[Span]:
    return [Span(width)] if width else []


class Stage(Protocol):
    def push(self, text: str) -> list[Span]: ...

    def finish(self) -> list[Span]:
        """No text follows: all that is held back."""
        ...
