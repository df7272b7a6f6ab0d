"""The OpenAPI 3.1 document of this server, made from the checks that parse the bodies and the shapes of the answers.

Owns the list of operations and the document around them; app.py owns which routes there are (a test compares the two).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from ai_engine.api.http import Exchange
from ai_engine.api.message_events import MESSAGE_SHAPES
from ai_engine.api.messages import message_fields
from ai_engine.api.openai_types import ServedModel, chat_fields, completion_fields
from ai_engine.api.replies import encode
from ai_engine.api.response_events import RESPONSE_SHAPES
from ai_engine.api.responses import response_fields
from ai_engine.api.rest import Door
from ai_engine.api.shapes import SHAPES, TEXT, ref
from ai_engine.api.texts import TEXT_SHAPES, detokenize_fields, template_fields, tokenize_fields
from ai_engine.contracts.fields import Check, Schema, schema_of

OPENAPI_VERSION: Final = "3.1.0"
API_VERSION: Final = "1"
"""Of the paths and shapes, not of the program."""


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One method of one route. ``body`` names the request's schema, ``reply`` the answer's ("": not JSON but
    ``media``), ``event`` the schema of a stream's events, if it streams; ``error`` the shape of its failures."""

    method: str
    summary: str
    body: str = ""
    reply: str = ""
    media: str = "text/plain"
    event: str = ""
    error: str = "Error"
    is_open: bool = False
    prefix: str = "/v1"


OPERATIONS: Final[dict[str, Operation]] = {
    "/chat/completions": Operation(
        method="post",
        summary="Answer a conversation",
        body="ChatRequest",
        reply="ChatCompletion",
        event="ChatCompletionChunk",
    ),
    "/completions": Operation(
        method="post",
        summary="Continue texts, or score them",
        body="CompletionRequest",
        reply="Completion",
        event="CompletionChunk",
    ),
    "/messages": Operation(
        method="post",
        summary="Answer a conversation, as Anthropic's clients ask",
        body="MessageRequest",
        reply="Message",
        event="MessageEvent",
        error="MessagesError",
    ),
    "/messages/count_tokens": Operation(
        method="post",
        summary="Tokens that a message's prompt has",
        body="MessageRequest",
        reply="MessageTokens",
        error="MessagesError",
    ),
    "/responses": Operation(
        method="post",
        summary="Answer a conversation, as items; nothing is stored",
        body="ResponseRequest",
        reply="Response",
        event="ResponseEvent",
    ),
    "/responses/input_tokens": Operation(
        method="post", summary="Tokens that a response's prompt has", body="ResponseRequest", reply="ResponseTokens"
    ),
    "/tokenize": Operation(method="post", summary="Text or messages to ids", body="TokenizeRequest", reply="Tokens"),
    "/tokenizer_info": Operation(method="get", summary="What the tokeniser is", reply="Tokenizer"),
    "/detokenize": Operation(method="post", summary="Ids to text", body="DetokenizeRequest", reply="Detokenized"),
    "/apply-template": Operation(
        method="post", summary="A conversation as the model sees it", body="TemplateRequest", reply="Template"
    ),
    "/models": Operation(method="get", summary="The models served here", reply="ModelList"),
    "/models/{id}": Operation(method="get", summary="One model; its id may hold slashes", reply="Model"),
    "/openapi.json": Operation(method="get", summary="This document", reply="Document", prefix=""),
    "/livez": Operation(
        method="get", summary="The process and its step loop are alive", reply="Live", is_open=True, prefix=""
    ),
    "/readyz": Operation(method="get", summary="Work would be accepted now", reply="Ready", is_open=True, prefix=""),
    "/health": Operation(method="get", summary="As /readyz", reply="Ready", is_open=True, prefix=""),
    "/metrics": Operation(method="get", summary="Prometheus exposition text", prefix=""),
    "/console": Operation(method="get", summary="The console's page", media="text/html", is_open=True, prefix=""),
    "/console/{id}": Operation(method="get", summary="The console's files", media="*/*", is_open=True, prefix=""),
    "/console/kv": Operation(method="get", summary="The state of every KV page", reply="Pages", prefix=""),
    "/traces": Operation(method="get", summary="Where recent requests spent their time", reply="Document", prefix=""),
    "/traces/{id}": Operation(
        method="get", summary="A request down to the single op (?step=N or step=all)", reply="Document", prefix=""
    ),
}
"""Every route of app.ROUTES, by its name there."""

BODIES: Final[dict[str, Callable[[int], Check]]] = {
    "ChatRequest": chat_fields,
    "CompletionRequest": completion_fields,
    "MessageRequest": message_fields,
    "ResponseRequest": response_fields,
    "TokenizeRequest": tokenize_fields,
    "DetokenizeRequest": detokenize_fields,
    "TemplateRequest": template_fields,
}
"""What parses each request body, given the vocabulary's size: the schemas come from these very checks."""


def document(model: ServedModel) -> Schema:
    """The whole document, as JSON values."""
    bodies = {name: schema_of(fields(model.vocab_size)) for name, fields in BODIES.items()}
    return {
        "openapi": OPENAPI_VERSION,
        "info": {
            "title": "ai_engine",
            "version": API_VERSION,
            "description": "Every path works with and without /v1 and with a trailing slash.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": {op.prefix + route: {op.method: _operation(route, op)} for route, op in OPERATIONS.items()},
        "components": {
            "schemas": {
                **bodies,
                **SHAPES,
                **MESSAGE_SHAPES,
                **TEXT_SHAPES,
                **RESPONSE_SHAPES,
                "Document": {"type": "object"},
            },
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{"bearer": []}, {"apiKey": []}, {}],
    }


def _operation(route: str, op: Operation) -> Schema:
    content: dict[str, Any] = {}
    if op.reply:
        content["application/json"] = {"schema": ref(op.reply)}
    else:
        content[op.media] = {"schema": TEXT}
    if op.event:
        content["text/event-stream"] = {"schema": TEXT | {"description": f"Events; the data of each is a {op.event}."}}
    operation: Schema = {
        "operationId": f"{op.method}_{route.strip('/').replace('/', '_').replace('{id}', 'id').replace('.', '_')}",
        "summary": op.summary,
        "responses": {
            "200": {"description": "Done", "content": content},
            "default": {
                "description": "Refused or failed; `error` says what was found, what was expected and the fix",
                "content": {"application/json": {"schema": ref(op.error)}},
            },
        },
    }
    if op.body:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": ref(op.body)}}}
    if "{id}" in route:
        operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": TEXT | {"minLength": 1}}]
    if op.is_open:
        operation["security"] = []
    return operation


async def openapi(door: Door, exchange: Exchange) -> None:
    """GET /openapi.json"""
    await exchange.reply(200, encode(document(door.model)))
