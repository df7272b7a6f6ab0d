"""Writing "act" records from registers: the one quantiser of every kernel that ends in an act buffer.

Owns the arithmetic of a group of 32 (equal bit by bit to formats.ActLayout.quantize, so independent of target, tile and
thread). Does not own the record's layout (formats.ActLayout).
"""

from __future__ import annotations

from collections.abc import Sequence

from ai_engine.kernels.cpu.formats import GROUP, ActLayout
from ai_engine.kernels.cpu.lang import Kernel, Operand, Value


def act_record(k: Kernel, act: Value, row: Value, groups: Operand, group: Operand) -> Value:
    """Pointer to the record of ``group`` (32 columns) of ``row`` in an act buffer with ``groups`` groups a row."""
    offset: Value = ActLayout.row_offset(row, k.coerce(groups, "i64"))
    return act + (offset + k.coerce(group, "i64") * 256)


def emit_quantize_group(k: Kernel, record: Value, xs: Sequence[Value]) -> None:
    """Quantise 32 columns, given as f32 vectors in order, into the record at ``record``."""
    lanes = xs[0].lanes
    assert lanes * len(xs) == GROUP, (lanes, len(xs))
    magnitudes = [k.abs(x) for x in xs]
    while len(magnitudes) > 1:
        magnitudes = [k.max(a, b) for a, b in zip(magnitudes[::2], magnitudes[1::2], strict=True)]
    amax = k.reduce_max(magnitudes[0])
    alive = amax >= 1e-30
    inverse = k.select(alive, k.f32(127.0) / amax, 0.0)
    scale = k.select(alive, amax / 127.0, 0.0)
    q = _concat([k.round_i32(x * inverse) for x in xs]).trunc("i8")
    k.store(record + ActLayout.Q, q)
    fours = k.dot_u8s8(k.i32(0, 8), k.const(1, "i8", GROUP), q, max_u=1)  # eight sums of four
    twos = fours + fours.shuffle([2, 3, 0, 1, 6, 7, 4, 5])
    ones = twos + twos.shuffle([1, 0, 3, 2, 5, 4, 7, 6])
    sums = [ones[0], ones[4]]
    total = sums[0] + sums[1]
    k.store(record + ActLayout.SCALE, scale)
    k.store(record + ActLayout.DSUM, scale * total.to_f32())
    k.store(record + ActLayout.OFFSET, total * -128)
    for i, part in enumerate(sums):
        k.store(record + (ActLayout.SUM16 + 2 * i), part.trunc("i16"))
        k.store(record + (ActLayout.OFFSET16 + 4 * i), part * -32)


def _concat(values: Sequence[Value]) -> Value:
    parts = list(values)
    while len(parts) > 1:
        parts = [a.concat(b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
