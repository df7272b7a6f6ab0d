"""The step as flat arrays, and the sampler's arrays as outputs: the hot path, a few microseconds per sequence.

Owns how a StepPlan is cut into runs that fit the limits (`cut`), the building of a StepBatch (`build_batch`) and the
reading of a SampleOut (`read_output`). Does not own pages (kv.py), and does not run anything (engine.py does).

A logits row i belongs to the token at its position and scores the next one. Rows are kept for the last known token of a
sequence (its sample is the new token), for each drafted token after it, and for prompt tokens whose logprobs are
asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ai_engine.ports.grammar import U32
from ai_engine.ports.kernels import I32, SampleBatch, SampleOut, StepBatch
from ai_engine.ports.runtime import Limits, SeqOutput, Work
from ai_engine.ports.serving import TokenLogprob
from ai_engine.runtime.masks import Masks
from ai_engine.runtime.sequence import ParamTable, Sequence


class Piece(NamedTuple):
    """One sequence's part of one run."""

    seq: Sequence
    first: int  # position of its first token
    num_tokens: int
    draft: tuple[int, ...] = ()


class Row(NamedTuple):
    """A logits row that is kept; ``forced`` is the prompt token it scores, -1 for a draw after ``num_guessed``."""

    piece: Piece
    position: int  # of the token that is drawn or scored
    forced: int
    num_guessed: int


class Batch(NamedTuple):
    """A run: its arrays, its pieces, and its logits rows (each piece's stand together, in order)."""

    arrays: StepBatch
    pieces: list[Piece]
    rows: list[Row]
    masks: Masks | None = None  # when a row draws under a grammar


def cut(work: Iterable[tuple[Sequence, Work]], limits: Limits) -> list[list[Piece]]:
    """The work as runs within the limits; nearly always one. A guess that does not fit is dropped: it changes
    nothing."""
    runs: list[list[Piece]] = []
    tokens = rows = limits.max_step_tokens + limits.max_logit_rows  # as good as full: the first piece opens a run
    for seq, item in work:
        left, draft, at = item.num_tokens, item.draft, seq.num_computed
        assert 1 <= left <= seq.num_known - at, (seq.seq_id, left, seq.num_known, at)
        assert not draft or left == seq.num_known - at, (seq.seq_id, "a draft follows the last known token only")
        while left:
            if tokens >= limits.max_step_tokens or rows >= limits.max_logit_rows or len(runs[-1]) == limits.max_seqs:
                runs.append([])
                tokens = rows = 0
            take, kept = min(left, limits.max_step_tokens - tokens), 0
            if seq.params.prompt_logprobs is not None:
                take = min(take, limits.max_logit_rows - rows)
                kept = max(0, min(at + take, seq.prompt_len - 1) - at)
            kept += at + take == seq.num_known
            room = min(limits.max_step_tokens - tokens - take, limits.max_logit_rows - rows - kept)
            guesses = draft[: max(0, min(room, limits.max_context - seq.num_known))] if take == left else ()
            runs[-1].append(Piece(seq, at, take, guesses))
            tokens, rows = tokens + take + len(guesses), rows + kept + len(guesses)
            left, at = left - take, at + take
    return runs


