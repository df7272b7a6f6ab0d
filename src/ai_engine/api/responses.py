"""OpenAI's Responses door, stateless: the fields of its bodies, and how they become a chat.

Owns field names, input items and their order. Does not own what a chat may ask (openai_types.py: the chat that a body
becomes passes the same checks) nor what goes back (response_events.py).

Choices: nothing is stored, so ``previous_response_id`` is refused and ``store`` true is warned about. Reasoning and
calls that stand side by side become one message of the assistant, as they were said.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from ai_engine.api import rest
from ai_engine.api.events import write_events
from ai_engine.api.generation import Generation
from ai_engine.api.http import Exchange
from ai_engine.api.messages import check_fields, renamed
from ai_engine.api.openai_types import Ask, ServedModel, chat_ask, chat_fields
from ai_engine.api.replies import Answer, encode
from ai_engine.api.response_events import ResponseVoice
from ai_engine.contracts.fields import (
    AnyObject,
    Anything,
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
from ai_engine.ports.errors import InvalidValue
from ai_engine.ports.sampling import MAX_LOGPROBS
from ai_engine.ports.text import TextService

_SHARED: Final = (
    *("model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "logit_bias", "seed", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output"),
    *("skip_special_tokens", "ignore_eos", "priority", "cache_salt", "return_sampling_params", "stream"),
    *("chat_template_kwargs", "user", "service_tier", "prompt_cache_key", "prompt_cache_retention"),
    *("safety_identifier", "parallel_tool_calls"),
)
"""Fields that mean here what they mean in a chat."""
_NO_STATE: Final = "answers are not stored here. Fix: send the whole conversation in input."
_NO_MEDIA: Final = "parts are not supported; this server takes text. Fix: send only text parts."
_NO_TOOL: Final = "tools are run by OpenAI's own servers, and none is here. Fix: declare a function."
LOGPROBS: Final = "message.output_text.logprobs"


def _record(fields: Mapping[str, Check], *required: str) -> Record:
    return Record({"type": Text(), "id": Text(0, 256), "status": Text(), **fields}, frozenset(required))


_TEXT_PART: Final = Record(
    {"type": Text(), "text": Text(), "annotations": Unused(neutral=([],)), "logprobs": Unused(neutral=([],))},
    frozenset({"text"}),
)
_REFUSAL: Final = Record({"type": Text(), "refusal": Text()}, frozenset({"refusal"}))
_PARTS: Final = ByType(
    {
        str: Text(),
        list: ListOf(
            Tagged(
                {"input_text": _TEXT_PART, "output_text": _TEXT_PART, "text": _TEXT_PART, "refusal": _REFUSAL},
                dict.fromkeys(("input_image", "input_file", "input_audio"), _NO_MEDIA),
            ),
            0,
            4096,
        ),
    }
)
_REASONING_PARTS: Final = ListOf(Record({"type": Text(), "text": Text()}, frozenset({"text"})), 0, 4096)
_ITEM: Final = Tagged(
    {
        "message": _record(
            {"role": Choice(("developer", "system", "user", "assistant")), "content": _PARTS, "phase": Unused()},
            "role",
            "content",
        ),
        "function_call": _record(
            {"call_id": Text(1, 256), "name": Text(1, 256), "arguments": Text(), "namespace": Unused()},
            "call_id",
            "name",
            "arguments",
        ),
        "function_call_output": _record({"call_id": Text(1, 256), "output": _PARTS}, "call_id", "output"),
        "reasoning": _record(
            {
                "summary": _REASONING_PARTS,
                "content": _REASONING_PARTS,
                "encrypted_content": Unused("not readable here."),
            }
        ),
    },
    {"item_reference": f"refers to what is stored, but {_NO_STATE}"},
    default="message",
)
_TOOL: Final = Tagged(
    {
        "function": Record(
            {
                "type": Text(),
                "name": Text(1, 256),
                "description": Text(),
                "parameters": AnyObject(),
                "strict": Flag(),
                "defer_loading": Unsupported(neutral=(False,)),
            },
            frozenset({"name"}),
        )
    },
    dict.fromkeys(
        (
            *("web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation", "mcp"),
            *("computer_use_preview", "local_shell", "shell", "custom", "apply_patch", "tool_search"),
        ),
        _NO_TOOL,
    ),
)
_NAMED: Final = Record({"type": Text(), "name": Text(1, 256)}, frozenset({"name"}))
_TEXT: Final = Record(
    {
        "format": Tagged(
            {
                "text": Record({"type": Text()}),
                "json_object": Record({"type": Text()}),
                "json_schema": Record(
                    {
                        "type": Text(),
                        "name": Text(1, 256),
                        "description": Text(),
                        "schema": AnyObject(),
                        "strict": Flag(),
                    },
                    frozenset({"schema"}),
                ),
            }
        ),
        "verbosity": Unused(neutral=("medium",)),
    }
)
_EFFORTS: Final = Choice(("none", "minimal", "low", "medium", "high", "xhigh"))


@functools.cache
def response_fields(vocab_size: int) -> Record:
    """The fields of POST /v1/responses."""
    chat = chat_fields(vocab_size).fields
    fields: dict[str, Check] = {
        **{name: chat[name] for name in _SHARED},
        "input": ByType({str: Text(), list: ListOf(_ITEM, 1, 8192)}),
        "instructions": Text(),
        "max_output_tokens": Integer(1, 1 << 31),
        "tools": ListOf(_TOOL, 0, 128),
        "tool_choice": ByType(
            {
                str: Choice(("none", "auto", "required")),
                dict: Tagged(
                    {
                        "function": _NAMED,
                        "allowed_tools": Record(
                            {
                                "type": Text(),
                                "mode": Choice(("auto", "required")),
                                "tools": ListOf(Tagged({"function": _NAMED}, _TOOL.refused), 1, 128),
                            },
                            frozenset({"mode", "tools"}),
                        ),
                    },
                    _TOOL.refused,
                ),
            }
        ),
        "text": _TEXT,
        "reasoning": Record({"effort": _EFFORTS, "summary": Unused(), "generate_summary": Unused()}),
        "top_logprobs": Integer(0, MAX_LOGPROBS),
        "include": ListOf(Anything(), 0, 64),
        "metadata": AnyObject(),
        "store": Unused("answers are not stored.", neutral=(False,)),
        "stream_options": Record({"include_obfuscation": Unused("no padding is added.", neutral=(False,))}),
        "truncation": Unsupported("an input is never cut. Fix: shorten it yourself.", neutral=("disabled",)),
        "previous_response_id": Unsupported(_NO_STATE),
        "conversation": Unsupported(_NO_STATE),
        "prompt": Unsupported("prompts are not stored here. Fix: send the text."),
        "background": Unsupported("an answer is given at once or not at all.", neutral=(False,)),
        "max_tool_calls": Unused("it counts tools that a server runs, and none is here."),
    }
    return Record(fields, frozenset({"input"}))


def read_response(body: Any, fields: Record, chat: Record, model: ServedModel, *, strict: bool) -> tuple[Ask, Any]:
    """A Responses request, checked, and its fields. Raises InvalidRequest or ModelNotFound."""
    at = Checking(strict=strict)
    got = fields.check(body, at)
    ask = chat_ask(_as_chat(got, chat, at), model, at)
    names = {"prompt_field": "input", "max_tokens_field": "max_output_tokens"}
    return msgspec.structs.replace(ask, **names, constraint=renamed(ask.constraint, "text.format")), got


def _as_chat(got: dict[str, Any], chat: Record, at: Checking) -> dict[str, Any]:
    """The checked fields of the chat that a Responses body means."""
    checked: dict[str, Any] = {name: got[name] for name in _SHARED if name in got}
    if "max_output_tokens" in got:
        checked["max_completion_tokens"] = got["max_output_tokens"]
    if _wants_logprobs(got, at):
        checked |= {"logprobs": True, "top_logprobs": got.get("top_logprobs", 0)}
    asked: dict[str, Any] = {"messages": _messages(got), **_format(got)}
    if got.get("tools"):
        asked["tools"] = [_tool(tool) for tool in got["tools"]]
    if "tool_choice" in got:
        asked["tool_choice"] = _tool_choice(got["tool_choice"])
    if "effort" in got.get("reasoning", {}):
        asked["reasoning_effort"] = got["reasoning"]["effort"]
    return checked | check_fields(asked, chat, at)


def _wants_logprobs(got: Mapping[str, Any], at: Checking) -> bool:
    wanted = False
    for index, name in enumerate(got.get("include", [])):
        at.path[:] = ["include", index]
        wanted = wanted or name == LOGPROBS
        if name not in (LOGPROBS, "reasoning.encrypted_content"):
            at.ignored("there is nothing of that kind to include.")
    at.path.clear()
    if got.get("top_logprobs") and not wanted:
        raise InvalidValue(f'top_logprobs needs include: ["{LOGPROBS}"]. Fix: add it.', param="top_logprobs")
    return wanted


def _messages(got: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if got.get("instructions"):
        messages.append({"role": "system", "content": got["instructions"]})
    if isinstance(got["input"], str):
        return [*messages, {"role": "user", "content": got["input"]}]
    thoughts = ""
    for item in got["input"]:
        match item["type"]:
            case "message":
                message = {"role": item["role"], "content": _joined(item["content"])}
                if item["role"] == "assistant" and thoughts:
                    message["reasoning_content"], thoughts = thoughts, ""
                messages.append(message)
            case "function_call":
                speaker = _speaker(messages, thoughts)
                thoughts = ""
                function = {"name": item["name"], "arguments": item["arguments"]}
                speaker.setdefault("tool_calls", []).append(
                    {"id": item["call_id"], "type": "function", "function": function}
                )
            case "function_call_output":
                content = _joined(item["output"])
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
            case "reasoning":
                thoughts = "\n".join(part["text"] for part in item.get("content") or item.get("summary") or [])
    if not messages:  # a conversation needs something to answer
        messages.append({"role": "user", "content": ""})
    return messages


def _speaker(messages: list[dict[str, Any]], thoughts: str) -> dict[str, Any]:
    """The assistant's message that a call belongs to: the last one, unless something was thought in between."""
    if not messages or messages[-1]["role"] != "assistant" or thoughts:
        messages.append({"role": "assistant", "content": ""})
        if thoughts:
            messages[-1]["reasoning_content"] = thoughts
    return messages[-1]


