"""Costs in small numbers that can be checked by hand."""

from __future__ import annotations

from typing import Any

import pytest

from ai_engine.kernels.catalog import Cost, StepShape, attended_pairs, cost
from ai_engine.ports.kernels import Buffer, BufferType, Call, KvShape, WeightSpec
from ai_engine.ports.model import DType

SHAPE = KvShape(num_layers=2, kv_heads=2, head_dim=16, page_tokens=32)
WEIGHTS = {"w": WeightSpec("w", DType.Q4_0, 10, 64), "n": WeightSpec("n", DType.F32, 1, 64)}


def call(
    op: str, cols_in: int, cols_out: int, *weights: str, kind: Any = "f32", rows: Any = "tokens", **attrs: Any
) -> Call:
    ins = (Buffer("x", BufferType(kind, cols_in, rows), 0),) if cols_in else ()
    outs = (Buffer("y", BufferType("f32", cols_out, rows), 0),) if cols_out else ()
    return Call(op=op, inputs=ins, outputs=outs, weights=weights, attrs=attrs)


def test_matmul_reads_its_weights_once_whatever_the_rows() -> None:
    one = cost(call("matmul", 64, 10, "w", kind="act"), WEIGHTS, SHAPE, StepShape(1, 1))
    many = cost(call("matmul", 64, 10, "w", kind="act"), WEIGHTS, SHAPE, StepShape(7, 1))
    assert one == Cost(weight_bytes=10 * 2 * 18, activation_bytes=2 * 64 + 10 * 4, flops=2 * 10 * 64)
    assert many.weight_bytes == one.weight_bytes
    assert (many.activation_bytes, many.flops) == (7 * one.activation_bytes, 7 * one.flops)
    none = cost(call("matmul", 64, 10, "w", kind="act", rows="logits"), WEIGHTS, SHAPE, StepShape(7, 0))
    assert none == Cost()


@pytest.mark.parametrize(("rows", "context", "window"), [(1, 9, 0), (4, 4, 0), (3, 10, 4), (10, 10, 4), (5, 5, 100)])
def test_attention_counts_what_is_seen(rows: int, context: int, window: int) -> None:
    seen = [[key for key in range(p + 1) if not window or key > p - window] for p in range(context - rows, context)]
    assert attended_pairs(rows, context, window) == sum(map(len, seen))
    attention = call(
        "attention", 4 * 16 + 64, 4 * 16, heads=4, kv_heads=2, head_dim=16, layer=0, scale=1.0, window=window
    )
    total = cost(attention, WEIGHTS, SHAPE, StepShape(rows, 1, ((rows, context),)))
    assert total.kv_bytes == len({key for keys in seen for key in keys}) * 2 * 2 * 16 * 2
    assert total.flops == 4 * sum(map(len, seen)) * 4 * 16


def test_sums() -> None:
    total = sum((cost(call("rms_norm", 64, 64, "n"), WEIGHTS, SHAPE, StepShape(3, 1)) for _ in range(2)), Cost())
    assert total.weight_bytes == 2 * 256
    assert total.nbytes == 2 * (256 + 3 * 2 * 256)
