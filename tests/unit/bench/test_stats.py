"""Statistics: percentiles that refuse too few samples, intervals that cover, curves, arrivals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ai_engine.bench.stats import (
    cdf,
    median_interval,
    percentile,
    poisson_arrivals,
    ratio_of_pools,
    ratio_of_rounds,
    summary,
)


def test_percentile_interpolates() -> None:
    assert percentile([1, 2, 3, 4], 50) == 2.5
    assert percentile(range(101), 95) == 95
    with pytest.raises(ValueError, match="no samples"):
        percentile([], 50)


@pytest.mark.parametrize(
    ("count", "known"), [(0, []), (99, []), (100, ["p50"]), (200, ["p50", "p95"]), (1000, ["p50", "p95", "p99"])]
)
def test_summary_reports_a_percentile_only_with_enough_samples(count: int, known: list[str]) -> None:
    row = summary(range(count))
    assert [name for name in ("p50", "p95", "p99") if row[name] is not None] == known
    assert row["count"] == count
    assert row["max"] == (count - 1 if count else None)


def test_median_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """The bootstrap of 15 samples of a known distribution: nominal 95 %, at least 85 % and not always."""
    rng = np.random.default_rng(1)
    inside = 0
    for i in range(200):
        found = median_interval(rng.normal(10, 2, 15).tolist(), seed=i, resamples=400)
        assert found.low <= found.value <= found.high
        inside += found.low <= 10 <= found.high
    assert 170 <= inside < 200


def test_one_sample_has_no_width() -> None:
    found = median_interval([3.0])
    assert (found.low, found.value, found.high) == (3.0, 3.0, 3.0)


def test_ratio_of_rounds_cancels_what_both_sides_share() -> None:
    """A machine that is three times slower in some rounds does not widen the interval of the ratio."""
    drift = [1.0, 3.0, 1.0, 0.5, 2.0, 1.0, 3.0]
    found = ratio_of_rounds([20 * d for d in drift], [10 * d for d in drift])
    assert (found.low, found.value, found.high) == pytest.approx((2, 2, 2))


def test_ratio_of_pools_draws_whole_rounds() -> None:
    """Pools of one value a round: the interval shows the spread between rounds, the value is that of all samples."""
    ours, theirs = [[1.0] * 50, [2.0] * 50, [3.0] * 50], [[1.0] * 50] * 3
    found = ratio_of_pools(ours, theirs, lambda values: float(values.mean()))
    assert found.value == 2.0
    assert found.low == pytest.approx(1.0, abs=0.35)
    assert found.high == pytest.approx(3.0, abs=0.35)
    with pytest.raises(ValueError, match="no samples"):
        ratio_of_pools([], [], lambda values: 0.0)


def test_cdf_keeps_both_ends_and_rises() -> None:
    values, shares = cdf(np.random.default_rng(0).exponential(1, 5000), points=50)
    assert len(values) == len(shares) <= 50
    assert values == sorted(values)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert shares[0] == 1 / 5000
    assert cdf([]) == ([], [])


def test_poisson_arrivals_have_the_rate_and_no_memory() -> None:
    times = poisson_arrivals(50.0, 20_000, np.random.default_rng(3))
    gaps = np.diff([0.0, *times])
    assert times == sorted(times)
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.03)  # an exponential's mean is its deviation
    assert (gaps > 2 / 50).mean() == pytest.approx(math.exp(-2), rel=0.1)
    for rate in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="rate is"):
            poisson_arrivals(rate, 1, np.random.default_rng(0))
