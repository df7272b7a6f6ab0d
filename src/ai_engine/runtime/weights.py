"""Loading: the file's tensors, repacked by the kernels into one arena, row block by row block.

Owns the order of rows (rope halves, gate and up alternating), the conversion of vectors to F32 and where each weight
lies in the arena. Does not own the packed layout (the kernels' `pack_rows`). The file's pages are dropped after
every block, so that resident memory stays near one copy of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from ai_engine.ports.errors import ModelFileError
from ai_engine.ports.kernels import F32, U8, Kernels, WeightSpec
from ai_engine.ports.model import BLOCK, SCALE_OFFSETS, DType, ModelFile
from ai_engine.runtime.ir import Weight

ALIGN_BYTES: Final = 256
CHUNK_BYTES: Final = 2 << 20
"""About how much of a tensor is read at once."""


def vector_f32(file: ModelFile, name: str) -> F32:
    """A vector tensor (F32, F16 or BF16) as float32."""
    raw = np.ascontiguousarray(file.read(name)).reshape(-1)
    dtype = file.tensors[name].dtype
    if dtype is DType.BF16:
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    assert dtype in (DType.F32, DType.F16), (name, dtype)
    return raw.view("<f4" if dtype is DType.F32 else "<f2").astype(np.float32)


def check_scales(name: str, dtype: DType, raw: U8) -> None:
    """Raises ModelFileError if a quantised block's scale is NaN or infinite: integers hide it from every later check,
    and the model would answer with plausible nonsense. ``raw`` is u8[rows, row_bytes]."""
    for offset in SCALE_OFFSETS.get(dtype, ()):
        blocks = raw.reshape(len(raw), -1, BLOCK[dtype][1])
        words = blocks[:, :, offset + 1] & 0x7C  # the exponent's five bits of a float16
        if (words == 0x7C).any():
            raise ModelFileError(f"tensor {name!r} has a block whose scale is no finite number; fetch the model again")


def row_order(weight: Weight) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(part, row of that part) of every packed row, or of every element of a vector."""
    rows = []
    for part in weight.parts:
        order = np.arange(part.rows)
        if part.rope_head_dim:  # pairs (0,1),(2,3).. of each head -> all firsts, then all seconds
            order = order.reshape(-1, part.rope_head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
        rows.append(order)
    which = [np.full(len(order), index) for index, order in enumerate(rows)]
    if weight.interleave:
        assert len({part.rows for part in weight.parts}) == 1, weight
        runs = [
            np.stack([a.reshape(-1, weight.interleave) for a in side], axis=1).reshape(-1) for side in (which, rows)
        ]
        return runs[0], runs[1]
    return np.concatenate(which), np.concatenate(rows)


def arena_offsets(
    weights: Mapping[str, Weight], packed_bytes: Callable[[WeightSpec], int]
) -> tuple[dict[str, int], int]:
    """Where each weight starts in the arena, and the arena's size."""
    offsets, at = {}, 0
    for weight in weights.values():
        offsets[weight.name] = at
        at += -(-packed_bytes(weight.spec) // ALIGN_BYTES) * ALIGN_BYTES
    return offsets, at


def load_weights(
    weights: Mapping[str, Weight],
    file: ModelFile,
    kernels: Kernels,
    arena: U8,
    progress: Callable[[float], None] = lambda _: None,
) -> dict[str, tuple[WeightSpec, U8]]:
    """Fill the arena; returns what `Resources.weights` wants. ``progress`` gets the fraction done, 1 once."""
    offsets, total = arena_offsets(weights, kernels.packed_bytes)
    assert arena.nbytes >= total, (arena.nbytes, total)
    loaded: dict[str, tuple[WeightSpec, U8]] = {}
    for weight in weights.values():
        start = offsets[weight.name]
        out = arena[start : start + kernels.packed_bytes(weight.spec)]
        if weight.rows == 1:
            _load_vector(weight, file, kernels, out)
        else:
            _load_matrix(weight, file, kernels, out, partial(_report, progress, start, total))
        loaded[weight.name] = (weight.spec, out)
    progress(1.0)
    return loaded


def _report(progress: Callable[[float], None], start: int, total: int, done: int) -> None:
    progress((start + done) / total)


def _load_vector(weight: Weight, file: ModelFile, kernels: Kernels, out: U8) -> None:
    parts = [vector_f32(file, part.tensor) for part in weight.parts]
    for part, values in zip(weight.parts, parts, strict=True):
        if not np.isfinite(values).all():
            raise ModelFileError(f"tensor {part.tensor!r} has a value that is no finite number; fetch the model again")
    for part in weight.parts:
        file.drop(part.tensor)
    which, rows = row_order(weight)
    starts = np.cumsum([0, *(len(part) for part in parts)])
    values = np.concatenate(parts)[starts[which] + rows] + np.float32(weight.offset)
    kernels.pack_rows(weight.spec, 0, values.astype("<f4")[None, :].view(np.uint8), out)


def _load_matrix(weight: Weight, file: ModelFile, kernels: Kernels, out: U8, progress: Callable[[int], None]) -> None:
    which, rows = row_order(weight)
    block = kernels.row_block(weight.spec)
    row_nbytes = sum(file.tensors[part.tensor].nbytes for part in weight.parts) // weight.rows
    step = block * max(1, CHUNK_BYTES // (row_nbytes * block))
    for first in range(0, weight.rows, step):
        progress(out.nbytes * first // weight.rows)
        last = min(first + step, weight.rows)
        raw = np.empty((last - first, row_nbytes), np.uint8)
        for index, part in enumerate(weight.parts):
            at = np.flatnonzero(which[first:last] == index)
            if len(at) == 0:
                continue
            source = rows[first:last][at]
            low, high = int(source.min()), int(source.max()) + 1
            raw[at] = file.read(part.tensor, low, high)[source - low]
            check_scales(part.tensor, file.tensors[part.tensor].dtype, raw[at])
            file.drop(part.tensor)
        kernels.pack_rows(weight.spec, first, raw, out)
