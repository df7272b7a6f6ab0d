"""Request fields that constrain the answer's text -> one Constraint, for every door.

Owns `response_format` (OpenAI's, with llama.cpp's shorter form), `structured_outputs` (vLLM's), and their older names
`guided_*`, `grammar` and `json_schema`; and how a constraint goes together with tools and a reasoning part. Does not
own what can be enforced: the worker compiles before it queues a request, and refuses.

Choices: `strict` changes nothing, a schema is always enforced as it stands (`additionalProperties` is what it says).
One constraint per request. With tools that the model may call, the answer is JSON as asked for or calls (a constraint
that is not JSON is refused there); where a call is required, the call's grammar counts. A grammar with "::=" is GBNF,
any other Lark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from ai_engine.contracts.fields import (
    AnyObject,
    ByType,
    Check,
    Checking,
    Choice,
    Flag,
    ListOf,
    Record,
    Schema,
    Text,
    Unsupported,
    Unused,
    show,
)
from ai_engine.contracts.json_schema import json_block, lowered
from ai_engine.contracts.json_text import decode_json
from ai_engine.ports.errors import InvalidJson, InvalidJsonSchema, InvalidValue, UnsupportedParameter
from ai_engine.ports.grammar import Constraint
from ai_engine.ports.text import ReplyForm

MAX_CHOICE_TEXTS: Final = 1024
_PUNCTUATION: Final = frozenset(r"""!"#$%&'()*+,-./:;<=>?@[\]^`{|}~""")


def _json_schema(schema: Any, param: str) -> Constraint:
    text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    return Constraint(kind="json_schema", text=text, param=param)


def _grammar(text: str, param: str) -> Constraint:
    return Constraint(kind="gbnf" if "::=" in text else "lark", text=text, param=param)


def _choice(texts: list[str], param: str) -> Constraint:
    escaped = ("".join(f"\\{c}" if c in _PUNCTUATION else _SPACES.get(c, c) for c in text) for text in texts)
    return Constraint(kind="regex", text="|".join(f"({text})" for text in escaped), param=param)


_SPACES: Final = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


class _Json:
    """A JSON Schema, as an object or as the text of one."""

    expected = "a JSON Schema: an object, or its text"
    schema: Schema = {"description": expected}  # noqa: RUF012 - read only

    def check(self, value: Any, at: Checking) -> Constraint:
        if type(value) not in (dict, str):
            at.fail(show(value), self.expected)
        return _json_schema(value, at.where())


class _Regex:
    expected = "a regular expression"
    schema: Schema = {"type": "string"}  # noqa: RUF012

    def check(self, value: Any, at: Checking) -> Constraint:
        return Constraint(kind="regex", text=_TEXT.check(value, at), param=at.where())


class _Grammar:
    expected = "a grammar in Lark (llguidance's) or GBNF"
    schema: Schema = {"type": "string"}  # noqa: RUF012

    def check(self, value: Any, at: Checking) -> Constraint:
        return _grammar(_TEXT.check(value, at), at.where())


class _OneOf:
    expected = "an array of strings"
    schema: Schema = {"type": "array", "items": {"type": "string"}}  # noqa: RUF012
    _list = ListOf(Text(1, 4096), 1, MAX_CHOICE_TEXTS)

    def check(self, value: Any, at: Checking) -> Constraint:
        return _choice(self._list.check(value, at), at.where())


class _AnyJsonObject:
    expected = "true"
    schema: Schema = {"type": "boolean"}  # noqa: RUF012

    def check(self, value: Any, at: Checking) -> Constraint | None:
        return Constraint(kind="json_object", param=at.where()) if Flag().check(value, at) else None


_TEXT: Final = Text(1, 1 << 19)
_SCHEMA_FIELD: Final = AnyObject()


class ResponseFormat:
    """OpenAI's: text, json_object, json_schema. ``schema`` may stand beside ``type`` as llama.cpp has it."""

    expected = "an object with a type"
    _kinds = Choice(("text", "json_object", "json_schema", "grammar"))
    _named = Record(
        {"name": Text(1, 256), "description": Text(), "schema": _SCHEMA_FIELD, "strict": Flag()}, frozenset({"schema"})
    )
    _record = Record(
        {"type": _kinds, "json_schema": _named, "schema": _SCHEMA_FIELD, "grammar": _Grammar()}, frozenset({"type"})
    )

    @property
    def schema(self) -> Schema:
        return self._record.schema

    def check(self, value: Any, at: Checking) -> Constraint | None:
        got = self._record.check(value, at)
        kind, where = got["type"], at.where()
        schema = got.get("schema", got.get("json_schema", {}).get("schema"))
        if kind == "grammar":
            found: Constraint | None = got.get("grammar")
            if found is None:
                at.path.append("grammar")
                at.fail("nothing", "a grammar", "add this field.")
            return msgspec.structs.replace(found, param=where)
        if kind == "json_schema" and schema is None:
            at.path.append("json_schema")
            at.fail("nothing", "an object with name and schema", "add this field, or use json_object.")
        if kind == "text":
            return None
        return Constraint(kind="json_object", param=where) if schema is None else _json_schema(schema, where)


