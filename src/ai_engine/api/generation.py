"""Prompts x choices running in serving, seen as text: the only place where tokens become pieces of an answer.

Owns submitting, merging the choices' chunks, stop strings (found by the output stream, then cancelled in serving),
token counts, and cancelling what nobody waits for. Does not own wire shapes (replies.py, stream.py).

One task per prompt moves chunks from serving into a mailbox; whoever writes takes all that has come, so a slow client
gets fewer, larger pieces. A full mailbox makes the tasks wait, and serving's stream merges what is not read yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

import msgspec

from ai_engine.api.openai_types import Ask
from ai_engine.ports.errors import AiEngineError, EngineError, error_from_code
from ai_engine.ports.serving import Chunk, GenerateRequest, Serving, TokenLogprob, Usage
from ai_engine.ports.text import TEXT_ONLY, OutputStream, ReplyForm, TextDelta, TextService, TokenEntry, ToolDelta
from ai_engine.ports.trace import Parts

SETTLE_S = 1.0
"""How long a stopped choice may take to report its usage; it needs one step."""
ID_CHARS = 24
"""The end of a request's id, which tells it from every other."""
MAILBOX_SIZE = 64
"""Chunks that wait in the gateway for a slow client before they wait, merged, in serving's stream."""


class Piece(msgspec.Struct):
    """What one wake-up gave one choice."""

    index: int
    text: str = ""
    entries: list[TokenEntry] = []
    echoed: list[TokenEntry] = []  # the prompt's tokens, on the first piece of an echo
    finish: str | None = None  # "stop", "length", or "tool_calls": ended like "stop", with calls
    stop_reason: str | int | None = None
    num_tokens: int = 0  # of the choice so far
    tokens: list[int] = []  # those that usage counts, kept only if they were asked for
    logprobs: list[TokenLogprob] = []  # one for each of them, if those were asked for too
    reasoning: str = ""
    calls: list[ToolDelta] = []  # deltas, not joined


def join_calls(deltas: Iterable[ToolDelta]) -> list[ToolDelta]:
    """One delta for each call that they speak of."""
    parts: dict[int, list[ToolDelta]] = {}
    for delta in deltas:
        parts.setdefault(delta.index, []).append(delta)
    return [
        ToolDelta(index, found[0].id, found[0].name, "".join(delta.arguments for delta in found))
        for index, found in parts.items()
    ]


class Prompt(msgspec.Struct):
    """One prompt of a request. ``text`` is set where it is needed: for echo, and for offsets of log probabilities;
    ``form`` says how its answers are written."""

    request: GenerateRequest
    text: str = ""
    logprobs: list[TokenLogprob] = []
    cached_tokens: int = 0
    form: ReplyForm = TEXT_ONLY


