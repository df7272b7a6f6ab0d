"""JSON Schemas of what goes back, for the OpenAPI document: one entry per kind of body or event.

Owns the shapes of OpenAI's doors and of the routes beside them; the shapes of another door stand beside that door. A
test validates recorded answers against them, and every object is closed: a field that is not declared here fails it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ai_engine.contracts.fields import Schema, nullable

TEXT: Final[Schema] = {"type": "string"}
COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
NUMBER: Final[Schema] = {"type": "number"}
FLAG: Final[Schema] = {"type": "boolean"}
ANY: Final[Schema] = {}
TEXT_OR_NULL: Final = nullable(TEXT)


def obj(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """A closed object."""
    properties = {**required, **(optional or {})}
    return {"type": "object", "properties": properties, "required": sorted(required), "additionalProperties": False}


def arr(items: Schema, **limits: int) -> Schema:
    return {"type": "array", "items": items, **limits}


def const(*values: Any) -> Schema:
    return {"enum": list(values)}


def table(values: Schema) -> Schema:
    """An object of any keys."""
    return {"type": "object", "additionalProperties": values}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


ERROR: Final = obj(
    {"error": obj({"message": TEXT, "type": TEXT, "param": TEXT_OR_NULL, "code": TEXT})},
)
_USAGE: Final = obj(
    {
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": obj({"cached_tokens": COUNT}),
    },
    {"completion_tokens_details": obj({"reasoning_tokens": COUNT})},
)
_FINISH: Final = const("stop", "length", "tool_calls")
_STOP_REASON: Final[Schema] = {"type": ["string", "integer"], "description": "The stop string or token that ended it."}
_TOP: Final = obj({"token": TEXT, "logprob": NUMBER, "bytes": arr(COUNT)})
_CHAT_LOGPROBS: Final = obj(
    {
        "content": arr(obj({**_TOP["properties"], "top_logprobs": arr(_TOP)})),
        "refusal": {"type": "null"},
    }
)
_TEXT_LOGPROBS: Final = obj(
    {
        "tokens": arr(TEXT),
        "token_logprobs": arr(nullable(NUMBER)),
        "top_logprobs": arr(nullable(table(NUMBER))),
        "text_offset": arr(COUNT),
    }
)
_CALL: Final = obj({"id": TEXT, "type": const("function"), "function": obj({"name": TEXT, "arguments": TEXT})})
_CALL_DELTA: Final = obj(
    {"index": COUNT, "function": obj({}, {"name": TEXT, "arguments": TEXT})}, {"id": TEXT, "type": const("function")}
)
_PROMPT_LOGPROBS: Final = arr(
    nullable(table(obj({"logprob": NUMBER, "rank": nullable(COUNT), "decoded_token": TEXT}))),
)
_EXTRAS: Final[Mapping[str, Schema]] = {
    "warnings": arr(TEXT),
    "sampling_params": table(ANY),
    "prompt_logprobs": nullable(_PROMPT_LOGPROBS),
    "prompt_token_ids": arr(COUNT),
}
"""Our own fields beside OpenAI's: there when they have something to say, or were asked for."""
_CHOICE_EXTRAS: Final[Mapping[str, Schema]] = {
    "stop_reason": _STOP_REASON,
    "token_ids": arr(COUNT),
    "prompt_logprobs": _PROMPT_LOGPROBS,
    "prompt_token_ids": arr(COUNT),
}


def _answer(kind: str, choice: Schema, *, chunk: bool = False) -> Schema:
    """The envelope that answers and chunks share."""
    head = {"id": TEXT, "object": const(kind), "created": COUNT, "model": TEXT, "choices": arr(choice)}
    if chunk:
        return obj(head, {"usage": nullable(_USAGE), "system_fingerprint": TEXT_OR_NULL, **_EXTRAS})
    return obj({**head, "usage": _USAGE, "system_fingerprint": TEXT_OR_NULL}, _EXTRAS)


_MESSAGE: Final = obj(
    {"role": const("assistant"), "content": TEXT_OR_NULL, "refusal": {"type": "null"}},
    {"reasoning_content": TEXT_OR_NULL, "reasoning": TEXT_OR_NULL, "tool_calls": arr(_CALL, minItems=1)},
)
_DELTA: Final = obj(
    {},
    {
        "role": const("assistant"),
        "content": TEXT_OR_NULL,
        "reasoning_content": TEXT_OR_NULL,
        "reasoning": TEXT_OR_NULL,
        "tool_calls": arr(_CALL_DELTA, minItems=1),
    },
)
_MODEL: Final = obj(
    {
        "id": TEXT,
        "object": const("model"),
        "created": COUNT,
        "owned_by": TEXT,
        "max_model_len": COUNT,
        "root": TEXT,
        "parent": TEXT_OR_NULL,
    }
)

SHAPES: Final[dict[str, Schema]] = {
    "Error": ERROR,
    "ChatCompletion": _answer(
        "chat.completion",
        obj(
            {
                "index": COUNT,
                "message": _MESSAGE,
                "logprobs": nullable(_CHAT_LOGPROBS),
                "finish_reason": _FINISH,
            },
            _CHOICE_EXTRAS,
        ),
    ),
    "ChatCompletionChunk": _answer(
        "chat.completion.chunk",
        obj(
            {
                "index": COUNT,
                "delta": _DELTA,
                "logprobs": nullable(_CHAT_LOGPROBS),
                "finish_reason": nullable(_FINISH),
            },
            _CHOICE_EXTRAS,
        ),
        chunk=True,
    ),
    "Completion": _answer(
        "text_completion",
        obj(
            {"index": COUNT, "text": TEXT, "logprobs": nullable(_TEXT_LOGPROBS), "finish_reason": _FINISH},
            _CHOICE_EXTRAS,
        ),
    ),
    "CompletionChunk": _answer(
        "text_completion",
        obj(
            {
                "index": COUNT,
                "text": TEXT,
                "logprobs": nullable(_TEXT_LOGPROBS),
                "finish_reason": nullable(_FINISH),
            },
            _CHOICE_EXTRAS,
        ),
        chunk=True,
    ),
    "Model": _MODEL,
    "ModelList": obj({"object": const("list"), "data": arr(ref("Model"))}),
    "Pages": obj({"page_tokens": COUNT, "states": TEXT}),
    "Live": obj({"status": const("live")}),
    "Ready": obj(
        {"status": const("ready"), "queued_requests": COUNT, "queued_tokens": COUNT, "running_requests": COUNT}
    ),
}