class Builder:
    """Arrays that are used again in every step."""

    def __init__(self, limits: Limits, params: ParamTable) -> None:
        self.params = params
        rows = limits.max_logit_rows
        self.token_ids: I32 = np.zeros(limits.max_step_tokens, np.int32)
        self.positions: I32 = np.zeros(limits.max_step_tokens, np.int32)
        self.count_up: I32 = np.arange(limits.max_context + 1, dtype=np.int32)
        self.none: I32 = np.full(rows, -1, np.int32)
        self.zeros: I32 = np.zeros(rows + 1, np.int32)
        self.no_i32, self.no_f32 = np.zeros(0, np.int32), np.zeros(0, np.float32)
        self.no_masks = np.zeros((0, -(-limits.vocab_size // 32)), np.uint32)
        self._masks = self.no_masks

    def masks(self, num_rows: int) -> U32:
        """Room for as many masks; the same memory in every step, which grows when it must."""
        if len(self._masks) < num_rows:
            self._masks = np.zeros((num_rows, self.no_masks.shape[1]), np.uint32)
        return self._masks


def build_batch(builder: Builder, pieces: list[Piece], page_tables: I32, page_tokens: int, step: int) -> Batch:
    """The arrays of one run. ``page_tables`` has a row per slot; the batch gets as many columns as it needs."""
    ids, positions = builder.token_ids, builder.positions
    starts, lengths, slots, at_rows = [0], [], [], []
    rows: list[Row] = []
    at = longest = 0
    for piece in pieces:
        seq, first, num_tokens, draft = piece
        known = first + num_tokens
        end, length = at + num_tokens + len(draft), known + len(draft)
        ids[at : at + num_tokens] = seq.tokens[first:known]
        if draft:
            ids[at + num_tokens : end] = draft
        positions[at:end] = builder.count_up[first:length]
        if seq.params.prompt_logprobs is not None:
            for position in range(first + 1, min(known, seq.prompt_len - 1) + 1):
                rows.append(Row(piece, position, int(seq.tokens[position]), 0))
                at_rows.append(at + position - 1 - first)
        if known == seq.num_known:
            for guessed in range(len(draft) + 1):
                rows.append(Row(piece, known + guessed, -1, guessed))
                at_rows.append(at + num_tokens - 1 + guessed)
        starts.append(end)
        lengths.append(length)
        slots.append(seq.slot)
        at = end
        longest = max(longest, length)
    masks = _masks(builder, rows) if any(piece.seq.matcher is not None for piece in pieces) else None
    arrays = StepBatch(
        token_ids=ids[:at],
        positions=positions[:at],
        seq_start=np.array(starts, np.int32),
        context_len=np.array(lengths, np.int32),
        page_table=page_tables[slots, : -(-longest // page_tokens)],
        logit_rows=np.array(at_rows, np.int32),
        sample=_sample_batch(builder, rows, masks),
        step=step,
    )
    return Batch(arrays, pieces, rows, masks)


def _masks(builder: Builder, rows: list[Row]) -> Masks | None:
    draws = [
        (index, row.piece.seq, row.position, row.piece.draft)
        for index, row in enumerate(rows)
        if row.piece.seq.matcher is not None and row.forced < 0 and row.num_guessed == 0
    ]
    if not draws:
        return None
    masks = Masks(builder.masks(len(rows)), len(rows))
    masks.fill(draws)
    return masks


def _sample_batch(builder: Builder, rows: list[Row], masks: Masks | None) -> SampleBatch:
    count = len(rows)
    slots = [row.piece.seq.slot for row in rows]
    gathered = {name: column[slots] for name, column in builder.params.columns.items()}
    forced = builder.none[:count]
    if any(row.forced >= 0 for row in rows):
        forced = np.array([row.forced for row in rows], np.int32)
        for index, row in enumerate(rows):
            if row.forced >= 0:
                gathered["num_top"][index] = row.piece.seq.params.prompt_logprobs
    history = builder.zeros[: count + 1], builder.no_i32, builder.no_i32
    bias_start, bias_token, bias_value = builder.zeros[: count + 1], builder.no_i32, builder.no_f32
    if any(row.piece.seq.ragged for row in rows):
        history = _csr([_history(row) for row in rows], builder.no_i32)
        bias = [row.piece.seq.bias(row.position) for row in rows]
        bias_start = np.cumsum([0, *(len(tokens) for tokens, _ in bias)], dtype=np.int32)
        bias_token = np.concatenate([tokens for tokens, _ in bias])
        bias_value = np.concatenate([values for _, values in bias])
    return SampleBatch(
        **gathered,
        position=np.array([row.position for row in rows], np.int32),
        forced=forced,
        history_start=history[0],
        history_token=history[1],
        history_count=history[2],
        bias_start=bias_start,
        bias_token=bias_token,
        bias_value=bias_value,
        mask_row=builder.none[:count] if masks is None else masks.rows,
        masks=builder.no_masks if masks is None else masks.buffer,
    )


def _history(row: Row) -> tuple[I32, I32] | None:
    history = row.piece.seq.history
    return None if history is None else history.arrays(row.piece.draft[: row.num_guessed])


def _csr(parts: list[tuple[I32, I32] | None], empty: I32) -> tuple[I32, I32, I32]:
    """(starts, tokens, counts) of ragged rows."""
    filled = [part if part is not None else (empty, empty) for part in parts]
    starts = np.cumsum([0, *(len(tokens) for tokens, _ in filled)], dtype=np.int32)
    return starts, np.concatenate([t for t, _ in filled]), np.concatenate([c for _, c in filled])


def read_output(batch: Batch, out: SampleOut) -> list[SeqOutput]:
    """What each piece of the run produced. Of a draft, token i counts when all guesses before it equal their
    samples."""
    drawn: list[int] = out.token[: len(batch.rows)].tolist()
    outputs = []
    at = 0
    for piece in batch.pieces:
        seq, draft = piece.seq, piece.draft
        first = at
        while at < len(drawn) and batch.rows[at].piece is piece and batch.rows[at].forced >= 0:
            at += 1
        scores = [_logprob(batch, out, row) for row in range(first, at)] or None
        if at == len(drawn) or batch.rows[at].piece is not piece:
            outputs.append(SeqOutput(seq.seq_id, [], None, scores))
            continue
        accepted, usable = 1, len(draft)
        if batch.masks is not None:
            usable = batch.masks.usable.get(at, usable)
        while accepted <= usable and draft[accepted - 1] == drawn[at + accepted - 1]:
            accepted += 1
        tokens = drawn[at : at + accepted]
        if batch.masks is not None and seq.seq_id in batch.masks.failed:
            outputs.append(SeqOutput(seq.seq_id, [], None, scores, batch.masks.failed[seq.seq_id]))
        elif min(tokens) < 0:
            outputs.append(SeqOutput(seq.seq_id, [], None, scores, "its logits are not finite"))
        elif seq.params.logprobs is None:
            outputs.append(SeqOutput(seq.seq_id, tokens, None, scores))
        else:
            logprobs = [_logprob(batch, out, row) for row in range(at, at + accepted)]
            outputs.append(SeqOutput(seq.seq_id, tokens, logprobs, scores))
        at += len(draft) + 1
    return outputs


def _logprob(batch: Batch, out: SampleOut, row: int) -> TokenLogprob:
    count = int(batch.arrays.sample.num_top[row])
    best = zip(out.top_token[row, :count].tolist(), out.top_logprob[row, :count].tolist(), strict=True)
    return TokenLogprob(int(out.token[row]), float(out.logprob[row]), list(best))
