"""Anthropic's events and messages: pieces of one answer in, message_start to message_stop out.

Owns content blocks, stop reasons, usage and the error shape of the Messages door. Does not own what a request may say
(messages.py) nor frames (events.py).

Usage counts as Anthropic's does: ``input_tokens`` are those that were not read from the prefix cache. A thinking block
has an empty signature: there is nothing to verify, and none is needed to send it back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final

from ai_engine.api.events import Event, frames
from ai_engine.api.generation import Piece
from ai_engine.api.replies import Answer
from ai_engine.api.shapes import ANY, COUNT, TEXT, TEXT_OR_NULL, arr, const, obj, ref, table
from ai_engine.contracts.fields import Schema, nullable
from ai_engine.ports.errors import AiEngineError
from ai_engine.ports.serving import Usage
from ai_engine.ports.text import ToolDelta

ERROR_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""By HTTP status; any other 4xx is an invalid_request_error."""
CUT_CALL: Final = "max_tokens: the limit cut a tool's input, so it is not given. Fix: raise max_tokens."


def message_error(error: AiEngineError) -> Event:
    """Anthropic's shape, with OpenAI's ``code`` and ``param`` beside the type."""
    kind = ERROR_TYPES.get(error.http_status, "invalid_request_error" if error.http_status < 500 else "api_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": error.message, "code": error.code, "param": error.param},
    }


class MessageVoice:
    """Implements events.Voice."""

    def __init__(self, answer: Answer, num_prompt_tokens: int) -> None:
        self._answer = answer
        self._num_prompt_tokens = num_prompt_tokens
        self._index = -1  # of the block that is open, or was last
        self._kind: str | None = None  # of the open block
        self._calls = 0
        self._finish: str | None = None
        self._stop: str | None = None

    def start(self) -> list[Event]:
        message = {
            "id": self._answer.id,
            "type": "message",
            "role": "assistant",
            "model": self._answer.ask.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(Usage(self._num_prompt_tokens, 0)),
            **self._answer.extras(self._answer.ask.warnings),
        }
        return [{"type": "message_start", "message": message}]

    def take(self, piece: Piece) -> list[Event]:
        events: list[Event] = []
        if piece.reasoning:
            events += self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            events.append(self._delta("thinking_delta", thinking=piece.reasoning))
        if piece.text:
            events += self._open("text", {"type": "text", "text": ""})
            events.append(self._delta("text_delta", text=piece.text))
        for call in piece.calls:
            events += self._call(call)
        if piece.finish is not None:
            self._finish = piece.finish
            if isinstance(piece.stop_reason, str) and piece.stop_reason in self._answer.ask.stops:
                self._stop = piece.stop_reason
        return events

    def _call(self, call: ToolDelta) -> list[Event]:
        events: list[Event] = []
        if call.id is not None:
            self._calls += 1
            block = {"type": "tool_use", "id": call.id, "name": call.name or "", "input": {}}
            events += self._open(f"call {call.index}", block)
        if call.arguments:
            events.append(self._delta("input_json_delta", partial_json=call.arguments))
        return events

    def _open(self, kind: str, block: Event) -> list[Event]:
        """Begin a block, unless one of this kind is open."""
        if kind == self._kind:
            return []
        events = self._close()
        self._index, self._kind = self._index + 1, kind
        return [*events, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _close(self) -> list[Event]:
        if self._kind is None:
            return []
        self._kind = None
        return [{"type": "content_block_stop", "index": self._index}]

    def _delta(self, kind: str, **fields: str) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, **fields}}

    def end(self, usage: Usage) -> list[Event]:
        delta = {"stop_reason": self._reason(), "stop_sequence": self._stop}
        return [
            *self._close(),
            {"type": "message_delta", "delta": delta, "usage": _usage(usage)},
            {"type": "message_stop"},
        ]

    def _reason(self) -> str:
        if self._finish == "length":
            return "max_tokens"
        if self._stop is not None:
            return "stop_sequence"
        return "tool_use" if self._calls else "end_turn"

    def fail(self, error: AiEngineError) -> list[Event]:
        return [message_error(error)]

    def silence(self) -> bytes:
        return frames([{"type": "ping"}])

    def whole(self, events: Sequence[Event]) -> Event:
        return message_of(events)


