"""Attention against the reference at odd shapes, and equal bits in any company."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ai_engine.hardware.team import NativeTeam
from ai_engine.kernels.cpu import attention, build, registry
from ai_engine.kernels.cpu.attention import KERNELS, attention_args, workspace_bytes
from ai_engine.kernels.cpu.executor import Harness
from ai_engine.kernels.cpu.formats import ActLayout
from ai_engine.kernels.cpu.kv import KvLayout, kv_lanes
from ai_engine.kernels.cpu.lang import AVX2, AVX512, Target
from ai_engine.kernels.reference import ops
from ai_engine.ports.kernels import KvShape
from tests.conformance.programs import aligned

RUNNABLE = [t for t in (AVX2, AVX512) if t.lanes <= build.host_target().lanes]
F32 = npt.NDArray[np.float32]
_EXPECTED: dict[str, F32] = {}


@dataclass
class Bench:
    """Sequences with keys and values for every position, in shuffled pages, and kernels to read them with."""

    target: Target
    threads: int
    harness: Harness
    kv_type: Literal["f16", "int8"] = "f16"

    def setup(
        self, heads: int, kv_heads: int, head_dim: int, lengths: Sequence[int], page_tokens: int = 32, seed: int = 0
    ) -> None:
        rng = np.random.default_rng(seed)
        self.heads, self.kv_heads, self.head_dim, self.lengths = heads, kv_heads, head_dim, lengths
        self.layer, self.page_tokens = 1, page_tokens
        self.choices = registry.Registry()
        shape = KvShape(num_layers=2, kv_heads=kv_heads, head_dim=head_dim, page_tokens=page_tokens, dtype=self.kv_type)
        self.layout = KvLayout.of(shape, kv_lanes(self.target))
        self.pages_per_seq = -(-max(lengths) // page_tokens) + 1
        pages = rng.permutation(len(lengths) * self.pages_per_seq).astype(np.int32)
        self.page_table = pages.reshape(len(lengths), -1)
        self.kv = aligned(pages.size * self.layout.page_bytes, fill=0xFF)  # NaN wherever nothing is stored
        self.q, self.k, self.v = [], [], []
        for s, length in enumerate(lengths):
            self.q.append(rng.standard_normal((length, heads, head_dim)).astype(np.float32) * np.float32(1.5))
            self.k.append(rng.standard_normal((length, kv_heads, head_dim)).astype(np.float32))
            self.v.append(rng.standard_normal((length, kv_heads, head_dim)).astype(np.float32))
            self._store(s)

    def _store(self, s: int) -> None:
        """Write the keys and values of a sequence where the layout says, and keep them as they read back."""
        lay, e = self.layout, self.layout.element
        p = np.arange(self.lengths[s])
        pages, at = self.page_table[s, p // self.page_tokens].astype(np.int64), p % self.page_tokens
        dims = np.arange(self.head_dim)
        for g in range(self.kv_heads):
            base = pages * lay.page_bytes + self.layer * lay.layer_bytes + g * lay.head_bytes
            v = (base + e.v_offset(at, self.head_dim)) // e.nbytes
            k = (base + e.k_offset(at, self.head_dim, self.page_tokens, lay.lanes)) // e.nbytes
            sides = (
                (self.v[s], v[:, None] + dims, e.v_scale_offset(at, self.head_dim, self.page_tokens)),
                (self.k[s], k[:, None] + dims * lay.lanes, e.k_scale_offset(at, self.head_dim, self.page_tokens)),
            )
            for x, where, scale_at in sides:
                if not e.has_scale:
                    self.kv.view(np.float16)[where] = x[:, g]
                    x[:, g] = x[:, g].astype(np.float16)
                    continue
                q, scale = ops.quantize_kv(x[:, g])
                self.kv.view(np.int8)[where] = q
                self.kv.view(np.float32)[(base + scale_at) // 4] = scale
                x[:, g] = q * scale[:, None]

    def run(self, spans: Sequence[tuple[int, int, int]], window: int = 0, act: bool = False) -> F32:
        """Rows of ``spans`` (sequence, first position, end), in that order: f32[T, heads * head_dim]."""
        heads, hd = self.heads, self.head_dim
        rows = [(i, s, p) for i, (s, first, end) in enumerate(spans) for p in range(first, end)]
        t = len(rows)
        qkv = aligned(4 * t * (heads + 2 * self.kv_heads) * hd).view(np.float32).reshape(t, -1)
        for r, (_, s, p) in enumerate(rows):
            qkv[r, : heads * hd] = self.q[s][p].reshape(-1)
        arrays: dict[str, npt.NDArray[Any]] = {
            "positions": np.array([p for _, _, p in rows], np.int32),
            "row_seq": np.array([i for i, _, _ in rows], np.int32),
            "seq_start": np.cumsum([0] + [end - first for _, first, end in spans]).astype(np.int32),
            "context_len": np.array([end for _, _, end in spans], np.int32),
            "page_table": np.ascontiguousarray(self.page_table[[s for s, _, _ in spans]]),
        }
        sizes = {"max_tokens": max(t, 1), "max_seqs": len(spans), "max_context": max(self.lengths)}
        work = aligned(workspace_bytes(self.target, **sizes, heads=heads, kv_heads=self.kv_heads, head_dim=hd), 0xFF)
        layout = ActLayout(heads * hd) if act else None
        out = aligned(layout.nbytes(t) if layout else 4 * t * heads * hd)
        name, block = attention_args(
            self.target,
            self.layout,
            qkv=qkv.ctypes.data,
            out=out.ctypes.data,
            out_is_act=act,
            kv=self.kv.ctypes.data,
            workspace=work.ctypes.data,
            layer=self.layer,
            heads=heads,
            scale=hd**-0.5,
            window=window,
            choices=self.choices,
            **sizes,
        )
        definition = self.harness.definitions[name]
        values = {
            n: int(w) if definition.args.types[n] != "f32" else float(np.array([w]).view(np.float32)[0])
            for n, w in zip(definition.args.types, block, strict=True)
        }
        header = {n: a.ctypes.data for n, a in arrays.items()}
        header |= {"T": t, "S": len(spans), "R": 0, "page_stride": arrays["page_table"].shape[1]}
        self.harness.run(name, header, **values)
        return layout.dequantize(out, t) if layout else out.view(np.float32).reshape(t, -1)

    def expected(self, spans: Sequence[tuple[int, int, int]], window: int = 0) -> F32:
        """The reference's rows; kept, as the data depend on the sizes alone and not on the target."""
        key = str(
            (
                self.kv_type,
                self.heads,
                self.kv_heads,
                self.head_dim,
                self.lengths,
                float(self.q[0][0, 0, 0]),
                spans,
                window,
            )
        )
        if key not in _EXPECTED:
            _EXPECTED[key] = self._expected(spans, window)
        return _EXPECTED[key]

    def _expected(self, spans: Sequence[tuple[int, int, int]], window: int) -> F32:
        out = []
        for s, first, end in spans:
            k, v = self.k[s][:end], self.v[s][:end]
            positions = np.arange(first, end, dtype=np.int32)
            out.append(ops.attention(self.q[s][first:end], k, v, positions, self.head_dim**-0.5, window))
        return np.concatenate(out)


