"""Matmul kernels against float64 on the same quantised inputs, and against themselves at other batch sizes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import llvmlite.binding as llvm
import numpy as np
import numpy.typing as npt
import pytest

from ai_engine.kernels.cpu import build, formats, matmul, registry
from ai_engine.kernels.cpu.formats import QUANTISED, ActLayout
from ai_engine.kernels.cpu.lang import AVX2, TARGETS
from ai_engine.kernels.cpu.pack import pack_rows, packed_bytes
from ai_engine.ports.kernels import WeightSpec
from ai_engine.ports.model import BLOCK, DType
from tests.conformance.kernels.rig import Rig, aligned
from tests.golden import tiny_gguf

F32 = npt.NDArray[np.float32]
TOLERANCE = 2e-6  # of sum |w||x|
HOST = [name for name in ("avx2", "avx512") if name in ("avx2", build.host_target().name)]


@pytest.fixture(scope="module", params=HOST)
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(TARGETS[request.param], matmul.KERNELS)


class Weight:
    def __init__(self, rig: Rig, dtype: DType, rows: int, cols: int, seed: int = 0) -> None:
        self.rig, self.lanes = rig, rig.target.lanes
        rng = np.random.default_rng([seed, rows, cols])
        values = rng.standard_normal((rows, cols)).astype(np.float32)
        raw = tiny_gguf.quantize(values, dtype.value).reshape(rows, -1)
        self.spec = WeightSpec("w", dtype, rows, cols)
        self.packed = aligned(packed_bytes(self.spec, self.lanes))
        pack_rows(self.spec, self.lanes, 0, raw, self.packed)
        self.values = formats.dequantize(dtype, raw).astype(np.float64)
        self.choices = registry.Registry()

    def inputs(self, x: F32) -> npt.NDArray[np.float64]:
        """The values that are multiplied."""
        if self.spec.dtype not in QUANTISED:
            return x.astype(np.float64)
        layout = ActLayout(self.spec.cols)
        return layout.dequantize(layout.quantize(x), x.shape[0]).astype(np.float64)

    def times(
        self, x: F32, add_to: F32 | None = None, bias: F32 | None = None, threads: int = 1, logits: bool = False
    ) -> F32:
        tokens, rows = x.shape[0], self.spec.rows
        before, after = 2, 3  # out is a column range of a wider buffer; nothing beside it may change
        out = np.full((tokens, before + rows + after), 7.0, np.float32)
        if add_to is not None:
            out[:, before:-after] = add_to
        if self.spec.dtype in QUANTISED:
            act = ActLayout(self.spec.cols).quantize(x)
            source = aligned(act.nbytes)
            source[:] = act
            address, stride = source.ctypes.data, 0
        else:
            x = np.ascontiguousarray(x)
            address, stride = x.ctypes.data, x.shape[1]
        name, args = matmul.bind(
            self.spec, self.lanes, x=address, x_stride=stride, w=self.packed.ctypes.data,
            out=out.ctypes.data + 4 * before, out_stride=out.shape[1], bias=0 if bias is None else bias.ctypes.data,
            accumulate=add_to is not None, logits=logits, choices=self.choices,
        )  # fmt: skip
        header = {"T": 0, "R": tokens} if logits else {"T": tokens, "R": 0}
        self.rig.run(name, matmul.ARGS.pack(**args), threads=threads, **header)
        assert (out[:, :before] == 7).all()
        assert (out[:, -after:] == 7).all()
        return out[:, before:-after].copy()

    def check(self, x: F32, got: F32, start: F32 | float = 0.0) -> None:
        exact = self.inputs(x)
        size = np.abs(exact) @ np.abs(self.values).T + np.abs(start)
        error = np.abs(got - (exact @ self.values.T + start)) / np.maximum(size, 1e-30)
        assert error.max() <= TOLERANCE, (self.spec, error.max())


def tokens(count: int, cols: int) -> F32:
    """A third of the groups of every third token and a few of the others have an outlier."""
    rng = np.random.default_rng([count, cols])
    x = rng.standard_normal((count, cols)).astype(np.float32)
    x[::3] *= np.where(rng.random((len(x[::3]), cols)) < 0.012, np.float32(40), np.float32(1))
    return x


def allowed(dtype: DType, cols: int) -> bool:
    return cols % BLOCK[dtype][0] == 0


@pytest.mark.parametrize("dtype", list(DType))
def test_result_and_equality_at_any_batch(rig: Rig, dtype: DType) -> None:
    for rows, cols in ((5, 256), (123, 1536), (40, 160), (37, 123)):
        if not allowed(dtype, cols):
            continue
        weight = Weight(rig, dtype, rows, cols)
        x = tokens(33, cols)
        whole = weight.times(x)
        weight.check(x, whole)
        for count in (1, 2, 3, 4, 5, 7, 8, 13, 16):
            assert np.array_equal(weight.times(x[:count]), whole[:count]), (rows, cols, count)
        for row in (4, 20, 32):
            assert np.array_equal(weight.times(x[row : row + 1]), whole[row : row + 1]), (rows, cols, row)


@pytest.mark.parametrize("dtype", list(DType))
def test_accumulate_bias_threads_and_logits_rows(rig: Rig, dtype: DType) -> None:
    weight = Weight(rig, dtype, 301, 768)
    x = tokens(70, 768)
    start = np.random.default_rng(3).standard_normal((70, 301)).astype(np.float32)
    added = weight.times(x, add_to=start)
    weight.check(x, added, start)
    assert np.array_equal(weight.times(x[69:], add_to=start[69:])[0], added[69])
    bias = start[0].copy()
    biased = weight.times(x, bias=bias)
    assert np.array_equal(biased[0], added[0])  # both start the accumulator
    weight.check(x, biased, bias)
    assert np.array_equal(weight.times(x, threads=3, bias=bias), biased)
    assert np.array_equal(weight.times(x[:2], logits=True, bias=bias), biased[:2])


@pytest.mark.parametrize("dtype", [t for t in QUANTISED if t not in (DType.Q4_K, DType.Q5_K)])
def test_extreme_codes_do_not_saturate(rig: Rig, dtype: DType) -> None:
    """All codes at one end and all activations at +-127: the largest partial sums there are."""
    rows, cols = 17, 256
    weight = Weight(rig, dtype, rows, cols)
    for sign in (1.0, -1.0):
        for byte in (0x00, 0xFF, 0x7F, 0x80):
            raw = tiny_gguf.quantize(np.ones((rows, cols), np.float32), dtype.value).reshape(rows, -1)
            blocks = raw.reshape(-1, BLOCK[dtype][1])
            codes = {
                DType.Q6_K: slice(0, 192),
                DType.Q3_K: slice(0, 96),
                DType.Q4_1: slice(4, 20),
                DType.Q5_1: slice(4, 24),
            }
            blocks[:, codes.get(dtype, slice(2, None))] = byte
            pack_rows(weight.spec, weight.lanes, 0, raw, weight.packed)
            weight.values = formats.dequantize(dtype, raw).astype(np.float64)
            x = np.full((5, cols), sign, np.float32)
            weight.check(x, weight.times(x))


@pytest.mark.parametrize("dtype", [DType.Q4_1, DType.Q8_0, DType.Q3_K, DType.Q6_K, DType.IQ4_NL])
def test_avx_vnni_without_avx512(dtype: DType) -> None:
    """vpdpbusd on eight lanes, where this machine has it."""
    features = llvm.get_host_cpu_features()
    target = replace(AVX2, features=AVX2.features + ",+avxvnni") if features.get("avxvnni") else AVX2
    rig = Rig(target, [d for d in matmul.KERNELS if d.name == matmul.kernel_name(dtype)])
    weight = Weight(rig, dtype, 45, 768)
    x = tokens(13, 768)
    whole = weight.times(x)
    weight.check(x, whole)
    assert np.array_equal(np.concatenate([weight.times(x[i : i + 1]) for i in range(13)]), whole)


def with_outliers(x: F32, which: npt.NDArray[np.bool_]) -> F32:
    """Groups [rows, groups] of x that have an outlier, and others that have none."""
    groups = np.clip(x, -2, 2).reshape(*which.shape, 32)
    column = np.arange(which.size).reshape(which.shape) * 7 % 32  # every one
    at = np.arange(32) == column[:, :, None]
    return np.where(at & which[:, :, None], np.float32(-50), groups).reshape(x.shape).astype(np.float32)


@pytest.mark.parametrize("dtype", QUANTISED)
def test_outliers_in_every_column_and_any_company(rig: Rig, dtype: DType) -> None:
    """Tiles where no token, some, or all have outliers: the same bits as alone; padding rows, several batches of row
    blocks, K staged in parts; and exact where everything else is 0."""
    rows, cols = 16 * matmul.OUTLIER_BLOCKS * 2 + 21, 1280
    weight = Weight(rig, dtype, rows, cols)
    some = np.random.default_rng(5).random((21, cols // 32)) < 0.3
    some[:4], some[5], some[16:] = False, True, True
    x = with_outliers(tokens(21, cols), some)
    layout = ActLayout(cols)
    assert ((layout.records(layout.quantize(x), 21)["column"] >= 0) == some).all()
    start = tokens(21, rows)
    whole, added = weight.times(x), weight.times(x, add_to=start)
    weight.check(x, whole)
    weight.check(x, added, start)
    for row in range(21):
        assert np.array_equal(weight.times(x[row : row + 1])[0], whole[row]), row
        assert np.array_equal(weight.times(x[row : row + 1], add_to=start[row : row + 1])[0], added[row]), row
    for first, count in ((0, 4), (3, 4), (4, 8), (5, 16), (14, 3)):
        part = weight.times(x[first : first + count], threads=1 + count % 2)
        assert np.array_equal(part, whole[first : first + count]), (first, count)
    alone = np.zeros((32, cols), np.float32)  # one column each: the weights themselves
    alone[np.arange(32), np.arange(32) * 33] = 3.0
    expected = weight.values[:, np.arange(32) * 33].T * 3
    np.testing.assert_allclose(weight.times(alone), expected, rtol=3e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", [DType.Q4_1, DType.Q6_K, DType.Q8_0, DType.F16])
def test_every_variant_has_the_same_bits(rig: Rig, dtype: DType) -> None:
    """Whatever a registry may choose, and what it may not but the kernel must bear."""
    weight = Weight(rig, dtype, 301, 768)
    x = tokens(131, 768)
    whole = weight.times(x)
    weight.check(x, whole)
    named = {name: values for rows in registry.ROWS for name, values in registry.variants("matmul", rows).items()}
    named["all at once"] = {"chunk_bytes": 1, "ahead_bytes": 0, "span_tokens": 16, "tile_tokens": 4}
    for name, values in named.items():
        weight.choices = registry.Forced(values)
        for count in (1, 16, 131):
            assert np.array_equal(weight.times(x[-count:], threads=1 + count % 2), whole[-count:]), (name, count)


def test_no_rows_is_no_work(rig: Rig) -> None:
    weight = Weight(rig, DType.Q4_1, 8, 64)
    assert weight.times(np.zeros((0, 64), np.float32)).shape == (0, 8)


SHAPES = [(t, cols) for cols in (32, 64, 160, 256, 512, 640, 1536, 2048) for t in DType if allowed(t, cols)]


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "cols"), SHAPES)
def test_every_shape(rig: Rig, dtype: DType, cols: int) -> None:
    for rows in (1, 5, 123, 301, 1030):
        weight = Weight(rig, dtype, rows, cols)
        x = tokens(130, cols)
        whole = weight.times(x)
        weight.check(x, whole)
        assert np.array_equal(np.concatenate([weight.times(x[i : i + 1]) for i in range(130)]), whole)
        for count in (1, 2, 3, 4, 5, 7, 8, 13, 16, 33, 64, 129):
            assert np.array_equal(weight.times(x[-count:], threads=1 + count % 2), whole[-count:]), (rows, count)


# --- machine code ----------------------------------------------------------------------------------------------------


def inner_loop(text: str, function: str) -> Counter[str]:
    """Instructions of a function's largest basic block; "stack" counts vector accesses to the stack."""
    body = text[text.index(f"\n{function}:") :]
    body = body[: body.index(".Lfunc_end")]
    block = max(re.split(r"\n(?=\.LBB)", body), key=len)
    lines = [line.strip() for line in block.splitlines() if line.startswith("\t") and not line.startswith("\t.")]
    counts = Counter(line.split()[0] for line in lines)
    counts["stack"] = sum("(%rsp)" in line and ("ymm" in line or "zmm" in line) for line in lines)
    return counts


