"""Calls read from answers: 300 messages, cut in every way, give the same text and the same calls."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable

import pytest

from ai_engine.data.output import OutputPath
from ai_engine.data.tools import FORMATS, find_format
from ai_engine.ports.text import ReplyForm
from tests.conformance.tool_cases import BY_HAND, CASES, NAMES, NUM_CASES, Case
from tests.unit.data.reading import Cut, Read, accumulate, read


def read_case(case: Case, cuts: Iterable[int] = ()) -> Read:
    return read(case.text.encode(), cuts, calls=case.form, names=NAMES)


def wanted(case: Case) -> Read:
    return Read(case.content, case.calls)


def test_there_are_as_many_cases_as_are_claimed() -> None:
    assert len(CASES) == NUM_CASES == 300
    assert len(BY_HAND) >= 75
    assert {case.form for case in CASES} == set(FORMATS)
    assert sum(len(case.calls) > 1 for case in CASES) > 75


@pytest.mark.parametrize("index", range(NUM_CASES))
def test_what_is_read(index: int) -> None:
    case = CASES[index]
    assert read_case(case) == wanted(case), case.text
    for _, arguments in case.calls[:-1] if index < len(BY_HAND) else case.calls:
        if "]" not in arguments[-4:]:
            json.loads(arguments)


@pytest.mark.parametrize("part", range(4))
def test_every_cut_in_two_reads_the_same(part: int) -> None:
    for case in CASES[part::4]:
        data = case.text.encode()
        for cut in range(1, len(data)):
            assert read_case(case, (cut,)) == wanted(case), (case.text, cut)


def cuts_in_three(case: Case, count: int) -> list[tuple[int, int]]:
    size = len(case.text.encode()) + 1
    rng = random.Random(case.text)
    return [(rng.randrange(size), rng.randrange(size)) for _ in range(count)]


def test_random_cuts_in_three_read_the_same() -> None:
    for case in CASES:
        for cuts in cuts_in_three(case, 10):
            assert read_case(case, cuts) == wanted(case), (case.text, cuts)


@pytest.mark.full
@pytest.mark.parametrize("index", range(NUM_CASES))
def test_500_cuts_in_three_read_the_same(index: int) -> None:
    case = CASES[index]
    for cuts in cuts_in_three(case, 500):
        assert read_case(case, cuts) == wanted(case), (case.text, cuts)


def test_byte_by_byte_reads_the_same() -> None:
    for case in CASES:
        data = case.text.encode()
        assert read_case(case, range(1, len(data))) == wanted(case), case.text


BUSY = [
    ("hermes", "<tool_call>"),
    ("hermes", "<tool_call"),
    ("hermes", " \n"),
    ("hermes", '<tool_call>{"x": "'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\\\'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1]} '),
    ("hermes", '<tool_call>{"arguments": {"a": ["\\u0041'),
    ("llama3", '{"name": "f"}'),
    ("mistral-args", "[TOOL_CALLS]f[ARGS]"),
]


@pytest.mark.parametrize(("form", "unit"), BUSY)
def test_reading_takes_linear_time(form: str, unit: str) -> None:
    """Text that keeps every automaton busy: sixteen times as much of it takes sixteen times as long, not 256 times."""
    small, large = (_seconds(form, (unit * size)[:size]) for size in (20_000, 320_000))
    assert large < 48 * small + 0.1, (small, large)


def _seconds(form: str, text: str) -> float:
    data = text.encode()
    start = time.process_time()
    read(data, range(32, len(data), 32), calls=form, names=NAMES)
    return time.process_time() - start


def test_no_more_is_held_back_than_may_change_meaning() -> None:
    """What a client has seen when all but the end has come."""
    early = {
        "Hello <tool": ("Hello", []),
        "Hello <toolx": ("Hello <toolx", []),
        'Hi <tool_call>{"name": "f", "arguments": {"a": "b': ("Hi", ['{"a": "b']),
        'Hi <tool_call>{"name": "f", "arguments": {"a": "b\\': ("Hi", ['{"a": "b\\']),
        'Hi <tool_call>{"name": "zz': ('Hi <tool_call>{"name": "zz', []),
    }
    for text, (content, arguments) in early.items():
        path = OutputPath(Cut([text.encode()]), form=ReplyForm(calls="hermes", names=NAMES))
        delta = path.push((0,))
        assert (delta.text, [call.arguments for call in delta.calls if call.arguments]) == (content, arguments), text
    bare = {
        '{"n': "",
        '{"name": "f': "",
        '{"name": "q': '{"name": "q',
        '{"na2': '{"na2',
        "[1": "[1",
        "{ ": "",
        "{ }": "{ }",
    }
    for text, content in bare.items():
        path = OutputPath(Cut([text.encode()]), form=ReplyForm(calls="llama3", names=NAMES))
        assert path.push((0,)).text == content, text


def test_one_call_ends_the_answer() -> None:
    text = 'Hm <tool_call>{"name": "get_time"}</tool_call>, <tool_call>{"name": "f"}</tool_call>'
    for cut in range(1, len(text)):
        pieces = [text[:cut].encode(), text[cut:].encode()]
        path = OutputPath(Cut(pieces), form=ReplyForm(calls="hermes", names=NAMES, one_call=True), call_ids="x")
        deltas = [path.push((0,)), path.push((1,)), path.finish()]
        assert accumulate(deltas) == Read("Hm", (("get_time", "{}"),))
        assert path.stop == ""
        assert path.num_tokens == (1 if cut > text.index("}") else 2)


def test_marks_count_as_control_tokens_too() -> None:
    """Templates of Mistral and Llama make them so; other control tokens stay unseen."""

    class Control(Cut):
        def piece(self, token: int, *, skip_special: bool = True) -> bytes:
            piece = self.pieces[token]
            return b"" if skip_special and piece.startswith((b"[", b"<")) else piece

    pieces = [
        b"[INST]",
        b"Hm",
        b"[TOOL_CALLS]",
        b"f",
        b"[ARGS]",
        b'{"a": 1}',
        b"[TOOL_CALLS]",
        b"get_time",
        b"[ARGS]",
        b"{}",
    ]
    form = ReplyForm(calls="mistral-args", names=NAMES)
    path = OutputPath(Control(pieces), form=form, call_ids="x")
    assert accumulate([path.push(range(len(pieces))), path.finish()]) == Read(
        "Hm", (("f", '{"a": 1}'), ("get_time", "{}"))
    )
    plain = OutputPath(Control(pieces))
    assert plain.push(range(len(pieces))).text == 'Hmf{"a": 1}get_time{}'


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("[TOOL_CALLS] {{ x }}", "mistral"),
        ("[TOOL_CALLS]{{ x }}[ARGS]", "mistral-args"),
        ('<|start_header_id|> {"name": function name, "parameters": dictionary}', "llama3"),
        ("<|start_header_id|>", None),
        ("<tool_call>{{ name }}<arg_key>{{ key }}</arg_key>", None),
        ("<tool_call>\n<function={{ name }}>", None),
        ("<|start_header_id|> parameters <TOOLCALL>", None),
    ],
)
def test_formats_are_found_in_templates(source: str, name: str | None) -> None:
    found = find_format(source)
    assert (found and found.name) == name