CASES = [(t, n, kind) for t in RUNNABLE for n, kind in ((1, "f16"), (3, "f16"), (1, "int8"), (3, "int8"))]


@pytest.fixture(scope="module", params=CASES, ids=lambda p: f"{p[0].name}-{p[1]}-{p[2]}")
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    target, threads, kv_type = request.param
    team = NativeTeam(threads) if threads > 1 else None
    harness = Harness(KERNELS, target, team)
    yield Bench(target, threads, harness, kv_type)
    harness.close()
    if team:
        team.close()


SHAPES = [(9, 3, 64, 32), (4, 1, 256, 32), (4, 2, 16, 64), (2, 2, 40, 32), (14, 2, 80, 96), (5, 5, 24, 32)]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "page_tokens"), SHAPES)
def test_matches_the_reference(bench: Bench, heads: int, kv_heads: int, head_dim: int, page_tokens: int) -> None:
    lengths = [1, 31, 32, 33, 300, 70, 257, 64]
    bench.setup(heads, kv_heads, head_dim, lengths, page_tokens)
    mixed = [(4, 256, 300), (1, 30, 31), (5, 57, 70), (6, 254, 257), (2, 0, 32), (3, 28, 33), (7, 57, 64)]
    decode = [(s, n - 1, n) for s, n in enumerate(lengths)]
    for spans in ([(0, 0, 1)], decode, mixed):
        np.testing.assert_allclose(bench.run(spans), bench.expected(spans), atol=2e-5, rtol=1e-4)
    for window in (1, 33, 256):
        got = bench.run(mixed, window)
        np.testing.assert_allclose(got, bench.expected(mixed, window), atol=2e-5, rtol=1e-4)


def test_every_variant_has_the_same_bits(bench: Bench) -> None:
    """Whatever a registry may choose: long contexts, split into more or fewer pieces."""
    lengths = [1500, 2, 700]
    bench.setup(6, 2, 32, lengths)
    for spans in ([(0, 1499, 1500)], [(0, 1400, 1500), (1, 0, 2), (2, 699, 700)]):
        for window in (0, 900):
            bench.choices = registry.Registry()
            whole = bench.run(spans, window)
            np.testing.assert_allclose(whole, bench.expected(spans, window), atol=2e-5, rtol=1e-4)
            for values in (*registry.variants("attention", "few").values(), {"items_per_thread": 1}):
                bench.choices = registry.Forced(values)
                assert np.array_equal(bench.run(spans, window), whole), values


