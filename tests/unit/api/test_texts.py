"""Tokenize, detokenize, apply-template: both shapes of each, over bytes as tokens."""

from __future__ import annotations

from typing import Any

import pytest

from ai_engine.testing.text import BOS_ID
from tests.unit.api.doors import MODEL, ByteText, client
from tests.unit.api.test_openapi import validate

HI = [{"role": "user", "content": "Hi"}]
CHAT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"prompt": "Hi"}, {"count": 3, "max_model_len": 512, "tokens": [BOS_ID, *b"Hi"]}),
        ({"prompt": "Hi", "add_special_tokens": False}, {"count": 2, "max_model_len": 512, "tokens": [*b"Hi"]}),
        ({"content": "Hi"}, {"tokens": [*b"Hi"]}),
        ({"content": "Hi", "add_special": True}, {"tokens": [BOS_ID, *b"Hi"]}),
        ({"content": "é", "with_pieces": True}, {"tokens": [{"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]}),
        ({"content": "a", "with_pieces": True, "parse_special": True}, {"tokens": [{"id": 97, "piece": "a"}]}),
        (
            {"prompt": "H<eos>", "return_token_strs": True, "add_special_tokens": False},
            {"count": 2, "max_model_len": 512, "tokens": [72, 257], "token_strs": ["H", "<eos>"]},
        ),
        ({"content": "<eos>", "parse_special": False}, {"tokens": [*b"<eos>"]}),
        ({"content": "", "x": 1}, {"tokens": [], "warnings": ["x: unknown field, ignored."]}),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize/"])
async def test_tokenize(path: str, fields: dict[str, Any], expected: dict[str, Any]) -> None:
    reply = await client(text=ByteText(add_bos=True))("POST", path, fields)
    assert reply.json() == expected
    validate(reply.json(), "Tokens")


async def test_a_conversation_is_tokenized_as_it_would_run_and_shown_as_it_would_read() -> None:
    door = client()
    tokens = (await door("POST", "/tokenize", {"messages": HI, "model": "m"})).json()["tokens"]
    shown = (await door("POST", "/apply-template", {"messages": HI})).json()
    assert shown == {"prompt": CHAT}
    back = (await door("POST", "/detokenize", {"tokens": tokens})).json()
    assert back == {"prompt": CHAT, "content": CHAT}
    plain = (await door("POST", "/v1/apply-template", {"messages": HI, "add_generation_prompt": False})).json()
    assert plain["prompt"] == CHAT.removesuffix("<|im_start|>assistant\n")
    for reply, name in ((shown, "Template"), (back, "Detokenized")):
        validate(reply, name)


@pytest.mark.parametrize(
    ("path", "fields", "status", "param", "words"),
    [
        ("/tokenize", {}, 400, "prompt", "found none of prompt, messages and content"),
        ("/tokenize", {"prompt": "a", "content": "b"}, 400, "content", "found prompt and content"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt", "expected a string"),
        ("/tokenize", {"prompt": "a", "model": "none"}, 404, "model", "not served"),
        ("/detokenize", {"tokens": [MODEL.vocab_size]}, 400, "tokens[0]", "from 0 to 259"),
        ("/detokenize", {}, 400, "tokens", "add this required field"),
        ("/apply-template", {"messages": [{"role": "robot", "content": ""}]}, 400, "messages[0].role", "robot"),
    ],
    ids=str,
)
async def test_refusals(path: str, fields: dict[str, Any], status: int, param: str, words: str) -> None:
    reply = await client()("POST", path, fields)
    error = reply.json()["error"]
    assert (reply.status, error["param"]) == (status, param), error
    assert words in error["message"]


async def test_what_the_tokeniser_is() -> None:
    reply = (await client(text=ByteText(add_bos=True))("GET", "/tokenizer_info")).json()
    validate(reply, "Tokenizer")
    assert (reply["bos_token"], reply["eos_token"], reply["eos_tokens"]) == ("<bos>", "<eos>", ["<eos>", "<|im_end|>"])
    assert (await client()("GET", "/v1/tokenizer_info")).json()["bos_token"] is None


async def test_they_work_while_the_server_drains() -> None:
    door = client()
    door.api.draining = True
    assert (await door("POST", "/tokenize", {"prompt": "a"})).status == 200
