"""Masks of allowed tokens for the rows of a run that draw under a grammar.

Owns which row gets which mask: one per drawn token, and one per guess after it, as if the guesses before had been
drawn. Does not own grammars (ports.grammar) nor what a mask does to the logits (the sampler kernel).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from ai_engine.ports.errors import EngineError
from ai_engine.ports.grammar import U32
from ai_engine.ports.kernels import I32
from ai_engine.runtime.sequence import Sequence


class Masks:
    """The masks of one run. ``usable[i]``: how many of draw i's guesses may count; those after a guess that the grammar
    does not take have no mask, and their draws mean nothing. ``failed``: sequence id -> why it has no mask."""

    def __init__(self, buffer: U32, num_rows: int) -> None:
        self.rows: I32 = np.full(num_rows, -1, np.int32)
        self.usable: dict[int, int] = {}
        self.failed: dict[int, str] = {}
        self.buffer = buffer

    def fill(self, draws: SequenceOf[tuple[int, Sequence, int, tuple[int, ...]]]) -> None:
        """Each draw is (first row, sequence, position of the token that is drawn, guesses)."""
        for row, seq, position, draft in draws:
            assert seq.matcher is not None
            taken = filled = 0
            try:
                for guess in (*draft, -1):
                    self._fill_row(row + taken, seq, position + taken)
                    filled += 1
                    if guess < 0 or not seq.matcher.accept(guess):
                        break
                    taken += 1
                    if seq.matcher.ended:
                        break
            except EngineError as error:
                self.failed[seq.seq_id] = error.message
            seq.matcher.rollback(taken)
            self.usable[row] = max(0, filled - 1)  # the draw after a guess needs its mask

    def _fill_row(self, row: int, seq: Sequence, position: int) -> None:
        mask = self.buffer[row]
        assert seq.matcher is not None
        seq.matcher.fill(mask, seq.prompt_len + seq.params.max_tokens - position)
        if seq.is_guarded(position):  # min_tokens, where something else may come
            kept = mask.copy()
            np.bitwise_and.at(kept, seq.guarded >> 5, ~(np.uint32(1) << (seq.guarded & 31).astype(np.uint32)))
            if kept.any():
                mask[:] = kept
        self.rows[row] = row
