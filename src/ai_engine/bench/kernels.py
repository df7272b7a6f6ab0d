"""`bench kernels`: the speed of single operations, each a program of one kind of call run through the kernels port.

Owns the shapes and the arithmetic of rates. Whatever implements ports.kernels can be measured; nothing here knows a
layout. A program repeats its call, so that one run is long against the cost of starting it; matmuls of few rows walk
weights that are larger than the caches, as decoding does. Rates take the median of the rounds; all cases' rounds are
interleaved, with passes of the read ceiling between them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ai_engine import app
from ai_engine.bench.ceilings import QUICK_BYTES, READ_BYTES, Prober
from ai_engine.bench.host import LoadWatch
from ai_engine.bench.report import Deadline, Report
from ai_engine.bench.stats import median, median_interval
from ai_engine.bench.svg import roofline
from ai_engine.config import EngineConfig
from ai_engine.hardware.arena import MappedArena
from ai_engine.hardware.machine import read_machine
from ai_engine.kernels import catalog
from ai_engine.ports.kernels import (
    U8,
    Attr,
    Buffer,
    BufferType,
    Call,
    Kernels,
    KvShape,
    Program,
    Resources,
    RowDim,
    SampleBatch,
    StepBatch,
    WeightSpec,
)  # fmt: skip
from ai_engine.ports.model import BLOCK, SCALE_OFFSETS, DType, row_bytes
from ai_engine.ports.sampling import MAX_LOGPROBS
from ai_engine.progress import ProgressBar

ROWS = (1, 4, 16, 64, 512)
STREAMED_BYTES = 96 << 20
FEW_ROWS = 16
COLS, OUT = 1536, 1536
Spans = list[tuple[int, int]]  # (rows, context length) of each sequence
ATTENTION: dict[str, Spans] = {
    "decode @ 128": [(1, 128)], "decode @ 512": [(1, 512)], "decode @ 2048": [(1, 2048)], "decode @ 8192": [(1, 8192)],
    "decode 8 x @ 2048": [(1, 2048)] * 8, "prefill 512 @ 0": [(512, 512)], "prefill 128 @ 384": [(128, 512)],
    "prefill 128 @ 3968": [(128, 4096)],
}  # fmt: skip
HEADS = ((9, 3, 64), (4, 1, 256))
SAMPLER: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.8},
    "top_k 40, top_p .95": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    "greedy, logprobs": {"temperature": 0, "num_top": MAX_LOGPROBS},
}


@dataclass
class Case:
    """One program with its step. Its ``repeats`` calls together read ``nbytes`` and do ``flops`` operations."""

    kind: str
    label: str
    rows: int
    program: Program
    batch: StepBatch
    repeats: int
    nbytes: int
    flops: int
    keep: tuple[Any, ...] = ()
    seconds: list[float] = field(default_factory=list)


def random_rows(dtype: DType, rows: int, cols: int, rng: np.random.Generator) -> U8:
    """uint8[rows, row_bytes]: any codes, with scales and floats of about 0.01."""
    if dtype in (DType.F32, DType.F16, DType.BF16):
        values = (rng.standard_normal((rows, cols)) * 0.01).astype(np.float32)
        if dtype is DType.BF16:
            return np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)
        return np.ascontiguousarray(values.astype(np.float16 if dtype is DType.F16 else np.float32)).view(np.uint8)
    raw = rng.integers(0, 256, (rows, row_bytes(dtype, cols)), np.uint8)
    blocks = raw.reshape(rows, -1, BLOCK[dtype][1])
    for at in SCALE_OFFSETS[dtype]:
        blocks[:, :, at : at + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    return raw


def greedy(rows: int, vocab: int, **fields: float) -> SampleBatch:
    """The sampling arrays of ``rows`` rows; ``fields`` fill one of them."""
    i32, f32 = np.int32, np.float32
    values: dict[str, Any] = {name: np.zeros(rows, f32) for name in ("temperature", "min_p", "presence", "frequency")}
    values |= {name: np.ones(rows, f32) for name in ("top_p", "repetition")}
    values |= {name: np.zeros(rows, i32) for name in ("top_k", "position")}
    values |= {name: np.full(rows, -1, i32) for name in ("forced", "num_top", "mask_row")}
    values |= {name: np.zeros(rows + 1, i32) for name in ("history_start", "bias_start")}
    values |= {name: np.zeros(0, i32) for name in ("history_token", "history_count", "bias_token")}
    values |= {"bias_value": np.zeros(0, f32), "masks": np.zeros((0, (vocab + 31) // 32), np.uint32)}
    values["seed"] = np.arange(rows, dtype=np.uint64)
    for name, value in fields.items():
        values[name][:] = value
    return SampleBatch(**values)


def step_batch(spans: Spans, page_tokens: int, sample: SampleBatch, logit_rows: int) -> StepBatch:
    """A step of these sequences; pages lie in a shuffled order, as after a while of serving."""
    pages = [-(-context // page_tokens) for _, context in spans]
    table = np.zeros((len(spans), max(pages)), np.int32)
    order = np.random.default_rng(0).permutation(sum(pages)).astype(np.int32)
    for row, (start, count) in enumerate(zip(np.cumsum([0, *pages[:-1]]), pages, strict=True)):
        table[row, :count] = order[start : start + count]
    positions = np.concatenate([np.arange(context - rows, context) for rows, context in spans]).astype(np.int32)
    return StepBatch(
        token_ids=np.zeros(len(positions), np.int32),
        positions=positions,
        seq_start=np.cumsum([0, *(rows for rows, _ in spans)]).astype(np.int32),
        context_len=np.array([context for _, context in spans], np.int32),
        page_table=table,
        logit_rows=np.arange(logit_rows, dtype=np.int32),
        sample=sample,
    )


class Maker:
    """Builds cases on one implementation of the kernels port."""

    def __init__(self, kernels: Kernels, streamed_bytes: int = STREAMED_BYTES) -> None:
        self.kernels, self.rng = kernels, np.random.default_rng(0)
        self._streamed_bytes = streamed_bytes
        self._arenas: list[MappedArena] = []

    def memory(self, nbytes: int) -> MappedArena:
        self._arenas.append(MappedArena(max(nbytes, 64)))
        return self._arenas[-1]

    def close(self) -> None:
        for arena in self._arenas:
            arena.close()

    def _place(self, types: Sequence[BufferType], rows: int) -> tuple[list[Buffer], MappedArena]:
        buffers, end = [], 0
        for i, type in enumerate(types):
            buffers.append(Buffer(f"b{i}", type, end))
            end += -(-self.kernels.buffer_bytes(type, rows) // 64) * 64
        return buffers, self.memory(end)

    def _case(
        self, kind: str, label: str, calls: list[Call], batch: StepBatch, resources: Resources, repeats: int
    ) -> Case:
        spans = tuple(zip(np.diff(batch.seq_start).tolist(), batch.context_len.tolist(), strict=True))
        step = catalog.StepShape(tokens=len(batch.token_ids), logit_rows=len(batch.logit_rows), sequences=spans)
        specs = {name: spec for name, (spec, _) in resources.weights.items()}
        costs = [catalog.cost(call, specs, resources.kv_shape, step) for call in calls if call.op != "quantize"]
        return Case(
            kind, label, len(batch.token_ids), self.kernels.compile(calls, resources), batch, repeats,
            sum(c.weight_bytes + c.kv_bytes for c in costs), sum(c.flops for c in costs), (resources,),
        )  # fmt: skip

    def matmul(self, dtype: DType, rows: int, cols: int = COLS, out: int = OUT) -> Case:
        """``rows`` tokens through matrices of cols x out; as many as exceed the caches for few rows, else four."""
        specs = WeightSpec("w0", dtype, out, cols)
        packed = self.kernels.packed_bytes(specs)
        count = max(1, self._streamed_bytes // packed) if rows <= FEW_ROWS else 4
        raw = random_rows(dtype, out, cols, self.rng)
        first = self.memory(packed).data
        self.kernels.pack_rows(specs, 0, raw, first)
        weights: dict[str, tuple[WeightSpec, U8]] = {"w0": (specs, first)}
        rest = self.memory(max(1, count - 1) * (packed + -packed % 64)).data
        for i in range(1, count):
            at = (i - 1) * (packed + -packed % 64)
            rest[at : at + packed] = first
            weights[f"w{i}"] = (WeightSpec(f"w{i}", dtype, out, cols), rest[at : at + packed])
        is_float = dtype in catalog.FLOAT_TYPES
        types = [BufferType("f32", cols), *([] if is_float else [BufferType("act", cols)]), BufferType("f32", out)]
        buffers, arena = self._place(types, rows)
        source = buffers[0]
        nbytes = self.kernels.buffer_bytes(types[0], rows)
        arena.data[:nbytes].view(np.float32)[:] = self.rng.standard_normal(nbytes // 4, np.float32)
        calls = [] if is_float else [Call(op="quantize", inputs=(source,), outputs=(buffers[1],))]
        x = source if is_float else buffers[1]
        calls += [Call(op="matmul", inputs=(x,), outputs=(buffers[-1],), weights=(name,)) for name in weights]
        resources = self._resources(
            weights, arena.data, rows, KvShape(num_layers=1, kv_heads=1, head_dim=32, page_tokens=32)
        )
        batch = step_batch([(rows, rows)], 32, greedy(0, 32), 0)
        return self._case("matmul", dtype.value, calls, batch, resources, count)

    def attention(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        label: str,
        spans: Spans,
        kv_type: Literal["f16", "int8"] = "f16",
    ) -> Case:
        layers = 8 if len(spans) * max(context for _, context in spans) <= 8192 else 2
        shape = KvShape(num_layers=layers, kv_heads=kv_heads, head_dim=head_dim, page_tokens=32, dtype=kv_type)
        pages = sum(-(-context // 32) for _, context in spans)
        kv = self.memory(pages * self.kernels.kv_page_bytes(shape)).data
        if kv_type == "int8":
            kv[:] = 0x3C  # codes of 60, scales of 0.0115
        else:
            kv.view(np.float16)[:] = np.resize(self.rng.standard_normal(1 << 16).astype(np.float16), kv.size // 2)
        rows = sum(count for count, _ in spans)
        width = (heads + 2 * kv_heads) * head_dim
        (qkv, out), arena = self._place([BufferType("f32", width), BufferType("f32", heads * head_dim)], rows)
        nbytes = self.kernels.buffer_bytes(qkv.type, rows)
        arena.data[:nbytes].view(np.float32)[:] = self.rng.standard_normal(nbytes // 4, np.float32)
        calls = []
        for layer in range(layers):
            attrs: dict[str, Attr] = {"layer": layer, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
            attrs |= {"scale": head_dim**-0.5, "window": 0}
            calls.append(Call(op="attention", inputs=(qkv,), outputs=(out,), attrs=attrs, layer=layer))
        resources = self._resources({}, arena.data, rows, shape, kv, len(spans))
        batch = step_batch(spans, 32, greedy(0, 32), 0)
        return self._case("attention", f"{heads}/{kv_heads}x{head_dim} {label}", calls, batch, resources, layers)

    def sampler(self, vocab: int, rows: int, label: str, fields: dict[str, float]) -> Case:
        """Logits like a model's: a normal bulk and a few dozen tokens well above it."""
        where: RowDim = "logits"
        cols = vocab + 16
        (logits,), arena = self._place([BufferType("f32", cols, where)], rows)
        values = arena.data[: 4 * rows * cols].view(np.float32).reshape(rows, cols)
        values[:] = self.rng.standard_normal(values.shape) * 2.2
        for row in values:
            row[self.rng.integers(0, vocab, 40)] += self.rng.uniform(4, 12, 40)
        shape = KvShape(num_layers=1, kv_heads=1, head_dim=32, page_tokens=32)
        resources = self._resources({}, arena.data, rows, shape, max_seqs=rows, vocab=vocab)
        batch = step_batch([(1, 1)] * rows, 32, greedy(rows, vocab, **fields), rows)
        case = self._case("sampler", f"{vocab}: {label}", [Call(op="sample", inputs=(logits,))], batch, resources, 1)
        case.nbytes = 4 * vocab * rows
        return case

    def _resources(
        self, weights: dict[str, tuple[WeightSpec, U8]], activations: U8, rows: int, shape: KvShape,
        kv: U8 | None = None, max_seqs: int = 1, vocab: int = 32,
    ) -> Resources:  # fmt: skip
        page = self.kernels.kv_page_bytes(shape)
        return Resources(
            weights=weights, rope_tables={}, kv=self.memory(page).data[:page] if kv is None else kv, kv_shape=shape,
            activations=activations, max_tokens=rows, max_seqs=max_seqs, max_logit_rows=max(rows, 1), vocab_size=vocab,
        )  # fmt: skip


