"""The screened output head: which tokens of a rough product are worth an exact one.

Owns the choice of candidates and what a screened row of logits looks like. Does not own the two products (matmul.py's
views of a split Q8_0), nor which rows may be screened (`screenable`'s rule stands in ports.kernels).

A screened row goes through two calls instead of one: matmul_q8_0_screen reads the high nibbles, half of the weight, and
`refine_head` multiplies the CANDIDATES best tokens exactly, one row block each, with the tile of the exact product: the
same bits. All other tokens get -inf. It is an approximation: the best token is lost where CANDIDATES others look
better; bench/approximate_head.py counts how often.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ai_engine.kernels.cpu import draw
from ai_engine.kernels.cpu.formats import ActLayout
from ai_engine.kernels.cpu.lang import Kernel, KernelDef, kernel
from ai_engine.kernels.cpu.matmul import SPLIT, Tile, block_bytes_of, call_tile
from ai_engine.kernels.cpu.sample import BLOCK, emit_best, stack
from ai_engine.ports.kernels import SampleBatch
from ai_engine.ports.sampling import MAX_SCREENED_TOP_K

CANDIDATES = 4 * MAX_SCREENED_TOP_K


def screenable(sample: SampleBatch) -> npt.NDArray[np.bool_]:
    """Rows of a step, bool[R], that a screened head may answer; each by its own parameters."""
    only_best = (sample.temperature < draw.GREEDY_BELOW) | ((sample.top_k > 0) & (sample.top_k <= MAX_SCREENED_TOP_K))
    untouched = (np.diff(sample.bias_start) == 0) & (np.diff(sample.history_start) == 0) & (sample.mask_row < 0)
    return np.asarray(only_best & untouched & (sample.forced < 0) & (sample.num_top < 0), dtype=np.bool_)


@kernel(logits="ptr", stride="i64", vocab="i64", x="ptr", w="ptr", cols="i64", rows="i64")
def refine_head(k: Kernel) -> None:
    """Each screened row: exact logits of the best candidates, -inf for the others."""
    a, n = k.arg, k.lanes
    block_bytes, groups = block_bytes_of(SPLIT, a.cols, n), a.cols.lshr(5)
    values, tokens, exact, out = (stack(k, 4 * size) for size in (CANDIDATES, CANDIDATES, CANDIDATES, 64))
    value, token, exacts = k.array(values, "f32"), k.array(tokens, "i32"), k.array(exact, "f32")
    with k.work_items(k.header.screened) as row:
        logits = k.array(a.logits + row * a.stride * 4, "f32")
        x = a.x + ActLayout.row_offset(row, groups)
        with k.loop(0, CANDIDATES) as i:
            value[i], token[i] = float("-inf"), -1
        with k.loop(0, (a.vocab + (BLOCK - 1)) // BLOCK) as b:
            k.call("sample_best", emit_best, logits.ptr, a.vocab, b, values, tokens, k.i64(CANDIDATES))
        with k.loop(0, CANDIDATES) as i, k.if_(token[i] >= 0):
            block = token[i].sext("i64") // n
            call_tile(
                k, SPLIT, Tile(1),
                {
                    "ctx": k.ctx, "x": x, "w": a.w + block * block_bytes, "out": out, "bias": k.const(0, "ptr"),
                    "blocks": k.i64(1), "rows": a.rows - block * n, "cols": a.cols, "out_stride": k.i64(n),
                    "x_stride": k.i64(0), "accumulate": k.i64(0), "ahead": k.i64(0),
                },
            )  # fmt: skip
            exacts[i] = k.array(out, "f32")[token[i].sext("i64") % n]
        k.for_vectors(a.vocab, lambda i, lanes: logits.store(i, k.f32(float("-inf"), lanes)))
        with k.loop(0, CANDIDATES) as i, k.if_(token[i] >= 0):
            logits[token[i].sext("i64")] = exacts[i]


KERNELS: tuple[KernelDef, ...] = (refine_head,)
