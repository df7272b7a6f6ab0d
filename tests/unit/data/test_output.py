"""Tokens to text: UTF-8 over any split, stop strings over any split, entries aligned with the text."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from ai_engine.data.detokenize import Utf8Stream
from ai_engine.data.output import OutputPath
from ai_engine.data.stops import StopMatcher
from ai_engine.ports.serving import TokenLogprob
from ai_engine.ports.text import Encoded, TokenEntry


class Pieces:
    """A tokeniser whose token i is the i-th piece; None is a control token."""

    def __init__(self, pieces: list[bytes | None]) -> None:
        self.pieces = pieces
        self.vocab_size, self.bos_id = len(pieces), None
        self.eos_ids: frozenset[int] = frozenset()

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> Encoded:
        raise NotImplementedError

    def piece(self, token: int, *, skip_special: bool = True) -> bytes:
        piece = self.pieces[token]
        return piece if piece is not None else b"" if skip_special else b"<x>"

    def is_special(self, token: int) -> bool:
        return self.pieces[token] is None


def split_at(data: bytes, cuts: list[int]) -> list[bytes]:
    at = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(at)]


NASTY = st.one_of(
    st.text().map(str.encode),
    st.binary(),
    st.lists(st.sampled_from(["é".encode(), "😀".encode(), b"\xf0\x9f", b"\xed\xa0\x80", b"\xc0", b"a", b"\x80"])).map(
        b"".join
    ),
)


@settings(deadline=None)  # the machine may be busy
@given(NASTY, st.lists(st.integers(0, 10_000), max_size=8))
def test_utf8_does_not_depend_on_the_split(data: bytes, cuts: list[int]) -> None:
    stream = Utf8Stream()
    text = "".join(stream.push(piece) for piece in split_at(data, cuts)) + stream.finish()
    assert text == data.decode("utf-8", "replace")
    assert stream.finish() == ""


@settings(deadline=None)  # the machine may be busy
@given(NASTY)
def test_utf8_holds_back_only_what_can_become_valid(data: bytes) -> None:
    stream = Utf8Stream()
    out = ""
    for at in range(len(data)):
        out += stream.push(data[at : at + 1])
        held = data[at + 1 - stream.pending : at + 1]
        assert out + held.decode("utf-8", "replace") == data[: at + 1].decode("utf-8", "replace")
        if held:
            assert any(valid(held + rest) for rest in TAILS), "held back, but no continuation is valid"


TAILS = [bytes(tail) for n in (1, 2, 3) for tail in ([0x80] * n, [0xBF] * n, [0xA0, *[0x80] * (n - 1)], [0x90] * n)]


def valid(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_utf8_incomplete_tail_is_one_replacement() -> None:
    stream = Utf8Stream()
    assert stream.push(b"ok\xf0\x9f\x98") == "ok"
    assert stream.pending == 3
    assert stream.finish() == "\ufffd"
    assert stream.push(b"\x9f") == "\ufffd"


def first_match(text: str, stops: list[str]) -> tuple[int, str] | None:
    """(end, stop) by brute force: the match that ends first, the longest of those."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


WORDS = st.text(alphabet="ab", min_size=1, max_size=5)


