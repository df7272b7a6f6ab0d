"""OpenAI's request bodies: the declared fields of chat and text completions, and what they turn into.

Owns which fields exist, their ranges, what is refused or ignored, and the way to SamplingParams. Does not own
transport (app.py, http.py), running the work (generation.py) or what goes back (replies.py).

Choices: up to 16 stop strings; n up to 16; up to 256 prompts; ``model`` may be left out. max_completion_tokens beats
max_tokens. Prompt + max_tokens over the context is an error with the three numbers, never a clamp. top_p 0 keeps the
best token. ``seed`` may be any int64. Parts of a message are joined by a line break.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ai_engine.api.constraints import constraint_fields, constraint_of, hints
from ai_engine.api.tool_types import Choices, Tools, tool_options
from ai_engine.contracts.fields import (
    Anything,
    ByType,
    Check,
    Checking,
    Choice,
    Flag,
    Integer,
    ListOf,
    Number,
    Record,
    Schema,
    Text,
    TokenKeys,
    Unsupported,
    Unused,
    schema_of,
    show,
)
from ai_engine.ports.errors import ContextLengthExceeded, InvalidValue, ModelNotFound, UnsupportedParameter
from ai_engine.ports.grammar import Constraint
from ai_engine.ports.sampling import MAX_LOGPROBS, SamplingParams

MAX_STOPS = 16
MAX_CHOICES = 16
MAX_PROMPTS = 256
MAX_COMPLETION_LOGPROBS = 5
DEFAULT_COMPLETION_TOKENS = 16
SEED_SPAN = (1 << 64) - MAX_CHOICES
"""Seeds wrap here, so that seed + choice still is an unsigned 64-bit number."""


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The model behind the doors. ``created`` is Unix seconds; ``defaults`` are sampling defaults of its own
    (temperature, top_p, top_k, min_p, repetition_penalty) where its files or the server's flags state them.
    ``aliases`` are further names; "*" takes any name."""

    id: str
    max_context: int
    vocab_size: int
    created: int = 0
    owned_by: str = "local"
    aliases: tuple[str, ...] = ()
    defaults: Mapping[str, float] = {}
    fingerprint: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.id, *(alias for alias in self.aliases if alias != "*"))

    def check_name(self, name: str) -> None:
        """Raises ModelNotFound."""
        if "*" not in self.aliases and name not in self.names:
            raise self.not_found(name, self.names)

    def not_found(self, name: str, others: Sequence[str]) -> ModelNotFound:
        fix = f"use one of: {', '.join(others)}" if others else "ask the operator which models this key may use"
        return ModelNotFound(f"The model {name[:80]!r} is not served here. Fix: {fix}.", param="model")


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request of either kind, before its prompt is encoded."""

    model: str  # as the caller named it
    messages: list[dict[str, Any]] | None = None  # chat
    prompts: list[str] | list[list[int]] | None = None  # completions
    template: dict[str, Any] = {}  # keyword arguments of encode_chat
    add_special_tokens: bool = True
    sampling: SamplingParams
    max_tokens: int | None  # None: default_tokens
    default_tokens: int | None = None  # as many as there is room for, at most; None: all the room
    n: int = 1
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    suffix: str = ""  # what comes after the answer, which then goes between the two
    echo: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    priority: int = 0
    cache_salt: str = ""  # prefixes are shared with requests of the same salt only
    max_tokens_field: str = "max_tokens"  # the one that was sent
    prompt_field: str = "messages"
    show_sampling: bool = False
    show_prompt_logprobs: bool = False
    show_tokens: bool = False
    constraint: Constraint | None = None  # what the text must match
    warnings: list[str] = []


# --- declared fields ----------------------------------------------------------------------------------------------


class _Content:
    """A message's content: a string, or parts of text, which are joined by a line break."""

    expected = "a string or an array of text parts"
    _part = Record({"type": Text(), "text": Text(), "refusal": Text()}, frozenset({"type"}))

    @property
    def schema(self) -> Schema:
        return {"anyOf": [{"type": "string"}, ListOf(self._part, 0, 4096).schema]}

    def check(self, value: Any, at: Checking) -> str:
        if type(value) is str:
            return value
        if type(value) is not list:
            at.fail(show(value), self.expected)
        if len(value) > 4096:
            at.fail(f"{len(value)} parts", "at most 4096")
        return "\n".join([self._text(index, part, at) for index, part in enumerate(value)])

    def _text(self, index: int, part: Any, at: Checking) -> str:
        at.path.append(index)
        kind = part.get("type") if type(part) is dict else None
        if kind not in ("text", "refusal") and type(kind) is str:
            at.path.append("type")
            if kind in ("image_url", "input_image", "input_audio", "audio_url", "video_url", "file", "input_file"):
                at.unsupported(f'"{kind}" parts are not supported; this server takes text. Fix: send only text parts.')
            at.fail(show(kind), 'the part type "text"')
        checked = self._part.check(part, at)
        if kind not in checked:
            at.path.append(str(kind))
            at.fail("nothing", "a string", "add this required field.")
        at.path.pop()
        return str(checked[str(kind)])