def _usage(usage: Usage) -> Event:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
    }


def message_of(events: Sequence[Event]) -> Event:
    """The message that a client puts together from the events of a stream that did not fail."""
    message: Event = {}
    json_parts: list[str] = []
    for event in events:
        match event["type"]:
            case "message_start":
                message = {**event["message"], "content": []}
            case "content_block_start":
                message["content"].append(dict(event["content_block"]))
                json_parts = []
            case "content_block_delta":
                block, delta = message["content"][-1], event["delta"]
                if delta["type"] == "input_json_delta":
                    json_parts.append(delta["partial_json"])
                else:
                    name = delta["type"].removesuffix("_delta")
                    block[name] += delta[name]
            case "content_block_stop":
                if message["content"][-1]["type"] == "tool_use" and json_parts:
                    _put_input(message, "".join(json_parts))
            case "message_delta":
                message |= {**event["delta"], "usage": event["usage"]}
    return message


def _put_input(message: Event, text: str) -> None:
    try:
        message["content"][-1]["input"] = json.loads(text)
    except ValueError:
        message["warnings"] = [*message.get("warnings", []), CUT_CALL]


_USAGE: Final = obj(
    {
        "input_tokens": COUNT,
        "output_tokens": COUNT,
        "cache_read_input_tokens": COUNT,
        "cache_creation_input_tokens": COUNT,
    }
)
_BLOCKS: Final[Schema] = {
    "anyOf": [
        obj({"type": const("text"), "text": TEXT}),
        obj({"type": const("thinking"), "thinking": TEXT, "signature": TEXT}),
        obj({"type": const("tool_use"), "id": TEXT, "name": TEXT, "input": table(ANY)}),
    ]
}
_REASON: Final = const("end_turn", "max_tokens", "stop_sequence", "tool_use")
_MESSAGE: Final = obj(
    {
        "id": TEXT,
        "type": const("message"),
        "role": const("assistant"),
        "model": TEXT,
        "content": arr(_BLOCKS),
        "stop_reason": nullable(_REASON),
        "stop_sequence": TEXT_OR_NULL,
        "usage": _USAGE,
    },
    {"warnings": arr(TEXT), "sampling_params": table(ANY)},
)
_ERROR: Final = obj(
    {
        "type": const("error"),
        "error": obj(
            {
                "type": const(*sorted(set(ERROR_TYPES.values()) | {"invalid_request_error"})),
                "message": TEXT,
                "code": TEXT,
                "param": TEXT_OR_NULL,
            }
        ),
    }
)
_DELTA: Final[Schema] = {
    "anyOf": [
        obj({"type": const("text_delta"), "text": TEXT}),
        obj({"type": const("thinking_delta"), "thinking": TEXT}),
        obj({"type": const("input_json_delta"), "partial_json": TEXT}),
    ]
}
MESSAGE_SHAPES: Final[dict[str, Schema]] = {
    "Message": _MESSAGE,
    "MessagesError": _ERROR,
    "MessageTokens": obj({"input_tokens": COUNT}),
    "MessageEvent": {
        "anyOf": [
            obj({"type": const("message_start"), "message": ref("Message")}),
            obj({"type": const("content_block_start"), "index": COUNT, "content_block": _BLOCKS}),
            obj({"type": const("content_block_delta"), "index": COUNT, "delta": _DELTA}),
            obj({"type": const("content_block_stop"), "index": COUNT}),
            obj(
                {
                    "type": const("message_delta"),
                    "delta": obj({"stop_reason": _REASON, "stop_sequence": TEXT_OR_NULL}),
                    "usage": _USAGE,
                }
            ),
            obj({"type": const("message_stop", "ping")}),
            ref("MessagesError"),
        ]
    },
}
