"""Sampling extras over HTTP on the real engine: each row's answer differs from the plain one as its field says.

Owns effects that only the engine shows; what needs no engine is in tests/unit/api/test_sampling_extras.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from ai_engine.testing.process import Server

pytestmark = pytest.mark.integration
PROMPT = "The capital of France is"
BASE: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
Choice = dict[str, Any]


@pytest.fixture(scope="module")
def post(server: Server) -> Callable[..., Any]:
    def post(path: str, body: dict[str, Any]) -> Any:
        reply = httpx2.post(f"{server.url}{path}", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        return reply.json()

    return post


@pytest.fixture(scope="module")
def complete(post: Callable[..., Any]) -> Callable[..., Choice]:
    def complete(**fields: Any) -> Choice:
        done: Choice = post("/v1/completions", {**BASE, **fields})["choices"][0]
        return done

    return complete


@pytest.fixture(scope="module")
def plain(complete: Callable[..., Choice]) -> Choice:
    choice = complete()
    assert len(choice["token_ids"]) == 12
    assert len(set(choice["token_ids"])) > 4
    return choice


ROWS: dict[str, tuple[Callable[[Choice], dict[str, Any]], Callable[[Choice, Choice], bool]]] = {
    "logit_bias -100 forbids": (
        lambda p: {"logit_bias": {str(p["token_ids"][0]): -100}},
        lambda p, c: p["token_ids"][0] not in c["token_ids"],
    ),
    "logit_bias +100 forces": (
        lambda p: {"logit_bias": {str(p["token_ids"][5]): 100}},
        lambda p, c: set(c["token_ids"]) == {p["token_ids"][5]},
    ),
    "top_k 1 is greedy at any temperature": (
        lambda p: {"top_k": 1, "temperature": 2, "seed": 5},
        lambda p, c: c["token_ids"] == p["token_ids"],
    ),
    "min_p 1 is greedy at any temperature": (
        lambda p: {"min_p": 1, "temperature": 2, "seed": 5},
        lambda p, c: c["token_ids"] == p["token_ids"],
    ),
    "temperature 2 alone is not": (
        lambda p: {"temperature": 2, "seed": 5},
        lambda p, c: c["token_ids"] != p["token_ids"],
    ),
    "repetition_penalty leaves what was said": (
        lambda p: {"repetition_penalty": 100, "max_tokens": 30},
        lambda p, c: len(set(c["token_ids"])) == len(c["token_ids"]),
    ),
    "presence_penalty changes the answer": (
        lambda p: {"presence_penalty": 2, "frequency_penalty": 2, "max_tokens": 60},
        lambda p, c: c["token_ids"][:3] == p["token_ids"][:3] and c["text"] != p["text"],
    ),
    "stop_token_ids end": (
        lambda p: {"stop_token_ids": [p["token_ids"][4]]},
        lambda p, c: (
            (c["finish_reason"], c["stop_reason"]) == ("stop", p["token_ids"][4])
            and c["token_ids"][-1] == p["token_ids"][4]
            and p["text"].startswith(c["text"])
        ),
    ),
    "min_tokens keeps stop tokens away": (
        lambda p: {"stop_token_ids": [p["token_ids"][4]], "min_tokens": 10},
        lambda p, c: p["token_ids"][4] not in c["token_ids"][:9] and len(c["token_ids"]) >= 10,
    ),
    "min_tokens makes an early stop string text": (
        lambda p: {"stop": [p["text"][2:5]], "min_tokens": 12},
        lambda p, c: c["text"] == p["text"],
    ),
    "include_stop_str_in_output keeps it": (
        lambda p: {"stop": [p["text"][2:5]], "include_stop_str_in_output": True},
        lambda p, c: c["text"] == p["text"][: p["text"].index(p["text"][2:5]) + 3],
    ),
    "echo puts the prompt first": (lambda p: {"echo": True}, lambda p, c: c["text"] == PROMPT + p["text"]),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_field_has_its_effect(name: str, complete: Callable[..., Choice], plain: Choice) -> None:
    fields, holds = ROWS[name]
    choice = complete(**fields(plain))
    assert holds(plain, choice), (plain, choice)
    assert complete(**fields(plain)) == choice, "and again"


def test_ignore_eos_goes_on_and_control_tokens_show_on_demand(post: Callable[..., Any]) -> None:
    chat = {"messages": [{"role": "user", "content": "Say hi."}], "temperature": 0, "max_tokens": 80}
    ended = post("/v1/chat/completions", chat)
    assert ended["choices"][0]["finish_reason"] == "stop"
    on = post("/v1/chat/completions", {**chat, "ignore_eos": True, "skip_special_tokens": False})
    assert (on["choices"][0]["finish_reason"], on["usage"]["completion_tokens"]) == ("length", 80)
    said = ended["choices"][0]["message"]["content"]
    assert on["choices"][0]["message"]["content"].startswith(said + "<|im_end|>")


def test_prompt_scores_are_the_same_on_every_way(post: Callable[..., Any], complete: Callable[..., Choice]) -> None:
    echoed = complete(echo=True, logprobs=1, max_tokens=0)["logprobs"]
    scored = complete(prompt_logprobs=1, max_tokens=0)
    ids = scored["prompt_token_ids"]
    found = [
        entry and entry[str(token)]["logprob"] for entry, token in zip(scored["prompt_logprobs"], ids, strict=True)
    ]
    assert found == echoed["token_logprobs"]
    again = complete(prompt=ids, prompt_logprobs=1)  # from the prefix cache, and with an answer after it
    assert again["prompt_logprobs"] == scored["prompt_logprobs"]
    messages = [{"role": "user", "content": PROMPT}]
    chat = post(
        "/v1/chat/completions",
        {"messages": messages, "prompt_logprobs": 0, "max_tokens": 1, "return_token_ids": True},
    )
    assert len(chat["prompt_logprobs"]) == len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]
    tokens = post("/tokenize", {"messages": messages})["tokens"]
    assert tokens == chat["prompt_token_ids"]


def test_token_ids_are_the_text_s(post: Callable[..., Any], plain: Choice) -> None:
    assert post("/detokenize", {"tokens": plain["token_ids"]})["prompt"] == plain["text"]


def test_a_final_message_is_continued_and_a_turn_need_not_be_opened(post: Callable[..., Any]) -> None:
    begun = [{"role": "user", "content": "Capital of France?"}, {"role": "assistant", "content": "The capital is"}]
    shown = post("/apply-template", {"messages": begun, "continue_final_message": True, "add_generation_prompt": False})
    assert shown["prompt"].endswith("The capital is")
    asked = {"messages": begun, "continue_final_message": True, "temperature": 0, "max_tokens": 8}
    assert "Paris" in post("/v1/chat/completions", asked)["choices"][0]["message"]["content"]
    anthropic = post("/v1/messages", {"messages": begun, "temperature": 0, "max_tokens": 8})
    assert "Paris" in anthropic["content"][0]["text"]
    unopened = post("/apply-template", {"messages": begun[:1], "add_generation_prompt": False})["prompt"]
    assert post("/apply-template", {"messages": begun[:1]})["prompt"].removeprefix(unopened).startswith("<|im_start|>")