_ROLES = ("developer", "system", "user", "assistant", "tool")
_TOOL_CALL = Record(
    {
        "id": Text(1, 256),
        "type": Choice(("function",)),
        "index": Unused(neutral=tuple(range(128))),
        "function": Record({"name": Text(1, 256), "arguments": Text()}, frozenset({"name", "arguments"})),
    },
    frozenset({"id", "function"}),
)


class _Message:
    expected = "an object"
    _record = Record(
        {
            "role": Choice(_ROLES),
            "content": _Content(),
            "name": Text(0, 256),
            "tool_calls": ListOf(_TOOL_CALL, 0, 128),
            "tool_call_id": Text(1, 256),
            "reasoning_content": Text(),
            "reasoning": Text(),
            "refusal": Unused(),
            "audio": Unsupported(),
            "function_call": Unsupported("replaced by tool_calls. Fix: send tool_calls."),
        },
        frozenset({"role"}),
    )
    schema = _record.schema

    def check(self, value: Any, at: Checking) -> dict[str, Any]:
        message = self._record.check(value, at)
        if not message.get("tool_calls"):
            message.pop("tool_calls", None)
        missing = "content" not in message and not (message["role"] == "assistant" and "tool_calls" in message)
        if missing:
            at.path.append("content")
            at.fail("nothing", _Content.expected, "only an assistant message with tool_calls may leave it out.")
        if message["role"] == "tool" and "tool_call_id" not in message:
            at.path.append("tool_call_id")
            at.fail("nothing", "a string", "a tool message names the call it answers.")
        message.setdefault("content", None)
        thought = message.pop("reasoning", None)  # both names are sent back to us, as we sent both
        if thought is not None:
            message.setdefault("reasoning_content", thought)
        return message


_STOP_TEXT = Text(1, 1024)
_NOT_ENFORCED = "not enforced by this server, so the answer could break it. Fix: leave it out."


def _shared_fields(vocab_size: int) -> dict[str, Check]:
    token = Integer(0, vocab_size - 1)
    return {
        "model": Text(1, 512),
        "temperature": Number(0, 2),
        "top_p": Number(0, 1),
        "top_k": Integer(-1, (1 << 31) - 1),
        "min_p": Number(0, 1),
        "repetition_penalty": Number(0.01, 100),
        "presence_penalty": Number(-2, 2),
        "frequency_penalty": Number(-2, 2),
        "logit_bias": TokenKeys(Number(-100, 100), vocab_size),
        "seed": Integer(-(1 << 63), SEED_SPAN - 1),
        "n": Integer(1, MAX_CHOICES),
        "stop": ByType({str: _STOP_TEXT, list: ListOf(_STOP_TEXT, 0, MAX_STOPS)}),
        "stop_token_ids": ListOf(token, 0, 128),
        "include_stop_str_in_output": Flag(),
        "skip_special_tokens": Flag(),
        "ignore_eos": Flag(),
        "min_tokens": Integer(0, 1 << 31),
        "stream": Flag(),
        "stream_options": Record(
            {
                "include_usage": Flag(),
                "continuous_usage_stats": Flag(),
                "include_obfuscation": Unused("no padding is added.", neutral=(False,)),
            }
        ),
        "priority": Integer(-1000, 1000),
        "return_sampling_params": Flag(),
        **dict.fromkeys(("user", "metadata", "safety_identifier", "prompt_cache_key"), Unused()),
        "store": Unused("answers are not stored.", neutral=(False,)),
        "service_tier": Unused(neutral=("auto", "default")),
        "prompt_cache_retention": Unused(),
        **constraint_fields(),
        "use_beam_search": Unsupported(neutral=(False,)),
        "prompt_logprobs": Integer(0, MAX_LOGPROBS),
        "return_token_ids": Flag(),
        "return_tokens_as_token_ids": Unsupported(neutral=(False,)),
        "truncate_prompt_tokens": Unsupported("a prompt is never cut. Fix: shorten it yourself."),
        "cache_salt": Text(1, 256),
        "allowed_token_ids": Unsupported(_NOT_ENFORCED),
        "bad_words": Unsupported(_NOT_ENFORCED, neutral=([],)),
        "logits_processors": Unsupported(),
        "typical_p": Unsupported(neutral=(1, 1.0)),
        "mirostat": Unsupported(neutral=(0,)),
    }


