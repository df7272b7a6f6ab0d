"""Statistics of measurements: percentiles with enough samples, bootstrap intervals, curves, Poisson arrivals.

Pure functions over numbers; randomness is passed in as a generator. Does not measure.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
MIN_SAMPLES = {50.0: 100, 90.0: 150, 95.0: 200, 99.0: 1000, 99.5: 1000}
"""How many samples a percentile needs before it is reported (the benchmarking page's 100/200/1000; others between)."""


@dataclass(frozen=True)
class Interval:
    """A point estimate and its 95 % interval."""

    value: float
    low: float
    high: float

    def text(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def percentile(samples: Sequence[float] | F64, q: float) -> float:
    """Linear interpolation between order statistics, as numpy's default. ValueError without samples."""
    if len(samples) == 0:
        raise ValueError("no samples")
    return float(np.percentile(np.asarray(samples, np.float64), q))


def summary(samples: Sequence[float] | F64, qs: Sequence[float] = (50, 95, 99)) -> dict[str, float | int | None]:
    """Count, mean, max, and each percentile that has enough samples (None where it has not)."""
    row: dict[str, float | int | None] = {"count": len(samples)}
    if len(samples) == 0:
        return row | {"mean": None, "max": None} | {f"p{q:g}": None for q in qs}
    row |= {"mean": float(np.mean(samples)), "max": float(np.max(samples))}
    for q in qs:
        row[f"p{q:g}"] = percentile(samples, q) if len(samples) >= MIN_SAMPLES.get(float(q), 100) else None
    return row


def median_interval(samples: Sequence[float], seed: int = 0, resamples: int = 2000) -> Interval:
    """The median with its percentile-bootstrap interval (Efron 1979); both ends are the value for one sample."""
    values = np.asarray(samples, np.float64)
    if values.size == 0:
        raise ValueError("no samples")
    picks = np.random.default_rng(seed).integers(0, values.size, (resamples, values.size))
    low, high = np.percentile(np.median(values[picks], axis=1), [2.5, 97.5])
    return Interval(float(np.median(values)), float(low), float(high))


def ratio_of_rounds(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """The median of the rounds' ratios: both sides of a round saw the same machine."""
    return median_interval([a / b for a, b in zip(ours, theirs, strict=True)])


def ratio_of_pools(
    ours: Sequence[Sequence[float]],
    theirs: Sequence[Sequence[float]],
    statistic: Callable[[F64], float],
    seed: int = 0,
    resamples: int = 1000,
) -> Interval:
    """The ratio of a statistic (such as a percentile) of all rounds' samples; whole rounds are drawn for the interval,
    since samples of one round are not independent."""
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in zip(ours, theirs, strict=True)]
    if not pairs:
        raise ValueError("no samples")

    def ratio(which: Sequence[int]) -> float:
        a, b = (np.concatenate([pairs[i][side] for i in which]) for side in (0, 1))
        return statistic(a) / statistic(b)

    picks = np.random.default_rng(seed).integers(0, len(pairs), (resamples, len(pairs)))
    low, high = np.percentile([ratio(list(map(int, pick))) for pick in picks], [2.5, 97.5])
    return Interval(ratio(range(len(pairs))), float(low), float(high))


def cdf(samples: Sequence[float] | F64, points: int = 200) -> tuple[list[float], list[float]]:
    """(values, share of samples at or below each), thinned to at most ``points`` for drawing; ends are kept."""
    values = np.sort(np.asarray(samples, np.float64))
    if values.size == 0:
        return [], []
    at = np.unique(np.linspace(0, values.size - 1, min(points, values.size)).round().astype(int))
    return values[at].tolist(), ((at + 1) / values.size).tolist()


def poisson_arrivals(rate_per_s: float, count: int, rng: np.random.Generator) -> list[float]:
    """Seconds after the start at which ``count`` requests are meant to arrive: sums of exponential gaps."""
    if not rate_per_s > 0:
        raise ValueError(f"rate is {rate_per_s}; expected more than 0 requests a second")
    return [float(t) for t in np.cumsum(rng.exponential(1 / rate_per_s, count))]


def median(samples: Sequence[float]) -> float:
    return float(statistics.median(samples))
