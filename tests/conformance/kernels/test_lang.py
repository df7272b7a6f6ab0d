"""The kernel language: formulas against NumPy on every target that this machine runs; foreign targets compile."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ai_engine.kernels.cpu import build
from ai_engine.kernels.cpu.lang import AVX2, AVX512, NEON, Kernel, KernelDef, Target, Value, detect_target, kernel

RUNNABLE = [t for t in (AVX2, AVX512) if t.lanes <= build.host_target().lanes]
targets = pytest.mark.parametrize("target", RUNNABLE, ids=lambda t: t.name)


def address(array: npt.NDArray[np.generic]) -> int:
    return int(array.ctypes.data)


@kernel(x="ptr", y="ptr", scale="f32", cols="i64")
def lang_axpy(k: Kernel) -> None:
    x, y = k.array(k.arg.x, "f32"), k.array(k.arg.y, "f32")

    def body(i: Value, lanes: int) -> None:
        y[i] = k.fma(x.load(i, lanes), k.arg.scale, y.load(i, lanes))

    k.for_vectors(k.arg.cols, body)


@kernel(x="ptr", exp="ptr", log="ptr", cols="i64")
def lang_exp_log(k: Kernel) -> None:
    x, exp, log = (k.array(p, "f32") for p in (k.arg.x, k.arg.exp, k.arg.log))

    def body(i: Value, lanes: int) -> None:
        exp[i] = k.exp(x.load(i, lanes))
        log[i] = k.log(x.load(i, lanes))

    k.for_vectors(k.arg.cols, body)


@kernel(u="ptr", s="ptr", out="ptr")
def lang_dots(k: Kernel) -> None:
    n = k.lanes
    out, zero = k.array(k.arg.out, "i32"), k.i32(0, n)
    u, s = k.load(k.arg.u, "i8", 4 * n), k.load(k.arg.s, "i8", 4 * n)
    out[0] = k.dot_u8s8(zero, u, s)
    out[n] = k.dot_s8s8(zero, u, s)
    out[2 * n] = k.dot_u8s8(zero, u & 127, s, max_u=127)
    out[3 * n] = k.madd_ones(k.maddubs(u & 127, s))


@kernel(x="ptr", out="ptr", half="ptr", n="i64", swap="i64")
def lang_misc(k: Kernel) -> None:
    mask = k.lane_mask(k.arg.n, k.lanes)
    x = k.masked_load(k.arg.x, "f32", mask, -1.0)
    out = k.array(k.arg.out, "f32")
    k.masked_store(out.at(0), k.round_i32(x).to_f32(), mask)
    k.store(k.arg.half, x.to_f16())
    out[16] = k.reduce_add(x)
    out[17] = k.reduce_max(x)
    best = k.var(k.f32(0.0))
    with k.loop(0, k.arg.n) as i, k.if_(x[i.trunc("i32")] > best.v):
        best.v = x[i.trunc("i32")]
    out[18] = best.v
    with k.if_else(k.arg.swap.ne(0)) as (then, otherwise):
        with then:
            out[19] = 1.0
        with otherwise:
            out[19] = 2.0
    steps = k.var(k.i64(0))
    with k.forever() as leave_if:
        leave_if(steps.v >= 7)
        steps.v = steps.v + 1
    out[20] = steps.v.to_f32()
    out[21] = k.bf16_to_f32(k.f32_to_bf16(x[0]))


KERNELS: list[KernelDef] = [lang_axpy, lang_exp_log, lang_dots, lang_misc]


@targets
def test_vectors_and_tail(target: Target) -> None:
    loaded = build.jit([lang_axpy], target)
    rng = np.random.default_rng(0)
    for n in (0, 1, 5, 16, 37):
        x, y = rng.standard_normal((2, n + 1)).astype(np.float32)
        expected = y.copy()
        expected[:n] += x[:n] * np.float32(0.5)  # exact: the product with 0.5 does not round
        args = lang_axpy.args.pack(x=address(x), y=address(y), scale=0.5, cols=n)
        loaded.call("lang_axpy", address(args), 0)
        np.testing.assert_array_equal(y, expected)


@targets
def test_exp_and_log_are_within_an_ulp_or_so(target: Target) -> None:
    loaded = build.jit([lang_exp_log], target)
    special = [np.nan, np.inf, -np.inf, 0.0, -0.0, 88.9, -87.4, 1.0]
    x = np.concatenate([np.linspace(-87.3, 88.7, 100_001), np.geomspace(1.2e-38, 3e38, 100_001), special])
    x = x.astype(np.float32)
    exp, log = np.empty_like(x), np.empty_like(x)
    args = lang_exp_log.args.pack(x=address(x), exp=address(exp), log=address(log), cols=len(x))
    loaded.call("lang_exp_log", address(args), 0)
    np.testing.assert_array_equal(exp[-8:], np.array([np.nan, np.inf, 0, 1, 1, np.inf, 0, exp[-1]], np.float32))
    np.testing.assert_array_equal(log[-8:-3], np.array([np.nan, np.inf, -np.inf, -np.inf, -np.inf], np.float32))
    with np.errstate(all="ignore"):
        for got, exact in ((exp, np.exp(x.astype(np.float64))), (log, np.log(x.astype(np.float64)))):
            ok = np.isfinite(exact) & (np.abs(exact) < 3.4e38) & ((got is log) | (exact > 1.2e-38))
            ulp = np.abs(got - exact)[ok] / np.spacing(np.abs(exact[ok]).astype(np.float32))
            assert ulp.max() < 1.5


@targets
def test_integer_dots_are_exact(target: Target) -> None:
    loaded = build.jit([lang_dots], target)
    n = target.lanes
    rng = np.random.default_rng(1)
    for trial in range(20):
        u = rng.integers(0, 256, 4 * n).astype(np.uint8)
        s = rng.integers(-127, 128, 4 * n).astype(np.int8)
        u[u == 128] = 129
        if trial == 0:
            u[:], s[:] = 255, -127
        out = np.zeros(4 * n, np.int32)
        loaded.call("lang_dots", address(lang_dots.args.pack(u=address(u), s=address(s), out=address(out))), 0)

        def dot(a: npt.NDArray[Any], s: npt.NDArray[np.int8] = s) -> npt.NDArray[Any]:
            return np.asarray((a.astype(np.int64) * s).reshape(-1, 4).sum(1))

        np.testing.assert_array_equal(out, np.concatenate([dot(u), dot(u.view(np.int8)), dot(u & 127), dot(u & 127)]))


@targets
def test_masks_loops_and_branches(target: Target) -> None:
    loaded = build.jit([lang_misc], target)
    x = np.array([0.5, 1.5, -2.5, 3.49], np.float32)
    out, half = np.full(32, -9, np.float32), np.zeros(16, np.float16)
    args = lang_misc.args.pack(x=address(x), out=address(out), half=address(half), n=4, swap=0)
    loaded.call("lang_misc", address(args), 0)
    np.testing.assert_array_equal(out[:5], np.array([0, 2, -2, 3, -9], np.float32))
    np.testing.assert_array_equal(half[:5], np.array([0.5, 1.5, -2.5, 3.49, -1], np.float16))
    padded = np.concatenate([x, np.full(target.lanes - 4, -1, np.float32)])
    while len(padded) > 1:
        padded = padded[: len(padded) // 2] + padded[len(padded) // 2 :]
    np.testing.assert_array_equal(out[16:22], np.array([padded[0], x.max(), x.max(), 2, 7, 0.5], np.float32))


def test_avx512_dots_use_vnni() -> None:
    text = build.assembly([lang_dots], AVX512)
    assert text.count("vpdpbusd") >= 3
    assert "zmm" in text


def test_foreign_target_compiles() -> None:
    """In a child: an instruction that LLVM cannot select aborts the process."""
    code = "from tests.conformance.kernels.test_lang import *; print(build.assembly(KERNELS, NEON).count('sdot'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 3
    assert NEON.lanes == 4


def test_detect_target_takes_the_best_and_obeys_force() -> None:
    avx2 = frozenset({"avx2", "fma", "f16c"})
    avx512 = avx2 | {"avx512bw", "avx512vl", "avx512dq", "avx512vnni", "avx512vbmi"}
    assert detect_target(avx2, "znver3").name == "avx2"
    assert detect_target(avx2, "znver3").cpu == "znver3"
    assert detect_target(avx512, "znver4").has("avx512vbmi")
    assert detect_target(avx512, "znver4", forced="avx2") == AVX2
    with pytest.raises(ValueError, match="AI_ENGINE_CPU"):
        detect_target(avx512, "", forced="sse9")
    with pytest.raises(RuntimeError, match="f16c"):
        detect_target(frozenset({"avx2", "fma"}), "")


def test_values_have_no_truth() -> None:
    @kernel(n="i64")
    def wrong(k: Kernel) -> None:
        if k.arg.n > 3:
            pass

    with pytest.raises(TypeError, match=r"k\.if_"):
        build.emit_module([wrong], AVX2)
