"""ReferenceKernels: the kernels port in NumPy, one op after the other.

Owns trivial layouts and the reading of a StepBatch. Packed weights are the file's bytes, row by row; an f32 buffer is a
plain matrix; an act buffer is the CPU's ``ActLayout`` (formats.py), so that both quantise to the same bits; a KV page
is f16[layers][2][page_tokens][kv_heads][head_dim], or the same of int8 with an f32 scale behind each head_dim of them.
The formulas are in ops.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ai_engine.kernels import catalog
from ai_engine.kernels.cpu.formats import ActLayout, dequantize
from ai_engine.kernels.reference import ops
from ai_engine.ports.kernels import (
    F32,
    U8,
    Buffer,
    BufferType,
    Call,
    KvShape,
    Program,
    Resources,
    SampleBatch,
    SampleOut,
    Slot,
    StepBatch,
    WeightSpec,
)
from ai_engine.ports.model import row_bytes
from ai_engine.ports.sampling import MAX_LOGPROBS


@dataclass
class _Step:
    """What an op needs to run: the memory and the step's integers."""

    resources: Resources
    batch: StepBatch
    weight_cache: dict[str, F32]
    out: SampleOut

    def rows(self, type: BufferType) -> int:
        return len(self.batch.token_ids) if type.rows == "tokens" else len(self.batch.logit_rows)

    def read(self, buffer: Buffer) -> F32:
        """A copy of a buffer's live rows as f32, whatever its kind."""
        type, rows = buffer.type, self.rows(buffer.type)
        if type.kind == "act":
            layout = ActLayout(type.cols)
            raw = self.resources.activations[buffer.offset : buffer.offset + layout.nbytes(rows)]
            return layout.dequantize(raw, rows)
        return self._view(buffer).copy()

    def write(self, buffer: Buffer, values: F32) -> None:
        type, rows = buffer.type, self.rows(buffer.type)
        assert values.shape == (rows, type.cols), (buffer, values.shape)
        if type.kind == "act":
            raw = ActLayout(type.cols).quantize(values)
            self.resources.activations[buffer.offset : buffer.offset + raw.size] = raw
        else:
            self._view(buffer)[:] = values

    def _view(self, buffer: Buffer) -> F32:
        type, rows = buffer.type, self.rows(buffer.type)
        raw = self.resources.activations[buffer.offset : buffer.offset + 4 * rows * type.cols]
        return np.asarray(raw.view(np.float32).reshape(rows, type.cols))

    def weight(self, name: str) -> F32:
        """A whole weight's values, [rows, cols], kept once read."""
        if name not in self.weight_cache:
            spec, packed = self.resources.weights[name]
            self.weight_cache[name] = dequantize(spec.dtype, _rows_of(spec, packed))
        return self.weight_cache[name]

    def vector(self, name: str) -> F32:
        return np.asarray(self.weight(name)[0])

    def pages(self, layer: int) -> npt.NDArray[Any]:
        """Keys (0) and values (1) of a layer: a view [num_pages, 2, page_tokens, kv_heads] of `kv_row`s."""
        shape = self.resources.kv_shape
        pool = self.resources.kv.view(kv_row(shape))
        return pool.reshape(-1, shape.num_layers, 2, shape.page_tokens, shape.kv_heads)[:, layer]

    def sequences(self) -> list[tuple[int, slice]]:
        start = self.batch.seq_start
        return [(s, slice(int(start[s]), int(start[s + 1]))) for s in range(len(start) - 1) if start[s] < start[s + 1]]


def kv_row(shape: KvShape) -> np.dtype[Any]:
    """One head's key or value of one position."""
    if shape.dtype == "f16":
        return np.dtype([("x", "<f2", (shape.head_dim,))])
    return np.dtype([("q", "i1", (shape.head_dim,)), ("scale", "<f4")])


def _to_rows(shape: KvShape, x: F32) -> npt.NDArray[Any]:
    """f32[..., head_dim] -> `kv_row`s [...]."""
    rows = np.empty(x.shape[:-1], kv_row(shape))
    if shape.dtype == "f16":
        rows["x"] = x
    else:
        rows["q"], rows["scale"] = ops.quantize_kv(x)
    return rows


