"""Anthropic's Messages door: what a body becomes, which events an answer is, and that both ways to get it agree.

Owns no socket: the official client is in tests/integration/test_anthropic_client.py.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from ai_engine.api.events import Event
from ai_engine.api.generation import Piece
from ai_engine.api.message_events import CUT_CALL, ERROR_TYPES, MessageVoice, message_of
from ai_engine.api.messages import message_fields, read_message
from ai_engine.api.openai_types import Ask, chat_fields
from ai_engine.api.replies import Answer
from ai_engine.ports.errors import ERRORS_BY_CODE, Overloaded
from ai_engine.ports.sampling import SamplingParams
from ai_engine.ports.serving import GenerateRequest, Usage
from ai_engine.ports.text import ToolDelta
from ai_engine.testing import ScriptedServing, answer, failing
from tests.unit.api.doors import MODEL, Reply, client, saying
from tests.unit.api.test_openapi import validate

PATH = "/v1/messages"
HI: dict[str, Any] = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]}
RESULT = {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "4"}]}
TOOL_USE = {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 2}}


def read(fields: dict[str, Any], *, strict: bool = False) -> Ask:
    body = {**HI, **fields}
    return read_message(body, message_fields(260), chat_fields(260), MODEL, strict=strict)


def events_of(reply: Reply) -> list[Event]:
    """The events; each frame's name is its data's type."""
    found = []
    for frame in reply.body.decode().removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        validate(event, "MessageEvent")
        found.append(event)
    return found


def messages_of(content: list[dict[str, Any]] | str, role: str = "user") -> Any:
    return read({"messages": [HI["messages"][0], {"role": role, "content": content}]}).messages


def test_system_comes_first_as_text_or_blocks() -> None:
    blocks = [{"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "brief"}]
    for system, expected in (("Be brief", "Be brief"), (blocks, "Be\nbrief")):
        assert read({"system": system}).messages == [
            {"role": "system", "content": expected},
            {"role": "user", "content": "Hi"},
        ]


def test_tool_results_are_messages_of_their_own_and_texts_beside_them_stay_in_order() -> None:
    found = messages_of([RESULT, {"type": "text", "text": "So"}, {"type": "text", "text": "then?"}])
    assert found[1:] == [
        {"role": "tool", "tool_call_id": "call_1", "content": "4"},
        {"role": "user", "content": "So\nthen?"},
    ]
    [failed] = messages_of([{**RESULT, "is_error": True, "content": "no such file"}])[1:]
    assert failed["content"] == "Error: no such file"


def test_tool_use_and_thinking_go_back_to_the_model() -> None:
    thinking = {"type": "thinking", "thinking": "2 and 2", "signature": ""}
    redacted = {"type": "redacted_thinking", "data": "xyz"}
    [_, message] = messages_of([thinking, redacted, {"type": "text", "text": "Let me"}, TOOL_USE], "assistant")
    [call] = message["tool_calls"]
    assert (call["id"], call["function"]["name"]) == ("call_1", "add")
    arguments = call["function"]["arguments"]
    assert (json.loads(arguments) if isinstance(arguments, str) else arguments) == {"a": 2}
    assert message["content"] == "Let me"
    assert message["reasoning_content"] == "2 and 2"


def test_a_last_message_of_the_assistant_is_continued() -> None:
    ask = read({"messages": [*HI["messages"], {"role": "assistant", "content": "The answer is"}]})
    assert ask.template["continue_final_message"] is True
    assert "continue_final_message" not in read({}).template


async def test_the_limit_defaults_to_4096_or_the_room_left() -> None:
    serving = ScriptedServing()
    door = client(serving)
    await door("POST", PATH, {"messages": HI["messages"]})
    assert serving.requests[0].params.max_tokens == MODEL.max_context - len(serving.requests[0].prompt)
    roomy = ScriptedServing()
    await client(roomy, model=msgspec.structs.replace(MODEL, max_context=9000))(
        "POST", PATH, {"messages": HI["messages"]}
    )
    assert roomy.requests[0].params.max_tokens == 4096


async def test_fields_become_sampling_params() -> None:
    fields = {"temperature": 0.3, "top_p": 0.9, "top_k": 4, "stop_sequences": ["a"], "seed": 5, "max_tokens": 7}
    ask = read(fields)
    assert (ask.sampling.temperature, ask.sampling.top_p, ask.sampling.top_k, ask.sampling.seed) == (0.3, 0.9, 4, 5)
    assert (ask.stops, ask.max_tokens) == (("a",), 7)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"system": 3}, "system"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"temperature": 3}, "temperature"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"container": "c"}, "container"),
        ({"model": "none"}, "model"),
        ({"max_tokens": 100_000}, "messages"),
    ],
    ids=str,
)
async def test_bad_fields_name_themselves_in_anthropic_s_shape(fields: dict[str, Any], param: str) -> None:
    reply = await client()("POST", PATH, {**HI, **fields})
    validate(reply.json(), "MessagesError")
    assert (reply.status, reply.json()["error"]["param"]) == (404 if param == "model" else 400, param), reply.body


async def test_unknown_fields_warn_and_a_strict_server_refuses_them() -> None:
    reply = await client()("POST", PATH, {**HI, "colour": "red"})
    assert reply.json()["warnings"] == ["colour: unknown field, ignored."]
    assert (await client(strict=True)("POST", PATH, {**HI, "colour": "red"})).status == 400


@pytest.mark.parametrize("error", ERRORS_BY_CODE.values(), ids=lambda e: e.code)
async def test_every_error_has_anthropic_s_shape(error: Any) -> None:
    reply = await client(ScriptedServing(refusal=error("it broke")))("POST", PATH, HI)
    validate(reply.json(), "MessagesError")
    assert reply.status == error.http_status
    found = reply.json()["error"]
    assert found["type"] == ERROR_TYPES.get(
        error.http_status, "invalid_request_error" if error.http_status < 500 else "api_error"
    )
    assert (found["message"], found["code"]) == ("it broke", error.code)
    assert ("retry-after" in reply.headers) is error.retryable


@pytest.mark.parametrize(
    ("method", "body", "status", "kind"),
    [
        ("GET", None, 405, "invalid_request_error"),
        ("POST", b"{", 400, "invalid_request_error"),
        ("POST", b"x" * 70_000, 413, "request_too_large"),
    ],
)
async def test_what_fails_before_the_door_has_the_shape_too(method: str, body: Any, status: int, kind: str) -> None:
    reply = await client(max_body_bytes=65_536)(method, PATH, body)
    assert (reply.status, reply.json()["type"], reply.json()["error"]["type"]) == (status, "error", kind)


@pytest.mark.parametrize(
    ("serving", "fields", "reason", "stop", "text"),
    [
        (saying("Hello"), {}, "end_turn", None, "Hello"),
        (saying("Hello"), {"max_tokens": 2}, "max_tokens", None, "He"),
        (saying("Hello"), {"stop_sequences": ["lo", "x"]}, "stop_sequence", "lo", "Hel"),
        (saying("a\U0001f600"), {}, "end_turn", None, "a\U0001f600"),
        (saying(""), {}, "end_turn", None, ""),
    ],
    ids=str,
)
async def test_whole_and_streamed_agree(
    serving: ScriptedServing, fields: dict[str, Any], reason: str, stop: str | None, text: str
) -> None:
    whole = (await client(serving)("POST", PATH, {**HI, **fields})).json()
    validate(whole, "Message")
    reply = await client(serving)("POST", PATH, {**HI, **fields, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = events_of(reply)
    assert message_of(events) == whole
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, stop)
    assert "".join(block["text"] for block in whole["content"]) == text
    assert whole["usage"]["output_tokens"] > 0 or not text


async def test_a_failure_in_the_stream_is_an_error_event_and_no_message_stop() -> None:
    reply = await client(ScriptedServing(lambda r: failing(r, b"He")))("POST", PATH, {**HI, "stream": True})
    kinds = [event["type"] for event in events_of(reply)]
    assert kinds[-1] == "error"
    assert "message_stop" not in kinds
    refused = await client(ScriptedServing(refusal=Overloaded("full")))("POST", PATH, {**HI, "stream": True})
    assert (refused.status, refused.json()["error"]["type"]) == (503, "overloaded_error")


async def test_silence_is_filled_with_pings() -> None:
    def slow(request: GenerateRequest) -> list[Any]:
        first, *rest = answer(request, b"Hi")
        return [first, 0.05, *rest]

    reply = await client(ScriptedServing(slow))("POST", PATH, {**HI, "stream": True})
    assert "ping" not in [event["type"] for event in events_of(reply)]
    door = client(ScriptedServing(slow), ping_s=0.01)
    assert "ping" in [event["type"] for event in events_of(await door("POST", PATH, {**HI, "stream": True}))]


async def test_headers_of_anthropic_s_clients_are_accepted() -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "x", "x-request-id": "mine"}
    reply = await client()("POST", PATH, HI, headers)
    assert reply.headers["request-id"] == "mine"


async def test_count_tokens_counts_the_prompt_that_would_run() -> None:
    serving = ScriptedServing()
    door = client(serving)
    body = {**HI, "system": "Be brief"}
    counted = await door("POST", f"{PATH}/count_tokens", body)
    validate(counted.json(), "MessageTokens")
    await door("POST", PATH, body)
    assert counted.json() == {"input_tokens": len(serving.requests[0].prompt)}
    assert len(serving.requests) == 1


def told(pieces: list[Piece], stops: tuple[str, ...] = ()) -> list[Event]:
    ask = Ask(model="m", sampling=SamplingParams(), max_tokens=9, stops=stops, messages=[])
    voice = MessageVoice(Answer("msg_1", 1, ask, MODEL, SamplingParams()), 5)
    events = voice.start()
    for piece in pieces:
        events += voice.take(piece)
    events += voice.end(Usage(5, 7, 2))
    for event in events:
        validate(event, "MessageEvent")
    return events


def test_thinking_text_and_calls_are_blocks_in_order() -> None:
    events = told(
        [
            Piece(0, reasoning="Hm", text=""),
            Piece(0, reasoning="m.", text="I"),
            Piece(0, text=" call", calls=[ToolDelta(0, "call_a", "add", '{"a"')]),
            Piece(0, calls=[ToolDelta(0, arguments=":1}"), ToolDelta(1, "call_b", "now", "{}")], finish="tool_calls"),
        ]
    )
    message = message_of(events)
    validate(message, "Message")
    assert message["content"] == [
        {"type": "thinking", "thinking": "Hmm.", "signature": ""},
        {"type": "text", "text": "I call"},
        {"type": "tool_use", "id": "call_a", "name": "add", "input": {"a": 1}},
        {"type": "tool_use", "id": "call_b", "name": "now", "input": {}},
    ]
    assert message["stop_reason"] == "tool_use"
    assert message["usage"]["input_tokens"] == 3
    assert message["usage"]["cache_read_input_tokens"] == 2
    opened = [event["index"] for event in events if event["type"] == "content_block_start"]
    closed = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert opened == closed == [0, 1, 2, 3]


def test_a_call_cut_at_the_limit_is_said_to_be_cut() -> None:
    message = message_of(told([Piece(0, calls=[ToolDelta(0, "call_a", "add", '{"a": "lon')], finish="length")]))
    assert message["content"][0]["input"] == {}
    assert (message["stop_reason"], message["warnings"]) == ("max_tokens", [CUT_CALL])
