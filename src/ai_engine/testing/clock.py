"""Time that moves only when told. Owns no thread and never sleeps."""

from __future__ import annotations


class VirtualClock:
    """Implements ports.clock.Clock."""

    def __init__(self, now_s: float = 0.0, wall_offset_s: float = 1_700_000_000.0) -> None:
        self._now_s = now_s
        self._wall_offset_s = wall_offset_s

    def now_s(self) -> float:
        return self._now_s

    def wall_s(self) -> float:
        return self._now_s + self._wall_offset_s

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, seconds
        self._now_s += seconds
