"""The reference kernels: whole small models against the float64 forward, and sampling against its definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ai_engine.kernels.cpu.draw import WEIGHT_ONE
from ai_engine.kernels.reference import ReferenceKernels, ops
from ai_engine.ports.model import DType
from tests.conformance.programs import Model, Session, copied
from tests.golden.reference import log_softmax

IDS = [int(i) for i in np.random.default_rng(7).integers(0, 301, 70)]


def session(architecture: str, dtype: DType = DType.F32, page_tokens: int = 8, **sizes: Any) -> Session:
    model = Model.random(architecture, **{"layers": 2, **sizes})
    types = lambda name: DType.Q8_0 if dtype is DType.Q5_0 and "embd" in name else dtype  # noqa: E731
    return Session(ReferenceKernels(), model, types, max_tokens=96, page_tokens=page_tokens)


@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [
        ("llama", {}),
        ("llama", {"heads": 9, "kv_heads": 3, "hidden": 288, "head_dim": 32, "tie_word_embeddings": False}),
        ("qwen2", {"ffn": 320}),
        ("qwen3", {}),
        ("gemma3_text", {"heads": 4, "kv_heads": 1, "layers": 7, "head_dim": 32, "hidden": 128, "ffn": 256}),
    ],
)
def test_a_whole_model_matches_the_float64_forward(architecture: str, sizes: dict[str, Any]) -> None:
    s = session(architecture, **sizes)
    exact = s.model.reference()
    expected = log_softmax(exact.logits(exact.hidden(IDS)))
    got = []
    for first, end in ((0, 1), (1, 14), (14, 17), (17, 64), (64, 70)):  # odd chunks; another sequence comes along
        out = copied(s.step({0: IDS[first:end], 1: IDS[: end - first][::-1]}, "all", num_top=20))
        got.append((out.top_token[: end - first], out.top_logprob[: end - first], out.token[: end - first]))
    tokens, logprobs, greedy = (np.concatenate(column) for column in zip(*got, strict=True))
    np.testing.assert_allclose(logprobs, np.take_along_axis(expected, tokens, 1), atol=3e-3)
    best = expected.max(axis=1)
    assert np.all(best - expected[np.arange(len(IDS)), greedy] < 3e-3)


@pytest.mark.parametrize(
    "dtype", [DType.F16, DType.BF16, DType.Q8_0, DType.Q4_1, DType.Q5_0, DType.Q4_K, DType.Q6_K], ids=str
)
def test_stored_types_change_little(dtype: DType) -> None:
    s = session("llama", dtype)
    exact = s.model.reference()
    p = log_softmax(exact.logits(exact.hidden(IDS[:24])))
    out = s.step({0: IDS[:24]}, "all", num_top=20)
    difference = out.top_logprob - np.take_along_axis(p, out.top_token, 1)
    limit = {DType.F16: 0.1, DType.BF16: 0.1, DType.Q8_0: 0.15}.get(dtype, 1.0)
    assert np.sqrt(np.mean(difference**2)) < limit


def test_a_step_without_logits_rows_and_a_forked_page() -> None:
    s = session("llama", page_tokens=32)
    assert s.step({0: IDS[:40]}, "none").token.shape == (0,)
    s.pages[1] = [s._free.pop() for _ in s.pages[0]]
    s.lengths[1] = s.lengths[0]
    for source, target in zip(s.pages[0], s.pages[1], strict=True):
        s.kernels.copy_page(s.resources, source, target)
    out = s.step({0: IDS[40:43], 1: IDS[40:43]}, num_top=5)
    np.testing.assert_array_equal(out.top_logprob[0], out.top_logprob[1])


def row(logits: Any, **fields: Any) -> int:
    values: dict[str, Any] = {
        "bias_token": np.zeros(0, np.int32),
        "bias_value": np.zeros(0, np.float32),
        "history_token": np.zeros(0, np.int32),
        "history_count": np.zeros(0, np.int32),
        "repetition": np.float32(1),
        "presence": np.float32(0),
        "frequency": np.float32(0),
        "mask": None,
        "temperature": np.float32(0),
        "top_k": 0,
        "top_p": np.float32(1),
        "min_p": np.float32(0),
        "seed": 1,
        "position": 0,
        "forced": -1,
        "num_top": -1,
    }
    return ops.sample_row(np.asarray(logits, np.float32), **{**values, **fields})[0]


def test_rows_without_an_answer_are_flagged() -> None:
    assert row([1, np.nan, 2]) == row([1, np.inf]) == row([-np.inf] * 3) == -1
    assert row([1, 2], mask=np.zeros(1, np.uint32)) == -1
    assert row([1, np.nan], forced=0) == -1
    assert row([-np.inf, 1, -np.inf]) == 1
    assert row([-np.inf, 1, -np.inf], temperature=np.float32(3)) == 1


def test_greedy_ties_go_to_the_lowest_id_after_bias_penalties_and_mask() -> None:
    assert row([0, 3, 3, 1]) == 1
    assert row([0, 3, 3, 1], mask=np.array([0b1101], np.uint32)) == 2
    assert row([0, 3, 3, 1], bias_token=np.array([3]), bias_value=np.array([2.5], np.float32)) == 3
    seen = {"history_token": np.array([1, 2]), "history_count": np.array([0, 2])}
    assert row([0, 3, 3, 1], repetition=np.float32(1.5), **seen) == 1  # both divided
    assert row([2.5, 3, 3, 1], repetition=np.float32(1.5), **seen) == 0
    assert row([0, 3, 3.5, 1], presence=np.float32(1), **seen) == 1  # only output tokens pay
    assert row([0, 3, 3.5, 1], frequency=np.float32(0.2), **seen) == 2
    assert row([0, 3, 3.5, 1], frequency=np.float32(0.3), **seen) == 1


def test_thresholds_keep_what_they_say() -> None:
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.2, 0.1], np.float32))
    hot = {"temperature": np.float32(1)}

    def kept(**fields: Any) -> set[int]:
        return {row(logits, seed=seed, **hot, **fields) for seed in range(400)}

    assert kept() == {0, 1, 2, 3, 4}
    assert kept(top_k=1) == {1}
    assert kept(top_k=2) == {1, 2}  # 2 and 3 tie: the lower id
    assert kept(top_p=np.float32(0.3)) == {1}
    assert kept(top_p=np.float32(0.59)) == {1, 2}
    assert kept(top_p=np.float32(0.79)) == {1, 2, 3}
    assert kept(top_p=np.float32(0)) == {1}
    assert kept(min_p=np.float32(0.3)) == {1, 2, 3}
    assert kept(min_p=np.float32(1)) == {1}
    assert kept(top_k=3, top_p=np.float32(0.7)) == {1, 2}  # of 0.8: 0.4 < 0.56 <= 0.6


def test_weights_are_exp_to_a_part_in_ten_million() -> None:
    z = np.linspace(-25, 0, 100_001).astype(np.float32)
    weights = ops.integer_weights(z, np.float32(0), np.float32(1))
    exact = np.exp(z.astype(np.float64)) * WEIGHT_ONE
    assert weights[-1] == WEIGHT_ONE
    assert np.all(np.abs(weights - exact) <= 0.51 + exact * (2e-7 - z * 1.2e-7))
    assert np.all(np.diff(weights) >= -128)


def chi_square(counts: np.ndarray[Any, Any], p: np.ndarray[Any, Any]) -> float:
    """The statistic as a number of standard deviations over its mean."""
    expected = p[p > 0] * counts.sum()
    assert counts[p == 0].sum() == 0
    degrees = max(1, expected.size - 1)
    return float((((counts[p > 0] - expected) ** 2 / expected).sum() - degrees) / np.sqrt(2 * degrees))


@pytest.mark.parametrize("by", ["seed", "position"])
def test_draws_are_uniform_bits(by: str) -> None:
    n = 50_000
    bits = [ops.draw_bits(i, 5) if by == "seed" else ops.draw_bits(5, i) for i in range(n)]
    for shift in (0, 24, 56):
        counts = np.bincount(np.array([(b >> shift) & 255 for b in bits]), minlength=256)
        assert abs(chi_square(counts, np.full(256, 1 / 256))) < 4.5
