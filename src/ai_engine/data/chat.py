"""Messages to token ids, such that nothing a client writes becomes a control token, and the form of the answer. Owns
that guarantee; how functions and calls are written is tool_prompt.py's.

How: before rendering, every string of the messages, tools and template arguments gets a mark (a Unicode noncharacter
that occurs nowhere in them) inside each control token's text that it contains. The template may trim, split, join or
print it; the marks travel along. The prompt is then cut at the marks and encoded piece by piece: control tokens are
recognised within a piece, never across a mark, and ordinary text is encoded as if the marks had never been there. A
conversation without such text has no marks, and its ids are those of encoding the whole prompt, as llama.cpp does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from ai_engine.data.template import JinjaTemplate
from ai_engine.data.tokenizer import ModelTokenizer
from ai_engine.data.tool_grammar import constraint_of, rules_of_calls
from ai_engine.data.tool_prompt import (
    functions_for_template,
    is_allowed,
    plain_history,
    template_history,
    with_instructions,
)
from ai_engine.ports.errors import InvalidRequest
from ai_engine.ports.text import ANY_CALL, Encoded, ReplyForm, ToolChoice

_MARKS: Final = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
_RESERVED: Final = frozenset({"self", "messages", "tools", "add_generation_prompt"})


def encode_chat(
    template: JinjaTemplate,
    tokenizer: ModelTokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: ToolChoice = ANY_CALL,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    reasoning_effort: str | None = None,
    now_s: Callable[[], float] = time.monotonic,
) -> Encoded:
    """The prompt's ids (BOS once, if the model wants one) and the form of the answer. With ``continue_final_message``
    the prompt ends with the last message's text, whatever the template puts after it. Raises InvalidRequest when the
    template refuses, InvalidJsonSchema for a function's parameters that would have to be enforced and cannot be."""
    begun_s = now_s()
    taken = sorted(_RESERVED & (template_kwargs or {}).keys())
    if taken:
        raise InvalidRequest(f"chat_template_kwargs may not set {taken[0]!r}", param="chat_template_kwargs")
    kwargs, warnings = _with_effort(template, dict(template_kwargs or {}), reasoning_effort)
    offered = [tool for tool in tools or () if tool_choice.mode != "none" and is_allowed(tool, tool_choice)]
    turns, shown = _with_calls(template, messages, offered, tool_choice)
    given = [turns, shown, kwargs]
    try:
        mark, end = _unused_marks(given)
        guarded_messages, guarded_tools, guarded_kwargs = (_guard(value, tokenizer, mark) for value in given)
    except RecursionError as error:
        raise InvalidRequest("the messages or tools are nested too deeply", param="messages") from error
    if continue_final_message:
        guarded_messages = _with_end(guarded_messages, end)
    prompt = template.render(
        guarded_messages,
        tools=guarded_tools,
        add_generation_prompt=add_generation_prompt and not continue_final_message,
        **guarded_kwargs,
    )
    begun = prompt.rstrip() if add_generation_prompt else ""
    if continue_final_message:
        prompt, found, _ = prompt.rpartition(end)
        if not found:
            raise InvalidRequest(
                "the chat template drops the final message, so it cannot be continued", param="messages"
            )
        prompt = prompt.replace(end, "")
        begun = str(turns[-1]["content"])
    inside = over = False
    if template.tags and begun:
        opened, closed = (begun.rfind(tag) for tag in template.tags)
        at_end = continue_final_message or begun.endswith(template.tags)
        inside, over = at_end and opened > closed, at_end and closed > opened
        if inside and reasoning_effort == "none" and not continue_final_message:
            prompt, inside, over = f"{prompt}\n{template.tags[1]}\n\n", False, True
    rendered_s = now_s()
    ids = tokenizer.encode_segments([(piece, True) for piece in prompt.split(mark)]).ids
    stamps = begun_s, rendered_s, now_s()
    form = ReplyForm(reasoning=template.tags, inside_reasoning=inside, warnings=warnings)
    if offered:

        def token_of(text: str) -> int | None:
            return _control_token(tokenizer, text)

        constraint = constraint_of(
            template.calls,
            tools or (),
            tool_choice,
            token_of=token_of,
            tags=None if over else template.tags,
            inside=inside,
        )
        names = (str(tool["function"].get("name", "")) for tool in offered)
        form = msgspec.structs.replace(
            form,
            calls=template.calls.name,
            names=(tool_choice.only,) if tool_choice.only else tuple(names),
            one_call=bool(tool_choice.only) or not tool_choice.parallel,
            constraint=constraint,
            call_rules=rules_of_calls(template.calls, tools or (), tool_choice, token_of),
        )
    return Encoded(ids, form, stamps)


def _with_effort(
    template: JinjaTemplate, kwargs: dict[str, Any], effort: str | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The template's arguments with the effort, in the way that it takes it, and a warning if it takes it in none."""
    if effort is None:
        return kwargs, ()
    if "reasoning_effort" in template.source:
        return {"reasoning_effort": effort, **kwargs}, ()
    if "enable_thinking" in template.source:
        return {"enable_thinking": effort != "none", **kwargs}, ()
    if effort == "none":  # a part that the prompt opens is closed there
        return kwargs, ()
    has = "always reasons as much as it likes" if template.tags else "has no reasoning part"
    return kwargs, (f"reasoning_effort: this model {has}, so it is not used.",)


def _with_calls(
    template: JinjaTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    choice: ToolChoice,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """The messages, and the functions that the template is to print."""
    if template.max_calls:
        short_ids = "[TOOL_CALLS]" in template.source
        turns = template_history(messages, one_call=template.max_calls == 1, short_ids=short_ids)
    else:
        turns = plain_history(messages, template.calls)
    if not tools:
        return turns, None
    if template.calls.template:
        return turns, functions_for_template(tools)
    return with_instructions(turns, tools, choice), None


def _control_token(tokenizer: ModelTokenizer, text: str) -> int | None:
    ids = tokenizer.encode(text, add_special=False).ids
    return ids[0] if len(ids) == 1 and tokenizer.is_special(ids[0]) else None


def _unused_marks(value: Any) -> tuple[str, str]:
    used: set[str] = set()
    _collect(value, used)
    free = [mark for mark in _MARKS if mark not in used]
    if len(free) < 2:
        raise InvalidRequest("the messages hold nearly all of the noncharacters U+FDD0 to U+FDEF", param="messages")
    return free[0], free[1]


def _collect(value: Any, used: set[str]) -> None:
    if isinstance(value, str):
        if not value.isascii():
            used.update(mark for mark in _MARKS if mark in value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _collect(key, used)
            _collect(item, used)
    elif isinstance(value, Sequence):
        for item in value:
            _collect(item, used)


def _guard(value: Any, tokenizer: ModelTokenizer, mark: str) -> Any:
    """``value`` with every string guarded, keys included."""
    if isinstance(value, str):
        return tokenizer.guard(value, mark)
    if isinstance(value, Mapping):
        return {_guard(key, tokenizer, mark): _guard(item, tokenizer, mark) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_guard(item, tokenizer, mark) for item in value]
    return value


def _with_end(messages: list[dict[str, Any]], end: str) -> list[dict[str, Any]]:
    """The messages with ``end`` after the last one's text."""
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str):
        raise InvalidRequest("continue_final_message needs a final message with text content", param="messages")
    return [*messages[:-1], {**messages[-1], "content": content + end}]
