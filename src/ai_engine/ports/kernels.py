"""The kernels port: Calls in, a Program out, and `run`. Kernels own layouts; the runtime owns what is called when.

Sizes of a step vary, so a Program is compiled once per model and reads the step's shape from the StepBatch:
T token rows, S sequences, R logits rows (R <= T).

The catalog: ops that every implementation has. `x: f32[T, C]` is a buffer of kind "f32"; "act" is a quantised
activation buffer in a layout of the implementation's choice. Weights are packed (see `pack_rows`). In and out may be
the same buffer where the formula is row-wise.

    op           inputs -> outputs                 weights          formula, attrs
    embed        -> f32[T,D]                       table            scale * table[token_ids]            scale
    rms_norm     f32[T,D] -> f32|act[T,D]          norm             x / sqrt(mean(x^2)+eps) * norm      eps
    rms_norm_add f32[T,D] y, f32[T,D] x -> x       norm             x + rms_norm(y)                     eps
    quantize     f32[T,K] -> act[T,K]                               nearest int8 per 32, scale = amax/127; outliers
    matmul       f32|act[T,K] -> f32[T,N]          W [, bias]       x W^T (+ bias)        accumulate: out += not =
    add          f32[T,D], f32[T,D] -> f32[T,D]                     x + y
    rope_store   f32[T,(H+2G)*hd] qkv -> same      [q_norm,k_norm]  rope q and k by position (half-split pairs), write
                                                                    k, v to this layer's KV pages
                                                                    layer, heads, kv_heads, head_dim, rope_table, eps
    attention    f32[T,(H+2G)*hd] qkv -> f32|act[T,H*hd]            softmax(scale q K^T) V, causal, over the pages
                                                                    layer, heads, kv_heads, head_dim, scale,
                                                                    window (0: whole context; w: keys > pos - w)
    glu          f32[T,2F] -> f32|act[T,F]                          act(gate) * up        act: silu | gelu_tanh
                                                                    gate and up rows alternate in runs of 32
                                                                    (``interleave`` = 32) or are halves (0)
    gather       f32[T,D] -> f32[R,D]                               x[logit_rows]
    sample       f32[R,V] logits -> SampleOut                       see SampleBatch

When qkv comes from weights of different types, several matmul calls write column ranges of one buffer: an
``out_col`` attr says where. With a BF16, F16 or F32 weight the input stays f32; others take "act".

A matmul of logits rows may have the attr ``screen`` (approximate, never by default): rows of which only the best tokens
matter may then have -inf for all tokens but some that a rough product found best; those are exact. Such a row is greedy
or has 0 < top_k <= ports.sampling.MAX_SCREENED_TOP_K, and has no logprobs, bias, penalties, mask or forced token. Which
rows are screened depends on their own sampling alone. An implementation may ignore it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from ai_engine.ports.model import DType
from ai_engine.ports.progress import Progress

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
BufferKind = Literal["f32", "act"]
RowDim = Literal["tokens", "logits"]
Attr = int | float | str | bool


class BufferType(msgspec.Struct, frozen=True):
    """A dynamic matrix: rows are the step's tokens or its logits rows."""

    kind: BufferKind
    cols: int
    rows: RowDim = "tokens"


class Buffer(msgspec.Struct, frozen=True):
    """A BufferType placed at a byte offset of the activation arena; two buffers may share memory when their lives
    do not overlap."""

    name: str
    type: BufferType
    offset: int


class WeightSpec(msgspec.Struct, frozen=True):
    """A packed weight: ``rows`` outputs by ``cols`` inputs in one stored type; vectors (norm, bias) are F32, rows 1.
    ``screened``: a Q8_0 head that a matmul with ``screen`` reads; packed so that half of it gives a rough answer."""

    name: str
    dtype: DType
    rows: int
    cols: int
    screened: bool = False


