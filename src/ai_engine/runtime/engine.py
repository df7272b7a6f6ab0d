"""The engine: ports.runtime.Runtime over a compiled program, a page pool and the open sequences.

Owns the life of sequences (open, step, release) and the building of an engine from a model file, in phases that report
progress. Array building is step.py's, pages are kv.py's, sums of bytes plan.py's, arithmetic the kernels'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Protocol

import numpy as np

from ai_engine.ports.clock import Clock
from ai_engine.ports.errors import AiEngineError, EngineError, StaleHandle
from ai_engine.ports.hardware import Arena
from ai_engine.ports.kernels import F32, I32, U8, Kernels, Program, Resources, WeightSpec
from ai_engine.ports.model import ModelFile
from ai_engine.ports.progress import Progress, no_progress
from ai_engine.ports.runtime import KvBudget, Limits, MemoryReport, SeqOutput, SequenceSpec, StepPlan, StepResult, Work
from ai_engine.ports.sampling import SamplingParams
from ai_engine.runtime.eviction import make_policy
from ai_engine.runtime.kv import PageMap, PagePool
from ai_engine.runtime.passes import DEFAULT_PASSES, Pass
from ai_engine.runtime.plan import EngineOptions, EnginePlan, make_plan
from ai_engine.runtime.rope import rope_tables
from ai_engine.runtime.sequence import ParamTable, Sequence
from ai_engine.runtime.step import Builder, Piece, build_batch, cut, read_output
from ai_engine.runtime.weights import load_weights


class MakeArena(Protocol):
    def __call__(self, nbytes: int, /) -> Arena: ...


class Engine:
    """Implements ports.runtime.Runtime. Not thread-safe: one loop calls it."""

    def __init__(
        self, plan: EnginePlan, options: EngineOptions, kernels: Kernels, program: Program, resources: Resources,
        arenas: SequenceOf[Arena], clock: Clock, page_map: PageMap,
    ) -> None:  # fmt: skip
        self.plan, self.kernels, self.program, self.resources = plan, kernels, program, resources
        self._limits, self._clock, self._arenas, self._eos_ids = plan.limits, clock, arenas, options.eos_ids
        self.pool = PagePool(
            plan.num_pages,
            options.page_tokens,
            -(-plan.limits.max_context // options.page_tokens),
            make_policy(options.eviction),
            lambda source, target: kernels.copy_page(resources, source, target),
            share_prefixes=options.prefix_cache,
            page_map=page_map,
        )
        self._params = ParamTable()
        self._builder = Builder(plan.limits, self._params)
        self._sequences: dict[int, Sequence] = {}

    # --- the port

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def memory(self) -> MemoryReport:
        plan = self.plan
        return MemoryReport(
            weights=plan.weight_bytes,
            kv=plan.kv_bytes,
            activations=plan.lowered.activation_bytes,
            workspace=self.program.workspace_bytes + plan.rope_bytes,
            kv_bytes_per_token=plan.kv_bytes_per_token,
        )

    @property
    def arenas(self) -> dict[str, Arena]:
        """The engine's large memory by what it is for."""
        return dict(zip(("weights", "activations", "kv"), self._arenas, strict=False))

    def budget(self) -> KvBudget:
        return self.pool.budget()

    def open(self, spec: SequenceSpec) -> int:
        """Raises EngineError when the tokens do not fit the context or are not the model's."""
        tokens = self._checked_tokens(spec)
        expect = min(len(tokens) + spec.params.max_tokens, self._limits.max_context)
        scores = spec.params.prompt_logprobs is not None  # those need every row computed
        shared = 0 if scores else self._shared_with(spec, tokens)
        if shared:
            handle = self.pool.fork(self._sequences[spec.fork_of or 0].handle, spec.namespace, shared)
        else:
            handle, shared = self.pool.open(spec.namespace, tokens, expect_tokens=expect, reuse=not scores)
        try:
            seq = Sequence(spec, tokens, self._limits.max_context, handle, self.pool.slot(handle), self._eos_ids)
            self._params.set(seq.slot, spec.params)
        except BaseException:  # nobody would ever release the pages that it shares
            self.pool.release(handle)
            raise
        seq.num_computed = shared
        self._sequences[spec.seq_id] = seq
        return shared

    def pages_needed(self, seq_id: int, num_tokens: int) -> int:
        return self.pool.pages_needed(self._sequence(seq_id).handle, num_tokens)

    def step(self, plan: StepPlan) -> StepResult:
        started_s, evicted = self._clock.now_s(), self.pool.num_evicted
        for seq_id in plan.release:
            self._close(seq_id)
        for seq_id in plan.preempt:
            self._close(seq_id)
        outputs: dict[int, SeqOutput] = {}
        kept_rows = 0
        for pieces in cut([(self._sequence(work.seq_id), work) for work in plan.work], self._limits):
            kept_rows += self._run(pieces, plan.step, outputs)
        return StepResult(
            plan.step, list(outputs.values()), kept_rows, self.pool.budget(), started_s, self._clock.now_s(),
            self.pool.num_evicted - evicted,
        )  # fmt: skip

    def close(self) -> None:
        """Close the kernels and give all memory back."""
        self._sequences.clear()
        self.kernels.close()
        for arena in self._arenas:
            arena.close()

    def check_integrity(self) -> None:
        """AssertionError unless pages and sequences agree. Slow; for tests."""
        self.pool.check_integrity()
        assert self.pool.num_open == len(self._sequences), "a page handle outlived its sequence"
        for seq in self._sequences.values():
            assert self.pool.num_tokens(seq.handle) == seq.num_computed < seq.num_known, seq.seq_id

    # --- inside

    def _sequence(self, seq_id: int) -> Sequence:
        seq = self._sequences.get(seq_id)
        if seq is None:
            raise StaleHandle(f"sequence {seq_id} is not open; it was released, preempted or never opened")
        return seq

    def _checked_tokens(self, spec: SequenceSpec) -> I32:
        assert spec.seq_id not in self._sequences, f"sequence {spec.seq_id} is open already"
        if not 0 < len(spec.tokens) <= self._limits.max_context:
            raise EngineError(f"{len(spec.tokens)} tokens; a sequence holds 1 to {self._limits.max_context}")
        assert 0 < spec.prompt_len <= len(spec.tokens), (spec.prompt_len, len(spec.tokens))
        tokens = np.array(spec.tokens, np.int32)
        if int(tokens.min()) < 0 or int(tokens.max()) >= self._limits.vocab_size:
            raise EngineError(f"token ids run from {tokens.min()} to {tokens.max()}; the vocabulary has "
                              f"{self._limits.vocab_size}")  # fmt: skip
        return tokens

    def _shared_with(self, spec: SequenceSpec, tokens: I32) -> int:
        """Computed tokens that the sequence can take over from ``fork_of``; 0 when that is gone, of another namespace,
        or has less to give than the cache."""
        origin = self._sequences.get(spec.fork_of) if spec.fork_of is not None else None
        if origin is None or self.pool.namespace(origin.handle) != spec.namespace:
            return 0
        limit = min(origin.num_computed, len(tokens) - 1)
        differ = np.flatnonzero(origin.tokens[:limit] != tokens[:limit])
        shared = int(differ[0]) if len(differ) else limit
        return shared if shared > self.pool.cached_tokens(spec.namespace, tokens) else 0

    def _close(self, seq_id: int) -> None:
        """Unknown ids are ignored: after a failed step the caller cannot know which were closed."""
        seq = self._sequences.pop(seq_id, None)
        if seq is not None:
            self.pool.release(seq.handle)

    def _run(self, pieces: list[Piece], step: int, outputs: dict[int, SeqOutput]) -> int:
        """One run of the program; returns the logits rows kept."""
        pool = self.pool
        for seq, _, num_tokens, draft in pieces:
            pool.extend(seq.handle, num_tokens + len(draft))
        batch = build_batch(self._builder, pieces, pool.table, pool.page_tokens, step)
        try:
            out = self.kernels.run(self.program, batch.arrays)
        except AiEngineError:
            raise
        except Exception as error:
            raise EngineError(f"step {step} failed in the kernels: {type(error).__name__}: {error}") from error
        for (seq, _, num_tokens, _), output in zip(pieces, read_output(batch, out), strict=True):
            if output.failed is None:
                try:
                    self._advance(seq, num_tokens, output.tokens)
                except EngineError as error:  # its grammar's, and this sequence's alone
                    output = SeqOutput(seq.seq_id, [], None, None, error.message)
            outputs[seq.seq_id] = _joined(outputs.get(seq.seq_id), output)
        return len(batch.rows)

    def _advance(self, seq: Sequence, num_tokens: int, tokens: list[int]) -> None:
        """``num_tokens`` known tokens and all accepted guesses are computed; keys of other guesses are written over."""
        if tokens:
            seq.append(tokens)
            num_tokens += len(tokens) - 1
        seq.num_computed += num_tokens
        self.pool.commit(seq.handle, seq.tokens, num_tokens)


