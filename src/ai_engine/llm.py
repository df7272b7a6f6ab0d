"""LLM: the engine inside this Python process, for scripts and notebooks. Owns the background event loop, nothing else.

from ai_engine import LLM

with LLM("smollm2") as llm:
    for done in llm.generate(["The capital of France is", "2 + 2 ="], max_tokens=8, temperature=0):
        print(done.text)
    for piece in llm.stream_chat([{"role": "user", "content": "Hello"}]):
        print(piece, end="")

Options are the HTTP API's fields (docs/api.md), passed through the same checks: what is wrong with one is an error of
ports/errors.py that names it. ``logprobs`` is a number here, for text and chat alike.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from ai_engine.api.constraints import with_form
from ai_engine.api.generation import Generation, Piece, Prompt, join_calls
from ai_engine.api.openai_types import (
    Ask,
    ServedModel,
    chat_ask,
    chat_fields,
    completion_ask,
    completion_fields,
    room_for,
)
from ai_engine.api.rest import collect, encode_source, must_call, with_seed
from ai_engine.config import EngineConfig, ServeConfig, check_engine
from ai_engine.contracts.fields import ByType, Check, Checking, Integer, ListOf, Record, Text, Unsupported, Unused
from ai_engine.ports.errors import EngineError, InvalidValue
from ai_engine.ports.progress import Progress
from ai_engine.ports.sampling import MAX_LOGPROBS
from ai_engine.ports.serving import GenerateRequest, TokenLogprob, Usage
from ai_engine.ports.text import ToolDelta
from ai_engine.ports.trace import Parts

T = TypeVar("T")
Source = str | Sequence[int]


PromptLogprobs = list[TokenLogprob | None]


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One finished answer. ``finish_reason`` is stop, length or tool_calls; ``tokens`` end with the last one that usage
    counts, and ``logprobs`` has one entry for each; ``prompt_logprobs`` one for each token of the prompt, None for the
    first. ``warnings`` say what was asked for and not done."""

    text: str
    tokens: list[int]
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    reasoning: str = ""
    calls: list[ToolDelta] = []
    warnings: list[str] = []
    usage: Usage


