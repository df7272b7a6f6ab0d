"""Functions, calls and results in prompts, for templates that print them and those that do not; forms of answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ai_engine.data.chat import encode_chat
from ai_engine.data.template import JinjaTemplate
from ai_engine.ports.errors import InvalidJsonSchema
from ai_engine.ports.text import ReplyForm, ToolChoice
from tests.unit.data.test_template import GEMMA2, QWEN2, SMOLLM2, assistant, system, template, tokenizer, user

LLAMA31 = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' and loop.first and tools %}
        {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}
        {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and value}.\\n' }}
        {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
        {{- message.content + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + '}<|eot_id|>' }}
    {%- elif message.role == 'tool' or message.role == 'ipython' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
MISTRAL = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and loop.first %}{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('IDs should be of length 9!') }}{%- endif %}
            {{- call.function | tojson }}{{- ', "id": "' + call.id + '"}' }}{{- ', ' if not loop.last else ']' }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}
        {{- message.content + eos_token }}
    {%- elif message.role == 'tool' %}
        {%- if message.tool_call_id | length != 9 %}{{- raise_exception('IDs should be of length 9!') }}{%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}' }}
    {%- endif %}
{%- endfor %}
"""
R1 = (
    "{% for m in messages %}{{ m.role + ': ' + m.content.split('</think>')[-1] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'A:<think>\n' }}{% endif %}"
)
EFFORT = "{{ reasoning_effort }}{% for m in messages %}{{ m.content }}{% endfor %}{% if x %}</think>{% endif %}"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather <now>.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": True,
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
TOOLS = [WEATHER, TIME]


def call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


BOTH = [
    user("q"),
    {
        **assistant(None),
        "tool_calls": [call("call_a", "get_weather", '{"city": "Ås"}'), call("call_b", "get_time", "")],
    },
    result("call_b", "12:00"),
    result("call_a", "rain"),
    user("thanks"),
]


class Spy:
    """Encodes with the tokeniser of these tests, and keeps the prompt."""

    def __init__(self, source: str) -> None:
        self.template = JinjaTemplate(source, bos="<bos>", eos="<eos>")
        self.prompt = ""

    def form(self, messages: list[dict[str, Any]], **options: Any) -> ReplyForm:
        encoded = encode_chat(self.template, tokenizer(), messages, **options)
        self.prompt = b"".join(tokenizer().piece(token, skip_special=False) for token in encoded.ids).decode()
        return encoded.form


def test_formats_of_the_families() -> None:
    found = {}
    for name, source in {
        "qwen": QWEN2,
        "smollm2": SMOLLM2,
        "gemma2": GEMMA2,
        "llama": LLAMA31,
        "mistral": MISTRAL,
    }.items():
        about = JinjaTemplate(source, bos="<bos>", eos="<eos>").describe()
        found[name] = (about.calls, about.max_calls, about.reasoning)
    assert found == {
        "qwen": ("hermes", 2, "<think>"),
        "smollm2": ("generic", 0, ""),
        "gemma2": ("generic", 0, ""),
        "llama": ("llama3", 1, ""),
        "mistral": ("mistral", 2, ""),
    }


def test_a_template_with_functions_gets_them() -> None:
    spy = Spy(QWEN2)
    form = spy.form([system("S"), user("q")], tools=TOOLS)
    assert (form.calls, form.names, form.one_call) == ("hermes", ("get_weather", "get_time"), False)
    assert '{"type": "function", "function": {"description": "The weather <now>.", "parameters": ' in spy.prompt
    assert '"name": "get_time"' in spy.prompt
    assert "strict" not in spy.prompt, "templates print all they are given"
    assert "You can call functions" not in spy.prompt


