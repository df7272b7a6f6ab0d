"""One choice's way from tokens to text: pieces -> UTF-8 -> stop strings, each token's log probability kept in step.

Owns the alignment and the count of tokens up to a stop. Further stages (reasoning tags, tool calls) are automata like
StopMatcher over released text; they belong in `_through_stops`. Does not own what is sent to a client (api).

A token's entry is released with the last character that its bytes help to complete, so that text held back holds back
its log probabilities too, and each token is reported once. Tokens after a matched stop are dropped; entries of tokens
whose text lies wholly in a stop string that is cut off are dropped too, though usage counts them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ai_engine.data.detokenize import Utf8Stream
from ai_engine.data.stops import StopMatcher
from ai_engine.ports.serving import TokenLogprob
from ai_engine.ports.text import TextDelta, TokenEntry, Tokenizer


class OutputPath:
    """Implements ports.text.OutputStream: the state of one choice. ``num_tokens`` is the usage so far: every token
    taken, up to and with the one that completed a stop string. What is pushed after a stop is ignored."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = Utf8Stream()
        self._stops = StopMatcher(stops, include=include_stop) if stops else None
        self._waiting: deque[tuple[int, TokenEntry]] = deque()  # (characters that must be out before, entry)
        self._decoded = 0  # characters out of the UTF-8 stage
        self._sent = 0  # characters out of the stop stage
        self.num_tokens = 0
        self.stop: str | None = None

    def push(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] | None = None) -> TextDelta:
        """Take the next tokens (and their log probabilities, one each)."""
        assert logprobs is None or len(logprobs) == len(tokens), "one log probability per token"
        text: list[str] = []
        for index, token in enumerate(tokens):
            if self.stop is not None:
                break
            text.append(self._take(token, logprobs[index] if logprobs else None))
        return TextDelta("".join(text), self._entries_out(), self.stop)

    def finish(self) -> TextDelta:
        """No token follows: what was held back. A character cut short becomes one U+FFFD. Idempotent."""
        if self.stop is not None:
            return TextDelta("")
        text = self._through_stops(self._utf8.finish())
        if self._stops and self.stop is None:  # a stop may hold the U+FFFD
            held = self._stops.finish()
            self._sent += len(held)
            text += held
        entries = self._entries_out()
        if self.stop is None:
            entries += [entry for _, entry in self._waiting]
            self._waiting.clear()
        return TextDelta(text, entries, self.stop)

    def _take(self, token: int, logprob: TokenLogprob | None) -> str:
        self.num_tokens += 1
        data = self._tokenizer.piece(token, skip_special=False)
        shown = self._tokenizer.piece(token) if self._skip_special else data
        start = self._decoded
        decoded = self._utf8.push(shown)
        self._decoded += len(decoded)
        end = (
            self._decoded + (self._utf8.pending > 0) if shown else start
        )  # a character begun is out with its last byte
        self._waiting.append((end, TokenEntry(token, data, logprob, start)))
        return self._through_stops(decoded)

    def _through_stops(self, text: str) -> str:
        if self._stops is not None:
            step = self._stops.push(text)
            self.stop = step.matched
            text = step.text
        self._sent += len(text)
        return text

    def _entries_out(self) -> list[TokenEntry]:
        """Take off the entries that are out; after a stop also the one whose text is cut in the middle."""
        out: list[TokenEntry] = []
        while self._waiting:
            end, entry = self._waiting[0]
            if end > self._sent and (self.stop is None or entry.text_offset >= self._sent):
                break
            out.append(self._waiting.popleft()[1])
        return out
