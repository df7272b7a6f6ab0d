"""Anthropic's Messages door: the fields of its bodies, and how they become a chat.

Owns field names, content blocks and their order. Does not own what a chat may ask (openai_types.py: the chat that a
body becomes passes the same checks) nor what goes back (message_events.py).

Choices: ``max_tokens`` may be left out and is then 4096, or the room left. A last message of the assistant is
continued. A tool's result that ``is_error`` begins with "Error: ", since templates know no other way to say so.
Thinking blocks are sent back to the template; redacted ones hold nothing that a model could read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

import msgspec

from ai_engine.api import rest
from ai_engine.api.events import write_events
from ai_engine.api.generation import Generation
from ai_engine.api.http import Exchange
from ai_engine.api.message_events import MessageVoice
from ai_engine.api.openai_types import MAX_STOPS, Ask, ServedModel, chat_ask, chat_fields
from ai_engine.api.replies import Answer, encode
from ai_engine.contracts.fields import (
    AnyObject,
    ByType,
    Check,
    Checking,
    Choice,
    Flag,
    Integer,
    ListOf,
    Record,
    Tagged,
    Text,
    Unsupported,
    Unused,
)
from ai_engine.ports.grammar import Constraint
from ai_engine.ports.text import TextService

DEFAULT_TOKENS: Final = 4096
_CACHE: Final = Unused("prefixes are cached by themselves.")
_NO_MEDIA: Final = "blocks are not supported; this server takes text. Fix: send only text."
_SHARED: Final = (
    *("model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "logit_bias", "seed", "min_tokens", "stop_token_ids", "include_stop_str_in_output"),
    *("skip_special_tokens", "ignore_eos", "priority", "cache_salt", "return_sampling_params", "stream"),
    *("chat_template_kwargs", "metadata", "service_tier"),
)
"""Fields that mean here what they mean in a chat."""


def _block(fields: Mapping[str, Check], *required: str) -> Record:
    return Record({"type": Text(), "cache_control": _CACHE, **fields}, frozenset(required))


_TEXT_BLOCK: Final = _block({"text": Text(), "citations": Unused()}, "text")
_MEDIA: Final = dict.fromkeys(("image", "document", "search_result", "container_upload"), _NO_MEDIA)
_TEXTS: Final = ByType({str: Text(), list: ListOf(Tagged({"text": _TEXT_BLOCK}, _MEDIA), 0, 4096)})
_BLOCKS: Final = Tagged(
    {
        "text": _TEXT_BLOCK,
        "tool_use": _block(
            {"id": Text(1, 256), "name": Text(1, 256), "input": AnyObject(), "caller": Unused()}, "id", "name", "input"
        ),
        "tool_result": _block({"tool_use_id": Text(1, 256), "content": _TEXTS, "is_error": Flag()}, "tool_use_id"),
        "thinking": _block({"thinking": Text(), "signature": Text()}, "thinking"),
        "redacted_thinking": _block({"data": Text()}),
    },
    _MEDIA,
)
_MESSAGE: Final = Record(
    {
        "role": Choice(("user", "assistant", "system")),
        "content": ByType({str: Text(), list: ListOf(_BLOCKS, 0, 4096)}),
    },
    frozenset({"role", "content"}),
)
_TOOL: Final = _block(
    {
        "name": Text(1, 256),
        "description": Text(),
        "input_schema": AnyObject(),
        "strict": Flag(),
        "eager_input_streaming": Unused("inputs are streamed as they come.", neutral=(True,)),
        "input_examples": Unused(),
        "allowed_callers": Unused(neutral=(["direct"],)),
        "defer_loading": Unsupported(neutral=(False,)),
    },
    "name",
    "input_schema",
)
_CHOICE: Final = Record(
    {
        "type": Choice(("auto", "any", "tool", "none")),
        "name": Text(1, 256),
        "disable_parallel_tool_use": Flag(),
    },
    frozenset({"type"}),
)
_FORMAT: Final = Tagged({"json_schema": Record({"type": Text(), "schema": AnyObject()}, frozenset({"schema"}))})


@cache
def message_fields(vocab_size: int) -> Record:
    """The fields of POST /v1/messages."""
    chat = chat_fields(vocab_size).fields
    fields: dict[str, Check] = {
        **{name: chat[name] for name in _SHARED},
        "messages": ListOf(_MESSAGE, 1, 8192),
        "system": _TEXTS,
        "max_tokens": Integer(1, 1 << 31),
        "stop_sequences": ListOf(Text(1, 1024), 0, MAX_STOPS),
        "tools": ListOf(Tagged({"custom": _TOOL}, default="custom"), 0, 128),
        "tool_choice": _CHOICE,
        "thinking": Record(
            {
                "type": Choice(("enabled", "disabled", "adaptive", "between_tools")),
                "budget_tokens": Unused("a thinking part has no limit of its own."),
                "display": Unused(),
            },
            frozenset({"type"}),
        ),
        "output_config": Record({"format": _FORMAT, "effort": Choice(("low", "medium", "high", "xhigh", "max"))}),
        "output_format": _FORMAT,
        "cache_control": _CACHE,
        "context_management": Unused(),
        **dict.fromkeys(("inference_geo", "speed", "diagnostics", "user_profile_id", "workspace_id"), Unused()),
        "container": Unsupported(),
        "mcp_servers": Unsupported(neutral=([],)),
    }
    return Record(fields, frozenset({"messages"}))


def read_message(body: Any, fields: Record, chat: Record, model: ServedModel, *, strict: bool) -> Ask:
    """A Messages request, checked. Raises InvalidRequest or ModelNotFound."""
    at = Checking(strict=strict)
    got = fields.check(body, at)
    ask = chat_ask(_as_chat(got, chat, at), model, at, default_tokens=DEFAULT_TOKENS)
    field = "output_format" if "output_format" in got else "output_config.format"
    return msgspec.structs.replace(ask, constraint=renamed(ask.constraint, field))


def renamed(constraint: Constraint | None, param: str) -> Constraint | None:
    """The constraint under the name that the caller knows it by."""
    return None if constraint is None else msgspec.structs.replace(constraint, param=param)


def _as_chat(got: dict[str, Any], chat: Record, at: Checking) -> dict[str, Any]:
    """The checked fields of the chat that a Messages body means."""
    asked: dict[str, Any] = {"messages": _messages(got), **_thinking(got), **_format(got)}
    if got.get("tools"):
        asked["tools"] = [_tool(tool) for tool in got["tools"]]
    if "tool_choice" in got:
        asked |= _tool_choice(got["tool_choice"])
    checked: dict[str, Any] = {name: got[name] for name in _SHARED if name in got}
    checked |= {new: got[old] for old, new in (("max_tokens", "max_tokens"), ("stop_sequences", "stop")) if old in got}
    return checked | check_fields(asked, chat, at) | _prefill(asked["messages"])


def check_fields(asked: Mapping[str, Any], chat: Record, at: Checking) -> dict[str, Any]:
    """Fields made from another door's, through a chat's own checks."""
    checked = {}
    for name, value in asked.items():
        at.path[:] = [name]
        result = chat.fields[name].check(value, at)
        if result is not None:
            checked[name] = result
    at.path.clear()
    return checked


def _prefill(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    last = messages[-1]
    return {"continue_final_message": True} if last["role"] == "assistant" and last.get("content") else {}


def _messages(got: dict[str, Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if got.get("system"):
        messages.append({"role": "system", "content": _joined(got["system"])})
    for message in got["messages"]:
        content = message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        messages += _assistant(blocks) if message["role"] == "assistant" else _other(message["role"], blocks)
    return messages


def _joined(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "\n".join(block["text"] for block in content)


def _other(role: str, blocks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A user's blocks in their order: each tool result a message, texts side by side one."""
    messages: list[dict[str, Any]] = []
    for block in blocks:
        if block["type"] == "tool_result":
            text = _joined(block.get("content", ""))
            text = f"Error: {text}" if block.get("is_error") else text
            messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": text})
        elif block["type"] == "text":
            if messages and messages[-1]["role"] == role:
                messages[-1]["content"] += "\n" + block["text"]
            else:
                messages.append({"role": role, "content": block["text"]})
    return messages or [{"role": role, "content": ""}]