@pytest.mark.parametrize("source", [SMOLLM2, GEMMA2])
def test_a_template_without_functions_gets_instructions(source: str) -> None:
    spy = Spy(source)
    form = spy.form([system("Be brief."), user("q")], tools=TOOLS)
    assert (form.calls, form.names) == ("generic", ("get_weather", "get_time"))
    assert spy.prompt.count("Be brief.") == 1
    assert spy.prompt.index("Be brief.") < spy.prompt.index("You can call functions.") < spy.prompt.index("\nq<")
    assert '{"name": "get_weather", ' in spy.prompt or '"name": "get_weather"' in spy.prompt
    assert "Now call" not in spy.prompt
    spy.form([user("q")], tools=TOOLS, tool_choice=ToolChoice(mode="required"))
    assert "Now call at least one function." in spy.prompt
    spy.form([user("q")], tools=TOOLS, tool_choice=ToolChoice(mode="required", only="get_time", parallel=False))
    assert "Now call get_time." in spy.prompt
    assert "Make one call at a time." in spy.prompt


def test_none_leaves_functions_out() -> None:
    spy = Spy(QWEN2)
    form = spy.form([user("q")], tools=TOOLS, tool_choice=ToolChoice(mode="none"))
    assert (form.calls, form.constraint) == ("", None)
    assert "get_weather" not in spy.prompt


def test_what_the_choice_makes_of_the_answer() -> None:
    spy = Spy(QWEN2)
    loose = [TIME]
    assert spy.form([user("q")], tools=loose).constraint is None
    assert spy.form([user("q")], tools=TOOLS).constraint is not None, "a strict function"
    must = spy.form([user("q")], tools=loose, tool_choice=ToolChoice(mode="required"))
    assert must.constraint is not None
    assert (must.constraint.kind, must.constraint.after, must.constraint.opens) == ("lark", "</think>", "<think>")
    quiet = spy.form(
        [user("q")], tools=loose, tool_choice=ToolChoice(mode="required"), template_kwargs={"enable_thinking": False}
    )
    assert quiet.constraint is not None
    assert quiet.constraint.after == "", "the prompt has closed the reasoning"
    one = spy.form([user("q")], tools=TOOLS, tool_choice=ToolChoice(mode="required", only="get_time"))
    assert (one.names, one.one_call) == (("get_time",), True)
    assert spy.form([user("q")], tools=TOOLS, tool_choice=ToolChoice(parallel=False)).one_call
    bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "extends": {}}}}
    with pytest.raises(InvalidJsonSchema, match="extends"):
        spy.form([user("q")], tools=[bad], tool_choice=ToolChoice(mode="required"))
    assert spy.form([user("q")], tools=[bad]).constraint is None
    some = spy.form([user("q")], tools=[bad, *TOOLS], tool_choice=ToolChoice(mode="required", allowed=("get_time",)))
    assert some.names == ("get_time",)
    assert "get_weather" not in spy.prompt
    with pytest.raises(InvalidJsonSchema) as refused:
        spy.form([user("q")], tools=[*TOOLS, bad], tool_choice=ToolChoice(mode="required", allowed=("f",)))
    assert refused.value.param == "tools[2].function.parameters", "as the client counts them"


def test_history_of_a_template_with_calls() -> None:
    spy = Spy(QWEN2)
    spy.form(BOTH)
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ås"}}\n</tool_call>' in spy.prompt
    assert '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>' in spy.prompt
    assert spy.prompt.count("<tool_response>") == 2


def test_history_of_a_template_that_takes_one_call_a_turn() -> None:
    spy = Spy(LLAMA31)
    spy.form(BOTH, tools=TOOLS)
    order = [
        '{"name": "get_weather", "parameters": {"city": "Ås"}}',
        '"rain"',
        '{"name": "get_time", "parameters": {}}',
    ]
    at = [spy.prompt.index(text) for text in [*order, '"12:00"', "thanks"]]
    assert at == sorted(at), "each call before its result"