class _Mailbox:
    """Many writers, one reader who takes everything at once."""

    def __init__(self) -> None:
        self._items: list[tuple[int, Chunk | BaseException]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._room = asyncio.Event()
        self._closed = False

    def put(self, prompt: int, item: Chunk | BaseException) -> None:
        if self._closed:
            return
        self._items.append((prompt, item))
        if len(self._items) >= MAILBOX_SIZE:
            self._room.clear()
        if self._waiter is not None:
            _wake(self._waiter)

    async def room(self) -> None:
        """Wait until the reader has been here, if it is far behind."""
        if len(self._items) >= MAILBOX_SIZE:
            await self._room.wait()

    async def take(self, quiet_s: float | None) -> list[tuple[int, Chunk | BaseException]]:
        """All that came, at least one; empty after ``quiet_s`` of silence."""
        if not self._items:
            loop = asyncio.get_running_loop()
            waiter = self._waiter = loop.create_future()
            timer = None if quiet_s is None else loop.call_later(quiet_s, _wake, waiter)
            try:
                await waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        items, self._items = self._items, []
        self._room.set()
        return items

    def close(self) -> None:
        """Nobody reads any more: what comes is dropped, and nobody waits."""
        self._closed, self._items = True, []
        self._room.set()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class _Choice:
    """One choice: what it has said and whether it has ended, for the client (``finish``) and in serving (``ended``)."""

    def __init__(self, index: int, prompt: Prompt, output: OutputStream, ask: Ask, text: TextService) -> None:
        self.index = index
        self.prompt = prompt
        self.finish: str | None = None
        self.failure: AiEngineError | None = None
        self.ended = False
        self.num_tokens = 0
        self._output = output
        self._ask = ask
        self._text = text
        self._num_chars = 0
        self._has_calls = False
        self.matched_stop = False
        self._echo_due = ask.echo
        self._scores_only = ask.max_tokens == 0

    def take(self, chunk: Chunk, piece: Piece) -> bool:
        """Add a chunk to the piece; True when a stop string ended the choice before serving did."""
        if chunk.finish is not None:
            self.ended = True
            if chunk.usage is not None:
                self.prompt.cached_tokens = max(self.prompt.cached_tokens, chunk.usage.cached_tokens)
        if self.finish is not None:
            return False
        if self._echo_due and (chunk.tokens or chunk.finish):
            self._echo(piece)
        counted = self.num_tokens
        stop = None if self._scores_only else self._push(chunk, piece)
        if self._ask.show_tokens:
            used = self.num_tokens - counted
            piece.tokens = piece.tokens + chunk.tokens[:used]
            piece.logprobs = piece.logprobs + (chunk.logprobs or [])[:used]
        if stop is not None:
            self.matched_stop = bool(stop)
            self.finish, piece.stop_reason = self._stopped(), stop or None
        elif chunk.finish in ("failed", "cancelled"):
            message = chunk.error_message or "the request was not completed"
            self.failure = error_from_code(chunk.error_code or "engine_error", message)
        elif chunk.finish is not None:
            if not self._scores_only:
                self._say(self._output.finish(), piece)
            self.finish = self._stopped() if chunk.finish == "stop" else chunk.finish
            if chunk.stop_token in self._ask.sampling.stop_token_ids:
                piece.stop_reason = chunk.stop_token
        piece.finish = self.finish
        piece.num_tokens = self.num_tokens
        return stop is not None and not self.ended

    def _stopped(self) -> str:
        return "tool_calls" if self._has_calls else "stop"

    @property
    def num_reasoning_tokens(self) -> int:
        return self._output.num_reasoning_tokens

    def _push(self, chunk: Chunk, piece: Piece) -> str | None:
        """The text of the chunk's tokens; the token that ended the choice is counted, and shown only if asked."""
        tokens, logprobs = chunk.tokens, chunk.logprobs
        before = self._output.num_tokens
        self.num_tokens += len(tokens)
        if chunk.stop_token is not None and not self._ask.include_stop:
            tokens, logprobs = tokens[:-1], logprobs and logprobs[:-1]
        if not tokens:
            return None
        delta = self._output.push(tokens, logprobs)
        self._say(delta, piece)
        if delta.stop is not None:
            self.num_tokens += self._output.num_tokens - before - len(chunk.tokens)
        return delta.stop

    def _say(self, delta: TextDelta, piece: Piece) -> None:
        piece.text += delta.text
        piece.reasoning += delta.reasoning
        if delta.calls:
            piece.calls += delta.calls
            self._has_calls = True
        self._num_chars += len(delta.text)
        if self._ask.sampling.logprobs is None:
            return
        entries = delta.entries
        if delta.stop is not None:  # tokens that lie wholly in the stop, or after it, have no text to go with
            entries = [entry for entry in entries if entry.text_offset < self._num_chars]
        piece.entries += entries

    def _echo(self, piece: Piece) -> None:
        self._echo_due = False
        piece.text = self.prompt.text + piece.text
        if self._ask.sampling.prompt_logprobs is not None:
            piece.echoed = echo_entries(self.prompt, self._text)


def echo_entries(prompt: Prompt, text: TextService) -> list[TokenEntry]:
    """The prompt's tokens with their log probabilities (the first has none) and offsets into its text."""
    entries = []
    # Control tokens have no text. A tokeniser that puts a space before the text says more than the text does.
    widths = [_num_chars(text.token_bytes(t)) if text.decode((t,)) else 0 for t in prompt.request.prompt]
    offset = min(0, len(prompt.text) - sum(widths))
    logprobs: Sequence[TokenLogprob | None] = [None, *prompt.logprobs]
    for position, token in enumerate(prompt.request.prompt):
        data = text.token_bytes(token)
        logprob = logprobs[position] if position < len(logprobs) else None
        begins_inside = bool(data) and data[0] & 0xC0 == 0x80  # a character: it is at that character
        entries.append(TokenEntry(token, data, logprob, max(0, offset - begins_inside)))
        offset += widths[position]
    return entries


def _num_chars(data: bytes) -> int:
    """Characters that begin in these bytes: at every byte but 10xxxxxx."""
    return sum(byte & 0xC0 != 0x80 for byte in data)


class Generation:
    """``start``, then ``next`` until None, then ``close`` whatever happened."""

    def __init__(self, ask: Ask, prompts: list[Prompt], serving: Serving, text: TextService, parts: Parts) -> None:
        self.ask = ask
        self._parts = parts
        self._arrived_s = 0.0
        self.max_gap_s = 0.0  # the longest wait between two arrivals
        self.on_chunk: Callable[[Chunk], None] = lambda chunk: None
        self.prompts = prompts
        self._serving = serving
        self._mailbox = _Mailbox()
        self._pumps: list[asyncio.Task[None]] = []
        self._failure: BaseException | None = None
        self._has_said = False
        self._choices = [
            _Choice(
                p * ask.n + j,
                prompt,
                text.open_output(
                    stops=ask.stops,
                    include_stop=ask.include_stop,
                    skip_special=ask.skip_special,
                    min_tokens=ask.sampling.min_tokens,
                    form=prompt.form,
                    call_ids=f"{prompt.request.request_id[-ID_CHARS:]}{j:02x}",
                ),
                ask,
                text,
            )
            for p, prompt in enumerate(prompts)
            for j in range(ask.n)
        ]

    @property
    def num_choices(self) -> int:
        return len(self._choices)

    async def start(self) -> None:
        """Submit every prompt, in order. Raises what serving refuses with."""
        self._parts.enter("submit")
        for index, prompt in enumerate(self.prompts):
            stream = await self._serving.submit(prompt.request)
            pump = asyncio.create_task(self._pump(index, stream))
            pump.add_done_callback(functools.partial(self._pumped, index))
            self._pumps.append(pump)

    async def _pump(self, index: int, stream: AsyncIterator[Chunk]) -> None:
        async for chunk in stream:
            self._mailbox.put(index, chunk)
            await self._mailbox.room()

    def _pumped(self, index: int, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            error = task.exception()
            self._mailbox.put(index, error or EngineError("the engine ended the request without finishing it"))

    async def next(self, quiet_s: float | None = None) -> list[Piece] | None:
        """The next pieces, at most one per choice, by index; [] after ``quiet_s`` of silence; None at the end.

        Raises the error of the first choice that failed: after what came before it, or at once if nothing did yet."""
        if all(choice.finish is not None for choice in self._choices):
            return None
        pieces: dict[int, Piece] = {}
        while not pieces and self._failure is None:  # chunks of a choice that a stop string ended make no piece
            self._parts.enter("decode" if self._has_said else "first_token")
            arrived = await self._mailbox.take(quiet_s)
            now = self._parts.enter("detokenise")
            if arrived and self._has_said:
                self.max_gap_s = max(self.max_gap_s, now - self._arrived_s)
            self._arrived_s = now if arrived else self._arrived_s
            if not arrived:
                return []
            for prompt, item in arrived:
                if isinstance(item, Chunk):
                    self.on_chunk(item)
                    await self._take(prompt, item, pieces)
                elif any(choice.finish is None for choice in self._of(prompt)):
                    self._failure = self._failure or item
        if self._failure is not None and not (pieces and self._has_said):
            raise self._failure
        self._has_said = True
        return [pieces[index] for index in sorted(pieces)]

    def _of(self, prompt: int) -> list[_Choice]:
        return self._choices[prompt * self.ask.n : (prompt + 1) * self.ask.n]

    async def _take(self, prompt: int, chunk: Chunk, pieces: dict[int, Piece]) -> None:
        if chunk.prompt_logprobs is not None:
            self.prompts[prompt].logprobs = self.prompts[prompt].logprobs + chunk.prompt_logprobs
        choice = self._choices[prompt * self.ask.n + chunk.index]
        was_over = choice.finish is not None
        piece = pieces.get(choice.index) or Piece(choice.index, entries=[], calls=[])
        if choice.take(chunk, piece):
            await self._serving.cancel(self.prompts[prompt].request.request_id, chunk.index, stopped=True)
        self._failure = self._failure or choice.failure
        if not was_over and (chunk.tokens or choice.failure is None):
            pieces[choice.index] = piece

    async def settle(self) -> Usage:
        """Usage of a finished generation; waits for serving to report on choices that a stop string ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                while any(not choice.ended for choice in self._choices):
                    for prompt, item in await self._mailbox.take(None):
                        if isinstance(item, Chunk):
                            await self._take(prompt, item, {})
                        else:
                            for choice in self._of(prompt):
                                choice.ended = True
        return self.usage()

    @property
    def finishes(self) -> list[str]:
        """How each choice ended, as far as it is known."""
        return [choice.finish or (choice.failure.code if choice.failure else "") for choice in self._choices]

    @property
    def has_failed(self) -> bool:
        """Whether a choice ended in an error."""
        return self._failure is not None or any(choice.failure is not None for choice in self._choices)

    @property
    def num_stopped(self) -> int:
        """Choices that a stop string ended."""
        return sum(choice.matched_stop for choice in self._choices)

    def usage(self) -> Usage:
        """Prompt tokens once per prompt, completion tokens summed over choices."""
        reasons = any(prompt.form.reasoning for prompt in self.prompts)
        return Usage(
            sum(len(prompt.request.prompt) for prompt in self.prompts),
            sum(choice.num_tokens for choice in self._choices),
            sum(prompt.cached_tokens for prompt in self.prompts),
            sum(choice.num_reasoning_tokens for choice in self._choices) if reasons else None,
        )

    async def close(self) -> None:
        """Cancel what still runs and hear the streams out, so that serving lets go of them. Idempotent."""
        pumps, self._pumps = self._pumps, []
        for index in range(len(pumps)):
            if any(choice.finish is None and not choice.ended for choice in self._of(index)):
                await self._serving.cancel(self.prompts[index].request.request_id)
        self._mailbox.close()
        if pumps:
            _, late = await asyncio.wait(pumps, timeout=SETTLE_S)
            for pump in late:
                pump.cancel()
