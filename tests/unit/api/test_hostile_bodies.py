"""Whatever JSON comes, the door answers 200 or 4xx in shape: never a 5xx, never an exception."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ai_engine.api.openai_types import chat_fields, completion_fields
from tests.unit.api.doors import Client, Reply, client

SUITE = sorted((Path(__file__).parents[2] / "vectors" / "json-test-suite" / "test_parsing").glob("*.json"))
PATHS = ("/v1/chat/completions", "/v1/completions")
KNOWN = {PATHS[0]: sorted(chat_fields(260).fields), PATHS[1]: sorted(completion_fields(260).fields)}
GOOD: dict[str, dict[str, Any]] = {
    PATHS[0]: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    PATHS[1]: {"prompt": "Hi", "max_tokens": 2},
}
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.sampled_from([0, 1, -1, 2, 1.0, 1e308, -1e-308, 0.5])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12)
    | st.sampled_from(["m", "user", "text", "json_object", "auto", "function", "\x00", "\u202e", "\U0001f600" * 9])
)
KEYS = st.text(max_size=6) | st.sampled_from(["type", "role", "content", "text", "function", "name", "id", "arguments"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


def check(reply: Reply) -> None:
    assert reply.status in (200, 400, 404), (reply.status, reply.body)
    if reply.status != 200:
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
        assert len(reply.body) < 2000
    elif not reply.body.startswith(b"data: "):
        assert reply.json()["choices"]
    else:
        assert reply.events()


def post(path: str, body: bytes) -> Reply:
    door: Client = client()
    return asyncio.run(door("POST", path, body, {"content-type": "application/json"}))


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_one_field_of_any_value(path: str, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(KNOWN[path]))
    check(post(path, json.dumps({**GOOD[path], name: data.draw(VALUES)}).encode()))


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_many_fields_of_any_value(path: str, data: st.DataObject) -> None:
    fields = st.dictionaries(st.sampled_from(KNOWN[path]) | st.text(max_size=5), VALUES, max_size=8)
    base = GOOD[path] if data.draw(st.booleans()) else {}
    check(post(path, json.dumps({**base, **data.draw(fields)}).encode()))


@pytest.mark.parametrize("path", SUITE, ids=lambda path: path.stem)
def test_json_test_suite_as_bodies(path: Path) -> None:
    raw = path.read_bytes()
    check(post(PATHS[1], raw))
    check(post(PATHS[0], b'{"messages":' + raw + b"}"))


@pytest.mark.parametrize("depth", [60, 70, 1000, 100_000])
def test_deep_nesting_anywhere(depth: int) -> None:
    deep = b"[" * depth + b"]" * depth
    for path in PATHS:
        for name in (b"prompt", b"messages", b"metadata", b"chat_template_kwargs", b"unknown"):
            check(post(path, b'{"%s":%s}' % (name, deep)))
            check(post(path, b'{"prompt":"x","%s":%s}' % (name, b'{"a":' * depth + b"1" + b"}" * depth)))


def test_a_body_of_many_unknown_fields_gets_a_short_answer() -> None:
    reply = post(PATHS[1], json.dumps({"prompt": "Hi", **{f"x{i}": i for i in range(20_000)}}).encode())
    assert reply.status == 200
    assert len(reply.json()["warnings"]) <= 40