@settings(deadline=None)  # the machine may be busy
@given(
    st.text(alphabet="abc", max_size=40),
    st.lists(WORDS, min_size=1, max_size=4),
    st.lists(st.integers(0, 40)),
    st.booleans(),
)
def test_stops_do_not_depend_on_the_split(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    matcher = StopMatcher(stops, include=include)
    out, matched = "", None
    for piece in split_at(text.encode(), cuts):
        step = matcher.push(piece.decode())
        out += step.text
        matched = matched or step.matched
        held = matcher.held
        if matched is None:
            seen = out + text[len(out) : len(out) + held]
            longest = max(n for n in range(len(seen) + 1) if any(is_prefix(seen[len(seen) - n :], s) for s in stops))
            assert held == longest, "holds back the longest suffix that may become a stop, and no more"
    out += matcher.finish()
    wanted = first_match(text, stops)
    if wanted is None:
        assert (out, matched) == (text, None)
    else:
        end, stop = wanted
        assert matched == stop
        assert out == text[: end if include else end - len(stop)]


def is_prefix(text: str, stop: str) -> bool:
    return len(text) < len(stop) and stop.startswith(text)


def entry_tokens(entries: list[TokenEntry]) -> list[int]:
    return [entry.token for entry in entries]


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.sampled_from([b"a", b"b", b"ab", b"", "é".encode()[:1], "é".encode()[1:], "😀".encode(), None])))
def test_path_without_stops(pieces: list[bytes | None]) -> None:
    path = OutputPath(Pieces(pieces))
    text = ""
    tokens: list[int] = []
    for token in range(len(pieces)):
        delta = path.push([token])
        text += delta.text
        tokens += entry_tokens(delta.entries)
        out = sum(len(piece or b"") for piece in pieces[: len(tokens)])
        assert len(text.encode()) >= out or "\ufffd" in text, "no token is out before its text"
    delta = path.finish()
    assert (text + delta.text) == b"".join(filter(None, pieces)).decode("utf-8", "replace")
    assert tokens + entry_tokens(delta.entries) == list(range(len(pieces)))
    assert path.num_tokens == len(pieces)


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.sampled_from([b"a", b"b", b"ab", b"c", b"bca", None])), st.lists(WORDS, min_size=1, max_size=3))
def test_path_does_not_depend_on_the_grouping(pieces: list[bytes | None], stops: list[str]) -> None:
    """One push of all tokens and one push for each give the same text, entries and counts."""
    results = []
    for step in (1, 2, len(pieces) or 1):
        path = OutputPath(Pieces(pieces), stops)
        text = ""
        tokens: list[int] = []
        for at in range(0, len(pieces), step):
            delta = path.push(range(at, min(at + step, len(pieces))))
            text, tokens = text + delta.text, tokens + entry_tokens(delta.entries)
            if delta.stop:
                break
        delta = path.finish()
        results.append((text + delta.text, tokens + entry_tokens(delta.entries), path.num_tokens, path.stop))
    assert results[0] == results[1] == results[2]
    text, tokens, used, stop = results[0]
    whole = b"".join(filter(None, pieces)).decode()
    wanted = first_match(whole, stops)
    assert stop == (wanted[1] if wanted else None)
    assert text == (whole[: wanted[0] - len(wanted[1])] if wanted else whole)
    if wanted:
        lengths = [len(piece or b"") for piece in pieces]
        assert sum(lengths[: used - 1]) < wanted[0] <= sum(lengths[:used]), "usage counts to the stop"
        assert sum(lengths[: len(tokens)]) >= len(text)


def test_entries_wait_for_their_text() -> None:
    logprobs = [TokenLogprob(token, -0.5 * token) for token in range(6)]
    path = OutputPath(Pieces([b"Hi", b" EN", "é".encode()[:1], "é".encode()[1:], b" E", b"ND!"]), [" END"])
    first = path.push([0, 1], logprobs[:2])
    assert (first.text, entry_tokens(first.entries)) == ("Hi", [0])
    second = path.push([2], logprobs[2:3])
    assert (second.text, second.entries) == ("", [])
    third = path.push([3], logprobs[3:4])
    assert third.text == " ENé"
    assert [(e.token, e.text_offset, e.logprob) for e in third.entries] == [
        (1, 2, logprobs[1]),
        (2, 5, logprobs[2]),
        (3, 5, logprobs[3]),
    ]
    last = path.push([4, 5], logprobs[4:])
    assert (last.text, last.entries, last.stop, path.num_tokens) == ("", [], " END", 6)
    assert path.push([0]).text == path.finish().text == ""
    assert path.num_tokens == 6


def test_stop_in_the_middle_of_a_token_and_included() -> None:
    path = OutputPath(Pieces([b"one", b"two. three", b"never"]), ["o."], include_stop=True)
    delta = path.push([0, 1, 2])
    assert (delta.text, entry_tokens(delta.entries), delta.stop, path.num_tokens) == ("onetwo.", [0, 1], "o.", 2)


def test_special_tokens_show_only_when_asked() -> None:
    for skip, wanted in ((True, "ab"), (False, "a<x>b")):
        path = OutputPath(Pieces([b"a", None, b"b"]), skip_special=skip)
        delta = path.push([0, 1, 2])
        assert delta.text == wanted
        assert [entry.data for entry in delta.entries] == [b"a", b"<x>", b"b"]


def test_stop_that_holds_a_replacement_character_at_the_end() -> None:
    path = OutputPath(Pieces([b"a\xf0"]), ["a\ufffd"])
    assert path.push([0]).text == ""
    assert path.finish().stop == "a\ufffd"


def test_long_streams_take_linear_time() -> None:
    stops = ["a" * 500 + "b", *("ab" * n + "c" for n in range(1, 30))]
    matcher = StopMatcher(stops)
    text = "a" * 200_000
    assert len(matcher.push(text).text) == len(text) - 500


@given(st.text("ab", max_size=20), st.sampled_from(["a", "ab", "aba", "bb"]), st.integers(0, 12))
def test_a_stop_before_min_tokens_is_text_and_the_first_one_after_it_ends(text: str, stop: str, least: int) -> None:
    tokens = Pieces([bytes((byte,)) for byte in range(256)])
    output = OutputPath(tokens, [stop], min_tokens=least)
    found = "".join(output.push([byte]).text for byte in text.encode()) + output.finish().text
    ends = [end for end in range(len(stop), len(text) + 1) if text[:end].endswith(stop) and end >= least]
    assert found == (text[: ends[0] - len(stop)] if ends else text)
    assert output.num_tokens == (ends[0] if ends else len(text))
