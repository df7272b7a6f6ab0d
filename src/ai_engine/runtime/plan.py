"""What a model will need, before anything is loaded: compiled graph, buffers, the context and the KV pages that fit.

Owns the options of an engine and every sum of bytes. Does not allocate (engine.py) and does not read weights
(weights.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from ai_engine.ports.errors import ConfigError
from ai_engine.ports.kernels import Kernels, KvShape
from ai_engine.ports.model import ModelConfig, ModelFile
from ai_engine.ports.runtime import Limits
from ai_engine.runtime.ir import Graph
from ai_engine.runtime.lower import Lowered, lower
from ai_engine.runtime.models import build_graph
from ai_engine.runtime.passes import DEFAULT_PASSES, Pass, ScreenHead, compile_graph
from ai_engine.runtime.weights import arena_offsets

DEFAULT_CONTEXT: Final = 8192
"""Or the model's own limit, if that is less."""
DEFAULT_REQUESTS: Final = 8
"""KV memory is sized for this many requests of full context."""
LOGIT_ROWS_PER_SEQ: Final = 2
AUTO_ROWS: Final = (512, 256, 128)
SMALL_ACTIVATIONS: Final = 16 << 20
"""Bytes; see `step_rows`."""
MIN_CONTEXT: Final = 128
"""A context that nobody asked for shrinks to this at the least."""


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's own options; 0 means the default that the plan works out. ``eos_ids`` are what ``min_tokens`` holds
    back."""

    max_context: int = 0
    max_seqs: int = 32
    max_step_tokens: int = 0
    kv_memory: int = 0
    kv_type: Literal["f16", "int8"] = "f16"
    page_tokens: int = 32
    eviction: str = "lru"
    prefix_cache: bool = True
    approximate_head: bool = False
    eos_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class EnginePlan:
    """``free_bytes`` is what the machine had when the plan was made."""

    graph: Graph
    lowered: Lowered
    limits: Limits
    kv_shape: KvShape
    num_pages: int
    page_bytes: int
    weight_bytes: int
    rope_bytes: int
    free_bytes: int

    @property
    def kv_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def kv_tokens(self) -> int:
        return self.num_pages * self.kv_shape.page_tokens

    @property
    def kv_bytes_per_token(self) -> int:
        return self.page_bytes // self.kv_shape.page_tokens

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.lowered.activation_bytes + self.rope_bytes + self.kv_bytes

    def sum_text(self) -> str:
        """One line: where the memory goes."""
        return (
            f"weights {mib(self.weight_bytes)} + KV {mib(self.kv_bytes)} ({self.kv_tokens} tokens of "
            f"{self.kv_shape.dtype}) + activations {mib(self.lowered.activation_bytes)} + rope tables "
            f"{mib(self.rope_bytes)} = {mib(self.total_bytes)} of {mib(self.free_bytes)} free; "
            f"a request may hold {self.limits.max_context} tokens"
        )


def mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def make_plan(
    file: ModelFile,
    kernels: Kernels,
    options: EngineOptions,
    free_bytes: int,
    *,
    passes: Sequence[Pass] = DEFAULT_PASSES,
    watch: Callable[[str, Graph], None] | None = None,
) -> EnginePlan:
    """Compile the graph and do the sums. Raises UnsupportedModel, or ConfigError that names the flag to change."""
    config = file.config
    more = (ScreenHead(),) if options.approximate_head else ()
    graph = compile_graph(build_graph(config, file.tensors), (*passes, *more), watch)
    rows, logit_rows, lowered = step_rows(graph, kernels, options)
    shape = KvShape(
        num_layers=config.num_layers,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_tokens=options.page_tokens,
        dtype=options.kv_type,
    )
    page_bytes = kernels.kv_page_bytes(shape)
    weight_bytes = arena_offsets(graph.weights, kernels.packed_bytes)[1]
    rest = weight_bytes + lowered.activation_bytes
    num_pages, max_context = _fit_kv(config, options, page_bytes, rest, free_bytes)
    limits = Limits(
        max_context=max_context,
        max_step_tokens=rows,
        max_seqs=min(options.max_seqs, rows, logit_rows),
        max_logit_rows=logit_rows,
        vocab_size=config.vocab_size,
    )
    tables = 1 if config.rope_base_local is None else 2
    rope_bytes = 4 * config.rope_dim * max_context * tables
    plan = EnginePlan(graph, lowered, limits, shape, num_pages, page_bytes, weight_bytes, rope_bytes, free_bytes)
    if plan.total_bytes > free_bytes:
        raise ConfigError(
            f"not enough memory: {plan.sum_text()}. Use a smaller --kv-memory, --max-context or --max-step-tokens, or "
            "a smaller model",
            param="kv_memory",
        )
    return plan


def step_rows(graph: Graph, kernels: Kernels, options: EngineOptions) -> tuple[int, int, Lowered]:
    """(rows of a step, its logits rows, the calls for that many). Where nobody asked for a number it is the largest of
    AUTO_ROWS whose activations stay within SMALL_ACTIVATIONS, or that cost no more than the logits do anyway: a wide
    model is as fast in chunks of 128, and its step is longer than any target by then."""
    for rows in (options.max_step_tokens,) if options.max_step_tokens else AUTO_ROWS:
        logit_rows = min(max(64, LOGIT_ROWS_PER_SEQ * options.max_seqs), max(rows, options.max_seqs))
        lowered = lower(graph, kernels.buffer_bytes, rows, logit_rows)
        floor = lower(graph, kernels.buffer_bytes, 1, logit_rows).activation_bytes
        if lowered.activation_bytes <= max(SMALL_ACTIVATIONS, floor):
            break
    return rows, logit_rows, lowered


def _fit_kv(config: ModelConfig, options: EngineOptions, page_bytes: int, rest: int, free: int) -> tuple[int, int]:
    """(pages, context). A context that nobody asked for shrinks to what fits; one that was asked for is an error."""
    if options.max_context > config.max_context:
        raise ConfigError(
            f"--max-context is {options.max_context}, but {config.name} takes {config.max_context} tokens at most",
            param="max_context",
        )
    if rest > free:
        raise ConfigError(
            f"not enough memory: weights and activations take {mib(rest)}, but {mib(free)} are free. Use a smaller "
            "model or quantisation, or a lower --max-step-tokens",
            param="max_step_tokens",
        )
    context = options.max_context or min(config.max_context, DEFAULT_CONTEXT)
    pages_each = -(-context // options.page_tokens)
    if options.kv_memory:
        num_pages, source = options.kv_memory // page_bytes, f"--kv-memory gives {mib(options.kv_memory)}"
    else:
        quarter = max(0, free - rest) // 4
        num_pages = min(DEFAULT_REQUESTS * pages_each, quarter // page_bytes)
        source = f"a quarter of the {mib(max(0, free - rest))} left beside the weights is {mib(quarter)}"
    fits = min(num_pages * options.page_tokens, context)
    needed = context if options.max_context else min(context, MIN_CONTEXT)
    if fits < needed:
        each = -(-needed // options.page_tokens)
        raise ConfigError(
            f"one request of {needed} tokens needs {each} KV pages of {mib(page_bytes)} = {mib(each * page_bytes)}, "
            f"but {source}. Raise --kv-memory to at least {each * page_bytes}, or lower --max-context",
            param="max_context" if options.max_context else "kv_memory",
        )
    return num_pages, fits