def chat_fields(vocab_size: int) -> Record:
    """The fields of POST /v1/chat/completions."""
    fields: dict[str, Check] = {
        **_shared_fields(vocab_size),
        "messages": ListOf(_Message(), 1, 8192),
        "max_tokens": Integer(1, 1 << 31),
        "max_completion_tokens": Integer(1, 1 << 31),
        "logprobs": Flag(),
        "top_logprobs": Integer(0, MAX_LOGPROBS),
        "add_generation_prompt": Flag(),
        "continue_final_message": Flag(),
        "chat_template_kwargs": Record(_AnyField()),
        "tools": Tools(),
        "tool_choice": Choices(),
        "parallel_tool_calls": Flag(),
        "functions": Unsupported("replaced by tools. Fix: send tools.", neutral=([],)),
        "function_call": Unsupported("replaced by tool_choice. Fix: send tool_choice.", neutral=("none", "auto")),
        "reasoning_effort": Choice(("none", "minimal", "low", "medium", "high", "xhigh")),
        "verbosity": Unused(neutral=("medium",)),
        "prediction": Unused(),
        "modalities": Unsupported("only text is generated.", neutral=(["text"],)),
        "audio": Unsupported("only text is generated."),
        "web_search_options": Unsupported(),
        "chat_template": Unsupported("the model's own template is used. Fix: leave it out."),
        "documents": Unsupported(neutral=([],)),
        "echo": Unsupported(neutral=(False,)),
        "add_special_tokens": Unsupported("the chat template decides. Fix: leave it out.", neutral=(False,)),
    }
    return Record(fields, frozenset({"messages"}))


class _AnyField(dict[str, Check]):
    """Fields of any name."""

    def get(self, name: str, default: Any = None) -> Check:
        return Anything()


class _Prompt:
    """string | [string] | [int] | [[int]] -> a list of prompts, all text or all token ids."""

    expected = "a string, an array of strings, an array of token ids, or an array of such arrays"

    def __init__(self, vocab_size: int) -> None:
        ids = ListOf(Integer(0, vocab_size - 1), 1)
        self._ids = ids
        self._many: dict[type, Check] = {
            str: ListOf(Text(), 1, MAX_PROMPTS),
            int: ids,
            float: ids,
            list: ListOf(ids, 1, MAX_PROMPTS),
        }

    @property
    def schema(self) -> Schema:
        kinds: list[Check] = [Text(), self._many[str], self._ids, self._many[list]]
        return {"anyOf": [schema_of(kind) for kind in kinds]}

    def check(self, value: Any, at: Checking) -> list[Any]:
        if type(value) is str:
            return [value]
        if type(value) is not list or not value:
            at.fail("an empty array" if value == [] else show(value), self.expected)
        many = self._many.get(type(value[0]))
        if many is None:
            at.fail(f"an array of {show(value[0])}", self.expected)
        checked: list[Any] = many.check(value, at)
        return [checked] if many is self._ids else checked


