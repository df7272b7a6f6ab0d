"""Prompt look-up alone: where runs stood before, what is copied, how sure a sequence is."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from ai_engine.serving.lookup import MAX_GUESSES, Lookup, TokenIndex

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def opened(prompt: Sequence[int], output: Sequence[int], *, at_once: bool = True) -> Lookup:
    """The look-up of a sequence after ``output``, which came all at once or token by token."""
    index = TokenIndex()
    index.extend(prompt, len(prompt))
    lookup = Lookup(index, len(prompt))
    tokens = [*prompt, *output]
    if at_once:
        lookup.advance(tokens, len(output))
    else:
        for end in range(len(prompt) + 1, len(tokens) + 1):
            lookup.advance(tokens[:end], 1)
    return lookup


def brute_force(tokens: Sequence[int], start: int, end: int, run: int) -> int | None:
    """The last position of [start, end) that follows the last ``run`` tokens."""
    if len(tokens) < run:
        return None
    last = list(tokens[-run:])
    places = (p for p in range(min(end, len(tokens)) - 1, max(start, run) - 1, -1) if list(tokens[p - run : p]) == last)
    return next(places, None)


@given(TOKENS, TOKENS, st.booleans())
@settings(max_examples=300, deadline=None)
def test_the_source_is_the_last_occurrence_of_the_longer_run(prompt: list[int], output: list[int], once: bool) -> None:
    """Four tokens before two, and of equal length the output before the prompt."""
    lookup, tokens, border = opened(prompt, output, at_once=once), [*prompt, *output], len(prompt)
    sources = [
        brute_force(tokens, border, len(tokens), 4), brute_force(tokens, 0, border, 4),
        brute_force(tokens, border, len(tokens), 2), brute_force(tokens, 0, border, 2),
    ]  # fmt: skip
    source = next((place for place in sources if place is not None), None)
    if source is None:
        assert lookup.guesses == ()
        return
    copied = list(tokens)
    for _ in range(MAX_GUESSES):
        copied.append(copied[source + len(copied) - len(tokens)])
    assert list(lookup.guesses) == copied[len(tokens) :]
    agree = 0
    while agree < 16 and agree < source and tokens[source - 1 - agree] == tokens[len(tokens) - 1 - agree]:
        agree += 1
    assert lookup.match == agree >= 2


@given(TOKENS, st.lists(st.integers(1, 20), max_size=20))
@settings(max_examples=100, deadline=None)
def test_an_index_built_in_pieces_is_the_same(tokens: list[int], pieces: list[int]) -> None:
    whole, grown, end = TokenIndex(), TokenIndex(), 0
    whole.extend(tokens, len(tokens))
    for piece in [*pieces, len(tokens)]:
        end = min(end + piece, len(tokens))
        grown.extend(tokens, end)
    assert vars(grown) == vars(whole)


def test_chances_follow_what_became_of_the_guesses() -> None:
    """Two tokens that are followed by another one each time, and later always by the same: nothing was ever tried, and
    the sequence stops and starts to guess all the same."""
    prompt = [10, 11, 12]
    lookup, tokens = opened(prompt, [10, 11]), [*prompt, 10, 11]

    def say(*new: int) -> None:
        for token in new:
            tokens.append(token)
            lookup.advance(tokens, 1)

    hoped = lookup.chance(0)
    for number in range(8):
        say(1000 + number, 2000 + number, 10, 11)
        assert lookup.match == 2
    assert lookup.chance(0) < hoped / 2
    for number in range(12):
        say(12, 3000 + number, 4000 + number, 10, 11)
        assert lookup.match == 2
    assert lookup.chance(0) > hoped


def test_long_agreement_is_trusted_more_than_short() -> None:
    phrase = list(range(100, 140))
    assert opened(phrase, phrase[:2]).chance(0) < opened(phrase, phrase[:4]).chance(0)
    assert opened(phrase, phrase[:4]).chance(0) < opened(phrase, phrase[:12]).chance(0)
    short = opened(phrase, phrase[:2])
    assert short.chance(0) < short.chance(8), "guess 8 follows eight that were right"


def test_the_time_of_a_guess_does_not_grow_with_the_text() -> None:
    """At most 50 us of CPU per token, after 8,000 tokens as after 100."""
    draw = random.Random(0)
    prompt = [draw.randrange(50) for _ in range(8000)]
    index = TokenIndex()
    index.extend(prompt, len(prompt))
    lookup, tokens, best = Lookup(index, len(prompt)), list(prompt), 1.0
    for _ in range(5):
        started = time.thread_time()
        for _ in range(200):
            tokens.append(draw.randrange(50))
            lookup.advance(tokens, 1)
        best = min(best, (time.thread_time() - started) / 200)
    assert best < 50e-6