class LLM:
    """A model loaded in this process. Thread-safe; requests from several threads share the batch.

    ``options`` are fields of EngineConfig (``threads=2``, ``kv_memory=1 << 30`` ...). Options of the methods are the
    API's fields; what is not given comes from the model's own generation config.
    """

    def __init__(
        self,
        model: str,
        *,
        config: EngineConfig | None = None,
        progress: Progress | None = None,
        offline: bool = False,
        **options: Any,
    ) -> None:
        from ai_engine import app

        base = config or EngineConfig()
        unknown = sorted(set(options) - set(base.__struct_fields__))
        if unknown:
            raise InvalidValue(f"unknown option {unknown[0]!r}; EngineConfig has {', '.join(base.__struct_fields__)}")
        engine = check_engine(msgspec.structs.replace(base, **options))
        self._ids = itertools.count(1)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ai-engine-llm", daemon=True)
        self._thread.start()
        self._closed = False
        try:
            self._stack = self._call(app.open_local(model, engine, ServeConfig(offline=offline), progress))
        except BaseException:
            self._stop_loop()
            raise
        limits = self._stack.limits
        self._model = ServedModel(
            id=model, max_context=limits.max_context, vocab_size=limits.vocab_size, defaults=self._stack.defaults
        )
        self._text_fields = _text_fields(limits.vocab_size)
        self._chat_fields = _chat_fields(limits.vocab_size)

    @property
    def max_context(self) -> int:
        """Tokens one request may hold, prompt and answer together."""
        return self._stack.limits.max_context

    def generate(self, prompts: Source | Sequence[Source], **options: Any) -> list[Completion]:
        """Answer all prompts (texts or token ids) in one batch; answers in the order of the prompts, ``n`` for each."""
        if isinstance(prompts, Sequence) and not prompts and not isinstance(prompts, str):
            return []
        return self._call(self._complete(self._ask_text(prompts, options)))

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Completion:
        """Answer a conversation of ``{"role", "content"}`` messages through the model's chat template."""
        return self._call(self._complete(self._ask_chat(messages, options)))[0]

    def stream(self, prompt: Source, **options: Any) -> Iterator[str]:
        """The answer's text, piece by piece. Closing the iterator cancels the request."""
        return self._iterate(lambda: self._pieces(self._ask_text(prompt, options)))

    def stream_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Iterator[str]:
        """As `stream`, for a conversation."""
        return self._iterate(lambda: self._pieces(self._ask_chat(messages, options)))

    def close(self) -> None:
        """Stop what runs and give all memory back. Safe to call twice."""
        if not self._closed:
            try:
                self._call(self._stack.close())
            finally:
                self._closed = True
                self._stop_loop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask_text(self, prompts: Any, options: dict[str, Any]) -> Ask:
        got, at = _checked(self._text_fields, {"prompt": prompts, **options})
        return completion_ask(got | {"return_token_ids": True}, self._model, at)

    def _ask_chat(self, messages: Any, options: dict[str, Any]) -> Ask:
        got, at = _checked(self._chat_fields, {"messages": messages, **options})
        if "logprobs" in got:
            got |= {"logprobs": True, "top_logprobs": got["logprobs"]}
        return chat_ask(got | {"return_token_ids": True}, self._model, at)

    async def _complete(self, ask: Ask) -> list[Completion]:
        generation = await self._generation(ask)
        try:
            await generation.start()
            pieces = await collect(generation)
            await generation.settle()
        finally:
            await generation.close()
        return [_completion(piece, generation.prompts[piece.index // ask.n], ask) for piece in pieces]

    async def _pieces(self, ask: Ask) -> AsyncIterator[str]:
        """The text of one answer, piece by piece."""
        generation = await self._generation(ask)
        try:
            await generation.start()
            while (pieces := await generation.next()) is not None:
                for piece in pieces:
                    if piece.text:
                        yield piece.text
        finally:
            await generation.close()

    async def _generation(self, ask: Ask) -> Generation:
        """Every prompt as tokens, with room for what it asks."""
        parts = Parts(time.monotonic)
        prompts: list[Prompt] = []
        for source in [""] if ask.prompts is None else ask.prompts:
            encoded = await encode_source(self._stack.text, ask, source)
            sampling = with_seed(ask, secrets.token_bytes).sampling  # without one, each prompt draws its own
            room = room_for(ask, len(encoded.ids), self._model)
            request = GenerateRequest(
                request_id=f"llm-{next(self._ids)}",
                trace_id=secrets.token_hex(16),
                prompt=encoded.ids,
                params=msgspec.structs.replace(sampling, max_tokens=max(1, room)),
                n=ask.n,
                priority=ask.priority,
                constraint=with_form(ask.constraint, encoded.form, must_call=must_call(ask)),
            )
            prompts.append(Prompt(request, form=encoded.form))
        return Generation(ask, prompts, self._stack.serving, self._stack.text, parts)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it in the loop's thread and wait for it."""
        if self._closed:
            work.close()
            raise EngineError("this LLM is closed; make another")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _iterate(self, make: Callable[[], AsyncIterator[str]]) -> Iterator[str]:
        """An async iterator of the loop's thread as a plain one; leaving it early cancels the request."""
        pieces: queue.SimpleQueue[str | BaseException | None] = queue.SimpleQueue()

        async def pump() -> None:
            try:
                async for piece in make():
                    pieces.put(piece)
                pieces.put(None)
            except asyncio.CancelledError:
                pieces.put(None)
                raise
            except Exception as error:
                pieces.put(error)

        if self._closed:
            raise EngineError("this LLM is closed; make another")
        future = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        try:
            while (item := pieces.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            future.cancel()

    def _stop_loop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._loop.shutdown_default_executor(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _completion(piece: Piece, prompt: Prompt, ask: Ask) -> Completion:
    assert piece.finish is not None
    scores: PromptLogprobs | None = [None, *prompt.logprobs] if ask.show_prompt_logprobs else None
    return Completion(
        text=piece.text,
        tokens=piece.tokens,
        finish_reason=piece.finish,
        stop_reason=piece.stop_reason,
        logprobs=piece.logprobs or None,
        prompt_logprobs=scores,
        reasoning=piece.reasoning,
        calls=join_calls(piece.calls),
        warnings=[*ask.warnings, *prompt.form.warnings],
        usage=Usage(len(prompt.request.prompt), piece.num_tokens, prompt.cached_tokens),
    )


# --- options: the API's fields, but for those that only make sense in a request or an answer of HTTP ---

_NOT_HERE = frozenset(
    ("model", "stream", "stream_options", "echo", "return_token_ids", "return_sampling_params", "top_logprobs")
)


def _here(fields: Mapping[str, Check]) -> dict[str, Check]:
    return {
        name: check
        for name, check in fields.items()
        if name not in _NOT_HERE and not isinstance(check, Unused | Unsupported)
    }


class _Prompts:
    """A text or token ids, or an array of these -> a list of them."""

    expected = "a text, token ids, or an array of these"

    def __init__(self, vocab_size: int) -> None:
        self._one = ByType({str: Text(), list: ListOf(Integer(0, vocab_size - 1), 1)})
        self._many = ListOf(self._one, 1)

    def check(self, value: Any, at: Checking) -> list[Any]:
        is_many = type(value) is list and bool(value) and type(value[0]) in (str, list)
        return self._many.check(value, at) if is_many else [self._one.check(value, at)]


def _text_fields(vocab_size: int) -> Record:
    fields = _here(completion_fields(vocab_size).fields)
    return Record(
        {**fields, "prompt": _Prompts(vocab_size), "logprobs": Integer(0, MAX_LOGPROBS)}, frozenset({"prompt"})
    )


def _chat_fields(vocab_size: int) -> Record:
    fields = _here(chat_fields(vocab_size).fields)
    return Record({**fields, "logprobs": Integer(0, MAX_LOGPROBS)}, frozenset({"messages"}))


def _checked(fields: Record, options: dict[str, Any]) -> tuple[dict[str, Any], Checking]:
    """The options, checked as a request's fields are. Raises InvalidRequest."""
    unknown = sorted(options.keys() - fields.fields.keys())
    if unknown:
        known = ", ".join(sorted(fields.fields.keys() - fields.required))
        raise InvalidValue(f"unknown option {unknown[0]!r}; use {known}", param=unknown[0])
    at = Checking()
    return fields.check(_plain(options), at), at


def _plain(value: Any) -> Any:
    """As JSON has it: tuples are arrays, keys strings."""
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value] if not all(type(item) is int for item in value) else list(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value
