"""One choice's way from tokens to what a client sees: bytes -> text -> reasoning -> calls -> stop strings, each token's
log probability kept in step.

Owns the order of the stages, the alignment, and the counts of tokens. Does not own the stages (detokenize.py,
reasoning.py, tools.py, stops.py) nor what is sent to a client (api). Every stage is an automaton over pieces of text:
what comes out does not depend on how the text is cut into tokens or pushes.

Stop strings come last: they end the visible text, and look neither into the reasoning nor into calls, nor across them.

A token's entry is released with the last character that its bytes help to complete, so that text held back holds back
its log probabilities too, and each token is reported once. Entries go with visible text: a token that lies wholly in
the reasoning, in a call or in their marks has none, nor has one wholly in a stop string that is cut off, though usage
counts them all. Tokens after a matched stop are dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from ai_engine.data.detokenize import Utf8Stream
from ai_engine.data.reasoning import ReasoningStage
from ai_engine.data.spans import Span
from ai_engine.data.stops import StopMatcher
from ai_engine.data.tools import FORMATS, ToolStage
from ai_engine.ports.serving import TokenLogprob
from ai_engine.ports.text import TEXT_ONLY, ReplyForm, TextDelta, TokenEntry, Tokenizer, ToolDelta

CALL_ENDED = ""
"""What stands for a stop string when a complete call ended the text: no stop string is empty."""


class _Waiting(msgspec.Struct):
    """A token whose characters start..end, of all that was decoded, are not all decided on; ``offset`` is where its
    first visible one stands in the visible text, -1 while none does."""

    start: int
    end: int
    token: int
    data: bytes
    logprob: TokenLogprob | None
    offset: int = -1

    def entry(self) -> TokenEntry:
        return TokenEntry(self.token, self.data, self.logprob, self.offset)


class OutputPath:
    """Implements ports.text.OutputStream: the state of one choice. What is pushed after a stop is ignored."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special: bool = True,
        min_tokens: int = 0,
        form: ReplyForm = TEXT_ONLY,
        call_ids: str = "",
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = Utf8Stream()
        self._reasoning = ReasoningStage(form.reasoning, inside=form.inside_reasoning) if form.reasoning else None
        self._tools: ToolStage | None = None
        marks: tuple[str, ...] = form.reasoning or ()
        if form.calls:
            calls = FORMATS[form.calls]
            self._tools = ToolStage(calls, form.names, call_ids=call_ids, one_call=form.one_call)
            marks += calls.marks
        self._marks = frozenset(mark.encode() for mark in marks)
        self._min_tokens = min_tokens
        self._stops = StopMatcher(stops, include=include_stop) if stops else None
        self._waiting: deque[_Waiting] = deque()
        self._decoded = 0  # characters out of the UTF-8 stage
        self._settled = 0  # of these, those whose fate is decided: sent, or not to be seen
        self._sent = 0  # visible characters out of the stop stage
        self._is_visible = not form.inside_reasoning  # the last character settled
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.stop: str | None = None

    def push(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] | None = None) -> TextDelta:
        """Take the next tokens (and their log probabilities, one each)."""
        assert logprobs is None or len(logprobs) == len(tokens), "one log probability per token"
        out = _Out()
        for index, token in enumerate(tokens):
            if self.stop is not None:
                break
            self._take(token, logprobs[index] if logprobs else None, out)
        return out.delta(self.stop)

    def finish(self) -> TextDelta:
        """No token follows: what was held back. A character cut short becomes one U+FFFD. Idempotent."""
        out = _Out()
        if self.stop is not None:
            return out.delta(None)
        self._decode(self._utf8.finish(), out)
        if self._reasoning:
            self._after_reasoning(self._reasoning.finish(), out)
        if self._tools and self.stop is None:
            self._after_tools(self._tools.finish(), out)
        if self._stops and self.stop is None:  # a stop may hold the U+FFFD
            self._show(self._stops.finish(), out)
        if self.stop is None:
            self._settle(self._decoded - self._settled, False, out)
        return out.delta(self.stop)

    # --- the stages ---

    def _take(self, token: int, logprob: TokenLogprob | None, out: _Out) -> None:
        self.num_tokens += 1
        data = self._tokenizer.piece(token, skip_special=False)
        shown = self._tokenizer.piece(token) if self._skip_special and data not in self._marks else data
        start = self._decoded
        text = self._utf8.push(shown)
        # a character begun is out with its last byte
        end = start + len(text) + (self._utf8.pending > 0) if shown else start
        self._waiting.append(_Waiting(start, end, token, data, logprob))
        is_reasoning = self._reasoning is not None and not self._reasoning.is_over
        self._decode(text, out)
        self._let_out(self._settled, out)
        if is_reasoning and self._reasoning and (self._reasoning.is_inside or self._reasoning.is_over):
            self.num_reasoning_tokens = self.num_tokens

    def _decode(self, text: str, out: _Out) -> None:
        self._decoded += len(text)
        if not text:
            return
        if self._reasoning:
            self._after_reasoning(self._reasoning.push(text), out)
        elif self._tools:
            self._after_tools(self._tools.push(text), out)
        else:
            self._to_stops(text, out)

    def _after_reasoning(self, spans: list[Span], out: _Out) -> None:
        for span in spans:
            if self.stop is not None:
                return
            if not span.text:
                out.reasoning.append(span.reasoning)
                self._settle(span.width, False, out)
            elif self._tools:
                self._after_tools(self._tools.push(span.text), out)
            else:
                self._to_stops(span.text, out)

    def _after_tools(self, spans: list[Span], out: _Out) -> None:
        for span in spans:
            if span.text:
                self._to_stops(span.text, out)
                if self.stop is not None:
                    return
                continue
            if self._stops:
                self._show(self._stops.finish(), out)
            if span.call is not None:
                out.calls.append(span.call)
            self._settle(span.width, False, out)
        if self._tools and self._tools.is_over:
            self.stop = CALL_ENDED

    def _to_stops(self, text: str, out: _Out) -> None:
        if self._stops is None:
            self._show(text, out)
            return
        step = self._stops.push(text, may_end=self.num_tokens >= self._min_tokens)
        self._show(step.text, out)
        if step.matched is not None:
            self.stop = step.matched
            while self._waiting:  # only a token that is cut in the middle still has visible text
                waiting = self._waiting.popleft()
                if waiting.offset >= 0:
                    out.entries.append(waiting.entry())

    def _show(self, text: str, out: _Out) -> None:
        if text:
            out.text.append(text)
            self._settle(len(text), True, out)

    # --- the entries ---

    def _settle(self, width: int, is_visible: bool, out: _Out) -> None:
        """The next ``width`` characters are visible or never will be."""
        begin, self._settled = self._settled, self._settled + width
        if width:
            self._is_visible = is_visible
        self._let_out(begin, out)
        self._sent += width * is_visible

    def _let_out(self, begin: int, out: _Out) -> None:
        """Take off the tokens whose text is decided on, now that it is from ``begin`` to ``_settled``, in one way.
        ``_sent`` counts the visible characters before ``begin``. A token without text goes with the text before it."""
        while self._waiting:
            first = self._waiting[0]
            starts = first.start < self._settled or first.start == first.end <= self._settled
            if starts and self._is_visible and first.offset < 0:
                first.offset = self._sent + max(0, first.start - begin)
            if first.end > self._settled:
                return
            self._waiting.popleft()
            if first.offset >= 0:
                out.entries.append(first.entry())


class _Out:
    """What a push lets out."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[ToolDelta] = []
        self.entries: list[TokenEntry] = []

    def delta(self, stop: str | None) -> TextDelta:
        return TextDelta("".join(self.text), self.entries, stop, "".join(self.reasoning), self.calls)
