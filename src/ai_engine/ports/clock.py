"""Time is passed in. ``now_s`` is monotonic seconds; ``wall_s`` is Unix seconds, for what people read."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float: ...

    def wall_s(self) -> float: ...


class SystemClock:
    """The machine's clock (CLOCK_MONOTONIC and CLOCK_REALTIME)."""

    def now_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()
