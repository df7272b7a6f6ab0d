"""Grammars over a small vocabulary: what is enforced, what is refused and how, masks against accept, ending in time."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ai_engine.data.grammar import LlGrammars
from ai_engine.ports.errors import InvalidJsonSchema, UnsupportedParameter
from ai_engine.ports.grammar import Constraint
from tests.unit.data.grammars import (
    EOS,
    EOT,
    NUM_LOGITS,
    PIECES,
    SHARED,
    THINK_END,
    allowed,
    compiled,
    takes,
    walk,
)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["x", "yy", None, 1.5]}, "maxItems": 4},
        "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "person": PERSON,
    "anything": {},
    "true": True,
    "any object": {"type": "object"},
    "types": {"type": ["null", "boolean", "integer", "number", "string"]},
    "numbers": {"type": "array", "items": {"type": "number", "minimum": -3.5, "exclusiveMaximum": 20}, "minItems": 2},
    "draft 4": {"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer", "minimum": 3,
                "exclusiveMinimum": True, "maximum": 40},
    "multiples": {"type": "array", "items": {"type": "integer", "multipleOf": 7, "minimum": 8}, "minItems": 1},
    "lengths": {"type": "string", "minLength": 3, "maxLength": 5},
    "pattern": {"type": "array", "items": {"type": "string", "pattern": "^[a-f]{3}-\\d+$"}, "minItems": 1},
    "search": {"type": "string", "pattern": "ab"},
    "dates": {"type": "object", "properties": {"at": {"type": "string", "format": "date"}}, "required": ["at"]},
    "const": {"const": {"a": [1, {"b": None}], "é": "\n"}},
    "tuple": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "items": False,
              "minItems": 2},
    "old tuple": {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array",
                  "items": [{"type": "integer"}, {"type": "null"}], "additionalItems": {"type": "string"},
                  "minItems": 3},
    "patterned names": {"type": "object", "patternProperties": {"^k\\d$": {"type": "integer"}},
                        "additionalProperties": False, "minProperties": 1},
    "all of": {"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                         {"properties": {"b": {"type": "boolean"}}, "required": ["b"]}]},
    "one of types": {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}]},
    "one of tags": {"oneOf": [
        {"type": "object", "properties": {"t": {"const": "a"}, "v": {"type": "integer"}}, "required": ["t", "v"]},
        {"type": "object", "properties": {"t": {"enum": ["b", "c"]}, "w": {"type": "string"}}, "required": ["t", "w"]},
    ]},
    "tree": {"$defs": {"n": {"type": "object", "properties": {"v": {"type": "integer"},
             "kids": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "required": ["v", "kids"]}},
             "$ref": "#/$defs/n"},
    "idle": {"type": "array", "uniqueItems": False, "items": {"type": "null"}, "dependencies": {}, "if": {},
             "maxItems": 3},
    "escapes in names": {"type": "object", "properties": {'a"b\\': {"type": "null"}, "~/": {"type": "null"}},
                         "required": ["~/", 'a"b\\'], "additionalProperties": False},
    "inside": {"type": "array", "minItems": 1, "items": {"type": "object", "required": ["deep"], "properties": {
               "deep": {**PERSON, "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}}}},
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("max_tokens", [0, 7, 60, 400])
def test_whatever_the_model_prefers_the_answer_is_whole_and_valid(name: str, max_tokens: int) -> None:
    schema = SCHEMAS[name]
    grammar = compiled(schema)
    assert grammar.min_tokens > 0, "no smallest instance is known"
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
    for seed in range(8):
        text, ended = walk(grammar, grammar.min_tokens + max_tokens, random.Random(seed))
        assert ended, text
        validator.validate(json.loads(text))


def walked(choices: list[int], max_tokens: int) -> list[tuple[int, list[int]]]:
    """(token, mask it was chosen from) of a text under PERSON, as the choices say."""
    matcher, steps = compiled(PERSON).open(), []
    for taken, choice in enumerate(choices[:max_tokens]):
        mask = allowed(matcher, max_tokens - taken)
        token = mask[choice % len(mask)]
        steps.append((token, mask))
        assert matcher.accept(token)
        if matcher.ended:
            break
    return steps


CHOICES = st.lists(st.integers(0, 1 << 16), min_size=1, max_size=80)


@given(choices=CHOICES, max_tokens=st.integers(20, 90), data=st.data())
@settings(max_examples=60, deadline=None)
def test_guesses_taken_back_change_nothing(choices: list[int], max_tokens: int, data: st.DataObject) -> None:
    """The same masks whether or not guesses were tried in between; and after starting again in the middle."""
    steps = walked(choices, max_tokens)
    matcher = compiled(PERSON).open()
    for taken, (token, mask) in enumerate(steps):
        num_guesses = data.draw(st.integers(0, 3))
        accepted = 0
        for guess, _ in steps[taken : taken + num_guesses]:
            allowed(matcher, max_tokens - taken - accepted)
            assert matcher.accept(guess)
            accepted += 1
        matcher.rollback(accepted)
        if data.draw(st.booleans()):  # as after a preemption: a new matcher is given all tokens at once
            matcher = compiled(PERSON).open()
            assert all(matcher.accept(earlier) for earlier, _ in steps[:taken])
        assert allowed(matcher, max_tokens - taken) == mask
        assert matcher.accept(token)


@given(choices=CHOICES)
@settings(max_examples=40, deadline=None)
def test_a_token_is_accepted_exactly_when_its_bit_is_set(choices: list[int]) -> None:
    matcher = compiled(PERSON).open()
    for choice in choices[:25]:
        mask = allowed(matcher)
        for token in range(NUM_LOGITS):
            taken = matcher.accept(token)
            assert taken == (token in mask), (token, taken)
            if taken:
                matcher.rollback(1)
        assert matcher.accept(mask[choice % len(mask)])
        if matcher.ended:
            assert not matcher.accept(EOS)
            return


@pytest.mark.parametrize(
    ("schema", "keyword", "pointer"),
    [
        ({"uniqueItems": True}, "uniqueItems", "/uniqueItems"),
        ({"properties": {"a/b": {"items": {"contains": {}}}}}, "contains", "/properties/a~1b/items/contains"),
        ({"propertyNames": {"pattern": "^a"}}, "propertyNames", "/propertyNames"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired", "/dependentRequired"),
        ({"dependentSchemas": {"a": {"required": ["b"]}}}, "dependentSchemas", "/dependentSchemas"),
        ({"dependencies": {"a": ["b"]}}, "dependencies", "/dependencies"),
        ({"unevaluatedProperties": False}, "unevaluatedProperties", "/unevaluatedProperties"),
        ({"unevaluatedItems": False}, "unevaluatedItems", "/unevaluatedItems"),
        ({"not": {"type": "string"}}, "not", "/not"),
        ({"if": {"type": "string"}, "then": {"minLength": 3}}, "if", "/if"),
        ({"$dynamicRef": "#x"}, "$dynamicRef", "/$dynamicRef"),
        ({"$recursiveRef": "#"}, "$recursiveRef", "/$recursiveRef"),
        ({"$ref": "https://example.com/schema.json"}, "$ref", "/$ref"),
        ({"$ref": "#/$defs/absent"}, "$ref", "/$ref"),
        ({"items": {"disallow": "string"}}, "disallow", "/items/disallow"),
        ({"extends": {}}, "extends", "/extends"),
        ({"divisibleBy": 2}, "divisibleBy", "/divisibleBy"),
        ({"type": "string", "format": "iri"}, "format", "/format"),
        ({"type": "string", "format": "our-own"}, "format", "/format"),
        ({"type": "string", "pattern": "(?=a)b"}, "pattern", "/pattern"),
        ({"type": "string", "pattern": "^(a)\\1$"}, "pattern", "/pattern"),
        ({"type": "string", "pattern": "["}, "pattern", "/pattern"),
        ({"type": "object", "minProperties": 2}, "minProperties", "/minProperties"),
        ({"type": "thing"}, "type", "/type"),
        ({"type": 5}, "type", "/type"),
        ({"properties": []}, "properties", "/properties"),
        ({"required": "a"}, "required", "/required"),
        ({"enum": 3}, "enum", "/enum"),
        ({"anyOf": {}}, "anyOf", "/anyOf"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, "oneOf", "/oneOf"),
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, "oneOf", "/oneOf"),
        ({"$defs": {"x": {"not": {"const": 1}}}, "items": {"$ref": "#/$defs/x"}}, "not", "/$defs/x/not"),
        ({"minimum": 4, "maximum": 3, "type": "integer"}, "minimum", "/minimum"),
        (False, "false", ""),
    ],
    ids=str,
)
def test_a_keyword_that_is_not_enforced_is_named_with_its_place(schema: Any, keyword: str, pointer: str) -> None:
    with pytest.raises(InvalidJsonSchema) as refused:
        compiled(schema, param="response_format")
    message = refused.value.message
    assert message.startswith("response_format: "), message
    assert repr(keyword) in message, message
    assert pointer in message, message
    assert "%json" not in message, message
    assert refused.value.param == "response_format"
    assert refused.value.code == "invalid_json_schema"


def test_options_of_the_compiler_cannot_be_sent() -> None:
    """With `lenient` it would ignore what it does not implement."""
    for schema in (
        {"not": {}, "x-guidance": {"lenient": True}},
        {"items": {"not": {}, "x-guidance": {"lenient": True}}},
    ):
        with pytest.raises(InvalidJsonSchema):
            compiled(schema)
    with pytest.raises(InvalidJsonSchema):
        compiled('start: %json {"not": {}, "x-guidance": {"lenient": true}}', "lark")
    grammar = compiled({"type": "array", "x-guidance": {"whitespace_flexible": True}})
    assert not takes(grammar, "[ ]")


def test_space_is_at_most_one_after_a_comma_or_a_colon_and_names_keep_their_order() -> None:
    grammar = compiled(PERSON)
    assert takes(grammar, '{"name":"a","age":1}')
    assert takes(grammar, '{"name": "a", "age": 1}')
    for text in ('{"name":  "a","age":1}', '{ "name":"a","age":1}', '{"name":"a","age":1 }', '{"name":"a",\n"age":1}',
                 ' {"name":"a","age":1}', '{"age":1,"name":"a"}', '{"name":"a"}'):  # fmt: skip
        assert not takes(grammar, text), text


def test_end_of_sequence_is_allowed_where_the_text_may_end_and_only_there() -> None:
    matcher = compiled({"type": "integer"}).open()
    assert not {EOS, EOT} & set(allowed(matcher))
    assert matcher.accept(ord("7"))
    assert {EOS, EOT, ord("0")} <= set(allowed(matcher))
    matcher = compiled({"const": 1}).open()
    assert matcher.accept(ord("1"))
    assert allowed(matcher) == [EOS, EOT]
    assert matcher.accept(EOT)
    assert matcher.ended
    matcher.rollback(2)
    assert allowed(matcher) == [ord("1")]


def test_tokens_without_text_are_never_allowed() -> None:
    matcher = compiled({"type": "string"}).open()
    assert matcher.accept(ord('"'))
    assert not set(allowed(matcher)) & {EOS, EOT, THINK_END, *range(len(PIECES.pieces), NUM_LOGITS)}
    with pytest.raises(UnsupportedParameter, match="end-of-sequence"):
        LlGrammars(lambda: PIECES, frozenset(), NUM_LOGITS).compile(Constraint(kind="json_object"))


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("regex", r"(red|blue)-\d{2}", ["red-07"], ["red-7", "green-07", "red-07 "]),
        ("lark", 'start: "a" word+\nword: /[b-d]/', ["abc"], ["a", "ae"]),
        ("lark", 'start: "x=" value\nvalue: %json {"type": "integer"}', ["x=12"], ["x=", "x=a"]),
        ("gbnf", 'root ::= "yes" | "no" [0-9]+', ["yes", "no12"], ["no", "maybe"]),
        ("json_object", "", ["{}", '{"a":[1, {}]}'], ["[]", "1", "{} "]),
    ],
)
def test_patterns_and_grammars(kind: Any, text: str, good: list[str], bad: list[str]) -> None:
    grammar = compiled(text, kind)
    assert [takes(grammar, word) for word in (*good, *bad)] == [True] * len(good) + [False] * len(bad)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "(?=a)"), ("regex", "("), ("regex", "(?<n>a)\\k<n>"), ("lark", "start: absent"), ("lark", "start: ("),
        ("lark", ""), ("gbnf", 'root ::= "a'), ("gbnf", "root ::= absent"), ("json_schema", "{"),
        ("json_schema", "[1]"),
        ("json_schema", '"object"'), ("json_schema", "nonsense"), ("json_schema", '{"type":"object","type":"array"}'),
    ],
)  # fmt: skip
def test_what_is_no_grammar_is_refused(kind: Any, text: str) -> None:
    with pytest.raises(InvalidJsonSchema) as refused:
        compiled(text, kind, param="guided_grammar")
    assert refused.value.param == "guided_grammar"


def nested(levels: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


HOSTILE: dict[str, Any] = {
    "deep": nested(120),
    "too deep": nested(500),
    "wide": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}},
    "huge": {"enum": ["x" * 600_000]},
    "many": {"enum": list(range(30_000))},
    "exponential refs": {
        "$ref": "#/$defs/n0",
        "$defs": {f"n{i}": {"type": "object", "properties": {k: {"$ref": f"#/$defs/n{i + 1}"} for k in "ab"},
                  "required": ["a", "b"]} for i in range(40)} | {"n40": {"type": "null"}},
    },
    "product": {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(5)]} for i in range(9)]},
    "itself": {"$ref": "#"},
    "only itself": {"$defs": {"a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}},
                    "$ref": "#/$defs/a"},
    "counting": {"type": "string", "pattern": "^((a{0,400}){0,400}){0,400}$"},
    "far end": {"type": "string", "pattern": "^(a|b)*a(a|b){60}$"},
    "long": {"type": "string", "minLength": 100_000},
    "many items": {"type": "array", "minItems": 1_000_000},
    "infinite": {"type": "number", "multipleOf": 1e-300, "minimum": 1e300},
    "odd bounds": {"type": "array", "minItems": -1, "maxItems": 1.5},
    "odd words": {"minLength": "3", "properties": {"a": 5}, "required": [None], "enum": [[]]},
    "backtracking names": {"type": "object", "patternProperties": {"^(a+)+$": {"type": "null"}}, "minProperties": 1},
    "backtracking text": {"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$", "minLength": 200},
    "names": {"type": "object", "properties": {"\x00\ud7ff": {"const": "\u2028"}}, "required": ["\x00\ud7ff"]},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.timeout(60)
def test_hostile_schemas_are_refused_or_enforced_in_bounded_time(name: str) -> None:
    """Never another error, and no crash when they are used."""
    try:
        grammar = compiled(HOSTILE[name])
    except InvalidJsonSchema:
        return
    matcher = grammar.open()
    for taken in range(20):
        mask = allowed(matcher, 40 - taken)
        assert mask
        assert matcher.accept(mask[len(mask) // 2])
        if matcher.ended:
            return


def test_a_constraint_begins_after_the_end_tag() -> None:
    schema = {"const": {"a": 1}}
    begun = compiled(schema, after="</end>")
    assert takes(begun, 'thoughts {"b": 2}</end>{"a":1}')
    assert takes(begun, '</end>\n\n{"a":1}')
    for text in ('{"a":1}', 'x</end>{"a":2}', 'x</end>\n\n\n\n{"a":1}', "x</end>"):
        assert not takes(begun, text), text
    optional = compiled(schema, opens="<go>", after="</end>")
    assert takes(optional, '{"a":1}')
    assert takes(optional, '<go>hm</end>{"a":1}')
    assert not takes(optional, '<go>{"a":1}')
    matcher = compiled(schema, after="</think>").open()  # a token of its own, which text cannot spell
    for token in (*b"hm</think>", THINK_END, *b'{"a":1}', EOS):
        assert matcher.accept(token), token
    assert not takes(compiled(schema, after="</think>"), '</think>{"a":1}')


@pytest.mark.parametrize("fields", [{"after": "</end>"}, {"after": "</think>"}, {"opens": "<go>", "after": "</end>"}])
def test_thoughts_end_in_time_for_the_answer(fields: dict[str, Any]) -> None:
    grammar = compiled(PERSON, **fields)
    for seed in range(6):
        text, ended = walk(grammar, grammar.min_tokens + 40, random.Random(seed))
        assert ended, text
        answer = text.rpartition(fields["after"].encode())[2]
        jsonschema.validate(json.loads(answer), PERSON)


def test_equal_constraints_are_compiled_once_and_the_vocabulary_is_loaded_with_the_first() -> None:
    loads = []
    made = LlGrammars(lambda: loads.append(1) or PIECES, frozenset({EOS}), NUM_LOGITS)  # type: ignore[func-returns-value]
    assert (made.nbytes, loads) == (0, [])
    first = made.compile(Constraint(kind="json_schema", text="{}"))
    assert made.compile(Constraint(kind="json_schema", text="{}", param="other")) is first
    assert made.compile(Constraint(kind="json_schema", text="{ }")) is not first
    assert len(loads) == 1
    assert made.nbytes > 0


def test_the_smallest_answer_is_counted() -> None:
    grammar = compiled({"type": "object", "properties": {"k": {"enum": ["abc", "de"]}}, "required": ["k"]})
    text, ended = walk(grammar, grammar.min_tokens, random.Random(0))
    assert ended
    assert json.loads(text) == {"k": "de"}
    assert compiled("[ab]{3}", "regex").min_tokens == 4
    row = np.zeros(-(-NUM_LOGITS // 32), np.uint32)
    SHARED.compile(Constraint(kind="regex", text="a")).open().fill(row, 2)
    assert row[97 >> 5] == 1 << (97 & 31)
