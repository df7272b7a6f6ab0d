"""Causal softmax attention over pages, for decoding, prefill and mixed rows alike.

Owns the tiles, the order of sums and the split of long contexts over threads; one kernel per kind of page (f16, int8).
Does not own where a key and a value lie (kv.py), who has which page (the runtime's), nor the rotation and storing of k
and v (elementwise's ``rope_store``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ai_engine.kernels.cpu import abi, registry
from ai_engine.kernels.cpu.formats import GROUP
from ai_engine.kernels.cpu.kv import F16, INT8, KvElement, KvLayout
from ai_engine.kernels.cpu.lang import Kernel, KernelDef, Record, Target, Value, Var
from ai_engine.kernels.cpu.quantize import act_record, emit_quantize_group

# --- the kernel ------------------------------------------------------------------------------------------------------
#
# The query rows of a sequence and the heads that share a kv head form *pairs* j = row * group + head_in_group, which
# all read the same keys. A tile is up to ``tile_pairs`` of them. Positions are cut into absolute chunks of CHUNK. For
# each chunk a tile gets its scores (K read once), an exact softmax within the chunk, and the weighted values (V read
# once): a partial (m, l, o) = (largest score, sum of exp(s - m), sum of exp(s - m) v). Partials are folded in the
# order of chunks:
#
#     m' = max(m, mc)    o' = o exp(m - m') + oc exp(mc - m')    l' likewise    output = o / l
#
# The fold starts from (LOWEST, 0, 0). A chunk in which a row sees nothing gives (LOWEST, 0, 0), which changes no bit,
# so it does not matter whom a row shares its tile with. Scores sum over dims, values over positions, one at a time in
# ascending order; so a row's output depends on nothing but its query and its keys. Of int8 pages, a score is multiplied
# by its key's scale after the sum over dims, and a weight by its value's scale after the sum l.
#
# A sequence with few tiles and several chunks is *split*: any thread may take one chunk of a tile and stores the
# partials in the workspace; the fold follows when all are there. Whether a sequence is split changes no bit either.

CHUNK = 256
BLOCK = 32  # positions whose keys and values surely lie in one page
LOWEST = -1e30
PARTIAL_HEADER = 16  # floats before a partial's o: m, l, unused
MAX_PARTIAL_BYTES = 16 << 20
MAX_HEAD_DIM = 512
PREFETCH_ROWS = 4  # tiles so small wait for memory rather than for arithmetic
L2 = 2  # a prefetch's locality: not into the first level, which holds the queries and scores
SEQ_WORDS = (
    6  # of the table of sequences in scratch: first item, tiles, pieces, first partial's offset (-1: not split),
)
# chunks, chunks of a piece
MAX_SEQS = 8192
DEFAULT_CHOICES = registry.Registry()


@dataclass(frozen=True)
class Tiling:
    """Register tiles of a target: ``rows`` of pairs that a micro-kernel does at once, most first; position registers
    per step of the score loop and dim registers per step of the value loop for each."""

    lanes: int
    rows: tuple[int, ...]
    score_registers: dict[int, int]
    value_registers: dict[int, int]

    @property
    def tile_pairs(self) -> int:
        return 2 * self.rows[0]


def tiling(target: Target) -> Tiling:
    if target.name == "avx512":
        return Tiling(16, (8, 4, 3, 2, 1), {8: 2, 4: 2, 3: 2, 2: 2, 1: 2}, {8: 2, 4: 4, 3: 4, 2: 4, 1: 4})
    if target.name == "avx2":
        return Tiling(8, (6, 4, 3, 2, 1), {6: 2, 4: 2, 3: 4, 2: 4, 1: 4}, {6: 2, 4: 2, 3: 4, 2: 4, 1: 8})
    return Tiling(8, (4, 3, 2, 1), {4: 2, 3: 2, 2: 4, 1: 4}, {4: 2, 3: 2, 2: 4, 1: 4})


def workspace_bytes(
    target: Target, *, max_tokens: int, max_seqs: int, max_context: int, heads: int, kv_heads: int, head_dim: int
) -> int:
    """Workspace of one attention call: rows of f32 for an "act" output, then partials of split sequences."""
    return _rows_bytes(max_tokens, heads, head_dim) + partial_bytes(
        target, max_tokens=max_tokens, max_seqs=max_seqs, max_context=max_context,
        heads=heads, kv_heads=kv_heads, head_dim=head_dim,
    )  # fmt: skip


def partial_bytes(
    target: Target, *, max_tokens: int, max_seqs: int, max_context: int, heads: int, kv_heads: int, head_dim: int
) -> int:
    """Bytes for partials. A sequence that finds no room is not split, which is slower and no different."""
    assert head_dim <= MAX_HEAD_DIM, head_dim
    assert max_seqs <= MAX_SEQS, max_seqs
    t = tiling(target)
    chunks = -(-max_context // CHUNK) + 1
    return min(MAX_PARTIAL_BYTES, max_tokens * heads * chunks * _partial_stride(t, head_dim))


def _rows_bytes(max_tokens: int, heads: int, head_dim: int) -> int:
    return -(-4 * max_tokens * heads * head_dim // 64) * 64


def _partial_stride(t: Tiling, head_dim: int) -> int:
    return 4 * (PARTIAL_HEADER + -(-head_dim // t.lanes) * t.lanes)


def attention_args(
    target: Target,
    layout: KvLayout,
    *,
    qkv: int,
    out: int,
    out_is_act: bool,
    kv: int,
    workspace: int,
    layer: int,
    heads: int,
    scale: float,
    window: int,
    max_tokens: int,
    max_seqs: int,
    max_context: int,
    qkv_stride: int = 0,
    out_stride: int = 0,
    choices: registry.Registry = DEFAULT_CHOICES,
) -> tuple[str, npt.NDArray[np.uint64]]:
    """The kernel's name and argument block. Strides are bytes; 0: dense rows of f32."""
    head_dim, kv_heads = layout.head_dim, layout.kv_heads
    sizes = {"max_tokens": max_tokens, "max_seqs": max_seqs, "max_context": max_context}
    partials = partial_bytes(target, **sizes, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    cols = heads * head_dim
    assert not out_is_act or cols % GROUP == 0, cols
    return f"attention{layout.element.suffix}", ARGS.pack(
        qkv=qkv,
        qkv_stride=qkv_stride or 4 * (heads + 2 * kv_heads) * head_dim,
        out=out,
        is_act=int(out_is_act),
        rows=workspace if out_is_act else out,
        rows_stride=4 * cols if out_is_act else out_stride or 4 * cols,
        partials=workspace + _rows_bytes(max_tokens, heads, head_dim),
        partial_bytes=partials,
        kv=kv + layer * layout.layer_bytes,
        page_bytes=layout.page_bytes,
        head_bytes=layout.head_bytes,
        page_tokens=layout.page_tokens,
        head_dim=head_dim,
        kv_heads=kv_heads,
        group=heads // kv_heads,
        scale=scale,
        window=window,
        **choices.values("attention", layout.element.name, registry.attention_shape(head_dim)),
    )


ARGS = Record(
    qkv="ptr",
    qkv_stride="i64",
    out="ptr",  # act records, or the same as rows
    is_act="i64",
    rows="ptr",  # f32[T, heads * head_dim]: the output, or what is quantised into it
    rows_stride="i64",
    partials="ptr",
    partial_bytes="i64",
    kv="ptr",  # this layer's part of page 0
    page_bytes="i64",
    head_bytes="i64",
    page_tokens="i64",
    head_dim="i64",
    kv_heads="i64",
    group="i64",
    scale="f32",
    window="i64",
    **registry.fields("attention"),  # see registry.py
)


def _outer(
    k: Kernel,
    rows: int,
    registers: int,
    row: Callable[[int], Value],
    column: Callable[[int], Value],
    sums: list[list[Var]],
) -> None:
    """sums[m][v] += row(m) * column(v), the fewer of the two held in registers."""
    if rows > registers:
        columns = [column(v) for v in range(registers)]
        for m in range(rows):
            x = row(m)
            for v in range(registers):
                sums[m][v].v = k.fma(x, columns[v], sums[m][v].v)
    else:
        held = [row(m) for m in range(rows)]
        for v in range(registers):
            x = column(v)
            for m in range(rows):
                sums[m][v].v = k.fma(held[m], x, sums[m][v].v)


def _emit_scores(e: KvElement, rows: int) -> Callable[..., None]:
    """scores[m][p] = sum_d q[m][d] k[d][p] (* scales[p]) for ``rows`` pairs and the BLOCK positions at ``keys``.
    ``ahead``: blocks of keys or values to fetch into the second-level cache meanwhile."""

    def emit(
        k: Kernel, keys: Value, scales: Value, q: Value, q_stride: Value, scores: Value, head_dim: Value, *ahead: Value
    ) -> None:
        t = tiling(k.target)
        lanes, registers = t.lanes, t.score_registers[rows]
        group_bytes = head_dim * (lanes * e.nbytes)
        q_rows = [q + q_stride * m for m in range(rows)]
        for first in range(0, BLOCK // lanes, registers):
            groups = [keys + group_bytes * (first + v) for v in range(registers)]
            sums = [[k.var(k.f32(0, lanes)) for _ in range(registers)] for _ in range(rows)]
            with k.loop(0, head_dim, 4) as d:
                for u in range(4):
                    dim = d + u
                    for start in ahead if first == 0 and u * BLOCK * e.nbytes % 64 == 0 else ():
                        k.prefetch(start + dim * (BLOCK * e.nbytes), L2)

                    def query(m: int, dim: Value = dim) -> Value:
                        return k.splat(k.load(q_rows[m] + dim * 4, "f32"), lanes)

                    def key(v: int, dim: Value = dim, groups: list[Value] = groups) -> Value:
                        return e.load(k, groups[v] + dim * (lanes * e.nbytes), lanes)

                    _outer(k, rows, registers, query, key, sums)
            for m in range(rows):
                for v in range(registers):
                    score = sums[m][v].v
                    if e.has_scale:
                        score = score * k.load(scales + 4 * (first + v) * lanes, "f32", lanes)
                    k.store(scores + 4 * (m * CHUNK + (first + v) * lanes), score)

    return emit


def _emit_values(e: KvElement, rows: int) -> Callable[..., None]:
    """o[m][d] = sum over positions first <= p < last of the chunk, ascending, of weights[m][p] v[p][d]. ``blocks``: the
    address of the V rows of each BLOCK positions."""

    def emit(
        k: Kernel, blocks: Value, weights: Value, o: Value, o_stride: Value, first: Value, last: Value, head_dim: Value
    ) -> None:
        t = tiling(k.target)
        lanes = t.lanes
        row_bytes = head_dim * e.nbytes
        o_rows = [o + o_stride * m for m in range(rows)]

        def columns(start: Value, stop: Value, registers: int) -> None:
            with k.loop(start, stop, registers * lanes) as column:
                sums = [[k.var(k.f32(0, lanes)) for _ in range(registers)] for _ in range(rows)]
                with k.loop(first // BLOCK, (last + (BLOCK - 1)) // BLOCK) as block:
                    begin = block * BLOCK
                    v_rows = k.load(blocks + block * 8, "ptr") + (column * e.nbytes - begin * row_bytes)
                    with k.loop(k.max(first, begin), k.min(last, begin + BLOCK)) as p:
                        here = v_rows + p * row_bytes

                        def weight(m: int, p: Value = p) -> Value:
                            return k.splat(k.load(weights + (p * 4 + 4 * CHUNK * m), "f32"), lanes)

                        def value(v: int, here: Value = here) -> Value:
                            return e.load(k, here + v * lanes * e.nbytes, lanes)

                        _outer(k, rows, registers, weight, value, sums)
                for m in range(rows):
                    for v in range(registers):
                        k.store(o_rows[m] + (column + v * lanes) * 4, sums[m][v].v)

        width = t.value_registers[rows] * lanes
        whole = head_dim - head_dim % width
        columns(k.i64(0), whole, t.value_registers[rows])
        if t.value_registers[rows] > 1:
            columns(whole, head_dim, 1)  # the last register may reach past head_dim: K follows V, and o is padded

    return emit


def _exp_not_positive(k: Kernel, x: Value) -> Value:
    """`Kernel.exp` for x <= 0, in fewer steps: 0 below -87, within 1 ulp or so above; NaN stays."""
    y = k.max(x.like(-87.0), x)
    n = k.fma(y, 1.44269504088896341, 12582912.0)
    whole = n - 12582912.0
    r = k.fma(whole, 2.12194440e-4, k.fma(whole, -0.693359375, y))
    p = x.like(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1, 1.0, 1.0):
        p = k.fma(p, r, c)
    return k.select(x < -87.0, 0.0, (p.bitcast("i32") + (n.bitcast("i32") << 23)).bitcast("f32"))


def _emit_softmax(
    k: Kernel, scores: Value, first: Value, last: Value, low: Value, high: Value, partial: Value, *scales: Value
) -> None:
    """scores[p] = exp(scores[p] - m) for low <= p < high, 0 elsewhere in the whole registers of first..last;
    partial[0], partial[1] = m, sum. With ``scales`` the weights, not the sum, are multiplied by the scale of p."""
    lanes = tiling(k.target).lanes
    start = first - first % lanes
    s = k.array(scores, "f32")
    best = k.var(k.f32(LOWEST, lanes))
    end = (last + (lanes - 1)) // lanes * lanes
    with k.if_else((low <= start) & (high >= end)) as (whole, partly):
        with whole, k.loop(start, last, lanes) as i:
            best.v = k.max(s.load(i, lanes), best.v)
        with partly:
            low32, high32 = k.splat(low.trunc("i32"), lanes), k.splat(high.trunc("i32"), lanes)
            with k.loop(start, last, lanes) as i:
                p = k.iota("i32", lanes) + i.trunc("i32")
                visible = k.select((p >= low32) & (p < high32), s.load(i, lanes), float("-inf"))
                s[i] = visible
                best.v = k.max(visible, best.v)
    m = k.reduce_max(best.v)
    total = k.var(k.f32(0, lanes))
    with k.loop(start, last, lanes) as i:
        weight = _exp_not_positive(k, s.load(i, lanes) - m)
        total.v = total.v + weight
        s[i] = weight * k.array(scales[0], "f32").load(i, lanes) if scales else weight
    out = k.array(partial, "f32")
    out[0], out[1] = m, k.reduce_add(total.v)


def _emit_fold(k: Kernel, state: Value, partial: Value, head_dim: Value) -> None:
    """state = state merged with partial; both {m, l, unused, o[head_dim]}."""
    lanes = tiling(k.target).lanes
    s, c = k.array(state, "f32"), k.array(partial, "f32")
    m = k.max(s[0], c[0])
    old, new = k.exp(s[0] - m), k.exp(c[0] - m)
    s[0], s[1] = m, k.fma(s[1], old, c[1] * new)
    with k.loop(PARTIAL_HEADER, head_dim + PARTIAL_HEADER, lanes) as i:
        s[i] = k.fma(s.load(i, lanes), old, c.load(i, lanes) * new)


def _emit_start(k: Kernel, state: Value, head_dim: Value) -> None:
    lanes = tiling(k.target).lanes
    s = k.array(state, "f32")
    s[0], s[1] = LOWEST, 0.0
    with k.loop(PARTIAL_HEADER, head_dim + PARTIAL_HEADER, lanes) as i:
        s[i] = k.f32(0, lanes)


def _emit_finish(k: Kernel, state: Value, out: Value, head_dim: Value) -> None:
    """out[d] = o[d] / l."""
    s, y = k.array(state, "f32"), k.array(out, "f32")
    inverse = 1.0 / s[1]
    with k.loop(0, head_dim, 8) as d:
        y[d] = s.load(d + PARTIAL_HEADER, 8) * inverse


def _emit_quantize(k: Kernel, x: Value, act: Value, row: Value, groups: Value) -> None:
    """A row of f32 into row ``row`` of an act buffer."""
    values = k.array(x, "f32")
    with k.loop(0, groups) as g:
        parts = [values.load(g * GROUP + i * 8, 8) for i in range(GROUP // 8)]
        emit_quantize_group(k, act_record(k, act, row, groups, g), parts)


def _emit_prefetch(k: Kernel, block: Value, nbytes: Value) -> None:
    """Fetch a block of keys or values."""
    with k.loop(0, nbytes, 64) as at:
        k.prefetch(block + at, L2)


def _in_variants(k: Kernel, t: Tiling, pairs: Value, call: Callable[[int, Value], None]) -> None:
    """``call(rows, m)`` for register tiles that cover pairs 0..pairs-1."""
    done = k.var(k.i64(0))
    for rows in t.rows:
        with k.forever() as leave_if:
            leave_if(done.v + rows > pairs)
            call(rows, done.v)
            done.v = done.v + rows


def _emit(k: Kernel, e: KvElement) -> None:
    a, h, t = k.arg, k.header, tiling(k.target)
    lanes, tile_pairs = t.lanes, t.tile_pairs
    hd, group, kv_heads, window = a.head_dim, a.group, a.kv_heads, a.window
    positions, seq_start, context_len = (k.array(p, "i32") for p in (h.positions, h.seq_start, h.context_len))
    num_seqs = h.S
    padded = (hd + (lanes - 1)) // lanes * lanes
    partial_stride = (padded + PARTIAL_HEADER) * 4

    # Scratch: the table of sequences, the tile's queries, scores, partials, states; V and K blocks' addresses; scales.
    table = k.array(k.scratch, "i64")
    q_rows = k.scratch + 8 * SEQ_WORDS * (MAX_SEQS + 1)
    scores = q_rows + 4 * tile_pairs * MAX_HEAD_DIM
    partials = scores + 4 * tile_pairs * CHUNK
    states = partials + 4 * tile_pairs * (MAX_HEAD_DIM + PARTIAL_HEADER)
    v_blocks = states + 4 * tile_pairs * (MAX_HEAD_DIM + PARTIAL_HEADER)
    k_blocks = v_blocks + 8 * CHUNK // BLOCK
    v_scales = k_blocks + 8 * CHUNK // BLOCK
    k_scales = v_scales + 4 * CHUNK
    words = tile_pairs * (3 * MAX_HEAD_DIM + 2 * PARTIAL_HEADER + CHUNK) + 2 * CHUNK
    assert 8 * SEQ_WORDS * (MAX_SEQS + 1) + 4 * words + 16 * CHUNK // BLOCK <= abi.SCRATCH_BYTES

    def first_seen(position: Value) -> Value:
        """The first position that a row at ``position`` sees."""
        return k.select(window.eq(0), 0, k.max(position - window + 1, 0))

    # Every thread makes the same table of work items: tiles x pieces x kv heads of each sequence.
    items, room = k.var(k.i64(0)), k.var(k.i64(0))
    tiles_to_split = k.context.num_threads * registry.pick(a, "items_per_thread", h.T)
    with k.loop(0, num_seqs) as s:
        start, end = seq_start[s].sext("i64"), seq_start[s + 1].sext("i64")
        rows, length = end - start, context_len[s].sext("i64")
        tiles = (rows * group + (tile_pairs - 1)) // tile_pairs
        chunks = (length + (CHUNK - 1)) // CHUNK - first_seen(length - rows) // CHUNK
        need = chunks * kv_heads * rows * group * partial_stride
        few = tiles * kv_heads <= tiles_to_split
        split = few & (chunks > 1) & (room.v + need <= a.partial_bytes)
        entry = table.shift(s * SEQ_WORDS)
        run = k.max(chunks * tiles * kv_heads // tiles_to_split, 1)
        run = k.select(split, run, chunks)
        pieces = k.select(split, (chunks + (run - 1)) // run, 1)
        entry[0], entry[1], entry[2] = items.v, tiles, pieces
        entry[3], entry[4], entry[5] = k.select(split, room.v, -1), chunks, run
        items.v = items.v + tiles * kv_heads * pieces
        room.v = room.v + k.select(split, need, 0)
    table[num_seqs * SEQ_WORDS] = items.v

    current = k.var(k.i64(0))
    with k.work_items(items.v) as item:
        with k.forever() as leave_if:
            leave_if(item < table[(current.v + 1) * SEQ_WORDS])
            current.v = current.v + 1
        s = current.v
        entry = table.shift(s * SEQ_WORDS)
        tiles, pieces, offset, chunks, run = (entry[i] for i in range(1, 6))
        index = item - entry[0]
        piece, rest = index % pieces, index // pieces
        g, tile = rest % kv_heads, tiles - 1 - rest // kv_heads  # the deepest tiles first
        start = seq_start[s].sext("i64")
        all_pairs = (seq_start[s + 1].sext("i64") - start) * group
        first_pair = tile * tile_pairs
        pairs = k.min(all_pairs - first_pair, tile_pairs)
        first_position = positions[start].sext("i64")

        # Queries of the tile, scaled.
        with k.loop(0, pairs) as m:
            j = first_pair + m
            source = k.array(a.qkv + (start + j // group) * a.qkv_stride, "f32").shift((g * group + j % group) * hd)
            target = k.array(q_rows + m * padded * 4, "f32")
            with k.loop(0, hd, 8) as d:
                target[d] = source.load(d, 8) * a.scale
            k.call("attention_start", _emit_start, states + m * partial_stride, hd)

        tile_low = first_seen(first_position + first_pair // group)
        tile_high = first_position + (first_pair + pairs - 1) // group + 1
        is_split = offset >= 0
        chunk_zero = first_seen(first_position) // CHUNK
        from_chunk = k.select(is_split, chunk_zero + piece * run, tile_low // CHUNK)
        to_chunk = k.select(is_split, chunk_zero + k.min((piece + 1) * run, chunks), (tile_high + (CHUNK - 1)) // CHUNK)
        pages = k.array(h.page_table, "i32").shift(s * h.page_stride)
        head = a.kv + g * a.head_bytes
        with k.loop(from_chunk, to_chunk) as chunk:
            base = chunk * CHUNK
            first, last = (k.min(k.max(edge - base, 0), CHUNK) for edge in (tile_low, tile_high))
            first_block, end_block = first // BLOCK, (last + (BLOCK - 1)) // BLOCK
            with k.loop(first_block, end_block) as block:
                position = base + block * BLOCK
                page = pages[position // a.page_tokens].sext("i64")
                at = position % a.page_tokens
                head_block = head + page * a.page_bytes
                k.store(v_blocks + block * 8, head_block + e.v_offset(at, hd))
                k.store(k_blocks + block * 8, head_block + e.k_offset(at, hd, a.page_tokens, lanes))
                if e.has_scale:
                    for to, offset_of in ((v_scales, e.v_scale_offset), (k_scales, e.k_scale_offset)):
                        k.copy(to + block * (4 * BLOCK), head_block + offset_of(at, hd, a.page_tokens), 4 * BLOCK)

            # Scores, a block of positions at a time; a small tile fetches the next block's keys and this one's values.
            first_keys = k.load(k_blocks + first_block * 8, "ptr")
            k.call("attention_prefetch", _emit_prefetch, first_keys, hd * (BLOCK * e.nbytes))
            with k.loop(first_block, end_block) as block:
                next_keys = k.load(k_blocks + k.min(block + 1, end_block - 1) * 8, "ptr")
                values = k.load(v_blocks + block * 8, "ptr")
                keys = k.load(k_blocks + block * 8, "ptr")

                def score(
                    rows: int,
                    m: Value,
                    keys: Value = keys,
                    block: Value = block,
                    ahead: tuple[Value, ...] = (next_keys, values),
                ) -> None:
                    to = scores + (m * CHUNK + block * BLOCK) * 4
                    more = ahead if rows <= PREFETCH_ROWS else ()
                    q = q_rows + m * padded * 4
                    scales = k_scales + block * (4 * BLOCK)
                    name = f"attention_scores{rows}{e.suffix}"
                    k.call(name, _emit_scores(e, rows), keys, scales, q, padded * 4, to, hd, *more)

                _in_variants(k, t, pairs, score)
            # Softmax within the chunk.
            with k.loop(0, pairs) as m:
                row_position = first_position + (first_pair + m) // group
                low = k.max(first_seen(row_position) - base, 0)
                high = k.min(row_position + 1 - base, CHUNK)
                row_scores = scores + m * (4 * CHUNK)
                to = partials + m * partial_stride
                scales = (v_scales,) if e.has_scale else ()
                name = f"attention_softmax{e.suffix}"
                k.call(name, _emit_softmax, row_scores, first, last, low, high, to, *scales)

            # Values.
            def value(rows: int, m: Value, first: Value = first, last: Value = last) -> None:
                o = partials + m * partial_stride + 4 * PARTIAL_HEADER
                weights = scores + m * (4 * CHUNK)
                name = f"attention_values{rows}{e.suffix}"
                k.call(name, _emit_values(e, rows), v_blocks, weights, o, partial_stride, first, last, hd)

            _in_variants(k, t, pairs, value)
            with k.if_else(is_split) as (store, fold):
                with store:
                    part = ((chunk - chunk_zero) * kv_heads + g) * all_pairs + first_pair
                    to = a.partials + offset + part * partial_stride
                    k.copy(to, partials, pairs * partial_stride)
                with fold, k.loop(0, pairs) as m:
                    k.call("attention_fold", _emit_fold, states + m * partial_stride, partials + m * partial_stride, hd)
        with k.if_(~is_split), k.loop(0, pairs) as m:
            j = first_pair + m
            out = a.rows + (start + j // group) * a.rows_stride + (g * group + j % group) * hd * 4
            k.call("attention_finish", _emit_finish, states + m * partial_stride, out, hd)

    # Fold the partials of split sequences, and quantise.
    k.wait_items(0)
    row_seq = k.array(h.row_seq, "i32")
    with k.work_items(h.T, counter=1) as row:
        s = row_seq[row].sext("i64")
        entry = table.shift(s * SEQ_WORDS)
        offset, chunks = entry[3], entry[4]
        out = a.rows + row * a.rows_stride
        with k.if_(offset >= 0):
            start = seq_start[s].sext("i64")
            all_pairs = (seq_start[s + 1].sext("i64") - start) * group
            with k.loop(0, group * kv_heads) as head_index:
                j = (row - start) * group + head_index % group
                k.call("attention_start", _emit_start, states, hd)
                with k.loop(0, chunks) as chunk:
                    part = ((chunk * kv_heads + head_index // group) * all_pairs + j) * partial_stride
                    k.call("attention_fold", _emit_fold, states, a.partials + offset + part, hd)
                k.call("attention_finish", _emit_finish, states, out + head_index * hd * 4, hd)
        with k.if_(a.is_act.ne(0)):
            groups = (group * kv_heads * hd) // GROUP
            k.call("attention_quantize", _emit_quantize, out, a.out, row, groups)


def _definition(e: KvElement) -> KernelDef:
    return KernelDef(f"attention{e.suffix}", ARGS, lambda k: _emit(k, e))


KERNELS: Sequence[KernelDef] = (_definition(F16), _definition(INT8))
