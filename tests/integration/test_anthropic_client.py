"""The official Anthropic Python client against the Messages door on a real socket.

Owns what that client must be able to do; the servers are those of test_openai_client.py, and one whose model thinks and
calls functions by a script.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import pytest
from anthropic import Anthropic
from pydantic import BaseModel

from ai_engine.ports.clock import SystemClock
from ai_engine.ports.errors import (
    AiEngineError,
    BodyTooLarge,
    EngineError,
    InvalidApiKey,
    InvalidRequest,
    NotFound,
    Overloaded,
    RateLimitExceeded,
)
from ai_engine.ports.serving import GenerateRequest
from ai_engine.ports.text import ReplyForm
from ai_engine.testing import ScriptedServing, answer, failing
from tests.integration.test_openai_client import SERVERS, scripted_api, service_api
from tests.unit.api.doors import ByteText, InThread, make_api

HI: list[Any] = [{"role": "user", "content": "Write one short sentence about the sea."}]
TOOLS: list[Any] = [
    {"name": "add", "description": "Adds", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
]
CALLS = (
    '<think>Two and two.</think>I add.<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
    '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
)


@pytest.fixture(scope="module", params=SERVERS)
def server_url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "engine":
        yield request.getfixturevalue("server").url
        return
    server = InThread({"scripted": scripted_api, "service": service_api}[request.param]())
    yield server.url
    server.stop()


def connect(url: str) -> Anthropic:
    return Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60)


@pytest.fixture
def client(server_url: str) -> Iterator[Anthropic]:
    with connect(server_url) as made:
        yield made


@pytest.fixture
def model(client: Anthropic) -> str:
    served: Any = client.get("/v1/models", cast_to=dict[str, Any])
    return str(served["data"][0]["id"])


def test_a_message(client: Anthropic, model: str) -> None:
    done = client.messages.create(
        model=model, max_tokens=12, system="Be brief.", messages=HI, extra_body={"temperature": 0}
    )
    [block] = done.content
    assert block.type == "text"
    assert block.text
    assert (done.role, done.model) == ("assistant", model)
    assert done.stop_reason in ("end_turn", "max_tokens")
    assert 0 < done.usage.output_tokens <= 12
    assert done._request_id


def test_a_stream_accumulates_to_the_same_message(client: Anthropic, model: str) -> None:
    fields: dict[str, Any] = {"model": model, "max_tokens": 30, "messages": HI, "extra_body": {"seed": 3}}
    whole = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert [block.to_dict() for block in final.content] == [block.to_dict() for block in whole.content]
    assert whole.content[0].type == "text"
    assert text == whole.content[0].text
    assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert final.usage.output_tokens == whole.usage.output_tokens
    raw = [event.type for event in client.messages.create(**fields, stream=True)]
    assert (raw[0], raw[1], raw[-2], raw[-1]) == (
        "message_start",
        "content_block_start",
        "message_delta",
        "message_stop",
    )


def test_a_stop_sequence_is_named_in_the_stream_too(client: Anthropic, model: str) -> None:
    fields: dict[str, Any] = {"model": model, "max_tokens": 20, "messages": HI, "extra_body": {"temperature": 0}}
    [block] = client.messages.create(**fields).content
    assert block.type == "text"
    stop = block.text[5:8]
    with client.messages.stream(**fields, stop_sequences=[stop, "\x01never"]) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", stop)
    [cut] = final.content
    assert cut.type == "text"
    assert cut.text == block.text[: block.text.index(stop)]


def test_counting(client: Anthropic, model: str) -> None:
    counted = client.messages.count_tokens(model=model, messages=HI, system="Be brief.")
    done = client.messages.create(model=model, max_tokens=1, messages=HI, system="Be brief.")
    cached = done.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == done.usage.input_tokens + cached > 0


def test_bad_requests(client: Anthropic, model: str) -> None:
    with pytest.raises(anthropic.NotFoundError) as gone:
        client.messages.create(model="claude-none", max_tokens=5, messages=HI)
    assert gone.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError, match="temperature: found 9"):
        client.messages.create(model=model, max_tokens=5, messages=HI, extra_body={"temperature": 9})
    image: Any = [{"type": "image", "source": {"type": "url", "url": "http://x"}}]
    with pytest.raises(anthropic.BadRequestError, match="image"):
        client.messages.create(model=model, max_tokens=5, messages=[{"role": "user", "content": image}])


# --- a model that thinks and calls ---


def calling(request: GenerateRequest) -> list[Any]:
    return answer(request, tuple(CALLS.encode()), tokens_per_chunk=3)


@pytest.fixture(scope="module")
def caller() -> Iterator[Anthropic]:
    text = ByteText(form=ReplyForm(reasoning=("<think>", "</think>"), calls="hermes"))
    server = InThread(make_api(ScriptedServing(calling), text=text, clock=SystemClock()))
    with connect(server.url) as made:
        yield made
    server.stop()


def test_thinking_and_tools_whole_and_streamed(caller: Anthropic) -> None:
    fields: dict[str, Any] = {"model": "m", "max_tokens": 400, "messages": HI, "tools": TOOLS}
    whole = caller.messages.create(**fields, tool_choice={"type": "auto"})
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole.stop_reason == "tool_use"
    thinking, text, first, second = whole.content
    assert thinking.type == "thinking"
    assert thinking.thinking == "Two and two."
    assert text.type == "text"
    assert text.text.strip() == "I add."
    assert first.type == second.type == "tool_use"
    assert (first.name, first.input, second.input) == ("add", {"a": 2}, {})
    assert first.id != second.id
    with caller.messages.stream(**fields) as stream:
        inputs = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert "".join(inputs).replace(" ", "") == '{"a":2}{}'

    def without_ids(message: Any) -> list[Any]:
        return [block.model_dump(exclude={"id"}) for block in message.content]

    assert without_ids(final) == without_ids(whole)


def test_a_turn_with_results_and_thinking_goes_back(caller: Anthropic) -> None:
    whole = caller.messages.create(model="m", max_tokens=400, messages=HI, tools=TOOLS)
    results: Any = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "4"}
        for block in whole.content
        if block.type == "tool_use"
    ]
    messages: Any = [*HI, {"role": "assistant", "content": whole.content}, {"role": "user", "content": results}]
    assert caller.messages.create(model="m", max_tokens=400, messages=messages, tools=TOOLS).content


# --- failures ---

FAILURES: list[tuple[type[AiEngineError], type[anthropic.APIStatusError]]] = [
    (InvalidRequest, anthropic.BadRequestError),
    (InvalidApiKey, anthropic.AuthenticationError),
    (NotFound, anthropic.NotFoundError),
    (BodyTooLarge, anthropic.RequestTooLargeError),
    (RateLimitExceeded, anthropic.RateLimitError),
    (Overloaded, anthropic.InternalServerError),
    (EngineError, anthropic.InternalServerError),
]


@pytest.mark.parametrize(("error", "expected"), FAILURES, ids=lambda value: value.__name__)
def test_failures_are_the_client_s_own_exceptions(
    error: type[AiEngineError], expected: type[anthropic.APIStatusError]
) -> None:
    server = InThread(make_api(ScriptedServing(refusal=error("it broke")), clock=SystemClock()))
    try:
        with connect(server.url) as client, pytest.raises(expected, match="it broke") as caught:
            client.messages.create(model="m", max_tokens=5, messages=HI)
        assert caught.value.status_code == error.http_status
    finally:
        server.stop()


def test_a_failure_in_the_stream_is_raised_too() -> None:
    server = InThread(make_api(ScriptedServing(lambda r: failing(r, b"Hello")), clock=SystemClock()))
    try:
        with (
            connect(server.url) as client,
            pytest.raises(anthropic.APIStatusError, match="the step failed"),
            client.messages.stream(model="m", max_tokens=50, messages=HI) as stream,
        ):
            for _ in stream:
                pass
    finally:
        server.stop()


# --- what the worker enforces: the real engine ---


class Place(BaseModel):
    """The client takes bounds out of the schemas it sends, so this has none that it could."""

    kind: Literal["beach", "harbour"]
    warm: bool


@pytest.mark.integration
def test_a_pydantic_answer_and_a_required_call_on_the_engine(request: pytest.FixtureRequest) -> None:
    asked: list[Any] = [{"role": "user", "content": "Name a place by the sea."}]
    with connect(request.getfixturevalue("server").url) as client:
        done = client.messages.parse(
            model="smollm2", max_tokens=80, messages=asked, output_format=Place, extra_body={"temperature": 0}
        )
        assert isinstance(done.parsed_output, Place)
        called = client.messages.create(
            model="smollm2",
            max_tokens=80,
            messages=asked,
            tools=[{"name": "visit", "input_schema": Place.model_json_schema(), "strict": True}],
            tool_choice={"type": "tool", "name": "visit"},
            extra_body={"temperature": 0},
        )
    [call] = [block for block in called.content if block.type == "tool_use"]
    assert (call.name, called.stop_reason) == ("visit", "tool_use")
    assert Place.model_validate(call.input)
