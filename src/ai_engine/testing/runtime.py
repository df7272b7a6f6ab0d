"""A runtime with real page accounting and no arithmetic: a function of the context stands in for the model.

Owns the pages (prefix cache, forks with copy on write, eviction) and checks every rule of the port, so that a scheduler
that breaks one fails its test. Owns no thread and no real time: a step takes simulated seconds on a VirtualClock.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from zlib import crc32

from ai_engine.ports.clock import Clock
from ai_engine.ports.errors import EngineError
from ai_engine.ports.runtime import KvBudget, Limits, MemoryReport, SeqOutput, SequenceSpec, StepPlan, StepResult, Work
from ai_engine.ports.serving import TokenLogprob
from ai_engine.testing.clock import VirtualClock
from ai_engine.testing.serving import fake_logprob

StepSeconds = Callable[[Sequence[tuple[int, int, int]]], float]
"""(rows, logits rows, tokens computed before) of each sequence of a step -> how long it takes."""

NextToken = Callable[[SequenceSpec, Sequence[int]], int]
"""(spec, all tokens so far) -> the next token."""

DEFAULT_LIMITS = Limits(max_context=4096, max_step_tokens=256, max_seqs=32, max_logit_rows=64, vocab_size=1000)


class HashModel:
    """The next token depends on every token so far and, unless greedy, on the seed. ``eos_per_mille`` of all draws
    are ``eos_id``; other tokens never are."""

    def __init__(self, vocab_size: int = 1000, *, eos_id: int | None = None, eos_per_mille: int = 0) -> None:
        self._vocab_size = vocab_size
        self._eos_id = eos_id
        self._eos_per_mille = eos_per_mille

    def __call__(self, spec: SequenceSpec, tokens: Sequence[int]) -> int:
        seed = 0 if spec.params.temperature == 0 else (spec.params.seed or 0)
        draw = crc32(array("q", tokens).tobytes(), seed & 0xFFFFFFFF)
        if self._eos_id is not None and draw // self._vocab_size % 1000 < self._eos_per_mille:
            return self._eos_id
        token = draw % self._vocab_size
        return (token + 1) % self._vocab_size if token == self._eos_id else token


class ScriptedModel:
    """Given outputs per prompt; after the last one, and for an unknown prompt, ``eos_id``."""

    def __init__(self, scripts: Mapping[tuple[int, ...], Sequence[int]], eos_id: int) -> None:
        self._scripts = dict(scripts)
        self._eos_id = eos_id

    def __call__(self, spec: SequenceSpec, tokens: Sequence[int]) -> int:
        script = self._scripts.get(tuple(tokens[: spec.prompt_len]), ())
        position = len(tokens) - spec.prompt_len
        return script[position] if position < len(script) else self._eos_id


class _Sequence:
    def __init__(self, spec: SequenceSpec) -> None:
        self.spec = spec
        self.tokens = list(spec.tokens)
        self.computed = 0
        self.pages: list[int] = []

    @property
    def uncomputed(self) -> int:
        return len(self.tokens) - self.computed


class FakeRuntime:
    """Implements ports.runtime.Runtime.

    ``on_step(plan)`` runs at the start of each step, after release and preempt: it may block (a slow step), advance the
    clock, or raise (a failed step; nothing else of the plan is done). ``poison(spec)`` true: that sequence's logits
    are not finite. ``plans`` keeps every plan.
    """

    def __init__(
        self,
        model: NextToken | None = None,
        *,
        limits: Limits = DEFAULT_LIMITS,
        num_pages: int = 256,
        page_tokens: int = 16,
        clock: Clock | None = None,
        seconds_per_step: float = 0.001,
        seconds_per_row: float = 0.0001,
        step_seconds: StepSeconds | None = None,
        memory: MemoryReport | None = None,
        on_step: Callable[[StepPlan], None] | None = None,
        poison: Callable[[SequenceSpec], bool] = lambda spec: False,
    ) -> None:
        self._model = model or HashModel(limits.vocab_size)
        self._limits = limits
        self._page_tokens = page_tokens
        self._num_pages = num_pages
        self._clock = clock or VirtualClock()
        self._step_seconds = step_seconds or (
            lambda parts: seconds_per_step + seconds_per_row * sum(rows for rows, _, _ in parts)
        )
        self._memory = memory or MemoryReport(
            weights=1000, kv=num_pages * 100, activations=10, workspace=1, kv_bytes_per_token=6
        )
        self.on_step = on_step
        self.poison = poison
        self.plans: list[StepPlan] = []
        self.closed = False
        self._sequences: dict[int, _Sequence] = {}
        self._free = list(range(num_pages))
        self._refs: Counter[int] = Counter()
        self._page_of: OrderedDict[bytes, int] = OrderedDict()  # prefix key -> full page, least recently used first
        self._key_of: dict[int, bytes] = {}
        self._evicted = 0

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def memory(self) -> MemoryReport:
        return self._memory

    @property
    def open_sequences(self) -> int:
        return len(self._sequences)

    def budget(self) -> KvBudget:
        held = len(self._refs)
        free = len(self._free)
        return KvBudget(self._page_tokens, self._num_pages, free, self._num_pages - free - held, held)

    def open(self, spec: SequenceSpec) -> int:
        assert spec.seq_id not in self._sequences, f"sequence {spec.seq_id} is open already"
        assert 0 < spec.prompt_len <= len(spec.tokens) <= self._limits.max_context, spec
        seq = _Sequence(spec)
        if spec.fork_of is not None:
            self._share(self._sequences[spec.fork_of], seq)
        elif spec.params.prompt_logprobs is None:  # those need every row computed
            self._pin_prefix(seq)
        self._sequences[spec.seq_id] = seq
        return seq.computed

    def pages_needed(self, seq_id: int, num_tokens: int) -> int:
        seq = self._sequences[seq_id]
        copies = int(num_tokens > 0 and self._tail_is_shared(seq))
        return max(0, -(-(seq.computed + num_tokens) // self._page_tokens) - len(seq.pages)) + copies

    def step(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        started_s = self._clock.now_s()
        self._evicted = 0
        for seq_id in (*plan.release, *plan.preempt):
            self._close(seq_id, forget=seq_id in plan.preempt)
        if self.on_step is not None:
            self.on_step(plan)
        kept_rows = self._check(plan)
        parts = [self._part(work) for work in plan.work]
        outputs = [self._run(work) for work in plan.work]
        if isinstance(self._clock, VirtualClock):
            self._clock.advance(self._step_seconds(parts))
        return StepResult(
            step=plan.step,
            outputs=outputs,
            kept_rows=kept_rows,
            budget=self.budget(),
            started_s=started_s,
            ended_s=self._clock.now_s(),
            evicted_pages=self._evicted,
        )

    def close(self) -> None:
        self.closed = True

    def check_integrity(self) -> None:
        """free + cached + held == total, and every reference is some open sequence's."""
        refs = Counter(page for seq in self._sequences.values() for page in seq.pages)
        assert refs == self._refs, (refs, self._refs)
        cached = {page for page in self._key_of if page not in self._refs}
        assert len(cached) + len(self._refs) + len(set(self._free)) == self._num_pages
        assert len(set(self._free)) == len(self._free)
        assert not cached & set(self._free)
        for seq in self._sequences.values():
            assert -(-seq.computed // self._page_tokens) == len(seq.pages), (seq.computed, seq.pages)

    # pages

    def _key(self, seq: _Sequence, num_tokens: int) -> bytes:
        return seq.spec.namespace.encode() + b"\0" + array("q", seq.tokens[:num_tokens]).tobytes()

    def _pin_prefix(self, seq: _Sequence) -> None:
        for end in range(self._page_tokens, len(seq.tokens), self._page_tokens):
            key = self._key(seq, end)
            page = self._page_of.get(key)
            if page is None:
                return
            self._page_of.move_to_end(key)
            self._refs[page] += 1
            seq.pages.append(page)
            seq.computed = end

    def _share(self, parent: _Sequence, seq: _Sequence) -> None:
        limit = min(parent.computed, len(seq.tokens) - 1)
        same = 0
        while same < limit and parent.tokens[same] == seq.tokens[same]:
            same += 1
        seq.computed = same
        seq.pages = parent.pages[: -(-same // self._page_tokens)]
        self._refs.update(seq.pages)

    def _tail_is_shared(self, seq: _Sequence) -> bool:
        """Whether others can see the page that the next token goes to: another sequence, or who looks up its prefix."""
        page = seq.pages[-1] if seq.computed % self._page_tokens else None
        return page is not None and (self._refs[page] > 1 or page in self._key_of)

    def _take_page(self) -> int:
        if not self._free:
            self._evict_oldest()
        page = self._free.pop()
        self._refs[page] = 1
        return page

    def _evict_oldest(self) -> None:
        for key, page in self._page_of.items():
            if page not in self._refs:
                del self._page_of[key], self._key_of[page]
                self._free.append(page)
                self._evicted += 1
                return
        raise EngineError("out of KV pages: the plan asked for more than the budget")

    def _drop_page(self, page: int, *, forget: bool) -> None:
        self._refs[page] -= 1
        if self._refs[page] > 0:
            return
        del self._refs[page]
        if forget and page in self._key_of:
            del self._page_of[self._key_of.pop(page)]
        if page not in self._key_of:
            self._free.append(page)

    def _close(self, seq_id: int, *, forget: bool) -> None:
        seq = self._sequences.pop(seq_id, None)  # unknown ids are ignored: a failed step leaves them undefined
        for page in seq.pages if seq is not None else ():
            self._drop_page(page, forget=forget)

    # steps

    def _check(self, plan: StepPlan) -> int:
        """Assert the limits; returns the logits rows kept."""
        ids = [work.seq_id for work in plan.work]
        assert len(set(ids)) == len(ids) <= self._limits.max_seqs, ids
        rows = kept = 0
        for work in plan.work:
            seq = self._sequences[work.seq_id]
            assert 1 <= work.num_tokens <= seq.uncomputed, (work, seq.uncomputed)
            assert not work.draft or work.num_tokens == seq.uncomputed, work
            rows += work.num_tokens + len(work.draft)
            kept += self._logit_rows(seq, work)
        assert rows <= self._limits.max_step_tokens, rows
        assert kept <= self._limits.max_logit_rows, kept
        return kept

    def _part(self, work: Work) -> tuple[int, int, int]:
        seq = self._sequences[work.seq_id]
        return work.num_tokens + len(work.draft), self._logit_rows(seq, work), seq.computed

    @staticmethod
    def _logit_rows(seq: _Sequence, work: Work) -> int:
        samples = int(work.num_tokens == seq.uncomputed) + len(work.draft)
        if seq.spec.params.prompt_logprobs is None:
            return samples
        end = seq.computed + work.num_tokens
        prompt_rows = max(0, min(end, seq.spec.prompt_len - 1) - seq.computed)  # row i scores token i + 1
        return prompt_rows + samples

    def _run(self, work: Work) -> SeqOutput:
        seq = self._sequences[work.seq_id]
        params = seq.spec.params
        start, samples = seq.computed, work.num_tokens == seq.uncomputed
        drawn: list[int] = []
        if samples:
            drawn.append(self._model(seq.spec, seq.tokens))
            for guess in work.draft:
                if guess != drawn[-1]:
                    break
                drawn.append(self._model(seq.spec, [*seq.tokens, *drawn]))
        self._grow(seq, start + work.num_tokens + max(0, len(drawn) - 1), drawn)
        prompt_logprobs: list[TokenLogprob] | None = None
        if params.prompt_logprobs is not None and start < seq.spec.prompt_len - 1:
            scored = seq.tokens[start + 1 : min(start + work.num_tokens + 1, seq.spec.prompt_len)]
            prompt_logprobs = [fake_logprob(token, params.prompt_logprobs) for token in scored]
        if samples and self.poison(seq.spec):
            return SeqOutput(work.seq_id, [], failed="logits are not finite")
        k = params.logprobs
        logprobs = None if k is None or not drawn else [fake_logprob(token, k) for token in drawn]
        return SeqOutput(work.seq_id, drawn, logprobs, prompt_logprobs)

    def _grow(self, seq: _Sequence, computed: int, drawn: Sequence[int]) -> None:
        if self._tail_is_shared(seq):
            shared = seq.pages.pop()
            seq.pages.append(self._take_page())
            self._drop_page(shared, forget=False)
        while len(seq.pages) * self._page_tokens < computed:
            seq.pages.append(self._take_page())
        seq.tokens.extend(drawn)
        first_new = seq.computed // self._page_tokens
        seq.computed = computed
        for i in range(first_new, computed // self._page_tokens):
            key = self._key(seq, (i + 1) * self._page_tokens)
            if key not in self._page_of:
                self._page_of[key], self._key_of[seq.pages[i]] = seq.pages[i], key


def solo(runtime: FakeRuntime, spec: SequenceSpec) -> list[int]:
    """The tokens this sequence gets alone, up to max_tokens: what it must get in any company."""
    tokens = list(spec.tokens)
    for _ in range(spec.params.max_tokens):
        tokens.append(runtime._model(spec, tokens))
    return tokens[len(spec.tokens) :]
