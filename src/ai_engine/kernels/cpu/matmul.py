"""Matrix times tokens for every stored type: out[T, N] (= | +=) x[T, K] W[N, K]^T (+ bias).

    KERNELS                          one KernelDef per stored type, "matmul_q4_1" ...
    bind(spec, lanes, ...)           -> (kernel name, values of its argument record)
    emit_dequantize_row(k, ...)      one logical row of a packed weight as f32, for embeddings

Owns the loops, tiles and integer arithmetic. It does not own the layouts that it reads (pack.py for weights, formats.py
for activations) nor when it is called; every thread of a step calls it with the same arguments, and row blocks are
shared out by the work counter.

Numbers. Quantised weights multiply s8 activations: an exact i32 sum per group of 32 columns (16 for Q3_K, Q6_K), then
acc = fma(float(sum), step_w * scale_x, acc), and where the format has mins acc = fma(min_w, scale_x * sum_x, acc),
group by group in the order of K. Offsets (q - 8 ...) are folded in integers. Last come the outliers of formats.py, in
the order of K: acc = fma(step_w * (q - offset), x, acc); their mins are in scale_x * sum_x already. A lane is a row, so
nothing is summed across lanes, and a result depends on nothing but its row and its token: not on the tile, the chunk or
the thread. Where K is cut for the cache (AVX2) accumulators start from memory.

Three ways to an exact sum, by target:
    vnni      vpdpbusd on u8 x s8; an offset of 128 is undone by starting from the record's ``offset``
    maddubs   AVX2's vpmaddubsw: i16 sums of pairs, added in i16 as far as they fit (4-bit: all eight, at most 30,480;
              5-bit: four, 31,496; 6-bit: two, 32,004), then vpmaddwd; signed weights move their sign to x
    sdot      NEON's s8 x s8

AMX was tried and left out. Sums must leave the tile registers after every 32 columns to meet their scales, and vector
work does not overlap with tile instructions: bit-equal, but 215 against 198 GMAC/s at 128 tokens, and slower below 48.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ai_engine.kernels.cpu import abi, registry
from ai_engine.kernels.cpu.formats import CODEBOOK, GROUP, QUANTISED, ActLayout
from ai_engine.kernels.cpu.lang import Kernel, KernelDef, Number, Record, Target, Value, Var
from ai_engine.kernels.cpu.pack import PackedLayout
from ai_engine.ports.kernels import WeightSpec
from ai_engine.ports.model import DType

ARGS = Record(
    x="ptr",  # act buffer, or f32[T, x_stride] for float weights
    x_stride="i64",  # floats from row to row; 0 for act
    w="ptr",  # packed weight
    out="ptr",  # f32, at the first column written
    out_stride="i64",  # floats from row to row
    bias="ptr",  # f32[N] or 0
    cols="i64",  # K
    rows="i64",  # N
    accumulate="i64",  # 1: add to out
    logits="i64",  # 1: R rows, 0: T rows
    **registry.fields("matmul"),  # see registry.py
)


DEFAULT_CHOICES = registry.Registry()


def kernel_name(dtype: DType, view: str = "") -> str:
    return f"matmul_{dtype.value.lower()}{'_' if view else ''}{view}"


def bind(
    spec: WeightSpec,
    lanes: int,
    *,
    x: int,
    w: int,
    out: int,
    out_stride: int,
    x_stride: int = 0,
    bias: int = 0,
    accumulate: bool = False,
    logits: bool = False,
    view: str = "",
    choices: registry.Registry = DEFAULT_CHOICES,
) -> tuple[str, dict[str, Number]]:
    """The kernel and its arguments for a packed weight; addresses in bytes, strides in floats. ``view``: of a split
    weight, the default is "split" (exact) and "screen" the rough product of the screened rows."""
    layout = PackedLayout.of(spec, lanes)
    assert not (bias and accumulate), spec
    assert layout.is_float or spec.cols <= MAX_COLS, spec
    return kernel_name(spec.dtype, view or ("split" if spec.screened else "")), {
        "x": x,
        "x_stride": x_stride,
        "w": w,
        "out": out,
        "out_stride": out_stride,
        "bias": bias,
        "cols": spec.cols,
        "rows": spec.rows,
        "accumulate": int(accumulate),
        "logits": int(logits),
        **choices.values("matmul", spec.dtype.value, registry.matmul_shape(spec.rows, spec.cols)),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Decoding: 32 columns of `lanes` rows as eight vectors of codes, vector j holding columns 4j..4j+3 of each row


@dataclass(frozen=True)
class Format:
    """How a quantised type's codes become bytes that multiply s8. ``shift``: codes are taken 2^shift times as large, so
    that every offset is 128 and one stored sum serves all (vnni only); the step is divided by it, exactly."""

    dtype: DType
    view: str = ""
    """Of a split Q8_0: "split" reads both planes; "screen" the high nibbles h alone, as 16 h - 120.5 instead of the
    byte 16 h + l - 128."""

    @property
    def k_quant(self) -> bool:
        return self.dtype in (DType.Q3_K, DType.Q4_K, DType.Q5_K, DType.Q6_K)

    @property
    def halves(self) -> bool:
        """Scales are of 16 columns, signed; no mins. The offset is 32 with the shift."""
        return self.dtype in (DType.Q3_K, DType.Q6_K)

    @property
    def has_min(self) -> bool:
        return self.view == "screen" or self.dtype in (DType.Q4_1, DType.Q5_1, DType.Q4_K, DType.Q5_K)

    @property
    def signed(self) -> bool:
        """Codes are signed bytes, as stored or from a codebook; on vnni they are taken 128 larger."""
        return self.view != "screen" and (self.dtype is DType.Q8_0 or self.dtype in CODEBOOK)

    @property
    def offset(self) -> int:
        return 128 if self.signed else {DType.Q4_0: 8, DType.Q5_0: 16, DType.Q3_K: 4, DType.Q6_K: 32}.get(self.dtype, 0)

    @property
    def bits(self) -> int:
        return 4 if self.view == "screen" else int(self.dtype.value.removeprefix("I")[1])

    @property
    def whole_bytes(self) -> bool:
        """Codes are whole bytes in memory."""
        return self.dtype is DType.Q8_0 and not self.view

    @property
    def name(self) -> str:
        return kernel_name(self.dtype, self.view)

    def layout(self, lanes: int) -> PackedLayout:
        """For steps and units, which no size enters."""
        return PackedLayout(self.dtype, 1, 256, lanes, bool(self.view))

    @property
    def shift(self) -> int:
        return {DType.Q4_0: 4, DType.Q5_0: 3, DType.Q3_K: 3}.get(self.dtype, 0)


def _dwords(k: Kernel, byte: int) -> int:
    """The byte in all four bytes of an i32."""
    word = byte * 0x01010101
    return word - (1 << 32) if word >= 1 << 31 else word


def _move(x: Value, left: int) -> Value:
    return x << left if left > 0 else x.lshr(-left) if left < 0 else x


@dataclass(frozen=True)
class Body:
    """A row block's codes of one group; of a split format the low nibbles are at ``low``."""

    at: Value
    low: Value


