"""Which unions no value can match twice; what is dropped, walked and bounded; the given schema stays as it was."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from ai_engine.contracts.json_schema import Document, disjoint, lowered
from ai_engine.ports.errors import InvalidJsonSchema


def tagged(value: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"t": {"const": value}, **more}, "required": ["t"]}


APART: list[tuple[Any, Any]] = [
    ({"type": "integer"}, {"type": "string"}),
    ({"type": "null"}, {"type": ["array", "object"]}),
    ({"const": 1}, {"enum": [2, "1", True, None]}),
    ({"const": "a"}, {"type": "integer"}),
    ({"enum": ["a", "b"]}, {"$ref": "#/$defs/c"}),
    (tagged("a"), tagged("b")),
    (tagged("a"), {"allOf": [tagged("b"), {"required": ["x"]}]}),
    (tagged({"k": 1}), tagged({"k": 2})),
    ({"type": "object", "required": ["a"]}, {"type": "object", "properties": {"b": {}}, "additionalProperties": False}),
    ({"type": "object", "required": ["a"]}, {"type": "object", "properties": {"a": False}}),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"type": "string"}),
    ({"type": "string", "maxLength": 2}, {"type": "string", "minLength": 3}),
    ({"type": "number", "maximum": 2}, {"type": "integer", "minimum": 3}),
    ({"type": "array", "maxItems": 0}, {"type": "array", "minItems": 1}),
    (False, {}),
]
TOGETHER: list[tuple[Any, Any]] = [
    ({"type": "integer"}, {"type": "number"}),
    ({"const": 1}, {"const": 1.0}),
    ({"const": 2}, {"type": "number"}),
    ({}, {"type": "string"}),
    (True, {"type": "string"}),
    ({"type": "object", "required": ["a"]}, {"type": "object", "required": ["b"]}),
    ({"type": "object", "properties": {"t": {"const": "a"}}}, tagged("b")),
    ({"type": "object", "required": ["a"]}, {"type": "object", "properties": {"a": {}}, "additionalProperties": False}),
    ({"type": "string", "maxLength": 3}, {"type": "string", "minLength": 3}),
    ({"maximum": 2}, {"minimum": 3}),
    ({"pattern": "^a"}, {"pattern": "^b"}),
    ({"$ref": "#"}, {"$ref": "#"}),
]
DEFS = {"$defs": {"c": {"const": "c"}}}


@pytest.mark.parametrize(("first", "second"), APART, ids=str)
def test_branches_that_share_no_value_become_any_of(first: Any, second: Any) -> None:
    document = Document(copy.deepcopy(DEFS))
    assert disjoint(document, first, second)
    assert disjoint(document, second, first)
    made = lowered({"oneOf": [first, second], **DEFS}, "x")
    assert made["anyOf"] == [first, second]
    assert "oneOf" not in made


@pytest.mark.parametrize(("first", "second"), TOGETHER, ids=str)
def test_branches_that_may_share_a_value_are_refused(first: Any, second: Any) -> None:
    assert not disjoint(Document(copy.deepcopy(DEFS)), first, second)
    with pytest.raises(InvalidJsonSchema, match=r"'oneOf' at '/items/oneOf'"):
        lowered({"items": {"oneOf": [first, second]}, **DEFS}, "x")


def test_one_of_beside_any_of_holds_both() -> None:
    branches = [{"type": "integer"}, {"type": "string"}]
    made = lowered({"oneOf": branches, "anyOf": [{"maximum": 3}, {"maxLength": 2}]}, "x")
    assert made == {"anyOf": [{"maximum": 3}, {"maxLength": 2}], "allOf": [{"anyOf": branches}]}


def test_only_what_counts_is_looked_at_and_the_given_schema_is_not_changed() -> None:
    schema = {
        "$defs": {"used": {"uniqueItems": False, "then": {"not": {}}}, "unused": {"divisibleBy": 2}},
        "properties": {
            "divisibleBy": {"$ref": "#/$defs/used"},
            "x": {"const": {"extends": 1}, "default": {"disallow": 1}},
        },
        "x-guidance": {"lenient": True},
    }
    before = json.dumps(schema)
    made = lowered(schema, "x")
    assert json.dumps(schema) == before
    assert made["$defs"]["used"] == {}
    assert "x-guidance" not in made
    with pytest.raises(InvalidJsonSchema, match=r"'divisibleBy' at '/\$defs/unused/divisibleBy'"):
        lowered({**schema, "items": {"$ref": "#/$defs/unused"}}, "x")


@pytest.mark.parametrize("ref", ["#/$defs/a~1b", "#named", "https://example.com/s#/$defs/a~1b", "#/%24defs/a~1b"])
def test_references_of_every_form_are_followed(ref: str) -> None:
    schema = {
        "$id": "https://example.com/s", "$defs": {"a/b": {"$anchor": "named", "extends": {}}}, "items": {"$ref": ref},
    }  # fmt: skip
    with pytest.raises(InvalidJsonSchema, match="'extends'"):
        lowered(schema, "x")


def test_sizes_are_bounded() -> None:
    deep: Any = {}
    for _ in range(200):
        deep = {"items": deep}
    for schema in (deep, {"enum": list(range(30_000))}):
        with pytest.raises(InvalidJsonSchema, match="20000 values or 128 levels"):
            lowered(schema, "x")
    wrong: Any
    for wrong in (5, "x", [], None):
        with pytest.raises(InvalidJsonSchema, match="expected a JSON Schema object"):
            lowered(wrong, "x")
