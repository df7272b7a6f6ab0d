"""Fields that constrain the text, and the constraint that serving gets for them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ai_engine.api.constraints import with_form
from ai_engine.ports.errors import InvalidJsonSchema, UnsupportedParameter
from ai_engine.ports.grammar import Constraint
from ai_engine.ports.text import ReplyForm
from ai_engine.testing import ScriptedServing
from tests.unit.api.doors import client

SCHEMA = {"type": "object", "properties": {"b": {"const": None}, "a": {"default": None, "enum": [None, 1.5]}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))


@pytest.mark.parametrize(
    ("fields", "kind", "text", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", "", "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            "json_schema", TEXT, "response_format",
        ),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "json_schema", TEXT, "response_format"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", TEXT, "response_format"),
        ({"response_format": {"type": "grammar", "grammar": "a ::= b"}}, "gbnf", "a ::= b", "response_format"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", TEXT, "structured_outputs"),
        ({"structured_outputs": {"json": TEXT}}, "json_schema", TEXT, "structured_outputs"),
        ({"structured_outputs": {"json_object": True}}, "json_object", "", "structured_outputs"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+", "structured_outputs"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "lark", 'start: "a"', "structured_outputs"),
        ({"guided_choice": ["a.b", "c\nd e"]}, "regex", r"(a\.b)|(c\nd e)", "guided_choice"),
        ({"guided_json": SCHEMA}, "json_schema", TEXT, "guided_json"),
        ({"guided_regex": "a|b"}, "regex", "a|b", "guided_regex"),
        ({"guided_grammar": 'root ::= "a"'}, "gbnf", 'root ::= "a"', "guided_grammar"),
        ({"json_schema": SCHEMA}, "json_schema", TEXT, "json_schema"),
        ({"grammar": 'start: "a"'}, "lark", 'start: "a"', "grammar"),
        ({"response_format": {"type": "text"}, "guided_regex": "a"}, "regex", "a", "guided_regex"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("route", ["chat", "complete"])
async def test_every_field_becomes_the_constraint_of_the_request(
    fields: dict[str, Any], kind: str, text: str, param: str, route: str
) -> None:
    serving = ScriptedServing()
    reply = await getattr(client(serving), route)(**fields)
    assert reply.status == 200, reply.body
    assert serving.requests[0].constraint == Constraint(kind=kind, text=text, param=param)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "found the string 'xml'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "found nothing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema", "found nothing",
        ),
        ({"response_format": {"type": "grammar"}}, "response_format.grammar", "found nothing"),
        ({"response_format": True}, "response_format", "found true"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one of"),
        ({"guided_choice": []}, "guided_choice", "found 0 items"),
        ({"guided_json": 5}, "guided_json", "found 5"),
        ({"guided_json": {}, "response_format": {"type": "json_object"}}, "guided_json", "one of them"),
    ],
    ids=str,
)  # fmt: skip
async def test_bad_fields_name_themselves(fields: dict[str, Any], param: str, words: str) -> None:
    reply = await client().chat(**fields)
    error = json.loads(reply.body)["error"]
    assert (reply.status, error["param"], error["code"]) == (400, param, "invalid_value"), error
    assert words in error["message"]


async def test_a_model_that_is_not_told_of_json_gets_a_warning() -> None:
    for words, warned in (("Give me JSON", False), ("Give me an object", True)):
        message = {"role": "user", "content": words}
        reply = await client().chat(messages=[message], response_format={"type": "json_object"})
        assert ("response_format: no message says JSON" in str(json.loads(reply.body).get("warnings"))) == warned


def test_a_constraint_begins_after_the_reasoning_part_and_gives_way_to_a_required_call() -> None:
    asked = Constraint(kind="json_object")
    call = Constraint(kind="lark", text="start: call")
    tags = ("<think>", "</think>")
    assert with_form(asked, ReplyForm(), must_call=False) == asked
    open_part = with_form(asked, ReplyForm(reasoning=tags), must_call=False)
    assert open_part == Constraint(kind="json_object", opens="<think>", after="</think>")
    begun = with_form(asked, ReplyForm(reasoning=tags, inside_reasoning=True), must_call=False)
    assert begun == Constraint(kind="json_object", after="</think>")
    assert with_form(asked, ReplyForm(calls="hermes", constraint=call), must_call=True) == call
    assert with_form(None, ReplyForm(calls="hermes", constraint=call), must_call=False) == call


def test_json_may_go_together_with_calls() -> None:
    form = ReplyForm(calls="hermes", call_rules="answer: call\n", reasoning=("<think>", "</think>"))
    made = with_form(Constraint(kind="json_object"), form, must_call=False)
    assert made is not None
    assert (made.kind, made.opens, made.after, made.param) == ("lark", "<think>", "</think>", "response_format")
    assert made.text.startswith("start: answer | asked\nasked: %json {")
    assert made.text.endswith("answer: call\n")
    for other in (Constraint(kind="regex", text="a"), Constraint(kind="lark", text="start: /a/")):
        with pytest.raises(UnsupportedParameter, match="tool_choice"):
            with_form(other, form, must_call=False)
    for text, words in (('{"extends": {}}', "extends"), ("{", "not JSON")):
        with pytest.raises(InvalidJsonSchema, match=words):
            with_form(Constraint(kind="json_schema", text=text), form, must_call=False)
