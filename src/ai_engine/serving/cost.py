"""How long will a step take? Seconds from rows, logits rows and attended positions, learned from the steps that ran.

    seconds = a + b * rows + c * logit_rows + d * attended        attended: sum over rows of the positions each one sees

A Kalman filter on (a, b, c, d): least squares that follows drift, never forgets what the recent steps do not show, and
cuts an outlier's residual. Owns no clock.
"""

from __future__ import annotations

from typing import Final

import msgspec

_UNITS: Final = (1.0, 64.0, 16.0, 65536.0)  # one, rows, logits rows, attended: features near 1
_PRIOR_S: Final = (0.002, 0.064, 0.002, 0.004)  # seconds of one unit on a slow machine: the first chunks are small
_DRIFT: Final = 1e-8  # variance that a weight gains per step
_MAX_VARIANCE: Final = 0.01
_NOISE: Final = 1e-6  # variance of a step's time around the model, s^2, at 20 ms; grows with its square
_OUTLIER: Final = 3.0  # residuals are cut at this multiple of the typical one


class Load(msgspec.Struct):
    """What a step carries."""

    rows: int = 0
    logit_rows: int = 0
    attended: int = 0

    def add(self, num_tokens: int, logit_rows: int, depth: int) -> None:
        """Rows of one sequence that has ``depth`` tokens computed."""
        self.rows += num_tokens
        self.logit_rows += logit_rows
        self.attended += attended(num_tokens, depth)


def attended(num_tokens: int, depth: int) -> int:
    return num_tokens * depth + num_tokens * (num_tokens + 1) // 2


class CostModel:
    def __init__(self, prior_s: tuple[float, float, float, float] = _PRIOR_S) -> None:
        self._weights = list(prior_s)
        self._cov = [[_MAX_VARIANCE if i == j else 0.0 for j in range(4)] for i in range(4)]
        self._typical_s = 0.0  # smoothed absolute residual; 0: nothing seen
        self._seen = 0

    def predict_s(self, load: Load) -> float:
        return sum(w * x for w, x in zip(self._weights, _features(load), strict=True))

    def rows_within(self, seconds: float, load: Load, depth: int) -> int:
        """How many more rows of one sequence at ``depth`` fit into a step of ``seconds`` that carries ``load``."""
        left_s = seconds - self.predict_s(load)
        if left_s <= 0:
            return 0
        per_position_s = self._weights[3] / _UNITS[3]
        per_row_s = self._weights[1] / _UNITS[1] + per_position_s * (depth + 0.5)
        root = (per_row_s**2 + 2 * per_position_s * left_s) ** 0.5  # left = per_row n + per_position n^2 / 2
        return min(int(2 * left_s / max(per_row_s + root, 1e-12)), 1 << 30)

    def observe(self, load: Load, seconds: float) -> None:
        """Learn from a step that ran."""
        x = _features(load)
        residual_s = seconds - self.predict_s(load)
        if self._seen >= 16:
            bound_s = _OUTLIER * self._typical_s + 1e-4
            residual_s = min(max(residual_s, -bound_s), bound_s)
        self._seen += 1
        rate = 0.5 if self._seen < 16 else 0.05
        self._typical_s += rate * (abs(residual_s) - self._typical_s)
        spread = [sum(row[j] * x[j] for j in range(4)) for row in self._cov]
        noise = _NOISE * max((seconds / 0.02) ** 2, 0.01)
        scale = noise + sum(x[i] * spread[i] for i in range(4))
        for i in range(4):
            gain = spread[i] / scale
            self._weights[i] = max(self._weights[i] + gain * residual_s, 0.0)
            row = self._cov[i]
            for j in range(4):
                row[j] -= gain * spread[j]
            row[i] = min(row[i] + _DRIFT, _MAX_VARIANCE)


def _features(load: Load) -> tuple[float, float, float, float]:
    return 1.0, load.rows / _UNITS[1], load.logit_rows / _UNITS[2], load.attended / _UNITS[3]