def _from_rows(rows: npt.NDArray[Any]) -> F32:
    names = rows.dtype.names or ()
    values = rows["x"].astype(np.float32) if "x" in names else rows["q"] * rows["scale"][..., None]
    return np.asarray(values, np.float32)


def _rows_of(spec: WeightSpec, packed: U8) -> U8:
    size = row_bytes(spec.dtype, spec.cols)
    return packed[: spec.rows * size].reshape(spec.rows, size)


def _embed(step: _Step, call: Call) -> None:
    spec, packed = step.resources.weights[call.weights[0]]
    raw = _rows_of(spec, packed)[step.batch.token_ids]
    step.write(call.outputs[0], ops.embed(dequantize(spec.dtype, raw), float(call.attrs.get("scale", 1.0))))


def _rms_norm(step: _Step, call: Call) -> None:
    x = step.read(call.inputs[0])
    step.write(call.outputs[0], ops.rms_norm(x, step.vector(call.weights[0]), float(call.attrs["eps"])))


def _rms_norm_add(step: _Step, call: Call) -> None:
    y, x = step.read(call.inputs[0]), step.read(call.inputs[1])
    step.write(call.outputs[0], ops.rms_norm_add(y, x, step.vector(call.weights[0]), float(call.attrs["eps"])))


def _quantize(step: _Step, call: Call) -> None:
    step.write(call.outputs[0], step.read(call.inputs[0]))


def _matmul(step: _Step, call: Call) -> None:
    weight = step.weight(call.weights[0])
    bias = step.vector(call.weights[1]) if len(call.weights) > 1 else None
    out = step.read(call.outputs[0])
    first = int(call.attrs.get("out_col", 0))
    columns = slice(first, first + weight.shape[0])
    before = out[:, columns] if call.attrs.get("accumulate", False) else None
    out[:, columns] = ops.matmul(step.read(call.inputs[0]), weight, bias, before)
    step.write(call.outputs[0], out)


def _add(step: _Step, call: Call) -> None:
    step.write(call.outputs[0], ops.add(step.read(call.inputs[0]), step.read(call.inputs[1])))


