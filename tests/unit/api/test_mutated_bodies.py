"""Good bodies with something wrong put in at random: never a 5xx, and what a door takes is what its schema allows.

Owns the good bodies, one for each route that takes one, each with as many fields as go together.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from ai_engine.api.openapi import OPERATIONS
from ai_engine.ports.text import ReplyForm
from tests.unit.api.doors import ByteText, client, saying
from tests.unit.api.test_openapi import DOCUMENT

HI = [{"role": "user", "content": "x"}]
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
BLOCKS = [
    {"type": "text", "text": "x"},
    {"type": "tool_use", "id": "a", "name": "f", "input": {}},
    {"type": "tool_result", "tool_use_id": "a", "content": "r"},
    {"type": "thinking", "thinking": "t"},
]
MESSAGE = {
    "messages": [{"role": "user", "content": BLOCKS}, {"role": "assistant", "content": BLOCKS}, *HI],
    "system": [{"type": "text", "text": "s"}],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "tool", "name": "f"},
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "stop_sequences": ["zz"],
    "max_tokens": 9,
}
RESPONSE = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "x"},
    ],
    "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": {"type": "function", "name": "f"},
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
}
CHAT = {
    "messages": [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "r"}]},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "logit_bias": {"5": 1},
    "n": 2,
    "stream_options": {"include_usage": True},
}  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "/chat/completions": CHAT,
    "/completions": {"prompt": ["a", "b"], "n": 2, "logprobs": 1, "echo": True, "stop": "zz", "seed": 3},
    "/messages": MESSAGE,
    "/messages/count_tokens": MESSAGE,
    "/responses": RESPONSE,
    "/responses/input_tokens": RESPONSE,
    "/tokenize": {"messages": HI, "with_pieces": True, "add_special": True},
    "/detokenize": {"tokens": [1, 2]},
    "/apply-template": {"messages": HI},
}
JUNK: list[Any] = [
    *(None, True, 0, -1, 1.5, 1e308, "", "x", "\U0001f600", [], {}, [None], [[]], ["a"], {"a": {"b": [1]}}),
    *({"type": "text"}, {"type": None}, {"type": []}),
]


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value but the whole."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from paths(item, (*path, key))


def mutate(body: dict[str, Any], draw: random.Random) -> None:
    """Take one value out, or put junk in its place."""
    places = list(paths(body))
    if not places:
        return
    *way, last = draw.choice(places)
    inside: Any = body
    for key in way:
        inside = inside[key]
    if draw.random() < 0.25:
        del inside[last]
    else:
        inside[last] = copy.deepcopy(draw.choice(JUNK))


def test_every_route_with_a_body_has_a_good_one() -> None:
    assert set(BODIES) == {route for route, op in OPERATIONS.items() if op.body}


@pytest.mark.parametrize("route", BODIES)
async def test_no_mutation_is_a_5xx_and_the_schema_takes_what_the_door_takes(route: str) -> None:
    schema = {"$ref": f"#/components/schemas/{OPERATIONS[route].body}", "components": DOCUMENT["components"]}
    validator = jsonschema.Draft202012Validator(schema)
    text = ByteText(form=ReplyForm(reasoning=("<think>", "</think>"), calls="hermes"))
    door = client(saying('<think>a</think>x<tool_call>{"name": "f", "arguments": {}}</tool_call>'), text=text)
    draw = random.Random(route)
    seen: Counter[int] = Counter()
    for attempt in range(120):
        body = copy.deepcopy(BODIES[route])
        for _ in range(min(attempt, draw.randint(0, 2))):  # the first one is as it stands
            mutate(body, draw)
        if attempt % 3 == 0 and OPERATIONS[route].event:
            body["stream"] = True
        reply = await door("POST", route, body)
        assert reply.status < 500, (body, reply.body)
        seen[reply.status] += 1
        if reply.status == 200:
            validator.validate(body)
    assert seen[200] > 20, seen
    assert seen[400] > 20, seen
