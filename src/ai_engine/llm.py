"""LLM: the engine inside this Python process, for scripts and notebooks. Owns the background event loop, nothing else.

from ai_engine import LLM

with LLM("smollm2") as llm:
    for done in llm.generate(["The capital of France is", "2 + 2 ="], max_tokens=8, temperature=0):
        print(done.text)
    for piece in llm.stream_chat([{"role": "user", "content": "Hello"}]):
        print(piece, end="")
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec

from ai_engine.config import EngineConfig, ServeConfig, check_engine
from ai_engine.ports.errors import EngineError, InvalidValue, error_from_code
from ai_engine.ports.progress import Progress
from ai_engine.ports.sampling import MAX_LOGPROBS, SamplingParams
from ai_engine.ports.serving import Chunk, GenerateRequest, TokenLogprob, Usage

T = TypeVar("T")
Prompt = str | Sequence[int]


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One finished answer. ``finish_reason`` is stop or length; ``tokens`` end with the last one that usage counts."""

    text: str
    tokens: list[int]
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] | None = None
    usage: Usage


class LLM:
    """A model loaded in this process. Thread-safe; requests from several threads share the batch.

    ``options`` are fields of EngineConfig (``threads=2``, ``kv_memory=1 << 30`` ...). Sampling options of the methods
    are fields of SamplingParams; what is not given comes from the model's own generation config.
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

    @property
    def max_context(self) -> int:
        """Tokens one request may hold, prompt and answer together."""
        return self._stack.limits.max_context

    def generate(
        self, prompts: Prompt | Sequence[Prompt], *, stop: str | Sequence[str] = (), **sampling: Any
    ) -> list[Completion]:
        """Answer all prompts (texts or token ids) in one batch; answers in the order of the prompts."""
        one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        many = [cast(Prompt, prompts)] if one else list(cast(Sequence[Prompt], prompts))
        return self._call(self._generate_all(many, stop, sampling))

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, stop: str | Sequence[str] = (), **sampling: Any
    ) -> Completion:
        """Answer a conversation of ``{"role", "content"}`` messages through the model's chat template."""
        return self._call(self._chat(messages, stop, sampling))

    def stream(self, prompt: Prompt, *, stop: str | Sequence[str] = (), **sampling: Any) -> Iterator[str]:
        """The answer's text, piece by piece. Closing the iterator cancels the request."""
        return self._iterate(lambda: self._text(prompt, stop, sampling))

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], *, stop: str | Sequence[str] = (), **sampling: Any
    ) -> Iterator[str]:
        """As `stream`, for a conversation."""

        async def pieces() -> AsyncIterator[str]:
            encoded = await self._stack.text.encode_chat(messages)
            async for piece in self._text(encoded.ids, stop, sampling, chat=True):
                yield piece

        return self._iterate(pieces)

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

    async def _generate_all(
        self, prompts: list[Prompt], stop: str | Sequence[str], sampling: dict[str, Any]
    ) -> list[Completion]:
        return list(await asyncio.gather(*(self._complete(prompt, stop, sampling) for prompt in prompts)))

    async def _chat(
        self, messages: Sequence[Mapping[str, Any]], stop: str | Sequence[str], sampling: dict[str, Any]
    ) -> Completion:
        encoded = await self._stack.text.encode_chat(messages)
        return await self._complete(encoded.ids, stop, sampling, chat=True)

    async def _complete(
        self, prompt: Prompt, stop: str | Sequence[str], sampling: dict[str, Any], chat: bool = False
    ) -> Completion:
        text, answer = "", _Answer()
        async for piece in self._text(prompt, stop, sampling, chat=chat, answer=answer):
            text += piece
        assert answer.usage is not None
        return Completion(
            text=text,
            tokens=answer.tokens,
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            logprobs=answer.logprobs or None,
            usage=answer.usage,
        )

    async def _text(
        self,
        prompt: Prompt,
        stop: str | Sequence[str],
        sampling: dict[str, Any],
        chat: bool = False,
        answer: _Answer | None = None,
    ) -> AsyncIterator[str]:
        """The pieces of one answer; ``answer`` collects everything else."""
        answer = answer or _Answer()
        ids = (await self._stack.text.encode_prompt(prompt)).ids if isinstance(prompt, str) else list(prompt)
        params = self._params(sampling, len(ids), chat)
        stops = [stop] if isinstance(stop, str) else list(stop)
        if not all(stops):
            raise InvalidValue("stop holds an empty string, which is everywhere; leave it out", param="stop")
        output = self._stack.text.open_output(stops=stops)
        request = GenerateRequest(
            request_id=f"llm-{next(self._ids)}", trace_id=secrets.token_hex(16), prompt=ids, params=params
        )
        stream = await self._stack.serving.submit(request)
        async for chunk in stream:
            _raise_if_failed(chunk)
            delta = output.push(chunk.tokens)
            answer.take(chunk)
            if delta.text:
                yield delta.text
            if delta.stop is not None:
                answer.stopped_at(delta.stop, output.num_tokens, len(ids))
                await self._stack.serving.cancel(request.request_id, stopped=True)
                return
        rest = output.finish()
        if rest.text:
            yield rest.text

    def _params(self, sampling: dict[str, Any], prompt_tokens: int, chat: bool) -> SamplingParams:
        known = set(SamplingParams.__struct_fields__)
        unknown = sorted(set(sampling) - known)
        if unknown:
            raise InvalidValue(
                f"unknown sampling option {unknown[0]!r}; use {', '.join(sorted(known))}", param=unknown[0]
            )
        values: dict[str, Any] = {**self._stack.defaults, **sampling}
        if values.get("seed") is None:
            values["seed"] = secrets.randbits(63)
        room = self._stack.limits.max_context - prompt_tokens
        values.setdefault("max_tokens", max(1, room if chat else min(SamplingParams().max_tokens, room)))
        params = SamplingParams(**values)
        _check_ranges(params)
        return params

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


class _Answer:
    """What one answer consists of besides its text."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason = "stop"
        self.stop_reason: str | int | None = None
        self.usage: Usage | None = None

    def take(self, chunk: Chunk) -> None:
        self.tokens += chunk.tokens
        self.logprobs += chunk.logprobs or []
        if chunk.finish is not None:
            self.finish_reason, self.stop_reason, self.usage = chunk.finish, chunk.stop_token, chunk.usage

    def stopped_at(self, stop: str, num_used: int, prompt_tokens: int) -> None:
        del self.tokens[num_used:], self.logprobs[num_used:]
        self.finish_reason, self.stop_reason = "stop", stop
        self.usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=num_used)


def _raise_if_failed(chunk: Chunk) -> None:
    if chunk.finish in ("failed", "cancelled"):
        raise error_from_code(
            chunk.error_code or EngineError.code, chunk.error_message or "the request did not complete"
        )


RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "top_k": (0, 1 << 30),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "max_tokens": (0, 1 << 30),
    "min_tokens": (0, 1 << 30),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}


def _check_ranges(params: SamplingParams) -> None:
    for name, (low, high) in RANGES.items():
        value = getattr(params, name)
        if value is not None and not low <= value <= high:
            raise InvalidValue(f"{name} is {value}; expected {low:g} to {high:g}", param=name)
