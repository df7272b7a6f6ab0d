"""The worker's half of tracing: a pair of clocks beside the steps' events, so that cycles can be told as time.

Owns how often. Does not own the rings, which the kernels write, nor who reads them (steps.py, in the gateway).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ai_engine.ports.telemetry import ClockPair, Event, StepDone, Telemetry

logger = logging.getLogger(__name__)
PAIR_EVERY_S = 0.1


class Recorder:
    """Implements ports.telemetry.Telemetry: passes everything on, and a ClockPair after a step every PAIR_EVERY_S.
    ``read_pair`` gives (cycles, nanoseconds of the monotonic clock) at one moment."""

    def __init__(self, telemetry: Telemetry, read_pair: Callable[[], tuple[int, int]]) -> None:
        self._telemetry = telemetry
        self._read_pair = read_pair
        self._next_s = 0.0
        self._telemetry.emit(ClockPair(*read_pair()))

    def emit(self, event: Event) -> None:
        self._telemetry.emit(event)
        if isinstance(event, StepDone) and event.ended_s >= self._next_s:
            self._next_s = event.ended_s + PAIR_EVERY_S
            self._telemetry.emit(ClockPair(*self._read_pair()))


class Fanout:
    """Implements ports.telemetry.Telemetry by several: one that raises costs the others nothing, and is counted."""

    def __init__(self, *sinks: Telemetry) -> None:
        self.sinks = list(sinks)
        self.failures = 0

    def emit(self, event: Event) -> None:
        for sink in list(self.sinks):
            try:
                sink.emit(event)
            except Exception:  # nothing that watches may stop what is watched
                self.failures += 1
                if self.failures == 1:
                    logger.exception("%s failed on an event; requests are not affected", type(sink).__name__)
