"""Tools and reasoning through the official OpenAI client: a scripted answer that the client accumulates, and SmolLM2,
whose template knows no functions, made to call by grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from openai import OpenAI

from ai_engine.ports.clock import SystemClock
from ai_engine.ports.text import ReplyForm
from ai_engine.testing.process import Server
from tests.conformance.tool_cases import CASES
from tests.unit.api.doors import ByteText, InThread, make_api, saying

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"enum": ["celsius", "fahrenheit"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city", "unit", "days"],
            "additionalProperties": False,
        },
    },
}
TIME: Any = {"type": "function", "function": {"name": "get_time", "description": "The time."}}
ASK: list[Any] = [{"role": "user", "content": "What is the weather in Oslo in the next three days?"}]


ANSWER = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 30}, "sure": {"type": "boolean"}},
    "required": ["name", "sure"],
    "additionalProperties": False,
}


class Weather(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    city: str
    unit: str
    days: int


@pytest.fixture
def scripted(request: pytest.FixtureRequest) -> Iterator[OpenAI]:
    """The official client against a server that says the text of the parameter."""
    form, text = request.param
    serving = saying(text, tokens_per_chunk=3)
    server = InThread(make_api(serving, text=ByteText(form=form), clock=SystemClock()))
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
    server.stop()


TWO = next(case for case in CASES if case.form == "hermes" and len(case.calls) == 2 and case.content)
THOUGHT = ReplyForm(reasoning=("<think>", "</think>"), calls="hermes")


@pytest.mark.parametrize("scripted", [(THOUGHT, f"<think>\nHm.\n</think>\n\n{TWO.text}")], indirect=True)
def test_the_client_s_accumulator_has_what_the_whole_answer_has(scripted: OpenAI) -> None:
    tools: Any = [{"type": "function", "function": {"name": name}} for name, _ in TWO.calls]
    with scripted.chat.completions.stream(model="m", messages=ASK, tools=tools) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        streamed = stream.get_final_completion().choices[0]
    whole = scripted.chat.completions.create(model="m", messages=ASK, tools=tools).choices[0]
    assert [(event.index, event.name, event.arguments) for event in done] == [
        (index, *call) for index, call in enumerate(TWO.calls)
    ]
    for choice in (streamed, whole):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == TWO.content
        assert choice.message.model_extra is not None
        assert choice.message.model_extra["reasoning_content"] == "Hm."
        calls: Any = choice.message.tool_calls
        assert [(call.function.name, call.function.arguments) for call in calls] == list(TWO.calls)


SAID = '{"name": "get_weather", "arguments": {"city": "Oslo", "unit": "celsius", "days": 3}}'


@pytest.mark.parametrize("scripted", [(ReplyForm(calls="generic"), SAID)], indirect=True)
def test_the_client_parses_arguments_into_a_model(scripted: OpenAI) -> None:
    tool = openai.pydantic_function_tool(Weather, name="get_weather")
    parsed = scripted.chat.completions.parse(model="m", messages=ASK, tools=[tool])
    calls = parsed.choices[0].message.tool_calls
    assert calls is not None
    assert calls[0].function.parsed_arguments == Weather(city="Oslo", unit="celsius", days=3)


@pytest.mark.parametrize("scripted", [(ReplyForm(calls="generic"), SAID)], indirect=True)
def test_a_bad_definition_is_a_bad_request(scripted: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        scripted.chat.completions.create(
            model="m", messages=ASK, tools=[{"type": "function", "function": {"name": "a b"}}]
        )
    assert (refused.value.param, refused.value.code) == ("tools[0].function.name", "invalid_value")


# --- the real small model ---


@pytest.fixture(scope="module")
def smollm2_client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


@pytest.mark.integration
@pytest.mark.parametrize("stream", [False, True])
def test_a_named_function_is_called_with_arguments_of_its_schema(smollm2_client: OpenAI, stream: bool) -> None:
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    fields: dict[str, Any] = {"model": "smollm2", "messages": ASK, "tools": [TIME, WEATHER], "tool_choice": named}
    for seed in range(3):
        fields |= {"seed": seed, "temperature": 1.0, "max_tokens": 200}
        if stream:
            with smollm2_client.chat.completions.stream(**fields) as events:
                choice: Any = events.get_final_completion().choices[0]
        else:
            choice = smollm2_client.chat.completions.create(**fields).choices[0]
        assert choice.finish_reason == "stop"
        assert not choice.message.content
        (call,) = choice.message.tool_calls
        assert call.function.name == "get_weather"
        assert 1 <= Weather.model_validate_json(call.function.arguments).days <= 7


@pytest.mark.integration
def test_a_required_call_is_made(smollm2_client: OpenAI) -> None:
    """Two functions, at a high temperature, with and without reasons to call: there are calls, and nothing else."""
    names = set()
    for seed, text in enumerate(("Hello!", "What time is it?", "Weather in Rome?", "Write a poem.")):
        choice = smollm2_client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": text}],
            tools=[TIME, WEATHER],
            tool_choice="required",
            parallel_tool_calls=False,
            seed=seed,
            temperature=1.5,
            max_tokens=200,
        ).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        calls: Any = choice.message.tool_calls
        (call,) = calls
        arguments = json.loads(call.function.arguments)
        names.add(call.function.name)
        if call.function.name == "get_weather":
            Weather.model_validate(arguments)
        else:
            assert arguments == {}
    assert names <= {"get_time", "get_weather"}


@pytest.mark.integration
def test_a_conversation_with_a_result_goes_on(smollm2_client: OpenAI) -> None:
    """The model reads the result; its template has neither calls nor tool turns."""
    call: Any = {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    messages: list[Any] = [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "It is 12:34."},
    ]
    choice = smollm2_client.chat.completions.create(
        model="smollm2", messages=messages, tools=[TIME], tool_choice="none", temperature=0, max_tokens=40
    ).choices[0]
    assert choice.message.content
    assert "12:34" in choice.message.content


@pytest.mark.integration
def test_a_schema_that_cannot_be_enforced_is_refused(smollm2_client: OpenAI) -> None:
    tool: Any = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "not": {"required": ["a"]}}},
    }
    with pytest.raises(openai.BadRequestError) as refused:
        smollm2_client.chat.completions.create(model="smollm2", messages=ASK, tools=[tool], tool_choice="required")
    assert refused.value.code == "invalid_json_schema"
    assert "not" in refused.value.message


@pytest.mark.integration
def test_json_as_asked_for_or_calls(smollm2_client: OpenAI) -> None:
    """With both, whatever the model chooses can be used."""
    answer: Any = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": ANSWER}}
    strict: Any = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    for seed, text in enumerate(("What is the weather in Rome?", "Who wrote Hamlet? Answer in JSON.")):
        choice: Any = smollm2_client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": text}],
            tools=[strict],
            response_format=answer,
            seed=seed,
            max_tokens=200,
        ).choices[0]
        if choice.message.tool_calls:
            assert choice.message.content is None
            for call in choice.message.tool_calls:
                Weather.model_validate_json(call.function.arguments)
        else:
            assert json.loads(choice.message.content).keys() == {"name", "sure"}