def test_history_of_a_template_that_wants_short_ids() -> None:
    spy = Spy(MISTRAL)
    spy.form(BOTH)
    ids = [part.split('"')[0] for part in spy.prompt.split('"id": "')[1:]]
    assert len(set(ids)) == 2
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)
    assert [part.split('"')[0] for part in spy.prompt.split('"call_id": "')[1:]] == [ids[1], ids[0]]
    spy.form([user("q"), {**assistant(None), "tool_calls": [call("a1b2c3d4e", "f", "{}")]}])
    assert '"id": "a1b2c3d4e"' in spy.prompt, "an id that fits stays"


@pytest.mark.parametrize("source", [SMOLLM2, GEMMA2])
def test_history_of_a_template_without_calls(source: str) -> None:
    spy = Spy(source)
    spy.form(BOTH)
    at = [
        spy.prompt.index(text)
        for text in (
            '{"name": "get_weather", "arguments": {"city": "Ås"}}\n{"name": "get_time", "arguments": {}}',
            "Result of get_time:\n12:00",
            "Result of get_weather:\nrain",
            "thanks",
        )
    ]
    assert at == sorted(at)
    spy.form([user("q"), {**assistant("Hm."), "tool_calls": [call("x", "f", "{broken")]}, result("y", "r"), user("z")])
    assert 'Hm.\n{"name": "f", "arguments": {broken}' in spy.prompt
    assert "Result of the function:\nr" in spy.prompt


def test_arguments_that_are_no_object_stay_text() -> None:
    spy = Spy(QWEN2)
    for raw in ("{broken", "[1]", '"x"'):
        spy.form([user("q"), {**assistant(None), "tool_calls": [call("a", "f", raw)]}])
        assert f'"arguments": {json.dumps(raw)}' in spy.prompt


def test_where_an_answer_begins() -> None:
    spy = Spy(R1)
    assert spy.form([user("q")]).inside_reasoning
    assert not spy.form([user("<think>")], add_generation_prompt=False).inside_reasoning
    assert spy.form([user("q"), assistant("<think>Hm")], continue_final_message=True).reasoning == (
        "<think>",
        "</think>",
    )
    assert Spy(QWEN2).form([user("q")]).reasoning == ("<think>", "</think>")
    assert not Spy(QWEN2).form([user("q <think>")]).inside_reasoning
    assert not Spy(QWEN2).form([user("q")], template_kwargs={"enable_thinking": False}).inside_reasoning
    qwen = Spy(QWEN2.replace(".split('</think>')[-1].lstrip('\\n')", ""))
    assert qwen.form([user("q"), assistant("<think>Hm")], continue_final_message=True).inside_reasoning
    assert not qwen.form([user("q"), assistant("<think>Hm</think>So")], continue_final_message=True).inside_reasoning
    assert Spy(SMOLLM2).form([user("<think>")]).reasoning is None


def test_reasoning_effort() -> None:
    assert template("qwen2").render([user("q")], enable_thinking=False).endswith("</think>\n\n")
    spy = Spy(QWEN2)
    spy.form([user("q")], reasoning_effort="none")
    assert spy.prompt.endswith("<think>\n\n</think>\n\n")
    assert spy.form([user("q")], reasoning_effort="high").warnings == ()
    spy.form([user("q")], reasoning_effort="none", template_kwargs={"enable_thinking": True})
    assert not spy.prompt.endswith("</think>\n\n"), "what is said to the template counts"
    own = Spy(EFFORT)
    own.form([user("q")], reasoning_effort="low")
    assert own.prompt.startswith("low")
    always = Spy(R1)
    assert "always reasons" in always.form([user("q")], reasoning_effort="low").warnings[0]
    form = always.form([user("q")], reasoning_effort="none")
    assert (form.inside_reasoning, form.warnings) == (False, ())
    assert always.prompt.endswith("<think>\n\n</think>\n\n"), "the part is closed where it was opened"
    never = Spy(SMOLLM2)
    assert "no reasoning part" in never.form([user("q")], reasoning_effort="low").warnings[0]
    assert never.form([user("q")], reasoning_effort="none").warnings == ()
