"""What the scheduler knows: requests, their choices, who runs, who is parked, who waits. Owns the invariants.

    queue   --admit-->  running  --finish-->  closing (released with the next plan)
                 parked --admit-^  \\--preempt--> parked
A request enters as one Group; its leader computes the prompt, then the other choices are parked and fork from it.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Set
from typing import Final

import msgspec

from ai_engine.ports.grammar import Grammar
from ai_engine.ports.runtime import Limits, SequenceSpec
from ai_engine.ports.sampling import SamplingParams
from ai_engine.ports.serving import GenerateRequest, Terminal
from ai_engine.serving.config import ServingConfig
from ai_engine.serving.cost import CostModel
from ai_engine.serving.lookup import INDEXED_PER_STEP, Lookup, TokenIndex
from ai_engine.serving.queue import FairQueue
from ai_engine.serving.shares import Shares, seats_of_one

MAX_SEED = 1 << 64


LONG_EVERY: Final = 4
"""Of so many steps, one gives its rows to prompts in order of age alone."""


class Group:
    """One accepted request."""

    def __init__(
        self, request: GenerateRequest, arrived_s: float, expected_tokens: int, grammar: Grammar | None = None
    ) -> None:
        self.request = request
        self.grammar = grammar  # of request.constraint, compiled
        self.arrived_s = arrived_s
        self.expected_tokens = expected_tokens
        self.deadline_s = float("inf") if request.timeout_s is None else arrived_s + request.timeout_s
        self.scheduled_s: float | None = None  # first left the queue
        self.cached_tokens = 0
        self.queued = True
        self.choices = [Choice(self, index) for index in range(request.n)]
        self.leader = self.choices[0]  # computes the prompt
        self.forked = False  # the prompt is computed and the other choices were parked
        self.donor_id = 0  # a sequence that holds the prompt's pages
        self.prompt_index = TokenIndex()  # filled as the prompt is computed, when sequences guess

    @property
    def holds_prompt(self) -> bool:
        """One of its open sequences has the whole prompt computed."""
        return any(choice.seq_id and choice.computed >= choice.prompt_len for choice in self.choices)

    @property
    def unfinished(self) -> list[Choice]:
        return [choice for choice in self.choices if choice.finish is None]


class Choice:
    """One sequence of a request. ``seq_id`` is 0 while it is not open in the runtime; each opening gets a new one."""

    __slots__ = (
        "age",
        "computed",
        "finish",
        "first_token_s",
        "gaps_s",
        "group",
        "index",
        "last_token_s",
        "lookup",
        "params",
        "prompt_len",
        "scored",
        "scored_since_open",
        "scores_prompt",
        "seq_id",
        "tokens",
    )

    def __init__(self, group: Group, index: int) -> None:
        request = group.request
        self.group = group
        self.index = index
        self.params = _choice_params(request.params, index)
        self.tokens = list(request.prompt)
        self.prompt_len = len(request.prompt)
        self.age = (request.priority, 0, index)  # smaller is older
        self.seq_id = 0
        self.computed = 0
        self.finish: Terminal | None = None
        self.first_token_s: float | None = None
        self.last_token_s = 0.0
        self.gaps_s: list[float] = []
        self.scored = 0  # prompt logprobs delivered
        self.scored_since_open = 0
        self.scores_prompt = False  # the open sequence keeps a logits row for each prompt row
        self.lookup: Lookup | None = None  # from its first token on, when sequences guess

    @property
    def tenant(self) -> str:
        return self.group.request.tenant

    @property
    def uncomputed(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def output_left(self) -> int:
        return self.params.max_tokens - self.num_output

    def logit_rows(self, num_tokens: int) -> int:
        """Logits rows kept when the next ``num_tokens`` are computed; row i scores token i + 1."""
        rows = int(num_tokens == self.uncomputed)
        if self.scores_prompt:
            rows += max(0, min(self.computed + num_tokens, self.prompt_len - 1) - self.computed)
        return rows

    def index_prompt(self, num_computed: int) -> None:
        """Keep the index of the prompt up with a step that computed ``num_computed`` of its tokens."""
        index = self.group.prompt_index
        if index.end < self.prompt_len:
            index.extend(self.tokens, min(index.end + max(num_computed, INDEXED_PER_STEP), self.prompt_len))

    def guess(self, num_new: int) -> None:
        """``num_new`` tokens came: judge what was guessed of them, and guess again."""
        if self.lookup is None:
            self.lookup = Lookup(self.group.prompt_index, self.prompt_len)
        self.lookup.advance(self.tokens, num_new)

    def spec(self, seq_id: int, fork_of: int | None) -> SequenceSpec:
        request, params = self.group.request, self.params
        if params.prompt_logprobs is not None and self.scored >= self.prompt_len - 1:
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        return SequenceSpec(
            seq_id=seq_id,
            tokens=list(self.tokens),
            prompt_len=self.prompt_len,
            params=params,
            namespace=f"{request.cache_scope}\0{request.adapter}",
            fork_of=fork_of,
            grammar=self.group.grammar,
        )


def _choice_params(params: SamplingParams, index: int) -> SamplingParams:
    assert params.seed is not None
    seed = (params.seed + index) % MAX_SEED
    if index == 0:
        return params if seed == params.seed else msgspec.structs.replace(params, seed=seed)
    return msgspec.structs.replace(params, seed=seed, prompt_logprobs=None)


class State:
    """Lists are kept oldest first. ``pages_needed`` is the runtime's question of that name; it changes nothing."""

    def __init__(
        self, limits: Limits, config: ServingConfig, pages_needed: Callable[[int, int], int], cost: CostModel
    ) -> None:
        self.limits = limits
        self.config = config
        self.pages_needed = pages_needed
        self.cost = cost
        self.queue: FairQueue[Group] = FairQueue()
        self.shares = Shares()
        self.running: list[Choice] = []  # open in the runtime
        self.parked: list[Choice] = []  # preempted, or waiting to fork: before anyone in the queue
        self.closing: list[int] = []  # sequences to release with the next plan
        self.step = 0  # number of the last plan
        # Everyone who runs must fit into one step, or the youngest would starve.
        most = min(limits.max_seqs, limits.max_logit_rows, limits.max_step_tokens)
        self.max_running = min(config.max_running or most, most)

    def full_tenants(self) -> Set[str]:
        """Tenants that have all the seats that one may take; requests of nobody by name have no such bound."""
        bound = seats_of_one(self.max_running)
        if len(self.running) < bound:
            return frozenset()
        seats = Counter(choice.tenant for choice in self.running)
        return {tenant for tenant, taken in seats.items() if tenant and taken >= bound}

    def is_long(self, choice: Choice) -> bool:
        """Whether what it has to compute takes more than one step, whatever the time."""
        return choice.uncomputed > self.limits.max_step_tokens

    def prompts_in_order(self) -> list[Choice]:
        """Sequences with more than one token to compute: who was given least first; of a tenant's, the short before the
        long, so that nobody waits for another's book; then the oldest. Every fourth step the long wait for no short
        one, so that they arrive too."""
        prompts = [choice for choice in self.running if choice.uncomputed > 1]
        if len(prompts) < 2:
            return prompts
        several = len({choice.tenant for choice in prompts}) > 1
        seats = Counter(choice.tenant for choice in self.running) if several else Counter[str]()
        all_alike = self.step % LONG_EVERY == 0

        def place(choice: Choice) -> tuple[int, float, float, bool, tuple[int, int, int]]:
            served, seat = 0.0, 0.0
            if several:
                served = self.shares.served(choice.tenant)
                seat = seats[choice.tenant] / choice.group.request.weight
            return choice.age[0], served, seat, not all_alike and self.is_long(choice), choice.age

        return sorted(prompts, key=place)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.closing or self.parked or len(self.queue))

    def add_running(self, choice: Choice) -> None:
        insort(self.running, choice, key=lambda c: c.age)

    def park(self, choice: Choice) -> None:
        insort(self.parked, choice, key=lambda c: c.age)

    def close(self, choice: Choice) -> None:
        """Take a choice out of every list; an open sequence is released with the next plan."""
        if choice.seq_id:
            self.running.remove(choice)
            self.closing.append(choice.seq_id)
            choice.seq_id = choice.computed = 0
        elif choice in self.parked:
            self.parked.remove(choice)

    def check_integrity(self) -> None:
        """Each choice in one list, ages ascending, counts within bounds. Run after each step in tests."""
        assert len(self.running) <= self.max_running
        for choices in (self.running, self.parked):
            ages = [choice.age for choice in choices]
            assert ages == sorted(set(ages)), ages
            assert all(choice.finish is None for choice in choices)
        assert not {id(c) for c in self.running} & {id(c) for c in self.parked}
        assert all(c.seq_id == 0 and c.computed == 0 for c in self.parked)
        for choice in self.running:
            assert choice.seq_id
            assert 1 <= choice.uncomputed <= len(choice.tokens), (choice.computed, len(choice.tokens))
            assert choice.num_output < choice.params.max_tokens
        open_ids = [choice.seq_id for choice in self.running] + self.closing
        assert len(set(open_ids)) == len(open_ids), open_ids