def _joined(content: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["refusal" if part["type"] == "refusal" else "text"] for part in content)


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _tool_choice(choice: str | Mapping[str, Any]) -> Any:
    if isinstance(choice, str):
        return choice
    if choice["type"] == "function":
        return {"type": "function", "function": {"name": choice["name"]}}
    allowed = {"mode": choice["mode"], "tools": [_tool_choice(tool) for tool in choice["tools"]]}
    return {"type": "allowed_tools", "allowed_tools": allowed}


def _format(got: Mapping[str, Any]) -> dict[str, Any]:
    found = got.get("text", {}).get("format")
    if found is None or found["type"] == "text":
        return {}
    if found["type"] == "json_object":
        return {"response_format": {"type": "json_object"}}
    schema = {"name": "output", **{name: value for name, value in found.items() if name != "type"}}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


async def responses(door: rest.Door, exchange: Exchange) -> None:
    """POST /v1/responses"""
    rest.refuse_while_draining(door)
    ask, got = await _read(door, exchange)

    async def write(exchange: Exchange, answer: Answer, generation: Generation, text: TextService) -> None:
        await write_events(exchange, answer, generation, ResponseVoice(answer, text, echoed(got, answer)))

    await exchange.unless_disconnected(rest.answer(door, exchange, ask, "resp_", write))


