"""Chat templates: messages to prompt text, in a sandbox. Owns the Jinja dialect of model files, the limits on hostile
templates and the role policy. Turning the prompt into ids, safely, is chat.py's.

Dialect: that of transformers' `apply_chat_template` (trim_blocks, lstrip_blocks, `tojson` without HTML escaping, loop
controls, raise_exception, strftime_now, and the {% generation %} tag, which is read and has no effect).

Role policy, found out by rendering probes when the template is made:
- `developer` is `system`.
- A template that refuses or drops `system` gets the system text at the head of the first user turn, after it a blank
  line.
- A template that demands alternating roles gets consecutive turns of one role joined by a blank line.
- Content given as text parts is joined; null content is empty.
Found out in the same way: whether it prints functions, and earlier calls (tool_prompt.py does what it does not).
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from ai_engine.data.reasoning import find_tags
from ai_engine.data.tools import FORMATS, find_format
from ai_engine.ports.clock import Clock, SystemClock
from ai_engine.ports.errors import InvalidRequest, ModelFileError, UnsupportedParameter
from ai_engine.ports.model import TokenizerData

MAX_SOURCE_CHARS: Final = 1 << 20
MAX_OUTPUT_CHARS: Final = 1 << 25
MAX_ITERATIONS: Final = 5_000_000
MAX_SECONDS: Final = 10.0
MAX_BUILT: Final = 1 << 28
"""Characters and items of all that one rendering builds on its way."""
MAX_BITS: Final = 1 << 12
_TAKES_ITEMS: Final = frozenset(
    {"batch", "dictsort", "groupby", "items", "join", "list", "map", "reject", "rejectattr", "reverse", "select"}
    | {"selectattr", "slice", "sort", "sum", "unique"}
)
_ONLY_LOOKS: Final = frozenset({"attr", "count", "d", "default", "first", "last", "length", "max", "min"})
_SPEC: Final = re.compile(r":[^}]*")
_WIDTH: Final = re.compile(r"\d{5}")

CHATML: Final = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA: Final = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' "
    "else message['role']) + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
PLAIN: Final = (
    "{% for message in messages %}{{ message['role'] | capitalize + ': ' + message['content'] + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


class TemplateInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What `describe` tells: where the template comes from and what it can do."""

    origin: str  # "file", or the name of the default that stands in
    system_role: bool
    alternates: bool
    tools: bool
    calls: str  # the format of calls, of data.tools.FORMATS
    max_calls: int  # earlier calls that a turn of the assistant may have: 0, 1, or 2 for any number
    reasoning: str  # the tag that begins a reasoning part, if the model writes one
    warnings: list[str]


class _Refused(Exception):
    """The template called raise_exception."""


