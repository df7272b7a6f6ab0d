"""Tools and reasoning at the chat door: fields, whole answers, streams, finish reasons, usage, log probabilities."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ai_engine.ports.grammar import Constraint
from ai_engine.ports.serving import GenerateRequest
from ai_engine.ports.text import ReplyForm, ToolChoice
from ai_engine.testing import ScriptedServing, answer
from tests.unit.api.doors import ByteText, Client, make_api, saying

TAGS = ("<think>", "</think>")
FORM = ReplyForm(reasoning=TAGS, calls="hermes")
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
TOOLS = [WEATHER, TIME]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ås"}}\n</tool_call>'
BOTH = f'<think>\nHm.\n</think>\n\nLet me look.\n{CALL}\n<tool_call>\n{{"name": "get_time"}}\n</tool_call>'
HI = [{"role": "user", "content": "Hi"}]


def client(text: str, *, form: ReplyForm = FORM, **options: Any) -> Client:
    return Client(make_api(saying(text, **options), text=ByteText(form=form)))


async def choice_of(text: str, *, form: ReplyForm = FORM, **fields: Any) -> dict[str, Any]:
    reply = await client(text, form=form).chat(**fields)
    assert reply.status == 200, reply.body
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


async def test_calls_of_a_whole_answer() -> None:
    choice = await choice_of(BOTH, tools=TOOLS)
    message = choice["message"]
    assert (message["content"], message["reasoning_content"], message["reasoning"]) == ("Let me look.", "Hm.", "Hm.")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "get_weather", "arguments": '{"city": "Ås"}'},
        {"name": "get_time", "arguments": "{}"},
    ]
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in message["tool_calls"])
    assert choice["finish_reason"] == "tool_calls"


async def test_content_is_null_beside_calls_only() -> None:
    assert (await choice_of(CALL, tools=TOOLS))["message"]["content"] is None
    message = (await choice_of("Hi", tools=TOOLS))["message"]
    assert message["content"] == "Hi"
    assert not {"tool_calls", "reasoning", "reasoning_content"} & message.keys()
    assert (await choice_of("<think>Hm", tools=TOOLS))["message"]["content"] == ""


async def test_without_tools_text_is_text() -> None:
    unused: list[dict[str, Any]] = [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}]
    for fields in unused:
        choice = await choice_of(CALL, **fields)
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")


async def test_finish_reasons() -> None:
    assert (await choice_of("Hi", tools=TOOLS))["finish_reason"] == "stop"
    assert (await choice_of(CALL, tools=TOOLS, tool_choice="required"))["finish_reason"] == "tool_calls"
    named = {"type": "function", "function": {"name": "get_weather"}}
    choice = await choice_of(CALL, tools=TOOLS, tool_choice=named)
    assert choice["finish_reason"] == "stop", "as OpenAI says of a call that was demanded by name"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    cut = await choice_of(CALL, tools=TOOLS, max_tokens=59)
    assert cut["finish_reason"] == "length", "a client must not run a call that was cut"
    assert cut["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "'
    stopped = await choice_of(f"{CALL}\nDone. STOP no", tools=TOOLS, stop="STOP")
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("tool_calls", "STOP")


async def test_one_call_at_a_time_ends_the_answer_and_the_work() -> None:
    serving = saying(BOTH + " and much more")
    reply = await Client(make_api(serving, text=ByteText(form=FORM))).chat(tools=TOOLS, parallel_tool_calls=False)
    body = reply.json()
    choice = body["choices"][0]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]
    assert choice["finish_reason"] == "tool_calls"
    assert "stop_reason" not in choice
    assert body["usage"]["completion_tokens"] == len(BOTH.encode()[: BOTH.encode().index(b"}}") + 2])
    assert serving.cancelled == [(serving.requests[0].request_id, 0)]


async def test_stream_indexes_names_and_arguments() -> None:
    reply = await client(BOTH, tokens_per_chunk=3).chat(tools=TOOLS, stream=True)
    choices = [event["choices"][0] for event in reply.events()]
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert sum("role" in delta for delta in deltas) == 1
    assert "".join(delta.get("content", "") for delta in deltas) == "Let me look."
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == "Hm."
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert all(delta["tool_calls"] for delta in deltas if "tool_calls" in delta), "no empty list"
    firsts = [call for call in calls if "id" in call]
    assert [(call["index"], call["function"]["name"]) for call in firsts] == [(0, "get_weather"), (1, "get_time")]
    assert all("name" not in call["function"] and "type" not in call for call in calls if "id" not in call)
    assert all(isinstance(call["function"]["arguments"], str) for call in calls)
    joined = {i: "".join(c["function"]["arguments"] for c in calls if c["index"] == i) for i in (0, 1)}
    assert joined == {0: '{"city": "Ås"}', 1: "{}"}
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]
    assert deltas[-1] == {}
    whole = (await client(BOTH, tokens_per_chunk=3).chat(tools=TOOLS)).json()["choices"][0]["message"]
    assert [call["id"] for call in whole["tool_calls"]] == [call["id"] for call in firsts], "as in the whole answer"


async def test_ids_differ_between_choices_and_answers() -> None:
    api = client(BOTH)
    ids: list[str] = []
    for _ in range(2):
        for choice in (await api.chat(tools=TOOLS, n=3)).json()["choices"]:
            ids += [call["id"] for call in choice["message"]["tool_calls"]]
    assert len(ids) == len(set(ids)) == 12


async def test_usage_counts_the_reasoning() -> None:
    usage = (await client(BOTH).chat(tools=TOOLS, n=2)).json()["usage"]
    thought = len("<think>\nHm.\n</think>")
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 2 * thought}
    assert usage["completion_tokens"] == 2 * len(BOTH.encode())
    assert "completion_tokens_details" not in (await client("Hi", form=ReplyForm()).chat()).json()["usage"]


async def test_logprobs_go_with_the_visible_text() -> None:
    for stream in (False, True):
        reply = await client(BOTH).chat(tools=TOOLS, logprobs=True, stream=stream)
        choices = [event["choices"][0] for event in reply.events()] if stream else reply.json()["choices"]
        entries = [entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
        assert "".join(entry["token"] for entry in entries) == "Let me look."


async def test_stops_end_visible_text_only() -> None:
    choice = await choice_of("<think>a, b</think>" + CALL + "\nx, y", tools=TOOLS, stop=[", ", '": "'])
    assert choice["message"]["reasoning"] == "a, b"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Ås"}'
    assert (choice["message"]["content"], choice["stop_reason"]) == ("x", ", ")


async def test_what_is_told_to_the_model() -> None:
    text = ByteText(form=FORM)
    api = Client(make_api(saying("Hi"), text=text))
    await api.chat(tools=TOOLS, reasoning_effort="low")
    told = text.template_calls[-1]
    assert ([tool["function"]["name"] for tool in told["tools"]], told["reasoning_effort"]) == (
        ["get_weather", "get_time"],
        "low",
    )
    assert told["tool_choice"] == ToolChoice()
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TIME]}}
    await api.chat(tools=TOOLS, tool_choice=allowed, parallel_tool_calls=False)
    told = text.template_calls[-1]
    assert told["tool_choice"] == ToolChoice(mode="required", allowed=("get_time",), parallel=False)
    await api.chat(messages=[*HI, {"role": "assistant", "content": "a", "reasoning": "r"}, *HI])
    assert text.template_calls[-1]["messages"][1]["reasoning_content"] == "r"


async def test_the_constraint_of_a_call_reaches_the_engine() -> None:
    made = Constraint(kind="lark", text="start: /x/", param="tools")
    serving = saying("x")
    text = ByteText(form=ReplyForm(calls="hermes", constraint=made))
    await Client(make_api(serving, text=text)).chat(tools=TOOLS, tool_choice="required")
    assert serving.requests[0].constraint == made


async def test_what_the_model_cannot_do_is_said() -> None:
    form = ReplyForm(warnings=("reasoning_effort: this model has no reasoning part, so it is not used.",))
    assert "reasoning_effort" in (await client("Hi", form=form).chat(reasoning_effort="low")).json()["warnings"][0]
    strict = Client(make_api(saying("Hi"), text=ByteText(form=form), strict=True))
    reply = await strict.chat(reasoning_effort="low")
    assert (reply.status, reply.json()["error"]["param"]) == (400, "reasoning_effort")


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [function(name="a b")]}, "tools[0].function.name"),
        ({"tools": [function(name="")]}, "tools[0].function.name"),
        ({"tools": [function(name="x" * 65)]}, "tools[0].function.name"),
        ({"tools": [TIME, {"type": "function", "function": {}}]}, "tools[1].function.name"),
        ({"tools": [TIME, TIME]}, "tools[1].function.name"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [function(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [function(strict="yes")]}, "tools[0].function.strict"),
        ({"tools": [function(description=1)]}, "tools[0].function.description"),
        ({"tools": {}}, "tools"),
        ({"tools": [function(name=f"f{i}") for i in range(129)]}, "tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": function(name="g")}, "tool_choice.function.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": TOOLS, "tool_choice": 3}, "tool_choice"),
        (
            {
                "tools": TOOLS,
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [WEATHER, function()]},
                },
            },
            "tool_choice.allowed_tools.tools[1].function.name",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": function()}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"messages": [*HI, {"role": "tool", "content": "r"}]}, "messages[1].tool_call_id"),
        ({"messages": [*HI, {"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages[1].tool_calls[0].function"),
    ],
)
async def test_bad_fields_are_named(fields: dict[str, Any], param: str) -> None:
    reply = await client("Hi").chat(**fields)
    assert (reply.status, reply.json()["error"]["param"]) == (400, param)


async def test_choices_take_turns_in_calls() -> None:
    """Two choices that call at once: each has its own indexes."""

    def script(request: GenerateRequest) -> list[Any]:
        parts = [answer(request, tuple(CALL.encode()), index=i, tokens_per_chunk=5) for i in range(2)]
        return [chunk for pair in zip(*parts, strict=True) for chunk in pair]

    reply = await Client(make_api(ScriptedServing(script), text=ByteText(form=FORM))).chat(
        tools=TOOLS, n=2, stream=True
    )
    for index in range(2):
        choices = [c for event in reply.events() for c in event["choices"] if c["index"] == index]
        calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
        assert {call["index"] for call in calls} == {0}
        assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Ås"}'
        assert choices[-1]["finish_reason"] == "tool_calls"


# --- every door ---

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
STRUCTURED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {"name": "o", "schema": SCHEMA}}},
    RESPONSES: {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "o", "schema": SCHEMA}}},
    MESSAGES: {
        "messages": HI,
        "max_tokens": 99,
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    },
    "/v1/completions": {"prompt": "Hi", "max_tokens": 99, "structured_outputs": {"json": SCHEMA}},
}


@pytest.mark.parametrize("path", STRUCTURED)
@pytest.mark.parametrize("inside", [False, True])
async def test_a_schema_begins_after_the_reasoning_at_every_door(path: str, inside: bool) -> None:
    serving = saying("x</think>{}")
    form = ReplyForm(reasoning=TAGS, inside_reasoning=inside)
    reply = await Client(make_api(serving, text=ByteText(form=form)))("POST", path, {"model": "m", **STRUCTURED[path]})
    assert reply.status == 200, reply.body
    constraint = serving.requests[0].constraint
    assert constraint is not None
    assert constraint.kind == "json_schema"
    if path == "/v1/completions":  # plain text has no reasoning part
        assert (constraint.after, constraint.opens) == ("", "")
    else:
        assert (constraint.after, constraint.opens) == (TAGS[1], "" if inside else TAGS[0])


CALLING: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "tools": TOOLS},
    RESPONSES: {"input": "Hi", "tools": [{"type": "function", **tool["function"]} for tool in TOOLS]},
    MESSAGES: {
        "messages": HI,
        "max_tokens": 400,
        "tools": [{"name": tool["function"]["name"], "input_schema": {"type": "object"}} for tool in TOOLS],
    },
}


def said(path: str, body: dict[str, Any]) -> tuple[str, str, list[Any]]:
    """(reasoning, text, calls) of an answer in the shapes of its door."""
    if path == CHAT:
        message = body["choices"][0]["message"]
        calls = [
            (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]
        ]
        return message["reasoning"], message["content"], calls
    if path == RESPONSES:
        items = body["output"]
        calls = [(item["name"], json.loads(item["arguments"])) for item in items if item["type"] == "function_call"]
        texts = {item["type"]: item["content"][0]["text"] for item in items if item["type"] != "function_call"}
        return texts["reasoning"], texts["message"], calls
    blocks = body["content"]
    calls = [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
    texts = {block["type"]: block.get("thinking") or block.get("text") for block in blocks}
    return texts["thinking"], texts["text"], calls


@pytest.mark.parametrize("path", CALLING)
@pytest.mark.parametrize("tokens_per_chunk", [1, 1000])
async def test_every_door_reads_the_same_calls(path: str, tokens_per_chunk: int) -> None:
    reply = await client(BOTH, tokens_per_chunk=tokens_per_chunk)("POST", path, {"model": "m", **CALLING[path]})
    assert reply.status == 200, reply.body
    wanted = [("get_weather", {"city": "Ås"}), ("get_time", {})]
    assert said(path, reply.json()) == ("Hm.", "Let me look.", wanted)


async def test_bytes_that_are_no_text_fail_nothing() -> None:
    """In the text, in the reasoning and in a call: U+FFFD, and the answer goes on."""
    head, tail = (
        b'<think>\xff</think>\xe2\x82 ok<tool_call>{"name": "get_time", "arguments": {"a": "\xf0\x9f',
        b'"}}</tool_call>',
    )
    serving = ScriptedServing(lambda request: answer(request, (*head, *tail)))
    for stream in (False, True):
        reply = await Client(make_api(serving, text=ByteText(form=FORM))).chat(tools=TOOLS, stream=stream)
        assert reply.status == 200
        if stream:
            assert reply.text() == "\ufffd ok"
            continue
        message = reply.json()["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("\ufffd", "\ufffd ok")
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": "\ufffd"}
