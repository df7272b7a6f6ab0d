"""GGUF files without the gguf package: ggml's block formats, a small reader and writer, and tiny models as GGUF.

Owns the NumPy quantisers and dequantisers of the tests (`quantize`, `dequantize`), `read_gguf`, `write_gguf`, the
conversion of a Hugging Face folder to GGUF tensors (`tensors_from_hf`, `metadata_from_hf`, `write_tiny`) and random
models of any shape (`write_random`). The quantisers round to the nearest and do not search; the dequantisers follow
ggml's reference code operation by operation in float32 (make_golden.py checks them against the gguf package bit by
bit). It imports nothing of the engine.

    write_tiny("llama3-rope", tmp_path / "m.gguf", "Q8_0")       # one of tiny/, tokenizer and chat template included
    write_random(tmp_path / "m.gguf", "Q4_K", architecture="qwen3", hidden=256, ffn=512)
    file = read_gguf(path); file.metadata["general.architecture"]; file.tensors["blk.0.attn_q.weight"][:]
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.golden.reference import Config

TINY = Path(__file__).parent / "tiny"
F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

ALIGNMENT = 32
_LOW = np.uint8(15)


# --- block formats --------------------------------------------------------------------------------


def _f16(x: F32) -> F32:
    """x as it reads back from a stored f16."""
    return x.astype(np.float16).astype(np.float32)


def _inverse(x: F32) -> F32:
    return np.divide(1.0, x, out=np.zeros_like(x), where=x != 0).astype(np.float32)


def _bytes(x: NDArray[Any]) -> U8:
    """The bytes of a [blocks, ...] array as [blocks, bytes]."""
    x = np.ascontiguousarray(x)
    return x.reshape(x.shape[0], -1).view(np.uint8)


def _half(raw: U8, at: int) -> F32:
    """The f16 that stands at byte `at` of each block, as [blocks, 1]."""
    return np.ascontiguousarray(raw[:, at : at + 2]).view(np.float16).astype(np.float32)


def _q_f32(x: F32) -> U8:
    return _bytes(x.astype("<f4"))


def _d_f32(raw: U8) -> F32:
    return raw.view("<f4").astype(np.float32)


def _q_f16(x: F32) -> U8:
    return _bytes(x.astype("<f2"))


def _d_f16(raw: U8) -> F32:
    return raw.view("<f2").astype(np.float32)


def _q_bf16(x: F32) -> U8:
    bits = np.ascontiguousarray(x, dtype="<f4").view("<u4").astype(np.uint64)
    return _bytes(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2"))


def _d_bf16(raw: U8) -> F32:
    return (raw.view("<u2").astype("<u4") << 16).view("<f4").astype(np.float32)


def _nibbles(q: U8) -> U8:
    """Packs [blocks, 32] values of 4 bits: byte j holds j in its low half and j + 16 in its high half."""
    return (q[:, :16] | (q[:, 16:] << 4)).astype(np.uint8)


def _unnibbles(raw: U8) -> U8:
    return np.concatenate([raw & 15, raw >> 4], axis=1)


def _signed_extreme(x: F32) -> F32:
    """The value of largest magnitude in each row, with its sign, as [blocks, 1]."""
    at = np.abs(x).argmax(axis=1)[:, None]
    return np.take_along_axis(x, at, axis=1)


def _q4_0(x: F32) -> U8:
    d: F32 = _signed_extreme(x) / np.float32(-8)
    q = np.clip(np.floor(x * _inverse(d) + 8.5), 0, 15).astype(np.uint8)
    return np.concatenate([_bytes(d.astype("<f2")), _nibbles(q)], axis=1)


def _d4_0(raw: U8) -> F32:
    return (_unnibbles(raw[:, 2:]).astype(np.float32) - 8) * _half(raw, 0)


def _q4_1(x: F32) -> U8:
    low = x.min(axis=1, keepdims=True)
    d = (x.max(axis=1, keepdims=True) - low) / 15
    q = np.clip(np.floor((x - low) * _inverse(d) + 0.5), 0, 15).astype(np.uint8)
    return np.concatenate([_bytes(d.astype("<f2")), _bytes(low.astype("<f2")), _nibbles(q)], axis=1)


def _d4_1(raw: U8) -> F32:
    return _unnibbles(raw[:, 4:]).astype(np.float32) * _half(raw, 0) + _half(raw, 2)


def _fifth_bits(q: U8) -> U8:
    """Bit 4 of each of [blocks, 32] values as a little-endian 32-bit word: bit j belongs to value j."""
    return np.packbits((q >> 4) & 1, axis=1, bitorder="little")


def _with_fifth_bits(low: U8, word: U8) -> U8:
    return (low | (np.unpackbits(word, axis=1, bitorder="little") << 4)).astype(np.uint8)


def _q5_0(x: F32) -> U8:
    d: F32 = _signed_extreme(x) / np.float32(-16)
    q = np.clip(np.floor(x * _inverse(d) + 16.5), 0, 31).astype(np.uint8)
    return np.concatenate([_bytes(d.astype("<f2")), _fifth_bits(q), _nibbles(q & _LOW)], axis=1)


def _d5_0(raw: U8) -> F32:
    return (_with_fifth_bits(_unnibbles(raw[:, 6:]), raw[:, 2:6]).astype(np.float32) - 16) * _half(raw, 0)


def _q5_1(x: F32) -> U8:
    low = x.min(axis=1, keepdims=True)
    d = (x.max(axis=1, keepdims=True) - low) / 31
    q = np.clip(np.floor((x - low) * _inverse(d) + 0.5), 0, 31).astype(np.uint8)
    return np.concatenate(
        [_bytes(d.astype("<f2")), _bytes(low.astype("<f2")), _fifth_bits(q), _nibbles(q & _LOW)], axis=1
    )


def _d5_1(raw: U8) -> F32:
    return _with_fifth_bits(_unnibbles(raw[:, 8:]), raw[:, 4:8]).astype(np.float32) * _half(raw, 0) + _half(raw, 2)


def _q8_0(x: F32) -> U8:
    d = np.abs(x).max(axis=1, keepdims=True) / 127
    q = np.clip(np.rint(x * _inverse(d)), -127, 127).astype(np.int8)
    return np.concatenate([_bytes(d.astype("<f2")), _bytes(q)], axis=1)


def _d8_0(raw: U8) -> F32:
    return raw[:, 2:].view(np.int8).astype(np.float32) * _half(raw, 0)


def _pack_scales(scale: U8, low: U8) -> U8:
    """Eight 6-bit scales and eight 6-bit minima in 12 bytes, as K-quants store them."""
    out = np.zeros((scale.shape[0], 12), np.uint8)
    out[:, 0:4] = scale[:, :4] | ((scale[:, 4:] >> 4) << 6)
    out[:, 4:8] = low[:, :4] | ((low[:, 4:] >> 4) << 6)
    out[:, 8:12] = (scale[:, 4:] & 15) | ((low[:, 4:] & 15) << 4)
    return out


def _unpack_scales(raw: U8) -> tuple[U8, U8]:
    first, second, third = raw[:, 0:4], raw[:, 4:8], raw[:, 8:12]
    scale = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    low = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    return scale, low


def _k_affine(x: F32, levels: int) -> tuple[F32, F32, U8, U8, U8]:
    """Super-blocks of 8 x 32 as d * scale * q - dmin * low: (d, dmin, scale, low, q)."""
    sub = x.reshape(-1, 8, 32)
    low = np.maximum(0, -sub.min(axis=2))
    step = (sub.max(axis=2) + low) / levels
    d, dmin = _f16(step.max(axis=1, keepdims=True) / 63), _f16(low.max(axis=1, keepdims=True) / 63)
    scales = np.clip(np.rint(step * _inverse(d)), 0, 63).astype(np.uint8)
    lows = np.clip(np.rint(low * _inverse(dmin)), 0, 63).astype(np.uint8)
    each, floor = (d * scales)[:, :, None], (dmin * lows)[:, :, None]
    q = np.clip(np.rint((sub + floor) * _inverse(each)), 0, levels).astype(np.uint8)
    return d, dmin, scales, lows, q


def _k_affine_values(raw: U8, q: U8) -> F32:
    """d * scale * q - dmin * low for q [blocks, 8, 32]."""
    scale, low = _unpack_scales(raw[:, 4:16])
    each = _half(raw, 0) * scale.astype(np.float32)
    floor = _half(raw, 2) * low.astype(np.float32)
    return (each[:, :, None] * q.astype(np.float32) - floor[:, :, None]).reshape(-1, 256)


def _k_nibbles(q: U8) -> U8:
    """[blocks, 8, 32] values of 4 bits: sub-blocks 2g and 2g+1 share the bytes 32g..32g+31."""
    return (q[:, 0::2] | (q[:, 1::2] << 4)).astype(np.uint8).reshape(-1, 128)


def _k_unnibbles(raw: U8) -> U8:
    pairs = raw.reshape(-1, 4, 32)
    return np.stack([pairs & 15, pairs >> 4], axis=2).reshape(-1, 8, 32)


def _q3_k(x: F32) -> U8:
    sub = x.reshape(-1, 16, 16)
    at = np.abs(sub).argmax(axis=2)[:, :, None]
    step: F32 = np.take_along_axis(sub, at, axis=2)[:, :, 0] / np.float32(-4)
    biggest: F32 = np.take_along_axis(step, np.abs(step).argmax(axis=1)[:, None], axis=1)
    d = _f16(biggest / np.float32(-32))
    scales = np.clip(np.rint(step * _inverse(d)), -32, 31).astype(np.int8)
    each = (d * scales)[:, :, None].astype(np.float32)
    q = (np.clip(np.rint(sub * _inverse(each)), -4, 3) + 4).astype(np.uint8).reshape(-1, 8, 32)
    mask, low = np.zeros((2, q.shape[0], 32), np.uint8), np.zeros((q.shape[0], 2, 32), np.uint8)
    for g in range(8):  # bit g of byte j is bit 2 of value j of that group; four groups share 32 bytes
        mask[0] |= (q[:, g] >> 2) << np.uint8(g)
        low[:, g // 4] |= (q[:, g] & 3) << np.uint8(2 * (g % 4))
    s = (scales + 32).astype(np.uint8)
    packed = np.zeros((q.shape[0], 12), np.uint8)
    packed[:, :8] = (s[:, :8] & 15) | ((s[:, 8:] & 15) << 4)
    for i in range(4):
        packed[:, 8:] |= (s[:, 4 * i : 4 * i + 4] >> 4) << np.uint8(2 * i)
    return np.concatenate([mask[0], low.reshape(-1, 64), packed, _bytes(d.astype("<f2"))], axis=1)


def _d3_k(raw: U8) -> F32:
    aux = [np.ascontiguousarray(raw[:, 96 + 4 * i : 100 + 4 * i]).view("<u4")[:, 0] for i in range(3)]
    nibbles, pairs = np.uint32(0x0F0F0F0F), np.uint32(0x03030303)
    words = [
        (aux[0] & nibbles) | ((aux[2] & pairs) << np.uint32(4)),
        (aux[1] & nibbles) | (((aux[2] >> np.uint32(2)) & pairs) << np.uint32(4)),
        ((aux[0] >> np.uint32(4)) & nibbles) | (((aux[2] >> np.uint32(4)) & pairs) << np.uint32(4)),
        ((aux[1] >> np.uint32(4)) & nibbles) | (((aux[2] >> np.uint32(6)) & pairs) << np.uint32(4)),
    ]
    scales = np.stack(words, axis=1).view(np.int8) - np.int8(32)
    out = np.empty((raw.shape[0], 8, 32), np.float32)
    for g in range(8):
        low = (raw[:, 32 + 32 * (g // 4) : 64 + 32 * (g // 4)] >> np.uint8(2 * (g % 4))) & 3
        q = low.astype(np.int8) - np.where(raw[:, :32] & np.uint8(1 << g), np.int8(0), np.int8(4))
        each = _half(raw, 108) * scales[:, 2 * g : 2 * g + 2].astype(np.float32)
        out[:, g] = np.repeat(each, 16, axis=1) * q.astype(np.float32)
    return out.reshape(-1, 256)


def _q4_k(x: F32) -> U8:
    d, dmin, scales, lows, q = _k_affine(x, 15)
    return np.concatenate(
        [_bytes(d.astype("<f2")), _bytes(dmin.astype("<f2")), _pack_scales(scales, lows), _k_nibbles(q)], axis=1
    )


def _d4_k(raw: U8) -> F32:
    return _k_affine_values(raw, _k_unnibbles(raw[:, 16:]))


def _q5_k(x: F32) -> U8:
    d, dmin, scales, lows, q = _k_affine(x, 31)
    high = np.zeros((q.shape[0], 32), np.uint8)
    for sub in range(8):  # bit `sub` of byte j is bit 4 of value j of that sub-block
        high |= (q[:, sub] >> 4) << sub
    return np.concatenate(
        [_bytes(d.astype("<f2")), _bytes(dmin.astype("<f2")), _pack_scales(scales, lows), high, _k_nibbles(q & _LOW)],
        axis=1,
    )


def _d5_k(raw: U8) -> F32:
    q = _k_unnibbles(raw[:, 48:])
    high: U8 = np.stack([(raw[:, 16:48] >> sub) & 1 for sub in range(8)], axis=1).astype(np.uint8)
    return _k_affine_values(raw, q | (high << np.uint8(4)))


def _q6_k(x: F32) -> U8:
    sub = x.reshape(-1, 16, 16)
    at = np.abs(sub).argmax(axis=2)[:, :, None]
    step: F32 = np.take_along_axis(sub, at, axis=2)[:, :, 0] / np.float32(-32)
    biggest: F32 = np.take_along_axis(step, np.abs(step).argmax(axis=1)[:, None], axis=1)
    d = _f16(biggest / np.float32(-128))
    scales = np.clip(np.rint(step * _inverse(d)), -128, 127).astype(np.int8)
    each = (d * scales)[:, :, None].astype(np.float32)
    q = (np.clip(np.rint(sub * _inverse(each)), -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = np.concatenate([q[:, :, 0] & 15 | (q[:, :, 2] & 15) << 4, q[:, :, 1] & 15 | (q[:, :, 3] & 15) << 4], axis=2)
    high = (q[:, :, 0] >> 4) | ((q[:, :, 1] >> 4) << 2) | ((q[:, :, 2] >> 4) << 4) | ((q[:, :, 3] >> 4) << 6)
    return np.concatenate([_bytes(low), _bytes(high), _bytes(scales), _bytes(d.astype("<f2"))], axis=1)


def _d6_k(raw: U8) -> F32:
    low, high = raw[:, :128].reshape(-1, 2, 64), raw[:, 128:192].reshape(-1, 2, 32)
    quarters = [
        (low[:, :, :32] & 15) | ((high & 3) << 4),
        (low[:, :, 32:] & 15) | (((high >> 2) & 3) << 4),
        (low[:, :, :32] >> 4) | (((high >> 4) & 3) << 4),
        (low[:, :, 32:] >> 4) | ((high >> 6) << 4),
    ]
    q = np.stack(quarters, axis=2).reshape(-1, 16, 16).astype(np.float32) - 32
    each = _half(raw, 208) * raw[:, 192:208].view(np.int8).astype(np.float32)
    return (each[:, :, None] * q).reshape(-1, 256)


_IQ4_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def _qi4_nl(x: F32) -> U8:
    d: F32 = _signed_extreme(x) / _IQ4_NL[0]
    q = np.abs((x * _inverse(d))[:, :, None] - _IQ4_NL).argmin(axis=2).astype(np.uint8)
    return np.concatenate([_bytes(d.astype("<f2")), _nibbles(q)], axis=1)


def _di4_nl(raw: U8) -> F32:
    return _IQ4_NL[_unnibbles(raw[:, 2:])] * _half(raw, 0)


@dataclass(frozen=True)
class BlockType:
    """One ggml type: its number in files, the values and bytes of a block, both directions over [blocks, values]."""

    number: int
    block: int
    block_bytes: int
    quantize: Callable[[F32], U8]
    dequantize: Callable[[U8], F32]


TYPES: dict[str, BlockType] = {
    "F32": BlockType(0, 1, 4, _q_f32, _d_f32),
    "F16": BlockType(1, 1, 2, _q_f16, _d_f16),
    "Q4_0": BlockType(2, 32, 18, _q4_0, _d4_0),
    "Q4_1": BlockType(3, 32, 20, _q4_1, _d4_1),
    "Q5_0": BlockType(6, 32, 22, _q5_0, _d5_0),
    "Q5_1": BlockType(7, 32, 24, _q5_1, _d5_1),
    "Q8_0": BlockType(8, 32, 34, _q8_0, _d8_0),
    "Q3_K": BlockType(11, 256, 110, _q3_k, _d3_k),
    "Q4_K": BlockType(12, 256, 144, _q4_k, _d4_k),
    "Q5_K": BlockType(13, 256, 176, _q5_k, _d5_k),
    "Q6_K": BlockType(14, 256, 210, _q6_k, _d6_k),
    "IQ4_NL": BlockType(20, 32, 18, _qi4_nl, _di4_nl),
    "BF16": BlockType(30, 1, 2, _q_bf16, _d_bf16),
}
_BY_NUMBER = {t.number: name for name, t in TYPES.items()}


def quantize(x: NDArray[Any], type_name: str) -> U8:
    """Bytes [rows, row_bytes] of x [rows, columns]; columns must be a multiple of the type's block."""
    kind = TYPES[type_name]
    x = np.atleast_2d(np.asarray(x, dtype=np.float32))
    if x.shape[1] % kind.block:
        raise ValueError(f"{x.shape[1]} columns are not a multiple of {type_name}'s {kind.block}")
    raw = kind.quantize(np.ascontiguousarray(x).reshape(-1, kind.block))
    return raw.reshape(x.shape[0], -1)


