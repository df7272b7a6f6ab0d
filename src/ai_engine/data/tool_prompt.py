"""Functions, calls and results in a prompt: what a chat template is given, and what stands in where it takes none.

Owns the rewriting of messages before they are rendered. Does not own formats (tools.py) nor rendering (template.py).

A template that prints functions gets them; one that does not (SmolLM2, Gemma) gets a system text that explains the
generic form. A template that prints earlier calls gets them too: with arguments as an object, at most as many a turn as
it takes, and with ids that it accepts (Mistral wants nine letters and digits). For any other they become plain turns,
in the form in which the model is asked to call.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ai_engine.data.tools import CallFormat
from ai_engine.ports.text import ToolChoice

Message = dict[str, Any]
SHORT_ID_CHARS: Final = 9
NO_PARAMETERS: Final[Mapping[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}
"""What a function without ``parameters`` takes."""


def is_allowed(tool: Mapping[str, Any], choice: ToolChoice) -> bool:
    return not choice.allowed or tool["function"]["name"] in choice.allowed


def functions_for_template(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """OpenAI's shape with every key that templates look for, and none that is ours to enforce."""
    shown = []
    for tool in tools:
        function = {"description": "", "parameters": NO_PARAMETERS, **tool["function"]}
        function.pop("strict", None)
        shown.append({"type": "function", "function": function})
    return shown


def with_instructions(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], choice: ToolChoice
) -> list[Message]:
    """The messages with the generic form explained in the system text."""
    text = _instructions(tools, choice)
    turns = [dict(message) for message in messages]
    if turns and turns[0]["role"] in ("system", "developer"):
        turns[0]["content"] = "\n\n".join(filter(None, (_plain(turns[0].get("content")), text)))
        return turns
    return [{"role": "system", "content": text}, *turns]


def _instructions(tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> str:
    lines = [
        "You can call functions. To call one, write nothing but this JSON, on a line of its own for each call:",
        '{"name": "the function\'s name", "arguments": {"parameter": "value"}}',
        "You will be told the result. If no function helps, answer in plain text.",
    ]
    if choice.only:
        lines[-1] = f"Now call {choice.only}."
    elif choice.mode == "required":
        lines[-1] = "Now call at least one function."
    if not choice.parallel:
        lines.append("Make one call at a time.")
    functions = [_dumps(tool["function"]) for tool in functions_for_template(tools)]
    return "\n".join([*lines, "", "Functions:", *functions])


def plain_history(messages: Sequence[Mapping[str, Any]], form: CallFormat) -> list[Message]:
    """Calls as text of the assistant, results as turns of the user."""
    names: dict[str, str] = {}
    turns: list[Message] = []
    for message in messages:
        turn = dict(message)
        if turn.get("tool_calls"):
            calls = turn.pop("tool_calls")
            names.update({call["id"]: call["function"]["name"] for call in calls if "id" in call})
            text = write_calls(form, [(call["function"]["name"], _raw(call["function"])) for call in calls])
            turn["content"] = "\n".join(filter(None, (_plain(turn.get("content")), text)))
        elif turn["role"] == "tool":
            name = turn.pop("name", None) or names.get(turn.get("tool_call_id", ""), "the function")
            turn.pop("tool_call_id", None)
            turn |= {"role": "user", "content": f"Result of {name}:\n{_plain(turn.get('content'))}"}
        turns.append(turn)
    return turns


def write_calls(form: CallFormat, calls: Sequence[tuple[str, str]]) -> str:
    """Calls, of which each is a name and arguments as JSON text, as the model writes them."""
    texts = []
    for name, arguments in calls:
        before, after = around(form, name)
        texts.append(before + arguments + after)
    if form.listed:
        return f"{form.begin} [{form.between.join(texts)}]{form.end}"
    begin, end = ("", "") if form.bare else (form.begin, form.end)
    return form.between.join(begin + text + end for text in texts)


def around(form: CallFormat, name: str) -> tuple[str, str]:
    """What stands around the arguments, within the marks."""
    if form.named:
        return name + form.named, ""
    space = "\n" if form.end and not form.bare else ""
    return f'{space}{{"name": {_dumps(name)}, {_dumps(form.arguments)}: ', "}" + space


def template_history(messages: Sequence[Mapping[str, Any]], *, one_call: bool, short_ids: bool) -> list[Message]:
    """Calls as templates take them. ``one_call``: a turn with several becomes several, each before its result."""
    turns: list[Message] = []
    for message in messages:
        turn = dict(message)
        if turn.get("tool_calls"):
            turn["tool_calls"] = [_call(call, short_ids) for call in turn["tool_calls"]]
        if short_ids and "tool_call_id" in turn:
            turn["tool_call_id"] = _short(turn["tool_call_id"])
        turns.append(turn)
    return _one_by_one(turns) if one_call else turns


def _one_by_one(turns: Sequence[Message]) -> list[Message]:
    split: list[Message] = []
    at = 0
    while at < len(turns):
        turn, at = turns[at], at + 1
        calls = turn.get("tool_calls") or []
        if len(calls) < 2:
            split.append(turn)
            continue
        results: list[Message] = []
        while at < len(turns) and turns[at]["role"] == "tool":
            results.append(turns[at])
            at += 1
        for index, call in enumerate(calls):
            split.append({**turn, "content": turn.get("content") if index == 0 else None, "tool_calls": [call]})
            answers = [result for result in results if result.get("tool_call_id") == call.get("id")]
            split += answers
            results = [result for result in results if result not in answers]
        split += results
    return split


def _call(call: Mapping[str, Any], short_ids: bool) -> dict[str, Any]:
    """A call with its arguments as an object, if they are one. Decoded here, before control tokens are looked for: an
    escape could hide one."""
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            parsed = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError):
            parsed = None
        if isinstance(parsed, dict):
            function["arguments"] = parsed
    made = {"type": "function", **call, "function": function}
    if short_ids and "id" in call:
        made["id"] = _short(call["id"])
    return made


def _short(call_id: str) -> str:
    """An id of nine letters and digits; equal ids stay equal."""
    if len(call_id) == SHORT_ID_CHARS and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.blake2b(call_id.encode("utf-8", "replace"), digest_size=8).hexdigest()[:SHORT_ID_CHARS]


def _raw(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments") or "{}"
    return arguments if isinstance(arguments, str) else _dumps(arguments)


def _plain(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return content or ""


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
