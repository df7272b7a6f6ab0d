"""The reasoning part of an answer: which tags a model writes around it, and a stage that takes it out of the text.

A reasoning part stands at the beginning, before or after which there may be white space: a tag further down is text, so
that an answer may speak of tags. A model whose template opens the part in the prompt begins inside it (and may repeat
the tag). White space at the part's edges, and between its end and the text, is layout and is dropped. An end tag that
never comes leaves all of it reasoning. Tool calls and stop strings are looked for after it only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ai_engine.data.spans import Span, hidden, visible
from ai_engine.data.stops import StopMatcher

TAGS: Final = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<thinking>", "</thinking>"))


def find_tags(template: str, vocabulary: Callable[[str], bool]) -> tuple[str, str] | None:
    """The tags that the template's source handles, or that the vocabulary has as tokens; None: no reasoning part."""
    for begin, end in TAGS:
        if end in template or (vocabulary(begin) and vocabulary(end)):
            return begin, end
    return None


class ReasoningStage:
    """Implements data.spans.Stage. ``is_over`` is set with the end tag."""

    def __init__(self, tags: tuple[str, str], *, inside: bool) -> None:
        self._begin = tags[0]
        self._end = StopMatcher([tags[1]])
        self._is_inside = inside
        self._held = ""  # at the beginning: what may become the begin tag, without the white space before it
        self._space: list[str] = []  # white space that may be at an edge
        self._is_first = True  # no reasoning or text is out yet
        self._looks_for_tag = True
        self.is_over = False

    @property
    def is_inside(self) -> bool:
        return self._is_inside

    def push(self, text: str) -> list[Span]:
        if self._looks_for_tag:
            return self._start(text)
        if self._is_inside:
            return self._reason(text)
        return self._text(text)

    def finish(self) -> list[Span]:
        spans: list[Span] = []
        if self._looks_for_tag:
            self._looks_for_tag = False
            spans = self._no_tag()
        if self._is_inside:
            spans += self._trimmed(self._end.finish())
            spans += self._drop_space()
        return spans

    def _start(self, text: str) -> list[Span]:
        """Up to the tag, or to what cannot become it any more."""
        rest = text if self._held else text.lstrip()
        if len(rest) < len(text):
            self._space.append(text[: len(text) - len(rest)])
        seen = self._held + rest
        if len(seen) < len(self._begin) and self._begin.startswith(seen):
            self._held = seen
            return []
        self._looks_for_tag = False
        if not seen.startswith(self._begin):
            self._held = ""
            return self._no_tag(seen)
        self._held, self._is_inside = "", True
        width = len(self._begin)
        return [*self._drop_space(), Span(width), *self._reason(seen[width:])]

    def _no_tag(self, seen: str | None = None) -> list[Span]:
        seen, self._held = self._held if seen is None else seen, ""
        if self._is_inside:
            return self._reason(seen)
        space, self._space = "".join(self._space), []
        self._is_first = False
        return visible(space + seen)

    def _reason(self, text: str) -> list[Span]:
        step = self._end.push(text)
        spans = self._trimmed(step.text)
        if step.matched is None:
            return spans
        self._is_inside, self.is_over, self._is_first = False, True, True
        return [*spans, *self._drop_space(), Span(len(step.matched)), *self._text(text[step.used :])]

    def _trimmed(self, text: str) -> list[Span]:
        """Reasoning without the white space at its edges; what may be at the end waits."""
        kept = text.rstrip()
        spans: list[Span] = []
        if kept:
            if self._is_first:
                spans = self._drop_space()
                spans += hidden(len(kept) - len(kept.lstrip()))
                kept_from = kept.lstrip()
            else:
                kept_from = "".join(self._space) + kept
                self._space = []
            self._is_first = False
            spans.append(Span(len(kept_from), reasoning=kept_from))
        if len(kept) < len(text):
            self._space.append(text[len(kept) :])
        return spans

    def _text(self, text: str) -> list[Span]:
        """After the part: everything, but for the white space before the first text."""
        if not self._is_first:
            return visible(text)
        kept = text.lstrip()
        self._is_first = not kept
        return [*hidden(len(text) - len(kept)), *visible(kept)]

    def _drop_space(self) -> list[Span]:
        width, self._space = sum(map(len, self._space)), []
        return hidden(width)
