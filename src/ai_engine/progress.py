"""Progress on long work, for people: a bar on a terminal, a line per finished phase elsewhere."""

from __future__ import annotations

import sys
import time

WIDTH = 30


class ProgressBar:
    """A ports.progress.Progress. Phases under 0.2 s leave no trace."""

    def __init__(self) -> None:
        self._tty = sys.stderr.isatty()
        self._phase = ""
        self._started_s = 0.0
        self._drawn_s = 0.0

    def __call__(self, phase: str, fraction: float) -> None:
        now = time.monotonic()
        if phase != self._phase:
            self._phase, self._started_s, self._drawn_s = phase, now, 0.0
        elapsed = now - self._started_s
        if fraction >= 1.0:
            self._finish(phase, elapsed)
        elif self._tty and elapsed > 0.15 and now - self._drawn_s > 0.1:
            self._drawn_s = now
            filled = int(WIDTH * min(max(fraction, 0.0), 1.0))
            self._write(f"\r{phase:<28.28} [{'#' * filled}{'.' * (WIDTH - filled)}] {fraction:4.0%}")

    def _finish(self, phase: str, elapsed_s: float) -> None:
        if self._tty and self._drawn_s:
            self._write("\r" + " " * (WIDTH + 38) + "\r")
        if elapsed_s >= 0.2:
            self._write(f"{phase}: {elapsed_s:.1f} s\n")
        self._phase = ""

    @staticmethod
    def _write(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
