"""Answers with function calls in every format, and what must be read from them: 300 cases, some written by hand for
what goes wrong elsewhere, the rest drawn with a fixed seed. Owns no assertion.
"""

from __future__ import annotations

import json
import random
from typing import Any, NamedTuple

from ai_engine.data.tools import FORMATS, CallFormat

NAMES = ("get_weather", "get_time", "f", "get_weather_at", "search-docs.v2")
NUM_CASES = 300


class Case(NamedTuple):
    """``calls`` are (name, arguments as JSON text); ``content`` is the visible text."""

    form: str
    text: str
    content: str
    calls: tuple[tuple[str, str], ...] = ()


W = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
T = '{"name": "get_time", "arguments": {}}'
OSLO = ("get_weather", '{"city": "Oslo"}')
NOW = ("get_time", "{}")
NASTY = r'{"a": "</tool_call>", "b": "<tool_call>{\"name\": \"f\"}", "c": "\\\"}]{[", "d": [[{"e": {}}], "}"]}'

HERMES = [
    Case("hermes", f"<tool_call>\n{W}\n</tool_call>", "", (OSLO,)),
    Case("hermes", f"<tool_call>{W}</tool_call>", "", (OSLO,)),
    Case("hermes", f"\n\n<tool_call>\r\n{W}\r\n</tool_call>\n", "", (OSLO,)),
    Case("hermes", f"Let me look.\n<tool_call>\n{W}\n</tool_call>", "Let me look.", (OSLO,)),
    Case("hermes", f"a\n<tool_call>{W}</tool_call>\nb\n<tool_call>{T}</tool_call>\nc\n", "a\nb\nc", (OSLO, NOW)),
    Case("hermes", f"<tool_call>{W}</tool_call>\n\nDone.", "Done.", (OSLO,)),
    Case("hermes", f"<tool_call>{W}</tool_call>{T}", '{"name": "get_time", "arguments": {}}', (OSLO,)),
    Case("hermes", f"<tool_call>\n{W}\n{T}\n</tool_call>", "", (OSLO, NOW)),
    Case("hermes", f"<tool_call>[{W}, {T}]</tool_call>", "", (OSLO, NOW)),
    Case("hermes", f"<tool_call>{W}\n<tool_call>{T}", "", (OSLO, NOW)),
    Case("hermes", f"<tool_call>{W}}}</tool_call>", "", (OSLO,)),
    Case("hermes", f'<tool_call>{{"name": "f", "arguments": {NASTY}}}</tool_call>', "", (("f", NASTY),)),
    Case("hermes", '<tool_call>{"arguments": {"city": "Oslo"}, "name": "get_weather"}</tool_call>', "", (OSLO,)),
    Case("hermes", '<tool_call>{"name": "get_weather", "parameters": {"city": "Oslo"}}</tool_call>', "", (OSLO,)),
    Case("hermes", '<tool_call>{"id": 7, "x": [1, "]"], "name": "get_time"}</tool_call>', "", (NOW,)),
    Case("hermes", '<tool_call>{"name": "get_time", "arguments": null}</tool_call>', "", (NOW,)),
    Case("hermes", '<tool_call>{"arguments": null, "name": "get_time"}</tool_call>', "", (NOW,)),
    Case("hermes", '<tool_call>{"name": "get_time", "arguments": ""}</tool_call>', "", (NOW,)),
    Case("hermes", '<tool_call>{"name": "get_time", "arguments": {}, "arguments": {"x": 1}}</tool_call>', "", (NOW,)),
    Case("hermes", r'<tool_call>{"name": "get_weather", "arguments": "{\"city\": \"Oslo\"}"}</tool_call>', "", (OSLO,)),
    Case("hermes", r'<tool_call>{"arguments": "{\"city\": \"Oslo\"}", "name": "get_weather"}</tool_call>', "", (OSLO,)),
    Case("hermes", r'<tool_call>{"n\u0061me": "get_\u0074ime", "arguments": {}}</tool_call>', "", (NOW,)),
    Case("hermes", r'<tool_call>{"name": "f", "arguments": "\"}"}</tool_call>', "", (("f", '"}'),)),
    Case("hermes", f'<tool_call>{{"type": "function", "function": {W}}}</tool_call>', "", (OSLO,)),
    Case("hermes", f'<tool_call>{{"function": {W}, "type": "function"}}</tool_call>', "", (OSLO,)),
    Case(
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "x\ny\tz"}}</tool_call>',
        "",
        (("f", '{"a": "x\\ny\\tz"}'),),
    ),
    Case("hermes", '<tool_call>{"name": "f", "arguments": [1, 2]}</tool_call>', "", (("f", "[1, 2]"),)),
    # cut off by the token limit
    Case(
        "hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "Os', "", (("get_weather", '{"city": "Os'),)
    ),
    Case("hermes", f"<tool_call>{W}</tool_", "", (OSLO,)),
    Case("hermes", f"<tool_call>{W[:-1]}", "", (OSLO,)),
    Case("hermes", '<tool_call>{"name": "get_wea', '<tool_call>{"name": "get_wea'),
    Case("hermes", "Hello <tool_c", "Hello <tool_c"),
    # broken
    Case("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1]}}</tool_call> b', "b", (("f", '{"a": 1]}}'),)),
    Case("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1]} </tool', "", (("f", '{"a": 1]} </tool'),)),
    Case("hermes", '<tool_call>{"name": f}</tool_call>', '<tool_call>{"name": f}</tool_call>'),
    Case(
        "hermes",
        '<tool_call>{"name": "f", "arguments": 7}</tool_call>',
        '<tool_call>{"name": "f", "arguments": 7}</tool_call>',
    ),
    Case("hermes", f"<tool_call>\n<tool_call>\n{W}\n</tool_call>", "<tool_call>", (OSLO,)),
    Case("hermes", f"<<tool_call>{W}</tool_call>", "<", (OSLO,)),
    Case("hermes", f"<tool_call>x<tool_call>{W}</tool_call>", "<tool_call>x", (OSLO,)),
    Case("hermes", f"<tool_call>{W} oops</tool_call>", "oops</tool_call>", (OSLO,)),
    Case("hermes", f"<tool_call>{W}<</tool_call>", "<</tool_call>", (OSLO,)),
    # what only looks like a call
    Case("hermes", 'Use <tool_call> tags, or {"name": "f"}.', 'Use <tool_call> tags, or {"name": "f"}.'),
    Case("hermes", f"{W}", f"{W}"),
    Case(
        "hermes",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
    ),
    Case(
        "hermes", '<tool_call>{"name": "get_weathers"}</tool_call>', '<tool_call>{"name": "get_weathers"}</tool_call>'
    ),
    Case("hermes", f'<tool_call>{{"name": "nope"}} <tool_call>{W}</tool_call>', '<tool_call>{"name": "nope"}', (OSLO,)),
    Case("hermes", "a < b <tool a </tool_call> \n", "a < b <tool a </tool_call> \n"),
    Case("hermes", "  padded\u3000text\n\n", "  padded\u3000text\n\n"),
    Case("hermes", "", ""),
]
OTHERS = [
    Case("llama3", '{"name": "get_weather", "parameters": {"city": "Oslo"}}', "", (OSLO,)),
    Case("llama3", '\n{"type": "function", "name": "get_weather", "parameters": {"city": "Oslo"}}', "", (OSLO,)),
    Case("llama3", f"<|python_tag|>{W}; {T}", "", (OSLO, NOW)),
    Case("llama3", f"{W}; {T}", "", (OSLO, NOW)),
    Case("llama3", f"[{W}, {T}]", "", (OSLO, NOW)),
    Case("llama3", f"{W}\nIt rains.", "It rains.", (OSLO,)),
    Case("llama3", '<|python_tag|>print("{}")', '<|python_tag|>print("{}")'),
    Case("llama3", '{"name": "Ada", "parameters": {}}', '{"name": "Ada", "parameters": {}}'),
    Case("llama3", '{"title": "x", "name": "f"}', '{"title": "x", "name": "f"}'),
    Case("llama3", '{"name": "f", "age": 3}', '{"name": "f", "age": 3}'),
    Case("llama3", "[link](http://x) {", "[link](http://x) {"),
    Case("llama3", f"Sure: {W}", f"Sure: {W}"),
    Case("llama3", '{"name": "f", "parameters": {"a": 1]} x', "", (("f", '{"a": 1]} x'),)),
    Case("llama3", f'{{"name": "f", "parameters": {{"a": 1]}} <|python_tag|>{W}', "", (("f", '{"a": 1]} '), OSLO)),
    Case("llama3", "{", "{"),
    Case("generic", W, "", (OSLO,)),
    Case("generic", f"{W}\n{T}\n", "", (OSLO, NOW)),
    Case("generic", f"<tool_call>{W}</tool_call>", "", (OSLO,)),
    Case("generic", '{"answer": 42}', '{"answer": 42}'),
    Case("generic", '{"name": "get_weather"', '{"name": "get_weather"'),
    Case("mistral", f"[TOOL_CALLS] [{W}, {T}]", "", (OSLO, NOW)),
    Case("mistral", f"[TOOL_CALLS][{W}]", "", (OSLO,)),
    Case("mistral", f'Hm. [TOOL_CALLS] [{{"id": "abc", {W[1:]}]', "Hm.", (OSLO,)),
    Case("mistral", "[TOOL_CALLS] none", "[TOOL_CALLS] none"),
    Case("mistral", "[TOOL_[TOOL_CALL] x", "[TOOL_[TOOL_CALL] x"),
    Case("mistral-args", '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}', "", (OSLO,)),
    Case("mistral-args", '[TOOL_CALLS]get_weather[CALL_ID]9xYz[ARGS]{"city": "Oslo"}', "", (OSLO,)),
    Case("mistral-args", '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]get_time[ARGS]{}', "", (OSLO, NOW)),
    Case("mistral-args", "[TOOL_CALLS]get_weather_at[ARGS]{}", "", (("get_weather_at", "{}"),)),
    Case("mistral-args", "[TOOL_CALLS]get_weathe[ARGS]{}", "[TOOL_CALLS]get_weathe[ARGS]{}"),
    Case("mistral-args", "[TOOL_CALLS]nothing [ARGS]{}", "[TOOL_CALLS]nothing [ARGS]{}"),
    Case("mistral-args", "[TOOL_CALLS]f[ARGX]{}", "[TOOL_CALLS]f[ARGX]{}"),
    Case(
        "mistral-args", '[TOOL_CALLS]f[ARGS]{"a": [}] x[TOOL_CALLS]f[ARGS]{}', "", (("f", '{"a": [}] x'), ("f", "{}"))
    ),
]

WORDS = (
    "plain", "", 'quo"te', "back\\slash", "new\nline", "tab\t", "{", "}", "}}]", "[[", "<tool_call>", "</tool_call>",
    '{"name": "f"}', "[TOOL_CALLS]", "<|python_tag|>", "größe", "日本語", "😀👩\u200d👩\u200d👧", "\\u0041", "\u2028",
    "a" * 60, " ", "'", "/", "<think>", ";", "[ARGS]", "\x7f", "e\u0301",
)  # fmt: skip
TEXTS = (
    "Let me check.",
    "I think 1 < 2 and {x} holds.",
    "見てみます。",
    "👍🏽 ok",
    "Look:\n- one\n- two",
    "<tool",
    "So [TOOL",
)


def arguments(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(8 if depth < 3 else 6)
    if depth == 0:
        kind = 7
    if kind < 3:
        return rng.choice(WORDS)
    if kind < 6:
        return rng.choice((0, -1, 3.5, 1e30, True, False, None, 12345678901234567890))
    items = [arguments(rng, depth + 1) for _ in range(rng.randrange(4))]
    return items if kind == 6 else {rng.choice(WORDS) + str(index): item for index, item in enumerate(items)}


def dumped(rng: random.Random, value: Any) -> str:
    style: dict[str, Any] = rng.choice(
        ({}, {"separators": (",", ":")}, {"indent": 2}, {"indent": 1, "ensure_ascii": False})
    )
    return json.dumps(value, **{"ensure_ascii": rng.random() < 0.3, **style})


def one_call(rng: random.Random, form: CallFormat, name: str, raw: str) -> str:
    if form.named:
        return f"{name}{form.named}{raw}"
    key = rng.choice(("arguments", "parameters"))
    space = rng.choice(("", " ", "\n"))
    members = [f'"name":{space}"{name}"', f'"{key}":{space}{raw}']
    if rng.random() < 0.2:
        members.reverse()
    if rng.random() < 0.2:
        members.insert(rng.randrange(2), '"type": "function"')
    return f"{{{space}" + f",{space}".join(members) + f"{space}}}"


def drawn(seed: int) -> Case:
    rng = random.Random(seed)
    form = FORMATS[rng.choice(tuple(FORMATS))]
    calls = [(rng.choice(NAMES), dumped(rng, arguments(rng))) for _ in range(rng.choice((0, 1, 1, 1, 2, 3)))]
    lead = rng.choice((*TEXTS, "", "", "")) if not form.bare or not calls else ""
    tail = rng.choice((*TEXTS[:-2], "", "", "", "", "")) if form.end and calls else ""
    texts = [one_call(rng, form, *call) for call in calls]
    if not calls:
        body = ""
    elif form.listed:
        body = f"{form.begin} [{', '.join(texts)}]"
    elif form.bare:
        body = rng.choice(("\n", "; ", " ")).join(texts)
    else:
        space = rng.choice(("", "\n", " \r\n")) if form.end else ""
        body = rng.choice(("\n", "")).join(f"{form.begin}{space}{text}{space}{form.end}" for text in texts)
    gap = rng.choice(("\n", " ", "\n\n", ""))
    text = (lead + gap if lead and body else lead) + body + (gap + tail if tail else "")
    content = lead + (gap if lead and tail else "") + tail
    return Case(form.name, text, content, tuple(calls))


BY_HAND = [*HERMES, *OTHERS]
CASES = [*BY_HAND, *(drawn(seed) for seed in range(NUM_CASES - len(BY_HAND)))]
