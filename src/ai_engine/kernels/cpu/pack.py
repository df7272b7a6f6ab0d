"""The packed layout of weights: where each code, scale and min lies, and the repacking from the file's rows.

Owns `PackedLayout` and `pack_rows`. It does not own the formats' meaning (formats.py), nor the kernels that read the
layout (matmul.py, and its `emit_dequantize_row` for embeddings).

Rows are interleaved by ``lanes`` (8 floats of AVX2, 16 of AVX-512, 4 of NEON), so that a vector register holds the same
columns of ``lanes`` rows: lane = row, and no horizontal sum is ever needed. A *row block* of ``lanes`` rows is one
contiguous run of bytes: its scales first (the head), then its codes (the body), each from a multiple of 64 so that no
vector load of codes crosses a cache line. L = lanes, per 32 columns unless stated:

    type         head                                               body (dwords: 4 columns of a row in one lane)
    F32          -                                                  per column: L f32
    F16, BF16    -                                                  per column: L x 2 bytes
    Q4_0         L f16 d                                            4 x L nibble dwords
    Q4_1         L f16 d, L f16 m                                   4 x L nibble dwords
    Q5_0         L f16 d                                            L fifth-bit dwords, 4 x L nibble dwords
    Q5_1         L f16 d, L f16 m                                   L fifth-bit dwords, 4 x L nibble dwords
    Q8_0         L f16 d                                            8 x L dwords of s8
    Q3_K (256)   L f16 d, 8 x (L s8, L s8 scales of 16 columns)     8 x [2 x L two-bit dwords, L third-bit dwords]
    Q4_K (256)   L f16 d, L f16 dmin, 8 x (L u8 scale, L u8 min)    8 x [4 x L nibble dwords]
    Q5_K (256)   the same                                           8 x [L fifth-bit dwords, 4 x L nibble dwords]
    Q6_K (256)   L f16 d, 8 x (L s8, L s8 scales of 16 columns)     8 x [2 x L two-bit dwords, 4 x L nibble dwords]
    IQ4_NL       L f16 d                                            4 x L nibble dwords
    Q8_0 split   L f16 d                                            4 x L dwords of high nibbles; after those of all
                                                                    columns 4 x L dwords of low nibbles

Q8_0 split is for a screened head: nibbles of the byte + 128, so that half of the body gives a rough product.

Nibble dword i holds columns 4i..4i+3 low and 16+4i..16+4i+3 high, as ggml's 32-blocks do; K-quants are brought to
the same shape. Fifth (and third) bits: byte b of the dword has the bit of column 4g + b at position g. Two-bit dword h
has the two bits (Q6_K: 4,5) of column 16h + 4g + b in byte b at position 2g. So a kernel reaches any of them with one
shift and one mask. It is an interleave of the file's bits: the size stays, but for 6-bit scales, which become bytes
(Q3_K, Q4_K, Q5_K: 3.6, 2.8 and 2.3 % more), and for padding to whole row blocks and cache lines. Padding rows are zero,
and so are their products.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ai_engine.kernels.cpu import formats
from ai_engine.ports.kernels import WeightSpec
from ai_engine.ports.model import BLOCK, DType, row_bytes

U8 = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]

SUPER = 256
_K_QUANTS = (DType.Q3_K, DType.Q4_K, DType.Q5_K, DType.Q6_K)
_CHUNK_BYTES = 1 << 18
"""File bytes repacked at once: temporaries stay within L2 (Q6_K 0.6 GB/s, Q8_0 2.7; less at half or twice)."""


def _align64(size: int) -> int:
    return (size + 63) & ~63


@dataclass(frozen=True)
class PackedLayout:
    """Byte offsets of one packed weight. The head repeats per ``head_cols`` columns, the body per 32 (1 for floats)."""

    dtype: DType
    rows: int
    cols: int
    lanes: int
    split: bool = False

    @staticmethod
    def of(spec: WeightSpec, lanes: int) -> PackedLayout:
        assert not spec.screened or spec.dtype is DType.Q8_0, spec
        return PackedLayout(spec.dtype, spec.rows, spec.cols, lanes, spec.screened)

    def __post_init__(self) -> None:
        assert self.rows > 0, self
        assert self.cols > 0, self
        assert self.cols % BLOCK[self.dtype][0] == 0, self

    @property
    def is_float(self) -> bool:
        return self.dtype not in formats.QUANTISED

    @cached_property
    def head_unit(self) -> int:
        """Bytes of head per lane and ``head_cols`` columns."""
        match self.dtype:
            case DType.Q4_0 | DType.Q5_0 | DType.Q8_0 | DType.IQ4_NL:
                return 2
            case DType.Q4_1 | DType.Q5_1:
                return 4
            case DType.Q4_K | DType.Q5_K:
                return 20
            case DType.Q3_K | DType.Q6_K:
                return 18
        return 0

    @property
    def head_cols(self) -> int:
        return SUPER if self.dtype in _K_QUANTS else 32

    @cached_property
    def body_unit(self) -> int:
        """Bytes of body per lane and 32 columns (per column for floats)."""
        match self.dtype:
            case DType.F32:
                return 4
            case DType.F16 | DType.BF16:
                return 2
            case DType.Q4_0 | DType.Q4_1 | DType.Q4_K | DType.IQ4_NL:
                return 16
            case DType.Q5_0 | DType.Q5_1 | DType.Q5_K:
                return 20
            case DType.Q3_K:
                return 12
            case DType.Q6_K:
                return 24
            case DType.Q8_0:
                return 32

    @property
    def head_step(self) -> int:
        """From one head entry to the next."""
        return self.head_unit * self.lanes

    @property
    def body_step(self) -> int:
        """From one group of 32 columns (one column for floats) to the next."""
        return self.body_unit * self.lanes

    @property
    def plane_step(self) -> int:
        """From one group of 32 columns to the next in the first plane: half of a split body, else all of it."""
        return self.body_step // 2 if self.split else self.body_step

    @cached_property
    def body(self) -> int:
        """Offset of the body in its row block."""
        return _align64(self.cols // self.head_cols * self.head_step) if self.head_unit else 0

    @cached_property
    def block_bytes(self) -> int:
        """From one row block to the next."""
        units = self.cols if self.is_float else self.cols // formats.GROUP
        return _align64(self.body + units * self.body_step)

    @property
    def num_blocks(self) -> int:
        return -(-self.rows // self.lanes)

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.block_bytes


def packed_bytes(spec: WeightSpec, lanes: int) -> int:
    return PackedLayout.of(spec, lanes).nbytes


def row_block(spec: WeightSpec, lanes: int) -> int:
    """`pack_rows` takes whole multiples of this many rows, but for the last call."""
    return lanes


def pack_rows(spec: WeightSpec, lanes: int, first_row: int, raw: U8, out: U8) -> None:
    """Repack file rows ``raw`` u8[n, row_bytes] into their place in ``out`` u8[packed_bytes]; see ports.kernels."""
    layout = PackedLayout.of(spec, lanes)
    num_rows = raw.shape[0]
    assert raw.shape[1] == row_bytes(spec.dtype, spec.cols), (spec, raw.shape)
    assert first_row % lanes == 0, (spec, first_row)
    assert first_row + num_rows <= spec.rows, (spec, first_row, num_rows)
    assert num_rows % lanes == 0 or first_row + num_rows == spec.rows, (spec, first_row, num_rows)
    assert out.nbytes >= layout.nbytes, (spec, out.nbytes)
    blocks = out[: layout.nbytes].reshape(layout.num_blocks, layout.block_bytes)
    step = max(1, _CHUNK_BYTES // (raw.shape[1] * lanes)) * lanes
    for start in range(0, num_rows, step):
        part = raw[start : start + step]
        short = -part.shape[0] % lanes
        if short:
            part = np.concatenate([part, np.zeros((short, part.shape[1]), np.uint8)])
        at = (first_row + start) // lanes
        _pack_blocks(layout, part, blocks[at : at + part.shape[0] // lanes])


def _pack_blocks(layout: PackedLayout, raw: U8, out: U8) -> None:
    """Whole row blocks: raw u8[b * lanes, row_bytes] -> out u8[b, block_bytes]."""
    num, lanes, dtype = out.shape[0], layout.lanes, layout.dtype
    if layout.is_float:
        code = "<u4" if dtype is DType.F32 else "<u2"
        values = np.ascontiguousarray(raw).view(code).reshape(num, lanes, layout.cols)
        end = layout.cols * layout.body_step
        out[:, :end].view(code).reshape(num, layout.cols, lanes)[...] = values.transpose(0, 2, 1)
        out[:, end:] = 0
        return
    elements, size = BLOCK[dtype]
    blocks = raw.reshape(num, lanes, layout.cols // elements, size)
    head_end = layout.cols // layout.head_cols * layout.head_step
    body_end = layout.body + layout.cols // formats.GROUP * layout.body_step
    out[:, head_end : layout.body] = 0
    out[:, body_end:] = 0
    head = out[:, :head_end].reshape(num, -1, layout.head_step)
    body = out[:, layout.body : body_end].reshape(num, -1, layout.body_step)
    if dtype in _K_QUANTS:
        _pack_k(dtype, lanes, blocks, head, body)
        return
    if layout.split:
        _interleave(blocks[..., :2], "<u2", lanes, head)
        biased = blocks[..., 2:] ^ 0x80
        planes = body.reshape(num, 2, -1, layout.plane_step)
        for plane, nibbles in enumerate((biased >> 4, biased & 15)):
            _interleave(
                np.asarray(nibbles[..., :16] | nibbles[..., 16:] << 4, np.uint8), "<u4", lanes, planes[:, plane]
            )
        return
    scales = size - 32 if dtype is DType.Q8_0 else size - 16 - (4 if dtype in (DType.Q5_0, DType.Q5_1) else 0)
    _interleave(blocks[..., :scales], "<u2", lanes, head)
    if dtype in (DType.Q5_0, DType.Q5_1):
        fifth = _spread_fifth(np.ascontiguousarray(blocks[..., scales : scales + 4]).view("<u4"))
        _interleave(fifth.view(np.uint8), "<u4", lanes, body[..., : 4 * lanes])
        body, scales = body[..., 4 * lanes :], scales + 4
    _interleave(blocks[..., scales:], "<u4", lanes, body)


def _interleave(raw: U8, code: str, lanes: int, out: U8) -> None:
    """raw u8[b, lanes, groups, bytes] -> out u8[b, groups, bytes * lanes], element by element of ``code``."""
    values = np.ascontiguousarray(raw).view(code)
    num, _, groups, each = values.shape
    out.view(code).reshape(num, groups, each, lanes)[...] = values.transpose(0, 2, 3, 1)


def _spread_fifth(word: Array) -> Array:
    """u32[...] with bit j for column j -> bit 8b + g for column 4g + b: an 8 x 4 bit transpose by three swaps.

    The bit index j = g2 g1 g0 b1 b0 becomes b1 b0 g2 g1 g0: each step is a masked exchange of two bit positions of the
    index, which is a masked exchange of bits ``distance`` apart.
    """
    x = word.astype(np.uint32)

    def swap(x: Array, high: int, low: int) -> Array:
        """Exchange index bits ``high`` and ``low``."""
        mask = sum(1 << j for j in range(32) if (j >> low) & 1 and not (j >> high) & 1)
        distance = (1 << high) - (1 << low)
        moved = ((x >> np.uint32(distance)) ^ x) & np.uint32(mask)
        return np.asarray(x ^ moved ^ (moved << np.uint32(distance)))

    # positions (4..0): g2 g1 g0 b1 b0 -> b1 g1 g0 g2 b0 -> b1 b0 g0 g2 g1 -> b1 b0 g2 g0 g1 -> b1 b0 g2 g1 g0
    return swap(swap(swap(swap(x, 4, 1), 3, 0), 2, 1), 1, 0)


def _pack_k(dtype: DType, lanes: int, blocks: U8, head: U8, body: U8) -> None:
    """K-quants: blocks u8[b, lanes, supers, size] -> head u8[b, supers, 18 or 20 * lanes], body u8[b, groups, ...].

    Dwords are brought into lanes first; what is left is arithmetic on whole dwords along contiguous lanes.
    """
    num, _, supers, _ = blocks.shape
    groups = body.reshape(num, supers, 8, -1).view("<u4").reshape(num, supers, 8, -1, lanes)
    if dtype is DType.Q6_K:
        _interleave(blocks[..., 208:210], "<u2", lanes, head[..., : 2 * lanes])
        _interleave(blocks[..., 192:208], "u1", lanes, head[..., 2 * lanes :])
        # of half h, group 4h + 2n + a: nibble n of bytes 64h + 32a .., bits at 2 * (2n + a) of the high bytes 32h ..
        words = _dwords_in_lanes(blocks[..., :192])
        low = words[:, :, :32].reshape(num, supers, 2, 2, 2, 4, lanes)  # half, a, columns 16 x 4
        high = words[:, :, 32:].reshape(num, supers, 2, 2, 4, lanes)  # half, columns 16 x 4
        for half in range(2):
            for a in range(2):
                for n in range(2):
                    out = groups[:, :, 4 * half + 2 * n + a]
                    _join_nibbles(low[:, :, half, a], n, out[:, :, 2:])
                    _join_pairs(high[:, :, half], 2 * n + a, out[:, :, :2])
        return
    if dtype is DType.Q3_K:
        _interleave(blocks[..., 108:110], "<u2", lanes, head[..., : 2 * lanes])
        _interleave(formats.q3_scales(blocks[..., 96:108]).view(np.uint8), "u1", lanes, head[..., 2 * lanes :])
        words = _dwords_in_lanes(blocks[..., :96])
        groups[:, :, :, 2] = _transpose_bits(words[:, :, :8])  # as Q5_K's
        low = words[:, :, 8:].reshape(num, supers, 2, 2, 4, lanes)  # half, columns 16 x 4
        for s in range(8):
            _join_pairs(low[:, :, s // 4], s % 4, groups[:, :, s, :2])
        return
    _interleave(blocks[..., :4], "<u2", lanes, head[..., : 4 * lanes])
    scale, minimum = formats.k_scales(blocks[..., 4:16])
    both = np.stack([scale, minimum], axis=-1).reshape(num, lanes, supers, 16)
    _interleave(both, "u1", lanes, head[..., 4 * lanes :])
    words = _dwords_in_lanes(blocks[..., 16:])
    skip = 0
    if dtype is DType.Q5_K:
        skip = 1
        # dword g, byte b, bit s: the fifth bit of column 4g + b of group s -> dword s, byte b, bit g
        groups[:, :, :, 0] = _transpose_bits(words[:, :, :8])
        words = words[:, :, 8:]
    low = words.reshape(num, supers, 4, 2, 4, lanes)
    for g in range(4):
        for n in range(2):
            _join_nibbles(low[:, :, g], n, groups[:, :, 2 * g + n, skip:])


def _dwords_in_lanes(raw: U8) -> Array:
    """u8[b, lanes, supers, bytes] -> u32[b, supers, bytes / 4, lanes]."""
    return np.ascontiguousarray(np.ascontiguousarray(raw).view("<u4").transpose(0, 2, 3, 1))


def _join_nibbles(runs: Array, n: int, out: Array) -> None:
    """Nibble n of two runs [b, supers, 2, 4, lanes] of four dwords, as ggml's 32-blocks have them: run 0 low."""
    first, second = runs[:, :, 0], runs[:, :, 1]
    mask, other = np.uint32(0x0F0F0F0F), np.uint32(0xF0F0F0F0)
    if n == 0:
        np.bitwise_or(first & mask, (second << np.uint32(4)) & other, out=out)
    else:
        np.bitwise_or((first >> np.uint32(4)) & mask, second & other, out=out)


def _join_pairs(columns: Array, n: int, out: Array) -> None:
    """Bits 2n and 2n + 1 of [b, supers, 2, 4, lanes], columns 16 x 4: one dword of two-bit fields for each 16."""
    two = (columns >> np.uint32(2 * n)) & np.uint32(0x03030303)
    out[...] = two[:, :, :, 0]
    for g in range(1, 4):
        out |= two[:, :, :, g] << np.uint32(2 * g)


def _transpose_bits(words: Array) -> Array:
    """u32[b, supers, 8, lanes]: bit s of each byte of dword g -> bit g of that byte of dword s (Hacker's Delight 7-3,
    across dwords)."""
    x = words.copy()
    for distance, mask in ((4, 0x0F0F0F0F), (2, 0x33333333), (1, 0x55555555)):
        for g in range(8):
            if not g & distance:
                a, b = x[:, :, g], x[:, :, g + distance]
                moved = ((a >> np.uint32(distance)) ^ b) & np.uint32(mask)
                b ^= moved
                a ^= moved << np.uint32(distance)
    return x