def _nibble_pair(k: Kernel, f: Format, where: Body, i: int, shift: int) -> tuple[Value, Value]:
    """Codes of columns 4i.. and 16+4i.. as i32 vectors, times 2^shift."""
    n, body = k.lanes, where.at
    if f.bits == 3:
        third = k.load(body + 8 * n, "i32", n)
        two, bit = _dwords(k, 3 << shift), _dwords(k, 4 << shift)
        pairs = [_move(k.load(body + 4 * n * h, "i32", n), shift - 2 * i) & two for h in range(2)]
        low, high = (c | (_move(third, 2 + shift - j) & bit) for c, j in zip(pairs, (i, i + 4), strict=True))
        return low, high
    planes = {5: 4 * n, 6: 8 * n}.get(f.bits, 0)
    v = k.load(body + (planes + 4 * n * i), "i32", n)
    if f.view == "split":
        low, nibble = k.load(where.low + 4 * n * i, "i32", n), _dwords(k, 15)
        return (low & nibble) | ((v & nibble) << 4), (low.lshr(4) & nibble) | (v & ~nibble)
    mask = _dwords(k, 15 << shift)
    low, high = _move(v, shift) & mask, _move(v, shift - 4) & mask
    if f.bits == 5:
        fifth = k.load(body, "i32", n)
        bit = _dwords(k, 1 << (4 + shift))
        low, high = (c | (_move(fifth, 4 + shift - j) & bit) for c, j in ((low, i), (high, i + 4)))
    elif f.bits == 6:
        bits = _dwords(k, 0x30)
        for_low, for_high = k.load(body, "i32", n), k.load(body + 4 * n, "i32", n)
        low |= _move(for_low, 4 - 2 * i) & bits
        high |= _move(for_high, 4 - 2 * i) & bits
    return low, high


