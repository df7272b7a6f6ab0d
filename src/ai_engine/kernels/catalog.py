"""The catalog in numbers: each op's shape rules, and the bytes and floating-point operations of a step.

Owns `check` (what a legal Call looks like) and `cost` (what it must at least move and compute), which inspect, the
roofline and the checks read. Does not own formulas (reference/ops.py) nor how a backend does it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ai_engine.ports.kernels import BufferType, Call, KvShape, Resources, WeightSpec
from ai_engine.ports.model import DType, row_bytes

FLOAT_TYPES = (DType.F32, DType.F16, DType.BF16)
"""Weights whose matmul takes f32 inputs; the others take act."""

ACTS = ("silu", "gelu_tanh")
ARITY = {
    "embed": (0, 1, (1,)), "rms_norm": (1, 1, (1,)), "rms_norm_add": (2, 1, (1,)), "quantize": (1, 1, (0,)),
    "matmul": (1, 1, (1, 2)), "add": (2, 1, (0,)), "rope_store": (1, 1, (0, 2)), "attention": (1, 1, (0,)),
    "glu": (1, 1, (0,)), "gather": (1, 1, (0,)), "sample": (1, 0, (0,)),
}  # fmt: skip
"""Inputs, outputs and possible numbers of weights of each op."""

_ACT_BYTES_PER_32 = 64


def attr_int(call: Call, name: str, default: int | None = None) -> int:
    value = call.attrs.get(name, default)
    assert isinstance(value, int), f"{call.op}: attribute {name} must be an integer, found {value!r}"
    return int(value)


def attr_float(call: Call, name: str, default: float | None = None) -> float:
    value = call.attrs.get(name, default)
    assert isinstance(value, (int, float)), f"{call.op}: attribute {name} must be a number, found {value!r}"
    return float(value)


def check(call: Call, resources: Resources) -> None:
    """AssertionError, naming the rule, where ``call`` breaks the catalog: a bug of whoever built the program."""

    def need(condition: bool, rule: str) -> None:
        assert condition, f"{call.op} (layer {call.layer}): {rule}; found {call}"

    def f32(types: Sequence[BufferType]) -> bool:
        return all(t.kind == "f32" for t in types)

    ins, outs = [b.type for b in call.inputs], [b.type for b in call.outputs]
    need(call.op in ARITY, f"an op of {', '.join(ARITY)}")
    num_in, num_out, num_weights = ARITY[call.op]
    need(len(ins) == num_in and len(outs) == num_out, f"{num_in} inputs, {num_out} outputs")
    need(len(call.weights) in num_weights, f"{num_weights} weights")
    specs = []
    for name in call.weights:
        need(name in resources.weights, f"weight {name} exists")
        specs.append(resources.weights[name][0])
    for spec in specs[0 if call.op not in ("embed", "matmul") else 1 :]:
        need(spec.dtype is DType.F32 and spec.rows == 1, f"{spec.name} is an F32 vector")
    for buffer in (*call.inputs, *call.outputs):
        need(buffer.offset % 64 == 0, f"{buffer.name} is 64-byte aligned")
        need(buffer.type.cols > 0, f"{buffer.name} has columns")
        need(buffer.type.kind == "f32" or buffer.type.cols % 32 == 0, f"{buffer.name}: act columns are whole groups")
    cols_in, cols_out = [t.cols for t in ins], [t.cols for t in outs]
    if call.op != "gather":
        need(len({t.rows for t in (*ins, *outs)}) == 1, "inputs and outputs have the same rows")
    match call.op:
        case "embed":
            need(f32(outs) and outs[0].rows == "tokens", "f32 of token rows")
            need(cols_out[0] == specs[0].cols, "columns of the table")
            attr_float(call, "scale", 1.0)
        case "rms_norm":
            need(f32(ins) and cols_in == cols_out == [specs[0].cols], "f32 in, columns as the weight")
            attr_float(call, "eps")
        case "rms_norm_add":
            need(f32((*ins, *outs)) and {*cols_in, *cols_out} == {specs[0].cols}, "f32, columns as the weight")
            attr_float(call, "eps")
        case "quantize":
            need(f32(ins) and outs[0].kind == "act" and cols_in == cols_out, "f32 in, act of the same columns out")
        case "matmul":
            w = specs[0]
            kind = "f32" if w.dtype in FLOAT_TYPES else "act"
            need(ins[0].kind == kind and cols_in[0] == w.cols, f"{kind} input of {w.cols} columns")
            need(f32(outs), "f32 out")
            first = attr_int(call, "out_col", 0)
            if "out_col" in call.attrs:
                need(first >= 0 and first + w.rows <= cols_out[0], "the column range lies in the output")
            else:
                need(cols_out[0] == w.rows, f"output of {w.rows} columns")
            if len(specs) > 1:
                need(specs[1].cols == w.rows, "bias of the output's columns")
                need(not call.attrs.get("accumulate", False), "a bias or accumulate, not both")
            if call.attrs.get("screen", False):
                need(w.screened and len(specs) == 1, "a screened weight without a bias")
                need(outs[0].rows == "logits" and not call.attrs.get("accumulate", False), "fresh logits rows")
        case "add":
            need(f32((*ins, *outs)) and len({*cols_in, *cols_out}) == 1, "f32 of the same columns")
        case "rope_store" | "attention":
            heads, kv_heads, head_dim = (attr_int(call, n) for n in ("heads", "kv_heads", "head_dim"))
            shape = resources.kv_shape
            need(0 <= attr_int(call, "layer") < shape.num_layers, "a layer of the cache")
            need((kv_heads, head_dim) == (shape.kv_heads, shape.head_dim), "heads as in the cache")
            need(heads > 0 and heads % kv_heads == 0, "query heads in whole groups")
            need(f32(ins) and ins[0].rows == "tokens", "f32 of token rows")
            need(cols_in[0] == (heads + 2 * kv_heads) * head_dim, "columns are q, k, v")
            if call.op == "attention":
                need(cols_out[0] == heads * head_dim, "output columns are the query heads")
                need(attr_int(call, "window", 0) >= 0, "window is not negative")
                attr_float(call, "scale")
            else:
                need(call.inputs[0].offset == call.outputs[0].offset and ins == outs, "rotates in place")
                table = resources.rope_tables.get(str(call.attrs.get("rope_table")))
                need(table is not None, "the rope table exists")
                assert table is not None
                need(table.ndim == 3 and table.shape[2] == 2, "rope table f32[positions, pairs, 2]")
                need(2 * table.shape[1] <= head_dim, "rotated dims lie in the head")
                need(all(s.cols == head_dim for s in specs), "norm weights of a head")
                attr_float(call, "eps", 0.0)
        case "glu":
            need(f32(ins) and cols_in[0] == 2 * cols_out[0], "gate and up")
            need(call.attrs.get("act") in ACTS, f"act is one of {ACTS}")
            run = attr_int(call, "interleave", 0)
            need(run in (0, 32) and (run == 0 or cols_out[0] % run == 0), "interleave 0 or 32, whole runs")
        case "gather":
            need(f32((*ins, *outs)) and cols_in == cols_out, "f32 of the same columns")
            need(ins[0].rows == "tokens" and outs[0].rows == "logits", "from token rows to logits rows")
        case "sample":
            need(f32(ins) and ins[0].rows == "logits", "f32 of logits rows")
            need(cols_in[0] >= resources.vocab_size, "a column for each token")


@dataclass(frozen=True)
class StepShape:
    """Sizes of a step. ``sequences``: (rows, context length) of each sequence."""

    tokens: int
    logit_rows: int
    sequences: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Cost:
    """The least that an op has to move to or from memory (caches aside), and its floating-point or integer
    operations, a multiply-add counted as two."""

    weight_bytes: int = 0
    kv_bytes: int = 0
    activation_bytes: int = 0
    flops: int = 0

    @property
    def nbytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.activation_bytes

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.weight_bytes + other.weight_bytes,
            self.kv_bytes + other.kv_bytes,
            self.activation_bytes + other.activation_bytes,
            self.flops + other.flops,
        )


def buffer_row_bytes(type: BufferType) -> int:
    """Bytes of one row as the arithmetic needs it."""
    return type.cols * 4 if type.kind == "f32" else type.cols // 32 * _ACT_BYTES_PER_32


def kv_position_bytes(shape: KvShape) -> int:
    """Of one position's keys and values in one layer; int8 has a scale of four bytes beside each head's codes."""
    return 2 * shape.kv_heads * (2 * shape.head_dim if shape.dtype == "f16" else shape.head_dim + 4)


def attended_pairs(rows: int, context: int, window: int = 0) -> int:
    """(row, key) pairs that causal attention of the last ``rows`` of ``context`` positions computes."""
    pairs = 0
    for position in range(context - rows, context):
        pairs += min(position + 1, window) if window else position + 1
    return pairs


def cost(call: Call, weights: Mapping[str, WeightSpec], kv_shape: KvShape, step: StepShape) -> Cost:
    """What ``call`` costs in a step of this shape."""
    rows = {"tokens": step.tokens, "logits": step.logit_rows}
    activations = sum(rows[b.type.rows] * buffer_row_bytes(b.type) for b in (*call.inputs, *call.outputs))
    specs = [weights[name] for name in call.weights]
    cols = (call.outputs or call.inputs)[0].type.cols
    num = rows[(call.outputs or call.inputs)[0].type.rows]
    match call.op:
        case "embed":
            return Cost(num * row_bytes(specs[0].dtype, specs[0].cols), 0, activations, num * cols)
        case "matmul":
            used = sum(spec.rows * row_bytes(spec.dtype, spec.cols) for spec in specs) if num else 0
            return Cost(used, 0, activations, 2 * num * specs[0].rows * specs[0].cols)
        case "rope_store":
            return Cost(0, num * kv_position_bytes(kv_shape), activations, 6 * num * cols)
        case "attention":
            heads, window = attr_int(call, "heads"), attr_int(call, "window", 0)
            seen = sum(min(context, window + n - 1) if window else context for n, context in step.sequences if n)
            pairs = sum(attended_pairs(n, context, window) for n, context in step.sequences)
            return Cost(0, seen * kv_position_bytes(kv_shape), activations, 4 * pairs * heads * kv_shape.head_dim)
        case "gather":
            return Cost(0, 0, 2 * num * cols * 4, 0)
    per_value = {"rms_norm": 4, "rms_norm_add": 5, "quantize": 3, "add": 1, "glu": 12, "sample": 8}[call.op]
    return Cost(sum(4 * spec.cols for spec in specs) if num else 0, 0, activations, per_value * num * cols)
