"""OpenAI's fields about functions: ``tools``, ``tool_choice``, ``parallel_tool_calls``, and what they mean together.

Owns their checks. Does not own what a function's parameters may say (contracts.json_schema, where they are enforced)
nor how a model is told of them (data).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from ai_engine.contracts.fields import (
    AnyObject,
    Checking,
    Choice,
    Flag,
    ListOf,
    Record,
    Schema,
    Text,
    show,
)
from ai_engine.ports.errors import InvalidValue
from ai_engine.ports.text import ToolChoice

MAX_TOOLS: Final = 128
NAME: Final = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


class _Name:
    """A function's name: what every format of calls can write."""

    expected = "1 to 64 letters, digits, and _ - ."

    @property
    def schema(self) -> Schema:
        return {"type": "string", "pattern": f"^{NAME.pattern}$"}

    def check(self, value: Any, at: Checking) -> str:
        if type(value) is not str or not NAME.fullmatch(value):
            at.fail(show(value), self.expected)
        return value


_FUNCTION: Final = Record(
    {"name": _Name(), "description": Text(), "parameters": AnyObject(), "strict": Flag()}, frozenset({"name"})
)
_TOOL: Final = Record({"type": Choice(("function",)), "function": _FUNCTION}, frozenset({"type", "function"}))


class Tools:
    """Functions with names that differ."""

    expected = "an array of functions"
    _list = ListOf(_TOOL, 0, MAX_TOOLS)
    schema = _list.schema

    def check(self, value: Any, at: Checking) -> list[dict[str, Any]] | None:
        tools = self._list.check(value, at)
        seen: set[str] = set()
        for index, tool in enumerate(tools):
            name = tool["function"]["name"]
            if name in seen:
                at.path += [index, "function", "name"]
                at.fail(f"{name!r} again", "names that differ")
            seen.add(name)
        return tools or None


_NAMED: Final = Record(
    {"type": Choice(("function",)), "function": Record({"name": Text(1, 64)}, frozenset({"name"}))},
    frozenset({"type", "function"}),
)
_ALLOWED: Final = Record(
    {
        "type": Choice(("allowed_tools",)),
        "allowed_tools": Record(
            {"mode": Choice(("auto", "required")), "tools": ListOf(_NAMED, 1, MAX_TOOLS)}, frozenset({"mode", "tools"})
        ),
    },
    frozenset({"type", "allowed_tools"}),
)
_MODE: Final = Choice(("none", "auto", "required"))


class Choices:
    """``tool_choice``, in any of its forms."""

    expected = '"none", "auto", "required" or an object that names functions'

    @property
    def schema(self) -> Schema:
        return {"anyOf": [_MODE.schema, _NAMED.schema, _ALLOWED.schema]}

    def check(self, value: Any, at: Checking) -> Any:
        if type(value) is dict:
            kind = value.get("type")
            return (_ALLOWED if kind == "allowed_tools" else _NAMED).check(value, at)
        return _MODE.check(value, at)


def tool_options(got: Mapping[str, Any]) -> dict[str, Any]:
    """The checked fields as arguments of `encode_chat`; none when no function is offered. Raises InvalidValue when the
    fields contradict each other."""
    tools: list[dict[str, Any]] = got.get("tools", [])
    choice = got.get("tool_choice", "auto")
    parallel = got.get("parallel_tool_calls", True)
    if not tools:
        if choice not in ("none", "auto"):
            raise InvalidValue(
                "tool_choice: found a choice that needs functions, but tools is not given. Fix: send tools.",
                param="tool_choice",
            )
        return {}
    mode, only, names = choice, "", list[str]()
    if isinstance(choice, dict) and choice["type"] == "function":
        mode, only = "required", choice["function"]["name"]
        _find(tools, only, "tool_choice.function.name")
    elif isinstance(choice, dict):
        allowed = choice["allowed_tools"]
        mode = allowed["mode"]
        for index, tool in enumerate(allowed["tools"]):
            name = tool["function"]["name"]
            _find(tools, name, f"tool_choice.allowed_tools.tools[{index}].function.name")
            names.append(name)
    choice = ToolChoice(mode=mode, only=only, allowed=tuple(names), parallel=parallel)
    return {"tools": tools, "tool_choice": choice}


def _find(tools: list[dict[str, Any]], name: str, where: str) -> None:
    names = [tool["function"]["name"] for tool in tools]
    if name not in names:
        listed = ", ".join(map(repr, names))
        raise InvalidValue(f"{where}: found {name!r}, expected one of the tools: {listed}.", param=where)
