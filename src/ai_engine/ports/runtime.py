"""The runtime port: one StepPlan in, one StepResult out. The runtime owns KV pages; the scheduler sees budgets only."""

from __future__ import annotations

from typing import Protocol

import msgspec

from ai_engine.ports.grammar import Grammar
from ai_engine.ports.sampling import SamplingParams
from ai_engine.ports.serving import TokenLogprob


class SequenceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the runtime must know to open a sequence.

    ``tokens`` is everything known so far: the prompt, and after a preemption the output too. ``prompt_len`` tells
    them apart (penalties, prompt logprobs). ``namespace`` (tenant, adapter) is part of the prefix key. ``fork_of``
    names an open sequence whose computed pages are shared as far as both agree, up to ``len(tokens) - 1``. The output
    follows ``grammar``, the part of it that is known already too.
    """

    seq_id: int
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    namespace: str = ""
    fork_of: int | None = None
    grammar: Grammar | None = None


class Work(msgspec.Struct, frozen=True, array_like=True):
    """Run ``num_tokens`` of the sequence's known but uncomputed tokens, plus ``draft`` guesses after them.

    When the work reaches the last known token its logits are kept and a token is sampled; with a draft of k
    tokens up to k + 1 tokens come back.
    """

    seq_id: int
    num_tokens: int
    draft: tuple[int, ...] = ()
    adapter: str = ""


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """The scheduler's whole decision, a plain value. ``preempt`` gives pages back and forgets what was computed;
    ``release`` ends a sequence (its full pages stay as prefix cache). Both happen before the work, close the
    sequence, and ignore unknown ids; who was preempted is opened again, and may find its own pages in the cache."""

    step: int
    work: list[Work] = []
    release: list[int] = []
    preempt: list[int] = []


class SeqOutput(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one sequence (empty while its prompt is not finished). ``failed`` says why this sequence alone
    cannot go on (its logits are not finite); it must then be released."""

    seq_id: int
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    failed: str | None = None


class KvBudget(msgspec.Struct, frozen=True, array_like=True):
    """Pages in the pool: free + cached + held == total. A cached page can be evicted; a held one cannot."""

    page_tokens: int
    total: int
    free: int
    cached: int
    held: int

    @property
    def available(self) -> int:
        return self.free + self.cached


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    step: int
    outputs: list[SeqOutput]
    kept_rows: int  # logits rows computed
    budget: KvBudget
    started_s: float  # monotonic
    ended_s: float
    evicted_pages: int = 0


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the built engine can take; fixed at load."""

    max_context: int  # tokens a single sequence may hold
    max_step_tokens: int  # rows of one step
    max_seqs: int  # sequences in one step
    max_logit_rows: int  # logits rows of one step
    vocab_size: int


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes by category; also what `inspect` and /metrics print."""

    weights: int
    kv: int
    activations: int
    workspace: int  # logits, attention partials, argument blocks, rings
    kv_bytes_per_token: int


class Runtime(Protocol):
    """Implementations: runtime.engine.Engine, testing.FakeRuntime."""

    @property
    def limits(self) -> Limits: ...

    @property
    def memory(self) -> MemoryReport: ...

    def budget(self) -> KvBudget: ...

    def open(self, spec: SequenceSpec) -> int:
        """Make the sequence known and pin its cached prefix; returns the number of tokens already computed
        (at most len(tokens) - 1, a multiple of the page size unless forked)."""
        ...

    def pages_needed(self, seq_id: int, num_tokens: int) -> int:
        """Pages that must be taken from the pool before ``num_tokens`` more tokens of this sequence fit."""
        ...

    def step(self, plan: StepPlan) -> StepResult:
        """Run one step. Raises EngineError if it cannot; the sequences of the plan are then in an undefined state
        and must be released."""
        ...

    def close(self) -> None: ...
