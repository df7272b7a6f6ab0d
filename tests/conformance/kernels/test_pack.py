"""Formats and packing: every value of every type, found again where the packed layout says it is."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from ai_engine.kernels.cpu import formats
from ai_engine.kernels.cpu.formats import QUANTISED, ActLayout
from ai_engine.kernels.cpu.lang import TARGETS, Kernel, KernelDef, Record, Value
from ai_engine.kernels.cpu.matmul import emit_dequantize_row
from ai_engine.kernels.cpu.pack import PackedLayout, pack_rows, packed_bytes, row_block
from ai_engine.ports.kernels import WeightSpec
from ai_engine.ports.model import BLOCK, SCALE_OFFSETS, DType, row_bytes
from tests.conformance.kernels.rig import Rig, aligned
from tests.golden import tiny_gguf

U8 = npt.NDArray[np.uint8]


def random_rows(dtype: DType, rows: int, cols: int, seed: int = 0) -> U8:
    x = np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32)
    return tiny_gguf.quantize(x, dtype.value).reshape(rows, -1)


def packed(spec: WeightSpec, raw: U8, lanes: int, step: int = 0) -> U8:
    out = aligned(packed_bytes(spec, lanes))
    out[:] = 0xA5  # padding must be written too
    step = step or spec.rows
    for first in range(0, spec.rows, step):
        pack_rows(spec, lanes, first, raw[first : first + step], out)
    return out


@pytest.mark.parametrize("dtype", list(DType))
def test_dequantize_is_ggmls_formula(dtype: DType) -> None:
    raw = random_rows(dtype, 5, 768)
    assert np.array_equal(formats.dequantize(dtype, raw), tiny_gguf.dequantize(raw, dtype.value))


@pytest.mark.parametrize("dtype", QUANTISED)
def test_dequantize_takes_any_bits(dtype: DType) -> None:
    """Codes of every value, scales of every sign: random bytes with finite f16 scales."""
    raw = np.random.default_rng(1).integers(0, 256, (3, row_bytes(dtype, 512)), dtype=np.uint8)
    blocks = raw.reshape(-1, BLOCK[dtype][1])
    for at in SCALE_OFFSETS[dtype]:
        blocks[:, at + 1] &= 0xBF  # exponent below 16
    assert np.array_equal(formats.dequantize(dtype, raw), tiny_gguf.dequantize(raw, dtype.value))


@pytest.mark.parametrize("target", ["avx2", "avx512"])
def test_rows_come_back_bit_by_bit(target: str) -> None:
    """Packing in pieces, then reading each logical row with the kernel that embeddings use."""
    record = Record(w="ptr", out="ptr", cols="i64", row="i64")

    def definition(dtype: DType) -> KernelDef:
        def emit(k: Kernel) -> None:
            def store(column: Value, values: Value) -> None:
                k.store(k.arg.out + column * 4, values)

            emit_dequantize_row(k, dtype, k.arg.w, k.arg.cols, k.arg.row, store)

        return KernelDef(f"row_{dtype.value}", record, emit)

    rig = Rig(TARGETS[target], [definition(t) for t in DType])
    lanes = TARGETS[target].lanes
    for dtype in DType:
        for rows, cols in ((37, 768), (lanes, 256), (1, 512)):
            spec = WeightSpec("w", dtype, rows, cols)
            raw = random_rows(dtype, rows, cols)
            weight = packed(spec, raw, lanes, step=2 * row_block(spec, lanes))
            out = np.zeros((rows, cols), np.float32)
            for row in range(rows):
                args = record.pack(w=weight.ctypes.data, out=out[row].ctypes.data, cols=cols, row=row)
                rig.run(f"row_{dtype.value}", args)
            assert np.array_equal(out, formats.dequantize(dtype, raw)), (dtype, rows, cols)


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("dtype", list(DType))
def test_the_size_stays(dtype: DType, lanes: int) -> None:
    spec = WeightSpec("w", dtype, 4 * lanes, 2048)
    assert packed_bytes(spec, lanes) <= 1.04 * spec.rows * row_bytes(dtype, spec.cols)
    layout = PackedLayout.of(spec, lanes)
    assert layout.block_bytes % 64 == 0
    assert layout.body % 64 == 0


@pytest.mark.parametrize("dtype", list(DType))
def test_padding_rows_are_zero_and_nothing_else_is_touched(dtype: DType) -> None:
    cols, lanes = 256, 8
    spec = WeightSpec("w", dtype, 11, cols)
    raw = random_rows(dtype, 16, cols)
    raw[11:] = 0
    whole = WeightSpec("w", dtype, 16, cols)
    assert np.array_equal(packed(spec, raw[:11], lanes), packed(whole, raw, lanes))
    out = np.full(packed_bytes(whole, lanes), 0x5A, np.uint8)
    pack_rows(whole, lanes, 8, raw[8:], out)
    assert (out[: out.size // 2] == 0x5A).all()


def test_outliers_are_exact_and_leave_the_range_to_the_others() -> None:
    layout = ActLayout(256)
    x = np.clip(np.random.default_rng(4).standard_normal((6, 256)), -2, 2).astype(np.float32)
    x[:, 5], x[:, 32 + 9], x[:, 32 + 20] = 777.7, 300, -300
    x[:, 64:96], x[:, 70] = 0, -0.3
    x[0, 96], x[1, 96], x[2, 96] = np.inf, -np.inf, np.nan
    with np.errstate(invalid="ignore"):
        records = layout.records(layout.quantize(x), 6)
        back = layout.dequantize(layout.quantize(x), 6)
    assert (records["column"][:, :4] == [5, -1, 6, -1]).all()  # of two alike none, nor with infinities or NaN
    assert (records["outlier"][:, [0, 2]] == x[:, [5, 70]]).all()
    assert (records["outlier"][:, 1] == 0).all()
    assert (back[:, [5, 70]] == x[:, [5, 70]]).all()
    assert (records["scale"][:, 2] == 0).all()
    assert (records["q"][:, 0, 5] == 0).all()
    others = np.delete(np.arange(32), 5)
    assert (np.abs(back - x)[:, others].max(axis=1) <= np.abs(x[:, others]).max(axis=1) / 127 * 0.5001).all()
    records = records[:, :3]
    sums = records["scale"] * records["q"].sum(axis=2, dtype=np.int32).astype(np.float32) + records["outlier"]
    assert (records["dsum"] == sums).all()


@pytest.mark.parametrize("rows", [1, 3, 4, 9])
def test_act_records(rows: int) -> None:
    layout = ActLayout(160)
    x = np.random.default_rng(2).standard_normal((rows, 160)).astype(np.float32)
    x[0, 32:64] = 0.0
    x[-1, 64:96] *= 1e-32
    act = layout.quantize(x)
    assert act.nbytes == layout.nbytes(rows)
    back = layout.dequantize(act, rows)
    amax = np.abs(x).reshape(rows, 5, 32).max(axis=2)
    assert (np.abs(back - x).reshape(rows, 5, 32).max(axis=2) <= amax / 127 * 0.5001 + 1e-30).all()
    records = layout.records(act, rows)
    q = records["q"].astype(np.int32)
    assert (records["offset"] == -128 * q.sum(axis=2)).all()
    assert (records["sum16"] == q.reshape(rows, 5, 2, 16).sum(axis=3)).all()
    assert (records["offset16"] == -32 * records["sum16"].astype(np.int32)).all()
    assert (records["dsum"] == records["scale"] * q.sum(axis=2).astype(np.float32) + records["outlier"]).all()
    at = layout.row_offset(rows - 1, layout.groups) + 3 * layout.TILE * layout.RECORD
    assert (act[at : at + 32].view(np.int8) == q[rows - 1, 3]).all()
