"""Chat templates of the families in the wild, role policy, hostile templates, and content that tries to be markup."""

from __future__ import annotations

import json
import time
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ai_engine.data import template as template_module
from ai_engine.data.chat import encode_chat
from ai_engine.data.safetensors import SafetensorsDir
from ai_engine.data.template import CHATML, JinjaTemplate
from ai_engine.data.tokenizer import CONTROL, NORMAL, ModelTokenizer
from ai_engine.data.tool_prompt import template_history
from ai_engine.ports.errors import InvalidRequest, ModelFileError, UnsupportedParameter
from ai_engine.ports.model import TokenizerData
from tests.golden.tiny_gguf import TINY

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou "
    "are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA2 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ "
    "raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}"
    "{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
GEMMA3 = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {{ item['text'] | trim }}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\n'}}
{%- endif -%}
"""
LLAMA3 = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + "
    "message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
    "{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant"
    "<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN2 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\\n' + message.content.split('</think>')[-1].lstrip('\\n') }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
            {{- tool_call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
FAMILIES = {"smollm2": SMOLLM2, "gemma2": GEMMA2, "gemma3": GEMMA3, "llama3": LLAMA3, "qwen2": QWEN2, "chatml": CHATML}
MARKUP = ["<bos>", "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "<|eot_id|>"]
MARKUP += ["<|start_header_id|>", "<|end_header_id|>", "<|im_"]


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def system(text: Any) -> dict[str, Any]:
    return {"role": "system", "content": text}


@cache
def template(family: str) -> JinjaTemplate:
    return JinjaTemplate(FAMILIES[family], bos="<bos>", eos="<eos>")


@cache
def tokenizer() -> ModelTokenizer:
    """SmolLM-like, with every family's markup as control tokens."""
    data = SafetensorsDir(TINY / "llama-tied").tokenizer()
    spec = json.loads(data.tokenizer_json)
    vocab = {text: token for text, token in spec["model"]["vocab"].items() if not text.startswith("<|")}
    tokens = [*vocab, *MARKUP]
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in spec["model"]["merges"]]
    types = [NORMAL] * len(vocab) + [CONTROL] * len(MARKUP)
    bos = tokens.index("<bos>")
    return ModelTokenizer(
        TokenizerData(
            kind="gpt2", pre="smollm", tokens=tokens, token_types=types, merges=merges, bos_id=bos, add_bos=False
        )
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plain_conversation(family: str) -> None:
    messages = [system("Be brief."), user(" Hi there "), assistant("Hello"), user("Bye")]
    prompt = template(family).render(messages)
    for text in ("Be brief.", "Hi there", "Hello", "Bye"):
        assert prompt.count(text) == 1
    ids = encode_chat(template(family), tokenizer(), messages).ids
    assert ids == tokenizer().encode(prompt).ids, "without markup in the content the prompt is simply encoded"
    assert prompt.endswith(("assistant\n", "model\n", "assistant<|end_header_id|>\n\n"))
    assert not template(family).render(messages, add_generation_prompt=False).endswith(("assistant\n", "model\n"))


def test_exact_prompts() -> None:
    assert template("smollm2").render([user("Hi")]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    gemma = "<bos><start_of_turn>user\nS\n\nHi<end_of_turn>\n<start_of_turn>model\n"
    assert template("gemma2").render([system("S"), user("Hi")]) == gemma
    assert template("gemma3").render([system("S"), user("Hi")]) == gemma
    assert template("llama3").render([user(" Hi ")]) == (
        "<bos><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_what_templates_can_do() -> None:
    info = {family: template(family).describe() for family in FAMILIES}
    assert [family for family, about in info.items() if not about.system_role] == ["gemma2"]
    assert [family for family, about in info.items() if about.alternates] == ["gemma2", "gemma3"]
    assert [family for family, about in info.items() if about.tools] == ["qwen2"]


def test_role_policy() -> None:
    render = template("gemma2").render
    assert render([{"role": "developer", "content": "S"}, user("Hi")]) == render([user("S\n\nHi")])
    assert render([user("a"), user("b"), assistant("c"), assistant("d"), user("e")]) == render(
        [user("a\n\nb"), assistant("c\n\nd"), user("e")]
    )
    assert render([system("S")]) == render([user("S")])
    assert render([user("a"), assistant("b"), system("S"), user("c")]) == render(
        [user("a"), assistant("b"), user("S\n\nc")]
    )
    with pytest.raises(InvalidRequest, match="must alternate"):
        render([assistant("first")])
    chatml = template("chatml").render
    assert chatml([{"role": "developer", "content": "S"}]) == chatml([system("S")])


def test_content_forms() -> None:
    render = template("chatml").render
    assert render([user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])]) == render([user("ab")])
    assert render([user("x"), assistant(None)]) == render([user("x"), assistant("")])
    with pytest.raises(UnsupportedParameter, match="image_url"):
        render([user([{"type": "image_url", "image_url": {}}])])
    with pytest.raises(InvalidRequest, match=r"messages\[0\].content"):
        render([user(3)])
    with pytest.raises(InvalidRequest, match=r"messages\[0\].role"):
        render([{"content": "x"}])
    with pytest.raises(InvalidRequest, match="empty"):
        render([])


def test_tools_and_calls() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"é<": "'&"}}}
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    messages = [user("q"), {**assistant(None), "tool_calls": [call]}, {"role": "tool", "content": "r"}]
    prompt = template("qwen2").render(template_history(messages, one_call=False, short_ids=False), tools=[tool])
    assert json.dumps(tool, ensure_ascii=False) in prompt
    assert '{"name": "f", "arguments": {"x": "é"}}' in prompt
    assert "<tool_response>\nr\n" in prompt
    assert template("qwen2").render([user("q")], enable_thinking=False).endswith("</think>\n\n")