def _rope_store(step: _Step, call: Call) -> None:
    attrs, batch = call.attrs, step.batch
    heads, kv_heads, head_dim = int(attrs["heads"]), int(attrs["kv_heads"]), int(attrs["head_dim"])
    qkv = step.read(call.inputs[0])
    rows = qkv.reshape(qkv.shape[0], heads + 2 * kv_heads, head_dim)
    q, k, v = rows[:, :heads], rows[:, heads : heads + kv_heads], rows[:, heads + kv_heads :]
    if call.weights:
        eps = float(attrs["eps"])
        q = ops.rms_norm(q, step.vector(call.weights[0]), eps)
        k = ops.rms_norm(k, step.vector(call.weights[1]), eps)
    table = step.resources.rope_tables[str(attrs["rope_table"])][batch.positions]
    rows[:, :heads], rows[:, heads : heads + kv_heads] = ops.rope(q, table), ops.rope(k, table)
    step.write(call.outputs[0], qkv)
    pool, shape = step.pages(int(attrs["layer"])), step.resources.kv_shape
    page_tokens = shape.page_tokens
    stored_keys, stored_values = _to_rows(shape, rows[:, heads : heads + kv_heads]), _to_rows(shape, v)
    for s, span in step.sequences():
        positions = batch.positions[span]
        pages = batch.page_table[s, positions // page_tokens]
        pool[pages, 0, positions % page_tokens] = stored_keys[span]
        pool[pages, 1, positions % page_tokens] = stored_values[span]


def _attention(step: _Step, call: Call) -> None:
    attrs, batch = call.attrs, step.batch
    heads, head_dim = int(attrs["heads"]), int(attrs["head_dim"])
    qkv = step.read(call.inputs[0])
    pool = step.pages(int(attrs["layer"]))
    page_tokens, window = step.resources.kv_shape.page_tokens, int(attrs.get("window", 0))
    out = np.empty((qkv.shape[0], heads * head_dim), np.float32)
    for s, span in step.sequences():
        positions = batch.positions[span]
        # Pages wholly before the window may have been given away: read from the first key that a row sees.
        first_key = max(0, int(positions[0]) - window + 1) if window else 0
        at = np.arange(first_key, int(positions[-1]) + 1)
        pages = batch.page_table[s, at // page_tokens]
        k, v = (_from_rows(pool[pages, side, at % page_tokens]) for side in (0, 1))
        q = qkv[span, : heads * head_dim].reshape(-1, heads, head_dim)
        out[span] = ops.attention(q, k, v, positions, float(attrs["scale"]), window, first_key)
    step.write(call.outputs[0], out)


def _glu(step: _Step, call: Call) -> None:
    x = step.read(call.inputs[0])
    step.write(call.outputs[0], ops.glu(x, str(call.attrs["act"]), int(call.attrs.get("interleave", 0))))


def _gather(step: _Step, call: Call) -> None:
    step.write(call.outputs[0], step.read(call.inputs[0])[step.batch.logit_rows])


def _sample(step: _Step, call: Call) -> None:
    logits, sample = step.read(call.inputs[0]), step.batch.sample
    logits = logits[:, : step.resources.vocab_size]
    step.out = empty_sample_out(logits.shape[0])
    for r in range(logits.shape[0]):
        token, logprob, top_token, top_logprob = ops.sample_row(logits[r], **sample_args(sample, r))
        step.out.token[r], step.out.logprob[r] = token, logprob
        step.out.top_token[r], step.out.top_logprob[r] = top_token, top_logprob


def sample_args(sample: SampleBatch, r: int) -> dict[str, Any]:
    """Row r of a SampleBatch as the arguments of `ops.sample_row`."""
    bias = slice(int(sample.bias_start[r]), int(sample.bias_start[r + 1]))
    history = slice(int(sample.history_start[r]), int(sample.history_start[r + 1]))
    return {
        "bias_token": sample.bias_token[bias],
        "bias_value": sample.bias_value[bias],
        "history_token": sample.history_token[history],
        "history_count": sample.history_count[history],
        "repetition": sample.repetition[r],
        "presence": sample.presence[r],
        "frequency": sample.frequency[r],
        "mask": sample.masks[sample.mask_row[r]] if sample.mask_row[r] >= 0 else None,
        "temperature": sample.temperature[r],
        "top_k": int(sample.top_k[r]),
        "top_p": sample.top_p[r],
        "min_p": sample.min_p[r],
        "seed": int(sample.seed[r]),
        "position": int(sample.position[r]),
        "forced": int(sample.forced[r]),
        "num_top": int(sample.num_top[r]),
    }


def empty_sample_out(rows: int) -> SampleOut:
    return SampleOut(
        token=np.full(rows, ops.NO_TOKEN, np.int32),
        logprob=np.zeros(rows, np.float32),
        top_token=np.full((rows, MAX_LOGPROBS), ops.NO_TOKEN, np.int32),
        top_logprob=np.zeros((rows, MAX_LOGPROBS), np.float32),
    )


OPS: Mapping[str, Callable[[_Step, Call], None]] = {
    "embed": _embed,
    "rms_norm": _rms_norm,
    "rms_norm_add": _rms_norm_add,
    "quantize": _quantize,
    "matmul": _matmul,
    "add": _add,
    "rope_store": _rope_store,
    "attention": _attention,
    "glu": _glu,
    "gather": _gather,
    "sample": _sample,
}


ROW_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition",
    "presence",
    "frequency",
    "seed",
    "position",
    "forced",
    "num_top",
    "mask_row",
)
"""The fields of a SampleBatch with one entry per logits row."""


def check_batch(batch: StepBatch, resources: Resources) -> None:
    """AssertionError where a step breaks the port's promises: a bug of whoever built the batch."""
    tokens, sequences, logit_rows = len(batch.token_ids), len(batch.context_len), len(batch.logit_rows)
    assert tokens <= resources.max_tokens, (tokens, resources.max_tokens)
    assert sequences <= resources.max_seqs, (sequences, resources.max_seqs)
    assert logit_rows <= resources.max_logit_rows, (logit_rows, resources.max_logit_rows)
    assert batch.positions.shape == (tokens,)
    assert batch.seq_start.shape == (sequences + 1,)
    assert (batch.seq_start[0], batch.seq_start[-1]) == (0, tokens), batch.seq_start
    assert np.all(np.diff(batch.seq_start) >= 0), batch.seq_start
    assert batch.page_table.shape[0] == sequences, batch.page_table.shape
    assert batch.page_table.flags.c_contiguous
    assert np.all((batch.logit_rows >= 0) & (batch.logit_rows < tokens)), batch.logit_rows
    for s in range(sequences):
        first, end, length = int(batch.seq_start[s]), int(batch.seq_start[s + 1]), int(batch.context_len[s])
        assert np.array_equal(batch.positions[first:end], np.arange(length - (end - first), length)), (s, batch)
    for name in ROW_FIELDS:
        assert getattr(batch.sample, name).shape == (logit_rows,), name
    assert batch.sample.history_start.shape == batch.sample.bias_start.shape == (logit_rows + 1,)


@dataclass(frozen=True)
class ReferenceProgram:
    calls: Sequence[Call]
    resources: Resources
    weight_cache: dict[str, F32]

    @property
    def slots(self) -> Sequence[Slot]:
        return [
            Slot(op=c.op, layer=c.layer, kernel=f"reference.{c.op}", detail=", ".join(c.weights)) for c in self.calls
        ]

    @property
    def workspace_bytes(self) -> int:
        return 0


class ReferenceKernels:
    """`ports.kernels.Kernels` in NumPy."""

    @property
    def name(self) -> str:
        return "reference"

    def prepare(self, progress: Callable[[str, float], None] | None = None) -> None:
        if progress is not None:
            progress("ready", 1.0)

    def buffer_bytes(self, type: BufferType, rows: int) -> int:
        return ActLayout(type.cols).nbytes(rows) if type.kind == "act" else 4 * rows * type.cols

    def packed_bytes(self, spec: WeightSpec) -> int:
        return spec.rows * row_bytes(spec.dtype, spec.cols)

    def row_block(self, spec: WeightSpec) -> int:
        return 1

    def pack_rows(self, spec: WeightSpec, first_row: int, raw: U8, out: U8) -> None:
        assert raw.shape[1] == row_bytes(spec.dtype, spec.cols), (spec, raw.shape)
        assert first_row + raw.shape[0] <= spec.rows, (spec, first_row, raw.shape)
        _rows_of(spec, out)[first_row : first_row + raw.shape[0]] = raw

    def kv_page_bytes(self, shape: KvShape) -> int:
        return 2 * shape.num_layers * shape.page_tokens * shape.kv_heads * kv_row(shape).itemsize

    def copy_page(self, resources: Resources, source: int, target: int) -> None:
        pages = resources.kv.reshape(-1, self.kv_page_bytes(resources.kv_shape))
        pages[target] = pages[source]

    def compile(self, calls: Sequence[Call], resources: Resources) -> Program:
        for call in calls:
            catalog.check(call, resources)
            for buffer in (*call.inputs, *call.outputs):
                rows = resources.max_tokens if buffer.type.rows == "tokens" else resources.max_logit_rows
                end = buffer.offset + self.buffer_bytes(buffer.type, rows)
                assert end <= resources.activations.size, (buffer, end, resources.activations.size)
        return ReferenceProgram(tuple(calls), resources, {})

    def run(self, program: Program, batch: StepBatch) -> SampleOut:
        assert isinstance(program, ReferenceProgram)
        check_batch(batch, program.resources)
        step = _Step(program.resources, batch, program.weight_cache, empty_sample_out(0))
        for call in program.calls:
            OPS[call.op](step, call)
        return step.out

    def close(self) -> None:
        pass
