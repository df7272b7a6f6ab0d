"""Long random histories of an engine whose "keys" are the tokens themselves: what a sequence reads through its pages
decides its next token, so any mix-up of pages, forks, drafts or evictions shows as a wrong token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from ai_engine.ports.kernels import Call, Program, Resources, SampleOut, StepBatch
from ai_engine.testing.kernels import NullKernels, NullProgram
from tests.unit.runtime.support import make_engine
from tests.unit.runtime.walk import WALK_OPTIONS, Walk

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


def echo_walk(seed: int, **options: Any) -> Walk:
    return Walk(seed, make_engine(kernels=EchoKernels(), **(WALK_OPTIONS | options)), next_token)


@pytest.mark.parametrize("seed", range(3))
def test_random_histories(seed: int) -> None:
    walk = echo_walk(seed, eviction=("lru", "fifo", "hybrid")[seed])
    for step in range(1500):
        walk.step()
        if step % 10 == 0:
            walk.engine.check_integrity()
    pool = walk.engine.pool
    assert min(pool.num_evicted, pool.num_copied, pool.num_hit_tokens // PAGE, walk.num_accepted) > 20


def test_random_history_without_prefix_cache() -> None:
    walk = echo_walk(7, prefix_cache=False)
    for _ in range(300):
        walk.step()
        walk.engine.check_integrity()
    assert walk.engine.pool.num_copied > 5


@pytest.mark.full
@pytest.mark.parametrize("seed", range(100, 106))
def test_long_random_histories(seed: int) -> None:
    walk = echo_walk(seed, eviction=("lru", "fifo", "hybrid")[seed % 3])
    for step in range(20_000):
        walk.step()
        if step % 100 == 0:
            walk.engine.check_integrity()
