"""The sampler kernel: the reference's token for every row at any size and in any company; the distribution it draws."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ai_engine.hardware.team import NativeTeam
from ai_engine.kernels.cpu import build
from ai_engine.kernels.cpu.executor import Harness
from ai_engine.kernels.cpu.lang import AVX2, AVX512, Target
from ai_engine.kernels.cpu.sample import BLOCK, KERNELS, sample_args, workspace_bytes
from ai_engine.kernels.reference import backend as reference
from ai_engine.kernels.reference import ops
from ai_engine.ports.kernels import SampleBatch, SampleOut
from tests.conformance.programs import aligned, sampling

RUNNABLE = [t for t in (AVX2, AVX512) if t.lanes <= build.host_target().lanes]
F32 = npt.NDArray[np.float32]
Numbers = dict[str, int]
CASES = [(t, n) for t in RUNNABLE for n in (1, 3)]


@dataclass
class Bench:
    target: Target
    threads: int
    harness: Harness
    keep: list[Any] = field(default_factory=list)

    def bind(
        self, logits: F32, batch: SampleBatch, stride: int = 0
    ) -> tuple[dict[str, int], dict[str, int], SampleOut]:
        """(header, arguments, output) of one run over a copy of the logits."""
        rows, vocab = logits.shape
        stride = stride or vocab + 5
        buffer = aligned(4 * rows * stride, fill=0xFF).view(np.float32).reshape(rows, stride)
        buffer[:, :vocab] = logits
        out = reference.empty_sample_out(rows)
        out.token[:], out.logprob[:], out.top_token[:], out.top_logprob[:] = -9, -9, -9, -9
        work = aligned(workspace_bytes(self.target, rows, vocab), fill=0xFF)
        name, block = sample_args(
            self.target,
            logits=buffer.ctypes.data,
            logits_stride=stride,
            vocab_size=vocab,
            max_rows=rows,
            workspace=work.ctypes.data,
            min_shared_vocab=1 if vocab % 2 else vocab + 1,  # threads share rows of odd sizes
        )
        args = {n: int(w) for n, w in zip(self.harness.definitions[name].args.types, block, strict=True)}
        arrays = {n: np.ascontiguousarray(getattr(batch, n)) for n in batch.__struct_fields__}
        self.keep = [buffer, work, arrays, out]
        header = {n: a.ctypes.data for n, a in arrays.items()}
        header |= {"T": rows, "S": 0, "R": rows, "mask_stride": batch.masks.shape[1]}
        header |= {f"out_{n}": getattr(out, n).ctypes.data for n in out.__struct_fields__}
        return header, args, out

    def run(self, logits: F32, batch: SampleBatch, stride: int = 0) -> SampleOut:
        header, args, out = self.bind(logits, batch, stride)
        self.harness.run("sample", header, **args)
        return out


@pytest.fixture(scope="module", params=CASES, ids=lambda p: f"{p[0].name}-{p[1]}")
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    target, threads = request.param
    team = NativeTeam(threads) if threads > 1 else None
    harness = Harness(KERNELS, target, team)
    yield Bench(target, threads, harness)
    harness.close()
    if team:
        team.close()


def expected(logits: F32, batch: SampleBatch) -> SampleOut:
    out = reference.empty_sample_out(len(logits))
    for r, row in enumerate(logits):
        answer = ops.sample_row(row, **reference.sample_args(batch, r))
        out.token[r], out.logprob[r], out.top_token[r], out.top_logprob[r] = answer
    return out


def same(got: SampleOut, want: SampleOut) -> None:
    np.testing.assert_array_equal(got.token, want.token)
    np.testing.assert_array_equal(got.top_token, want.top_token)
    np.testing.assert_allclose(got.logprob, want.logprob, atol=1e-5, rtol=1e-6)
    np.testing.assert_allclose(got.top_logprob, want.top_logprob, atol=1e-5, rtol=1e-6)


def random_batch(rng: np.random.Generator, logits: F32) -> SampleBatch:
    """Every field at random, often off."""
    rows, vocab = logits.shape

    def often(off: float, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.where(rng.random(rows) < 0.5, off, values)

    def ragged(most: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        sizes = often(0, rng.integers(0, min(most, vocab) + 1, rows)).astype(int)
        start = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        chosen = [rng.choice(vocab, n, replace=False) for n in sizes]
        return start, np.concatenate([np.zeros(0, np.int32), *chosen]).astype(np.int32)

    history_start, history = ragged(300)
    bias_start, bias = ragged(20)
    allowed = rng.random((2, -(-vocab // 32) * 32)) < 0.5
    allowed[:, vocab // 2] = True
    return sampling(
        rows,
        vocab,
        temperature=often(0, rng.choice([1e-6, 0.2, 0.8, 1.0, 3.0, 50.0], rows)),
        top_k=often(0, rng.integers(1, vocab + 2, rows) // rng.choice([1, 10, 100], rows)),
        top_p=often(1, rng.choice([0.0, 1e-3, 0.3, 0.9, 0.999], rows)),
        min_p=often(0, rng.choice([1e-4, 0.05, 0.5, 1.0], rows)),
        repetition=often(1, np.asarray(rng.uniform(0.5, 2, rows))),
        presence=often(0, np.asarray(rng.uniform(-2, 2, rows))),
        frequency=often(0, np.asarray(rng.uniform(-2, 2, rows))),
        seed=rng.integers(0, 1 << 63, rows, dtype=np.uint64) * 2 + 1,
        position=rng.integers(0, 100_000, rows),
        forced=np.where(rng.random(rows) < 0.9, -1, rng.integers(0, vocab, rows)),
        num_top=rng.choice([-1, -1, 0, 3, 20], rows),
        history_start=history_start,
        history_token=history,
        history_count=rng.integers(0, 4, len(history)),
        bias_start=bias_start,
        bias_token=bias,
        bias_value=rng.choice([-100, -1, 0.5, 4], len(bias)),
        mask_row=rng.choice([-1, -1, 0, 1], rows),
        masks=np.packbits(allowed, axis=1, bitorder="little").view(np.uint32),
    )


@pytest.mark.parametrize("vocab", [1, 2, 7, 300, BLOCK - 1, BLOCK, 10_007, 10_008])
def test_every_field_gives_the_reference_token(bench: Bench, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    for rows in (1, 3, 16):
        for scale in (4.0, 0.01):
            logits = (rng.standard_normal((rows, vocab)) * scale).astype(np.float32)
            if rng.random() < 0.5:  # many equal values
                logits = np.round(logits * 2) / np.float32(2)
            batch = random_batch(rng, logits)
            same(bench.run(logits, batch), expected(logits, batch))


def test_flat_and_peaked_rows(bench: Bench) -> None:
    vocab = 3 * BLOCK + 5
    logits = np.zeros((6, vocab), np.float32)
    logits[1, 4000] = 1000
    logits[2] = np.float32(-3e38)
    logits[2, 77] = np.float32(3e38)
    logits[3] = -np.inf
    logits[3, [5, 4097]] = 0
    logits[4] = np.linspace(0, 1, vocab)
    logits[5] = -np.linspace(0, 1, vocab)
    for fields in ({}, {"top_k": 50}, {"top_p": 0.5}, {"min_p": 0.9}, {"top_k": 5000, "top_p": 0.999, "min_p": 0.1}):
        batch = sampling(6, vocab, temperature=1.0, num_top=20, **fields)
        same(bench.run(logits, batch), expected(logits, batch))


def test_rows_without_an_answer_are_flagged_and_leave_others_alone(bench: Bench) -> None:
    vocab = 5001
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((7, vocab)).astype(np.float32)
    logits[0, 5000] = np.nan
    logits[1, 0] = np.inf
    logits[2] = -np.inf
    logits[3, 100] = -np.inf
    masks = np.full((1, 157), 0, np.uint32)
    for temperature in (0.0, 1.0):
        batch = sampling(
            7, vocab, temperature=temperature, num_top=2, masks=masks, mask_row=[-1, -1, -1, -1, 0, -1, -1],
            forced=[3, -1, -1, -1, -1, -1, -1],
        )  # fmt: skip
        out = bench.run(logits, batch)
        assert list(out.token[[0, 1, 2, 4]]) == [-1] * 4
        same(out, expected(logits, batch))
        one = [0, 3, 5]
        alone = [bench.run(logits[r : r + 1], sampling(1, vocab, temperature=temperature, seed=r)) for r in one[1:]]
        assert [int(o.token[0]) for o in alone] == list(out.token[one[1:]])


_BITS: dict[tuple[str, int], SampleOut] = {}
"""Answers by target and number of rows: equal for every number of threads."""


def test_bits_do_not_depend_on_rows_or_threads(bench: Bench) -> None:
    rng = np.random.default_rng(5)
    logits = (rng.standard_normal((9, 9001)) * 3).astype(np.float32)
    batch = random_batch(rng, logits)
    batch.num_top[:] = 20
    whole = bench.run(logits, batch)
    other = _BITS.setdefault((bench.target.name, 9), whole)
    for name in whole.__struct_fields__:
        np.testing.assert_array_equal(getattr(whole, name), getattr(other, name))
    for r in range(9):
        row = {}
        for name in batch.__struct_fields__:
            array = getattr(batch, name)
            row[name] = array if name == "masks" else array[r : r + 1]
        for name in ("history", "bias"):
            start = getattr(batch, f"{name}_start")
            row[f"{name}_start"] = np.array([0, start[r + 1] - start[r]], np.int32)
            for part in ("token", "count" if name == "history" else "value"):
                row[f"{name}_{part}"] = getattr(batch, f"{name}_{part}")[start[r] : start[r + 1]]
        alone = bench.run(logits[r : r + 1], SampleBatch(**row), stride=9001)
        for name in whole.__struct_fields__:
            np.testing.assert_array_equal(getattr(alone, name)[0], getattr(whole, name)[r])


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 12},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 2.0, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("fields", SETTINGS, ids=lambda f: ",".join(f))
def test_draws_follow_the_distribution(fields: dict[str, Any]) -> None:
    """Chi-square of 20,480 seeds against probabilities computed in float64 from the textbook definition."""
    vocab, rows, calls = 61, 512, 40
    logits = (np.random.default_rng(3).standard_normal(vocab) * 2).astype(np.float32)
    p = np.exp(logits.astype(np.float64) / fields["temperature"])
    order = np.argsort(-p, kind="stable")
    if "top_k" in fields:
        p[order[fields["top_k"] :]] = 0
    if "top_p" in fields:
        p /= p.sum()
        p[order[np.cumsum(p[order]) - p[order] >= fields["top_p"]]] = 0
    if "min_p" in fields:
        p[p < fields["min_p"] * p.max()] = 0
    p /= p.sum()
    bench = Bench(RUNNABLE[-1], 1, Harness(KERNELS, RUNNABLE[-1]))
    counts = np.zeros(vocab, np.int64)
    for call in range(calls):
        seed = np.arange(rows, dtype=np.uint64) + np.uint64(call * rows)
        out = bench.run(np.tile(logits, (rows, 1)), sampling(rows, vocab, seed=seed, position=call % 3, **fields))
        counts += np.bincount(out.token, minlength=vocab)
    bench.harness.close()
    kept = p * counts.sum() >= 5  # the rare ones as one cell
    cells = np.append(counts[kept], counts[~kept].sum())
    exact = np.append(p[kept], p[~kept].sum()) * counts.sum()
    assert counts[p == 0].sum() == 0
    cells, exact = cells[exact > 0], exact[exact > 0]
    degrees = len(cells) - 1
    statistic = ((cells - exact) ** 2 / exact).sum()
    assert abs(statistic - degrees) < 4.5 * np.sqrt(2 * degrees), (statistic, degrees)


def test_compiles_for_neon() -> None:
    code = "from ai_engine.kernels.cpu.sample import *; from ai_engine.kernels.cpu import build, lang;"
    code += "lang.Kernel.barrier = lambda k: None;"  # its inline assembly needs a parser that only a native LLVM has
    code += "print(build.assembly(KERNELS, lang.NEON).count('fcvtzs'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 3