AVX2_SPILLS = {"q4_0": 12, "q4_1": 4, "q4_k": 10, "q5_0": 14, "q6_k": 25, "q8_0": 48}
"""Vector accesses to the stack at four tokens: 16 registers nearly suffice; forcing LLVM's order costs more. None at
one and two tokens, but for the types with scales that must be kept. Q8_0 spills in its staged tile alone, where LLVM
does token after token and keeps all codes and their magnitudes for the next."""


@pytest.mark.parametrize(
    ("name", "maddubs", "adds", "madds", "fma"),
    [
        ("q4_0", 8, 7, 1, 1),
        ("q4_1", 8, 7, 1, 2),
        ("q4_k", 8, 7, 1, 2),
        ("q5_0", 8, 6, 2, 1),
        ("q6_k", 8, 4, 5, 1),
        ("q8_0", 8, 0, 8, 1),
    ],
)
def test_inner_loops_on_avx2_are_what_was_designed(name: str, maddubs: int, adds: int, madds: int, fma: int) -> None:
    """Per token and 8 rows x 32 columns of 4-bit codes: 8 vpmaddubsw, 7 vpaddw, 1 vpmaddwd, a conversion. Five-bit sums
    are widened twice, bytes eight times; Q6_K has scales of 16 columns and multiplies with vpmaddwd."""
    text = build.assembly([d for d in matmul.KERNELS if d.name == f"matmul_{name}"], AVX2)
    scales = {"q4_k": 2}.get(name, 0)  # bytes that are converted
    for tile, count in (("1x1", 1), ("1x2", 2), ("1x3", 3), ("1x4", 4), ("1x4_staged", 4)):
        ops = inner_loop(text, f"matmul_{name}_{tile}")
        assert (ops["vpmaddubsw"], ops["vpaddw"], ops["vpmaddwd"]) == (maddubs * count, adds * count, madds * count)
        assert ops["vcvtdq2ps"] == count + scales
        assert fused(ops) == fma * count
        few = {"q4_k": 1, "q6_k": 10}.get(name, 0)
        many = AVX2_SPILLS[name] if name != "q8_0" or tile.endswith("staged") else 0
        assert ops["stack"] <= (many if count > 2 else few), tile


