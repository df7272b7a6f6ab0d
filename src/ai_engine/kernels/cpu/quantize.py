"""Writing "act" records from registers: the one quantiser of every kernel that ends in an act buffer.

Owns the arithmetic of a group of 32 and its outlier (equal bit by bit to formats.ActLayout.quantize, so independent of
target, tile and thread). Does not own the record's layout (formats.ActLayout).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    column, outlier = _find_outlier(k, xs)
    numbers = [k.const_vec("i32", range(at, at + lanes)) for at in range(0, GROUP, lanes)]
    xs = [k.select(number.eq(column), 0.0, x) for number, x in zip(numbers, xs, strict=True)]
    amax = _amax(k, [k.abs(x) for x in xs])
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
    k.store(record + ActLayout.DSUM, scale * total.to_f32() + outlier)
    k.store(record + ActLayout.OUTLIER, outlier)
    k.store(record + ActLayout.COLUMN, column)
    k.store(record + ActLayout.OFFSET, total * -128)
    for i, part in enumerate(sums):
        k.store(record + (ActLayout.SUM16 + 2 * i), part.trunc("i16"))
        k.store(record + (ActLayout.OFFSET16 + 4 * i), part * -32)


def _amax(k: Kernel, magnitudes: Sequence[Value]) -> Value:
    return k.reduce_max(_halved(magnitudes, k.max))


def _halved(values: Sequence[Value], op: Callable[[Value, Value], Value]) -> Value:
    """The 32 columns' first half with the second, and so on until one vector is left."""
    parts = list(values)
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [op(a, b) for a, b in zip(parts[:half], parts[half:], strict=True)]
    return parts[0]


def _find_outlier(k: Kernel, xs: Sequence[Value]) -> tuple[Value, Value]:
    """(column, value) of a group's outlier; (-1, 0) where there is none."""
    magnitudes = [k.abs(x) for x in xs]
    amax = _amax(k, magnitudes)
    total = k.reduce_add(_halved([x * x for x in xs], lambda a, b: a + b))
    largest = _concat([magnitude.eq(amax) for magnitude in magnitudes]).bitcast("i32")
    exists = (amax * amax > total * ActLayout.OUTLIER_SHARE) & largest.ne(0)
    first = k.intrinsic("llvm.cttz.i32", "i32", 1, largest, k.const(0, "i1"))
    return k.select(exists, first, -1), k.select(exists, _concat(xs)[first & 31], 0.0)


def _concat(values: Sequence[Value]) -> Value:
    parts = list(values)
    while len(parts) > 1:
        parts = [a.concat(b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
