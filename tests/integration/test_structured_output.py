"""Constrained answers of the real model behind real HTTP; and the engine's, whatever company, guesses or preemption."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from ai_engine import app
from ai_engine.config import EngineConfig, ServeConfig
from ai_engine.ports.grammar import Constraint
from ai_engine.ports.sampling import SamplingParams
from ai_engine.ports.serving import GenerateRequest
from ai_engine.testing.process import Server
from tests.integration import json_schemas

pytestmark = pytest.mark.integration

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee", "water"]}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
ASKED: list[Any] = [{"role": "user", "content": "Describe a person as JSON."}]


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_choices_are_valid_whole_or_streamed(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "smollm2", "messages": ASKED, "response_format": FORMAT, "n": 3, "seed": 5}
    whole = client.chat.completions.create(**asked, logprobs=True, max_tokens=80)
    texts = [choice.message.content or "" for choice in whole.choices]
    for choice, text in zip(whole.choices, texts, strict=True):
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(text), PERSON)
        assert choice.logprobs is not None
        spoken = choice.logprobs.content or []
        assert b"".join(bytes(token.bytes or []) for token in spoken).decode() == text
    assert len(set(texts)) > 1
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**asked, stream=True, max_tokens=80):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_the_completions_door_and_the_other_constraints(client: OpenAI) -> None:
    def said(**extra: Any) -> str:
        done = client.completions.create(
            model="smollm2", prompt="My favourite colour is", max_tokens=30, temperature=1, seed=3, extra_body=extra
        )
        assert done.choices[0].finish_reason == "stop"
        return done.choices[0].text

    assert said(guided_choice=["dark red", "blue."]) in ("dark red", "blue.")
    assert said(structured_outputs={"regex": "#[0-9a-f]{6}"})[0] == "#"
    assert said(guided_grammar='root ::= "very "+ "green"').endswith("very green")
    assert isinstance(json.loads(said(response_format={"type": "json_object"})), dict)


def test_refusals_come_before_any_token_and_name_the_keyword(client: OpenAI) -> None:
    def refusal(schema: Any, **fields: Any) -> openai.BadRequestError:
        form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="smollm2", messages=ASKED, response_format=form, stream=True, **fields)
        return refused.value

    error = refusal({"properties": {"a": {"type": "array", "uniqueItems": True}}})
    assert (error.code, error.param) == ("invalid_json_schema", "response_format")
    assert "'uniqueItems' at '/properties/a/uniqueItems'" in error.message
    error = refusal(PERSON, max_tokens=5)
    assert (error.code, error.param) == ("invalid_value", "max_tokens")
    assert "found 5, expected at least" in error.message


def test_a_small_limit_still_gets_a_whole_answer(client: OpenAI) -> None:
    for limit in (20, 30, 45):
        done = client.chat.completions.create(
            model="smollm2", messages=ASKED, response_format=FORMAT, max_tokens=limit, seed=limit, n=2
        )
        for choice in done.choices:
            assert choice.finish_reason == "stop"
            jsonschema.validate(json.loads(choice.message.content or ""), PERSON)


def test_many_bad_schemas_leave_the_server_well(server: Server) -> None:
    """One bad request is one 400, and the answers around it are not disturbed."""
    bad: list[Any] = [
        {"not": {}}, {"type": "x"}, {"pattern": "(", "type": "string"}, {"$ref": "#/a"}, {"enum": []}, False,
        {"properties": {str(i): {"type": "string"} for i in range(3000)}},
    ]  # fmt: skip

    async def post(client: AsyncOpenAI, schema: Any) -> int:
        form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        try:
            await client.chat.completions.create(model="smollm2", messages=ASKED, max_tokens=40, response_format=form)
        except openai.APIStatusError as error:
            return error.status_code
        return 200

    async def all_of_them() -> list[int]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(post(client, schema) for schema in (*bad, PERSON, *bad, PERSON)))

    expected = [*[400] * len(bad), 200]
    assert asyncio.run(all_of_them()) == expected * 2


# --- the engine alone


async def answers(model: Path, config: EngineConfig, requests: list[GenerateRequest]) -> list[list[int]]:
    """Every choice's tokens, all requests at once."""
    local = await app.open_local(str(model), config, ServeConfig(offline=True))

    async def one(request: GenerateRequest) -> list[list[int]]:
        tokens: list[list[int]] = [[] for _ in range(request.n)]
        async for chunk in await local.serving.submit(request):
            tokens[chunk.index] += chunk.tokens
            assert chunk.finish in (None, "stop"), chunk
        return tokens

    try:
        return [tokens for got in await asyncio.gather(*map(one, requests)) for tokens in got]
    finally:
        await local.close()


def asked(model_text: Any, number: int, schema: Any, **params: Any) -> GenerateRequest:
    said = asyncio.run(model_text.encode_chat(ASKED))
    return GenerateRequest(
        request_id=f"r{number}",
        trace_id=f"{number + 1:032x}",
        prompt=said.ids,
        n=2,
        params=SamplingParams(seed=number * 10, max_tokens=44, **params),
        constraint=Constraint(kind="json_schema", text=json.dumps(schema)),
    )


def test_the_answer_does_not_depend_on_guesses_preemption_or_company(smollm2: Path) -> None:
    from ai_engine.data.models import open_model

    text = app.build_text(open_model(smollm2).tokenizer())
    repeating = {"type": "array", "items": PERSON, "minItems": 1}
    requests = [
        asked(text, 0, PERSON),
        asked(text, 1, repeating, temperature=0.0),
        asked(text, 2, {"type": "object"}, repetition_penalty=1.2, logit_bias={5: 3.0}),
        asked(text, 3, repeating, min_tokens=36),
    ]
    text.close()
    plain = EngineConfig(speculation="off", max_context=512)
    expected = [tokens for request in requests for tokens in asyncio.run(answers(smollm2, plain, [request]))]
    for tokens in expected:
        json.loads(b"".join(text.tokenizer.piece(token) for token in tokens))
    guessing = EngineConfig(speculation="lookup", max_context=512)
    assert asyncio.run(answers(smollm2, guessing, requests)) == expected
    page_bytes = 32 * 2 * 30 * 3 * 64 * 2  # tokens, keys and values, layers, heads, dimensions, bytes
    crowded = EngineConfig(speculation="off", max_context=256, kv_memory=12 * page_bytes)
    assert asyncio.run(answers(smollm2, crowded, requests)) == expected


# --- real schemas


def schemas_or_skip() -> list[tuple[int, Path]]:
    files = list(enumerate(json_schemas.schema_files()))
    if not files:
        reason = "the JSON schemas are not beside the checkout; name their folder's parent in AI_ENGINE_VECTORS"
        assert os.environ.get("CI") != "true", reason
        pytest.skip(reason)
    return files


async def test_sixty_real_schemas(smollm2: Path) -> None:
    """Shorter answers than the full run's: every limit that holds a smallest instance is enough for a valid one."""
    outcomes = await json_schemas.run_all(smollm2, schemas_or_skip()[3::16], max_tokens=128)
    assert len(outcomes) >= 59
    json_schemas.check(outcomes)


@pytest.mark.full
@pytest.mark.timeout(7200)
async def test_a_thousand_real_schemas(smollm2: Path) -> None:
    outcomes = await json_schemas.run_all(smollm2, schemas_or_skip())
    json_schemas.check(outcomes)