async def _read(door: rest.Door, exchange: Exchange) -> tuple[Ask, Any]:
    body, fields = await exchange.json(), response_fields(door.model.vocab_size)
    return read_response(body, fields, door.chat, door.model, strict=rest.is_strict(exchange))


def echoed(got: Mapping[str, Any], answer: Answer) -> dict[str, Any]:
    """The request's fields as a response repeats them; what was not sent as it was in force."""
    reasoning = got.get("reasoning", {})
    form = got.get("text", {}).get("format", {"type": "text"})
    tools = [{"parameters": None, "strict": None, **tool} for tool in got.get("tools", [])]
    return {
        "instructions": got.get("instructions"),
        "max_output_tokens": got.get("max_output_tokens"),
        "metadata": got.get("metadata", {}),
        "parallel_tool_calls": got.get("parallel_tool_calls", True) is not False,
        "previous_response_id": None,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "store": False,
        "background": False,
        "temperature": answer.effective.temperature,
        "top_p": answer.effective.top_p,
        "top_logprobs": got.get("top_logprobs", 0),
        "text": {"format": {"name": "output", **form} if form["type"] == "json_schema" else form},
        "tool_choice": got.get("tool_choice", "auto"),
        "tools": tools,
        "truncation": "disabled",
        "user": None,
        "service_tier": "default",
    }


async def input_tokens(door: rest.Door, exchange: Exchange) -> None:
    """POST /v1/responses/input_tokens: what the same body would use as its prompt"""
    ask, _ = await _read(door, exchange)
    encoded = await exchange.unless_disconnected(
        rest.encode_source(door.text, rest.as_allowed(ask, exchange, door.model))
    )
    await exchange.reply(200, encode({"object": "response.input_tokens", "input_tokens": len(encoded.ids)}))
