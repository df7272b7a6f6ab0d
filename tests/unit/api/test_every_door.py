"""What every door that generates must do, whatever its shapes: one row a door, so that a new one cannot forget any.

Owns what the doors share: nulls, limits, constraints, tools, keys, drain, leaving. What is a door's own is in its file.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from ai_engine.api.keys import Key
from ai_engine.api.openapi import BODIES, OPERATIONS
from ai_engine.contracts.fields import schema_of
from ai_engine.ports.text import ReplyForm
from ai_engine.testing import HANG, ScriptedServing, answer
from tests.unit.api.doors import MODEL, ByteText, client, saying
from tests.unit.api.test_access import keys_of
from tests.unit.api.test_openapi import validate

HI: list[Any] = [{"role": "user", "content": "Hi"}]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
CALL = '<think>Hm</think>So.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
FUNCTION: dict[str, Any] = {"name": "f", "parameters": SCHEMA}

DOORS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "chat": ("/v1/chat/completions", {"messages": HI}, "ChatCompletion", "ChatCompletionChunk"),
    "text": ("/v1/completions", {"prompt": "Hi"}, "Completion", "CompletionChunk"),
    "responses": ("/v1/responses", {"input": "Hi"}, "Response", "ResponseEvent"),
    "messages": ("/v1/messages", {"messages": HI}, "Message", "MessageEvent"),
}
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "chat": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    "text": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    "responses": {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
    "messages": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
}
TOOLS: dict[str, dict[str, Any]] = {
    "chat": {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"},
    "responses": {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
    "messages": {"tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}},
}
EXTRAS: dict[str, Any] = {
    "top_k": 3, "min_p": 0.5, "repetition_penalty": 1.5, "min_tokens": 2, "seed": 9, "ignore_eos": True,
    "stop_token_ids": [7], "logit_bias": {"7": -100}, "presence_penalty": 0.5, "frequency_penalty": 0.25,
}  # fmt: skip
each_door = pytest.mark.parametrize("name", DOORS)


@each_door
async def test_extras_reach_the_sampler(name: str) -> None:
    path, body, reply_name, _ = DOORS[name]
    serving = ScriptedServing()
    reply = await client(serving)("POST", path, {**body, **EXTRAS, "return_sampling_params": True})
    assert reply.status == 200, reply.body
    params = serving.requests[0].params
    for field, value in EXTRAS.items():
        expected = {"stop_token_ids": (7,), "logit_bias": {7: -100.0}}.get(field, value)
        assert getattr(params, field) == expected, field
    assert "warnings" not in reply.json(), "nothing is ignored"
    assert reply.json()["sampling_params"]["top_k"] == 3
    validate(reply.json(), reply_name)


@each_door
async def test_nulls_are_absent(name: str) -> None:
    path, body, _, _ = DOORS[name]
    fields = document_fields(name) - set(body)
    reply = await client()("POST", path, {**body, **dict.fromkeys(fields)})
    assert reply.status == 200, reply.body
    assert "warnings" not in reply.json()


def document_fields(name: str) -> set[str]:
    op = OPERATIONS[DOORS[name][0].removeprefix("/v1")]
    return set(schema_of(BODIES[op.body](MODEL.vocab_size))["properties"])


@each_door
@pytest.mark.parametrize("stream", [False, True])
async def test_a_schema_constrains_the_answer(name: str, stream: bool) -> None:
    path, body, _, _ = DOORS[name]
    serving = saying('{"a": 1}')
    reply = await client(serving)("POST", path, {**body, **CONSTRAINTS[name], "stream": stream})
    assert reply.status == 200, reply.body
    constraint = serving.requests[0].constraint
    assert constraint is not None
    assert (constraint.kind, json.loads(constraint.text)) == ("json_schema", SCHEMA)
    assert constraint.param.split(".")[0] in CONSTRAINTS[name], "an error names the field that this door knows"


@pytest.mark.parametrize("name", TOOLS)
@pytest.mark.parametrize("stream", [False, True])
async def test_tools_are_offered_and_their_calls_are_in_shape(name: str, stream: bool) -> None:
    path, body, reply_name, event_name = DOORS[name]
    text = ByteText(form=ReplyForm(reasoning=("<think>", "</think>"), calls="hermes"))
    reply = await client(saying(CALL), text=text)("POST", path, {**body, **TOOLS[name], "stream": stream})
    assert reply.status == 200, reply.body
    [offered] = text.template_calls[0]["tools"]
    assert (offered["function"]["name"], offered["function"]["parameters"]) == ("f", SCHEMA)
    assert text.template_calls[0]["tool_choice"].mode == "required"
    if not stream:
        validate(reply.json(), reply_name)
        return
    for line in reply.body.decode().splitlines():
        if line.startswith("data: {"):
            validate(json.loads(line[6:]), event_name)


@each_door
async def test_the_limit_is_named_as_the_door_names_it(name: str) -> None:
    path, body, _, _ = DOORS[name]
    field = "max_output_tokens" if name == "responses" else "max_tokens"
    reply = await client()("POST", path, {**body, field: 511})
    error = reply.json()["error"]
    assert (reply.status, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == {"text": "prompt", "responses": "input"}.get(name, "messages")
    assert "512" in error["message"]
    assert "511" in error["message"]
    assert field in error["message"]


@pytest.mark.parametrize("name", ["chat", "text", "responses"])
async def test_include_obfuscation_is_accepted(name: str) -> None:
    path, body, _, _ = DOORS[name]
    asked = {**body, "stream": True, "stream_options": {"include_obfuscation": False}}
    reply = await client()("POST", path, asked)
    assert reply.status == 200
    assert b"warnings" not in reply.body


@each_door
async def test_a_key_is_asked_for_and_the_drain_refuses(name: str, tmp_path: Path) -> None:
    path, body, _, _ = DOORS[name]
    shut = client(keys=keys_of(tmp_path, Key(name="a")))
    for headers in ({}, {"authorization": "Bearer no"}, {"x-api-key": "no"}):
        reply = await shut("POST", path, body, headers)
        assert reply.status == 401
        validate(reply.json(), "MessagesError" if name == "messages" else "Error")
    door = client()
    door.api.draining = True
    reply = await door("POST", path, body)
    assert (reply.status, reply.json()["error"]["code"]) == (503, "shutting_down")
    assert reply.headers["retry-after"]


@each_door
@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_cancels(name: str, stream: bool) -> None:
    path, body, _, _ = DOORS[name]
    serving = ScriptedServing(lambda r: [*answer(r, b"abc")[:1], HANG])
    hang_up = asyncio.Event()
    call = asyncio.create_task(client(serving)("POST", path, {**body, "stream": stream}, hang_up=hang_up))
    await asyncio.sleep(0.02)
    assert serving.open_requests == 1
    hang_up.set()
    with contextlib.suppress(AssertionError):  # a stream that had begun has no end
        await asyncio.wait_for(call, 1)
    assert serving.cancelled == [(serving.requests[0].request_id, None)]
    assert serving.open_requests == 0


@each_door
@pytest.mark.parametrize("text", ["a\U0001f600b", "\U0001f468\u200d\U0001f469"])
async def test_characters_come_whole(name: str, text: str) -> None:
    path, body, _, _ = DOORS[name]
    reply = await client(saying(text))("POST", path, {**body, "stream": True})
    assert "\ufffd" not in reply.body.decode()