_KINDS: Final[dict[str, Check]] = {
    "json": _Json(), "regex": _Regex(), "choice": _OneOf(), "grammar": _Grammar(), "json_object": _AnyJsonObject(),
}  # fmt: skip


class StructuredOutputs:
    """vLLM's: exactly one of json, regex, choice, grammar, json_object."""

    expected = "an object with one of json, regex, choice, grammar, json_object"
    _record = Record(
        {
            **_KINDS,
            "disable_fallback": Unused(neutral=(True, False)),
            "disable_any_whitespace": Unused("space is always bounded.", neutral=(True, False)),
            "disable_additional_properties": Unsupported("write it into the schema.", neutral=(False,)),
            "whitespace_pattern": Unsupported("space is at most one after a comma or a colon."),
            "structural_tag": Unsupported(),
        }
    )

    @property
    def schema(self) -> Schema:
        return self._record.schema

    def check(self, value: Any, at: Checking) -> Constraint:
        got = self._record.check(value, at)
        found: list[Constraint] = [got[name] for name in _KINDS if name in got]
        if len(found) != 1:
            at.fail(", ".join(map(repr, got)) or "none of them", "exactly one of " + ", ".join(_KINDS))
        return msgspec.structs.replace(found[0], param=at.where())


def constraint_fields() -> dict[str, Check]:
    """The fields, by name, whose checked values `constraint_of` reads."""
    return {
        "response_format": ResponseFormat(),
        "structured_outputs": StructuredOutputs(),
        "guided_json": _Json(),
        "guided_regex": _Regex(),
        "guided_choice": _OneOf(),
        "guided_grammar": _Grammar(),
        "guided_decoding_backend": Unused(),
        "guided_whitespace_pattern": Unsupported("space is at most one after a comma or a colon."),
        "json_schema": ByType({dict: _Json()}),
        "grammar": _Grammar(),
    }


_CONSTRAINING: Final = (
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "json_schema", "grammar",
)  # fmt: skip


def constraint_of(got: dict[str, Any]) -> Constraint | None:
    """The constraint of a checked request. Raises InvalidValue when there are several."""
    found = [name for name in _CONSTRAINING if got.get(name) is not None]
    if len(found) > 1:
        raise InvalidValue(
            f"{found[1]}: found it beside {found[0]}, expected one of them. Fix: send one.", param=found[1]
        )
    if found and got.get("ignore_eos"):
        raise UnsupportedParameter(f"ignore_eos: not with {found[0]}, whose text has an end.", param="ignore_eos")
    constraint: Constraint | None = got[found[0]] if found else None
    return constraint


def hints(constraint: Constraint | None, messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """A warning where a model was not told that it is to write JSON: it then writes an object of nothing much."""
    if constraint is None or constraint.kind != "json_object":
        return []
    told = any("json" in str(message.get("content", "")).lower() for message in messages)
    return [] if told else [f"{constraint.param}: no message says JSON. Fix: say which object you want."]


def with_form(constraint: Constraint | None, form: ReplyForm, *, must_call: bool) -> Constraint | None:
    """The constraint of an answer of that form: after its reasoning part; a required call's own; JSON or calls where
    functions may be called. Raises UnsupportedParameter for another constraint there, InvalidJsonSchema."""
    if constraint is None or must_call:
        return form.constraint
    if form.calls:
        constraint = _or_calls(constraint, form)
    if form.reasoning is None:
        return constraint
    opens, closes = form.reasoning
    return msgspec.structs.replace(constraint, after=closes, opens="" if form.inside_reasoning else opens)


def _or_calls(constraint: Constraint, form: ReplyForm) -> Constraint:
    """What was asked for, or calls and nothing else."""
    if constraint.kind not in ("json_object", "json_schema"):
        raise UnsupportedParameter(
            f"{constraint.param}: only JSON goes together with tools that the model may call or not. Fix: set "
            "tool_choice to none or required, or leave one out.",
            param=constraint.param,
        )
    try:
        schema = decode_json(constraint.text.encode()) if constraint.kind == "json_schema" else {"type": "object"}
    except InvalidJson as error:
        raise InvalidJsonSchema(
            f"{constraint.param}: the schema is not JSON: {error}", param=constraint.param
        ) from error
    block = json_block(lowered(schema, constraint.param))
    text = f"start: answer | asked\nasked: {block}\n{form.call_rules}"
    return Constraint(kind="lark", text=text, param=constraint.param)
