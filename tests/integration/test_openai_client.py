"""The official OpenAI Python client against a door on a real socket.

Owns what must hold for any engine: every test takes ``server_url`` and asks for nothing that only one engine would say.
``SERVERS`` names what stands behind the door: "scripted" is uvicorn in a thread over scripted serving, bytes as tokens;
"service" is the real scheduler and step loop over a fake runtime whose model says printable nonsense; "engine" is
`ai-engine serve` on SmolLM2 (the ``server`` fixture of tests/conftest.py). To add another, add its name and a branch in
``server_url`` that gives its base URL without /v1.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest
from openai import OpenAI

from ai_engine.api.app import Api
from ai_engine.ports.clock import SystemClock
from ai_engine.ports.serving import GenerateRequest
from ai_engine.serving.service import Service
from ai_engine.testing import FakeRuntime, HashModel, MemoryTelemetry, ScriptedServing, answer
from ai_engine.testing.runtime import DEFAULT_LIMITS
from tests.unit.api.doors import InThread, make_api

SERVERS = ["scripted", "service", pytest.param("engine", marks=pytest.mark.integration)]
PROMPT: list[Any] = [{"role": "user", "content": "Write one short sentence about the sea."}]
SAID = "The sea is wide \U0001f30a and d\u00e9ep. It sings, all day and all night."


def speak(request: GenerateRequest) -> list[Any]:
    """A text that depends on the choice, a few bytes a step, with a pause so that steps are told apart."""
    chunks = [
        chunk
        for index in range(request.n)
        for chunk in answer(request, tuple(SAID.encode()), index=index, tokens_per_chunk=3)
    ]
    return [item for chunk in chunks for item in (chunk, 0.001)]


def scripted_api() -> Api:
    return make_api(ScriptedServing(speak), clock=SystemClock())


def service_api() -> Api:
    """A step takes a millisecond; the next letter depends on the seed and on all that was said."""
    nonsense = HashModel(95)
    runtime = FakeRuntime(
        lambda spec, tokens: 32 + nonsense(spec, tokens),
        limits=msgspec.structs.replace(DEFAULT_LIMITS, max_context=512, vocab_size=260),
        clock=SystemClock(),
        on_step=lambda plan: time.sleep(0.001),
    )
    service = Service(runtime, telemetry=MemoryTelemetry())
    return make_api(service, clock=SystemClock(), on_startup=service.start, on_shutdown=service.close)


@pytest.fixture(scope="module", params=SERVERS)
def server_url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "engine":
        yield request.getfixturevalue("server").url
        return
    server = InThread({"scripted": scripted_api, "service": service_api}[request.param]())
    yield server.url
    server.stop()


@pytest.fixture
def client(server_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server_url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture
def model(client: OpenAI) -> str:
    return client.models.list().data[0].id


def test_models(client: OpenAI, model: str) -> None:
    found = client.models.retrieve(model)
    assert found.id == model
    assert isinstance(found.created, int)
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("no/such/model")
    assert caught.value.code == "model_not_found"


def test_chat(client: OpenAI, model: str) -> None:
    done = client.chat.completions.create(model=model, messages=PROMPT, max_tokens=12, temperature=0)
    [choice] = done.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert done.model == model
    assert done.usage is not None
    assert 0 < done.usage.completion_tokens <= 12
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
    assert done._request_id


def test_a_stream_says_the_same_as_the_whole_answer(client: OpenAI, model: str) -> None:
    fields: dict[str, Any] = {"model": model, "messages": PROMPT, "max_tokens": 30, "seed": 3, "temperature": 0.8}
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == len({chunk.created for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert chunks[-1].choices == []
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_the_sdk_s_own_accumulator_with_two_choices(client: OpenAI, model: str) -> None:
    with client.chat.completions.stream(
        model=model, messages=PROMPT, n=2, max_completion_tokens=9, temperature=1.0, seed=5, logprobs=True
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.current_completion_snapshot  # get_final_completion raises at finish_reason length
    assert "content.delta" in kinds
    assert [choice.index for choice in final.choices] == [0, 1]
    for choice in final.choices:
        assert choice.message.content is not None
        assert choice.finish_reason is not None
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        said = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content)
        assert said.decode("utf-8", "replace").rstrip("\ufffd") == choice.message.content.rstrip("\ufffd")


def test_logprobs(client: OpenAI, model: str) -> None:
    done = client.chat.completions.create(
        model=model, messages=PROMPT, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    assert done.choices[0].logprobs is not None
    content = done.choices[0].logprobs.content
    assert content
    for entry in content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs == sorted(entry.top_logprobs, key=lambda top: -top.logprob)


def test_stop(client: OpenAI, model: str) -> None:
    fields: dict[str, Any] = {"model": model, "messages": PROMPT, "max_tokens": 20, "temperature": 0}
    text = client.chat.completions.create(**fields).choices[0].message.content
    assert text
    stop = text[5:8]
    done = client.chat.completions.create(**fields, stop=[stop, "\x01never"])
    assert done.choices[0].message.content == text[: text.index(stop)]
    assert done.choices[0].finish_reason == "stop"


def test_completions_with_prompts_choices_echo_and_logprobs(client: OpenAI, model: str) -> None:
    done = client.completions.create(
        model=model, prompt=["One two", "Three four"], n=2, max_tokens=3, echo=True, seed=1
    )
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    assert [choice.text[:5] for choice in done.choices] == ["One t", "One t", "Three", "Three"]
    done = client.completions.create(model=model, prompt="One two", max_tokens=2, logprobs=2, temperature=0)
    logprobs = done.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens
    assert logprobs.text_offset
    assert logprobs.text_offset[0] == len("One two")
    assert len(logprobs.tokens) == len(logprobs.token_logprobs or []) == len(logprobs.top_logprobs or [])


def test_a_completion_stream(client: OpenAI, model: str) -> None:
    chunks = list(client.completions.create(model=model, prompt=[1, 2, 3], max_tokens=4, stream=True))
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


def test_errors(client: OpenAI, model: str, server_url: str) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        client.chat.completions.create(model="gpt-none", messages=PROMPT)
    assert (not_found.value.code, not_found.value.param) == ("model_not_found", "model")
    assert not_found.value.request_id
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=model, messages=PROMPT, temperature=9)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as unsupported:
        client.chat.completions.create(model=model, messages=PROMPT, modalities=["audio"])
    assert unsupported.value.code == "unsupported_parameter"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model=model, messages=PROMPT, max_tokens=10_000_000)
    assert long.value.code == "context_length_exceeded"


def test_nulls_everywhere(client: OpenAI, model: str) -> None:
    nulls = dict.fromkeys(("temperature", "top_p", "n", "stop", "seed", "tools", "logit_bias", "response_format"))
    done = client.chat.completions.create(model=model, messages=PROMPT, max_tokens=3, extra_body=nulls)
    assert done.choices[0].message.content


def test_leaving_a_stream_frees_its_place(client: OpenAI, model: str) -> None:
    for _ in range(8):
        with client.chat.completions.create(model=model, messages=PROMPT, max_tokens=200, stream=True) as stream:
            next(iter(stream))
    deadline = time.monotonic() + 20
    while (load := _load(client))["running_requests"] or load["queued_requests"]:
        assert time.monotonic() < deadline, load
        time.sleep(0.02)


def _load(client: OpenAI) -> dict[str, int]:
    health: dict[str, int] = client.get("/readyz", cast_to=dict[str, Any])
    return health


def test_many_clients_over_kept_connections(client: OpenAI, model: str) -> None:
    texts: list[str | None] = []

    def ask() -> None:
        for _ in range(3):
            done = client.chat.completions.create(model=model, messages=PROMPT, max_tokens=6, temperature=0)
            texts.append(done.choices[0].message.content)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 18
    assert len(set(texts)) == 1
