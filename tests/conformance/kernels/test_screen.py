"""The screened head: the split weight is the same weight, candidates are exact, and whom it may answer."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import numpy.typing as npt
import pytest

from ai_engine.kernels.cpu import formats, matmul, screen
from ai_engine.kernels.cpu.formats import ActLayout
from ai_engine.kernels.cpu.lang import TARGETS
from ai_engine.kernels.cpu.pack import pack_rows, packed_bytes
from ai_engine.ports.kernels import SampleBatch, WeightSpec
from ai_engine.ports.model import DType
from tests.conformance.kernels.rig import Rig, aligned
from tests.conformance.kernels.test_matmul import HOST, tokens
from tests.conformance.programs import sampling
from tests.golden import tiny_gguf

F32 = npt.NDArray[np.float32]
ROWS, COLS = 700, 576


@pytest.fixture(scope="module", params=HOST)
def rig(request: pytest.FixtureRequest) -> Rig:
    names = {"matmul_q8_0", "matmul_q8_0_split", "matmul_q8_0_screen"}
    kernels = [d for d in matmul.KERNELS if d.name in names]
    return Rig(TARGETS[request.param], [*kernels, *screen.KERNELS])


class Head:
    """One random head, packed plainly and split, and activations."""

    def __init__(self, rig: Rig, num_tokens: int) -> None:
        self.rig, self.lanes, self.num_tokens = rig, rig.target.lanes, num_tokens
        values = np.random.default_rng(1).standard_normal((ROWS, COLS)).astype(np.float32)
        raw = tiny_gguf.quantize(values, "Q8_0").reshape(ROWS, -1)
        self.values = formats.dequantize(DType.Q8_0, raw).astype(np.float64)
        self.specs = [WeightSpec("w", DType.Q8_0, ROWS, COLS, screened) for screened in (False, True)]
        self.packed = [aligned(packed_bytes(spec, self.lanes)) for spec in self.specs]
        for spec, packed in zip(self.specs, self.packed, strict=True):
            pack_rows(spec, self.lanes, 0, raw, packed)
        layout = ActLayout(COLS)
        quantised = layout.quantize(tokens(num_tokens, COLS))
        self.act = aligned(quantised.nbytes)
        self.act[:] = quantised
        self.x = layout.dequantize(quantised, num_tokens).astype(np.float64)

    def times(self, out: F32, split: bool, screened: int, view: str = "", threads: int = 1) -> None:
        name, args = matmul.bind(
            self.specs[split], self.lanes, x=self.act.ctypes.data, w=self.packed[split].ctypes.data,
            out=out.ctypes.data, out_stride=out.shape[1], logits=True, view=view,
        )  # fmt: skip
        self.rig.run(name, matmul.ARGS.pack(**args), threads=threads, R=self.num_tokens, screened=screened)

    def refine(self, out: F32, screened: int, threads: int = 1) -> None:
        args = screen.refine_head.args.pack(
            logits=out.ctypes.data, stride=out.shape[1], vocab=ROWS, x=self.act.ctypes.data,
            w=self.packed[1].ctypes.data, cols=COLS, rows=ROWS,
        )  # fmt: skip
        self.rig.run("refine_head", args, threads=threads, R=self.num_tokens, screened=screened)


@pytest.mark.parametrize("num_tokens", [1, 3, 22])
def test_a_split_weight_gives_the_same_bits(rig: Rig, num_tokens: int) -> None:
    head = Head(rig, num_tokens)
    plain, split = np.zeros((2, num_tokens, ROWS + 4), np.float32)
    head.times(plain, split=False, screened=0)
    head.times(split, split=True, screened=0, threads=2)
    assert np.array_equal(plain, split)
    assert packed_bytes(head.specs[0], head.lanes) == packed_bytes(head.specs[1], head.lanes)


@pytest.mark.parametrize(("num_tokens", "screened"), [(1, 1), (4, 4), (22, 22), (22, 5), (9, 0), (6, 6)])
def test_candidates_are_exact_and_hold_the_best(rig: Rig, num_tokens: int, screened: int) -> None:
    head = Head(rig, num_tokens)
    exact, out = np.zeros((2, num_tokens, ROWS + 4), np.float32)
    head.times(exact, split=False, screened=0)
    head.times(out, split=True, screened=screened)
    rough = out.copy()
    head.times(rough, split=True, screened=screened, view="screen", threads=2)
    out[:screened] = rough[:screened]
    assert np.array_equal(rough[screened:], out[screened:])
    noise = (rough - exact)[:screened, :ROWS].astype(np.float64)
    assert np.sum(noise**2) <= 0.25**2 * np.sum(exact[:screened, :ROWS].astype(np.float64) ** 2)
    head.refine(out, screened, threads=2)
    assert np.array_equal(out[screened:], exact[screened:])
    for r in range(screened):
        kept = np.flatnonzero(out[r, :ROWS] > -np.inf)
        assert len(kept) == screen.CANDIDATES
        assert np.array_equal(out[r, kept], exact[r, kept])
        best = np.argsort(-exact[r, :ROWS], kind="stable")[:16]
        assert set(best.tolist()) <= set(kept.tolist())
        alone = Head(rig, num_tokens)  # the same candidates without company
        solo = np.zeros((num_tokens, ROWS + 4), np.float32)
        alone.times(solo, split=True, screened=num_tokens, view="screen")
        alone.refine(solo, num_tokens)
        assert np.array_equal(solo[r], out[r])


def test_whom_it_may_answer() -> None:
    batch: SampleBatch = sampling(
        9, 100, temperature=[0, 0, 1, 1, 1, 0, 0, 0, 0], top_k=[0, 0, 0, 32, 33, 0, 0, 0, 0],
        num_top=[-1, 0, -1, -1, -1, -1, -1, -1, -1], forced=[-1, -1, -1, -1, -1, 7, -1, -1, -1],
        mask_row=[-1, -1, -1, -1, -1, -1, 0, -1, -1], bias_start=[0] * 8 + [1, 1], bias_token=[3], bias_value=[1.0],
        history_start=[0] * 9 + [2], history_token=[1, 2], history_count=[1, 1],
    )  # fmt: skip
    assert screen.screenable(batch).tolist() == [True, False, False, True, False, False, False, False, False]


@pytest.mark.parametrize("target", list(TARGETS))
def test_compiles_for_every_target(target: str) -> None:
    """In a child process: an instruction that LLVM cannot select aborts."""
    code = (
        "from ai_engine.kernels.cpu import build, lang, matmul, screen; "
        "views = [d for d in matmul.KERNELS if d.name.endswith(('split', 'screen'))]; "
        f"print(build.assembly([*views, *screen.KERNELS], lang.TARGETS[{target!r}]).count('refine_head'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 0
