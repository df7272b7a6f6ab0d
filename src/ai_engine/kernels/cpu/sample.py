"""The sampler: one threaded kernel from logits to tokens and logprobs.

Owns how a row of logits becomes a token. What it must be is defined to the bit by ``ops.choose`` of the reference: a
token's weight is an integer, so sums over the vocabulary do not depend on who adds them up, in which order. Does not
own what the arrays of a step mean (ports.kernels.SampleBatch) nor what the engine does about a flagged row (token -1).

A row goes through phases over blocks of BLOCK columns. Mostly each thread takes whole rows, as no thread then waits for
another. Where there are fewer rows than threads and the vocabulary is large, all threads share the blocks of one row
and meet at a barrier after each phase:

    scan      largest logit; a NaN or +inf anywhere flags the row
    logprobs  sum of exp(x - max) and the best tokens, of the untouched logits   (where asked for)
    adjust    bias and penalties in place, originals kept for the logprob        (where there are any)
    rescan    largest allowed logit                                              (after adjust, or with a mask)
    list      the heaviest weights, as low as a list of MAX_LISTED reaches       (with a filter)
    select    top_k, then top_p: radix select over the weights' bits             (where they are on)
    draw      sum of the kept weights per block; the block, then the token, where the draw falls

Greedy rows stop after the scans. Where a filter keeps nothing that is not listed, which is the rule, the list replaces
the last two phases. Equal weights are taken by rising id.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ai_engine.kernels.cpu import abi, draw
from ai_engine.kernels.cpu.lang import Array, Kernel, KernelDef, Target, Value, kernel
from ai_engine.ports.sampling import MAX_LOGPROBS

BLOCK = 2048
MAX_BLOCKS = 512
MAX_VOCAB = BLOCK * MAX_BLOCKS
MAX_PARTS = 16  # threads that share a row
BUCKETS = 1032  # of a histogram; 1025 are used, as the best token's weight is 2**30 itself
HISTOGRAM_BYTES = 16 * BUCKETS  # i64 count, i64 weight
BUFFERS = 2  # a thread may clear one histogram while another still reads the one before
CUTS = (1, 1 << 8, 1 << 14, 1 << 18, 1 << 22, 1 << 26)  # a list holds all weights from one of these up
MAX_LISTED = 4096  # entries of a part's list
LIST_BYTES = 64 + 8 * MAX_LISTED  # i64: count, weight of all, estimates for each cut; i32 weights, i32 tokens
PART_BYTES = BUFFERS * HISTOGRAM_BYTES + LIST_BYTES
MAX_ORIGINALS = 1 << 17  # of a row; a token adjusted beyond that many reports the logprob of its adjusted logit
DEAD = -21.6  # (z - max) / temperature below this: weight 0
NEVER = (1 << 63) - 1

# A row's working memory (of a thread, or shared): one entry per block, then per part.
_AREA: dict[str, tuple[str, int]] = {}


def _area_layout() -> int:
    end = 0
    for name, ty, count in (
        ("max", "f32", MAX_BLOCKS),
        ("bad", "i32", MAX_BLOCKS),
        ("sum", "f32", MAX_BLOCKS),
        ("allowed_max", "f32", MAX_BLOCKS),
        ("allowed_bad", "i32", MAX_BLOCKS),
        ("weight", "i64", MAX_BLOCKS),
        ("ties", "i64", MAX_BLOCKS),
        ("top_value", "f32", MAX_PARTS * 32),
        ("top_token", "i32", MAX_PARTS * 32),
    ):
        _AREA[name] = (ty, end)
        end += count * (8 if ty == "i64" else 4)
    return end


AREA_BYTES = _area_layout()


def workspace_bytes(target: Target, max_rows: int, vocab_size: int) -> int:
    """Working memory of a row that threads share. (A thread's own rows are done in its scratch memory.)"""
    del target, max_rows, vocab_size
    return AREA_BYTES + MAX_PARTS * PART_BYTES + 4 * MAX_ORIGINALS


def sample_args(
    target: Target,
    *,
    logits: int,
    logits_stride: int,
    vocab_size: int,
    max_rows: int,
    workspace: int,
    min_shared_vocab: int = 65_536,
) -> tuple[str, npt.NDArray[np.uint64]]:
    """The kernel's name and argument block; ``logits_stride`` in elements. Logits may be changed by the kernel. Threads
    share a row only if the vocabulary has ``min_shared_vocab`` tokens: a small one costs less than a late thread."""
    del target, max_rows
    assert 0 < vocab_size <= MAX_VOCAB, vocab_size
    assert logits_stride >= vocab_size, (logits_stride, vocab_size)
    return sample.name, sample.args.pack(
        logits=logits,
        stride=logits_stride,
        vocab=vocab_size,
        area=workspace,
        shares=int(vocab_size >= min_shared_vocab),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Rows of logits


class _Row:
    """A row of logits as kernels read it: vectors, with an optional bitset of allowed tokens."""

    def __init__(self, k: Kernel, logits: Value, vocab: Value, mask: Value, mask_step: Value) -> None:
        self.k, self.vocab = k, vocab
        self.x = k.array(logits, "f32")
        self.mask, self.mask_step = mask, mask_step
        self.lanes = max(8, k.lanes)

    def scan(self, block: Value, body: Callable[[Value, Value], None], masked: bool) -> None:
        """``body(x, i)`` for each vector of a block, x the logits of tokens i, i + 1, ...: -inf past the vocabulary
        and, if ``masked``, where the token is not allowed."""
        k, lanes = self.k, self.lanes
        first = block * BLOCK
        last = k.min(first + BLOCK, self.vocab)
        whole = last - (last - first) % lanes

        def allowed(x: Value, i: Value) -> Value:
            if not masked:
                return x
            bits = k.load(self.mask + i.lshr(3) * self.mask_step, f"i{lanes}", 1, 1)
            return k.select(Value(k, k.b.bitcast(bits.v, k.type("i1", lanes)), "i1", lanes), x, float("-inf"))

        with k.loop(first, whole, lanes) as i:
            body(allowed(self.x.load(i, lanes), i), i)
        with k.if_(whole < last):
            x = k.masked_load(self.x.at(whole), "f32", k.lane_mask(last - whole, lanes), float("-inf"))
            body(allowed(x, whole), whole)


def stack(k: Kernel, nbytes: int) -> Value:
    """Memory of this call, as an untyped pointer."""
    memory = k.stack(nbytes)
    memory.v.type = k.type("ptr")
    return memory


def _any(k: Kernel, bits: Value) -> Value:
    return _mask_bits(k, bits).ne(0)


def _mask_bits(k: Kernel, bits: Value) -> Value:
    """i1 lanes as an i64."""
    return Value(k, k.b.bitcast(bits.v, k.type(f"i{bits.lanes}")), f"i{bits.lanes}").zext("i64")


def _for_bits(k: Kernel, bits: Value, body: Callable[[Value], None]) -> None:
    """``body(lane)`` for each set bit, lowest first."""
    rest = k.var(bits)
    with k.forever() as leave_if:
        now = rest.v
        leave_if(now.eq(0))
        body(k.intrinsic("llvm.cttz.i64", "i64", 1, now, k.const(1, "i1")))
        rest.v = now & (now - 1)


def _weights(k: Kernel, x: Value, top: Value, inverse: Value) -> tuple[Value, Value]:
    """``ops.integer_weights``, step by step as there; and which lanes may have one at all."""
    u = (x - top) * inverse
    alive = u > DEAD
    u = k.max(u, float(draw.MIN_EXPONENT))
    t = u * float(draw.LOG2_E)
    n = k.floor(t + 0.5)
    f = t - n
    p = f.like(float(draw.EXP2_COEFFICIENTS[-1]))
    for c in draw.EXP2_COEFFICIENTS[-2::-1]:
        p = p * f + float(c)
    scaled = (p.bitcast("i32") + ((n.to_int() + 30) << 23)).bitcast("f32")
    return (scaled + 0.5).to_int(), alive


def _emit_scan(k: Kernel, logits: Value, vocab: Value, mask: Value, mask_step: Value, block: Value, out: Value) -> None:
    """out = {largest logit, -, NaN or +inf anywhere} of a block: f32 at 0, i32 flag at 4 * MAX_BLOCKS."""
    row = _Row(k, logits, vocab, mask, mask_step)
    best = k.var(k.f32(float("-inf"), row.lanes))
    good = k.var(k.const(1, "i1", row.lanes))

    def body(x: Value, i: Value) -> None:
        good.v = good.v & (x < float("inf"))
        best.v = k.max(x, best.v)

    row.scan(block, body, masked=True)
    k.store(out, k.reduce_max(best.v))
    k.store(out + 4 * MAX_BLOCKS, k.select(_any(k, ~good.v), k.i32(1), k.i32(0)))


def _emit_find(k: Kernel, logits: Value, vocab: Value, mask: Value, mask_step: Value, block: Value, x: Value) -> Value:
    """The first token of a block whose logit is x; the block has one."""
    row = _Row(k, logits, vocab, mask, mask_step)
    found = k.var(k.i64(NEVER))

    def body(values: Value, i: Value) -> None:
        bits = _mask_bits(k, values.eq(x))
        with k.if_(bits.ne(0) & found.v.eq(NEVER)):
            found.v = i + k.intrinsic("llvm.cttz.i64", "i64", 1, bits, k.const(1, "i1"))

    row.scan(block, body, masked=True)
    return found.v


def _emit_exp_sum(k: Kernel, logits: Value, vocab: Value, block: Value, top: Value) -> Value:
    """Sum of exp(x - top) over a block."""
    row = _Row(k, logits, vocab, logits, k.i64(0))
    total = k.var(k.f32(0, row.lanes))

    def body(x: Value, i: Value) -> None:
        total.v = total.v + k.exp(x - top)

    row.scan(block, body, masked=False)
    return k.reduce_add(total.v)


def _emit_insert(k: Kernel, values: Value, tokens: Value, count: Value, x: Value, token: Value) -> None:
    """Insert into a list sorted by falling value, behind equal ones; the last entry falls out."""
    v, t = k.array(values, "f32"), k.array(tokens, "i32")
    at = k.var(count - 1)
    with k.forever() as leave_if:
        leave_if(at.v.eq(0))
        before = v[at.v - 1]
        leave_if(before >= x)
        v[at.v], t[at.v] = before, t[at.v - 1]
        at.v = at.v - 1
    v[at.v], t[at.v] = x, token.trunc("i32")


def emit_best(k: Kernel, logits: Value, vocab: Value, block: Value, values: Value, tokens: Value, count: Value) -> None:
    """Insert a block's best tokens into the sorted list of ``count``."""
    row = _Row(k, logits, vocab, logits, k.i64(0))
    lanes = stack(k, 64)
    last = k.array(values, "f32").shift(count - 1)

    def body(x: Value, i: Value) -> None:
        bits = _mask_bits(k, x > last[0])
        with k.if_(bits.ne(0)):
            k.store(lanes, x)

            def lane(n: Value) -> None:
                value = k.array(lanes, "f32")[n]
                with k.if_(value > last[0]):
                    k.call("sample_insert", _emit_insert, values, tokens, count, value, i + n)

            _for_bits(k, bits, lane)

    row.scan(block, body, masked=False)


# ---------------------------------------------------------------------------------------------------------------------
# Select: a histogram of some bits of the weights, and the bucket in which a running sum from the top crosses a target


def _emit_histogram(
    k: Kernel, logits: Value, vocab: Value, mask: Value, mask_step: Value, block: Value,
    top: Value, inverse: Value, prefix: Value, known: Value, shift: Value, histogram: Value,
) -> None:  # fmt: skip
    """Add a block's weights w > 0 with w >> known == prefix to the bucket of their next bits, down to ``shift``.

    Most weights fall into bucket 0 (they are tiny): those are counted as vectors.
    """
    row = _Row(k, logits, vocab, mask, mask_step)
    n = row.lanes
    lanes, h = stack(k, 128), k.array(histogram, "i64")
    prefixes, knowns, shifts = (k.splat(x.trunc("i32"), n) for x in (prefix, known, shift))
    below = k.splat(((k.i64(1) << known) - 1).trunc("i32"), n)
    count, rest = k.var(k.i64(0)), k.var(k.i32(0, n))

    def body(x: Value, i: Value) -> None:
        w, alive = _weights(k, x, top, inverse)
        with k.if_(_any(k, alive)):
            match = w.lshr(knowns).eq(prefixes) & (w > 0)
            residue = w & below
            bucket = residue.lshr(shifts)
            first = match & bucket.eq(0)
            count.v = count.v + k.popcount(_mask_bits(k, first))
            rest.v = rest.v + k.select(first, residue, 0)  # below 2**20, at most 256 times
            others = _mask_bits(k, match & bucket.ne(0))
            with k.if_(others.ne(0)):
                k.store(lanes, w)
                k.store(lanes + 4 * n, bucket)

                def lane(at: Value) -> None:
                    both = k.array(lanes, "i32")
                    entry = h.shift(both[at + n].zext("i64") * 2)
                    entry[0] = entry[0] + 1
                    entry[1] = entry[1] + both[at].zext("i64")

                _for_bits(k, others, lane)

    row.scan(block, body, masked=True)
    h[0] = h[0] + count.v
    h[1] = h[1] + (count.v * (prefix << known) + k.reduce_add(rest.v).zext("i64"))


def _emit_cross(k: Kernel, histogram: Value, parts: Value, state: Value) -> None:
    """Go down the buckets, adding {count, weight} to state[0..1], until count reaches state[2] or weight state[3];
    state[4] is that bucket, which is not added, or -1."""
    s = k.array(state, "i64")
    s[4] = -1
    with k.forever() as leave_if:
        at = k.var(k.i64(BUCKETS))
        with k.forever() as stop_if:
            at.v = at.v - 1
            stop_if(at.v < 0)
            count, weight = k.var(k.i64(0)), k.var(k.i64(0))
            with k.loop(0, parts) as part:
                h = k.array(histogram + (part * PART_BYTES + at.v * 16), "i64")
                count.v = count.v + h[0]
                weight.v = weight.v + h[1]
            new_count, new_weight = s[0] + count.v, s[1] + weight.v
            crossed = (new_count >= s[2]) | (new_weight >= s[3])
            s[4] = k.select(crossed, at.v, k.i64(-1))
            stop_if(crossed)
            s[0], s[1] = new_count, new_weight
        leave_if(k.const(1, "i1"))


# ---------------------------------------------------------------------------------------------------------------------
# Lists of the heaviest weights


def _emit_tally(
    k: Kernel, logits: Value, vocab: Value, mask: Value, mask_step: Value, block: Value,
    top: Value, inverse: Value, list_: Value,
) -> None:  # fmt: skip
    """Add to the list's estimates how many weights of a block reach each cut, more or less."""
    row = _Row(k, logits, vocab, mask, mask_step)
    tallies = [k.var(k.i32(0, row.lanes)) for _ in CUTS]

    def body(x: Value, i: Value) -> None:
        u = (x - top) * inverse
        for tally, cut in zip(tallies, CUTS, strict=True):
            reaches = DEAD if cut == 1 else math.log(cut / draw.WEIGHT_ONE)
            tally.v = tally.v - (u > reaches).sext("i32")

    row.scan(block, body, masked=True)
    estimates = k.array(list_, "i64").shift(2)
    for i, tally in enumerate(tallies):
        estimates[i] = estimates[i] + k.reduce_add(tally.v).zext("i64")


def _emit_list(
    k: Kernel, logits: Value, vocab: Value, mask: Value, mask_step: Value, block: Value,
    top: Value, inverse: Value, cut: Value, list_: Value,
) -> None:  # fmt: skip
    """Append a block's weights >= cut; the count goes on when the list is full. Add up all weights."""
    row = _Row(k, logits, vocab, mask, mask_step)
    n = row.lanes
    limit, lanes, header = k.splat(cut.trunc("i32"), n), stack(k, 64), k.array(list_, "i64")
    weights = k.array(list_ + 64, "i32")
    tokens = weights.shift(MAX_LISTED)
    low, high, count = k.var(k.i32(0, n)), k.var(k.i32(0, n)), k.var(header[0])

    def body(x: Value, i: Value) -> None:
        w, alive = _weights(k, x, top, inverse)
        with k.if_(_any(k, alive)):
            low.v = low.v + (w & 0xFFFF)
            high.v = high.v + w.lshr(16)
            heavy = _mask_bits(k, w >= limit)
            with k.if_(heavy.ne(0)):
                k.store(lanes, w)

                def lane(at: Value) -> None:
                    to = k.min(count.v, MAX_LISTED - 1)
                    weights[to], tokens[to] = k.array(lanes, "i32")[at], (i + at).trunc("i32")
                    count.v = count.v + 1

                _for_bits(k, heavy, lane)

    row.scan(block, body, masked=True)
    header[0] = count.v
    header[1] = header[1] + (k.reduce_add(high.v).zext("i64") << 16) + k.reduce_add(low.v).zext("i64")


def _emit_list_sums(k: Kernel, lists: Value, parts: Value, least: Value, sums: Value) -> None:
    """sums = {count, weight} of listed weights >= least, of all parts."""
    n = max(8, k.lanes)
    limit = k.splat(least.trunc("i32"), n)
    out = k.array(sums, "i64")
    out[0], out[1] = 0, 0
    with k.loop(0, parts) as part:
        start = lists + part * PART_BYTES
        length, weights = k.load(start, "i64"), k.array(start + 64, "i32")
        count, low, high = k.var(k.i64(0)), k.var(k.i32(0, n)), k.var(k.i32(0, n))
        with k.loop(0, length, n) as i:
            w = weights.load(i, n)
            taken = (w >= limit) & k.lane_mask(length - i, n)
            kept = k.select(taken, w, 0)
            count.v = count.v + k.popcount(_mask_bits(k, taken))
            low.v = low.v + (kept & 0xFFFF)
            high.v = high.v + kept.lshr(16)
        out[0] = out[0] + count.v
        out[1] = out[1] + (k.reduce_add(high.v).zext("i64") << 16) + k.reduce_add(low.v).zext("i64")


def _emit_list_threshold(k: Kernel, lists: Value, parts: Value, count: Value, weight: Value, state: Value) -> None:
    """state[0] = the largest t such that the listed weights >= t are ``count`` or weigh ``weight``; state[1..2] = count
    and weight of those > t. There is such a t."""
    s = k.array(state, "i64")
    t, bit = k.var(k.i64(0)), k.var(k.i64(1 << 30))
    sums = state + 8
    with k.forever() as leave_if:
        k.call("sample_list_sums", _emit_list_sums, lists, parts, t.v + bit.v, sums)
        t.v = t.v + k.select((s[1] >= count) | (s[2] >= weight), bit.v, 0)
        bit.v = bit.v.lshr(1)
        leave_if(bit.v.eq(0))
    k.call("sample_list_sums", _emit_list_sums, lists, parts, t.v + 1, sums)
    s[0] = t.v


def _emit_list_locate(k: Kernel, lists: Value, parts: Value, threshold: Value, ties: Value, r: Value) -> Value:
    """The listed token at which the running sum of kept weights exceeds r."""
    found, left, rest = k.var(k.i64(-1)), k.var(ties), k.var(r)
    with k.loop(0, parts) as part:
        start = lists + part * PART_BYTES
        length, weights = k.load(start, "i64"), k.array(start + 64, "i32")
        tokens = weights.shift(MAX_LISTED)
        with k.loop(0, length) as i:
            w = weights[i].zext("i64")
            tie = w.eq(threshold)
            kept = k.select((w < threshold) | (tie & (left.v <= 0)), 0, w)
            left.v = left.v - k.select(tie, k.i64(1), k.i64(0))
            found.v = k.select((found.v < 0) & (rest.v < kept), tokens[i].zext("i64"), found.v)
            rest.v = rest.v - kept
    return found.v


# ---------------------------------------------------------------------------------------------------------------------
# Draw


def _emit_kept(
    k: Kernel, logits: Value, vocab: Value, mask: Value, mask_step: Value, block: Value,
    top: Value, inverse: Value, threshold: Value, out: Value,
) -> None:  # fmt: skip
    """out = the sum of a block's weights above the threshold; 8 * MAX_BLOCKS further, how many equal it."""
    row = _Row(k, logits, vocab, mask, mask_step)
    limit = k.splat(threshold.trunc("i32"), row.lanes)
    low, high, ties = k.var(k.i32(0, row.lanes)), k.var(k.i32(0, row.lanes)), k.var(k.i64(0))

    def body(x: Value, i: Value) -> None:
        w, alive = _weights(k, x, top, inverse)
        with k.if_(_any(k, alive)):
            kept = k.select(w > limit, w, 0)
            low.v = low.v + (kept & 0xFFFF)
            high.v = high.v + kept.lshr(16)
            ties.v = ties.v + k.popcount(_mask_bits(k, w.eq(limit)))

    row.scan(block, body, masked=True)
    total = (k.reduce_add(high.v).zext("i64") << 16) + k.reduce_add(low.v).zext("i64")
    k.store(out, total)
    k.store(out + 8 * MAX_BLOCKS, ties.v)


def _emit_locate(
    k: Kernel, logits: Value, vocab: Value, mask: Value, mask_step: Value, block: Value,
    top: Value, inverse: Value, threshold: Value, ties: Value, r: Value,
) -> Value:  # fmt: skip
    """The token of a block at which the running sum of kept weights exceeds r; ``ties`` equal ones are kept."""
    row = _Row(k, logits, vocab, mask, mask_step)
    limit = k.splat(threshold.trunc("i32"), row.lanes)
    lanes = stack(k, 64)
    found, left, rest = k.var(k.i64(-1)), k.var(ties), k.var(r)

    def body(x: Value, i: Value) -> None:
        w, alive = _weights(k, x, top, inverse)
        bits = _mask_bits(k, (w >= limit) & alive)
        with k.if_((found.v < 0) & bits.ne(0)):
            k.store(lanes, w)

            def lane(n: Value) -> None:
                weight = k.array(lanes, "i32")[n].zext("i64")
                tie = weight.eq(threshold)
                kept = k.select(tie & (left.v <= 0), 0, weight)
                left.v = left.v - k.select(tie, k.i64(1), k.i64(0))
                found.v = k.select((found.v < 0) & (rest.v < kept), i + n, found.v)
                rest.v = rest.v - kept

            _for_bits(k, bits, lane)

    row.scan(block, body, masked=True)
    return found.v


def _mix64(k: Kernel, x: Value) -> Value:
    x = (x ^ x.lshr(30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ x.lshr(27)) * _signed(0x94D049BB133111EB)
    return x ^ x.lshr(31)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


def _multiply_high(a: Value, b: Value) -> Value:
    """The upper 64 bits of an unsigned product."""
    low = 0xFFFFFFFF
    a0, a1, b0, b1 = a & low, a.lshr(32), b & low, b.lshr(32)
    p01, p10 = a0 * b1, a1 * b0
    middle = (a0 * b0).lshr(32) + (p01 & low) + (p10 & low)
    return a1 * b1 + p01.lshr(32) + p10.lshr(32) + middle.lshr(32)


# ---------------------------------------------------------------------------------------------------------------------
# A row


def _emit_row(
    k: Kernel, ctx: Value, logits: Value, vocab: Value, originals: Value, row: Value,
    area: Value, histograms: Value, me: Value, parts: Value, shared: Value,
) -> None:  # fmt: skip
    """Sample one row. ``me`` of ``parts`` shares the blocks if ``shared``; then every thread of the team comes here,
    those with me >= parts without work, and all take the same branches."""
    h = k.header
    blocks = (vocab + (BLOCK - 1)) // BLOCK
    has_work = me < parts
    first_block = k.select(has_work, blocks * me // parts, 0)
    last_block = k.select(has_work, blocks * (me + 1) // parts, 0)
    leader = me.eq(0)

    def at(name: str) -> Array:
        ty, offset = _AREA[name]
        return k.array(area + offset, ty)

    def field(name: str, ty: str) -> Value:
        return k.array(getattr(h, name), ty)[row]

    def meet() -> None:
        with k.if_(shared.ne(0)):
            k.barrier()

    def my_blocks(body: Callable[[Value], None]) -> None:
        with k.loop(first_block, last_block) as block:
            body(block)

    x = k.array(logits, "f32")
    num_top = field("num_top", "i32")
    wants_logprobs = num_top >= 0
    top_count = k.min(k.max(num_top, 0), MAX_LOGPROBS).sext("i64")
    out_token, out_logprob = k.array(h.out_token, "i32"), k.array(h.out_logprob, "f32")
    out_top_token = k.array(h.out_top_token, "i32").shift(row * MAX_LOGPROBS)
    out_top_logprob = k.array(h.out_top_logprob, "f32").shift(row * MAX_LOGPROBS)

    # Without a mask every read of it hits these ones.
    ones = stack(k, 64)
    k.store(ones, k.i64(-1))
    mask_row = field("mask_row", "i32")
    is_masked = mask_row >= 0
    mask = k.select(is_masked, h.masks + mask_row.sext("i64") * h.mask_stride * 4, ones)
    mask_step = k.select(is_masked, k.i64(1), 0)
    plain = (logits, vocab, ones, k.i64(0))
    allowed = (logits, vocab, mask, mask_step)

    def scan(source: Sequence[Value], max_name: str) -> None:
        my_blocks(lambda b: _do(k, "sample_scan", _emit_scan, *source, b, at(max_name).at(b)))
        meet()

    def merged(max_name: str, bad_name: str) -> tuple[Value, Value]:
        top, bad = k.var(k.f32(float("-inf"))), k.var(k.i32(0))
        with k.loop(0, blocks) as b:
            top.v = k.max(at(max_name)[b], top.v)
            bad.v = bad.v | at(bad_name)[b]
        return top.v, bad.v.ne(0) | ~(top.v > float("-inf"))

    # Scan.
    scan(plain, "max")
    first_top, bad = merged("max", "bad")
    token = k.var(k.i64(-1))
    with k.if_(~bad):
        # Logprobs of the untouched logits.
        with k.if_(wants_logprobs):
            my_blocks(
                lambda b: at("sum").store(
                    b, _value(k, "sample_exp_sum", _emit_exp_sum, "f32", logits, vocab, b, first_top)
                )
            )
            with k.if_(has_work & (top_count > 0)):
                values, tokens = at("top_value").at(me * 32), at("top_token").at(me * 32)
                with k.loop(0, top_count) as i:
                    k.array(values, "f32")[i] = float("-inf")
                    k.array(tokens, "i32")[i] = -1
                my_blocks(lambda b: _do(k, "sample_best", emit_best, logits, vocab, b, values, tokens, top_count))
            meet()
        forced = field("forced", "i32")
        with k.if_else(forced >= 0) as (take, choose):
            with take:
                token.v = forced.sext("i64")
            with choose:
                _choose(
                    k, row, x, originals, allowed, token, at, field, meet, my_blocks, merged, scan, first_top,
                    is_masked, wants_logprobs, leader, me, parts, has_work, blocks, histograms,
                )  # fmt: skip

    # Report.
    with k.if_(leader):
        out_token[row] = token.v.trunc("i32")
        out_logprob[row] = 0.0
        with k.loop(0, MAX_LOGPROBS) as i:
            out_top_token[i] = -1
            out_top_logprob[i] = 0.0
        with k.if_(wants_logprobs & (token.v >= 0)):
            total = k.var(k.f32(0).to_f64())
            with k.loop(0, blocks) as b:
                total.v = total.v + at("sum")[b].to_f64()
            log_total = k.log(total.v.to_f32())
            out_logprob[row] = (_original(k, h, row, x, originals, token.v) - first_top) - log_total
            with k.if_(top_count > 0):
                values, tokens = at("top_value").at(0), at("top_token").at(0)
                with k.loop(1, parts) as part, k.loop(0, top_count) as i:
                    value = at("top_value")[part * 32 + i]
                    with k.if_(value > k.array(values, "f32")[top_count - 1]):
                        other = at("top_token")[part * 32 + i].sext("i64")
                        k.call("sample_insert", _emit_insert, values, tokens, top_count, value, other)
                with k.loop(0, top_count) as i, k.if_(at("top_token")[i] >= 0):
                    out_top_token[i] = at("top_token")[i]
                    out_top_logprob[i] = (at("top_value")[i] - first_top) - log_total


def _do(k: Kernel, name: str, emit: Callable[..., Any], *values: Value) -> None:
    k.call(name, emit, *values)


def _value(k: Kernel, name: str, emit: Callable[..., Any], result: str, *values: Value) -> Value:
    returned = k.call(name, emit, *values, result=result)
    assert returned is not None
    return returned


def _original(k: Kernel, h: Any, row: Value, x: Array, originals: Value, token: Value) -> Value:
    """The logit of ``token`` before it was adjusted: entries of the bias, then those of the history."""
    logit, at = k.var(x[token]), k.var(k.i64(0))
    wanted = token.trunc("i32")
    with k.if_(k.array(h.forced, "i32")[row] < 0):
        for name in ("bias", "history"):
            tokens, start = k.array(getattr(h, f"{name}_token"), "i32"), k.array(getattr(h, f"{name}_start"), "i32")
            with k.loop(start[row].sext("i64"), start[row + 1].sext("i64")) as i:
                with k.if_(tokens[i].eq(wanted) & (at.v < MAX_ORIGINALS)):
                    logit.v = k.array(originals, "f32")[at.v]
                at.v = at.v + 1
    return logit.v


def _choose(
    k: Kernel, row: Value, x: Array, originals: Value, allowed: Sequence[Value], token: Any,
    at: Callable[[str], Array], field: Callable[[str, str], Value], meet: Callable[[], None],
    my_blocks: Callable[[Callable[[Value], None]], None], merged: Callable[[str, str], tuple[Value, Value]],
    scan: Callable[[Sequence[Value], str], None], first_top: Value, is_masked: Value, wants_logprobs: Value,
    leader: Value, me: Value, parts: Value, has_work: Value, blocks: Value, histograms: Value,
) -> None:  # fmt: skip
    """Adjust, rescan, then greedy or a draw; the leader sets ``token``, which stays -1 where there is none."""
    h, vocab = k.header, allowed[1]
    bias_start, history_start = k.array(h.bias_start, "i32"), k.array(h.history_start, "i32")
    spans = {
        "bias": (bias_start[row].sext("i64"), bias_start[row + 1].sext("i64")),
        "history": (history_start[row].sext("i64"), history_start[row + 1].sext("i64")),
    }
    has = {name: first < last for name, (first, last) in spans.items()}

    def share(name: str, body: Callable[[Value, Value], None]) -> None:
        """``body(entry, token)`` for my entries of a list."""
        first, last = spans[name]
        tokens, count = k.array(getattr(h, f"{name}_token"), "i32"), last - first
        begin = k.select(has_work, first + count * me // parts, 0)
        end = k.select(has_work, first + count * (me + 1) // parts, 0)
        with k.loop(begin, end) as i:
            t = tokens[i].sext("i64")
            with k.if_(t.ult(vocab)):
                body(i, t)

    # Adjust, in place.
    with k.if_(has["bias"] | has["history"]):
        with k.if_(wants_logprobs):
            before = k.i64(0)
            for name, (first, last) in spans.items():

                def save(i: Value, t: Value, entry: Value = before - first) -> None:
                    at = i + entry
                    with k.if_(at < MAX_ORIGINALS):
                        k.array(originals, "f32")[at] = x[t]

                share(name, save)
                before = before + (last - first)
            meet()
        with k.if_(has["bias"]):
            values = k.array(h.bias_value, "f32")
            share("bias", lambda i, t: x.store(t, x[t] + values[i]))
            meet()
        with k.if_(has["history"]):
            repetition, presence, frequency = (field(n, "f32") for n in ("repetition", "presence", "frequency"))
            counts = k.array(h.history_count, "i32")

            def penalise(i: Value, t: Value) -> None:
                z, count = x[t], counts[i]
                z = k.select(z > 0, z / repetition, z * repetition)
                x[t] = k.select(count > 0, (z - presence) - frequency * count.to_f32(), z)

            share("history", penalise)
            meet()

    # Rescan.
    top, bad, block_max = k.var(first_top), k.var(k.const(0, "i1")), k.var(at("max").ptr)
    with k.if_(has["bias"] | has["history"] | is_masked):
        scan(allowed, "allowed_max")
        top.v, bad.v = merged("allowed_max", "allowed_bad")
        block_max.v = at("allowed_max").ptr
    temperature = field("temperature", "f32")
    greedy = temperature < float(draw.GREEDY_BELOW)

    with k.if_(~bad.v & greedy & leader):
        block = k.var(k.i64(0))
        with k.forever() as leave_if:
            leave_if(k.array(block_max.v, "f32")[block.v].eq(top.v))
            block.v = block.v + 1
        token.v = _value(k, "sample_find", _emit_find, "i64", *allowed, block.v, top.v)

    with k.if_(~bad.v & ~greedy):
        _draw(k, allowed, token, at, field, meet, my_blocks, top.v, k.f32(1.0) / temperature,
              leader, me, parts, has_work, blocks, histograms)  # fmt: skip


def _draw(
    k: Kernel, allowed: Sequence[Value], token: Any, at: Callable[[str], Array], field: Callable[[str, str], Value],
    meet: Callable[[], None], my_blocks: Callable[[Callable[[Value], None]], None], top: Value, inverse: Value,
    leader: Value, me: Value, parts: Value, has_work: Value, blocks: Value, histograms: Value,
) -> None:  # fmt: skip
    """Filter by top_k, top_p and min_p, and draw; the leader sets ``token``."""
    vocab = allowed[1]
    threshold, ties, total = k.var(k.i64(0)), k.var(k.i64(0)), k.var(k.i64(0))
    state = stack(k, 64)
    s = k.array(state, "i64")
    top_k, top_p, min_p = field("top_k", "i32").sext("i64"), field("top_p", "f32"), field("min_p", "f32")
    has_k, has_p = (top_k > 0) & (top_k < vocab), top_p < 1.0
    least = k.select(min_p > 0, _ceil(k, min_p.to_f64() * float(draw.WEIGHT_ONE)), 0)

    golden = _signed(draw.GOLDEN)
    generator = _mix64(k, field("seed", "i64") + golden)
    random_bits = _mix64(k, generator + (field("position", "i32").sext("i64") + 1) * golden)

    def needed(weight: Value) -> Value:
        """What top_p keeps of ``weight``, at least."""
        return k.max(_ceil(k, top_p.to_f64() * weight.to_f64()), 1)

    def histogram(buffer: int, prefix: Value, known: int, shift: int) -> None:
        with k.if_(has_work):
            mine = histograms + (me * PART_BYTES + buffer * HISTOGRAM_BYTES)
            k.fill(mine, 0, HISTOGRAM_BYTES)
            my_blocks(
                lambda b: _do(
                    k, "sample_histogram", _emit_histogram, *allowed, b, top, inverse,
                    prefix, k.i64(known), k.i64(shift), mine,
                )
            )  # fmt: skip
        meet()

    def apply_min_p() -> None:
        with k.if_(least > threshold.v):
            threshold.v = least - 1
            ties.v = 0

    # List, with the lowest cut that seems to fit. Does it hold all that the first filter keeps?
    on_lists = k.var(k.const(0, "i1"))
    lists = histograms + BUFFERS * HISTOGRAM_BYTES
    mine = lists + me * PART_BYTES

    def of_all_parts(word: int) -> Value:
        sum_ = k.var(k.i64(0))
        with k.loop(0, parts) as part:
            sum_.v = sum_.v + k.load(lists + (part * PART_BYTES + 8 * word), "i64")
        return sum_.v

    with k.if_(has_k | has_p | (least > 0)):
        with k.if_(has_work):
            k.fill(mine, 0, 64)
            my_blocks(lambda b: _do(k, "sample_tally", _emit_tally, *allowed, b, top, inverse, mine))
        meet()
        cut = k.i64(NEVER >> 32)
        for i in reversed(range(len(CUTS))):
            cut = k.select(of_all_parts(2 + i) <= MAX_LISTED, CUTS[i], cut)
        my_blocks(lambda b: _do(k, "sample_list", _emit_list, *allowed, b, top, inverse, cut, mine))
        meet()
        total.v = of_all_parts(1)
        k.call("sample_list_sums", _emit_list_sums, lists, parts, cut, state)
        enough = k.select(has_k, s[0] >= top_k, k.select(has_p, s[1] >= needed(total.v), least >= cut))
        is_whole = cut.eq(1)
        on_lists.v = (enough | is_whole) & (of_all_parts(0) <= MAX_LISTED)

    with k.if_else(on_lists.v) as (short, long):
        with short, k.if_(leader):

            def list_threshold(count: Value, weight: Value) -> None:
                k.call("sample_list_threshold", _emit_list_threshold, lists, parts, count, weight, state)
                threshold.v = s[0]

            with k.if_(has_k & (top_k < s[0])):
                list_threshold(top_k, k.i64(NEVER))
                ties.v = top_k - s[1]
                total.v = s[2] + ties.v * s[0]
            with k.if_(has_p):
                need = needed(total.v)
                list_threshold(k.i64(NEVER), need)
                ties.v = (need - s[2] + (s[0] - 1)) // s[0]
            apply_min_p()
            k.call("sample_list_sums", _emit_list_sums, lists, parts, threshold.v + 1, state)
            r = _multiply_high(random_bits, s[1] + ties.v * threshold.v)
            token.v = _value(k, "sample_list_locate", _emit_list_locate, "i64", lists, parts, threshold.v, ties.v, r)
        with long:

            def select(first_buffer: int, target: Callable[[], None], crossing: Callable[[Value], Value]) -> None:
                """Set threshold, ties and total of what is kept. ``target()`` sets s[2] or s[3] once the total is
                known; ``crossing(threshold)``: how many of the equal ones are kept."""
                s[0], s[1], s[2], s[3], s[4] = 0, 0, NEVER, NEVER, 0
                prefix = k.var(k.i64(0))
                for level, (known, shift) in enumerate(((31, 20), (20, 10), (10, 0))):
                    buffer = (first_buffer + level) % 2
                    with k.if_(s[4] >= 0):
                        histogram(buffer, prefix.v, known, shift)
                        at_buffer = histograms + buffer * HISTOGRAM_BYTES
                        if level == 0:
                            target()
                        k.call("sample_cross", _emit_cross, at_buffer, parts, state)
                        prefix.v = (prefix.v << (known - shift if level else 0)) + s[4]
                with k.if_else(s[4] >= 0) as (crossed, everything):
                    with crossed:
                        threshold.v = prefix.v
                        ties.v = crossing(prefix.v)
                        total.v = s[1] + ties.v * prefix.v
                    with everything:
                        total.v = s[1]

            with k.if_(has_k):
                select(0, lambda: s.store(2, top_k), lambda w: top_k - s[0])
            with k.if_(has_p):
                select(1, lambda: s.store(3, needed(total.v)), lambda w: (s[3] - s[1] + (w - 1)) // w)
            apply_min_p()

            # Draw: the block, then the token.
            my_blocks(
                lambda b: _do(
                    k, "sample_kept", _emit_kept, *allowed, b, top, inverse, threshold.v, at("weight").at(b)
                )
            )  # fmt: skip
            meet()
            with k.if_(leader):
                left, total_kept = k.var(ties.v), k.var(k.i64(0))
                with k.loop(0, blocks) as b:
                    equal = k.min(left.v, at("ties")[b])
                    left.v = left.v - equal
                    at("weight")[b] = at("weight")[b] + equal * threshold.v
                    at("ties")[b] = equal
                    total_kept.v = total_kept.v + at("weight")[b]
                rest, block = k.var(_multiply_high(random_bits, total_kept.v)), k.var(k.i64(0))
                with k.forever() as leave_if:
                    here = at("weight")[block.v]
                    leave_if(rest.v < here)
                    rest.v = rest.v - here
                    block.v = block.v + 1
                token.v = _value(
                    k, "sample_locate", _emit_locate, "i64", *allowed, block.v, top, inverse,
                    threshold.v, at("ties")[block.v], rest.v,
                )  # fmt: skip


def _ceil(k: Kernel, x: Value) -> Value:
    """A non-negative f64 up to an i64."""
    return k.intrinsic("llvm.ceil.f64", "f64", 1, x).to_int("i64")


@kernel(logits="ptr", stride="i64", vocab="i64", area="ptr", shares="i64")
def sample(k: Kernel) -> None:
    a, h, c = k.arg, k.header, k.context
    rows, threads, me = h.R, c.num_threads, c.thread

    def one(row: Value, area: Value, part: Value, parts: Value, shared: Value, max_parts: int) -> None:
        logits = a.logits + row * a.stride * 4
        histograms = area + AREA_BYTES
        originals = histograms + max_parts * PART_BYTES
        k.call("sample_row", _emit_row, k.ctx, logits, a.vocab, originals, row, area, histograms, part, parts, shared)

    assert AREA_BYTES + PART_BYTES + 4 * MAX_ORIGINALS <= abi.SCRATCH_BYTES
    rest = rows % threads
    together = k.select(a.shares.ne(0) & (threads > 1) & (rest * 2 <= threads), rest, 0)
    zero, unit = k.i64(0), k.i64(1)
    with k.work_items(rows - together) as row:
        one(row, k.scratch, zero, unit, zero, 1)
    with k.loop(rows - together, rows) as row:
        one(row, a.area, me, k.min(threads, MAX_PARTS), unit, MAX_PARTS)
        k.barrier()


KERNELS: Sequence[KernelDef] = (sample,)
