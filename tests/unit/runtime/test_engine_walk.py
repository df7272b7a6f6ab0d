"""Long random histories of an engine whose "keys" are the tokens themselves: what a sequence reads through its pages
decides its next token, so any mix-up of pages, forks, drafts or evictions shows as a wrong token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from ai_engine.ports.kernels import Call, Program, Resources, SampleOut, StepBatch
from ai_engine.ports.runtime import StepPlan, Work
from ai_engine.runtime.engine import Engine
from ai_engine.testing.kernels import NullKernels, NullProgram
from tests.unit.runtime.support import make_engine, spec

VOCAB = 97
PAGE = 32


def next_token(tokens: Sequence[int]) -> int:
    """Few different tokens, so that sequences meet again after they parted."""
    return crc32(bytes(tokens)) % 3


class EchoKernels(NullKernels):
    """Stores token ids in the pages and draws the next token from what it reads back there."""

    def compile(self, calls: Sequence[Call], resources: Resources) -> NullProgram:
        num_pages = resources.kv.nbytes // self.kv_page_bytes(resources.kv_shape)
        self.memory = np.full((num_pages, PAGE), 255, np.uint8)
        return super().compile(calls, resources)

    def copy_page(self, resources: Resources, source: int, target: int) -> None:
        self.memory[target] = self.memory[source]

    def run(self, program: Program, batch: StepBatch) -> SampleOut:
        out = super().run(program, batch)
        self.batches.clear()
        row_seq = np.repeat(np.arange(len(batch.context_len)), np.diff(batch.seq_start))
        pages = batch.page_table[row_seq, batch.positions // PAGE]
        self.memory[pages, batch.positions % PAGE] = batch.token_ids
        for row, at in enumerate(batch.logit_rows.tolist()):
            length = int(batch.positions[at]) + 1
            table = batch.page_table[row_seq[at], : -(-length // PAGE)]
            if batch.sample.forced[row] < 0:
                out.token[row] = next_token(self.memory[table].reshape(-1)[:length].tolist())
        return out


class Walk:
    """Random requests, chunks, drafts, forks, releases and preemptions."""

    def __init__(self, seed: int, **options: Any) -> None:
        self.draw = random.Random(seed)
        fields = {"kv_memory": 40 * PAGE * 256, "max_step_tokens": 64, "max_seqs": 6, "max_context": 192}
        self.engine: Engine = make_engine(kernels=EchoKernels(), **(fields | options))
        self.tokens: dict[int, list[int]] = {}
        self.left: dict[int, int] = {}
        self.last_id = 0
        self.closing: list[int] = []
        self.num_accepted = 0

    def prompt(self) -> list[int]:
        tokens = [self.draw.randrange(2)] * 40 if self.draw.random() < 0.7 else []
        return [*tokens, *(self.draw.randrange(3) for _ in range(self.draw.randint(1, 90)))]

    def open(self, tokens: list[int], fork_of: int | None = None) -> None:
        self.last_id += 1
        space = self.draw.choice(("", "b"))
        cached = self.engine.open(spec(self.last_id, tokens, fork_of=fork_of, namespace=space, max_tokens=100))
        assert 0 <= cached < len(tokens)
        self.tokens[self.last_id], self.left[self.last_id] = list(tokens), len(tokens) - cached

    def close(self, seq_id: int) -> list[int]:
        del self.left[seq_id]
        return self.tokens.pop(seq_id)

    def work(self) -> list[Work]:
        """As much as the pages allow, for a random choice of sequences."""
        work, room = [], self.engine.budget().available
        rows = 64
        for seq_id in self.draw.sample(sorted(self.tokens), min(len(self.tokens), self.draw.randint(1, 6))):
            left = self.left[seq_id]
            take = left if self.draw.random() < 0.5 else self.draw.randint(1, left)
            take = min(take, rows)
            draft: tuple[int, ...] = ()
            if take == left and len(self.tokens[seq_id]) < 185 and self.draw.random() < 0.5:
                guess = list(self.tokens[seq_id])
                for _ in range(self.draw.randint(1, 4)):
                    guess.append(next_token(guess) if self.draw.random() < 0.8 else 5)
                draft = tuple(guess[len(self.tokens[seq_id]) :])
            need = self.engine.pages_needed(seq_id, take + len(draft)) if take else 0
            if take and need <= room and take + len(draft) <= rows:
                work.append(Work(seq_id, take, draft))
                room, rows = room - need, rows - take - len(draft)
        return work

    def step(self) -> None:
        released, preempted = [], []
        for seq_id in list(self.tokens):
            if len(self.tokens[seq_id]) >= 186 or self.draw.random() < 0.02:
                self.close(seq_id)
                released.append(seq_id)
        reopen = []
        if self.tokens and self.draw.random() < 0.05:
            preempted = [self.draw.choice(sorted(self.tokens))]
            reopen = [self.close(preempted[0])]
        self.engine.step(StepPlan(0, release=released, preempt=preempted))
        for tokens in reopen:
            self.open(tokens)
        while len(self.tokens) < 6:
            donor = self.draw.choice([None, *self.tokens])
            tokens = self.prompt() if donor is None else self.tokens[donor][: self.draw.randint(1, 185)]
            self.open([*tokens, *[1] * (self.draw.random() < 0.3)], donor)
        work = self.work()
        if not work:  # nobody fits: the oldest goes
            self.engine.step(StepPlan(0, release=[min(self.tokens)]))
            self.close(min(self.tokens))
            return
        self.check(work, self.engine.step(StepPlan(1, work)).outputs)

    def check(self, work: list[Work], outputs: list[Any]) -> None:
        for item, output in zip(work, outputs, strict=True):
            tokens = self.tokens[item.seq_id]
            self.left[item.seq_id] -= item.num_tokens
            assert bool(output.tokens) == (self.left[item.seq_id] == 0)
            for token in output.tokens:
                assert token == next_token(tokens)
                tokens.append(token)
            if output.tokens:
                self.left[item.seq_id] = 1
                self.num_accepted += len(output.tokens) - 1


@pytest.mark.parametrize("seed", range(3))
def test_random_histories(seed: int) -> None:
    walk = Walk(seed, eviction=("lru", "fifo", "hybrid")[seed])
    for step in range(1500):
        walk.step()
        if step % 10 == 0:
            walk.engine.pool.check_integrity()
    pool = walk.engine.pool
    assert min(pool.num_evicted, pool.num_copied, pool.num_hit_tokens // PAGE, walk.num_accepted) > 20


def test_random_history_without_prefix_cache() -> None:
    walk = Walk(7, prefix_cache=False)
    for _ in range(300):
        walk.step()
        walk.engine.pool.check_integrity()
    assert walk.engine.pool.num_copied > 5


@pytest.mark.full
@pytest.mark.parametrize("seed", range(100, 106))
def test_long_random_histories(seed: int) -> None:
    walk = Walk(seed, eviction=("lru", "fifo", "hybrid")[seed % 3])
    for step in range(20_000):
        walk.step()
        if step % 100 == 0:
            walk.engine.pool.check_integrity()
