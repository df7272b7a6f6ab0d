"""ggml's block formats in NumPy, and the layout of quantised activations.

Owns the exact value of every stored weight (`dequantize`, ggml's formula operation by operation in float32) and what
an "act" buffer looks like in memory (`ActLayout`), with the NumPy quantiser that the kernels are compared with. It does
not own the packed layout of weights (pack.py), nor how anything is multiplied (matmul.py).

Every format is value = scale * (q - offset) - min per group of 16 or 32 columns:

    type       bits  group  offset  stored per group                  per 256
    Q4_0       4     32     8       d f16
    Q4_1       4     32     0       d f16, m f16 (value = d q + m)
    Q5_0       4+1   32     16      d f16
    Q5_1       4+1   32     0       d f16, m f16 (value = d q + m)
    Q8_0       8     32     signed  d f16
    Q3_K       2+1   16     4       6-bit scale - 32                  d f16
    Q4_K       4     32     0       6-bit scale and min               d, dmin f16
    Q5_K       4+1   32     0       6-bit scale and min               d, dmin f16
    Q6_K       4+2   16     32      s8 scale                          d f16
    IQ4_NL     4     32     -       d f16 (value = d * CODEBOOK[q])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ai_engine.ports.model import BLOCK, DType

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

QUANTISED = (
    DType.Q4_0,
    DType.Q4_1,
    DType.Q5_0,
    DType.Q5_1,
    DType.Q8_0,
    DType.Q3_K,
    DType.Q4_K,
    DType.Q5_K,
    DType.Q6_K,
    DType.IQ4_NL,
)
"""Types whose matmul takes "act" inputs; F32, F16 and BF16 take f32."""

CODEBOOK: dict[DType, tuple[int, ...]] = {
    DType.IQ4_NL: (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
}
"""Where a code stands for an entry of a table (ggml's) and not for a number."""


def _half(blocks: U8, at: int) -> F32:
    """The f16 at byte ``at`` of each block, [rows, blocks, 1]."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(raw: U8) -> U8:
    """Byte j holds value j low and value j + n high: [..., n] -> [..., 2n]."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def _fifth_bits(raw: U8) -> U8:
    """Four bytes of a little-endian word, bit j for value j: [..., 4] -> [..., 32] of 0 or 16."""
    return np.asarray(np.unpackbits(raw, axis=-1, bitorder="little") << 4, dtype=np.uint8)


def k_scales(packed: U8) -> tuple[U8, U8]:
    """The eight 6-bit scales and eight 6-bit mins of a Q4_K or Q5_K super-block: [..., 12] -> two [..., 8]."""
    first, second, third = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scale = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=-1)
    low = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=-1)
    return scale, low


def q3_scales(packed: U8) -> npt.NDArray[np.int8]:
    """The sixteen signed scales of a Q3_K super-block: [..., 12] -> [..., 16] of -32..31."""
    low = np.concatenate([packed[..., :8] & 15, packed[..., :8] >> 4], axis=-1)
    high = np.concatenate([(packed[..., 8:] >> shift) & 3 for shift in (0, 2, 4, 6)], axis=-1)
    return np.asarray((low | (high << 4)).astype(np.int8) - 32, dtype=np.int8)


def _k_nibbles(raw: U8) -> U8:
    """128 bytes of a K super-block: groups 2g and 2g + 1 share bytes 32g.. -> [..., 8, 32]."""
    pairs = raw.reshape(*raw.shape[:-1], 4, 32)
    return np.stack([pairs & 15, pairs >> 4], axis=-2).reshape(*raw.shape[:-1], 8, 32)


def _k_values(blocks: U8, q: U8) -> F32:
    """d * scale * q - dmin * min for q [..., 8, 32]."""
    scale, low = k_scales(blocks[..., 4:16])
    step = _half(blocks, 0) * scale.astype(np.float32)
    floor = _half(blocks, 2) * low.astype(np.float32)
    return np.asarray(step[..., None] * q.astype(np.float32) - floor[..., None])