def interleaved(
    kernels: Kernels, cases: Sequence[Case], rounds: int, deadline: Deadline, between: Callable[[], None]
) -> int:
    """Run every case once a round; returns the rounds done. Each case runs once unmeasured first."""
    progress = ProgressBar()
    for case in cases:
        kernels.run(case.program, case.batch)
    for done in range(rounds):
        if done and deadline.passed:
            return done
        for case in cases:
            started = time.perf_counter()
            kernels.run(case.program, case.batch)
            case.seconds.append(time.perf_counter() - started)
        between()
        progress("kernels", (done + 1) / rounds)
    return rounds


def run(args: argparse.Namespace) -> int:
    report, deadline, watch = Report("kernels", args.out, args.json), Deadline(args.minutes), LoadWatch()
    threads = args.threads or read_machine().default_threads
    types = [DType(name) for name in args.types.split(",")] if args.types else list(DType)
    rounds = 3 if args.quick else args.rounds or 15
    kernels = app.build_kernels(EngineConfig(threads=threads, cpu=args.cpu))
    maker = Maker(kernels, STREAMED_BYTES // 8 if args.quick else STREAMED_BYTES)
    limits: list[float] = []
    try:
        kernels.prepare(ProgressBar())
        cases = [maker.matmul(dtype, rows) for dtype in types for rows in ROWS]
        if not args.matmul_only:
            cases += [maker.attention(*heads, label, spans) for heads in HEADS for label, spans in ATTENTION.items()]
            cases += [
                maker.sampler(vocab, rows, label, fields)
                for vocab in (49_152, 262_144) for rows in (1, 16) for label, fields in SAMPLER.items()
            ]  # fmt: skip
        with Prober(threads, QUICK_BYTES if args.quick else READ_BYTES) as prober:
            done = interleaved(
                kernels, cases, rounds, deadline, lambda: limits.append(prober.read_gb_s(2 if args.quick else 5))
            )
            fma, dot = prober.fma_gflop_s(5), prober.dot_gop_s(5)
    finally:
        maker.close()
        kernels.close()
    limit = median(limits)
    rows = [row_of(case, limit, fma if case.label[:1] in "FB" or case.kind == "attention" else dot) for case in cases]
    report.say(
        f"{kernels.name}, {threads} threads; reads {limit:.1f} GB/s, f32 {fma:.0f} GFLOP/s, int8 {dot:.0f} GOP/s"
    )
    matmuls = [row for row in rows if row["kind"] == "matmul"]
    report.table(
        f"matmul {COLS} -> {OUT}: GB/s of weights and share of the read limit up to {FEW_ROWS} rows, GMAC/s beyond",
        ["type", *(f"{n} rows" for n in ROWS)],
        [[t.value, *(matmul_cell(row) for row in matmuls if row["case"] == t.value)] for t in types],
    )
    for kind, unit in (("attention", "GMAC/s"), ("sampler", "")):
        chosen = [row for row in rows if row["kind"] == kind]
        if chosen:
            head = ["case", "rows", "us a call", "GB/s", *([unit] if unit else [])]
            columns = ("case", "rows", "us_per_call", "gb_s", *(["gmac_s"] if unit else []))
            report.table(kind, head, [[row[name] for name in columns] for row in chosen])
    points = [
        (f"{row['case']} x {row['rows']}", row["ops_per_byte"], 2 * row["gmac_s"])
        for row in matmuls if row["case"] in ("Q4_1", "Q8_0", "Q4_K") and row["rows"] in (1, 16, 512)
    ]  # fmt: skip
    report.plot("roofline", roofline(limit, fma, dot, points))
    report.finish({
        "target": kernels.name, "threads": threads, "rounds": done, "quick": args.quick, "load": watch.report(),
        "read_gb_s": median_interval(limits), "fma_gflop_s": fma, "dot_gop_s": dot, "cases": rows,
    })  # fmt: skip
    return 0


def row_of(case: Case, limit_gb_s: float, top_gop_s: float) -> dict[str, Any]:
    """Rates of the median round. ``share`` is of the ceiling that bounds the case: memory or arithmetic."""
    seconds = median(case.seconds)
    gb_s, gop_s = case.nbytes / seconds / 1e9, case.flops / seconds / 1e9
    return {
        "kind": case.kind, "case": case.label, "rows": case.rows, "us_per_call": 1e6 * seconds / case.repeats,
        "gb_s": gb_s, "gmac_s": gop_s / 2, "share_of_read": gb_s / limit_gb_s, "share_of_arithmetic": gop_s / top_gop_s,
        "ops_per_byte": case.flops / max(1, case.nbytes), "seconds": case.seconds,
    }  # fmt: skip


def matmul_cell(row: dict[str, Any]) -> str:
    if row["rows"] <= FEW_ROWS:
        return f"{row['gb_s']:.1f} GB/s {100 * row['share_of_read']:.0f}%"
    return f"{row['gmac_s']:.0f} GMAC/s {100 * row['share_of_arithmetic']:.0f}%"
