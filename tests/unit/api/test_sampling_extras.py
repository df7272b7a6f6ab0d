"""Sampling extras: what each one changes in the answer, so that none can be accepted and ignored.

Owns one row per extra and effect. Where the effect is the sampler's or the scheduler's (top_k, penalties, priority),
the row is that the value arrives there (test_requests.py); what it does there has its tests there.
"""

from __future__ import annotations

from typing import Any

import pytest

from ai_engine.ports.serving import Chunk, GenerateRequest
from ai_engine.testing import ScriptedServing, answer
from ai_engine.testing.serving import fake_logprob
from tests.unit.api.doors import Reply, client

EOS = 257


def speak(request: GenerateRequest) -> list[Any]:
    """ "Hello world", then the end; the prompt is scored when asked."""
    params = request.params
    chunks: list[Any] = []
    if params.prompt_logprobs is not None:
        scores = [fake_logprob(token, params.prompt_logprobs) for token in request.prompt[1:]]
        chunks.append(Chunk(request_id=request.request_id, prompt_logprobs=scores))
    for index in range(request.n):
        chunks += answer(request, (*b"Hello world", EOS), index=index, stop_token=EOS, tokens_per_chunk=4)
    return chunks


async def said(fields: dict[str, Any], *, chat: bool = False) -> Reply:
    door = client(ScriptedServing(speak))
    reply = await (door.chat(**fields) if chat else door.complete(max_tokens=20, **fields))
    assert reply.status == 200, reply.body
    return reply


EFFECTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"text": "Hello world", "finish_reason": "stop"}),
    ({"stop": "o w"}, {"text": "Hell", "stop_reason": "o w"}),
    ({"stop": "o w", "include_stop_str_in_output": True}, {"text": "Hello w", "stop_reason": "o w"}),
    ({"stop_token_ids": [EOS]}, {"text": "Hello world", "stop_reason": EOS}),
    ({"skip_special_tokens": False, "include_stop_str_in_output": True}, {"text": "Hello world<eos>"}),
    ({"stop": ["ell", "o w"], "min_tokens": 5}, {"text": "Hell", "stop_reason": "o w"}),
    ({"suffix": "!"}, {"text": "Hello world"}),
    ({"echo": True}, {"text": "HiHello world"}),
    ({"return_token_ids": True}, {"token_ids": [*b"Hello world", EOS], "prompt_token_ids": [*b"Hi"]}),
    ({"return_token_ids": True, "stop": "llo"}, {"token_ids": [*b"Hello"], "text": "He"}),
    (
        {"prompt_logprobs": 0},
        {"prompt_logprobs": [None, {"105": {"logprob": -0.5, "rank": None, "decoded_token": "i"}}]},
    ),
    (
        {"prompt_logprobs": 2},
        {
            "prompt_logprobs": [
                None,
                {
                    "105": {"logprob": -0.5, "rank": 1, "decoded_token": "i"},
                    "0": {"logprob": -1.5, "rank": 2, "decoded_token": "\x00"},
                },
            ]
        },
    ),
]