def codes(dtype: DType, raw: U8) -> npt.NDArray[np.uint8]:
    """The unsigned codes q of quantised rows, u8[rows, cols] (Q8_0: the signed byte as stored)."""
    elements, size = BLOCK[dtype]
    blocks = np.ascontiguousarray(raw).reshape(raw.shape[0], -1, size)
    match dtype:
        case DType.Q4_0 | DType.IQ4_NL:
            q = _nibbles(blocks[..., 2:])
        case DType.Q4_1:
            q = _nibbles(blocks[..., 4:])
        case DType.Q5_0:
            q = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
        case DType.Q5_1:
            q = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
        case DType.Q8_0:
            q = blocks[..., 2:]
        case DType.Q3_K:
            two = [(blocks[..., 32 + 32 * (g // 4) : 64 + 32 * (g // 4)] >> (2 * (g % 4))) & 3 for g in range(8)]
            third = [((blocks[..., :32] >> g) & 1) << 2 for g in range(8)]
            q = np.asarray(np.stack(two, axis=-2) | np.stack(third, axis=-2), np.uint8)
        case DType.Q4_K:
            q = _k_nibbles(blocks[..., 16:])
        case DType.Q5_K:
            fifth = np.stack([((blocks[..., 16:48] >> group) & 1) << 4 for group in range(8)], axis=-2)
            q = _k_nibbles(blocks[..., 48:]) | fifth
        case DType.Q6_K:
            low = blocks[..., :128].reshape(*blocks.shape[:2], 2, 2, 32)  # half, byte group, column
            high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 32)
            quarters = [
                ((low[..., quarter & 1, :] >> (4 * (quarter >> 1))) & 15) | (((high >> (2 * quarter)) & 3) << 4)
                for quarter in range(4)
            ]
            q = np.stack(quarters, axis=-2)
        case _:
            raise AssertionError(dtype)
    return np.ascontiguousarray(q.reshape(raw.shape[0], blocks.shape[1] * elements))


def dequantize(dtype: DType, raw: U8) -> F32:
    """The values of stored rows: ``raw`` u8[rows, row_bytes] -> f32[rows, cols], as ggml computes them in float32."""
    raw = np.ascontiguousarray(raw, dtype=np.uint8)
    assert raw.ndim == 2, raw.shape
    assert raw.shape[1] % BLOCK[dtype][1] == 0, (dtype, raw.shape)
    match dtype:
        case DType.F32:
            return raw.view("<f4").astype(np.float32)
        case DType.F16:
            return raw.view("<f2").astype(np.float32)
        case DType.BF16:
            return (raw.view("<u2").astype("<u4") << 16).view("<f4").astype(np.float32)
    blocks = raw.reshape(raw.shape[0], -1, BLOCK[dtype][1])
    q: npt.NDArray[Any] = codes(dtype, raw).reshape(*blocks.shape[:2], BLOCK[dtype][0])
    match dtype:
        case DType.Q4_0:
            values = (q.astype(np.float32) - 8) * _half(blocks, 0)
        case DType.Q5_0:
            values = (q.astype(np.float32) - 16) * _half(blocks, 0)
        case DType.Q4_1 | DType.Q5_1:
            values = q.astype(np.float32) * _half(blocks, 0) + _half(blocks, 2)
        case DType.Q8_0:
            values = q.view(np.int8).astype(np.float32) * _half(blocks, 0)
        case DType.IQ4_NL:
            values = np.array(CODEBOOK[dtype], np.float32)[q] * _half(blocks, 0)
        case DType.Q3_K:
            step = _half(blocks, 108) * q3_scales(blocks[..., 96:108]).astype(np.float32)
            values = step[..., None] * (q.reshape(*blocks.shape[:2], 16, 16).astype(np.float32) - 4)
        case DType.Q4_K | DType.Q5_K:
            values = _k_values(blocks, q.reshape(*blocks.shape[:2], 8, 32))
        case DType.Q6_K:
            step = _half(blocks, 208) * blocks[..., 192:208].view(np.int8).astype(np.float32)
            values = step[..., None] * (q.reshape(*blocks.shape[:2], 16, 16).astype(np.float32) - 32)
        case _:
            raise AssertionError(dtype)
    return np.ascontiguousarray(values.reshape(raw.shape[0], -1), dtype=np.float32)


# --- quantised activations -------------------------------------------------------------------------------------------

GROUP = 32
"""Columns that share one activation scale."""


@dataclass(frozen=True)
class ActLayout:
    """An "act" buffer of ``cols`` columns: one 64-byte record (a cache line) per row and group of 32 columns.

        byte  field
        0     q         s8[32]   round-half-even(x * (127 / amax)), amax of the others; 0 where amax < 1e-30
        32    scale     f32      amax / 127; 0 where amax < 1e-30
        36    dsum      f32      scale * float(sum of q) + outlier: multiplies a format's min
        40    offset    i32      -128 * sum of q: undoes u8 = s8 + 128 in a dot product
        44    sum16     i16[2]   sums of q over the two halves
        48    offset16  i32[2]   -32 * the same: Q6_K's offset
        56    outlier   f32      a column's exact value, which q has as 0; 0: none
        60    column    i32      its number in the group; -1: none

    One column can take most of a group's range, and the other 31 are left with few of the 255 steps. Such a column is
    kept as it is, and amax is that of the others. It is an outlier where it has more than OUTLIER_SHARE of the group's
    energy (a crest factor amax / rms above 4.47):

        amax * amax > OUTLIER_SHARE * sum(x * x)        the first column with amax; the sum in f32, halving: the first
                                                        16 columns plus the last 16, then 8 plus 8 ...

    Not so where a square overflows, with NaN or infinities. On SmolLM2 Q4_1 about 15 % of the groups have one before q,
    k and v, 5 % before o, gate and up, 14 % before down and 22 % before the head; mostly, tokens that stand together
    have it in the same column. Mean and p99 KL to the float64 forward, and how often the most likely ids agree, over
    960 positions (over all 5,141 at 0.625: 1.01e-3, 7.9e-3, 97.5 %):

        share    0.383 (crest 3.5)   0.5 (4)     0.625 (4.47)   0.78 (5)    without
        mean     0.8e-3              0.8e-3      1.05e-3        1.4e-3      4.2e-3
        p99      5.8e-3              5.2e-3      7.5e-3         8.4e-3      20e-3
        agree    98.3 %              98.3 %      97.9 %         97.2 %      96.2 %

    To quantise what is left of all 32 columns once more would give 0.96e-3 where this gives 1.3e-3 (simulated, share
    0.5, 300 positions), but multiplies all of them again.

    Records of four rows stand side by side, so that a tile of tokens reads one run of memory with constant offsets (a
    pointer per token would not fit the registers):

        record(row, group) starts at ((row // 4) * groups + group) * 256 + (row % 4) * 64
    """

    cols: int

    RECORD: ClassVar[int] = 64
    TILE: ClassVar[int] = 4
    Q: ClassVar[int] = 0
    SCALE: ClassVar[int] = 32
    DSUM: ClassVar[int] = 36
    OFFSET: ClassVar[int] = 40
    SUM16: ClassVar[int] = 44
    OFFSET16: ClassVar[int] = 48
    OUTLIER: ClassVar[int] = 56
    COLUMN: ClassVar[int] = 60

    OUTLIER_SHARE: ClassVar[float] = 0.625  # exact in f32

    def __post_init__(self) -> None:
        assert self.cols > 0, self.cols
        assert self.cols % GROUP == 0, self.cols

    @property
    def groups(self) -> int:
        return self.cols // GROUP

    def nbytes(self, rows: int) -> int:
        return -(-rows // self.TILE) * self.tile_bytes

    @property
    def tile_bytes(self) -> int:
        """Four rows."""
        return self.groups * self.TILE * self.RECORD

    @staticmethod
    def row_offset(row: Any, groups: Any) -> Any:
        """Byte offset of a row's first record; its next ones follow 256 bytes apart. Python or kernel integers."""
        return (row // 4) * (groups * 256) + (row % 4) * 64

    def quantize(self, x: F32) -> U8:
        """f32[T, cols] -> u8[nbytes(T)]: the reference for every kernel that writes an act buffer."""
        rows = x.shape[0]
        assert x.shape == (rows, self.cols), (x.shape, self.cols)
        groups = np.ascontiguousarray(x, dtype=np.float32).reshape(rows, self.groups, GROUP)
        outlier, column = self._outliers(groups)
        groups = np.where(np.arange(GROUP) == column[:, :, None], np.float32(0), groups)
        amax = np.abs(groups).max(axis=2)
        alive = amax >= np.float32(1e-30)
        inverse = np.divide(np.float32(127), amax, out=np.zeros_like(amax), where=alive)
        scale = np.where(alive, amax / np.float32(127), np.float32(0)).astype(np.float32)
        q = np.rint(groups * inverse[:, :, None]).astype(np.int8)
        sums = q.reshape(rows, self.groups, 2, 16).sum(axis=3, dtype=np.int32)
        total = sums.sum(axis=2, dtype=np.int32)
        records = np.zeros((self.nbytes(rows) // self.tile_bytes * self.TILE, self.groups), _RECORD)
        records["q"][:rows] = q
        records["scale"][:rows] = scale
        records["dsum"][:rows] = scale * total.astype(np.float32) + outlier
        records["offset"][:rows] = -128 * total
        records["sum16"][:rows] = sums
        records["offset16"][:rows] = -32 * sums
        records["outlier"][:rows] = outlier
        records["column"][:rows] = column
        tiles = records.reshape(-1, self.TILE, self.groups).transpose(0, 2, 1)
        return np.ascontiguousarray(tiles).reshape(-1).view(np.uint8)

    def _outliers(self, groups: F32) -> tuple[F32, npt.NDArray[np.int32]]:
        """(value, column) of each group's outlier, or (0, -1): f32[rows, groups, 32] -> [rows, groups]."""
        magnitude = np.abs(groups)
        amax, first = magnitude.max(axis=2), magnitude.argmax(axis=2)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            total = groups * groups
            while total.shape[2] > 1:
                half = total.shape[2] // 2
                total = total[:, :, :half] + total[:, :, half:]
            exists = amax * amax > total[:, :, 0] * np.float32(self.OUTLIER_SHARE)
        value = np.take_along_axis(groups, first[:, :, None], axis=2)[:, :, 0]
        return np.where(exists, value, np.float32(0)), np.where(exists, first, -1).astype(np.int32)

    def records(self, act: U8, rows: int) -> npt.NDArray[np.void]:
        """The records [rows, groups] of a buffer u8[nbytes(rows)], fields by name."""
        tiles = act[: self.nbytes(rows)].view(_RECORD).reshape(-1, self.groups, self.TILE)
        return tiles.transpose(0, 2, 1).reshape(-1, self.groups)[:rows]

    def dequantize(self, act: U8, rows: int) -> F32:
        """u8[nbytes(rows)] -> f32[rows, cols]: the values that the integer kernels multiply."""
        records = self.records(act, rows)
        values = records["q"].astype(np.float32) * records["scale"][:, :, None]
        exact = np.arange(GROUP) == records["column"][:, :, None]
        values = np.where(exact, records["outlier"][:, :, None], values)
        return np.asarray(values, dtype=np.float32).reshape(rows, self.cols)


_RECORD = np.dtype(
    {
        "names": ["q", "scale", "dsum", "offset", "sum16", "offset16", "outlier", "column"],
        "formats": [("i1", 32), "<f4", "<f4", "<i4", ("<i2", 2), ("<i4", 2), "<f4", "<i4"],
        "offsets": [
            ActLayout.Q,
            ActLayout.SCALE,
            ActLayout.DSUM,
            ActLayout.OFFSET,
            ActLayout.SUM16,
            ActLayout.OFFSET16,
            ActLayout.OUTLIER,
            ActLayout.COLUMN,
        ],
        "itemsize": ActLayout.RECORD,
    }
)