class _Generation(Extension):
    """{% generation %}...{% endgeneration %} marks assistant text for training; here its body simply renders."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Joins(NodeTransformer):
    """`a ~ b` as a filter, since the sandbox sees filters and not `~`."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        first, *rest = node.nodes
        return self.generic_visit(nodes.Filter(first, "concatenated", rest, [], None, None, lineno=node.lineno))


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a budget: steps (loop iterations, operations, calls, filters), time, the size of what one
    operation may build, and of all that is built together.

    One render at a time (the budget belongs to the environment); JinjaTemplate holds a lock.
    """

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
        for name in ("center", "format", "random", "wordwrap", "urlize", "xmlattr", "pprint", "filesizeformat"):
            del self.filters[name]
        self.filters["tojson"] = _tojson
        self.filters["concatenated"] = lambda *values: "".join(map(str, values))
        self.filters = {name: self._limited(name, function) for name, function in self.filters.items()}
        self.filters["counted"] = self._counted
        self.finalize = self._weighed
        self.globals.pop("lipsum", None)
        self.globals["raise_exception"] = _refuse
        self.start()

    def start(self) -> None:
        self._deadline = time.monotonic() + MAX_SECONDS
        self._left = MAX_ITERATIONS
        self._room = MAX_BUILT

    def tick(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise SecurityError(f"more than {MAX_ITERATIONS} steps")
        if time.monotonic() > self._deadline:
            raise SecurityError(f"more than {MAX_SECONDS:g} seconds")

    def _spend(self, size: int) -> None:
        """Before something of ``size`` characters or items is built."""
        self._room -= size
        if size > MAX_OUTPUT_CHARS or self._room < 0:
            raise SecurityError(f"values of more than {MAX_OUTPUT_CHARS} items, or {MAX_BUILT} in all")

    def _weighed(self, value: Any) -> Any:
        """``value``, whose text is about to be made, unless that could be too long."""
        if not isinstance(value, str):
            self._spend(self._weight(value))
        return value

    def _weight(self, value: Any) -> int:
        """Characters and items of a value and of all that it holds, as often as it holds it."""
        self.tick()
        if isinstance(value, Mapping):
            return sum(self._weight(key) + self._weight(item) for key, item in value.items())
        if isinstance(value, (list, tuple)):
            return sum(map(self._weight, value)) + len(value)
        return _length(value) or 1

    def _limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The filter, checked like a call, with the size of what it may build worked out first."""
        first = int(hasattr(function, "jinja_pass_arg"))  # it gets the context, say, before the value

        @functools.wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            self._check_arguments(args, kwargs)
            value, given = args[first], [*args[first + 1 :], *kwargs.values()]
            if name in _TAKES_ITEMS and isinstance(value, Iterable) and not isinstance(value, (Sequence, Mapping)):
                value = list(self._counted(value))
                args = (*args[:first], value, *args[first + 1 :])
            self._spend(self._size_of(name, value, given))
            return function(*args, **kwargs)

        return limited

    def _size_of(self, name: str, value: Any, given: Sequence[Any]) -> int:
        """An upper bound of what a filter, or a method of a text, builds."""
        if name in _ONLY_LOOKS:
            return 0
        if name in _TAKES_ITEMS - {"join", "sum"}:
            return _length(value)
        size = self._weight(value)
        if name in ("concatenated", "sum", "translate"):
            more = sum(map(self._weight, given))
            return size + more if name == "concatenated" else size * (1 + more + _length(value) * (name == "sum"))
        longest = max((abs(item) if isinstance(item, int) else _length(item) for item in given), default=0)
        if name == "join":
            return size + _length(value) * longest
        mark = {"replace": str(given[0]) if given else "", "indent": "\n", "expandtabs": "\t"}.get(name)
        if mark is not None:
            return size + (value.count(mark) + 1 if isinstance(value, str) else size) * longest
        return size * (1 + longest) if name == "tojson" else size + longest

    def _check_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.tick()
        if any(isinstance(arg, int) and abs(arg) > 1_000_000 for arg in (*args, *kwargs.values())):
            raise SecurityError("a number above 1,000,000 as an argument")

    def concat(self, parts: Iterable[str]) -> str:
        """The text of a macro or a block, from its parts."""
        found = list(parts)
        self._spend(sum(map(len, found)))
        return "".join(found)

    def _counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.tick()
            yield item

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Joins().visit(super()._parse(source, name, filename))
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None, lineno=loop.lineno)
        return tree

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self._check_arguments(args, kwargs)
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps str.format
        text, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(text, str):
            if name in ("format", "format_map") and (_WIDTH.search(text) or "{" in "".join(_SPEC.findall(text))):
                raise SecurityError("a width of many digits, or one that is computed, in a format")
            if name == "join" and args and not _length(args[0]):
                args = (list(__self._counted(args[0])),)
            __self._spend(__self._size_of(name, *((args[0], [text]) if name == "join" and args else (text, args))))
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.tick()
        size = _length(left) + _length(right)
        if operator == "*" and size:
            count = left if isinstance(left, int) else right
            size = (self._weight(left) + self._weight(right)) * (count if isinstance(count, int) else 1)
        elif isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_BITS:
            raise SecurityError("arithmetic of large numbers")
        if operator == "**" and (abs(left) > 1 << 16 or abs(right) > 64):
            raise SecurityError("a power of large numbers")
        if operator == "%" and isinstance(left, str):
            raise SecurityError("'%' formatting")
        self._spend(size)
        return super().call_binop(context, operator, left, right)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple, range)) else 0


