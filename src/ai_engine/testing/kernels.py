"""Kernels that compute nothing: sizes, packing and checks are real, so that a runtime can be tested without arithmetic.

The token of a logits row is that row's own token id plus one (modulo the vocabulary), so outputs are predictable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ai_engine.ports.kernels import (
    U8,
    BufferType,
    Call,
    KvShape,
    Program,
    Resources,
    SampleOut,
    Slot,
    StepBatch,
    WeightSpec,
)
from ai_engine.ports.model import row_bytes
from ai_engine.ports.progress import Progress
from ai_engine.ports.sampling import MAX_LOGPROBS


class NullProgram:
    """Implements ports.kernels.Program."""

    def __init__(self, calls: Sequence[Call], resources: Resources) -> None:
        self.calls = tuple(calls)
        self.resources = resources

    @property
    def slots(self) -> Sequence[Slot]:
        return [Slot(op=call.op, layer=call.layer, kernel="null", detail="") for call in self.calls]

    @property
    def workspace_bytes(self) -> int:
        return 0


class NullKernels:
    """Implements ports.kernels.Kernels. ``batches`` keeps the StepBatch of every run; ``on_run`` may raise."""

    def __init__(self, on_run: Callable[[StepBatch], None] | None = None) -> None:
        self.on_run = on_run
        self.batches: list[StepBatch] = []
        self.copied_pages: list[tuple[int, int]] = []
        self.closed = False

    @property
    def name(self) -> str:
        return "null"

    def prepare(self, progress: Progress | None = None) -> None:
        if progress is not None:
            progress("compile", 1.0)

    def buffer_bytes(self, type: BufferType, rows: int) -> int:
        return rows * type.cols * 4

    def packed_bytes(self, spec: WeightSpec) -> int:
        return spec.rows * row_bytes(spec.dtype, spec.cols)

    def row_block(self, spec: WeightSpec) -> int:
        return 1

    def pack_rows(self, spec: WeightSpec, first_row: int, raw: U8, out: U8) -> None:
        width = row_bytes(spec.dtype, spec.cols)
        assert raw.shape[1] == width, (spec, raw.shape)
        out[first_row * width : first_row * width + raw.size] = raw.reshape(-1)

    def kv_page_bytes(self, shape: KvShape) -> int:
        bytes_per_value = 2 if shape.dtype == "f16" else 1
        return shape.num_layers * 2 * shape.kv_heads * shape.head_dim * shape.page_tokens * bytes_per_value

    def copy_page(self, resources: Resources, source: int, target: int) -> None:
        self.copied_pages.append((source, target))

    def compile(self, calls: Sequence[Call], resources: Resources) -> NullProgram:
        for call in calls:
            for weight in call.weights:
                assert weight in resources.weights, (call.op, weight)
        return NullProgram(calls, resources)

    def run(self, program: Program, batch: StepBatch) -> SampleOut:
        assert isinstance(program, NullProgram)
        if self.on_run is not None:
            self.on_run(batch)
        self.batches.append(batch)
        own = batch.token_ids[batch.logit_rows] + 1
        tokens = np.where(batch.sample.forced >= 0, batch.sample.forced, own % program.resources.vocab_size)
        rows = len(batch.logit_rows)
        return SampleOut(
            token=tokens.astype(np.int32),
            logprob=np.full(rows, -0.5, np.float32),
            top_token=np.tile(np.arange(MAX_LOGPROBS, dtype=np.int32), (rows, 1)),
            top_logprob=np.tile(-1.0 - np.arange(MAX_LOGPROBS, dtype=np.float32), (rows, 1)),
        )

    def close(self) -> None:
        self.closed = True
