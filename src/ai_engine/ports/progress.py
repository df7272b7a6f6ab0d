"""How long work says how far it is: ``progress(phase, fraction)``. A phase ends when it says 1, once."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, float], None]


def no_progress(phase: str, fraction: float) -> None:
    """For callers that do not want to be told."""