@pytest.mark.parametrize(
    ("name", "fma"), [("q4_0", 1), ("q4_1", 2), ("q4_k", 2), ("q5_0", 1), ("q8_0", 1), ("q6_k", 2)]
)
def test_inner_loops_on_avx512_are_what_was_designed(name: str, fma: int) -> None:
    """Per token and 16 rows x 32 columns: 8 vpdpbusd, a conversion (two where scales are of 16 columns) and the fma of
    product and minimum. Nothing is spilled up to 8 tokens; at 16 some of 32 registers' worth of scales are."""
    text = build.assembly([d for d in matmul.KERNELS if d.name == f"matmul_{name}"], TARGETS["avx512"])
    conversions, scales = {"q6_k": (2, 2), "q4_k": (1, 2)}.get(name, (1, 0))
    for count in (1, 2, 3, 4, 8, 16):
        ops = inner_loop(text, f"matmul_{name}_1x{count}")
        assert (ops["vpdpbusd"], ops["vcvtdq2ps"]) == (8 * count, conversions * count + scales)
        assert fused(ops) == fma * count
        assert ops["stack"] <= (36 if count == 16 else 0), count


def fused(ops: Counter[str]) -> int:
    return sum(n for op, n in ops.items() if op.startswith(("vfmadd", "vfnmadd")))


@pytest.mark.parametrize("target", ["neon"])
def test_foreign_targets_compile(target: str) -> None:
    """In a child process: an instruction that LLVM cannot select aborts."""
    script = (
        "from ai_engine.kernels.cpu import build, lang, matmul; "
        "names = 'q4_0', 'q5_1', 'q8_0', 'q3_k', 'q4_k', 'q6_k', 'iq4_nl', '16'; "
        "kernels = [d for d in matmul.KERNELS if d.name.endswith(names)]; "
        f"print(build.assembly(kernels, lang.TARGETS[{target!r}]).count('sdot'))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 100