def _refuse(message: str = "") -> NoReturn:
    raise _Refused(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class JinjaTemplate:
    """Implements ports.text.ChatTemplate. Thread-safe.

    ``bos`` and ``eos`` are the tokens' texts. Raises ModelFileError when the source is no template.
    """

    def __init__(
        self,
        source: str,
        *,
        bos: str = "",
        eos: str = "",
        origin: str = "file",
        clock: Clock | None = None,
        vocabulary: Callable[[str], bool] = lambda text: False,
    ) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise ModelFileError(f"chat template: {len(source)} characters, expected at most {MAX_SOURCE_CHARS}")
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._env = _Sandbox()
        self._env.globals["strftime_now"] = self._strftime
        self._names = {"bos_token": bos, "eos_token": eos}
        self._warnings: list[str] = []
        try:
            self._template = self._env.from_string(source)
        except (jinja2.TemplateError, RecursionError, ValueError) as error:
            raise ModelFileError(f"chat template: {error}; give another one with --chat-template") from error
        self._origin = origin
        self.source = source
        self.tags = find_tags(source, vocabulary)
        self._probe()

    @classmethod
    def from_tokenizer(cls, data: TokenizerData, *, clock: Clock | None = None) -> JinjaTemplate:
        """The file's template; without one ChatML or Gemma's turns if the vocabulary has their markers, else a plain
        "Role: text" form, with a warning: a base model was not trained on any of them."""
        tokens = set(data.tokens)
        bos, eos = _text_of(data, data.bos_id), _text_of(data, data.eos_ids[0] if data.eos_ids else None)

        def has(text: str) -> bool:
            return text in tokens or f'"{text}"' in data.tokenizer_json

        if data.chat_template:
            return cls(data.chat_template, bos=bos, eos=eos, clock=clock, vocabulary=has)
        source, origin = PLAIN, "plain"
        if has("<|im_start|>"):
            source, origin = CHATML, "chatml"
        elif has("<start_of_turn>"):
            source, origin = GEMMA, "gemma"
        made = cls(source, bos=bos, eos=eos, origin=origin, clock=clock, vocabulary=has)
        made._warnings.append(
            f"the model file has no chat template; the {origin} form stands in, and a base model may answer oddly"
        )
        return made

    def describe(self) -> TemplateInfo:
        return TemplateInfo(
            origin=self._origin,
            system_role=self._system_role,
            alternates=self._alternates,
            tools=self._tools,
            calls=self.calls.name,
            max_calls=self.max_calls,
            reasoning=self.tags[0] if self.tags else "",
            warnings=list(self._warnings),
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        if not messages:
            raise InvalidRequest("messages is empty; expected at least one message", param="messages")
        turns = [_normalise(message, index) for index, message in enumerate(messages)]
        if not self._system_role:
            turns = _fold_system(turns)
        if self._alternates:
            turns = _merge_turns(turns)
        try:
            return self._run(turns, tools, add_generation_prompt, kwargs)
        except _Refused as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        except SecurityError as error:
            raise ModelFileError(f"chat template: stopped by its sandbox: {error}") from error
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise InvalidRequest(
                f"the model's chat template fails on these messages: {error}", param="messages"
            ) from error
        except (RecursionError, MemoryError) as error:
            raise ModelFileError(f"chat template: {type(error).__name__} while rendering") from error

    def _run(
        self,
        turns: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
    ) -> str:
        names = {
            **kwargs,
            **self._names,
            "messages": turns,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        parts: list[str] = []
        room = MAX_OUTPUT_CHARS
        with self._lock:
            self._env.start()
            for part in self._template.generate(names):
                self._env.tick()
                room -= len(part)
                if room < 0:
                    raise SecurityError(f"a prompt of more than {MAX_OUTPUT_CHARS} characters")
                parts.append(part)
        return "".join(parts)

    def _strftime(self, form: str) -> str:
        return datetime.datetime.fromtimestamp(self._clock.wall_s()).strftime(str(form)[:1000])

    def _probe(self) -> None:
        """Find out what the template takes. A template that fails on one plain user turn is left to fail in render."""
        user, other = {"role": "user", "content": "probe-user"}, {"role": "user", "content": "probe-again"}
        system = {"role": "system", "content": "probe-system"}
        plain = self._try([user])
        self._system_role = plain is None or "probe-system" in (self._try([system, user]) or "")
        self._alternates = plain is not None and self._try([user, other]) is None
        tool = {"type": "function", "function": {"name": "probe_tool", "description": "", "parameters": {}}}
        self._tools = "probe_tool" in (self._try([user], [tool]) or "")
        own = find_format(self.source) if self._tools else None
        self.calls = own or FORMATS["generic"]
        self.max_calls = max(n for n in (0, 1, 2) if n == 0 or self._prints_calls(user, n))

    def _prints_calls(self, user: dict[str, Any], count: int) -> bool:
        """Whether a conversation in which the assistant made so many calls can be read from the prompt."""
        names = [f"probe-call-{index}" for index in range(count)]
        ids = [f"probe000{index}" for index in range(count)]
        calls = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": {}}}
            for name, call_id in zip(names, ids, strict=True)
        ]
        results = [{"role": "tool", "tool_call_id": call_id, "content": f"result of {call_id}"} for call_id in ids]
        prompt = self._try([user, {"role": "assistant", "content": "", "tool_calls": calls}, *results]) or ""
        return all(text in prompt for text in (*names, *(str(result["content"]) for result in results)))

    def _try(self, turns: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str | None:
        try:
            return self._run(turns, tools, True, {})
        except Exception:  # whatever a template does here, it means: no
            return None


def _text_of(data: TokenizerData, token: int | None) -> str:
    return data.tokens[token] if token is not None and token < len(data.tokens) else ""


def _normalise(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """A message as templates expect it; raises InvalidRequest for what is not text."""
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"messages[{index}].role is {role!r}, expected a string", param=f"messages[{index}].role")
    turn = {key: value for key, value in message.items() if value is not None}
    turn["role"] = "system" if role == "developer" else role
    turn["content"] = _join_parts(message.get("content"), f"messages[{index}].content")
    return turn


def _join_parts(content: Any, param: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequest(f"{param} is a {type(content).__name__}, expected text or a list of parts", param=param)
    texts: list[str] = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") not in ("text", "input_text", "output_text"):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise UnsupportedParameter(f"{param} has a part of type {kind!r}; this model reads text only", param=param)
        texts.append(str(part.get("text", "")))
    return "".join(texts)


def _fold_system(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Move system texts into the next user turn; a system text that no user turn follows becomes one."""
    folded: list[dict[str, Any]] = []
    waiting: list[str] = []
    for turn in turns:
        if turn["role"] == "system":
            waiting.append(turn["content"])
        elif turn["role"] == "user" and waiting:
            folded.append({**turn, "content": "\n\n".join([*waiting, turn["content"]])})
            waiting = []
        else:
            folded.append(turn)
    if waiting:
        folded.append({"role": "user", "content": "\n\n".join(waiting)})
    return folded


def _joins(turn: Mapping[str, Any]) -> bool:
    return turn["role"] in ("user", "assistant") and "tool_calls" not in turn


def _merge_turns(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join consecutive user or assistant turns; a turn with tool calls stays alone."""
    merged: list[dict[str, Any]] = []
    for turn in turns:
        last = merged[-1] if merged else None
        if last and last["role"] == turn["role"] and _joins(last) and _joins(turn):
            merged[-1] = {**last, "content": "\n\n".join(filter(None, (last["content"], turn["content"])))}
        else:
            merged.append(turn)
    return merged
