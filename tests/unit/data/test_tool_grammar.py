"""What a grammar of calls lets a model write is read back as calls that functions take; and nothing else gets by."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest

from ai_engine.api.constraints import with_form
from ai_engine.data.grammar import LlGrammars
from ai_engine.data.output import OutputPath
from ai_engine.data.tokenizer import TokenPieces
from ai_engine.data.tool_grammar import MAX_CALLS, constraint_of, rules_of_calls
from ai_engine.data.tool_prompt import write_calls
from ai_engine.data.tools import FORMATS
from ai_engine.ports.errors import InvalidJsonSchema
from ai_engine.ports.grammar import Constraint, Matcher
from ai_engine.ports.text import ReplyForm, ToolChoice
from tests.unit.data.reading import Cut, Read, accumulate

EOS = 256
MARKS = ("<tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>")
"""Control tokens 257.. of the vocabulary that has them; the other one spells them."""
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"$ref": "#/$defs/name"},
                    "unit": {"enum": ["C", 'F"}</tool_call>']},
                    "days": {"type": "integer", "minimum": 0, "maximum": 99},
                },
                "required": ["city"],
                "additionalProperties": False,
                "$defs": {"name": {"type": "string", "maxLength": 4}},
            },
        },
    },
    {"type": "function", "function": {"name": "get_time"}},
]
SCHEMAS = {"get_weather": TOOLS[0]["function"]["parameters"], "get_time": {"type": "object", "maxProperties": 0}}
NAMES = tuple(SCHEMAS)
MUST = ToolChoice(mode="required")


@cache
def grammars(with_marks: bool) -> LlGrammars:
    marks = MARKS if with_marks else ()
    pieces = [*(bytes([byte]) for byte in range(256)), b"<eos>", *(mark.encode() for mark in marks)]
    hidden = frozenset(range(256, len(pieces)))
    return LlGrammars(lambda: TokenPieces(pieces, hidden), frozenset({EOS}), len(pieces))


def token_of(with_marks: bool, text: str) -> int | None:
    return 257 + MARKS.index(text) if with_marks and text in MARKS else None


def constraint(
    form: str, choice: ToolChoice, *, with_marks: bool = False, tools: Any = None, **options: Any
) -> Constraint:
    options = {"tags": None, "inside": False, **options}
    made = constraint_of(
        FORMATS[form], tools or TOOLS, choice, token_of=lambda text: token_of(with_marks, text), **options
    )
    assert made is not None
    return made


def matcher(made: Constraint, with_marks: bool = False) -> Matcher:
    return grammars(with_marks).compile(made).open()


def spelled(text: str, with_marks: bool) -> list[int]:
    """Marks as tokens where there are such, everything else byte by byte."""
    tokens: list[int] = []
    while text:
        mark = next((mark for mark in MARKS if with_marks and text.startswith(mark)), "")
        tokens += [257 + MARKS.index(mark)] if mark else text[0].encode()
        text = text[len(mark) or 1 :]
    return tokens


def is_allowed(text: str, made: Constraint, with_marks: bool = False) -> bool:
    """Whether the text may be an answer."""
    state = matcher(made, with_marks)
    return all(state.accept(token) for token in (*spelled(text, with_marks), EOS))


def wander(made: Constraint, with_marks: bool, rng: random.Random) -> bytes:
    """A text of random choices among what is allowed; it ends where it may, half the time."""
    state, said = matcher(made, with_marks), b""
    row = np.zeros(-(-(257 + len(MARKS) * with_marks) // 32), np.uint32)
    for left in range(3_000, 0, -1):
        state.fill(row, left)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        if EOS in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            return said
        choices = [int(token) for token in allowed if token != EOS]
        marks = [token for token in choices if token > EOS or chr(token) in '<[{"}\\,']
        token = rng.choice(marks if marks and rng.random() < 0.5 else choices)
        assert state.accept(token)
        said += bytes([token]) if token < 256 else MARKS[token - 257].encode()
    raise AssertionError(f"no end: {said[-200:]!r}")


def read(text: bytes, form: str, **options: Any) -> Read:
    path = OutputPath(Cut([text]), form=ReplyForm(calls=form, names=NAMES, **options), call_ids="x")
    return accumulate([path.push((0,)), path.finish()])


@pytest.mark.parametrize("with_marks", [False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_what_a_required_call_may_be_is_read_as_calls(form: str, with_marks: bool) -> None:
    rng = random.Random(form)
    for choice in (MUST, ToolChoice(mode="required", parallel=False), ToolChoice(mode="required", only="get_weather")):
        made = constraint(form, choice, with_marks=with_marks)
        for _ in range(6):
            text = wander(made, with_marks, rng)
            found = read(text, form)
            assert found.content == ""
            assert 1 <= len(found.calls) <= (MAX_CALLS if choice is MUST else 1), text
            for name, arguments in found.calls:
                assert choice.only in ("", name)
                jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize("with_marks", [False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_strict_functions_hold_when_the_model_may_choose(form: str, with_marks: bool) -> None:
    rng = random.Random(form)
    made = constraint(form, ToolChoice(), with_marks=with_marks)
    for text in ("Plain text, 1 < 2.", "", "a <tool_", "5 [TOOL"):
        assert is_allowed(text, made, with_marks), text
    good = write_calls(FORMATS[form], [("get_weather", '{"city": "Oslo"}'), ("get_time", "{}")])
    assert is_allowed(good, made, with_marks)
    for bad in ('{"city": 7}', '{"town": "Oslo"}', "{}", '{"city": "Trondheim"}'):
        text = write_calls(FORMATS[form], [("get_weather", bad)])
        assert read(text.encode(), form).calls, "a call that is read"
        assert not is_allowed(text, made, with_marks), text
    for _ in range(8):
        for name, arguments in read(wander(made, with_marks, rng), form).calls:
            loose = {"type": "object"}  # what is not strict may be any object
            jsonschema.validate(json.loads(arguments), SCHEMAS[name] if name == "get_weather" else loose)


@pytest.mark.parametrize("with_marks", [False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_json_as_asked_for_or_calls(form: str, with_marks: bool) -> None:
    """Also of a schema whose objects begin like a call."""
    strict = [TOOLS[0], {"type": "function", "function": {"name": "get_time", "strict": True}}]
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    rules = rules_of_calls(FORMATS[form], strict, ToolChoice(), lambda text: token_of(with_marks, text))
    asked = Constraint(kind="json_schema", text=json.dumps(schema))
    made = with_form(asked, ReplyForm(calls=form, call_rules=rules), must_call=False)
    assert made is not None
    for text in ('{"name": "Ada", "age": 3}', '{"name": "get_weather", "age": 3}', '{"name": "get_we", "age": 3}'):
        assert is_allowed(text, made, with_marks), text
        assert read(text.encode(), form) == Read(text, ())
    assert is_allowed(write_calls(FORMATS[form], [("get_weather", '{"city": "Oslo"}')]), made, with_marks)
    assert not is_allowed("Hello", made, with_marks)
    assert not is_allowed(write_calls(FORMATS[form], [("get_weather", "{}")]), made, with_marks)
    rng = random.Random(form)
    for _ in range(8):
        found = read(wander(made, with_marks, rng), form)
        assert bool(found.calls) != bool(found.content)
        if found.content:
            jsonschema.validate(json.loads(found.content), schema)
        for name, arguments in found.calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize("form", FORMATS)
def test_a_call_without_parameters_may_come_with_others(form: str) -> None:
    made = constraint(form, MUST)
    assert is_allowed(write_calls(FORMATS[form], [("get_time", "{}")] * 3), made)
    assert not is_allowed(write_calls(FORMATS[form], [("get_time", "{}")] * (MAX_CALLS + 1)), made)
    assert not is_allowed(write_calls(FORMATS[form], [("get_time", '{"a": 1}')]), made)
    assert not is_allowed("I would rather talk.", made)
    one = constraint(form, ToolChoice(mode="required", only="get_time"))
    assert is_allowed(write_calls(FORMATS[form], [("get_time", "{}")]), one)
    assert not is_allowed(write_calls(FORMATS[form], [("get_weather", '{"city": "Oslo"}')]), one)
    assert not is_allowed(write_calls(FORMATS[form], [("get_time", "{}")] * 2), one)


@pytest.mark.parametrize("with_marks", [False, True])
def test_reasoning_may_come_first(with_marks: bool) -> None:
    call = write_calls(FORMATS["hermes"], [("get_time", "{}")])
    tags = ("<think>", "</think>")
    maybe = constraint("hermes", MUST, with_marks=with_marks, tags=tags)
    assert is_allowed(f"<think>Hm. 1 < 2</think>\n\n{call}", maybe, with_marks)
    assert is_allowed(call, maybe, with_marks)
    assert not is_allowed(f"Hm</think>{call}", maybe, with_marks)
    assert not is_allowed("<think>Hm</think>no", maybe, with_marks)
    begun = constraint("hermes", MUST, with_marks=with_marks, tags=tags, inside=True)
    assert is_allowed(f"Hm</think>\n{call}", begun, with_marks)
    assert not is_allowed(call, begun, with_marks)


def test_nothing_is_enforced_where_nothing_was_asked_for() -> None:
    loose = [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}]
    made = constraint_of(FORMATS["hermes"], loose, ToolChoice(), token_of=lambda text: None, tags=None, inside=False)
    assert made is None


def test_what_cannot_be_enforced_is_refused_by_name() -> None:
    tools = [TOOLS[1], {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}]
    with pytest.raises(InvalidJsonSchema, match="not") as refused:
        grammars(False).compile(constraint("hermes", MUST, tools=tools))
    assert (refused.value.param or "").startswith("tools")
    tools[1]["function"]["parameters"] = {"type": "object", "extends": {}}
    with pytest.raises(InvalidJsonSchema, match="extends") as refused:
        constraint("hermes", MUST, tools=tools)
    assert refused.value.param == "tools[1].function.parameters"
    tools[1]["function"]["strict"] = False
    assert is_allowed(write_calls(FORMATS["hermes"], [("f", '{"any": [1]}')]), constraint("hermes", MUST, tools=tools))