def completion_fields(vocab_size: int) -> Record:
    """The fields of POST /v1/completions."""
    fields: dict[str, Check] = {
        **_shared_fields(vocab_size),
        "prompt": _Prompt(vocab_size),
        "max_tokens": Integer(0, 1 << 31),
        "max_completion_tokens": Integer(0, 1 << 31),
        "logprobs": Integer(0, MAX_COMPLETION_LOGPROBS),
        "echo": Flag(),
        "suffix": Text(),
        "best_of": Unsupported("only best_of 1 is supported. Fix: ask for n choices.", neutral=(1, 1.0)),
        "add_special_tokens": Flag(),
    }
    return Record(fields, frozenset({"prompt"}))


# --- what they turn into ------------------------------------------------------------------------------------------


def read_chat(body: Any, fields: Record, model: ServedModel, *, strict: bool) -> Ask:
    """A chat request, checked. Raises InvalidRequest or ModelNotFound."""
    at = Checking(strict=strict)
    return chat_ask(fields.check(body, at), model, at)


def chat_ask(got: dict[str, Any], model: ServedModel, at: Checking, **rest: Any) -> Ask:
    """What checked fields of a chat ask, whichever door they came through. Raises InvalidRequest or ModelNotFound."""
    if got.get("top_logprobs") and not got.get("logprobs"):
        raise InvalidValue("top_logprobs needs logprobs: true. Fix: set logprobs to true.", param="top_logprobs")
    if got.get("continue_final_message") and got.get("add_generation_prompt", False):
        raise InvalidValue(
            "continue_final_message and add_generation_prompt exclude each other. Fix: set one of them.",
            param="continue_final_message",
        )
    template: dict[str, Any] = {}
    if got.get("continue_final_message"):
        template = {"continue_final_message": True, "add_generation_prompt": False}
    elif "add_generation_prompt" in got:
        template = {"add_generation_prompt": got["add_generation_prompt"]}
    if "chat_template_kwargs" in got:
        template["template_kwargs"] = got["chat_template_kwargs"]
    if "reasoning_effort" in got:
        template["reasoning_effort"] = got["reasoning_effort"]
    template |= tool_options(got)
    logprobs = got.get("top_logprobs", 0) if got.get("logprobs") else None
    at.warnings += hints(constraint_of(got), got["messages"])
    return _ask(got, model, at, logprobs, messages=got["messages"], template=template, **rest)


def read_completion(body: Any, fields: Record, model: ServedModel, *, strict: bool) -> Ask:
    """A text completion request, checked. Raises InvalidRequest or ModelNotFound."""
    at = Checking(strict=strict)
    return completion_ask(fields.check(body, at), model, at)


def completion_ask(got: dict[str, Any], model: ServedModel, at: Checking) -> Ask:
    """What checked fields of a text completion ask. Raises InvalidRequest or ModelNotFound."""
    echo = got.get("echo", False)
    suffix = got.get("suffix", "")
    if suffix and (echo or not isinstance(got["prompt"][0], str)):
        raise InvalidValue(
            "suffix: found it with echo or token ids, expected a prompt of text alone. Fix: send the prompt as text.",
            param="suffix",
        )
    ask = _ask(
        got,
        model,
        at,
        got.get("logprobs"),
        prompts=got["prompt"],
        echo=echo,
        default_tokens=DEFAULT_COMPLETION_TOKENS,
        prompt_field="prompt",
        suffix=suffix,
        add_special_tokens=got.get("add_special_tokens", True),
    )
    if ask.max_tokens == 0 and not echo and not ask.show_prompt_logprobs:
        field = ask.max_tokens_field
        raise InvalidValue(f"{field}: found 0, expected at least 1 unless the prompt is scored (echo).", param=field)
    return ask


