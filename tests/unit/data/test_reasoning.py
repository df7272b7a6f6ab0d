"""The reasoning part: taken out of the text whatever the cut, and all stages together."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ai_engine.data.output import OutputPath
from ai_engine.data.reasoning import find_tags
from ai_engine.data.tools import FORMATS
from ai_engine.ports.serving import TokenLogprob
from ai_engine.ports.text import ReplyForm, TextDelta
from tests.unit.data.reading import Cut, Read, accumulate, read

TAGS = ("<think>", "</think>")
CASES = [  # (text, begins inside, reasoning, content)
    ("<think>\nHm. 1 < 2\n</think>\n\nYes.", False, "Hm. 1 < 2", "Yes."),
    ("\n<think>Hm</think>Yes", False, "Hm", "Yes"),
    ("Hm.\n\nSo\n</think>\nYes\n", True, "Hm.\n\nSo", "Yes\n"),
    ("<think>\nHm</think> Yes", True, "Hm", "Yes"),
    ("\n\n</think>\n\nYes", True, "", "Yes"),
    ("<think></think>", False, "", ""),
    ("<think>\n\n</think>\n\nYes", False, "", "Yes"),
    ("<think>Hm, and cut", False, "Hm, and cut", ""),
    ("Hm </thin", True, "Hm </thin", ""),
    ("<think>a <think> b </think> c </think> d", False, "a <think> b", "c </think> d"),
    ("Yes. <think>no</think>", False, "", "Yes. <think>no</think>"),
    ("<thinking>no</thinking>", False, "", "<thinking>no</thinking>"),
    (" \n<thin", False, "", " \n<thin"),
    ("<", False, "", "<"),
    ("", True, "", ""),
    ("  Yes ", False, "", "  Yes "),
    ("<think>日本</think>😀", False, "日本", "😀"),
    ("</think>Yes", False, "", "</think>Yes"),
]


@pytest.mark.parametrize(("text", "inside", "reasoning", "content"), CASES)
def test_every_cut_reads_the_same(text: str, inside: bool, reasoning: str, content: str) -> None:
    data = text.encode()
    options = {"reasoning": TAGS, "inside_reasoning": inside}
    whole = Read(content, (), reasoning)
    assert read(data, range(1, len(data)), **options) == whole
    for first in range(len(data) + 1):
        for second in range(first, len(data) + 1):
            assert read(data, (first, second), **options) == whole, (first, second)


def test_without_tags_the_text_passes_unchanged() -> None:
    for text, *_ in CASES:
        assert read(text.encode()) == Read(text, ())


def test_what_is_held_back() -> None:
    held = {
        "<think>Hm </thi": ("Hm", ""),
        "<think>Hm </thix": ("Hm </thix", ""),
        "<thi": ("", ""),
        "<thx": ("", "<thx"),
    }
    for text, (reasoning, content) in held.items():
        delta = OutputPath(Cut([text.encode()]), form=ReplyForm(reasoning=TAGS)).push((0,))
        assert (delta.reasoning, delta.text) == (reasoning, content), text


def test_tags_come_from_the_template_or_the_vocabulary() -> None:
    assert find_tags("{{ content.split('</think>')[-1] }}", lambda text: False) == TAGS
    assert find_tags("", {"[THINK]", "[/THINK]"}.__contains__) == ("[THINK]", "[/THINK]")
    assert find_tags("think", {"<think>"}.__contains__) is None


def test_tokens_of_the_reasoning_are_counted() -> None:
    pieces = [b"<think>", b"a", b"b", b"</th", b"ink>\n", b"Yes", b"!"]
    path = OutputPath(Cut(pieces), form=ReplyForm(reasoning=TAGS))
    counts = []
    for token in range(len(pieces)):
        path.push((token,))
        counts.append(path.num_reasoning_tokens)
    assert counts == [1, 2, 3, 4, 5, 5, 5]
    assert path.num_tokens == 7
    plain = OutputPath(Cut([b"Yes"]), form=ReplyForm(reasoning=TAGS))
    plain.push((0,))
    plain.finish()
    assert plain.num_reasoning_tokens == 0


def test_long_reasoning_takes_linear_time() -> None:
    def seconds(size: int) -> float:
        data = b"<think>" + (b"</think \n" * size)[:size]
        start = time.process_time()
        read(data, range(8, len(data), 32), reasoning=TAGS)
        return time.process_time() - start

    small, large = seconds(20_000), seconds(320_000)
    assert large < 48 * small + 0.1, (small, large)


# --- all stages together ---

CALL = b'{"name": "f", "arguments": {"a": "STOP"}}'
MARKS = [b"<think>", b"</think>", b"<tool_call>", b"</tool_call>", b"[TOOL_CALLS]", b"[", b"STOP", b"ST", b"OP"]
BITS = [b" ", b"\n", "é".encode(), b"\xc3", b"\xf0\x9f", "😀".encode(), b"word", b"{", b"}", b'"', b"<", b"<t", b"]"]
PARTS = st.sampled_from([CALL, *MARKS, *BITS])
FORMS = [
    ReplyForm(reasoning=TAGS, calls="hermes", names=("f",)),
    ReplyForm(reasoning=TAGS, inside_reasoning=True, calls="generic", names=("f",)),
    ReplyForm(calls="mistral", names=("f",), one_call=True),
]


def run(pieces: list[bytes], form: ReplyForm, group: int, include: bool) -> tuple[Read, OutputPath, list[int]]:
    path = OutputPath(Cut(pieces), ("STOP",), include_stop=include, form=form, call_ids="x")
    deltas: list[TextDelta] = []
    for at in range(0, len(pieces), group):
        tokens = range(at, min(at + group, len(pieces)))
        deltas.append(path.push(tokens, [TokenLogprob(token, -0.5) for token in tokens]))
    deltas.append(path.finish())
    entries = [entry for delta in deltas for entry in delta.entries]
    offsets = [entry.text_offset for entry in entries]
    assert offsets == sorted(offsets)
    assert all(0 <= offset <= len(accumulate(deltas).content) for offset in offsets)
    return accumulate(deltas), path, [entry.token for entry in entries]


@settings(deadline=None, max_examples=300)  # the machine may be busy
@given(st.lists(PARTS, max_size=14), st.sampled_from(FORMS), st.booleans(), st.lists(st.integers(0, 200), max_size=4))
def test_all_stages_do_not_depend_on_the_cut(
    parts: list[bytes], form: ReplyForm, include: bool, cuts: list[int]
) -> None:
    """The same bytes as one token, as any tokens, byte by byte, and in pushes of several tokens."""
    data = b"".join(parts)
    at = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    tokenised = [
        [data],
        [data[a:b] for a, b in itertools.pairwise(at)],
        [data[i : i + 1] for i in range(len(data))],
        parts,
    ]
    seen = {
        (run(pieces, form, group, include)[0], stop_of(pieces, form, group, include))
        for pieces in tokenised
        for group in (1, 3)
    }
    assert len(seen) == 1
    ((found, stop),) = seen
    if stop == "STOP":
        assert found.content.count("STOP") == include
    assert "\ufffd" not in found.content or "\ufffd" in data.decode("utf-8", "replace")


def stop_of(pieces: list[bytes], form: ReplyForm, group: int, include: bool) -> str | None:
    return run(pieces, form, group, include)[1].stop


@settings(deadline=None, max_examples=200)  # the machine may be busy
@given(st.lists(PARTS, max_size=14), st.sampled_from(FORMS))
def test_entries_are_those_of_the_visible_text(parts: list[bytes], form: ReplyForm) -> None:
    """Each token at most once, in order, whatever the grouping; and their bytes hold the visible text."""
    found, path, tokens = run(parts, form, 1, True)
    assert tokens == run(parts, form, 4, True)[2]
    assert tokens == sorted(set(tokens))
    shown = b"".join(parts[token] for token in tokens).decode("utf-8", "replace")
    at = 0
    for char in found.content:  # in order, with markup of tokens that hold both between
        at = shown.find(char, at) + 1
        assert at or char == "\ufffd", (found.content, shown)
    if not found.calls and not found.reasoning and b"<think>" not in b"".join(parts) and path.stop is None:
        assert tokens == list(range(len(parts))) or form.inside_reasoning


MESS = [CALL.decode(), *(mark.decode() for mark in MARKS), "[ARGS]", "[CALL_ID]", "<|python_tag|>", "{}", "{", "}", "]"]
MESS += [
    '"name"',
    '"arguments"',
    '"parameters"',
    '"function"',
    '"f"',
    '"',
    ":",
    ",",
    ";",
    "\\",
    "\\u0041",
    "\\ud83d",
    "f",
    "7",
]
MESS += ["null", " ", "\n", "\x01", "\u3000", "é", "<", "</", '{"name": "f"', '"arguments": {', '"{\\"a\\": 1}"']


@settings(deadline=None, max_examples=400)  # the machine may be busy
@given(st.lists(st.sampled_from(MESS), max_size=14), st.sampled_from(list(FORMATS)), st.data())
def test_any_mess_reads_the_same_for_every_cut(parts: list[str], calls: str, choose: st.DataObject) -> None:
    """In every format; and what is no call is there as it was written."""
    text = "".join(parts)
    data = text.encode()
    whole = read(data, calls=calls, names=("f",))
    cuts = choose.draw(st.lists(st.integers(0, len(data)), max_size=3))
    for some in (range(1, len(data)), cuts):
        assert read(data, some, calls=calls, names=("f",)) == whole
    if not whole.calls:
        assert whole.content == text


def test_entries_of_an_answer_with_everything() -> None:
    pieces = [
        b"<think>",
        b"Hm",
        b"</think>",
        b"\n\n",
        b"Wait",
        b". ",
        b"<tool_call>",
        b'{"name": "f"}',
        b"</tool_call>",
    ]
    pieces += [b" ", b"Done", b" S", b"TOP"]
    path = OutputPath(Cut(pieces), ("STOP",), form=ReplyForm(reasoning=TAGS, calls="hermes", names=("f",)))
    delta = path.push(range(len(pieces)), [TokenLogprob(token, -1.0) for token in range(len(pieces))])
    assert (delta.reasoning, delta.text, [call.name for call in delta.calls if call.name]) == (
        "Hm",
        "Wait. Done ",
        ["f"],
    )
    assert [(entry.token, entry.text_offset) for entry in delta.entries] == [(4, 0), (5, 4), (9, 5), (10, 6), (11, 10)]
    assert path.stop == "STOP"


def test_stops_look_into_neither_reasoning_nor_calls() -> None:
    text = '<think>STOP</think>a<tool_call>{"name": "f", "arguments": {"x": "STOP"}}</tool_call>bSTOPc'
    path = OutputPath(Cut([text.encode()]), ("STOP",), form=FORMS[0], call_ids="x")
    assert accumulate([path.push((0,)), path.finish()]) == Read("ab", (("f", '{"x": "STOP"}'),), "STOP")
    assert path.stop == "STOP"