class Noon:
    def now_s(self) -> float:
        return 0.0

    def wall_s(self) -> float:
        return 86400 * 365.0 + 43200


def test_dialect() -> None:
    def render(source: str, **names: Any) -> str:
        return JinjaTemplate(source, clock=Noon()).render([user("x")], **names)

    assert render("{{ strftime_now('%Y') }}") == "1971"
    assert render("{% generation %}a{% endgeneration %}b") == "ab"
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{{ {'a': '<é>'} | tojson }}{{ [1] | tojson(indent=2) }}") == '{"a": "<é>"}[\n  1\n]'
    assert render("{% for i in [1, 2] %}{{ loop.index }}{{ loop.last }}{% endfor %}") == "1False2True"
    assert render("{{ x }}|{{ bos_token }}", x="v", bos_token="mine") == "v|"
    assert render("  {% if true %}\na\n  {% endif %}\nb") == "a\nb"


def test_defaults_when_the_file_has_no_template() -> None:
    def origin(*tokens: str) -> str:
        made = JinjaTemplate.from_tokenizer(TokenizerData(kind="llama", tokens=[*tokens, "<s>"], bos_id=len(tokens)))
        assert made.describe().warnings
        assert made.render([system("S"), user("Hi")])
        return made.describe().origin

    assert origin("<|im_start|>") == "chatml"
    assert origin("<start_of_turn>") == "gemma"
    assert origin() == "plain"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        "{{ 'a' * 999999999 }}",
        "{{ [0] * 999999999 }}",
        "{{ 9 ** 999999 }}",
        "{{ '%999999999d' % 1 }}",
        "{{ 'a'.ljust(999999999) }}",
        "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ range(999999999) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x=999999) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{% set n = namespace(x=[]) %}{% for i in range(999) %}{% set n.x = n.x + ['a' * (9999999 - i)] %}{% endfor %}",
        "{% set x = [1] * 9999 %}{{ [[x] * 9999] * 9999 }}",
        "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
        "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x|string }}",
        "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x|tojson }}",
        "{% set s = 'a' * 99999 %}{{ s | replace('a', s) }}",
        "{% set s = 'a' * 99999 %}{{ s.replace('a', s) }}",
        "{% set s = 'a' * 99999 %}{{ range(9999) | map('string') | join(s) }}",
        "{% set s = 'a' * 99999 %}{{ range(9999) | join(s) }}",
        "{% set s = 'a' * 99999 %}{{ s.join(s) }}",
        "{{ ('a\n' * 99999) | indent(999999) }}",
        "{{ ('\t' * 99999).expandtabs(999999) }}",
        "{{ ('a' * 99999).translate({97: 'b' * 99999}) }}",
        "{{ '{:>999999999}'.format('a') }}",
        "{{ '{:>{w}}'.format('a', w='999999999') }}",
        "{{ [1] | tojson(indent=999999999) }}",
        "{{ [1] | slice(999999999) | list }}",
        "{{ ([[1] * 99999] * 99) | sum(start=[]) }}",
        "{% set x %}{% for i in range(999) %}{{ 'a' * 9999999 }}{% endfor %}{% endset %}",
        "{% macro m() %}{% for i in range(999) %}{{ 'a' * 9999999 }}{% endfor %}{% endmacro %}{{ m() | length }}",
    ],
)
def test_hostile_templates_are_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "MAX_ITERATIONS", 50_000)
    made = JinjaTemplate(source)
    with pytest.raises((ModelFileError, InvalidRequest)):
        made.render([user("x")])


def test_a_template_that_only_takes_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "MAX_SECONDS", 0.2)
    work = "{% set y = x | sort | sort | reverse | list | sort | map('string') | list | sort %}"
    made = JinjaTemplate("{% set x = range(9999) | list %}{% for i in range(9999) %}" + work + "{% endfor %}")
    start = time.monotonic()
    with pytest.raises(ModelFileError, match="stopped by its sandbox"):
        made.render([user("x")])
    assert time.monotonic() - start < 5


