"""CpuKernels: a whole small program against the reference, and the same bits on any threads, chunks and batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ai_engine.hardware.team import NativeTeam
from ai_engine.kernels.cpu import build
from ai_engine.kernels.cpu.backend import CpuKernels
from ai_engine.kernels.cpu.executor import aligned
from ai_engine.kernels.cpu.lang import AVX2, AVX512
from ai_engine.kernels.reference.backend import ReferenceKernels
from ai_engine.ports.kernels import (
    Buffer,
    BufferType,
    Call,
    Kernels,
    KvShape,
    Resources,
    SampleBatch,
    StepBatch,
    WeightSpec,
)
from ai_engine.ports.model import DType, row_bytes

F32 = npt.NDArray[np.float32]
D, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, LAYERS, PAGE = 96, 4, 2, 32, 160, 131, 2, 32
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
PAGES = 12
MAX_TOKENS, MAX_SEQS, MAX_ROWS = 64, 4, 8
SHAPE = KvShape(num_layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, page_tokens=PAGE)
TARGETS = [t for t in (AVX2, AVX512) if t.lanes <= build.host_target().lanes]


def sample_batch(rows: int) -> SampleBatch:
    i32, f32 = np.int32, np.float32
    return SampleBatch(
        temperature=np.zeros(rows, f32), top_k=np.zeros(rows, i32), top_p=np.ones(rows, f32), min_p=np.zeros(rows, f32),
        repetition=np.ones(rows, f32), presence=np.zeros(rows, f32), frequency=np.zeros(rows, f32),
        seed=np.zeros(rows, np.uint64), position=np.zeros(rows, i32), forced=np.full(rows, -1, i32),
        num_top=np.full(rows, -1, i32), history_start=np.zeros(rows + 1, i32), history_token=np.zeros(0, i32),
        history_count=np.zeros(0, i32), bias_start=np.zeros(rows + 1, i32), bias_token=np.zeros(0, i32),
        bias_value=np.zeros(0, f32), mask_row=np.full(rows, -1, i32),
        masks=np.zeros((0, (VOCAB + 31) // 32), np.uint32),
    )  # fmt: skip


def batch(rows: Sequence[tuple[Sequence[int], int, Sequence[int]]], logits: Sequence[int], step: int = 0) -> StepBatch:
    """``rows``: (token ids, first position, pages) of each sequence."""
    ids = [token for tokens, _, _ in rows for token in tokens]
    positions = [first + i for tokens, first, _ in rows for i in range(len(tokens))]
    starts = np.cumsum([0] + [len(tokens) for tokens, _, _ in rows])
    width = max((len(pages) for _, _, pages in rows), default=1)
    return StepBatch(
        token_ids=np.array(ids, np.int32),
        positions=np.array(positions, np.int32),
        seq_start=starts.astype(np.int32),
        context_len=np.array([first + len(tokens) for tokens, first, _ in rows], np.int32),
        page_table=np.array(
            [[*pages, *[0] * (width - len(pages))] for _, _, pages in rows] or np.zeros((0, 1)), np.int32
        ),
        logit_rows=np.array(logits, np.int32),
        sample=sample_batch(len(logits)),
        step=step,
    )


class Model:
    """A two-layer llama with its memory, on some kernels. Weights are the same whatever the kernels."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.specs: dict[str, tuple[WeightSpec, npt.NDArray[np.uint8]]] = {}
        self.rng = np.random.default_rng(7)
        self.weight("embd", DType.Q8_0, VOCAB, D)
        self.weight("out_norm", DType.F32, 1, D)
        for i in range(LAYERS):
            self.weight(f"{i}.norm", DType.F32, 1, D)
            self.weight(f"{i}.q", DType.F16, HEADS * HEAD_DIM, D)
            self.weight(f"{i}.kv", DType.Q4_1, 2 * KV_HEADS * HEAD_DIM, D)
            self.weight(f"{i}.kv_bias", DType.F32, 1, 2 * KV_HEADS * HEAD_DIM)
            self.weight(f"{i}.q_norm", DType.F32, 1, HEAD_DIM)
            self.weight(f"{i}.k_norm", DType.F32, 1, HEAD_DIM)
            self.weight(f"{i}.o", DType.Q5_0, D, HEADS * HEAD_DIM)
            self.weight(f"{i}.post", DType.F32, 1, D)
            self.weight(f"{i}.gate_up", DType.Q8_0, 2 * FFN, D)
            self.weight(f"{i}.down", DType.Q4_0, D, FFN)
        self.at = 0
        calls = self.graph()
        positions = PAGES * PAGE
        angle = np.arange(positions)[:, None] * 100.0 ** -(np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
        self.resources = Resources(
            weights=self.specs,
            rope_tables={"main": np.stack([np.cos(angle), np.sin(angle)], axis=-1).astype(np.float32)},
            kv=np.zeros(PAGES * kernels.kv_page_bytes(SHAPE), np.uint8),
            kv_shape=SHAPE,
            activations=aligned(self.at, 64),
            max_tokens=MAX_TOKENS,
            max_seqs=MAX_SEQS,
            max_logit_rows=MAX_ROWS,
            vocab_size=VOCAB,
        )
        self.program = kernels.compile(calls, self.resources)

    def weight(self, name: str, dtype: DType, rows: int, cols: int) -> None:
        spec = WeightSpec(name, dtype, rows, cols)
        if dtype in (DType.F32, DType.F16):
            values = self.rng.standard_normal((rows, cols)) * (0.1 if rows > 1 else 0.3) + (rows == 1)
            raw = values.astype("f4" if dtype is DType.F32 else "f2").view(np.uint8).reshape(rows, -1)
        else:
            size, blocks = row_bytes(dtype, cols) // (cols // 32), cols // 32
            cube = self.rng.integers(0, 256, (rows, blocks, size), np.uint8)
            head = np.full((rows, blocks, 1), 0.02 if dtype is not DType.Q8_0 else 0.001, np.float16)
            cube[:, :, :2] = head.view(np.uint8)
            if dtype is DType.Q4_1:
                cube[:, :, 2:4] = (-8 * head).view(np.uint8)
            raw = cube.reshape(rows, -1)
        packed = np.zeros(self.kernels.packed_bytes(spec), np.uint8)
        step = self.kernels.row_block(spec) * 3
        for first in range(0, rows, step):
            self.kernels.pack_rows(spec, first, np.ascontiguousarray(raw[first : first + step]), packed)
        self.specs[name] = (spec, packed)

    def buffer(self, name: str, cols: int, kind: Any = "f32", rows: Any = "tokens") -> Buffer:
        type = BufferType(kind, cols, rows)
        made = Buffer(name, type, self.at)
        self.at += -(-self.kernels.buffer_bytes(type, MAX_TOKENS if rows == "tokens" else MAX_ROWS) // 64) * 64
        return made

    def graph(self) -> list[Call]:
        b = self.buffer
        x, xn, xa, qkv = b("x", D), b("xn", D), b("xa", D, "act"), b("qkv", QKV)
        att, gu, act, y = b("att", HEADS * HEAD_DIM, "act"), b("gu", 2 * FFN), b("act", FFN, "act"), b("y", D)
        kept, last = b("kept", D, "f32", "logits"), b("last", D, "act", "logits")
        self.logits = b("logits", VOCAB, "f32", "logits")
        heads: dict[str, Any] = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
        calls = [Call(op="embed", outputs=(x,), weights=("embd",), attrs={"scale": 2.0})]
        for i in range(LAYERS):

            def call(
                op: str, ins: Any, outs: Any, *weights: str, barrier: bool = True, i: int = i, **attrs: Any
            ) -> None:
                names = tuple(f"{i}.{w}" for w in weights)
                calls.append(
                    Call(op=op, inputs=ins, outputs=outs, weights=names, attrs=attrs, layer=i, barrier=barrier)
                )

            call("rms_norm", (x,), (xn,), "norm", eps=1e-5)
            call("quantize", (xn,), (xa,))
            call("matmul", (xn,), (qkv,), "q", out_col=0, barrier=False)
            call("matmul", (xa,), (qkv,), "kv", "kv_bias", out_col=HEADS * HEAD_DIM)
            norms = ("q_norm", "k_norm") if i else ()
            call("rope_store", (qkv,), (qkv,), *norms, layer=i, rope_table="main", eps=1e-6, **heads)
            call("attention", (qkv,), (att,), layer=i, scale=HEAD_DIM**-0.5, window=20 * i, **heads)
            if i:
                call("matmul", (att,), (y,), "o")
                call("rms_norm_add", (y, x), (x,), "post", eps=1e-5)
            else:
                call("matmul", (att,), (x,), "o", accumulate=True)
            call("rms_norm", (x,), (xa,), "norm", eps=1e-5)
            call("matmul", (xa,), (gu,), "gate_up")
            call("glu", (gu,), (act,), act="gelu_tanh" if i else "silu", interleave=32 * i)
            call("matmul", (act,), (y,), "down")
            call("add", (x, y), (x,))
        calls.append(Call(op="gather", inputs=(x,), outputs=(kept,)))
        calls.append(Call(op="rms_norm", inputs=(kept,), outputs=(last,), weights=("out_norm",), attrs={"eps": 1e-5}))
        calls.append(Call(op="matmul", inputs=(last,), outputs=(self.logits,), weights=("embd",)))
        return calls

    def run(self, step: StepBatch) -> F32:
        self.kernels.run(self.program, step)
        start, rows = self.logits.offset, len(step.logit_rows)
        raw = self.resources.activations[start : start + 4 * rows * VOCAB]
        return raw.view(np.float32).reshape(rows, VOCAB).copy()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AI_ENGINE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", params=TARGETS, ids=lambda t: t.name)
def models(request: pytest.FixtureRequest, cache: None) -> Iterator[list[Model]]:
    """On one thread with a cold kernel cache, and on three with a warm one."""
    teams = [NativeTeam(1), NativeTeam(3)]
    kernels = [CpuKernels(team, request.param) for team in teams]
    for each in kernels:
        each.prepare()
    yield [Model(each) for each in kernels]
    for each in kernels:
        each.close()
    for team in teams:
        team.close()


TOKENS = [int(t) for t in np.random.default_rng(0).integers(0, VOCAB, 45)]


def test_program_agrees_with_the_reference(models: list[Model]) -> None:
    reference = Model(ReferenceKernels())
    steps = [
        batch([(TOKENS[:33], 0, [3, 5])], [32]),
        batch([(TOKENS[33:34], 33, [3, 5]), (TOKENS[:7], 0, [1])], [0, 7, 3]),
        batch([(TOKENS[34:40], 34, [3, 5]), (TOKENS[7:8], 7, [1])], []),
        batch([(TOKENS[8:9], 8, [1])], [0]),
    ]
    for step in steps:
        expected = reference.run(step)
        for model in models:
            got = model.run(step)
            np.testing.assert_allclose(got, expected, atol=0.02 * max(1.0, np.abs(expected).max(initial=0)))
            if len(expected):
                assert np.corrcoef(got.ravel(), expected.ravel())[0, 1] > 0.9999


def test_bits_do_not_depend_on_company_chunks_or_threads(models: list[Model]) -> None:
    """The logits of each position, computed whole, in odd chunks, beside another sequence, on 1 and 3 threads."""
    whole = models[0].run(batch([(TOKENS[:40], 0, [0, 2])], [7, 20, 39]))
    for model in models:
        for sizes in ([40], [8, 13, 19], [1, 7, 3, 10, 19], [21, *[1] * 19]):
            for company in (False, True):
                got: dict[int, F32] = {}
                done = 0
                for size in sizes:
                    rows = [(TOKENS[done : done + size], done, [4, 6])]
                    if company:
                        rows.insert(0, (TOKENS[done : done + 3], done, [8, 9]))
                    first = 3 if company else 0
                    wanted = [p for p in (7, 20, 39) if done <= p < done + size]
                    logits = model.run(batch(rows, [first + p - done for p in wanted]))
                    got |= dict(zip(wanted, logits, strict=True))
                    done += size
                np.testing.assert_array_equal(np.stack([got[p] for p in (7, 20, 39)]), whole)


def test_empty_steps(models: list[Model]) -> None:
    for model in models:
        assert model.run(batch([], [])).shape == (0, VOCAB)
        out = model.kernels.run(model.program, batch([(TOKENS[:2], 0, [0])], []))
        assert out.token.shape == (0,)


def test_copied_page_serves_like_its_source(models: list[Model]) -> None:
    for model in models:
        model.run(batch([(TOKENS[:32], 0, [1])], []))
        expected = model.run(batch([(TOKENS[32:33], 32, [1, 2])], [0]))
        model.kernels.copy_page(model.resources, 1, 7)
        np.testing.assert_array_equal(model.run(batch([(TOKENS[32:33], 32, [7, 3])], [0])), expected)


def test_slots_and_rings_tell_what_ran(models: list[Model]) -> None:
    model = models[1]
    slots = model.program.slots
    assert [s.op for s in slots[:3]] == ["embed", "rms_norm", "quantize"]
    assert slots[0].kernel == "embed_q8_0"
    assert slots[4].detail == "T x 96 -> 128 Q4_1 0.kv"
    assert slots[-1].detail == "R x 96 -> 131 Q8_0 embd"
    assert model.program.workspace_bytes > 0
    model.run(batch([(TOKENS[:2], 0, [0])], [1], step=77))
    assert isinstance(model.kernels, CpuKernels)
    for thread in range(3):
        entries = model.kernels.rings.read(thread)[-len(slots) :]
        assert (entries[:, 0] == 77).all()
        np.testing.assert_array_equal(entries[:, 1], np.arange(len(slots)))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"op": "matmul2"}, "an op of"),
        ({"weights": ("nothing",)}, "exists"),
        ({"outputs": (Buffer("x", BufferType("f32", D + 1), 0),)}, "columns of the table"),
        ({"outputs": (Buffer("x", BufferType("act", D), 0),)}, "f32"),
        ({"outputs": (Buffer("x", BufferType("f32", D), 4),)}, "aligned"),
        ({"attrs": {"scale": "big"}}, "scale must be a number"),
    ],
)
def test_illegal_calls_are_named(models: list[Model], change: dict[str, Any], rule: str) -> None:
    x = Buffer("x", BufferType("f32", D), 0)
    fields: dict[str, Any] = {"op": "embed", "outputs": (x,), "weights": ("embd",), "attrs": {"scale": 1.0}}
    model = models[0]
    with pytest.raises(AssertionError, match=rule):
        model.kernels.compile([Call(**(fields | change))], model.resources)
