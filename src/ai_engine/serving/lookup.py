"""Prompt look-up: guesses of a sequence's next tokens, copied from where its last tokens stood before.

Owns the index of token runs and what became of earlier guesses. Whether guesses are worth a step's time is
scheduler.py's decision; whether they are right is the runtime's, so nothing here changes an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

MAX_GUESSES: Final = 15
INDEXED_PER_STEP: Final = 128  # tokens of a prompt found in the cache: 128 take about 40 us

_LONG, _SHORT = 4, 2  # lengths of the runs that are looked up; the longer one is trusted first
_ID_BITS: Final = 24  # of a token id in a key; greater ids would collide, and guess worse
_LONG_MASK: Final = (1 << _LONG * _ID_BITS) - 1
_SHORT_MASK: Final = (1 << _SHORT * _ID_BITS) - 1

# A match of m tokens belongs to the first class whose bound is at least m; the last class has the rest.
_CLASS_OF: Final = (0, 0, 0, 1, 1, 2, 2, 2, 2)
_PRIOR: Final = ((1.0, 2.0), (1.4, 2.0), (1.7, 2.0), (1.85, 2.0))  # (right, looked at) per class, before any is seen
_MEMORY: Final = 0.9  # weight of what was seen before, at each new observation of its class
_MAX_MATCH: Final = 16


class TokenIndex:
    """Where each run of tokens was last followed by another token, of the positions from ``start`` on."""

    def __init__(self, start: int = 0) -> None:
        self.end = start  # positions below have been indexed
        self._long: dict[int, int] = {}
        self._short: dict[int, int] = {}

    def extend(self, tokens: Sequence[int], end: int) -> None:
        """Index the positions up to ``end``: each is what followed the run before it."""
        at = max(self.end, 1)
        key = 0
        for token in tokens[max(0, at - _LONG) : at]:
            key = key << _ID_BITS | token
        for position in range(at, end):
            if position >= _SHORT:
                self._short[key & _SHORT_MASK] = position
                if position >= _LONG:
                    self._long[key] = position
            key = (key << _ID_BITS | tokens[position]) & _LONG_MASK
        self.end = max(self.end, end)

    def find(self, key: int, num_tokens: int) -> int | None:
        """The position after the last occurrence of the run with this key."""
        found = self._long.get(key) if num_tokens >= _LONG else None
        return found if found is not None or num_tokens < _SHORT else self._short.get(key & _SHORT_MASK)


class Lookup:
    """The guesses of one sequence. ``prompt`` is the index of its prompt, which the choices of a request share.

    ``guesses`` are what may follow the last token; ``chances`` are how likely each is right when those before it are.
    """

    __slots__ = ("_output", "_prompt", "_right", "_seen", "guesses", "match")

    def __init__(self, prompt: TokenIndex, prompt_len: int) -> None:
        self._prompt = prompt
        self._output = TokenIndex(prompt_len)
        self._right = [right for right, _ in _PRIOR]
        self._seen = [seen for _, seen in _PRIOR]
        self.guesses: tuple[int, ...] = ()
        self.match = 0  # tokens that agree before the place that the guesses are copied from

    def advance(self, tokens: Sequence[int], num_new: int) -> None:
        """``num_new`` tokens were sampled, the last of ``tokens``: learn from them, and guess what comes next."""
        self._learn(tokens[len(tokens) - num_new :])
        self._output.extend(tokens, len(tokens))
        self.guesses, self.match = (), 0
        source = self._find(tokens)
        if source is not None:
            self.guesses = _copied(tokens, source)
            self.match = _agreeing(tokens, source)

    def chance(self, number: int) -> float:
        """That guess ``number`` is right when all before it are."""
        group = _class(self.match + number)
        return self._right[group] / self._seen[group]

    def _learn(self, sampled: Sequence[int]) -> None:
        """Guesses are judged whether they were tried or not: so a sequence that stopped guessing can begin again."""
        for number, (guess, token) in enumerate(zip(self.guesses, sampled, strict=False)):
            group = _class(self.match + number)
            self._seen[group] = self._seen[group] * _MEMORY + 1.0
            self._right[group] = self._right[group] * _MEMORY + (guess == token)
            if guess != token:
                return

    def _find(self, tokens: Sequence[int]) -> int | None:
        key = 0
        for token in tokens[-_LONG:]:
            key = key << _ID_BITS | token
        source = self._output.find(key, len(tokens))
        if source is not None and _agreeing(tokens, source) >= _LONG:
            return source
        other = self._prompt.find(key, len(tokens))
        if source is None or (other is not None and _agreeing(tokens, other) >= _LONG):
            return other
        return source


def _class(match: int) -> int:
    return _CLASS_OF[match] if match < len(_CLASS_OF) else len(_PRIOR) - 1


def _agreeing(tokens: Sequence[int], source: int) -> int:
    """Tokens before ``source`` that equal the last ones, at most 16."""
    count, last = 0, len(tokens) - 1
    while count < min(_MAX_MATCH, source) and tokens[source - 1 - count] == tokens[last - count]:
        count += 1
    return count


def _copied(tokens: Sequence[int], source: int) -> tuple[int, ...]:
    """What follows from ``source`` on; a source near the end repeats itself."""
    copied = list(tokens[source : source + MAX_GUESSES])
    period = len(copied)
    while len(copied) < MAX_GUESSES:
        copied.append(copied[-period])
    return tuple(copied)