@pytest.mark.parametrize(("fields", "expected"), EFFECTS, ids=str)
async def test_an_extra_has_its_effect(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    [choice] = (await said(fields)).json()["choices"]
    assert {name: choice.get(name) for name in expected} == expected


@pytest.mark.parametrize("field", ["token_ids", "prompt_token_ids", "prompt_logprobs", "stop_reason"])
async def test_nobody_who_did_not_ask_gets_extras(field: str) -> None:
    for chat in (False, True):
        body = (await said({}, chat=chat)).json()
        assert field not in body
        assert field not in body["choices"][0]


async def test_extras_about_the_prompt_stand_beside_a_chat_s_choices() -> None:
    reply = await said({"return_token_ids": True, "prompt_logprobs": 1, "n": 2}, chat=True)
    body = reply.json()
    assert bytes(body["prompt_token_ids"][-10:-1]).decode("ascii") == "assistant"
    assert len(body["prompt_logprobs"]) == len(body["prompt_token_ids"])
    assert [choice["token_ids"] for choice in body["choices"]] == [[*b"Hello world", EOS]] * 2


@pytest.mark.parametrize("chat", [False, True])
async def test_streamed_token_ids_join_to_the_whole_answer_s(chat: bool) -> None:
    fields = {"return_token_ids": True, "n": 2, "stop": "wor"}
    whole = (await said(fields, chat=chat)).json()
    events = (await said({**fields, "stream": True}, chat=chat)).events()
    choices = [choice for event in events for choice in event["choices"]]
    for expected in whole["choices"]:
        parts = [c["token_ids"] for c in choices if c["index"] == expected["index"] and "token_ids" in c]
        assert [token for part in parts for token in part] == expected["token_ids"] == [*b"Hello wor"]
    told = [item for item in (events if chat else choices) if "prompt_token_ids" in item]
    expected_prompt = whole["prompt_token_ids"] if chat else whole["choices"][0]["prompt_token_ids"]
    assert [item["prompt_token_ids"] for item in told] == [expected_prompt] * (1 if chat else 2)


async def test_echo_shows_as_many_of_the_best_as_logprobs_asks_whatever_prompt_logprobs_does() -> None:
    reply = await said({"echo": True, "logprobs": 1, "prompt_logprobs": 5})
    [choice] = reply.json()["choices"]
    assert choice["logprobs"]["top_logprobs"][1] == {"i": -0.5}
    assert len(choice["prompt_logprobs"][1]) == 5


async def test_a_suffix_makes_an_infilling_prompt() -> None:
    serving = ScriptedServing(speak)
    await client(serving).complete(prompt=["a", "b"], suffix="!")
    assert [request.prompt for request in serving.requests] == [[256, 97, 257, 33, 259], [256, 98, 257, 33, 259]]


@pytest.mark.parametrize("fields", [{"echo": True, "logprobs": 1}, {"prompt_logprobs": 1}], ids=str)
async def test_max_tokens_0_scores_and_says_nothing(fields: dict[str, Any]) -> None:
    door = client(ScriptedServing(speak))
    reply = await door.complete(max_tokens=0, **fields)
    [choice] = reply.json()["choices"]
    assert choice["text"] == ("Hi" if "echo" in fields else "")
    assert reply.json()["usage"]["completion_tokens"] == 0
    scores = choice["logprobs"]["token_logprobs"] if "echo" in fields else choice["prompt_logprobs"]
    assert [score is None for score in scores] == [True, False]


async def test_usage_of_a_scored_prompt_counts_it() -> None:
    reply = await client(ScriptedServing(speak)).complete(max_tokens=0, prompt_logprobs=0)
    assert reply.json()["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 0,
        "total_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


REFUSED: list[tuple[dict[str, Any], str, str, str]] = [
    ({"prompt_logprobs": 21}, "prompt_logprobs", "found 21, expected an integer from 0 to 20", "invalid_value"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "found -1", "invalid_value"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream", "unsupported_parameter"),
    ({"return_token_ids": 1}, "return_token_ids", "expected true or false", "invalid_value"),
    ({"priority": 1001}, "priority", "from -1000 to 1000", "invalid_value"),
    ({"min_p": 1.5}, "min_p", "from 0 to 1", "invalid_value"),
    ({"min_tokens": -1}, "min_tokens", "from 0 to", "invalid_value"),
    ({"suffix": "!", "echo": True}, "suffix", "with echo or token ids", "invalid_value"),
    ({"suffix": "!", "prompt": [1]}, "suffix", "with echo or token ids", "invalid_value"),
    ({"suffix": 1}, "suffix", "expected a string", "invalid_value"),
    ({"best_of": 2}, "best_of", "only best_of 1", "unsupported_parameter"),
    ({"ignore_eos": "yes"}, "ignore_eos", "found the string 'yes'", "invalid_value"),
    ({"include_stop_str_in_output": 1}, "include_stop_str_in_output", "found 1", "invalid_value"),
    ({"skip_special_tokens": 0}, "skip_special_tokens", "found 0", "invalid_value"),
]


@pytest.mark.parametrize(("fields", "param", "words", "code"), REFUSED, ids=str)
async def test_an_extra_out_of_range_names_itself(fields: dict[str, Any], param: str, words: str, code: str) -> None:
    reply = await client().complete(**fields)
    error = reply.json()["error"]
    assert (reply.status, error["param"], error["code"]) == (400, param, code), error
    assert words in error["message"]
