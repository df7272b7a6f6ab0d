"""The OpenAPI document: well-formed, about every route, and true of what the doors take and answer.

Owns the comparison. Answers are recorded from the doors themselves and validated with jsonschema; request schemas are
held against the checks they were made from, in both directions where a schema can say it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ai_engine.api.app import OPEN_ROUTES, ROUTES
from ai_engine.api.openapi import BODIES, OPERATIONS, document
from ai_engine.contracts.fields import Checking
from ai_engine.ports.errors import InvalidRequest
from ai_engine.testing import ScriptedServing
from tests.unit.api.doors import MODEL, client, saying

DOCUMENT = document(MODEL)
GOLDEN = Path(__file__).parent / "golden"
HI: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


def validate(value: Any, name: str) -> None:
    """Against one component of the document."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    jsonschema.Draft202012Validator(schema).validate(value)


def test_every_route_is_in_the_document_with_its_methods_and_its_key() -> None:
    assert set(OPERATIONS) == set(ROUTES)
    paths = DOCUMENT["paths"]
    for route, handlers in ROUTES.items():
        op = OPERATIONS[route]
        assert {op.method.upper()} == set(handlers), route
        assert (paths[op.prefix + route][op.method].get("security") == []) is (route in OPEN_ROUTES)


def test_every_schema_is_one_and_every_reference_resolves() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    text = json.dumps(DOCUMENT)
    names = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= set(schemas)
    for name in BODIES:
        for field, schema in schemas[name]["properties"].items():
            assert schema, f"{name}.{field} says nothing"


async def test_the_route_answers_with_the_document() -> None:
    reply = await client()("GET", "/openapi.json")
    assert reply.json() == json.loads(json.dumps(DOCUMENT))


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("*.sse")))
def test_recorded_streams_are_as_documented(name: str) -> None:
    kind = "ChatCompletionChunk" if name.startswith("chat") else "CompletionChunk"
    events = (GOLDEN / f"{name}.sse").read_text().split("\n\n")
    data = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
    assert data
    for item in data:
        validate(item, "Error" if "error" in item else kind)


ANSWERS: list[tuple[str, str, str, dict[str, Any] | None]] = [
    ("ChatCompletion", "POST", "/v1/chat/completions", HI),
    ("ChatCompletion", "POST", "/v1/chat/completions", {**HI, "logprobs": True, "top_logprobs": 2, "n": 2}),
    ("ChatCompletion", "POST", "/v1/chat/completions", {**HI, "stop": "lo", "x": 1, "return_sampling_params": True}),
    ("Completion", "POST", "/v1/completions", {"prompt": ["a", "b"], "echo": True, "logprobs": 2, "n": 2}),
    ("Model", "GET", "/v1/models/org/name", None),
    ("ModelList", "GET", "/v1/models", None),
    ("Live", "GET", "/livez", None),
    ("Ready", "GET", "/readyz", None),
    ("Error", "GET", "/v1/nothing", None),
    ("Error", "POST", "/v1/chat/completions", {"messages": 3}),
    ("Error", "GET", "/v1/chat/completions", None),
]


@pytest.mark.parametrize(("name", "method", "path", "body"), ANSWERS, ids=str)
async def test_answers_are_as_documented(name: str, method: str, path: str, body: dict[str, Any] | None) -> None:
    reply = await client(saying("Hello"))(method, path, body)
    assert (reply.status >= 400) is (name == "Error"), reply.body
    validate(reply.json(), name)


TAKEN: list[tuple[str, dict[str, Any]]] = [
    ("ChatRequest", HI),
    ("ChatRequest", {**HI, "n": 2.0, "stop": ["a"], "seed": None, "logit_bias": {"7": 1}, "tools": [], "x": [1]}),
    ("CompletionRequest", {"prompt": [[1, 2], [3]], "logprobs": 0, "best_of": 1}),
]
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("ChatRequest", {}),
    ("ChatRequest", {**HI, "temperature": 2.5}),
    ("ChatRequest", {**HI, "n": True}),
    ("ChatRequest", {**HI, "stop": [1]}),
    ("ChatRequest", {**HI, "logit_bias": {"07": 1}}),
    ("ChatRequest", {"messages": [{"role": "robot", "content": "x"}]}),
    ("ChatRequest", {"messages": [{"role": "user", "content": 3}]}),
    ("CompletionRequest", {"prompt": [260]}),
    ("CompletionRequest", {"prompt": "x", "suffix": 5}),
]


@pytest.mark.parametrize(("name", "body"), TAKEN, ids=str)
def test_what_a_check_takes_its_schema_takes(name: str, body: dict[str, Any]) -> None:
    BODIES[name](MODEL.vocab_size).check(body, Checking())
    validate(body, name)


@pytest.mark.parametrize(("name", "body"), REFUSED, ids=str)
def test_what_a_check_refuses_its_schema_refuses(name: str, body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        BODIES[name](MODEL.vocab_size).check(body, Checking())
    with pytest.raises(jsonschema.ValidationError):
        validate(body, name)


async def test_a_stream_s_events_are_named_where_a_route_streams() -> None:
    for route, op in OPERATIONS.items():
        if op.event:
            source = {"CompletionRequest": {"prompt": "Hi"}, "ResponseRequest": {"input": "Hi"}}.get(op.body, HI)
            reply = await client(ScriptedServing())("POST", route, {**source, "stream": True})
            assert reply.headers["content-type"].startswith("text/event-stream"), route
