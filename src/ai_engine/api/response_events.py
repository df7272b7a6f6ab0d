"""OpenAI's Responses: pieces of one answer in, response.created to response.completed out.

Owns items, parts and their ids, statuses, usage, and the final object, which is put together from the very items that
the events announced. Does not own what a request may say (responses.py) nor frames (events.py).

Items come in order: a reasoning item, a message, calls; ids are the response's own with a letter and a number, so a
stream and its final object cannot disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from ai_engine.api.events import Event
from ai_engine.api.generation import Piece
from ai_engine.api.replies import Answer, chat_logprobs
from ai_engine.api.shapes import ANY, COUNT, FLAG, NUMBER, TEXT, TEXT_OR_NULL, arr, const, obj, ref, table
from ai_engine.contracts.fields import Schema, nullable
from ai_engine.ports.errors import AiEngineError
from ai_engine.ports.serving import Usage
from ai_engine.ports.text import TextService, ToolDelta

PING: Final = b": ping\n\n"


class ResponseVoice:
    """Implements events.Voice. ``echoed`` are the request's fields that a response repeats."""

    def __init__(self, answer: Answer, text: TextService, echoed: dict[str, Any]) -> None:
        self._answer = answer
        self._text = text
        self._echoed = echoed
        self._wants_logprobs = answer.ask.sampling.logprobs is not None
        self._sequence = 0
        self._output: list[Event] = []  # items that are done
        self._item: Event | None = None  # the item that is open
        self._kind = ""
        self._finish: str | None = None

    # --- the response ---

    def _response(self, status: str, **more: Any) -> Event:
        return {
            "id": self._answer.id,
            "object": "response",
            "created_at": self._answer.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._answer.ask.model,
            "output": list(self._output),
            "usage": None,
            **self._echoed,
            **self._answer.extras(self._answer.ask.warnings),
            **more,
        }

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": f"response.{kind}", "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event

    def start(self) -> list[Event]:
        return [
            self._event("created", response=self._response("in_progress")),
            self._event("in_progress", response=self._response("in_progress")),
        ]

    def take(self, piece: Piece) -> list[Event]:
        events: list[Event] = []
        if piece.reasoning:
            events += self._open("reasoning") + self._say("reasoning_text.delta", piece.reasoning)
        if piece.text or (piece.entries and self._kind == "message"):
            more: dict[str, Any] = {"logprobs": self._logprobs(piece)}
            events += self._open("message") + self._say("output_text.delta", piece.text, **more)
        for call in piece.calls:
            events += self._call(call)
        if piece.finish is not None:
            self._finish = piece.finish
        return events

    def end(self, usage: Usage) -> list[Event]:
        if not self._output and self._item is None:  # an answer of no text is a message of no text
            events = [*self._open("message"), *self._close()]
        else:
            events = self._close()
        counted = _usage(usage)
        if self._finish == "length":
            why = {"reason": "max_output_tokens"}
            last = self._response("incomplete", incomplete_details=why, usage=counted)
            return [*events, self._event("incomplete", response=last)]
        return [*events, self._event("completed", response=self._response("completed", usage=counted))]

    def fail(self, error: AiEngineError) -> list[Event]:
        why = {"code": error.code, "message": error.message}
        return [self._event("failed", response=self._response("failed", error=why))]

    def silence(self) -> bytes:
        return PING

    def whole(self, events: Sequence[Event]) -> Any:
        return events[-1]["response"]

    # --- items ---

    def _open(self, kind: str, call: ToolDelta | None = None) -> list[Event]:
        """Begin an item, unless this one is open."""
        if kind == self._kind:
            return []
        events = self._close()
        self._kind = kind
        item_id = f"{_PREFIX[kind.partition(' ')[0]]}_{self._answer.id.partition('_')[2]}{len(self._output):02x}"
        if call is not None:
            self._item = {
                "id": item_id, "type": "function_call", "status": "in_progress", "call_id": call.id,
                "name": call.name or "", "arguments": "",
            }  # fmt: skip
            return [*events, self._announce("added", self._item)]
        if kind == "reasoning":
            self._item = {"id": item_id, "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
            part = _empty_part("reasoning_text")
        else:
            self._item = {
                "id": item_id, "type": "message", "status": "in_progress", "role": "assistant", "content": [],
            }  # fmt: skip
            part = _empty_part("output_text")
        events.append(self._announce("added", self._item))
        self._item["content"] = [part]
        return [*events, self._about("content_part.added", part=_empty_part(part["type"]))]

    def _announce(self, what: str, item: Event) -> Event:
        return self._event(f"output_item.{what}", output_index=len(self._output), item=dict(item))

    def _about(self, kind: str, *, in_part: bool = True, **fields: Any) -> Event:
        assert self._item is not None
        where = {"content_index": 0} if in_part else {}
        return self._event(kind, item_id=self._item["id"], output_index=len(self._output), **where, **fields)

    def _say(self, kind: str, delta: str, **more: Any) -> list[Event]:
        assert self._item is not None
        part = self._item["content"][0]
        part["text"] += delta
        part.get("logprobs", []).extend(more.get("logprobs", []))
        return [self._about(kind, delta=delta, **more)]

    def _call(self, call: ToolDelta) -> list[Event]:
        events = self._open(f"call {call.index}", call) if call.id is not None else []
        assert self._item is not None
        if call.arguments:
            self._item["arguments"] += call.arguments
            events.append(self._about("function_call_arguments.delta", in_part=False, delta=call.arguments))
        return events

    def _close(self) -> list[Event]:
        """End the open item: done with it whole, and in the output."""
        if self._item is None:
            return []
        item, events = self._item, []
        item["status"] = "incomplete" if self._finish == "length" else "completed"
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            events.append(self._about("function_call_arguments.done", in_part=False, **done))
        else:
            part = dict(item["content"][0])
            more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            events.append(self._about(f"{part['type']}.done", text=part["text"], **more))
            events.append(self._about("content_part.done", part=part))
        events.append(self._announce("done", item))
        self._output.append(item)
        self._item, self._kind = None, ""
        return events

    def _logprobs(self, piece: Piece) -> list[Event]:
        return chat_logprobs(piece.entries, self._text)["content"] if self._wants_logprobs else []


def _empty_part(kind: str) -> Event:
    part: Event = {"type": kind, "text": ""}
    return part if kind == "reasoning_text" else part | {"annotations": [], "logprobs": []}


_PREFIX: Final = {"reasoning": "rs", "message": "msg", "call": "fc"}


def _usage(usage: Usage) -> Event:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


_STATUS: Final = const("in_progress", "completed", "incomplete")
_LOGPROBS: Final = arr(
    obj({"token": TEXT, "logprob": NUMBER, "bytes": arr(COUNT), "top_logprobs": arr(table(ANY))}),
)
_TEXT_PART: Final = obj(
    {"type": const("output_text"), "text": TEXT, "annotations": arr(ANY, maxItems=0), "logprobs": _LOGPROBS}
)
_REASON_PART: Final = obj({"type": const("reasoning_text"), "text": TEXT})
_ITEM: Final[Schema] = {
    "anyOf": [
        obj(
            {
                "id": TEXT,
                "type": const("message"),
                "status": _STATUS,
                "role": const("assistant"),
                "content": arr(_TEXT_PART),
            }
        ),
        obj(
            {
                "id": TEXT,
                "type": const("reasoning"),
                "status": _STATUS,
                "summary": arr(ANY, maxItems=0),
                "content": arr(_REASON_PART),
            }
        ),
        obj(
            {
                "id": TEXT,
                "type": const("function_call"),
                "status": _STATUS,
                "call_id": TEXT,
                "name": TEXT,
                "arguments": TEXT,
            }
        ),
    ]
}
_USAGE: Final = obj(
    {
        "input_tokens": COUNT,
        "input_tokens_details": obj({"cached_tokens": COUNT}),
        "output_tokens": COUNT,
        "output_tokens_details": obj({"reasoning_tokens": COUNT}),
        "total_tokens": COUNT,
    }
)
_RESPONSE: Final = obj(
    {
        "id": TEXT,
        "object": const("response"),
        "created_at": COUNT,
        "status": const("in_progress", "completed", "incomplete", "failed"),
        "error": nullable(obj({"code": TEXT, "message": TEXT})),
        "incomplete_details": nullable(obj({"reason": const("max_output_tokens")})),
        "model": TEXT,
        "output": arr(_ITEM),
        "usage": nullable(_USAGE),
        "instructions": TEXT_OR_NULL,
        "max_output_tokens": nullable(COUNT),
        "metadata": table(ANY),
        "parallel_tool_calls": FLAG,
        "previous_response_id": {"type": "null"},
        "reasoning": table(ANY),
        "store": const(False),
        "background": const(False),
        "temperature": NUMBER,
        "top_p": NUMBER,
        "top_logprobs": COUNT,
        "text": table(ANY),
        "tool_choice": {"anyOf": [TEXT, table(ANY)]},
        "tools": arr(table(ANY)),
        "truncation": const("disabled"),
        "user": TEXT_OR_NULL,
        "service_tier": const("default"),
    },
    {"warnings": arr(TEXT), "sampling_params": table(ANY)},
)
_PLACE: Final = {"item_id": TEXT, "output_index": COUNT}
_IN_PART: Final = {**_PLACE, "content_index": COUNT}
_PART: Final[Schema] = {"anyOf": [_TEXT_PART, _REASON_PART]}
_EVENTS: Final[dict[str, dict[str, Schema]]] = {
    **{kind: {"response": ref("Response")} for kind in ("created", "in_progress", "completed", "incomplete", "failed")},
    **{f"output_item.{what}": {"output_index": COUNT, "item": _ITEM} for what in ("added", "done")},
    **{f"content_part.{what}": {**_IN_PART, "part": _PART} for what in ("added", "done")},
    "output_text.delta": {**_IN_PART, "delta": TEXT, "logprobs": _LOGPROBS},
    "output_text.done": {**_IN_PART, "text": TEXT, "logprobs": _LOGPROBS},
    "reasoning_text.delta": {**_IN_PART, "delta": TEXT},
    "reasoning_text.done": {**_IN_PART, "text": TEXT},
    "function_call_arguments.delta": {**_PLACE, "delta": TEXT},
    "function_call_arguments.done": {**_PLACE, "arguments": TEXT, "name": TEXT},
}
RESPONSE_SHAPES: Final[dict[str, Schema]] = {
    "Response": _RESPONSE,
    "ResponseTokens": obj({"object": const("response.input_tokens"), "input_tokens": COUNT}),
    "ResponseEvent": {
        "anyOf": [
            obj({"type": const(f"response.{kind}"), "sequence_number": COUNT, **fields})
            for kind, fields in _EVENTS.items()
        ]
    },
}
