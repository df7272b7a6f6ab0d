"""The official OpenAI Python client against the Responses door, tools and structured answers, on a real socket.

Owns what that client must be able to do there; chat and text are in test_openai_client.py, whose servers these are, and
one whose model thinks and calls functions by a script.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from ai_engine.ports.clock import SystemClock
from ai_engine.ports.errors import AiEngineError, EngineError, InvalidApiKey, NotFound, Overloaded, RateLimitExceeded
from ai_engine.ports.text import ReplyForm
from ai_engine.testing import ScriptedServing, failing
from tests.integration.test_anthropic_client import calling
from tests.integration.test_openai_client import SERVERS, scripted_api, service_api
from tests.unit.api.doors import ByteText, InThread, make_api

ASKED = "Write one short sentence about the sea."
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
CHAT_TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
TOOLS: list[Any] = [{"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}]


@pytest.fixture(scope="module", params=SERVERS)
def server_url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "engine":
        yield request.getfixturevalue("server").url
        return
    server = InThread({"scripted": scripted_api, "service": service_api}[request.param]())
    yield server.url
    server.stop()


def connect(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture
def client(server_url: str) -> Iterator[OpenAI]:
    with connect(server_url) as made:
        yield made


@pytest.fixture
def model(client: OpenAI) -> str:
    return client.models.list().data[0].id


def test_a_response(client: OpenAI, model: str) -> None:
    done = client.responses.create(
        model=model, input=ASKED, instructions="Be brief.", max_output_tokens=12, temperature=0, store=False
    )
    assert done.output_text
    assert done.status in ("completed", "incomplete")
    assert done.usage is not None
    assert 0 < done.usage.output_tokens <= 12
    assert (done.model, done.instructions, done.temperature) == (model, "Be brief.", 0)


def test_the_sdk_s_own_accumulator_agrees_with_the_final_object(client: OpenAI, model: str) -> None:
    fields: dict[str, Any] = {"model": model, "input": ASKED, "max_output_tokens": 20, "extra_body": {"seed": 3}}
    whole = client.responses.create(**fields)
    with client.responses.stream(**fields) as stream:
        text, kinds = "", []
        for event in stream:
            kinds.append(event.type)
            if event.type == "response.output_text.delta":
                text += event.delta
        last = event
    assert last.type in ("response.completed", "response.incomplete")
    assert text == last.response.output_text == whole.output_text
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    raw = list(client.responses.create(**fields, stream=True))
    assert [event.sequence_number for event in raw] == list(range(len(raw)))
    ids = {event.item_id for event in raw if event.type == "response.output_text.delta"}
    assert raw[-1].type in ("response.completed", "response.incomplete")
    assert ids == {raw[-1].response.output[0].id}


def test_a_conversation_goes_back_as_items(client: OpenAI, model: str) -> None:
    first = client.responses.create(model=model, input=ASKED, max_output_tokens=8)
    items: Any = [{"role": "user", "content": ASKED}, *[item.to_dict() for item in first.output]]
    again = client.responses.create(
        model=model, input=[*items, {"role": "user", "content": "Again."}], max_output_tokens=4
    )
    assert again.output[0].type == "message"


def test_logprobs(client: OpenAI, model: str) -> None:
    done = client.responses.create(
        model=model, input=ASKED, max_output_tokens=4, top_logprobs=2, include=["message.output_text.logprobs"]
    )
    message = done.output[0]
    assert message.type == "message"
    part = message.content[0]
    assert part.type == "output_text"
    assert part.logprobs
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)


def test_counting(client: OpenAI, model: str) -> None:
    counted = client.responses.input_tokens.count(model=model, input=ASKED)
    done = client.responses.create(model=model, input=ASKED, max_output_tokens=1)
    assert done.usage is not None
    assert counted.input_tokens == done.usage.input_tokens > 0


def test_what_needs_a_store_is_refused(client: OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=model, input=ASKED, previous_response_id="resp_1")
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "unsupported_parameter")


# --- structured answers, parsed by the client: the real engine, whose worker enforces them ---


class Place(BaseModel):
    name: str = Field(max_length=20)
    visitors: int = Field(ge=0, le=1000)


@pytest.mark.integration
def test_pydantic_parse_in_chat_and_responses(request: pytest.FixtureRequest) -> None:
    with connect(request.getfixturevalue("server").url) as client:
        chat = client.chat.completions.parse(
            model="smollm2",
            messages=[{"role": "user", "content": "Name a place by the sea, as JSON."}],
            response_format=Place,
            max_tokens=80,
            temperature=0,
        )
        assert isinstance(chat.choices[0].message.parsed, Place)
        response = client.responses.parse(
            model="smollm2",
            input="Name a place by the sea, as JSON.",
            text_format=Place,
            max_output_tokens=80,
            temperature=0,
        )
        assert isinstance(response.output_parsed, Place)


# --- a model that thinks and calls ---


@pytest.fixture(scope="module")
def caller() -> Iterator[OpenAI]:
    text = ByteText(form=ReplyForm(reasoning=("<think>", "</think>"), calls="hermes"))
    server = InThread(make_api(ScriptedServing(calling), text=text, clock=SystemClock()))
    with connect(server.url) as made:
        yield made
    server.stop()


def test_tools_in_chat_whole_and_streamed(caller: OpenAI) -> None:
    fields: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": ASKED}], "tools": CHAT_TOOLS}
    whole = caller.chat.completions.create(**fields).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.tool_calls is not None
    with caller.chat.completions.stream(**fields) as stream:
        final = stream.get_final_completion().choices[0] if list(stream) else None
    assert final is not None
    assert final.message.tool_calls is not None
    for calls in (whole.message.tool_calls, final.message.tool_calls):
        found = [call.function for call in calls if call.type == "function"]
        assert [(call.name, json.loads(call.arguments)) for call in found] == [("add", {"a": 2}), ("add", {})]
        assert len({call.id for call in calls}) == 2


def test_reasoning_and_tools_in_responses_whole_and_streamed(caller: OpenAI) -> None:
    fields: dict[str, Any] = {"model": "m", "input": ASKED, "tools": TOOLS, "include": ["reasoning.encrypted_content"]}
    whole: Any = caller.responses.create(**fields)
    with caller.responses.stream(**fields) as stream:
        list(stream)
        final: Any = stream.get_final_response()
    for done in (whole, final):
        assert [item.type for item in done.output] == ["reasoning", "message", "function_call", "function_call"]
        calls = [item for item in done.output if item.type == "function_call"]
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [("add", {"a": 2}), ("add", {})]
    outputs: Any = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "4"}
        for item in whole.output
        if item.type == "function_call"
    ]
    back: Any = [{"role": "user", "content": ASKED}, *[item.to_dict() for item in whole.output], *outputs]
    assert caller.responses.create(model="m", input=back, tools=TOOLS).output


# --- failures ---

FAILURES: list[tuple[type[AiEngineError], type[openai.APIStatusError]]] = [
    (InvalidApiKey, openai.AuthenticationError),
    (NotFound, openai.NotFoundError),
    (RateLimitExceeded, openai.RateLimitError),
    (Overloaded, openai.InternalServerError),
    (EngineError, openai.InternalServerError),
]


@pytest.mark.parametrize(("error", "expected"), FAILURES, ids=lambda value: value.__name__)
def test_failures_are_the_client_s_own_exceptions(
    error: type[AiEngineError], expected: type[openai.APIStatusError]
) -> None:
    server = InThread(make_api(ScriptedServing(refusal=error("it broke")), clock=SystemClock()))
    try:
        with connect(server.url) as client:
            for ask in (
                lambda: client.responses.create(model="m", input="Hi"),
                lambda: client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}]),
            ):
                with pytest.raises(expected, match="it broke") as caught:
                    ask()
                assert (caught.value.status_code, caught.value.code) == (error.http_status, error.code)
    finally:
        server.stop()


def test_a_failure_in_the_stream_is_told() -> None:
    server = InThread(make_api(ScriptedServing(lambda r: failing(r, b"Hello")), clock=SystemClock()))
    try:
        with connect(server.url) as client:
            last = list(client.responses.create(model="m", input="Hi", stream=True))[-1]
            assert last.type == "response.failed"
            assert last.response.error is not None
            assert last.response.error.message == "the step failed"
            stream = client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "Hi"}], stream=True
            )
            with pytest.raises(openai.APIError, match="the step failed"):
                list(stream)
    finally:
        server.stop()