class KvShape(msgspec.Struct, frozen=True, kw_only=True):
    """``dtype`` int8: codes and one f32 scale for each position and head, about half the bytes of f16."""

    num_layers: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    dtype: Literal["f16", "int8"] = "f16"


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One op on placed buffers. ``barrier``: every thread must have finished it before the next call starts."""

    op: str
    inputs: tuple[Buffer, ...] = ()
    outputs: tuple[Buffer, ...] = ()
    weights: tuple[str, ...] = ()
    attrs: dict[str, Attr] = {}
    layer: int = -1
    barrier: bool = True


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """The memory that a program is bound to. All arrays outlive the program."""

    weights: Mapping[str, tuple[WeightSpec, U8]]
    rope_tables: Mapping[str, F32]  # name -> f32[max_context, rope_dim/2, 2] of (cos, sin)
    kv: U8  # [num_pages * page_bytes]
    kv_shape: KvShape
    activations: U8
    max_tokens: int
    max_seqs: int
    max_logit_rows: int
    vocab_size: int


class SampleBatch(msgspec.Struct, kw_only=True):
    """Sampling arrays of a step, one entry per logits row (R of them); ragged parts in CSR form.

    logits += bias; penalties on the history; -inf where the mask bit is 0; then temperature, top_k, top_p, min_p.
    ``seed`` and ``position`` (absolute position of the token being drawn) are all the randomness there is.
    ``forced[r] >= 0`` draws nothing and reports that token (prompt logprobs). ``num_top[r]`` -1: no logprobs.
    Logprobs are of the untouched logits.
    """

    temperature: F32
    top_k: I32
    top_p: F32
    min_p: F32
    repetition: F32
    presence: F32
    frequency: F32
    seed: npt.NDArray[np.uint64]
    position: I32
    forced: I32
    num_top: I32
    history_start: I32  # [R + 1]
    history_token: I32  # distinct tokens of prompt and output
    history_count: I32  # occurrences in the output
    bias_start: I32  # [R + 1]
    bias_token: I32
    bias_value: F32
    mask_row: I32  # row of ``masks`` or -1
    masks: npt.NDArray[np.uint32]  # [M, ceil(V / 32)]; bit set: allowed


class SampleOut(msgspec.Struct, kw_only=True):
    token: I32  # [R]
    logprob: F32  # [R]
    top_token: I32  # [R, MAX_LOGPROBS]
    top_logprob: F32  # [R, MAX_LOGPROBS]


class StepBatch(msgspec.Struct, kw_only=True):
    """The shape and the integers of one step. Sequence s owns rows seq_start[s]:seq_start[s+1], which are the last
    rows of its context: context_len[s] counts them. Page j of sequence s is page_table[s, j]."""

    token_ids: I32  # [T]
    positions: I32  # [T]
    seq_start: I32  # [S + 1]
    context_len: I32  # [S]
    page_table: I32  # [S, P], C-contiguous
    logit_rows: I32  # [R]
    sample: SampleBatch
    step: int = 0


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """One native call of a program, for printing and for reading the rings."""

    op: str
    layer: int
    kernel: str
    detail: str


class Program(Protocol):
    @property
    def slots(self) -> Sequence[Slot]: ...

    @property
    def workspace_bytes(self) -> int: ...


class Kernels(Protocol):
    """Implementations: kernels.cpu.backend.CpuKernels, kernels.reference.backend.ReferenceKernels,
    testing.NullKernels."""

    @property
    def name(self) -> str: ...

    def prepare(self, progress: Progress | None = None) -> None:
        """Build or load what `run` needs (object file). Called before anything else; ``progress(phase, fraction)``."""
        ...

    def buffer_bytes(self, type: BufferType, rows: int) -> int: ...

    def packed_bytes(self, spec: WeightSpec) -> int: ...

    def row_block(self, spec: WeightSpec) -> int:
        """`pack_rows` takes whole multiples of this many rows (the last call may end at spec.rows)."""
        ...

    def pack_rows(self, spec: WeightSpec, first_row: int, raw: U8, out: U8) -> None:
        """Repack file rows ``raw`` (uint8[n, row_bytes], ggml blocks or F32/F16/BF16 elements) into their place
        in ``out`` (the whole weight's packed_bytes)."""
        ...

    def kv_page_bytes(self, shape: KvShape) -> int: ...

    def copy_page(self, resources: Resources, source: int, target: int) -> None:
        """Copy one KV page (forks)."""
        ...

    def compile(self, calls: Sequence[Call], resources: Resources) -> Program:
        """Bind calls to addresses. Checks every shape; AssertionError on an illegal call (our bug)."""
        ...

    def run(self, program: Program, batch: StepBatch) -> SampleOut:
        """Run one step. The arrays returned are valid until the next run."""
        ...

    def close(self) -> None: ...