def _look_up(k: Kernel, f: Format, index: Value, plus: int = 0) -> Value:
    """The codebook's entry, plus ``plus`` modulo 256, for each byte 0..15 of i8 vectors."""
    table = [(entry + plus + 128) % 256 - 128 for entry in CODEBOOK[f.dtype]]
    return k.shuffle_bytes(k.const_vec("i8", table * (index.lanes // 16)), index)


def _signed_codes(k: Kernel, f: Format, body: Body) -> Iterator[tuple[int, Value]]:
    """(j, i8 codes of columns 4j..) of a signed format, each made when it is asked for."""
    n = k.lanes
    if f.whole_bytes:
        for j in range(8):
            yield j, k.load(body.at + 4 * n * j, "i8", 4 * n)
        return
    for i in range(4):
        for h, code in enumerate(_nibble_pair(k, f, body, i, 0)):
            signed = (code ^ _dwords(k, 0x80)).bitcast("i8") if f.view else _look_up(k, f, code.bitcast("i8"))
            yield 4 * h + i, signed


def _codes(k: Kernel, f: Format, body: Body, mode: str) -> list[Value]:
    """All eight code vectors, i8, for a four-way dot product: unsigned for vnni, signed for sdot."""
    n = k.lanes
    if f.whole_bytes:
        words = [k.load(body.at + 4 * n * j, "i32", n) for j in range(8)]
        if mode == "vnni":
            words = [w ^ _dwords(k, 0x80) for w in words]
        return [w.bitcast("i8") for w in words]
    pairs = [_nibble_pair(k, f, body, i, f.shift if mode == "vnni" else 0) for i in range(4)]
    codes = [pair[0].bitcast("i8") for pair in pairs] + [pair[1].bitcast("i8") for pair in pairs]
    if f.dtype in CODEBOOK:
        return [_look_up(k, f, c, 128 if mode == "vnni" else 0) for c in codes]
    if mode == "sdot" and f.offset:
        codes = [c ^ -128 if f.signed else c - f.offset for c in codes]
    return codes


# ---------------------------------------------------------------------------------------------------------------------
# Scales


@dataclass
class Scales:
    """Of one group of 32 columns of a row block."""

    step: Value  # f32: multiplies the integer sum
    low: Value | None = None  # f32: multiplies dsum
    halves: tuple[Value, Value] | None = None  # i32 scales of 16 columns; step is then d alone


def _half(k: Kernel, ptr: Value) -> Value:
    return k.load(ptr, "f16", k.lanes).to_f32()


@contextmanager
def _groups(
    k: Kernel, f: Format, weights: Sequence[Value], body_offset: Value, groups: Value, first: Value, last: Value,
    mode: str,
) -> Iterator[tuple[Value, list[Body], list[Callable[[], Scales]]]]:  # fmt: skip
    """Loop over groups of 32 columns: (group, each row block's body, each row block's scales when asked for)."""
    n = k.lanes
    layout = f.layout(n)
    factor = 2.0 ** -(f.shift if mode == "vnni" else 0)

    def bodies(g: Value) -> list[Body]:
        starts = [w + body_offset + g * layout.plane_step for w in weights]
        return [Body(at, at + groups * layout.plane_step if f.view == "split" else at) for at in starts]

    def simple(head: Value) -> Callable[[], Scales]:
        def load() -> Scales:
            step = _half(k, head)
            if f.view == "screen":
                return Scales(step * 16.0, step * -120.5)
            if factor != 1.0:
                step = step * factor
            return Scales(step, _half(k, head + 2 * n) if f.has_min else None)

        return load

    def within(head: Value, sub: Value, d: Value, dmin: Value | None) -> Callable[[], Scales]:
        def load() -> Scales:
            if f.halves:
                at = head + 2 * n + sub * (2 * n)
                first_half, second_half = (k.load(at + n * h, "i8", n).sext("i32") for h in range(2))
                return Scales(d, None, (first_half, second_half))
            assert dmin is not None
            at = head + 4 * n + sub * (2 * n)
            scale, low = (k.load(at + n * h, "i8", n).zext("i32").to_f32() for h in range(2))
            return Scales(d * scale, -(dmin * low))

        return load

    if not f.k_quant:
        with k.loop(first, last) as g:
            yield g, bodies(g), [simple(w + g * layout.head_step) for w in weights]
        return
    with k.loop(first.lshr(3), last.lshr(3)) as s:
        heads = [w + s * layout.head_step for w in weights]
        steps = [_half(k, head) * factor if factor != 1.0 else _half(k, head) for head in heads]
        lows = [_half(k, head + 2 * n) if f.has_min else None for head in heads]
        with k.loop(0, 8) as sub:
            g = (s << 3) + sub
            yield g, bodies(g), [within(h, sub, d, m) for h, d, m in zip(heads, steps, lows, strict=True)]


# ---------------------------------------------------------------------------------------------------------------------
# The tile: R row blocks x C tokens over a range of K


@dataclass(frozen=True)
class Tile:
    tokens: int
    blocks: int = 1
    staged: bool = False  # activations repeated in scratch memory, a range of K at a time

    @property
    def name(self) -> str:
        return f"{self.blocks}x{self.tokens}{'_staged' if self.staged else ''}"


def _mode(target: Target) -> str:
    return "vnni" if target.vnni else "maddubs" if target.x86 else "sdot"


class _Tokens:
    """The activations of one group for C tokens. ``staged``: dwords already repeated to a whole vector (maddubs)."""

    def __init__(self, k: Kernel, records: list[Value], staged: Value | None) -> None:
        self.k, self.records, self.staged = k, records, staged

    def dword(self, c: int, j: int) -> Value:
        """Columns 4j..4j+3 of token c in every lane, i8."""
        k = self.k
        if self.staged is not None:
            at = self.staged + (c * 8 + j) * 4 * k.lanes
            return k.load(at, "i8", 4 * k.lanes, align=4 * k.lanes)
        return k.splat(k.load(self.records[c] + 4 * j, "i32"), k.lanes).bitcast("i8")

    def f32(self, c: int, field: int) -> Value:
        return self.k.splat(self.k.load(self.records[c] + field, "f32"), self.k.lanes)

    def i32(self, c: int, field: int) -> Value:
        return self.k.splat(self.k.load(self.records[c] + field, "i32"), self.k.lanes)


def _finish(k: Kernel, acc: Var, total: Value, s: Scales, tokens: _Tokens, c: int) -> None:
    acc.v = k.fma(total, s.step * tokens.f32(c, ActLayout.SCALE), acc.v)
    if s.low is not None:
        acc.v = k.fma(s.low, tokens.f32(c, ActLayout.DSUM), acc.v)


def _dot_group(
    k: Kernel, f: Format, mode: str, bodies: list[Body], scales: list[Callable[[], Scales]], tokens: _Tokens,
    accs: list[list[Var]],
) -> None:  # fmt: skip
    """One group on targets with a four-way dot product: all codes decoded once, then token after token."""
    n = k.lanes
    codes = [_codes(k, f, body, mode) for body in bodies]
    loaded = [load() for load in scales]
    dot = k.dot_u8s8 if mode == "vnni" else k.dot_s8s8
    for c in range(len(accs[0])):
        if f.halves:
            k.keep_order()  # else LLVM runs several tokens side by side and spills 60 times: 133 -> 168 GMAC/s
        for r in range(len(bodies)):
            s = loaded[r]
            if s.halves is not None:
                parts = []
                for h in range(2):
                    part = tokens.i32(c, ActLayout.OFFSET16 + 4 * h) if mode == "vnni" else k.i32(0, n)
                    for j in range(4 * h, 4 * h + 4):
                        part = dot(part, codes[r][j], tokens.dword(c, j))
                    parts.append(part.to_f32())
                # |part| <= 2^16 and |scale| <= 2^7: both products and their sum are exact in f32
                total = k.fma(parts[1], s.halves[1].to_f32(), parts[0] * s.halves[0].to_f32())
            else:
                start = tokens.i32(c, ActLayout.OFFSET) if f.offset and mode == "vnni" else k.i32(0, n)
                for j in range(8):
                    start = dot(start, codes[r][j], tokens.dword(c, j))
                total = start.to_f32()
            _finish(k, accs[r][c], total, s, tokens, c)


def _maddubs_group(
    k: Kernel, f: Format, bodies: list[Body], scales: list[Callable[[], Scales]], tokens: _Tokens,
    accs: list[list[Var]],
) -> None:  # fmt: skip
    """One group on AVX2: two code vectors at a time, each used for all tokens, so that C = 4 fits 16 registers."""
    n, count = k.lanes, len(accs[0])
    for r, body in enumerate(bodies):
        totals: list[Value] = []
        s: Scales | None = None
        if f.signed:
            totals = [k.i32(0, n)] * count
            for j, w in _signed_codes(k, f, body):
                size = k.abs(w)
                for c in range(count):
                    x = k.sign_i8(tokens.dword(c, j), w)
                    totals[c] += k.madd_ones(k.maddubs(size, x))
        elif f.halves:
            s = scales[r]()
            assert s.halves is not None
            twice = [((h & 0xFFFF) | (h << 16)).bitcast("i16") for h in s.halves]
            minus = (((s.halves[0] * -f.offset) & 0xFFFF) | (s.halves[1] << 16) * -f.offset).bitcast("i16")
            totals = [k.madd(minus, tokens.i32(c, ActLayout.SUM16).bitcast("i16")) for c in range(count)]
            for i in (0, 2):
                pairs = [_nibble_pair(k, f, body, i + d, 0) for d in range(2)]
                for h in range(2):
                    codes = [pair[h].bitcast("i8") for pair in pairs]
                    for c in range(count):
                        both = [k.maddubs(codes[d], tokens.dword(c, 4 * h + i + d)) for d in range(2)]
                        totals[c] += k.madd(both[0] + both[1], twice[h])
        else:
            wide = 4 if f.bits == 4 else 2  # nibble vectors whose sums fit i16
            for start in range(0, 4, wide):
                sums: list[Value | None] = [None] * count
                for i in range(start, start + wide):
                    for h, code in enumerate(_nibble_pair(k, f, body, i, 0)):
                        for c in range(count):
                            product = k.maddubs(code.bitcast("i8"), tokens.dword(c, 4 * h + i))
                            before = sums[c]
                            sums[c] = product if before is None else before + product
                widened = [k.madd_ones(x) for x in sums if x is not None]
                totals = [a + b for a, b in zip(totals, widened, strict=True)] if totals else widened
            if f.offset:
                by = {8: 4, 16: 3}[f.offset]
                totals = [t + tokens.i32(c, ActLayout.OFFSET).ashr(by) for c, t in enumerate(totals)]
        s = s or scales[r]()
        for c in range(count):
            _finish(k, accs[r][c], totals[c].to_f32(), s, tokens, c)


STAGE_GROUPS = 16
STAGED_TOKENS = 8
"""AVX2 stages 512 columns of a token tile with every dword repeated over the vector (4 tokens: 16 KB, half of L1), so
that vpmaddubsw takes them from memory: 12 to 18 % faster than broadcasting in the loop. Below 8 tokens it costs more
than it gives: weights are then best read in one run."""


def _emit_tile(k: Kernel, f: Format, tile: Tile, p: dict[str, Value]) -> None:
    """R row blocks at a time x C tokens; see `_tile` for the parameters."""
    n, mode, num_tokens, num_blocks = k.lanes, _mode(k.target), tile.tokens, tile.blocks
    assert num_blocks == 1, tile  # each row block's outliers follow it
    stage = k.scratch if tile.staged else None
    outliers = _list_outliers(k, f, p, num_tokens)
    groups = p["cols"].lshr(5)
    layout = f.layout(n)
    head_bytes = p["cols"].lshr(8 if f.k_quant else 5) * layout.head_step
    body_offset = (head_bytes + 63) & -64
    body_end = body_offset + groups * layout.body_step
    block_bytes = (body_end + 63) & -64
    accs = [[k.var(k.f32(0, n)) for _ in range(num_tokens)] for _ in range(num_blocks)]

    def run(first: Value, last: Value, is_first: Value, num_outliers: Value) -> None:
        if stage is not None:
            _stage(k, p["x"], stage, first, last, num_tokens)
        with k.loop(0, p["blocks"], num_blocks) as b:
            weights = [p["w"] + (b + r) * block_bytes for r in range(num_blocks)]
            outs = [p["out"] + (b + r) * (4 * n) for r in range(num_blocks)]
            valid = p["rows"] - (b + num_blocks - 1) * n  # of the last row block; the others are whole
            _start(k, accs, outs, valid, is_first, p["bias"], b, p["out_stride"], p["accumulate"])
            with _groups(k, f, weights, body_offset, groups, first, last, mode) as (g, bodies, scales):
                tiles = [p["x"] + groups * (256 * q) + g * 256 for q in range(-(-num_tokens // 4))]
                records = [tiles[c // 4] + (c % 4) * 64 for c in range(num_tokens)]
                staged = None if stage is None else stage + (g - first) * (num_tokens * 32 * n)
                tokens = _Tokens(k, records, staged)
                head_step = layout.head_step // (8 if f.k_quant else 1)
                if stage is None and f.view != "screen":
                    step = layout.body_step + head_step
                    _prefetch(k, [w + (body_offset + p["ahead"]) + g * step for w in weights], step)
                else:  # this range of columns of the next row block
                    _prefetch(k, [body.at + block_bytes for body in bodies], layout.plane_step)
                    _prefetch(k, [w + block_bytes + g * head_step for w in weights], head_step)
                if mode == "maddubs":
                    _maddubs_group(k, f, bodies, scales, tokens, accs)
                else:
                    _dot_group(k, f, mode, bodies, scales, tokens, accs)
            _store(k, accs, outs, valid, p["out_stride"])
            before = b & (OUTLIER_BLOCKS - 1)  # row blocks of this batch; its last one adds the outliers
            with k.if_((num_outliers > 0) & (before.eq(OUTLIER_BLOCKS - 1) | (b + 1).eq(p["blocks"]))):
                start = b - before
                w, out, rows = p["w"] + start * block_bytes, p["out"] + start * (4 * n), p["rows"] - start * n
                _add_outliers(k, f, w, block_bytes, out, before + 1, rows, groups * num_tokens, num_outliers)

    if stage is None:
        run(k.i64(0), groups, k.const(1, "i1"), outliers)
    else:
        with k.loop(0, groups, STAGE_GROUPS) as first:
            last = k.min(first + STAGE_GROUPS, groups)
            run(first, last, first.eq(0), k.select(last.eq(groups), outliers, 0))


def _prefetch(k: Kernel, starts: list[Value], nbytes: int) -> None:
    """Into L2. Step by step, 8 KB ahead, this walks over a row block's head and body alike, each line once. Q4_1 at one
    token: codes alone, 1 KB ahead into L1, 11.6 GB/s; all, 4 KB ahead into L2, 14.3 (AVX2: 12.0 and 17.2), where memory
    gives 14 to 17. From a large L3: none 13.1, 1 KB into L1 18.9, 4 KB into L2 27.1, 8 KB 28.8, where it gives 29; to
    stop at an item's end loses 10 to 25 %. At 16 tokens it hides the reading behind the arithmetic: 114 to 149 GMAC/s.
    """
    for start in starts:
        for line in range(0, nbytes, 64):
            k.prefetch(start + line, locality=2)


def _stage(k: Kernel, x: Value, stage: Value, first: Value, last: Value, num_tokens: int) -> None:
    with k.loop(first, last) as g:
        source, target = x + g * 256, stage + (g - first) * (num_tokens * 32 * k.lanes)
        for c in range(num_tokens):
            for j in range(8):
                word = k.splat(k.load(source + (c * 64 + 4 * j), "i32"), k.lanes)
                k.store(target + (c * 8 + j) * 4 * k.lanes, word, align=4 * k.lanes)


def _start(
    k: Kernel, accs: list[list[Var]], outs: list[Value], valid: Value, is_first: Value, bias: Value, b: Value,
    out_stride: Value, accumulate: Value,
) -> None:  # fmt: skip
    """Accumulators start from out (accumulating, or later chunks of K), from the bias, or from 0."""
    n = k.lanes
    with k.if_else(accumulate.ne(0) | ~is_first) as (from_memory, fresh):
        with from_memory:
            for r, (row, out) in enumerate(zip(accs, outs, strict=True)):
                for c, acc in enumerate(row):
                    at = out + out_stride * (4 * c)
                    acc.v = _load_rows(k, at, valid if r == len(accs) - 1 else None)
        with fresh, k.if_else(bias.ptr_to_int().ne(0)) as (biased, zero):
            with biased:
                for r, row in enumerate(accs):
                    start = _load_rows(k, bias + (b + r) * (4 * n), valid if r == len(accs) - 1 else None)
                    for acc in row:
                        acc.v = start
            with zero:
                for row in accs:
                    for acc in row:
                        acc.v = k.f32(0, n)


def _load_rows(k: Kernel, at: Value, valid: Value | None) -> Value:
    if valid is None:
        return k.load(at, "f32", k.lanes)
    return k.masked_load(at, "f32", k.lane_mask(k.min(valid, k.lanes), k.lanes))


def _store(k: Kernel, accs: list[list[Var]], outs: list[Value], valid: Value, out_stride: Value) -> None:
    """Whole vectors, but a mask at the last rows (a masked store is slow on AMD: only where needed)."""
    n = k.lanes
    for r, (row, out) in enumerate(zip(accs, outs, strict=True)):
        if r < len(accs) - 1:
            for c, acc in enumerate(row):
                k.store(out + out_stride * (4 * c), acc.v)
            continue
        with k.if_else(valid >= n) as (whole, partial):
            with whole:
                for c, acc in enumerate(row):
                    k.store(out + out_stride * (4 * c), acc.v)
            with partial:
                mask = k.lane_mask(valid, n)
                for c, acc in enumerate(row):
                    k.masked_store(out + out_stride * (4 * c), acc.v, mask)


# ---------------------------------------------------------------------------------------------------------------------
# Outliers: single columns of a token that are multiplied exactly, after all groups

_COLUMN = {name: 4 * i for i, name in enumerate(("step", "sub_step", "code", "high", "shift", "high_shift"))}
"""Of a column with outliers, i32: where a row block has the step (of K-quants the super-block's, and its factor), the
dwords with the code and its high bits, and by how much they are shifted."""
_COLUMN_BYTES = 32
_USE = {"out": 0, "column": 4, "x": 8}
"""Of an outlier: the byte offset of its token's row in out, the number of its column (i32), and the value (f32)."""
_USE_BYTES = 16
OUTLIER_BLOCKS = 4
"""Row blocks whose outliers are added at once: the list is read once for all, and branches are foreseen more often."""
_WEIGHT_BYTES = 64 * OUTLIER_BLOCKS
_SEEN_AT = 32 << 10  # in scratch memory, behind what AVX2 stages
_LISTS_AT = _SEEN_AT + 8 * GROUP
MAX_COLS = (abi.SCRATCH_BYTES - _LISTS_AT - 128) // (_COLUMN_BYTES + _USE_BYTES + _WEIGHT_BYTES) // 16 * GROUP
"""Every group of 32 columns of 16 tokens may have an outlier."""


def _lists(k: Kernel, capacity: Value) -> tuple[Value, Value, Value]:
    """Columns, uses, and weights of columns, in scratch memory."""
    columns = k.scratch + _LISTS_AT
    weights = columns + ((capacity * _COLUMN_BYTES + 63) & -64)
    return columns, weights + capacity * _WEIGHT_BYTES, weights


def _list_outliers(k: Kernel, f: Format, p: dict[str, Value], num_tokens: int) -> Value:
    """Write a token tile's outliers to scratch memory, in the order of groups: distinct columns, and uses of them. How
    many: uses, and above them (<< 32) columns. No branch depends on where outliers are, which could not be foreseen."""

    def emit(k: Kernel, ctx: Value, cols: Value, num_tokens: Value, num_found: Value, out_stride: Value) -> Value:
        n = k.lanes
        columns, uses, weights = _lists(k, cols.lshr(5) * num_tokens)
        layout = f.layout(n)
        body_offset = (cols.lshr(8 if f.k_quant else 5) * layout.head_step + 63) & -64
        found = k.array(weights, "i64")  # there are no weights yet
        seen, num_columns = k.array(k.scratch + _SEEN_AT, "i64"), k.var(k.i64(0))  # of each column: group, number
        k.fill(seen.ptr, 0xFF, 8 * GROUP)
        with k.loop(0, num_found) as i:
            word = found[i]
            column, c, g = word.lshr(32) & 31, word.lshr(37) & 15, word.lshr(41)
            byte, quad, half = (column & 3) << 3, column.lshr(2) & 3, column.lshr(4)
            body = body_offset + g * layout.plane_step
            fields = {"step": (g.lshr(3) if f.k_quant else g) * layout.head_step}
            if f.halves:
                fields["sub_step"] = fields["step"] + ((g & 7) * (2 * n) + half * n + 2 * n)
            elif f.k_quant:
                fields["sub_step"] = fields["step"] + ((g & 7) * (2 * n) + 4 * n)
            if f.whole_bytes:
                fields |= {"code": body + column.lshr(2) * (4 * n), "shift": 24 - byte}
            elif f.view == "split":
                at, shift = body + quad * (4 * n), byte + half * 4
                fields |= {"high": at, "high_shift": shift}
                fields |= {"code": at + cols.lshr(5) * layout.plane_step, "shift": shift}
            elif f.bits == 3:
                fields |= {"code": body + half * (4 * n), "shift": byte + quad * 2}
                fields |= {"high": body + 8 * n, "high_shift": byte + column.lshr(2)}
            else:
                at = quad * (4 * n) + {5: 4 * n, 6: 8 * n}.get(f.bits, 0)
                fields |= {"code": body + at, "shift": byte + half * 4}
            if f.bits == 5:
                fields |= {"high": body, "high_shift": byte + column.lshr(2)}
            elif f.bits == 6:
                fields |= {"high": body + half * (4 * n), "high_shift": byte + quad * 2}
            last = num_columns.v
            for name, value in fields.items():  # of the next column, if this is a new one
                k.store(columns + last * _COLUMN_BYTES + _COLUMN[name], value.trunc("i32"))
            is_new = seen[column].lshr(32).ne(g)
            number = k.select(is_new, (g << 32) + last, seen[column])
            seen[column] = number
            num_columns.v = last + is_new.zext("i64")
            use = uses + i * _USE_BYTES
            for name, value in {"out": c * out_stride * 4, "column": number, "x": word}.items():
                k.store(use + _USE[name], value.trunc("i32"))
        return num_found + (num_columns.v << 32)

    found = _find_outliers(k, p["x"], p["cols"].lshr(5), num_tokens)
    name = f"{f.name}_list"
    count = k.call(name, emit, k.ctx, p["cols"], k.i64(num_tokens), found, p["out_stride"], result="i64")
    assert count is not None
    return count


def _find_outliers(k: Kernel, x: Value, groups: Value, num_tokens: int) -> Value:
    """Value, column (<< 32), token (<< 37) and group (<< 41) of every outlier to where weights will be; how many."""
    together = min(num_tokens, ActLayout.TILE)

    def emit(k: Kernel, ctx: Value, x: Value, groups: Value, num_tokens: Value) -> Value:
        found, count = k.array(_lists(k, groups * num_tokens)[2], "i64"), k.var(k.i64(0))
        with k.loop(0, groups) as g, k.loop(0, num_tokens, together) as first:
            records = x + ActLayout.row_offset(first, groups) + g * 256
            for c in range(together):
                word = k.load(records + (c * 64 + ActLayout.OUTLIER), "i64")
                found[count.v] = word + (((g << 4) + first + c) << 37)
                count.v = count.v + word.trunc("i32").ne(0).zext("i64")
        return count.v

    count = k.call(f"matmul_find_{together}", emit, k.ctx, x, groups, k.i64(num_tokens), result="i64")
    assert count is not None
    return count


def _column_of_weights(k: Kernel, f: Format, w: Value, column: Value) -> Value:
    """One column of a row block, but for the min: step * (code - offset)."""
    n = k.lanes

    def field(name: str) -> Value:
        return k.load(column + _COLUMN[name], "i32")

    def at(name: str) -> Value:
        return w + field(name).zext("i64")

    code = k.load(at("code"), "i32", n)
    if f.whole_bytes:
        code = (code << k.splat(field("shift"), n)).ashr(24)
    else:
        code = code.lshr(k.splat(field("shift"), n)) & (3 if f.bits == 3 else 15)
    if f.dtype in CODEBOOK:
        code = (_look_up(k, f, code.bitcast("i8")).bitcast("i32") << 24).ashr(24)
    if f.bits in (3, 5, 6) or f.view == "split":
        high = k.load(at("high"), "i32", n).lshr(k.splat(field("high_shift"), n))
        code |= (high & {3: 1, 5: 1, 6: 3, 8: 15}[f.bits]) << (2 if f.bits == 3 else 4)
    if f.offset and (f.view or not f.signed):
        code = code - f.offset
    step = _half(k, at("step"))
    if f.view == "screen":
        step = step * 16.0
    if f.k_quant:
        factor = k.load(at("sub_step"), "i8", n)
        step = step * (factor.sext("i32") if f.halves else factor.zext("i32")).to_f32()
    return step * code.to_f32()


def _add_outliers(
    k: Kernel, f: Format, w: Value, block_bytes: Value, out: Value, blocks: Value, valid: Value, capacity: Value,
    count: Value,
) -> None:  # fmt: skip
    """out += weight * x for the listed outliers and ``blocks`` row blocks from ``w`` on, of which ``valid`` rows exist;
    OUTLIER_BLOCKS at most."""

    def emit(
        k: Kernel, ctx: Value, w: Value, block_bytes: Value, out: Value, blocks: Value, valid: Value, capacity: Value,
        count: Value,
    ) -> None:  # fmt: skip
        n = k.lanes
        columns, uses, weights = _lists(k, capacity)

        def add(w: Value, out: Value, blocks: int, mask: Value | None) -> None:
            with k.loop(0, count.lshr(32)) as i:
                for r in range(blocks):
                    weight = _column_of_weights(k, f, w + block_bytes * r, columns + i * _COLUMN_BYTES)
                    k.store(weights + i * _WEIGHT_BYTES + 64 * r, weight, align=64)
            with k.loop(0, count & 0xFFFF_FFFF) as i:
                use = uses + i * _USE_BYTES
                at, column = (k.load(use + _USE[name], "i32").zext("i64") for name in ("out", "column"))
                x = k.splat(k.load(use + _USE["x"], "f32"), n)
                for r in range(blocks):
                    weight = k.load(weights + column * _WEIGHT_BYTES + 64 * r, "f32", n, align=64)
                    to = out + at + 4 * n * r
                    if mask is None:
                        k.store(to, k.fma(weight, x, k.load(to, "f32", n)))
                    else:
                        k.masked_store(to, k.fma(weight, x, k.masked_load(to, "f32", mask)), mask)

        with k.if_else(blocks.eq(OUTLIER_BLOCKS) & (valid >= OUTLIER_BLOCKS * n)) as (whole, rest):
            with whole:
                add(w, out, OUTLIER_BLOCKS, None)
            with rest, k.loop(0, blocks) as b:
                mask = k.lane_mask(k.min(valid - b * n, n), n)
                add(w + block_bytes * b, out + b * (4 * n), 1, mask)

    name = f"{f.name}_outliers"
    k.call(name, emit, k.ctx, w, block_bytes, out, blocks, valid, capacity, count)


# ---------------------------------------------------------------------------------------------------------------------
# Float weights


def _emit_float_tile(k: Kernel, dtype: DType, tile: Tile, p: dict[str, Value]) -> None:
    """acc = fma(w, x, acc), column after column; several row blocks hide the latency of fma."""
    n, num_tokens, num_blocks = k.lanes, tile.tokens, tile.blocks
    layout = PackedLayout(dtype, 1, 1, n)
    block_bytes = (p["cols"] * layout.body_step + 63) & -64
    accs = [[k.var(k.f32(0, n)) for _ in range(num_tokens)] for _ in range(num_blocks)]
    with k.loop(0, p["blocks"], num_blocks) as b:
        weights = [p["w"] + (b + r) * block_bytes for r in range(num_blocks)]
        outs = [p["out"] + (b + r) * (4 * n) for r in range(num_blocks)]
        valid = p["rows"] - (b + num_blocks - 1) * n
        _start(k, accs, outs, valid, k.const(1, "i1"), p["bias"], b, p["out_stride"], p["accumulate"])

        def columns(at: Value, count: int) -> None:
            for d in range(count):
                xs = [k.load(p["x"] + p["x_stride"] * (4 * c) + (at + d) * 4, "f32") for c in range(num_tokens)]
                for r, w in enumerate(weights):
                    value = _float_weight(k, dtype, w + (at + d) * layout.body_step)
                    for c, x in enumerate(xs):
                        accs[r][c].v = k.fma(value, k.splat(x, n), accs[r][c].v)

        whole = p["cols"] & -4
        with k.loop(0, whole, 4) as at:
            if num_tokens <= 4:
                step = layout.body_step
                ahead = p["ahead"] + at * step
                _prefetch(k, [w + ahead for w in weights], 4 * step)
            columns(at, 4)
        with k.loop(whole, p["cols"]) as at:
            columns(at, 1)
        _store(k, accs, outs, valid, p["out_stride"])


def _float_weight(k: Kernel, dtype: DType, at: Value) -> Value:
    if dtype is DType.F32:
        return k.load(at, "f32", k.lanes)
    if dtype is DType.F16:
        return k.load(at, "f16", k.lanes).to_f32()
    return k.bf16_to_f32(k.load(at, "i16", k.lanes))


# ---------------------------------------------------------------------------------------------------------------------
# The kernel: work items x token tiles


def tiles(target: Target, dtype: DType) -> tuple[Tile, ...]:
    """Largest first; a step of T tokens is cut greedily.

    Registers decide: avx512 has 32: 16 accumulators, 8 codes, steps and temporaries; avx2 has 16: 4 + 4 sums.
    """
    if dtype not in QUANTISED:
        if target.name == "avx2":
            return Tile(4, 2), Tile(2, 4), Tile(1, 4)
        return Tile(8, 2), Tile(4, 4), Tile(2, 4), Tile(1, 4)
    few = Tile(4), Tile(3), Tile(2), Tile(1)
    if target.name == "avx512":
        return Tile(16), Tile(8), *few
    if _mode(target) == "maddubs":
        return Tile(4, staged=True), *few
    return few


MIN_LARGEST = 4
"""Tiles of up to so many tokens are always used."""

_PARAMS = ("ctx", "x", "w", "out", "bias", "blocks", "rows", "cols", "out_stride", "x_stride", "accumulate", "ahead")


def call_tile(k: Kernel, f: Format, tile: Tile, values: dict[str, Value]) -> None:
    """Call the tile function: ``blocks`` row blocks (a multiple of R) from ``w`` on, of which ``rows`` rows exist."""

    def emit(k: Kernel, *params: Value) -> None:
        p = dict(zip(_PARAMS, params, strict=True))
        if f.dtype in QUANTISED:
            _emit_tile(k, f, tile, p)
        else:
            _emit_float_tile(k, f.dtype, tile, p)

    k.call(f"{f.name}_{tile.name}", emit, *[values[name] for name in _PARAMS])


def block_bytes_of(f: Format, cols: Value, lanes: int) -> Value:
    """PackedLayout.block_bytes of a run-time number of columns."""
    layout = f.layout(lanes)
    head_bytes = cols.lshr(5 if layout.head_cols == 32 else 8) * layout.head_step
    units = cols if layout.is_float else cols.lshr(5)
    return (((head_bytes + 63) & -64) + units * layout.body_step + 63) & -64


def _token_range(k: Kernel, f: Format) -> tuple[Value, Value]:
    """The rows to do, from a multiple of four: all, but of a screened head the screened ones come first, and the exact
    product is of the others (and of up to three before them, whose logits the screen then replaces)."""
    end = k.select(k.arg.logits.ne(0), k.header.R, k.header.T)
    screened = k.header.screened
    if f.view == "screen":
        return k.i64(0), screened
    if f.view == "split":
        return k.select(screened < end, screened & -ActLayout.TILE, end), end
    return k.i64(0), end


def _emit(k: Kernel, f: Format) -> None:
    n, a, dtype = k.lanes, k.arg, f.dtype
    begin, end = _token_range(k, f)
    num_tokens = end - begin
    layout, block_bytes = f.layout(n), block_bytes_of(f, a.cols, n)
    blocks = (a.rows + (n - 1)) // n
    # Items are chunks of row blocks x spans of tokens. Spans let many tokens have large chunks: each tile of tokens is
    # staged once per chunk. Five eighths of the row blocks go in large chunks, the rest in small ones, so that threads
    # finish together though others use the cores too (10 to 20 % of a decoding step's median on a busy machine).
    span, ahead, largest = (
        registry.pick(a, name, num_tokens) for name in ("span_tokens", "ahead_bytes", "tile_tokens")
    )
    grain = registry.pick(a, "chunk_bytes", num_tokens) // block_bytes
    spans = (num_tokens + (span - 1)) // span
    threads = k.context.num_threads
    share = blocks * spans * 5 // (threads * 8)
    large = k.max(k.min(grain, share), 1)
    num_large = (blocks * 5).lshr(3) // large
    rest = blocks - num_large * large
    small = k.max(k.min(large, rest * spans // (threads * 3)), 1)
    with k.work_items((num_large + (rest + small - 1) // small) * spans) as item:
        chunk = item // spans
        is_large = chunk < num_large
        first = k.select(is_large, chunk * large, num_large * large + (chunk - num_large) * small)
        count = k.min(k.select(is_large, large, small), blocks - first)
        first_token = begin + item % spans * span
        last_token = k.min(first_token + span, end)
        done = k.var(first_token)

        def values(t: Value, block: Value, blocks: Value) -> dict[str, Value]:
            if layout.is_float:
                x = a.x + t * a.x_stride * 4
            else:
                x = a.x + ActLayout.row_offset(t, a.cols.lshr(5))
            return {
                "ctx": k.ctx, "x": x, "w": a.w + block * block_bytes, "out": a.out + (t * a.out_stride + block * n) * 4,
                "bias": k.select(a.bias.ptr_to_int().eq(0), a.bias, a.bias + block * (4 * n)), "blocks": blocks,
                "rows": a.rows - block * n, "cols": a.cols, "out_stride": a.out_stride, "x_stride": a.x_stride,
                "accumulate": a.accumulate, "ahead": ahead,
            }  # fmt: skip

        many = last_token - first_token >= STAGED_TOKENS
        for tile in tiles(k.target, dtype):
            last = k.select(many, last_token, first_token) if tile.staged else last_token
            if tile.tokens > MIN_LARGEST:
                last = k.select(largest >= tile.tokens, last, first_token)
            with k.loop(done.v, last - (tile.tokens - 1), tile.tokens) as t:
                start = k.var(k.i64(0))
                for r in (tile.blocks, 1) if tile.blocks > 1 else (1,):
                    now = (count - start.v) // r * r
                    with k.if_(now > 0):
                        call_tile(k, f, replace(tile, blocks=r), values(t, first + start.v, now))
                    start.v = start.v + now
                done.v = t + tile.tokens


SPLIT, SCREEN = Format(DType.Q8_0, "split"), Format(DType.Q8_0, "screen")


def _definition(f: Format) -> KernelDef:
    return KernelDef(f.name, ARGS, lambda k: _emit(k, f))


KERNELS: tuple[KernelDef, ...] = tuple(_definition(f) for f in (*map(Format, DType), SPLIT, SCREEN))


# ---------------------------------------------------------------------------------------------------------------------
# One row as f32


def emit_dequantize_row(
    k: Kernel, dtype: DType, w: Value, cols: Value, row: Value, store: Callable[[Value, Value], None], view: str = ""
) -> None:
    """Logical row ``row`` of the packed weight at ``w``: ``store(column, f32 vector)`` in order, 16 columns at a time
    (one for float types). Operation for operation formats.dequantize, so equal to it bit by bit."""
    n, f = k.lanes, Format(dtype, view)
    layout = f.layout(n)
    block, lane = row // n, row % n
    if layout.is_float:
        base = w + block * ((cols * layout.body_step + 63) & -64)
        size = layout.body_unit
        with k.loop(0, cols) as column:
            at = base + column * layout.body_step + lane * size
            if dtype is DType.BF16:
                store(column, k.bf16_to_f32(k.load(at, "i16")))
            else:
                store(column, k.load(at, "f32" if dtype is DType.F32 else "f16").to_f32())
        return
    head_bytes = cols.lshr(8 if f.k_quant else 5) * layout.head_step
    body_offset = (head_bytes + 63) & -64
    head = w + block * ((body_offset + cols.lshr(5) * layout.body_step + 63) & -64)
    with k.loop(0, cols.lshr(5)) as g:
        body = head + body_offset + g * layout.plane_step + lane * 4
        where = Body(body, body + cols.lshr(5) * layout.plane_step if f.view else body)
        for h, q in enumerate(_row_codes(k, f, where)):
            step, low = _row_scales(k, f, head, g, lane, h)
            offset = 0 if f.signed else f.offset
            value = (q - offset if offset else q).to_f32() * step
            store((g << 5) + 16 * h, value if low is None else value + low)


def _row_codes(k: Kernel, f: Format, where: Body) -> tuple[Value, Value]:
    """Codes of columns 0..15 and 16..31 of a group as i32; ``where`` points at this row's lane of the first vector."""
    stride, body = 4 * k.lanes, where.at

    def four(first: int, body: Value = body) -> Value:
        out = k.undef("i32", 4)
        for i in range(4):
            out = out.insert(i, k.load(body + (first + i) * stride, "i32"))
        return out

    if f.whole_bytes:
        return four(0).bitcast("i8").sext("i32"), four(4).bitcast("i8").sext("i32")
    if f.bits == 3:
        third, bit = k.splat(k.load(body + 2 * stride, "i32"), 4), _dwords(k, 4)
        low, high = (
            k.splat(k.load(body + stride * h, "i32"), 4).lshr(k.const_vec("i32", [0, 2, 4, 6])) & _dwords(k, 3)
            for h in range(2)
        )
        low |= (third << k.const_vec("i32", [2, 1, 0, 0])).lshr(k.const_vec("i32", [0, 0, 0, 1])) & bit
        high |= third.lshr(k.const_vec("i32", [2, 3, 4, 5])) & bit
        return low.bitcast("i8").zext("i32"), high.bitcast("i8").zext("i32")
    v = four({5: 1, 6: 2}.get(f.bits, 0))
    nibbles = _dwords(k, 15)
    if f.view == "split":
        under = four(0, where.low)
        low, high = (under & nibbles) | ((v & nibbles) << 4), (under.lshr(4) & nibbles) | (v & ~nibbles)
        return (low.bitcast("i8") ^ -128).sext("i32"), (high.bitcast("i8") ^ -128).sext("i32")
    low, high = v & nibbles, v.lshr(4) & nibbles
    if f.bits == 5:
        fifth, bit = k.splat(k.load(body, "i32"), 4), _dwords(k, 16)
        low |= (fifth << k.const_vec("i32", [4, 3, 2, 1])) & bit
        high |= fifth.lshr(k.const_vec("i32", [0, 1, 2, 3])) & bit
    elif f.bits == 6:
        left, right = k.const_vec("i32", [4, 2, 0, 0]), k.const_vec("i32", [0, 0, 0, 2])
        low, high = (
            part | ((k.splat(k.load(body + stride * h, "i32"), 4) << left).lshr(right) & _dwords(k, 0x30))
            for h, part in enumerate((low, high))
        )
    low, high = low.bitcast("i8"), high.bitcast("i8")
    if f.dtype in CODEBOOK:
        return _look_up(k, f, low).sext("i32"), _look_up(k, f, high).sext("i32")
    return low.zext("i32"), high.zext("i32")


def _row_scales(k: Kernel, f: Format, head: Value, g: Value, lane: Value, h: int) -> tuple[Value, Value | None]:
    """Step and min of 16 columns; q * step + min."""
    n = k.lanes
    layout = PackedLayout(f.dtype, 1, 256, n)

    def half(at: Value) -> Value:
        return k.load(at + lane * 2, "f16").to_f32()

    if not f.k_quant:
        at = head + g * layout.head_step
        return half(at), half(at + 2 * n) if f.has_min else None
    at, sub = head + g.lshr(3) * layout.head_step, (g & 7) * (2 * n) + lane
    if f.halves:
        return half(at) * k.load(at + sub + (2 + h) * n, "i8").sext("i32").to_f32(), None
    scale, low = (k.load(at + sub + (4 + i) * n, "i8").zext("i32").to_f32() for i in range(2))
    return half(at) * scale, -(half(at + 2 * n) * low)
