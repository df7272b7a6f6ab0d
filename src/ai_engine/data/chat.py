"""Messages to token ids, such that nothing a client writes becomes a control token. Owns that guarantee.

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
from ai_engine.ports.errors import InvalidRequest
from ai_engine.ports.text import Encoded

_MARKS: Final = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
_RESERVED: Final = frozenset({"self", "messages", "tools", "add_generation_prompt"})


def encode_chat(
    template: JinjaTemplate,
    tokenizer: ModelTokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    now_s: Callable[[], float] = time.monotonic,
) -> Encoded:
    """The prompt's ids; BOS once, if the model wants one. With ``continue_final_message`` the prompt ends with the
    last message's text, whatever the template puts after it. Raises InvalidRequest when the template refuses."""
    begun_s = now_s()
    taken = sorted(_RESERVED & (template_kwargs or {}).keys())
    if taken:
        raise InvalidRequest(f"chat_template_kwargs may not set {taken[0]!r}", param="chat_template_kwargs")
    given = [messages, tools, template_kwargs]
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
        **(guarded_kwargs or {}),
    )
    if continue_final_message:
        prompt, found, _ = prompt.rpartition(end)
        if not found:
            raise InvalidRequest(
                "the chat template drops the final message, so it cannot be continued", param="messages"
            )
        prompt = prompt.replace(end, "")
    rendered_s = now_s()
    encoded = tokenizer.encode_segments([(piece, True) for piece in prompt.split(mark)])
    return msgspec.structs.replace(encoded, stamps=(begun_s, rendered_s, now_s()))


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