def _joined(earlier: SeqOutput | None, output: SeqOutput) -> SeqOutput:
    """One output of a sequence whose work was cut into several runs."""
    if earlier is None or earlier.prompt_logprobs is None:
        return output
    scores = earlier.prompt_logprobs + (output.prompt_logprobs or [])
    return SeqOutput(output.seq_id, output.tokens, output.logprobs, scores, output.failed)


def build_engine(
    file: ModelFile,
    kernels: Kernels,
    make_arena: MakeArena,
    free_bytes: int,
    clock: Clock,
    options: EngineOptions,
    *,
    passes: SequenceOf[Pass] = DEFAULT_PASSES,
    progress: Progress = no_progress,
    warm_up: bool = True,
    make_page_map: Callable[[int], PageMap] = bytearray,
) -> Engine:
    """Kernels ready, graph compiled, weights loaded, program bound and run once at its typical shapes.

    ``make_arena(nbytes)`` gives zeroed memory, ``make_page_map(num_pages)`` what takes a byte per KV page (kv.py),
    shared where others are to see it; ``free_bytes`` is what the process may still take. Raises
    UnsupportedModel, ModelFileError or ConfigError.
    """
    kernels.prepare(progress)
    plan = make_plan(file, kernels, options, free_bytes, passes=passes)
    arenas = [make_arena(max(1, n)) for n in (plan.weight_bytes, plan.lowered.activation_bytes, plan.kv_bytes)]
    try:
        weights = load_weights(
            plan.graph.weights, file, kernels, arenas[0].data, lambda done: progress("load weights", done)
        )
        tables = rope_tables(file.config, file, plan.limits.max_context)
        resources = _resources(plan, weights, tables, arenas[1].data, arenas[2].data)
        engine = Engine(
            plan, options, kernels, kernels.compile(plan.lowered.calls, resources), resources, arenas, clock,
            make_page_map(plan.num_pages),
        )  # fmt: skip
        if warm_up:
            run_warm_up(engine, lambda done: progress("warm up", done))
    except BaseException:
        for arena in arenas:
            arena.close()
        raise
    return engine


