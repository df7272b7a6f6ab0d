"""How long will a step take? Seconds from what the step carries, learned from the steps that ran.

    seconds = a + b * rows + c * logit_rows + d * attended + e * context (+ bend[rows] when every row samples)

``attended`` sums over rows the positions that each one sees (arithmetic), ``context`` sums over sequences the positions
that they hold (memory read once for all rows of a sequence). A Kalman filter on (a, ..., e): least squares that follows
drift, never forgets what the recent steps do not show, and cuts an outlier's residual. ``bend`` is what small steps
differ by from the straight line: kernels take rows in tiles. Owns no clock.
"""

from __future__ import annotations

from typing import Final

import msgspec

_UNITS: Final = (1.0, 64.0, 16.0, 65536.0, 4096.0)  # one, rows, logits rows, attended, context: features near 1
_DRIFT: Final = 1e-8  # variance that a weight gains per step
_MAX_VARIANCE: Final = (0.01, 0.01, 0.001, 0.01, 0.01)  # s^2; at the start, and never more
_NOISE: Final = 1e-6  # variance of a step's time around the model, s^2, at 20 ms; grows with its square
_OUTLIER: Final = 3.0  # residuals are cut at this multiple of the typical one
_BENT_ROWS: Final = 32
_BEND_RATE: Final = 0.05
_BEND_MEMORY: Final = 0.998

_READ_BYTES_PER_S: Final = 10e9  # a slow machine: the first chunks are small
_WEIGHT_ROW_BYTES_PER_S: Final = 50e9

Weights = tuple[float, float, float, float, float]


class Load(msgspec.Struct):
    """What a step carries."""

    rows: int = 0
    logit_rows: int = 0
    attended: int = 0
    context: int = 0

    def add(self, num_tokens: int, logit_rows: int, depth: int) -> None:
        """Rows of one sequence that has ``depth`` tokens computed."""
        self.rows += num_tokens
        self.logit_rows += logit_rows
        self.attended += attended(num_tokens, depth)
        self.context += depth + num_tokens


def attended(num_tokens: int, depth: int) -> int:
    return num_tokens * depth + num_tokens * (num_tokens + 1) // 2


def prior_s(weight_bytes: int, kv_bytes_per_token: int) -> Weights:
    """Seconds of one unit of each feature on a slow machine, from what a step has to read: the weights once and the
    keys and values once per row; a row's arithmetic is taken as proportional to the weights."""
    read_s, kv_s = weight_bytes / _READ_BYTES_PER_S, kv_bytes_per_token / _READ_BYTES_PER_S
    row_s = weight_bytes / _WEIGHT_ROW_BYTES_PER_S
    return read_s, row_s * _UNITS[1], row_s * _UNITS[2] / 8, kv_s * _UNITS[3], kv_s * _UNITS[4]


class CostModel:
    def __init__(self, prior: Weights) -> None:
        self._weights = list(prior)
        size = len(_UNITS)
        self._cov = [[_MAX_VARIANCE[i] if i == j else 0.0 for j in range(size)] for i in range(size)]
        self._bend_s = [0.0] * (_BENT_ROWS + 1)
        self._typical_s = 0.0  # smoothed absolute residual; 0: nothing seen
        self._seen = 0

    def predict_s(self, load: Load) -> float:
        return self._line_s(_features(load)) + self.bend_s(load.rows, load.logit_rows)

    def bend_s(self, rows: int, logit_rows: int) -> float:
        """What a step of so many rows differs by from the straight line."""
        return self._bend_s[rows] if rows == logit_rows and rows <= _BENT_ROWS else 0.0

    def row_s(self, depth: int, *, samples: bool) -> float:
        """One more row of a sequence that stands at ``depth``, on the straight line."""
        w = self._weights
        kept_s = w[2] / _UNITS[2] if samples else 0.0
        return w[1] / _UNITS[1] + kept_s + w[3] / _UNITS[3] * (depth + 1) + w[4] / _UNITS[4]

    def rows_within(self, seconds: float, load: Load, depth: int) -> int:
        """How many more rows of one sequence at ``depth`` fit into a step of ``seconds`` that carries ``load``."""
        left_s = seconds - self._line_s(_features(load)) - self._weights[4] / _UNITS[4] * depth
        if left_s <= 0:
            return 0
        per_position_s = self._weights[3] / _UNITS[3]
        per_row_s = self.row_s(depth, samples=False) - per_position_s / 2
        root = (per_row_s**2 + 2 * per_position_s * left_s) ** 0.5  # left = per_row n + per_position n^2 / 2
        return min(int(2 * left_s / max(per_row_s + root, 1e-12)), 1 << 30)

    def observe(self, load: Load, seconds: float) -> None:
        """Learn from a step that ran."""
        x = _features(load)
        residual_s = seconds - self.predict_s(load)
        size = range(len(x))
        spread = [sum(row[j] * x[j] for j in size) for row in self._cov]
        known = sum(x[i] * spread[i] for i in size)
        noise = _NOISE * max((seconds / 0.02) ** 2, 0.01)
        bound_s = _OUTLIER * self._typical_s + 1e-4
        if self._seen >= 16 and abs(residual_s) > bound_s:  # moves the weights as one at the bound, and tells as little
            noise = (noise + known) * abs(residual_s) / bound_s - known
        self._seen += 1
        rate = 0.5 if self._seen < 16 else 0.05
        self._typical_s += rate * (min(abs(residual_s), bound_s) - self._typical_s)
        for i in size:
            row, gain = self._cov[i], spread[i] / (noise + known)
            self._weights[i] += gain * residual_s
            for j in size:
                row[j] -= gain * spread[j]
            row[i] = min(row[i] + _DRIFT, _MAX_VARIANCE[i])
        self._keep_positive()
        if load.rows == load.logit_rows and load.rows <= _BENT_ROWS and self._seen >= 16:
            self._bend_s = [bend * _BEND_MEMORY for bend in self._bend_s]  # what is not seen again is doubted
            self._bend_s[load.rows] += _BEND_RATE * min(max(residual_s, -bound_s), bound_s)

    def _keep_positive(self) -> None:
        """No part of a step takes negative time. A weight below 0 is set to it, and the others move as they would if
        that had been observed: cutting it alone would leave them wrong by what it should have taken."""
        weights = self._weights
        for _ in weights:
            low = min(range(len(weights)), key=weights.__getitem__)
            if weights[low] >= 0.0:
                return
            column, excess = self._cov[low], weights[low]
            for i, cov in enumerate(column):
                weights[i] -= cov / column[low] * excess
            weights[low] = 0.0
        self._weights = [max(weight, 0.0) for weight in weights]

    def _line_s(self, features: Weights) -> float:
        return sum(w * x for w, x in zip(self._weights, features, strict=True))


def _features(load: Load) -> Weights:
    units = _UNITS
    return (
        1.0, load.rows / units[1], load.logit_rows / units[2], load.attended / units[3], load.context / units[4],
    )  # fmt: skip
