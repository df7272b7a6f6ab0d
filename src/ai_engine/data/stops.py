"""Strings to find in a stream of text pieces: stop strings, and the marks of reasoning and calls. Owns matching; knows
nothing of tokens, bytes or what a match means.

Aho-Corasick (Commun. ACM 18(6), 1975): one automaton for all strings, one transition per character whatever the
number of stops, and the automaton's depth is exactly the length of the longest suffix of the text that may still become
a stop: that much is held back and no more.

Which match wins: the one that ends first, since a stream must not read on to find a better one; among those that end
together the longest, which is the one that begins first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec


class StopStep(msgspec.Struct, frozen=True):
    """``text`` is safe to send. ``matched`` is the stop that ended the text, with everything after it dropped: of the
    piece that is all from ``used`` on."""

    text: str
    matched: str | None = None
    used: int = 0


class StopMatcher:
    """``include``: keep the matched stop at the end of the text. Empty stops are a caller's error."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        self._include = include
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._depth = [0]
        self._match: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self._link()
        self._state = 0
        self._held = ""
        self._ended = False

    def _insert(self, stop: str) -> None:
        node = 0
        for char in stop:
            child = self._next[node].get(char)
            if child is None:
                child = len(self._next)
                self._next[node][char] = child
                self._next.append({})
                self._fail.append(0)
                self._depth.append(self._depth[node] + 1)
                self._match.append(None)
            node = child
        self._match[node] = stop

    def _link(self) -> None:
        """Failure links, breadth first; a node without its own stop inherits the longest one that ends in it."""
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self._next[node].items():
                fail = self._fail[node]
                while fail and char not in self._next[fail]:
                    fail = self._fail[fail]
                self._fail[child] = self._next[fail].get(char, 0)
                queue.append(child)
            self._match[node] = self._match[node] or self._match[self._fail[node]]

    def push(self, text: str, start: int = 0, *, may_end: bool = True) -> StopStep:
        """Take the next piece, from ``start`` on; the text released, and the stop if one is now complete. Nothing comes
        after a stop. Without ``may_end`` a stop that is complete in this piece is text like any other."""
        if self._ended or start >= len(text):
            return StopStep("", used=start)
        state, nodes = self._state, self._next
        for index in range(start, len(text)):
            char = text[index]
            while state and char not in nodes[state]:
                state = self._fail[state]
            state = nodes[state].get(char, 0)
            stop = self._match[state]
            if stop is not None and may_end:
                return self._end(self._held + text[start : index + 1], stop, index + 1)
        self._state = state
        seen = self._held + text[start:]
        cut = len(seen) - self._depth[state]
        self._held = seen[cut:]
        return StopStep(seen[:cut], used=len(text))

    def finish(self) -> str:
        """The held-back text, which no stop will complete any more. The stream is then as new."""
        held, self._held, self._state, self._ended = self._held, "", 0, False
        return held

    @property
    def held(self) -> int:
        """Characters held back."""
        return len(self._held)

    def _end(self, seen: str, stop: str, used: int) -> StopStep:
        self._ended, self._held = True, ""
        return StopStep(seen if self._include else seen[: len(seen) - len(stop)], stop, used)
