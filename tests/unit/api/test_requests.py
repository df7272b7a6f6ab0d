"""Fields in, SamplingParams and prompts out: ranges, what is refused, what is only warned about; answers' shapes."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from ai_engine.ports.serving import Chunk, GenerateRequest, TokenLogprob, Usage
from ai_engine.ports.text import Encoded
from ai_engine.testing import ScriptedServing, answer
from ai_engine.testing.serving import fake_logprob
from ai_engine.testing.text import BOS_ID
from tests.unit.api.doors import MODEL, ByteText, Reply, client, saying

MESSAGE = {"role": "user", "content": "Hi"}


def error_of(reply: Reply, status: int = 400) -> dict[str, Any]:
    assert reply.status == status, reply.body
    assert set(reply.json()) == {"error"}
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["code"], str)
    return error


async def sent(fields: dict[str, Any], *, chat: bool = True, **options: Any) -> GenerateRequest:
    """The request that serving got."""
    serving = ScriptedServing()
    door = client(serving, **options)
    reply = await (door.chat(**fields) if chat else door.complete(**fields))
    assert reply.status == 200, reply.body
    return serving.requests[0]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "logprobs": None, "ignore_eos": False}),
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 40.0, "min_p": 0.1}, {"top_k": 40, "min_p": 0.1}),
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"top_p": 0}, {"top_p": 1.0, "top_k": 1}),
        ({"presence_penalty": -2, "frequency_penalty": 2}, {"presence_penalty": -2.0, "frequency_penalty": 2.0}),
        ({"logit_bias": {"7": -100, "8": 100}}, {"logit_bias": {7: -100.0, 8: 100.0}}),
        ({"seed": 42}, {"seed": 42}),
        ({"seed": -(1 << 63)}, {"seed": (1 << 63) - 16}),
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"max_completion_tokens": 6, "max_tokens": 5}, {"max_tokens": 6}),
        ({"min_tokens": 3}, {"min_tokens": 3}),
        ({"ignore_eos": True, "stop_token_ids": [1, 2]}, {"ignore_eos": True, "stop_token_ids": (1, 2)}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 20}, {"logprobs": 20}),
        ({"logprobs": False}, {"logprobs": None}),
        (dict.fromkeys(("temperature", "top_p", "n", "stop", "seed", "tools", "stream")), {"temperature": 1.0}),
    ],
    ids=str,
)  # fmt: skip
async def test_chat_fields_become_sampling_params(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    params = (await sent(fields)).params
    assert {name: getattr(params, name) for name in expected} == expected
    assert params.seed is not None


async def test_chat_defaults_to_the_room_left_and_completions_to_16() -> None:
    chat = await sent({})
    assert chat.params.max_tokens == MODEL.max_context - len(chat.prompt)
    assert (await sent({"prompt": "Hi"}, chat=False)).params.max_tokens == 16
    near = await sent({"prompt": "x" * 505}, chat=False)
    assert near.params.max_tokens == 7
    assert (await sent({"prompt": "Hi", "max_completion_tokens": 30}, chat=False)).params.max_tokens == 30


async def test_defaults_of_the_model_apply_unless_the_request_says_otherwise() -> None:
    model = msgspec.structs.replace(MODEL, defaults={"temperature": 0.6, "top_k": 20.0, "top_p": 0.95})
    params = (await sent({"top_p": 0.5}, model=model)).params
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 20, 0.5)
    reply = await client(model=model).chat(return_sampling_params=True)
    assert reply.json()["sampling_params"]["temperature"] == 0.6


async def test_seeds_are_drawn_when_absent_and_differ() -> None:
    serving = ScriptedServing()
    door = client(serving)
    await door.chat()
    await door.chat()
    seeds = [request.params.seed for request in serving.requests]
    assert None not in seeds
    assert len(set(seeds)) == 2


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temperature": 2.5}, "temperature", "found 2.5, expected a number from 0 to 2"),
        ({"temperature": "1"}, "temperature", "found the string '1'"),
        ({"top_p": 1.1}, "top_p", "from 0 to 1"),
        ({"n": 0}, "n", "found 0, expected an integer from 1 to 16"),
        ({"n": 17}, "n", "found 17"),
        ({"n": True}, "n", "found true"),
        ({"max_tokens": 0}, "max_tokens", "found 0"),
        ({"max_tokens": 1.5}, "max_tokens", "found 1.5"),
        ({"seed": 1 << 64}, "seed", "expected an integer"),
        ({"stop": ["a"] * 17}, "stop", "found 17 items, expected 0 to 16"),
        ({"stop": ""}, "stop", "0 characters"),
        ({"stop": ["a", 1]}, "stop[1]", "found 1"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a", "token id from 0 to 259"),
        ({"logit_bias": {"260": 1}}, "logit_bias.260", "token id from 0 to 259"),
        ({"logit_bias": {"07": 1}}, "logit_bias.07", "token id from 0 to 259"),
        ({"top_k": 1 << 31}, "top_k", "from -1 to 2147483647"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty", "from 0.01 to 100"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1", "from -100 to 100"),
        ({"stop_token_ids": [260]}, "stop_token_ids[0]", "from 0 to 259"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "from 0 to 20"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs: true"),
        ({"logprobs": 1}, "logprobs", "found 1, expected true or false"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "found 5, expected at most the maximum, 4"),
        ({"min_tokens": 512}, "min_tokens", "found 512, expected at most the maximum, "),
        ({"messages": []}, "messages", "found 0 items"),
        ({"messages": None}, "messages", "found null"),
        ({"messages": "Hi"}, "messages", "found the string 'Hi', expected an array"),
        ({"messages": [MESSAGE, 5]}, "messages[1]", "found 5, expected an object"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "found nothing"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "found the string 'robot'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "found nothing"),
        ({"messages": [MESSAGE, MESSAGE, {"role": "user", "content": 3}]}, "messages[2].content", "found 3"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "nothing"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]", "expected an object"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "found nothing"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "exclude"),
    ],
    ids=str,
)
async def test_bad_values_name_field_found_and_expected(fields: dict[str, Any], param: str, words: str) -> None:
    error = error_of(await client().chat(**fields))
    assert error["param"] == param
    assert words in error["message"]
    assert error["code"] == "invalid_value"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [{}]}, "functions"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0].type"),
    ],
    ids=str,
)
async def test_what_is_not_enforced_is_refused(fields: dict[str, Any], param: str) -> None:
    error = error_of(await client().chat(**fields))
    assert error["code"] == "unsupported_parameter"
    assert error["param"] == param


NEUTRAL: dict[str, Any] = {
    "response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "functions": [], "modalities": ["text"],
    "parallel_tool_calls": True, "store": False, "service_tier": "auto", "stream_options": None,
}  # fmt: skip


async def test_values_that_ask_for_nothing_pass_in_silence() -> None:
    reply = await client().chat(**NEUTRAL)
    assert reply.status == 200
    assert "warnings" not in reply.json()


@pytest.mark.parametrize("name", ["user", "metadata", "store", "prediction", "made_up"])
async def test_unused_and_unknown_fields_warn_or_fail_when_strict(name: str) -> None:
    value: Any = {"metadata": {"a": "b"}, "store": True}.get(name, "low")
    warnings = (await client().chat(**{name: value})).json()["warnings"]
    assert [warning.partition(":")[0] for warning in warnings] == [name]
    error = error_of(await client(strict=True).chat(**{name: value}))
    assert error["param"] == name


async def test_max_completion_tokens_beats_max_tokens_with_a_warning() -> None:
    reply = await client().chat(max_tokens=3, max_completion_tokens=2)
    assert reply.json()["usage"]["completion_tokens"] == 2
    assert reply.json()["warnings"] == ["max_tokens: max_completion_tokens is used instead."]


async def test_context_overflow_names_the_three_numbers() -> None:
    error = error_of(await client().chat(max_tokens=500))
    assert error["code"] == "context_length_exceeded"
    assert all(number in error["message"] for number in ("512", "21", "500"))
    error = error_of(await client().complete(prompt="x" * 512))
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "prompt"


async def test_messages_reach_the_template_as_they_should() -> None:
    text = ByteText()
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
        {"role": "assistant", "content": ""},
    ]
    reply = await client(text=text).chat(messages=messages, chat_template_kwargs={"enable_thinking": False})
    assert reply.status == 200, reply.body
    seen = text.template_calls[0]
    assert [m["content"] for m in seen["messages"]] == ["Be brief.", "a\nb", None, "4", ""]
    assert seen["messages"][2]["tool_calls"] == [call]
    assert seen["kwargs"] == {"enable_thinking": False}
    assert seen["add_generation_prompt"] is True


async def test_a_template_that_refuses_is_a_400() -> None:
    class Refusing(ByteText):
        async def encode_chat(self, messages: Any, **options: Any) -> Any:
            from ai_engine.ports.errors import InvalidRequest

            raise InvalidRequest("roles must alternate", param="messages")

    error = error_of(await client(text=Refusing()).chat())
    assert (error["code"], error["param"]) == ("invalid_request", "messages")


# --- models ---


async def test_models_list_by_id_with_slashes_and_unknown() -> None:
    door = client()
    listed = (await door("GET", "/v1/models")).json()
    assert listed["object"] == "list"
    assert [m["id"] for m in listed["data"]] == ["m", "org/name", "gpt-4o"]
    assert listed["data"][0]["max_model_len"] == 512
    assert type(listed["data"][0]["created"]) is int
    assert (await door("GET", "/v1/models/org/name")).json()["id"] == "org/name"
    assert error_of(await door("GET", "/v1/models/no/such"), 404)["code"] == "model_not_found"
    error = error_of(await door.chat(model="no-such"), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


async def test_the_answer_names_the_model_as_asked_for() -> None:
    assert (await client().chat(model="org/name")).json()["model"] == "org/name"
    assert (await client().chat(model=None)).json()["model"] == "m"
    any_name = msgspec.structs.replace(MODEL, aliases=("*",))
    assert (await client(model=any_name).chat(model="gpt-9")).json()["model"] == "gpt-9"
    assert len((await client(model=any_name)("GET", "/v1/models")).json()["data"]) == 1


# --- answers ---


async def test_chat_answer_has_openai_s_shape() -> None:
    body = (await client(saying("Hello")).chat()).json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    assert (choice["finish_reason"], choice["index"], choice["logprobs"]) == ("stop", 0, None)
    assert body["usage"] == {
        "prompt_tokens": 21,
        "completion_tokens": 5,
        "total_tokens": 26,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_usage_counts_prompts_once_and_sums_choices_and_reports_the_cache() -> None:
    def script(request: GenerateRequest) -> list[Any]:
        chunks = [c for i in range(request.n) for c in answer(request, b"abc", index=i)]
        return [msgspec.structs.replace(c, usage=Usage(c.usage.prompt_tokens, 3, 1)) if c.usage else c for c in chunks]

    usage = (await client(ScriptedServing(script)).complete(prompt=["Hi", "Hello"], n=2)).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (7, 12, 19)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_n_times_prompts_indexing(stream: bool) -> None:
    def script(request: GenerateRequest) -> list[Any]:
        said = bytes(request.prompt)
        return [c for i in range(request.n) for c in answer(request, said + b"%d" % i, index=i)]

    reply = await client(ScriptedServing(script)).complete(prompt=["a", "b", "c"], n=2, stream=stream)
    wanted = ["a0", "a1", "b0", "b1", "c0", "c1"]
    if stream:
        assert [reply.text(i) for i in range(6)] == wanted
    else:
        assert [c["text"] for c in reply.json()["choices"]] == wanted
        assert [c["index"] for c in reply.json()["choices"]] == list(range(6))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hi", [[BOS_ID, 72, 105]]),
        (["Hi", "a"], [[BOS_ID, 72, 105], [BOS_ID, 97]]),
        ([72, 105], [[72, 105]]),
        ([72.0], [[72]]),
        ([[72], [105, 1]], [[72], [105, 1]]),
    ],
    ids=str,
)
async def test_prompts_of_every_kind_and_no_bos_for_token_ids(prompt: Any, expected: list[list[int]]) -> None:
    serving = ScriptedServing()
    reply = await client(serving, text=ByteText(add_bos=True)).complete(prompt=prompt)
    assert reply.status == 200, reply.body
    assert [request.prompt for request in serving.requests] == expected


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        (None, "prompt"),
        ("", "prompt"),
        (5, "prompt"),
        ({}, "prompt"),
        ([[]], "prompt[0]"),
        ([True], "prompt"),
        (["a", 1], "prompt[1]"),
        ([1, "a"], "prompt[1]"),
        ([1, 260], "prompt[1]"),
        ([-1], "prompt[0]"),
        ([[1], [300]], "prompt[1][0]"),
        (["a"] * 257, "prompt"),
    ],
    ids=lambda v: str(v)[:20],
)
async def test_bad_prompts_are_named(prompt: Any, param: str) -> None:
    assert error_of(await client().complete(prompt=prompt))["param"] == param


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"best_of": 2}, "best_of", "unsupported_parameter"),
        ({"logprobs": 6}, "logprobs", "invalid_value"),
        ({"logprobs": True}, "logprobs", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ],
)
async def test_completion_fields_that_fail(fields: dict[str, Any], param: str, code: str) -> None:
    error = error_of(await client().complete(**fields))
    assert (error["param"], error["code"]) == (param, code)


async def test_completion_fields_that_ask_for_nothing_pass() -> None:
    reply = await client().complete(suffix="", best_of=1, echo=False, logprobs=None)
    assert reply.status == 200
    assert "warnings" not in reply.json()


async def test_the_default_of_16_warns_only_when_it_cut() -> None:
    long = (await client(saying("x" * 40)).complete()).json()
    assert long["choices"][0]["finish_reason"] == "length"
    assert long["warnings"] == ["max_tokens: not given, so the default of 16 cut the text. Fix: set max_tokens."]
    assert "warnings" not in (await client(saying("short")).complete()).json()
    assert "warnings" not in (await client(saying("x" * 40)).complete(max_tokens=16)).json()


# --- log probabilities and echo ---


def scored(request: GenerateRequest) -> list[Any]:
    """Prompt log probabilities in two chunks, then "ok"."""
    if request.params.prompt_logprobs is None:
        return answer(request, b"ok")
    found = [fake_logprob(token, request.params.prompt_logprobs) for token in request.prompt[1:]]
    head = [Chunk(request_id=request.request_id, prompt_logprobs=part) for part in (found[:1], found[1:])]
    rest = [c for i in range(request.n) for c in answer(request, b"ok", index=i)]
    return [*head, *rest]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs_scores_the_prompt(stream: bool) -> None:
    """What evaluation harnesses send: max_tokens 1, echo, logprobs 1."""
    reply = await client(ScriptedServing(scored)).complete(
        prompt=[[72, 105, 33]], max_tokens=1, echo=True, logprobs=1, temperature=0, stream=stream
    )
    choices = [c for e in reply.events() for c in e["choices"]] if stream else reply.json()["choices"]
    logprobs = choices[0]["logprobs"]
    assert choices[0]["text"] == "Hi!o"
    assert logprobs["tokens"] == ["H", "i", "!", "o"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"] == [None, {"i": -0.5}, {"!": -0.5}, {"o": -0.5}]
    assert logprobs["text_offset"] == [0, 1, 2, 3]


async def test_max_tokens_0_with_echo_only_scores() -> None:
    reply = await client(ScriptedServing(scored)).complete(prompt="Hi", max_tokens=0, echo=True, logprobs=0)
    body = reply.json()
    assert body["choices"][0]["text"] == "Hi"
    assert body["choices"][0]["logprobs"]["tokens"] == ["H", "i"]
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0
    assert "warnings" not in body


async def test_echo_of_text_with_several_choices_and_control_tokens() -> None:
    reply = await client(ScriptedServing(scored), text=ByteText(add_bos=True)).complete(
        prompt="h\u00e9", n=2, echo=True, logprobs=2
    )
    for choice in reply.json()["choices"]:
        assert choice["text"] == "h\u00e9ok"
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == ["<bos>", "h", "\ufffd", "\ufffd", "o", "k"]
        assert logprobs["text_offset"] == [0, 0, 1, 1, 2, 3]
        assert logprobs["token_logprobs"][:2] == [None, -0.5]


async def test_completion_logprobs_0_lists_the_chosen_token() -> None:
    logprobs = (await client(saying("ab")).complete(logprobs=0)).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-0.5, -0.5]
    assert logprobs["top_logprobs"] == [{"a": -0.5}, {"b": -0.5}]
    assert logprobs["text_offset"] == [2, 3]  # from the prompt's start, echoed or not


async def test_top_logprobs_with_the_same_text_keep_the_likelier() -> None:
    def script(request: GenerateRequest) -> list[Any]:
        [chunk] = answer(request, b"a")
        top = [(0xC3, -0.1), (0xC4, -0.7), (97, -3.0)]
        return [msgspec.structs.replace(chunk, logprobs=[TokenLogprob(97, -3.0, top)])]

    reply = await client(ScriptedServing(script)).complete(logprobs=3)
    assert reply.json()["choices"][0]["logprobs"]["top_logprobs"] == [{"\ufffd": -0.1, "a": -3.0}]


async def test_logprobs_are_finite() -> None:
    def script(request: GenerateRequest) -> list[Any]:
        [chunk] = answer(request, b"a")
        top = [(98, math.inf), (99, math.nan)]
        return [msgspec.structs.replace(chunk, logprobs=[TokenLogprob(97, -math.inf, top)])]

    content = (await client(ScriptedServing(script)).chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"]
    assert [content[0]["logprob"], *(t["logprob"] for t in content[0]["top_logprobs"])] == [-9999.0] * 3


async def test_chat_logprobs_align_with_the_text_under_a_stop() -> None:
    body = (await client(saying("caf\u00e9 STOP now")).chat(logprobs=True, top_logprobs=1, stop="STOP")).json()
    choice = body["choices"][0]
    content = choice["logprobs"]["content"]
    assert choice["message"]["content"] == "caf\u00e9 "
    assert bytes(b for entry in content for b in entry["bytes"]).decode() == "caf\u00e9 "
    assert body["usage"]["completion_tokens"] == len("caf\u00e9 STOP".encode())
    assert all(len(entry["top_logprobs"]) == 1 for entry in content)


# --- stops ---


@pytest.mark.parametrize("tokens_per_chunk", [1, 2, 5, 50])
@pytest.mark.parametrize("stream", [False, True])
async def test_stops_never_leak_and_end_the_choice_in_serving(stream: bool, tokens_per_chunk: int) -> None:
    serving = saying("Hello wor\u00e9ld and on", tokens_per_chunk=tokens_per_chunk)
    reply = await client(serving).chat(stop=["r\u00e9l", "never"], n=2, stream=stream)
    texts = [reply.text(i) for i in range(2)] if stream else [c["message"]["content"] for c in reply.json()["choices"]]
    assert texts == ["Hello wo", "Hello wo"]
    if not stream:
        assert all(c["stop_reason"] == "r\u00e9l" for c in reply.json()["choices"])
        assert reply.json()["usage"]["completion_tokens"] == 2 * len("Hello wor\u00e9l".encode())
    cancelled = {index for _, index in serving.cancelled}
    assert tokens_per_chunk == 50 or cancelled == {0, 1}
    assert serving.open_requests == 0


async def test_a_stop_can_be_included() -> None:
    reply = await client(saying("a.b")).chat(stop=".", include_stop_str_in_output=True)
    assert reply.json()["choices"][0]["message"]["content"] == "a."


async def test_stop_tokens_are_counted_hidden_and_named() -> None:
    serving = ScriptedServing(lambda r: answer(r, b"ab!", stop_token=33))
    reply = await client(serving).chat(stop_token_ids=[33], logprobs=True)
    choice = reply.json()["choices"][0]
    assert (choice["message"]["content"], choice["stop_reason"]) == ("ab", 33)
    assert len(choice["logprobs"]["content"]) == 2
    assert reply.json()["usage"]["completion_tokens"] == 3


async def test_text_held_for_a_stop_comes_out_at_the_end() -> None:
    assert (await client(saying("a STO")).chat(stop="STOP", stream=True)).text() == "a STO"


async def test_offsets_of_an_echo_ignore_a_space_that_the_tokeniser_puts_first() -> None:
    class Sentencepiece(ByteText):
        """Token 65 stands for " Hi", as the first token of a prompt in such models."""

        def token_bytes(self, token: int) -> bytes:
            return b" Hi" if token == 65 else super().token_bytes(token)

        async def encode_prompt(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> Encoded:
            return Encoded([65, *text.removeprefix("Hi").encode()])

    reply = await client(ScriptedServing(scored), text=Sentencepiece()).complete(prompt="Hi you", echo=True, logprobs=0)
    logprobs = reply.json()["choices"][0]["logprobs"]
    assert logprobs["tokens"][:4] == [" Hi", " ", "y", "o"]
    assert logprobs["text_offset"][:4] == [0, 2, 3, 4]
