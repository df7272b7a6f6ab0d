"""Row-wise kernels against the NumPy reference, at odd shapes, on both instruction sets, on one to three threads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ai_engine.hardware.team import NativeTeam
from ai_engine.kernels.cpu import build, elementwise, pack
from ai_engine.kernels.cpu.executor import Harness
from ai_engine.kernels.cpu.formats import ActLayout, dequantize
from ai_engine.kernels.cpu.kv import KvLayout
from ai_engine.kernels.cpu.lang import AVX2, AVX512
from ai_engine.kernels.reference import ops
from ai_engine.ports.kernels import KvShape, WeightSpec
from ai_engine.ports.model import DType, row_bytes

F32 = npt.NDArray[np.float32]
TARGETS = [t for t in (AVX2, AVX512) if t.lanes <= build.host_target().lanes]
ROWS = (0, 1, 3, 17)


class Machine:
    """The harness on 1 and on 3 threads; ``run`` checks that both write the same bits."""

    def __init__(self, target: Any) -> None:
        self.lanes = target.lanes
        self.team = NativeTeam(3)
        self.harnesses = [Harness(elementwise.KERNELS, target), Harness(elementwise.KERNELS, target, self.team)]

    def run(self, name: str, header: dict[str, int], out: npt.NDArray[Any], /, **args: Any) -> npt.NDArray[Any]:
        """Arrays among the arguments become addresses; ``out`` is restored between the runs."""
        before, results = out.copy(), []
        for harness in self.harnesses:
            out[...] = before
            values = {n: v.ctypes.data if isinstance(v, np.ndarray) else v for n, v in args.items()}
            harness.run(name, header, **values)
            results.append(out.copy())
        np.testing.assert_array_equal(results[0], results[1])
        return results[1]

    def close(self) -> None:
        for harness in self.harnesses:
            harness.close()
        self.team.close()


@pytest.fixture(scope="module", params=TARGETS, ids=lambda t: t.name)
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    m = Machine(request.param)
    yield m
    m.close()


def random(*shape: int, seed: int = 0) -> F32:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def close(actual: F32, expected: F32, tolerance: float = 2e-6) -> None:
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def same_act(layout: ActLayout, act: npt.NDArray[np.uint8], x: F32) -> None:
    """The kernel's records are those of the reference quantiser, given the kernel's own f32 values."""
    rows = x.shape[0]
    got, expected = layout.records(act, rows), layout.records(layout.quantize(x), rows)
    for name in ("q", "scale", "dsum", "offset", "sum16", "offset16", "outlier", "column"):
        np.testing.assert_array_equal(got[name], expected[name], err_msg=name)


@pytest.mark.parametrize("cols", [1, 7, 64, 100, 576])
@pytest.mark.parametrize("rows", ROWS)
def test_rms_norm(machine: Machine, rows: int, cols: int) -> None:
    x, weight = random(rows, cols) * 30, random(cols, seed=1)
    common = {"weight": weight, "cols": cols, "eps": 1e-5}
    out = np.zeros((rows, cols), np.float32)
    machine.run("rms_norm", {"T": rows, "R": 0}, out, x=x, out=out, logits=0, **common)
    close(out, ops.rms_norm(x, weight, 1e-5))
    y = random(rows, cols, seed=2)
    added = y.copy()
    machine.run("rms_norm_add", {"T": 0, "R": rows}, added, y=x, x=added, out=added, logits=1, **common)
    close(added, ops.rms_norm_add(x, y, weight, 1e-5))
    if cols % 32 == 0:
        layout = ActLayout(cols)
        act = np.zeros(layout.nbytes(rows), np.uint8)
        machine.run("rms_norm_act", {"T": rows}, act, x=x, out=act, logits=0, **common)
        same_act(layout, act, out)


@pytest.mark.parametrize("cols", [32, 96, 1024, 1056])
@pytest.mark.parametrize("rows", ROWS)
def test_quantize(machine: Machine, rows: int, cols: int) -> None:
    x = random(rows, cols) * np.exp(random(rows, 1, seed=1) * 8)
    if rows > 1:
        x[0, :32] = 0
        x[1, :32] = 1e-35
        x[2, :32] = [*(np.arange(31) - 15.5), 127]  # ties, were it not for an outlier
    if rows > 3 and cols > 32:
        x[3:7, 32:64] = 0
        x[3, 40] = -3  # alone
        x[4, 33], x[4, 60] = 5, -5  # two
        x[5, 63], x[5, 32] = 1e25, 1  # its square overflows
        x[6, 50], x[6, 51] = 1e-22, 1e-24  # their squares vanish
        x[7, 32:64] = [*(np.arange(31) - 15.5), 63.5]  # ties
        x[8, 32:64] = 1
        x[8, 32:64][5] = np.sqrt(np.float32(31 / 0.6 * 1.0001))  # near the limit
        x[9, 32:64] = np.clip(random(32), -2, 2) * 1e-3
        x[9, 47] = 1e3
    layout = ActLayout(cols)
    act = np.zeros(layout.nbytes(rows), np.uint8)
    machine.run("quantize", {"T": rows}, act, x=x, out=act, cols=cols, logits=0)
    same_act(layout, act, x)


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("cols", "interleave"), [(32, 32), (608, 32), (608, 0), (37, 0), (1, 0)])
@pytest.mark.parametrize("rows", ROWS)
def test_glu(machine: Machine, rows: int, cols: int, interleave: int, act: str) -> None:
    x = random(rows, 2 * cols) * 3
    steps = {"gate_step": 64 if interleave else 32, "up_offset": interleave or cols}
    out = np.zeros((rows, cols), np.float32)
    machine.run(f"glu_{act}", {"T": rows}, out, x=x, out=out, cols=cols, logits=0, **steps)
    if rows:
        close(out, ops.glu(x, act, interleave))
    if cols % 32 == 0:
        layout = ActLayout(cols)
        quantised = np.zeros(layout.nbytes(rows), np.uint8)
        machine.run(f"glu_{act}_act", {"T": rows}, quantised, x=x, out=quantised, cols=cols, logits=0, **steps)
        same_act(layout, quantised, out)


def test_glu_of_large_gates(machine: Machine) -> None:
    x = np.array([[-1e4, -100, -88, 0, 88, 100, 1e4, 1, 1, 1, 1, 1, 1, 1]], np.float32)
    for act in ("silu", "gelu_tanh"):
        out = np.zeros((1, 7), np.float32)
        machine.run(f"glu_{act}", {"T": 1}, out, x=x, out=out, cols=7, logits=0, gate_step=32, up_offset=7)
        close(out, ops.glu(x, act, 0))


@pytest.mark.parametrize("cols", [1, 33, 700])
@pytest.mark.parametrize("rows", ROWS)
def test_add_and_gather(machine: Machine, rows: int, cols: int) -> None:
    x, y = random(rows, cols), random(rows, cols, seed=1)
    out = x.copy()
    machine.run("add", {"T": rows}, out, x=out, y=y, out=out, cols=cols, logits=0)
    np.testing.assert_array_equal(out, x + y)
    chosen = np.array([r for r in range(rows) if r % 3 != 1], np.int32)
    out = np.zeros((len(chosen), cols), np.float32)
    header = {"R": len(chosen), "logit_rows": chosen.ctypes.data}
    machine.run("gather", header, out, x=x, out=out, cols=cols)
    np.testing.assert_array_equal(out, x[chosen])


@pytest.mark.parametrize("dtype", list(DType))
def test_embed(machine: Machine, dtype: DType) -> None:
    spec = WeightSpec("token_embd.weight", dtype, 43, 256)
    rng = np.random.default_rng(3)
    raw = rng.integers(0, 256, (spec.rows, row_bytes(dtype, spec.cols)), np.uint8)
    if dtype in (DType.F32, DType.F16, DType.BF16):
        raw = random(spec.rows, spec.cols).astype({DType.F32: "f4", DType.F16: "f2"}.get(dtype, "f4")).view(np.uint8)
        raw = raw.reshape(spec.rows, -1)
        if dtype is DType.BF16:
            raw = np.ascontiguousarray(raw.view(np.uint16)[:, 1::2]).view(np.uint8)
    else:
        raw &= 0xBF  # f16 scales stay finite
    packed = np.zeros(pack.packed_bytes(spec, machine.lanes), np.uint8)
    pack.pack_rows(spec, machine.lanes, 0, raw, packed)
    ids = np.array([0, 42, 7, 7, 16], np.int32)
    out = np.zeros((len(ids), spec.cols), np.float32)
    header = {"T": len(ids), "token_ids": ids.ctypes.data}
    machine.run(f"embed_{dtype.value.lower()}", header, out, table=packed, out=out, cols=spec.cols, scale=1.5)
    np.testing.assert_array_equal(out, dequantize(dtype, raw)[ids] * np.float32(1.5))


@pytest.mark.parametrize("kv_type", ["f16", "int8"])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "pairs"), [(4, 2, 64, 32), (3, 1, 40, 20), (2, 2, 16, 4)])
def test_rope_store(
    machine: Machine, heads: int, kv_heads: int, head_dim: int, pairs: int, with_norm: bool, kv_type: Any
) -> None:
    shape = KvShape(num_layers=3, kv_heads=kv_heads, head_dim=head_dim, page_tokens=32, dtype=kv_type)
    layout = KvLayout.of(shape, machine.lanes)
    layer, num_pages = 1, 7
    # two sequences: positions 30..36 across a page boundary, and 5 alone
    positions = np.array([*range(30, 37), 5], np.int32)
    row_seq = np.array([0] * 7 + [1], np.int32)
    page_table = np.array([[4, 2], [6, 0]], np.int32)
    rows = len(positions)
    qkv = random(rows, (heads + 2 * kv_heads) * head_dim)
    table = random(64, pairs, 2, seed=1)
    norms = random(2, head_dim, seed=2)
    kv = np.zeros(num_pages * layout.page_bytes, np.uint8)
    both = np.zeros(qkv.nbytes + kv.nbytes, np.uint8)  # one array, so that the harness compares all that is written
    x, pages = both[: qkv.nbytes].view(np.float32).reshape(qkv.shape), both[qkv.nbytes :]
    x[:] = qkv
    header = {"T": rows, "S": 2, "positions": positions.ctypes.data, "row_seq": row_seq.ctypes.data,
              "page_table": page_table.ctypes.data, "page_stride": 2}  # fmt: skip
    machine.run(
        f"rope_store{'_norm' if with_norm else ''}{layout.element.suffix}", header, both, x=x, heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim, table=table, pairs=pairs, kv=pages.ctypes.data + layer * layout.layer_bytes,
        page_bytes=layout.page_bytes, page_tokens=32, q_norm=norms[0], k_norm=norms[1], eps=1e-6,
    )  # fmt: skip
    parts = qkv.reshape(rows, -1, head_dim)
    q, key, value = parts[:, :heads], parts[:, heads : heads + kv_heads], parts[:, heads + kv_heads :]
    if with_norm:
        q, key = ops.rms_norm(q, norms[0], 1e-6), ops.rms_norm(key, norms[1], 1e-6)
    angles = table[positions]
    expected = np.concatenate([ops.rope(q, angles), ops.rope(key, angles), value], axis=1)
    close(x.reshape(expected.shape), expected)
    e = layout.element
    codes, scales = pages.view(np.int8 if e.has_scale else np.float16), pages.view(np.float32)
    written = np.zeros(pages.shape, bool)
    for t, position in enumerate(positions):
        page, token = page_table[row_seq[t], position // 32], int(position) % 32
        for g in range(kv_heads):
            block = page * layout.page_bytes + layer * layout.layer_bytes + g * layout.head_bytes
            first = (block + e.k_offset(token, head_dim, 32, machine.lanes)) // e.nbytes
            at_k = first + np.arange(head_dim) * machine.lanes
            at_v = (block + e.v_offset(token, head_dim)) // e.nbytes + np.arange(head_dim)
            rotated = x.reshape(expected.shape)[t, heads + g]
            for row, at, scale_at in (
                (rotated, at_k, e.k_scale_offset(token, head_dim, 32)), (value[t, g], at_v,
                e.v_scale_offset(token, head_dim, 32)),
            ):  # fmt: skip
                written.reshape(-1, e.nbytes)[at] = True
                if e.has_scale:
                    expected_codes, scale = ops.quantize_kv(row)
                    np.testing.assert_array_equal(codes[at], expected_codes)
                    assert scales[(block + scale_at) // 4] == scale
                    written[block + scale_at : block + scale_at + 4] = True
                else:
                    np.testing.assert_array_equal(codes[at], row.astype(np.float16))
    assert not pages[~written].any()


def test_foreign_target_compiles() -> None:
    code = (
        "from ai_engine.kernels.cpu import build, elementwise, lang\n"
        "assert 'fmla' in build.assembly(elementwise.KERNELS, lang.NEON)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