def _assistant(blocks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
    calls = [
        {
            "id": block["id"],
            "type": "function",
            "function": {"name": block["name"], "arguments": encode(block["input"]).decode()},
        }
        for block in blocks
        if block["type"] == "tool_use"
    ]
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    function |= {name: tool[name] for name in ("description", "strict") if name in tool}
    return {"type": "function", "function": function}


def _tool_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    kind = choice["type"]
    asked: dict[str, Any] = {"tool_choice": {"any": "required"}.get(kind, kind)}
    if kind == "tool":
        asked["tool_choice"] = {"type": "function", "function": {"name": choice.get("name", "")}}
    if choice.get("disable_parallel_tool_use"):
        asked["parallel_tool_calls"] = False
    return asked


def _thinking(got: Mapping[str, Any]) -> dict[str, Any]:
    effort = got.get("output_config", {}).get("effort")
    if "thinking" in got:
        effort = "none" if got["thinking"]["type"] == "disabled" else effort or "medium"
    return {"reasoning_effort": {"max": "xhigh"}.get(effort, effort)} if effort else {}


def _format(got: Mapping[str, Any]) -> dict[str, Any]:
    found = got.get("output_config", {}).get("format") or got.get("output_format")
    if found is None:
        return {}
    schema = {"name": "output", "strict": True, "schema": found["schema"]}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


async def messages(door: rest.Door, exchange: Exchange) -> None:
    """POST /v1/messages"""
    rest.refuse_while_draining(door)
    ask = await _read(door, exchange)
    await exchange.unless_disconnected(rest.answer(door, exchange, ask, "msg_", _write))


async def _read(door: rest.Door, exchange: Exchange) -> Ask:
    exchange.common.append((b"request-id", exchange.request_id.encode()))  # where Anthropic's SDKs look
    body, fields = await exchange.json(), message_fields(door.model.vocab_size)
    return read_message(body, fields, door.chat, door.model, strict=rest.is_strict(exchange))


async def _write(exchange: Exchange, answer: Answer, generation: Generation, text: TextService) -> None:
    voice = MessageVoice(answer, len(generation.prompts[0].request.prompt))
    await write_events(exchange, answer, generation, voice)


async def count_tokens(door: rest.Door, exchange: Exchange) -> None:
    """POST /v1/messages/count_tokens: what the same body would use as its prompt"""
    ask = rest.as_allowed(await _read(door, exchange), exchange, door.model)
    encoded = await exchange.unless_disconnected(rest.encode_source(door.text, ask))
    await exchange.reply(200, encode({"input_tokens": len(encoded.ids)}))
