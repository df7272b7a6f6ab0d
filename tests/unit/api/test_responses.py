"""The Responses door: what a body becomes, which events an answer is, and that a stream and its final object agree.

Owns no socket: the official client is in tests/integration/test_openai_client.py.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from ai_engine.api.events import Event
from ai_engine.api.generation import Piece
from ai_engine.api.openai_types import Ask, chat_fields
from ai_engine.api.replies import Answer
from ai_engine.api.response_events import ResponseVoice
from ai_engine.api.responses import LOGPROBS, echoed, read_response, response_fields
from ai_engine.ports.sampling import SamplingParams
from ai_engine.ports.serving import GenerateRequest, Usage
from ai_engine.ports.text import ToolDelta
from ai_engine.testing import ScriptedServing, answer, failing
from tests.unit.api.doors import MODEL, ByteText, Reply, client, saying
from tests.unit.api.test_openapi import validate

PATH = "/v1/responses"
HI: dict[str, Any] = {"model": "m", "input": "Hi"}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "add", "arguments": '{"a":2}'}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "4"}]}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]}
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": False}


def read(fields: dict[str, Any], *, strict: bool = False) -> Ask:
    return read_response({**HI, **fields}, response_fields(260), chat_fields(260), MODEL, strict=strict)[0]


def events_of(reply: Reply) -> list[Event]:
    """The events; each frame's name is its data's type, and the numbers have no gap."""
    found = []
    for frame in reply.body.decode().removesuffix("\n\n").split("\n\n"):
        if frame.startswith(":"):
            continue
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        validate(event, "ResponseEvent")
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def replayed(events: list[Event]) -> list[Any]:
    """The output as a client puts it together from the deltas alone."""
    items: list[Any] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            items.append(json.loads(json.dumps(event["item"])))
        elif kind == "content_part.added":
            items[event["output_index"]]["content"].append(json.loads(json.dumps(event["part"])))
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            part = items[event["output_index"]]["content"][event["content_index"]]
            part["text"] += event["delta"]
            part.get("logprobs", []).extend(event.get("logprobs", []))
        elif kind == "function_call_arguments.delta":
            items[event["output_index"]]["arguments"] += event["delta"]
        elif kind == "output_item.done":
            items[event["output_index"]]["status"] = event["item"]["status"]
            assert items[event["output_index"]] == event["item"]
    return items


def test_a_string_is_a_user_s_message_and_instructions_come_first() -> None:
    assert read({"instructions": "Be brief"}).messages == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "Hi"},
    ]


def test_items_become_messages_as_they_were_said() -> None:
    message = {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed"}
    said = [{"type": "output_text", "text": "Let me", "annotations": [], "logprobs": []}]
    items = [
        {"role": "developer", "content": "Rules"},
        {"role": "user", "content": [{"type": "input_text", "text": "2+2"}, {"type": "input_text", "text": "?"}]},
        REASONING,
        {**message, "content": said},
        CALL,
        {**CALL, "call_id": "call_2"},
        RESULT,
        {**message, "content": ""},
    ]
    found = read({"input": items}).messages
    assert found is not None
    assert [item["role"] for item in found] == ["developer", "user", "assistant", "tool", "assistant"]
    assert found[1]["content"] == "2+2\n?"
    assert (found[2]["content"], found[2]["reasoning_content"]) == ("Let me", "Hm")
    assert [call["id"] for call in found[2]["tool_calls"]] == ["call_1", "call_2"]
    assert (found[3]["content"], found[3]["tool_call_id"]) == ("4", "call_1")
    assert found[4]["content"] == ""


def test_reasoning_before_a_call_belongs_to_the_call_s_message() -> None:
    found = read({"input": [{"role": "user", "content": "x"}, REASONING, CALL, RESULT, REASONING, CALL]}).messages
    assert found is not None
    assert [(item["role"], item.get("reasoning_content")) for item in found] == [
        ("user", None), ("assistant", "Hm"), ("tool", None), ("assistant", "Hm"),
    ]  # fmt: skip


def test_fields_become_sampling_params() -> None:
    ask = read({"max_output_tokens": 7, "temperature": 0.3, "top_logprobs": 2, "include": [LOGPROBS], "seed": 5})
    assert (ask.max_tokens, ask.sampling.temperature, ask.sampling.logprobs, ask.sampling.seed) == (7, 0.3, 2, 5)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
        ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
        ({"background": True}, "background", "unsupported_parameter"),
        ({"truncation": "auto"}, "truncation", "unsupported_parameter"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "unsupported_parameter"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type",
         "unsupported_parameter"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_parameter"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": 3}, "input", "invalid_value"),
        ({"input": [{"role": "robot", "content": ""}]}, "input[0].role", "invalid_value"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id", "invalid_value"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"max_output_tokens": 9999}, "input", "context_length_exceeded"),
        ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type", "invalid_value"),
        ({"tool_choice": "always"}, "tool_choice", "invalid_value"),
    ],
    ids=str,
)  # fmt: skip
async def test_bad_fields_name_themselves(fields: dict[str, Any], param: str, code: str) -> None:
    reply = await client()("POST", PATH, {**HI, **fields})
    validate(reply.json(), "Error")
    error = reply.json()["error"]
    assert (reply.status, error["param"], error["code"]) == (400, param, code), error


async def test_what_is_not_used_is_warned_about() -> None:
    fields = {"store": True, "colour": 1, "include": ["web_search_call.results", "reasoning.encrypted_content"]}
    warnings = (await client()("POST", PATH, {**HI, **fields})).json()["warnings"]
    assert [warning.partition(":")[0] for warning in warnings] == ["store", "colour", "include[0]"]
    assert "warnings" not in (await client()("POST", PATH, {**HI, "store": False})).json()
    assert (await client(strict=True)("POST", PATH, {**HI, "store": True})).status == 400


@pytest.mark.parametrize(
    ("serving", "fields", "status", "text"),
    [
        (saying("Hello"), {}, "completed", "Hello"),
        (saying("Hello"), {"max_output_tokens": 2}, "incomplete", "He"),
        (saying("Hello"), {"stop": ["lo"]}, "completed", "Hel"),
        (saying("a\U0001f600"), {"include": [LOGPROBS], "top_logprobs": 1}, "completed", "a\U0001f600"),
        (saying(""), {"metadata": {"a": "b"}, "instructions": "x"}, "completed", ""),
    ],
    ids=str,
)
async def test_whole_streamed_and_replayed_agree(
    serving: ScriptedServing, fields: dict[str, Any], status: str, text: str
) -> None:
    whole = (await client(serving)("POST", PATH, {**HI, **fields})).json()
    validate(whole, "Response")
    events = events_of(await client(serving)("POST", PATH, {**HI, **fields, "stream": True}))
    final = events[-1]
    assert final["type"] == f"response.{status}"
    assert final["response"] == whole
    assert replayed(events) == whole["output"]
    assert (whole["status"], whole["output"][0]["content"][0]["text"]) == (status, text)
    assert whole["store"] is False
    assert whole["metadata"] == fields.get("metadata", {})
    if status == "incomplete":
        assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    if "include" in fields:
        logprobs = whole["output"][0]["content"][0]["logprobs"]
        assert bytes(byte for entry in logprobs for byte in entry["bytes"]).decode() == text


async def test_a_failure_in_the_stream_is_a_failed_response() -> None:
    reply = await client(ScriptedServing(lambda r: failing(r, b"He")))("POST", PATH, {**HI, "stream": True})
    last = events_of(reply)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "engine_error"
    early = await client(ScriptedServing(lambda r: failing(r, b"")))("POST", PATH, {**HI, "stream": True})
    assert early.status == 500


async def test_silence_is_filled_with_comments() -> None:
    def slow(request: GenerateRequest) -> list[Any]:
        first, *rest = answer(request, b"Hi")
        return [first, 0.05, *rest]

    reply = await client(ScriptedServing(slow), ping_s=0.01)("POST", PATH, {**HI, "stream": True})
    assert b": ping\n\n" in reply.body
    assert events_of(reply)[-1]["type"] == "response.completed"


async def test_input_tokens_counts_the_prompt_that_would_run() -> None:
    serving = ScriptedServing()
    door = client(serving)
    counted = (await door("POST", f"{PATH}/input_tokens", {**HI, "instructions": "Be brief"})).json()
    validate(counted, "ResponseTokens")
    await door("POST", PATH, {**HI, "instructions": "Be brief"})
    assert counted["input_tokens"] == len(serving.requests[0].prompt)
    assert len(serving.requests) == 1


def told(pieces: list[Piece]) -> list[Event]:
    ask = Ask(model="m", sampling=SamplingParams(), max_tokens=9, messages=[])
    made = Answer("resp_00ab", 1, ask, MODEL, SamplingParams())
    voice = ResponseVoice(made, ByteText(), echoed({"tools": [TOOL], "tool_choice": "auto"}, made))
    events = voice.start()
    for piece in pieces:
        events += voice.take(piece)
    events += voice.end(Usage(5, 7, 2))
    for event in events:
        validate(event, "ResponseEvent")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_reasoning_text_and_calls_are_items_in_order_with_ids_of_their_own() -> None:
    events = told(
        [
            Piece(0, reasoning="Hm"),
            Piece(0, reasoning="m.", text="I"),
            Piece(0, text=" call", calls=[ToolDelta(0, "call_a", "add", '{"a"')]),
            Piece(0, calls=[ToolDelta(0, arguments=":1}"), ToolDelta(1, "call_b", "now", "{}")], finish="tool_calls"),
        ]
    )
    final = events[-1]["response"]
    assert [item["type"] for item in final["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert [item["id"] for item in final["output"]] == ["rs_00ab00", "msg_00ab01", "fc_00ab02", "fc_00ab03"]
    assert [item.get("call_id") for item in final["output"]] == [None, None, "call_a", "call_b"]
    assert [item.get("arguments") for item in final["output"]] == [None, None, '{"a":1}', "{}"]
    assert replayed(events) == final["output"]
    assert final["usage"]["input_tokens_details"] == {"cached_tokens": 2}


def test_an_item_that_the_limit_cut_is_incomplete_and_those_before_it_are_not() -> None:
    events = told([Piece(0, text="I"), Piece(0, calls=[ToolDelta(0, "call_a", "add", '{"a"')], finish="length")])
    final = events[-1]["response"]
    assert (events[-1]["type"], final["status"]) == ("response.incomplete", "incomplete")
    assert [item["status"] for item in final["output"]] == ["completed", "incomplete"]


def test_items_once_announced_do_not_change_afterwards() -> None:
    """What was sent must not share lists with what is still written."""
    events = told([Piece(0, text="a"), Piece(0, text="b", finish="stop")])
    assert next(e for e in events if e["type"] == "response.output_item.added")["item"]["content"] == []
    assert next(e for e in events if e["type"] == "response.content_part.added")["part"]["text"] == ""
    assert events[0]["response"]["output"] == []