def _ask(got: dict[str, Any], model: ServedModel, at: Checking, logprobs: int | None, **rest: Any) -> Ask:
    """The part that both kinds share."""
    name = got.get("model", model.id)
    model.check_name(name)
    stop = got.get("stop", [])
    options = got.get("stream_options", {})
    if options and not got.get("stream"):
        at.path[:] = ["stream_options"]
        at.ignored("not used without stream: true.")
    if "prompt_logprobs" in got and got.get("stream"):
        raise UnsupportedParameter(
            "prompt_logprobs: not part of a stream. Fix: leave stream out, or score with echo and logprobs.",
            param="prompt_logprobs",
        )
    return Ask(
        model=name,
        sampling=_sampling(got, model, logprobs, rest.get("echo", False)),
        max_tokens=_max_tokens(got, at),
        n=got.get("n", 1),
        stops=(stop,) if isinstance(stop, str) else tuple(stop),
        include_stop=got.get("include_stop_str_in_output", False),
        skip_special=got.get("skip_special_tokens", True),
        stream=got.get("stream", False),
        include_usage=options.get("include_usage", False),
        continuous_usage=options.get("continuous_usage_stats", False),
        priority=got.get("priority", 0),
        cache_salt=got.get("cache_salt", ""),
        max_tokens_field=_max_tokens_field(got),
        show_sampling=got.get("return_sampling_params", False),
        constraint=constraint_of(got),
        show_prompt_logprobs="prompt_logprobs" in got,
        show_tokens=got.get("return_token_ids", False),
        warnings=at.warnings,
        **rest,
    )


def _max_tokens_field(got: dict[str, Any]) -> str:
    return "max_completion_tokens" if "max_completion_tokens" in got else "max_tokens"


def _max_tokens(got: dict[str, Any], at: Checking) -> int | None:
    old, new = got.get("max_tokens"), got.get("max_completion_tokens")
    if old is not None and new is not None and old != new:
        at.path[:] = ["max_tokens"]
        at.ignored("max_completion_tokens is used instead.")
    limit = old if new is None else new
    if limit is not None and got.get("min_tokens", 0) > limit:
        raise _too_many_at_least(got["min_tokens"], limit)
    return limit


def _sampling(got: dict[str, Any], model: ServedModel, logprobs: int | None, echo: bool) -> SamplingParams:
    """``max_tokens`` is set later, when the prompt's length is known; ``seed`` None is drawn later too."""

    def value(name: str, otherwise: float) -> float:
        return float(got.get(name, model.defaults.get(name, otherwise)))

    top_p, top_k = value("top_p", 1.0), max(0, int(value("top_k", 0)))
    if top_p == 0:
        top_p, top_k = 1.0, 1
    seed = got.get("seed")
    return SamplingParams(
        temperature=value("temperature", 1.0),
        top_k=top_k,
        top_p=top_p,
        min_p=value("min_p", 0.0),
        repetition_penalty=value("repetition_penalty", 1.0),
        presence_penalty=got.get("presence_penalty", 0.0),
        frequency_penalty=got.get("frequency_penalty", 0.0),
        logit_bias=got.get("logit_bias", {}),
        seed=None if seed is None else seed % SEED_SPAN,
        min_tokens=got.get("min_tokens", 0),
        stop_token_ids=tuple(got.get("stop_token_ids", ())),
        ignore_eos=got.get("ignore_eos", False),
        logprobs=logprobs,
        prompt_logprobs=_widest(got.get("prompt_logprobs"), logprobs if echo else None),
    )


def _widest(*counts: int | None) -> int | None:
    return max((count for count in counts if count is not None), default=None)


def room_for(ask: Ask, num_prompt: int, model: ServedModel) -> int:
    """Tokens to generate after this prompt (0: the prompt is only scored). Raises ContextLengthExceeded."""
    param = ask.prompt_field
    room = model.max_context - num_prompt
    wanted = ask.max_tokens
    if room < max(1, wanted or 0):
        raise ContextLengthExceeded(
            f"This model's context is {model.max_context} tokens, but the prompt has {num_prompt} tokens and "
            f"{'at least 1' if wanted is None else wanted} more {'was' if wanted == 1 else 'were'} requested. "
            f"Fix: shorten the prompt or lower {ask.max_tokens_field}.",
            param=param,
        )
    if num_prompt == 0:
        raise InvalidValue(f"{param}: found no tokens, expected at least one.", param=param)
    if wanted is not None:
        return wanted
    limit = room if ask.default_tokens is None else min(ask.default_tokens, room)
    if ask.sampling.min_tokens > limit:
        raise _too_many_at_least(ask.sampling.min_tokens, limit)
    return limit


def _too_many_at_least(found: int, limit: int) -> InvalidValue:
    return InvalidValue(
        f"min_tokens: found {found}, expected at most the maximum, {limit}. Fix: lower it, or set max_tokens.",
        param="min_tokens",
    )
