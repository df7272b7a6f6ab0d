"""Long random histories of an engine, whatever its kernels."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from ai_engine.ports.runtime import StepPlan, Work
from ai_engine.runtime.engine import Engine
from tests.unit.runtime.support import spec

WALK_OPTIONS: dict[str, Any] = {"kv_memory": 40 * 32 * 256, "max_step_tokens": 64, "max_seqs": 6, "max_context": 192}
"""Of an engine that is short of pages: 40 for six sequences."""


class Walk:
    """Random requests, chunks, drafts, forks, releases and preemptions; each token must be ``next_token`` of all
    before it. The engine has at least 6 sequences, 192 tokens of context and 64 rows a step."""

    def __init__(self, seed: int, engine: Engine, next_token: Callable[[Sequence[int]], int]) -> None:
        self.draw, self.engine, self.next_token = random.Random(seed), engine, next_token
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
                    guess.append(self.next_token(guess) if self.draw.random() < 0.8 else 5)
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
                assert token == self.next_token(tokens)
                tokens.append(token)
            if output.tokens:
                self.left[item.seq_id] = 1
                self.num_accepted += len(output.tokens) - 1
