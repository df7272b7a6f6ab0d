"""Whole event streams, byte for byte, against golden files. Owns the scripts; the order's reasons are in stream.py.

The files were held against OpenAI's shapes by eye. AI_ENGINE_REWRITE_GOLDEN=1 rewrites them: read the diff.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ai_engine.ports.serving import GenerateRequest
from ai_engine.ports.text import TEXT_ONLY, ReplyForm
from ai_engine.testing import ScriptedServing, answer, failing
from tests.unit.api.doors import ByteText, client, saying

GOLDEN = Path(__file__).parent / "golden"
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}]}
USAGE = {"stream_options": {"include_usage": True}}


def two_choices(request: GenerateRequest) -> list[Any]:
    """The second choice speaks first, and they take turns."""
    first, second = answer(request, b"one.", index=0), answer(request, b"two!", index=1)
    return [chunk for pair in zip(second, first, strict=True) for chunk in pair]


def eos(request: GenerateRequest) -> list[Any]:
    return answer(request, (*b"Hel", *b"lo", 257), stop_token=257, tokens_per_chunk=3)


TOOLS = [{"type": "function", "function": {"name": name}} for name in ("get_weather", "get_time")]
CALLS = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)
THOUGHT = "<think>\nHm.\n</think>\n\nYes"
FORMS = {
    "chat-tools": ReplyForm(calls="hermes"),
    "chat-tools-cut": ReplyForm(calls="hermes"),
    "chat-reasoning": ReplyForm(reasoning=("<think>", "</think>")),
}


def text_of(name: str) -> ByteText:
    return ByteText(form=FORMS.get(name, TEXT_ONLY))


CASES: dict[str, tuple[ScriptedServing, str, dict[str, Any]]] = {
    "chat-usage": (ScriptedServing(eos), CHAT, {**HI, **USAGE}),
    "chat-plain": (saying("Hello", tokens_per_chunk=3), CHAT, HI),
    "chat-emoji": (saying("a\U0001f600b"), CHAT, HI),
    "chat-emoji-cut": (saying("a\U0001f600b"), CHAT, {**HI, "max_tokens": 3, "logprobs": True}),
    "chat-failure": (ScriptedServing(lambda r: failing(r, b"He")), CHAT, {**HI, **USAGE}),
    "chat-n2": (ScriptedServing(two_choices), CHAT, {**HI, **USAGE, "n": 2}),
    "chat-stop": (saying("Hello world"), CHAT, {**HI, **USAGE, "stop": ["lo w", "zzz"]}),
    "chat-warnings": (saying("Hi"), CHAT, {**HI, "user": "me", "colour": "red", "return_sampling_params": True}),
    "chat-continuous-usage": (
        saying("Hi"),
        CHAT,
        {**HI, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "chat-tools": (saying(CALLS, tokens_per_chunk=7), CHAT, {**HI, **USAGE, "tools": TOOLS}),
    "chat-tools-cut": (saying(CALLS, tokens_per_chunk=7), CHAT, {**HI, "tools": TOOLS, "max_tokens": 60}),
    "chat-reasoning": (saying(THOUGHT, tokens_per_chunk=5), CHAT, {**HI, **USAGE, "logprobs": True}),
    "text-usage": (ScriptedServing(eos), TEXT, {"prompt": "Hi", "max_tokens": 9, **USAGE}),
    "text-default-cut": (saying("Hello to the whole world"), TEXT, {"prompt": "Hi"}),
    "text-echo-logprobs": (saying("ok"), TEXT, {"prompt": "Hi", "echo": True, "logprobs": 1, "max_tokens": 2}),
}


@pytest.mark.parametrize("name", CASES)
async def test_stream_equals_golden(name: str) -> None:
    serving, path, fields = CASES[name]
    reply = await client(serving, text=text_of(name))("POST", path, {"model": "m", "seed": 7, "stream": True, **fields})
    assert reply.status == 200
    file = GOLDEN / f"{name}.sse"
    if os.environ.get("AI_ENGINE_REWRITE_GOLDEN"):
        file.write_bytes(reply.body)
    assert reply.body.decode() == file.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [name for name in CASES if "failure" not in name])
async def test_the_stream_says_what_the_whole_answer_says(name: str) -> None:
    serving, path, fields = CASES[name]
    fields = {"model": "m", "seed": 7, **fields}
    streamed = await client(serving, text=text_of(name))("POST", path, {**fields, "stream": True, **USAGE})
    plain = {k: v for k, v in fields.items() if k != "stream_options"}
    whole = (await client(serving, text=text_of(name))("POST", path, plain)).json()
    events = streamed.events()
    assert events[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        said = choice["message"]["content"] or "" if path == CHAT else choice["text"]
        assert streamed.text(choice["index"]) == said
        parts = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
        assert [p["finish_reason"] for p in parts if p["finish_reason"]] == [choice["finish_reason"]]
        assert _joined_logprobs(parts) == choice["logprobs"]
        if path == CHAT:
            assert _joined_calls(parts) == choice["message"].get("tool_calls", [])
            thought = "".join(part["delta"].get("reasoning", "") for part in parts)
            assert thought == choice["message"].get("reasoning", "")


def _joined_calls(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for call in [call for part in parts for call in part["delta"].get("tool_calls", [])]:
        if call["index"] == len(calls):
            calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
        else:
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return calls


def _joined_logprobs(parts: list[dict[str, Any]]) -> dict[str, Any] | None:
    found = [part["logprobs"] for part in parts if part["logprobs"]]
    if not found:
        return None
    return {key: None if found[0][key] is None else [item for f in found for item in f[key]] for key in found[0]}
