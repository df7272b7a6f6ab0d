"""Row-wise kernels: embed, rms_norm, rms_norm_add, quantize, add, glu, gather, rope_store.

Owns their loops and formulas. Does not own layouts: act records are formats.py's, KV pages kv.py's, packed
embedding tables pack.py's.

Every result depends on its row alone (or, in add, glu and quantize, on its 32 columns): rows and chunks of columns are
shared out by the work counter, and sums over a row run in one order. Row counts are T, or R where ``logits`` is set.
"""

from __future__ import annotations

from collections.abc import Callable

from ai_engine.kernels.cpu.formats import GROUP
from ai_engine.kernels.cpu.kv import F16, INT8, KvElement, emit_store
from ai_engine.kernels.cpu.lang import Array, Kernel, KernelDef, Record, Value, kernel
from ai_engine.kernels.cpu.matmul import emit_dequantize_row
from ai_engine.kernels.cpu.quantize import act_record, emit_quantize_group
from ai_engine.ports.model import DType

CHUNK = 512
"""Columns of one work item where columns are independent: about a microsecond of work."""


def _rows(k: Kernel) -> Value:
    return k.select(k.arg.logits.ne(0), k.header.R, k.header.T)


def _row_chunks(k: Kernel, cols: Value, body: Callable[[Value, Value, Value], None]) -> None:
    """``body(row, first column, end column)`` for chunks of every row, shared among the threads."""
    chunks = (cols + (CHUNK - 1)) // CHUNK
    with k.work_items(_rows(k) * chunks) as item:
        first = item % chunks * CHUNK
        body(item // chunks, first, k.min(first + CHUNK, cols))


def _span(k: Kernel, first: Value, end: Value, body: Callable[[Value, int], None]) -> None:
    k.for_vectors(end - first, lambda i, lanes: body(first + i, lanes))


def _group(k: Kernel, body: Callable[[int], Value]) -> list[Value]:
    """The vectors of 32 columns: ``body(offset)`` for each."""
    return [body(offset) for offset in range(0, GROUP, k.lanes)]


# ---------------------------------------------------------------------------------------------------------------------
# embed, gather


def _embed(dtype: DType, view: str = "") -> KernelDef:
    @kernel(f"embed_{dtype.value.lower()}{'_' if view else ''}{view}", table="ptr", out="ptr", cols="i64", scale="f32")
    def embed(k: Kernel) -> None:
        ids = k.array(k.header.token_ids, "i32")
        with k.work_items(k.header.T) as t:
            out = k.array(k.arg.out, "f32").shift(t * k.arg.cols)
            row = ids[t].sext("i64")
            emit_dequantize_row(
                k, dtype, k.arg.table, k.arg.cols, row, lambda i, x: out.store(i, x * k.arg.scale), view
            )  # fmt: skip

    return embed


@kernel(x="ptr", out="ptr", cols="i64")
def gather(k: Kernel) -> None:
    """out[r] = x[logit_rows[r]]."""
    rows, nbytes = k.array(k.header.logit_rows, "i32"), k.arg.cols * 4
    with k.work_items(k.header.R) as r:
        k.copy(k.arg.out + r * nbytes, k.arg.x + rows[r].sext("i64") * nbytes, nbytes)


# ---------------------------------------------------------------------------------------------------------------------
# rms_norm, rms_norm_add


def _inverse_rms(k: Kernel, x: Array, cols: Value, eps: Value) -> Value:
    """1 / sqrt(mean(x^2) + eps): four vector sums over whole blocks, then one, then single columns."""
    sums = [k.var(k.f32(0.0, k.lanes)) for _ in range(4)]
    block = 4 * k.lanes
    whole = cols - cols % block
    with k.loop(0, whole, block) as i:
        for j, part in enumerate(sums):
            v = x.load(i + j * k.lanes, k.lanes)
            part.v = k.fma(v, v, part.v)
    rest = k.var(k.f32(0.0))

    def tail(i: Value, lanes: int) -> None:
        v = x.load(i, lanes)
        into = rest if lanes == 1 else sums[0]
        into.v = k.fma(v, v, into.v)

    _span(k, whole, cols, tail)
    total = k.reduce_add((sums[0].v + sums[1].v) + (sums[2].v + sums[3].v)) + rest.v
    return k.f32(1.0) / k.sqrt(total / cols.to_f32() + eps)


@kernel(x="ptr", out="ptr", weight="ptr", cols="i64", logits="i64", eps="f32")
def rms_norm(k: Kernel) -> None:
    a, weight = k.arg, k.array(k.arg.weight, "f32")
    with k.work_items(_rows(k)) as row:
        x, out = (k.array(p, "f32").shift(row * a.cols) for p in (a.x, a.out))
        r = _inverse_rms(k, x, a.cols, a.eps)

        def body(i: Value, lanes: int) -> None:
            out[i] = x.load(i, lanes) * r * weight.load(i, lanes)

        k.for_vectors(a.cols, body)


@kernel(x="ptr", out="ptr", weight="ptr", cols="i64", logits="i64", eps="f32")
def rms_norm_act(k: Kernel) -> None:
    """As rms_norm, into an act buffer."""
    a, weight = k.arg, k.array(k.arg.weight, "f32")
    groups = a.cols.lshr(5)
    with k.work_items(_rows(k)) as row:
        x = k.array(a.x, "f32").shift(row * a.cols)
        r = _inverse_rms(k, x, a.cols, a.eps)
        with k.loop(0, groups) as g:
            at = g << 5
            ys = _group(k, lambda j: x.load(at + j, k.lanes) * r * weight.load(at + j, k.lanes))
            emit_quantize_group(k, act_record(k, a.out, row, groups, g), ys)


@kernel(y="ptr", x="ptr", out="ptr", weight="ptr", cols="i64", logits="i64", eps="f32")
def rms_norm_add(k: Kernel) -> None:
    a, weight = k.arg, k.array(k.arg.weight, "f32")
    with k.work_items(_rows(k)) as row:
        y, x, out = (k.array(p, "f32").shift(row * a.cols) for p in (a.y, a.x, a.out))
        r = _inverse_rms(k, y, a.cols, a.eps)

        def body(i: Value, lanes: int) -> None:
            out[i] = x.load(i, lanes) + y.load(i, lanes) * r * weight.load(i, lanes)

        k.for_vectors(a.cols, body)


# ---------------------------------------------------------------------------------------------------------------------
# quantize, add, glu


@kernel(x="ptr", out="ptr", cols="i64", logits="i64")
def quantize(k: Kernel) -> None:
    a = k.arg

    def chunk(row: Value, first: Value, end: Value) -> None:
        x = k.array(a.x, "f32").shift(row * a.cols)
        with k.loop(first.lshr(5), end.lshr(5)) as g:
            xs = _group(k, lambda j: x.load((g << 5) + j, k.lanes))
            emit_quantize_group(k, act_record(k, a.out, row, a.cols.lshr(5), g), xs)

    _row_chunks(k, a.cols, chunk)


@kernel(x="ptr", y="ptr", out="ptr", cols="i64", logits="i64")
def add(k: Kernel) -> None:
    a = k.arg

    def chunk(row: Value, first: Value, end: Value) -> None:
        x, y, out = (k.array(p, "f32").shift(row * a.cols) for p in (a.x, a.y, a.out))
        _span(k, first, end, lambda i, lanes: out.store(i, x.load(i, lanes) + y.load(i, lanes)))

    _row_chunks(k, a.cols, chunk)


GLU_ARGS = Record(
    x="ptr",
    out="ptr",
    cols="i64",  # F
    logits="i64",
    gate_step="i64",  # floats from one group of 32 gates to the next: 64 interleaved, 32 as halves
    up_offset="i64",  # floats from a gate to its up: 32 interleaved, F as halves
)


def _glu(name: str, function: Callable[[Kernel, Value], Value], to_act: bool) -> KernelDef:
    def emit(k: Kernel) -> None:
        a = k.arg

        def chunk(row: Value, first: Value, end: Value) -> None:
            x = k.array(a.x, "f32").shift(row * a.cols * 2)
            out = None if to_act else k.array(a.out, "f32").shift(row * a.cols)

            with k.loop(first.lshr(5), (end + (GROUP - 1)).lshr(5)) as g:
                gates = x.shift(g * a.gate_step)
                ups = gates.shift(a.up_offset)

                def value(i: Value, lanes: int) -> Value:
                    return function(k, gates.load(i, lanes)) * ups.load(i, lanes)

                if out is None:
                    ys = _group(k, lambda j: value(k.i64(j), k.lanes))
                    emit_quantize_group(k, act_record(k, a.out, row, a.cols.lshr(5), g), ys)
                else:
                    here = out.shift(g << 5)
                    k.for_vectors(k.min(end - (g << 5), GROUP), lambda i, lanes: here.store(i, value(i, lanes)))

        _row_chunks(k, a.cols, chunk)

    return KernelDef(name, GLU_ARGS, emit)


# ---------------------------------------------------------------------------------------------------------------------
# rope_store

ROPE_ARGS = Record(
    x="ptr",  # f32[T, (heads + 2 kv_heads) * head_dim], rotated in place
    heads="i64",
    kv_heads="i64",
    head_dim="i64",
    table="ptr",  # f32[max_context, pairs, 2] of (cos, sin)
    pairs="i64",
    kv="ptr",  # this layer's first head block in page 0
    page_bytes="i64",
    page_tokens="i64",
    q_norm="ptr",  # f32[head_dim]
    k_norm="ptr",
    eps="f32",
)


def _rope_store(e: KvElement, with_norm: bool) -> KernelDef:
    """Half-split rotation: the pair is (i, i + pairs); dims from 2 * pairs on stay. K and V rows go to the pages."""

    def emit(k: Kernel) -> None:
        a, h = k.arg, k.header
        positions, sequences = k.array(h.positions, "i32"), k.array(h.row_seq, "i32")
        page_table, page_stride = k.array(h.page_table, "i32"), h.page_stride
        cols = (a.heads + a.kv_heads * 2) * a.head_dim
        head_bytes = e.head_block_bytes(a.page_tokens, a.head_dim)

        def normalise(x: Array, weight: Value) -> None:
            w, r = k.array(weight, "f32"), _inverse_rms(k, x, a.head_dim, a.eps)
            k.for_vectors(a.head_dim, lambda i, lanes: x.store(i, x.load(i, lanes) * r * w.load(i, lanes)))

        def rotate(x: Array, table: Array) -> None:
            def body(i: Value, lanes: int) -> None:
                angles = table.load(i * 2, 2 * lanes)
                cos, sin = angles.slice_step(0, 2), angles.slice_step(1, 2)
                first, second = x.load(i, lanes), x.load(i + a.pairs, lanes)
                x[i] = k.fma(first, cos, -(second * sin))
                x[i + a.pairs] = k.fma(second, cos, first * sin)

            k.for_vectors(a.pairs, body)

        with k.work_items(h.T) as t:
            position = positions[t].sext("i64")
            page = page_table[sequences[t].sext("i64") * page_stride + position // a.page_tokens].sext("i64")
            token = position % a.page_tokens
            row = k.array(a.x, "f32").shift(t * cols)
            table = k.array(a.table, "f32").shift(position * a.pairs * 2)
            with k.loop(0, a.heads + a.kv_heads) as head:
                x = row.shift(head * a.head_dim)
                if with_norm:
                    normalise(x, k.select(head < a.heads, a.q_norm, a.k_norm))
                rotate(x, table)
            with k.loop(0, a.kv_heads) as g:
                block = a.kv + page * a.page_bytes + g * head_bytes
                key, value = (row.shift((a.heads + a.kv_heads * n + g) * a.head_dim) for n in (0, 1))
                emit_store(k, e, block, token, key, value, a.head_dim, a.page_tokens)

    return KernelDef(f"rope_store{'_norm' if with_norm else ''}{e.suffix}", ROPE_ARGS, emit)


KERNELS: tuple[KernelDef, ...] = (
    *(_embed(dtype) for dtype in DType),
    _embed(DType.Q8_0, "split"),
    gather,
    rms_norm,
    rms_norm_act,
    rms_norm_add,
    quantize,
    add,
    *(
        _glu(f"glu_{name}{suffix}", function, bool(suffix))
        for name, function in (("silu", Kernel.silu), ("gelu_tanh", Kernel.gelu_tanh))
        for suffix in ("", "_act")
    ),
    *(_rope_store(element, with_norm) for element in (F16, INT8) for with_norm in (False, True)),
)