def test_sixteen_sequences_of_any_rows(bench: Bench) -> None:
    rng = np.random.default_rng(4)
    lengths = [int(n) for n in rng.integers(1, 600, 16)]
    bench.setup(6, 2, 32, lengths)
    for most in (1, 3, 70):
        spans = [(int(s), max(0, lengths[s] - int(rng.integers(1, most + 1))), lengths[s]) for s in rng.permutation(16)]
        for window in (0, 300):
            got = bench.run(spans, window)
            np.testing.assert_allclose(got, bench.expected(spans, window), atol=2e-5, rtol=1e-4)


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    kv_heads = draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(1, 530), min_size=1, max_size=5))
    chosen = draw(st.permutations(range(len(lengths))))
    spans = []
    for s in chosen[: draw(st.integers(1, len(lengths)))]:
        end = draw(st.integers(1, lengths[s]))
        spans.append((s, draw(st.integers(max(0, end - 40), end - 1)), end))
    return {
        "heads": kv_heads * draw(st.integers(1, 7)),
        "kv_heads": kv_heads,
        "head_dim": 8 * draw(st.integers(1, 12)),
        "lengths": lengths,
        "page_tokens": draw(st.sampled_from([32, 64])),
        "spans": spans,
        "window": draw(st.sampled_from([0, 0, 1, 31, 256, 300])),
    }


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(shape=shapes())
def test_any_shape(bench: Bench, shape: dict[str, Any]) -> None:
    spans, window = shape.pop("spans"), shape.pop("window")
    bench.setup(**shape)
    np.testing.assert_allclose(bench.run(spans, window), bench.expected(spans, window), atol=2e-5, rtol=1e-4)


def test_scores_far_apart_stay_exact(bench: Bench) -> None:
    bench.setup(2, 1, 16, [600])
    bench.q[0] *= np.float32(60)
    spans = [(0, 0, 600)]
    got, expected = bench.run(spans), bench.expected(spans)
    assert np.all(np.isfinite(got))
    np.testing.assert_allclose(got, expected, atol=3e-3)


def test_nan_shows_in_its_row_alone(bench: Bench) -> None:
    bench.setup(4, 2, 16, [40, 300])
    bench.q[1][290] = np.nan
    bench.k[0][30] = np.nan
    bench._store(0)
    out = bench.run([(0, 20, 40), (1, 280, 300)])
    assert np.isfinite(out).all(axis=1).tolist() == [True] * 10 + [False] * 10 + [True] * 10 + [False] + [True] * 9


_BITS: dict[tuple[str, str, int], F32] = {}
"""Rows of a case by target, kind of page and window: equal for every number of threads."""


@pytest.mark.parametrize("window", [0, 100])
def test_bits_do_not_depend_on_company(bench: Bench, window: int) -> None:
    bench.setup(6, 2, 48, [700, 40, 300])
    whole = bench.run([(0, 0, 700)], window)
    np.testing.assert_array_equal(_BITS.setdefault((bench.target.name, bench.kv_type, window), whole), whole)
    for size in (1, 2, 3, 5, 7, 13, 64):
        for first in (0, 250, 255, 511, 700 - size):
            end = first + size
            others = [(2, 290, 300), (1, 3, 40)]
            alone = bench.run([(0, first, end)], window)
            np.testing.assert_array_equal(alone, whole[first:end])
            np.testing.assert_array_equal(bench.run([*others, (0, first, end)], window)[-size:], alone)
            np.testing.assert_array_equal(bench.run([(0, first, end), *others], window)[:size], alone)


def test_act_output_is_the_quantised_f32_output(bench: Bench) -> None:
    bench.setup(9, 3, 32, [400, 20])
    for spans in ([(0, 399, 400)], [(1, 10, 20), (0, 300, 400)]):
        layout, exact = ActLayout(9 * 32), bench.run(spans)
        expected = layout.dequantize(layout.quantize(exact), len(exact))
        np.testing.assert_array_equal(bench.run(spans, act=True), expected)


def test_sequences_that_find_no_room_for_partials_give_the_same_bits(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.setup(4, 2, 16, [600, 300, 600])
    spans = [(s, n - 1, n) for s, n in enumerate(bench.lengths)]
    expected = bench.run(spans)
    for room in (0, 2000, 4000, 100_000):
        monkeypatch.setattr(attention, "MAX_PARTIAL_BYTES", room)
        np.testing.assert_array_equal(bench.run(spans), expected)


def test_compiles_for_neon() -> None:
    code = "from ai_engine.kernels.cpu.attention import *; from ai_engine.kernels.cpu import build, lang;"
    code += "lang.Kernel.barrier = lambda k: None;"  # its inline assembly needs a parser that only a native LLVM has
    code += "print(build.assembly(KERNELS, lang.NEON).count('fmla'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100
