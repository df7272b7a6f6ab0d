"""What makes an answer a call: the grammar of a format's calls over the functions' schemas, as a Constraint.

Owns the grammar's text, in llguidance's dialect of Lark with JSON Schemas inside. Does not own compiling (grammar.py)
nor what of JSON Schema can be enforced (contracts.json_schema, which refuses the rest).

- required: one call or more (at most MAX_CALLS), and no text. A named function: exactly one call of it.
- auto, with a function that is ``strict``: text and calls in any order, but every call is of a function offered and
  follows its schema. Without such a function nothing is enforced.
- ``strict: false``, said outright, leaves a function's arguments any object.
A reasoning part may come first, if the model writes one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ai_engine.contracts.json_schema import json_block, lowered
from ai_engine.data.tool_prompt import NO_PARAMETERS, is_allowed
from ai_engine.data.tools import CallFormat
from ai_engine.ports.grammar import Constraint
from ai_engine.ports.text import ToolChoice

MAX_CALLS: Final = 16
"""Of one answer that must be calls: a weak model would go on for ever."""
_ANY: Final = r"/(.|\n)*/"


def constraint_of(
    form: CallFormat,
    tools: Sequence[Mapping[str, Any]],
    choice: ToolChoice,
    *,
    token_of: Callable[[str], int | None],
    tags: tuple[str, str] | None,
    inside: bool,
) -> Constraint | None:
    """None when nothing is to be enforced. ``token_of`` is the control token with a text, if there is one; ``tags``
    the reasoning part that may come, ``inside`` if it has begun. Raises InvalidJsonSchema naming the function."""
    must = choice.mode == "required"
    if not must and not any(tool["function"].get("strict") for tool in tools if is_allowed(tool, choice)):
        return None
    rules = _Rules(form, token_of, tools, choice)
    text = "\n".join(["start: answer", *(rules.calls() if must else rules.text_and_calls()), *rules.lines]) + "\n"
    after, opens = ("", "") if tags is None else (tags[1], "" if inside else tags[0])
    return Constraint(kind="lark", text=text, after=after, opens=opens, param="tools")


def rules_of_calls(
    form: CallFormat,
    tools: Sequence[Mapping[str, Any]],
    choice: ToolChoice,
    token_of: Callable[[str], int | None],
) -> str:
    """Rules of Lark whose ``answer`` is nothing but calls, for a grammar of calls or something else."""
    rules = _Rules(form, token_of, tools, choice)
    return "\n".join([*rules.calls(), *rules.lines]) + "\n"


def _schema(function: Mapping[str, Any], index: int, must: bool) -> dict[str, Any]:
    strict = function.get("strict")
    if strict is False or (not must and not strict):
        return {"type": "object"}
    schema = function.get("parameters") or NO_PARAMETERS
    if not {"type", "$ref", "anyOf", "oneOf", "allOf"} & schema.keys():
        schema = {"type": "object", **schema}
    return lowered(schema, f"tools[{index}].function.parameters")


class _Rules:
    """``lines`` are the rules of the functions offered. An object's parts are the compiler's own for JSON Schema, one
    by one: its lexer takes the longest part, so a call spelled as one would hide other JSON that begins like it."""

    def __init__(
        self,
        form: CallFormat,
        token_of: Callable[[str], int | None],
        tools: Sequence[Mapping[str, Any]],
        choice: ToolChoice,
    ) -> None:
        self._form = form
        self._token_of = token_of
        self._at_most = 1 if choice.only or not choice.parallel else MAX_CALLS
        self._names: list[str] = []
        self.lines = [] if form.named else ["COLON: /:[ ]?/", "COMMA: /,[ ]?/"]
        for index, tool in enumerate(tools):
            function = tool["function"]
            name = function.get("name", "")
            if choice.only in ("", name) and is_allowed(tool, choice):
                self._add_function(name, _schema(function, index, choice.mode == "required"))

    def _add_function(self, name: str, schema: dict[str, Any]) -> None:
        index, form = len(self._names), self._form
        args = f"args_{index}"
        if form.named:
            parts = [json.dumps(name), self._literal(form.named), args]
        else:
            space = ['"\\n"'] if form.end and not form.bare else []
            before = ['"{"', _key("name"), "COLON", _key(name), "COMMA", _key(form.arguments), "COLON"]
            parts = [*space, *before, args, '"}"', *space]
        self._names.append(f"call_{index}")
        self.lines += [f"call_{index}: {' '.join(parts)}", f"{args}: {json_block(schema)}"]

    def calls(self) -> list[str]:
        """Nothing but calls."""
        form, at_most = self._form, self._at_most
        call = "one" if form.bare or form.listed else self._marked()
        between = f"{json.dumps(form.between)} " if form.between else ""
        calls = f"call ({between}call){{0,{at_most - 1}}}" if at_most > 1 else "call"
        if form.listed:
            calls = f'{self._literal(form.begin)} " [" {calls} "]"'
        return [f"answer: {calls}", f"call: {call}", self._one()]

    def text_and_calls(self) -> list[str]:
        """Text, in which calls follow marks. The text cannot hold a mark, nor begin like a call without one."""
        form, mark = self._form, _regex(self._form.begin)
        no_mark = f"~/(.|\\n)*{mark}(.|\\n)*/"
        if form.bare:
            answer, _, one = self.calls()
            return [f"{answer} | TEXT", "call: one", one, rf"TEXT: /\s*([^\s\[{{](.|\n)*)?/ & {no_mark}"]
        call = "one" if not form.listed else f'" [" one (", " one){{0,{MAX_CALLS - 1}}} "]"'
        end = f" {self._literal(form.end)}" if form.end else ""
        rules = ["answer: lead* TEXT", f"TEXT: {_ANY} & {no_mark}", self._one()]
        if self._token_of(form.begin) is None:
            return [*rules, f"lead: until {call}{end}", f"until[lazy]: /(.|\\n)*{mark}/"]
        return [*rules, f"lead: TEXT {self._literal(form.begin)} {call}{end}"]

    def _one(self) -> str:
        return f"one: {' | '.join(self._names)}"

    def _marked(self) -> str:
        form = self._form
        return " ".join(filter(None, (self._literal(form.begin), "one", form.end and self._literal(form.end))))

    def _literal(self, text: str) -> str:
        token = self._token_of(text)
        return json.dumps(text) if token is None else f"<[{token}]>"


def _key(text: str) -> str:
    """A JSON string as a literal of Lark."""
    return json.dumps(json.dumps(text))


def _regex(text: str) -> str:
    """``text`` for a pattern between slashes."""
    return "".join(char if char.isalnum() or char in "_<> " else "\\" + char for char in text)
