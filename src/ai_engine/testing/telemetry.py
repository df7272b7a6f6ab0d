"""A telemetry sink that keeps what it gets. Does not bound it: tests are short."""

from __future__ import annotations

from typing import TypeVar

from ai_engine.ports.telemetry import Event

E = TypeVar("E")


class MemoryTelemetry:
    """Implements ports.telemetry.Telemetry."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type[E]) -> list[E]:
        """All events of one type, in order."""
        return [event for event in self.events if isinstance(event, kind)]