def dequantize(raw: NDArray[Any], type_name: str) -> F32:
    """float32 [rows, columns] of bytes [rows, row_bytes], with ggml's operations in ggml's order."""
    kind = TYPES[type_name]
    raw = np.ascontiguousarray(np.atleast_2d(raw), dtype=np.uint8)
    return kind.dequantize(raw.reshape(-1, kind.block_bytes)).reshape(raw.shape[0], -1)


# --- files ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tensor:
    """A tensor of a mapped file; indexing rows gives float32, and only those rows are dequantised."""

    type_name: str
    shape: tuple[int, ...]  # rows first, as in NumPy
    raw: U8  # [rows, row_bytes]

    def __getitem__(self, key: int | slice) -> F32:
        out = dequantize(self.raw[key], self.type_name)
        return out[0] if isinstance(key, int) or len(self.shape) == 1 else out


@dataclass(frozen=True)
class GGUFFile:
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class _Cursor:
    def __init__(self, data: bytes | mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def take(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        size = self.take("Q")
        self.at += size
        return bytes(self.data[self.at - size : self.at]).decode("utf-8", errors="surrogateescape")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.take("I"), self.take("Q")
            if item in (_STRING, _ARRAY):
                return [self.value(item) for _ in range(count)]
            values = struct.unpack_from(f"<{count}{_SCALARS[item]}", self.data, self.at)
            self.at += struct.calcsize(f"<{count}{_SCALARS[item]}")
            return list(values)
        return self.take(_SCALARS[kind])


def read_gguf(path: Path | str) -> GGUFFile:
    """Maps a GGUF file; nothing is dequantised until it is indexed."""
    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(data)
    magic, version = cursor.take("4s"), cursor.take("I")
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(f"not a GGUF v2/v3 file: {magic!r} {version}")
    num_tensors, num_pairs = cursor.take("Q"), cursor.take("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.take("I"))
    infos = []
    for _ in range(num_tensors):
        name = cursor.string()
        shape = tuple(cursor.take("Q") for _ in range(cursor.take("I")))[::-1]
        infos.append((name, shape, _BY_NUMBER[cursor.take("I")], cursor.take("Q")))
    alignment = int(metadata.get("general.alignment", ALIGNMENT))
    start = -(-cursor.at // alignment) * alignment
    everything = np.frombuffer(data, dtype=np.uint8)
    tensors = {}
    for name, shape, type_name, offset in infos:
        kind = TYPES[type_name]
        rows = math.prod(shape[:-1])
        row_bytes = shape[-1] // kind.block * kind.block_bytes
        raw = everything[start + offset : start + offset + rows * row_bytes].reshape(rows, row_bytes)
        tensors[name] = Tensor(type_name, shape, raw)
    return GGUFFile(metadata, tensors)


def _pack_string(text: str) -> bytes:
    raw = text.encode("utf-8", errors="surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def _pack_value(value: Any) -> bytes:
    """A value with its type's number in front: bool, int (u32, else i64), float (f32), str, or a list of one kind."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value) if 0 <= value < 2**32 else struct.pack("<Iq", 11, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _pack_string(value)
    if isinstance(value, list):
        if value and isinstance(value[0], str):
            return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_pack_string, value))
        if value and isinstance(value[0], float):
            return struct.pack("<IIQ", _ARRAY, 6, len(value)) + struct.pack(f"<{len(value)}f", *value)
        return struct.pack("<IIQ", _ARRAY, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)
    raise TypeError(type(value))


def write_gguf(path: Path | str, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str, NDArray[Any]]]) -> None:
    """Writes a GGUF v3 file of (type name, float array with rows first) tensors, quantising them on the way."""
    head = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
    for key, value in metadata.items():
        head += _pack_string(key) + _pack_value(value)
    body = bytearray()
    for name, (type_name, array) in tensors.items():
        head += _pack_string(name) + struct.pack("<I", array.ndim)
        head += struct.pack(f"<{array.ndim}Q", *array.shape[::-1])
        head += struct.pack("<IQ", TYPES[type_name].number, len(body))
        body += quantize(array.reshape(-1, array.shape[-1]), type_name).tobytes()
        body += bytes(-len(body) % ALIGNMENT)
    head += bytes(-len(head) % ALIGNMENT)
    Path(path).write_bytes(bytes(head + body))


# --- models ---------------------------------------------------------------------------------------


def read_safetensors(folder: Path) -> dict[str, F32]:
    """Every tensor of a folder's safetensors files as float32."""
    out: dict[str, F32] = {}
    for file in sorted(folder.glob("*.safetensors")):
        data = file.read_bytes()
        (size,) = struct.unpack_from("<Q", data)
        header: dict[str, Any] = json.loads(data[8 : 8 + size])
        for name, info in header.items():
            if name == "__metadata__":
                continue
            begin, end = (8 + size + at for at in info["data_offsets"])
            raw = np.frombuffer(data[begin:end], dtype=np.uint8)
            values = {"F32": _d_f32, "F16": _d_f16, "BF16": _d_bf16}[info["dtype"]](raw)
            out[name] = values.reshape(info["shape"])
    return out


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config


def _head_dim(hf: Mapping[str, Any]) -> int:
    return int(hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"])


def _rope(hf: Mapping[str, Any]) -> tuple[float, float, Mapping[str, Any] | None]:
    """(base, base of local layers, llama3 or linear scaling or None) from either style of config.json."""
    parameters = hf.get("rope_parameters")
    if parameters and "full_attention" in parameters:
        full, local = parameters["full_attention"], parameters["sliding_attention"]
        return float(full["rope_theta"]), float(local["rope_theta"]), full if full["rope_type"] != "default" else None
    scaling = parameters or hf.get("rope_scaling") or {"rope_type": "default"}
    base = float(hf.get("rope_theta", scaling.get("rope_theta", 10000.0)))
    return base, float(hf.get("rope_local_base_freq", 10000.0)), scaling if scaling["rope_type"] != "default" else None


def _local_layers(hf: Mapping[str, Any]) -> tuple[bool, ...]:
    if hf["model_type"] != "gemma3_text":
        return ()
    if "layer_types" in hf:
        return tuple(kind == "sliding_attention" for kind in hf["layer_types"])
    pattern = int(hf["sliding_window_pattern"])
    return tuple((layer + 1) % pattern != 0 for layer in range(hf["num_hidden_layers"]))


def llama3_divisors(scaling: Mapping[str, Any], base: float, head_dim: int) -> F32:
    """What each rope frequency is divided by under Llama 3's scaling: GGUF's rope_freqs.weight.

    Wavelengths shorter than original/high_freq_factor stay, longer than original/low_freq_factor are divided by
    factor, and between them 1/divisor goes linearly with original/wavelength.
    """
    factor, low, high = (float(scaling[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(scaling["original_max_position_embeddings"])
    wavelength = 2 * np.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def config_from_hf(hf: Mapping[str, Any]) -> Config:
    """The reference's `Config` for tensors that went through `tensors_from_hf`."""
    base, local_base, scaling = _rope(hf)
    kind = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}
    arch = kind[hf["model_type"]]
    window = hf.get("sliding_window")
    if arch.startswith("qwen") and not hf.get("use_sliding_window", False):
        window = None
    return Config(
        architecture=arch,
        num_layers=int(hf["num_hidden_layers"]),
        hidden=int(hf["hidden_size"]),
        num_heads=int(hf["num_attention_heads"]),
        num_kv_heads=int(hf["num_key_value_heads"]),
        head_dim=_head_dim(hf),
        norm_eps=float(hf["rms_norm_eps"]),
        rope_base=base,
        rope_base_local=local_base,
        rope_interleaved=arch == "llama",
        rope_linear_factor=float(scaling["factor"]) if scaling and scaling["rope_type"] == "linear" else 1.0,
        window=int(window) if window else None,
        local_layers=_local_layers(hf),
    )


_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_NAMES = {
    **_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def interleave_rope_rows(weight: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """Rows of each head from halves (i, i + d/2) to neighbours (2i, 2i+1): llama's q and k in GGUF."""
    shape = weight.shape
    per_head = weight.reshape(num_heads, 2, shape[0] // num_heads // 2, *shape[1:])
    return np.ascontiguousarray(per_head.swapaxes(1, 2)).reshape(shape)


def tensors_from_hf(hf: Mapping[str, Any], state: Mapping[str, F32]) -> dict[str, F32]:
    """GGUF's names and conventions for a Hugging Face state dict (float32 arrays)."""
    gemma = hf["model_type"] == "gemma3_text"
    names = _GEMMA_NAMES if gemma else _NAMES
    heads = {"attn_q": int(hf["num_attention_heads"]), "attn_k": int(hf["num_key_value_heads"])}
    out: dict[str, F32] = {}
    for name, value in state.items():
        if name == "model.embed_tokens.weight":
            out["token_embd.weight"] = value
        elif name == "lm_head.weight":
            out["output.weight"] = value
        elif name == "model.norm.weight":
            out["output_norm.weight"] = value + np.float32(1) if gemma else value
        else:
            layer, _, rest = name.removeprefix("model.layers.").partition(".")
            stem, _, leaf = rest.rpartition(".")
            short = names[stem]
            if gemma and short.endswith("norm"):
                value = value + np.float32(1)
                if short == "attn_q_norm":  # GGUF has no key for the query scale: it goes into the norm before it
                    value = value * np.float32(math.sqrt(_head_dim(hf) / hf["query_pre_attn_scalar"]))
            if hf["model_type"] in ("llama", "mistral") and short in heads:
                value = interleave_rope_rows(value, heads[short])
            out[f"blk.{layer}.{short}.{leaf}"] = value.astype(np.float32)
    base, _, scaling = _rope(hf)
    if scaling and scaling["rope_type"] == "llama3":
        out["rope_freqs.weight"] = llama3_divisors(scaling, base, _head_dim(hf))
    return out


def metadata_from_hf(hf: Mapping[str, Any], name: str = "tiny") -> dict[str, Any]:
    """GGUF's key-value pairs about the architecture."""
    c = config_from_hf(hf)
    a = c.architecture
    out: dict[str, Any] = {
        "general.architecture": a,
        "general.name": name,
        "general.alignment": ALIGNMENT,
        f"{a}.block_count": c.num_layers,
        f"{a}.context_length": int(hf["max_position_embeddings"]),
        f"{a}.embedding_length": c.hidden,
        f"{a}.feed_forward_length": int(hf["intermediate_size"]),
        f"{a}.attention.head_count": c.num_heads,
        f"{a}.attention.head_count_kv": c.num_kv_heads,
        f"{a}.attention.key_length": c.head_dim,
        f"{a}.attention.value_length": c.head_dim,
        f"{a}.attention.layer_norm_rms_epsilon": c.norm_eps,
        f"{a}.rope.freq_base": c.rope_base,
        f"{a}.rope.dimension_count": c.head_dim,
        f"{a}.vocab_size": int(hf["vocab_size"]),
    }
    if c.window:
        out[f"{a}.attention.sliding_window"] = c.window
    return out


_PRE = {"llama": "smollm", "mistral": "smollm", "qwen2": "qwen2", "qwen3": "qwen2", "gemma3_text": "gpt-2"}
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5


def tokenizer_metadata(folder: Path, hf: Mapping[str, Any]) -> dict[str, Any]:
    """GGUF's tokenizer.* pairs of a byte-level BPE tokenizer.json; ids beyond the tokenizer become unused tokens."""
    tokenizer: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    settings: dict[str, Any] = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    ids: dict[str, int] = dict(tokenizer["model"]["vocab"])
    special = {t["content"]: int(t["id"]) for t in tokenizer["added_tokens"]}
    ids.update(special)
    tokens = [f"[PAD{i}]" for i in range(hf["vocab_size"])]
    types = [_UNUSED] * hf["vocab_size"]
    for token, at in ids.items():
        tokens[at] = token
        types[at] = _CONTROL if token in special else _NORMAL
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    add_bos = bool(settings.get("add_bos_token", False))
    out: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe" if "<|begin_of_text|>" in special else _PRE[hf["model_type"]],
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": special[settings["eos_token"]],
        "tokenizer.ggml.padding_token_id": special[settings["pad_token"]],
        "tokenizer.ggml.add_bos_token": add_bos,
        "tokenizer.chat_template": settings["chat_template"],
    }
    if settings.get("bos_token"):
        out["tokenizer.ggml.bos_token_id"] = special[settings["bos_token"]]
    return out


TypeRule = str | Callable[[str, tuple[int, ...]], str]


def with_types(tensors: Mapping[str, NDArray[Any]], types: TypeRule) -> dict[str, tuple[str, NDArray[Any]]]:
    """Pairs each tensor with its type: one name for all matrices, or a function of name and shape. Vectors stay F32."""
    out: dict[str, tuple[str, NDArray[Any]]] = {}
    for name, array in tensors.items():
        chosen = types if isinstance(types, str) else types(name, array.shape)
        out[name] = (chosen if array.ndim > 1 else "F32", array)
    return out


def write_tiny(name: str, path: Path | str, types: TypeRule = "F32") -> None:
    """Writes tiny/<name> as a GGUF file with its tokenizer and chat template.

    K-quants need columns that are multiples of 256, which tiny models lack: use `write_random` for them. GGUF has no
    key for Gemma's layer_types, so gemma3-layer-types (which is not 5 + 1) is refused.
    """
    folder = TINY / name
    hf = read_config(folder)
    if hf["model_type"] == "gemma3_text" and any(
        local != (layer % 6 != 5) for layer, local in enumerate(_local_layers(hf))
    ):
        raise ValueError(f"{name}: GGUF's gemma3 always has five local layers and a global one")
    metadata = {**metadata_from_hf(hf, name), **tokenizer_metadata(folder, hf)}
    write_gguf(path, metadata, with_types(tensors_from_hf(hf, read_safetensors(folder)), types))


def random_hf(architecture: str, seed: int = 0, **sizes: Any) -> tuple[dict[str, Any], dict[str, F32]]:
    """A config.json and a state dict with seeded weights; `sizes` overrides any key of config.json.

    `architecture` is a model_type: llama, mistral, qwen2, qwen3 or gemma3_text. Short names hidden, ffn, layers,
    heads, kv_heads and vocab are understood too.
    """
    short = {
        "hidden": "hidden_size",
        "ffn": "intermediate_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "vocab": "vocab_size",
    }
    hf: dict[str, Any] = {
        "model_type": architecture,
        "vocab_size": 301,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "bos_token_id": 0,
    }
    gemma = architecture == "gemma3_text"
    if gemma:
        hf |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window": 24, "sliding_window_pattern": 6}
        hf |= {"num_hidden_layers": 7, "query_pre_attn_scalar": sizes.get("head_dim", 64)}
    hf |= {short.get(key, key): value for key, value in sizes.items()}
    rng = np.random.default_rng(seed)
    d, f, hd = hf["hidden_size"], hf["intermediate_size"], hf["head_dim"]
    q, kv = hf["num_attention_heads"] * hd, hf["num_key_value_heads"] * hd

    def matrix(rows: int, columns: int, gain: float = 1.0) -> F32:
        return (rng.standard_normal((rows, columns)) * (gain / math.sqrt(columns))).astype(np.float32)

    def norm(size: int) -> F32:
        return (rng.standard_normal(size) * 0.15 + (0.1 if gemma else 1.0)).astype(np.float32)

    state: dict[str, F32] = {
        "model.embed_tokens.weight": matrix(hf["vocab_size"], d, 1.0 if gemma else math.sqrt(d)),
        "model.norm.weight": norm(d) if gemma else norm(d) / np.float32(math.sqrt(d)),
    }
    if not hf["tie_word_embeddings"]:
        state["lm_head.weight"] = matrix(hf["vocab_size"], d, math.sqrt(d))
    for layer in range(hf["num_hidden_layers"]):
        block = f"model.layers.{layer}"
        for name, rows, columns, gain in (
            ("self_attn.q_proj", q, d, 1.0),
            ("self_attn.k_proj", kv, d, 1.0),
            ("self_attn.v_proj", kv, d, 1.0),
            ("self_attn.o_proj", d, q, 0.3),
            ("mlp.gate_proj", f, d, 1.0),
            ("mlp.up_proj", f, d, 1.0),
            ("mlp.down_proj", d, f, 1.0),
        ):
            state[f"{block}.{name}.weight"] = matrix(rows, columns, gain)
            if architecture == "qwen2" and name[10] in "qkv":
                state[f"{block}.{name}.bias"] = (rng.standard_normal(rows) * 0.5).astype(np.float32)
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if gemma else []
        for name in norms:
            state[f"{block}.{name}.weight"] = norm(d)
        if gemma:  # as in make_tiny.py: what attention adds
            state[f"{block}.post_attention_layernorm.weight"] = norm(d) * np.float32(0.1) - np.float32(0.9)
        if gemma or architecture == "qwen3":
            state[f"{block}.self_attn.q_norm.weight"] = norm(hd)
            state[f"{block}.self_attn.k_norm.weight"] = norm(hd)
    return hf, state


def write_random(
    path: Path | str, types: TypeRule = "F32", architecture: str = "llama", seed: int = 0, **sizes: Any
) -> None:
    """Writes a random model as GGUF, with the tokenizer of a tiny model whose 301 ids must fit in its vocabulary."""
    hf, state = random_hf(architecture, seed, **sizes)
    folder = TINY / {"qwen2": "qwen3-untied", "qwen3": "qwen3-untied", "gemma3_text": "gemma3-bf16"}.get(
        architecture, "llama-untied-bf16-sharded"
    )
    metadata = {**metadata_from_hf(hf, "random"), **tokenizer_metadata(folder, hf)}
    write_gguf(path, metadata, with_types(tensors_from_hf(hf, state), types))