def test_filters_of_honest_templates_work_as_ever() -> None:
    source = (
        "{{ 1 ~ '-' ~ none ~ [1, 'a'] }}|{{ messages | map(attribute='content') | join(', ') }}|"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}|{{ 'a\nb' | indent(2) }}|"
        "{{ missing | default('d') }}{{ missing }}|{{ [3, 1] | sort | first }}|{{ 'x'.replace('x', 'yy') }}|"
        "{{ ['p', 'q'] | join }}|{{ ','.join(messages | map(attribute='role')) }}|{{ [1, 2] | sum }}|{{ 2.5 * 2 }}|"
        "{{ {'a': [1]} | tojson }}|{{ {'a': 1} | items | list }}|{{ '{:02d}'.format(7) }}|{{ 'ab' | reverse }}|"
        "{% set b %}{{ 1 }}{{ 'c' | upper }}{% endset %}{{ b }}"
    )
    expected = "1-None[1, 'a']|one, two|2|a\n  b|d|1|yy|pq|user,user|3|5.0|{\"a\": [1]}|[('a', 1)]|07|ba|1C"
    assert JinjaTemplate(source).render([user("one"), user("two")]) == expected


def test_what_is_no_template() -> None:
    for source in ("{% for %}", "{{ 1 +", "{% endif %}", "x" * (template_module.MAX_SOURCE_CHARS + 1)):
        with pytest.raises(ModelFileError, match="chat template"):
            JinjaTemplate(source)


PARTS = st.lists(st.sampled_from([*MARKUP, "a", " ", "\n", "<", "|", "<|im_end", "\ufdd0", "é"]), max_size=8)


@settings(deadline=None)  # the machine may be busy
@given(PARTS.map("".join), PARTS.map("".join), st.sampled_from(sorted(FAMILIES)))
def test_content_never_becomes_control_tokens(one: str, two: str, family: str) -> None:
    """Whatever is written, the control tokens are those of the same conversation with harmless content."""
    control = [tokenizer().encode(text).ids[0] for text in MARKUP[:-1]]

    def controls(first: str, second: str) -> list[int]:
        messages = [system(first), user(second), assistant(first), user([{"type": "text", "text": second}])]
        ids = encode_chat(template(family), tokenizer(), messages).ids
        return [token for token in ids if token in control]

    assert controls(one, two) == controls("x", "y")


@pytest.mark.parametrize("family", FAMILIES)
def test_markup_in_content_is_text(family: str) -> None:
    messages = [user("say <|im_end|> and <end_of_turn> and <|eot_id|>")]
    ids = encode_chat(template(family), tokenizer(), messages).ids
    text = b"".join(tokenizer().piece(token, skip_special=False) for token in ids).decode()
    assert text == template(family).render(messages), "the model sees the same characters"


def test_markup_in_names_keys_and_tools() -> None:
    tool = {"function": {"name": "<|im_end|>", "parameters": {"<|im_end|>": 1}}}
    call = {"function": {"name": "<|im_end|>", "arguments": '{"<|im_end|>": "<|im_end|>", "a": "<|im_\\u0065nd|>"}'}}
    messages = [user("q"), {**assistant("<|im_end|>"), "tool_calls": [call]}]
    ids = encode_chat(template("qwen2"), tokenizer(), messages, tools=[tool]).ids
    end = tokenizer().encode("<|im_end|>").ids[0]
    plain = encode_chat(template("qwen2"), tokenizer(), [user("q"), assistant("a")], tools=[{"function": {}}]).ids
    assert ids.count(end) == plain.count(end), "not even one that an escape in the arguments spells"


def test_arguments_of_the_template() -> None:
    kwargs = {"enable_thinking": False, "note": "<|im_end|>"}
    ids = encode_chat(template("qwen2"), tokenizer(), [user("q")], template_kwargs=kwargs).ids
    assert b"</think>" in b"".join(tokenizer().piece(token, skip_special=False) for token in ids)
    for name in ("messages", "tools", "self", "add_generation_prompt"):
        with pytest.raises(InvalidRequest, match=f"may not set '{name}'"):
            encode_chat(template("qwen2"), tokenizer(), [user("q")], template_kwargs={name: 1})
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        encode_chat(template("qwen2"), tokenizer(), [{**user("q"), "extra": deep}])


def test_continue_final_message() -> None:
    for family in FAMILIES:
        messages = [user("Tell a story"), assistant("Once upon <|im_end|> ")]
        ids = encode_chat(template(family), tokenizer(), messages, continue_final_message=True).ids
        text = b"".join(tokenizer().piece(token, skip_special=False) for token in ids).decode()
        assert text.endswith("Once upon <|im_end|> ")
    with pytest.raises(InvalidRequest, match="final message"):
        encode_chat(template("chatml"), tokenizer(), [assistant(None)], continue_final_message=True)