def _resources(
    plan: EnginePlan, weights: Mapping[str, tuple[WeightSpec, U8]], tables: Mapping[str, F32], activations: U8, kv: U8
) -> Resources:
    limits = plan.limits
    return Resources(
        weights=weights,
        rope_tables=tables,
        kv=kv,
        kv_shape=plan.kv_shape,
        activations=activations,
        max_tokens=limits.max_step_tokens,
        max_seqs=limits.max_seqs,
        max_logit_rows=limits.max_logit_rows,
        vocab_size=limits.vocab_size,
    )


def run_warm_up(engine: Engine, progress: Callable[[float], None]) -> None:
    """Steps of the shapes that requests will have: a prompt chunk, decode alone, decode of a few and of all sequences.
    Touches every weight and buffer once; leaves no sequence and no cached page."""
    limits, budget = engine.limits, engine.budget()
    length = min(limits.max_step_tokens, limits.max_context - 4, budget.total * budget.page_tokens // 2)
    params = SamplingParams(temperature=0.0, max_tokens=4)
    num_seqs = min(limits.max_seqs, budget.total // 2)
    for number, (seqs, tokens) in enumerate(((1, length), (2, 1), (num_seqs, 1))):
        progress(number / 3)
        ids = list(range(-seqs, 0))
        for seq_id in ids:
            engine.open(
                SequenceSpec(seq_id=seq_id, tokens=[0] * tokens, prompt_len=tokens, params=params, namespace="warm-up")
            )
        for count in (tokens, 1):
            result = engine.step(StepPlan(0, [Work(seq_id, count) for seq_id in ids]))
            if any(output.failed for output in result.outputs):
                break
        engine.step(StepPlan(0, release=ids))
    engine.pool.drop_cache()
    engine.pool.num_evicted = engine.pool.num_hit_tokens = 0
    progress(1.0)
