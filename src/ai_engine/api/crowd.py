"""How many generations are inside the door, and when no more are let in: a full server must not pay to say that it is.

Serving decides who may wait (serving/service.py). Asking it costs a parsed body, an encoded prompt and a way to the
worker and back; when hundreds come at once that is a second for each of them. So the door refuses before it reads a
body what serving could not take: more than wait and run there, and, for a moment after serving said that its queue is
full, anything. Owns counting and that memory; knows no key and no queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from ai_engine.ports.clock import Clock
from ai_engine.ports.errors import Overloaded

HOLD_S = 0.1
"""Serving's word that its queue is full holds so long, or until somebody leaves."""
ASK_S = 1.0
"""A full door lets one request in so often, to hear from serving how long the wait is."""
ESTIMATE_S = 10.0
"""What it says is good for so long; later the pace at which requests leave has to do."""
MAX_WAIT_S = 60.0
_DEPARTURES = 64


class Crowd:
    """``most``: generations inside at once; 0: as many as come. ``guess_s``: the wait when nothing is known."""

    def __init__(self, most: int, clock: Clock, guess_s: float) -> None:
        self.most = most
        self.inside = 0
        self._clock = clock
        self._guess_s = guess_s
        self._full: Overloaded | None = None  # serving's last refusal
        self._full_s = float("-inf")
        self._asked_s = float("-inf")
        self._left_s: deque[float] = deque(maxlen=_DEPARTURES)

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Raises Overloaded: at once, or what serving raises."""
        self._refuse(self._clock.now_s())
        self.inside += 1
        try:
            yield
        except Overloaded as error:
            if error.details.get("queue") == "full":
                self._full, self._full_s = error, self._clock.now_s()
            raise
        else:
            now_s = self._clock.now_s()
            self._left_s.append(now_s)
            self._full_s = min(self._full_s, now_s - HOLD_S)  # there may be room
        finally:
            self.inside -= 1

    def _refuse(self, now_s: float) -> None:
        if self._full is not None and now_s - self._full_s < HOLD_S:
            raise Overloaded(
                self._full.message, retry_after_s=self._full.retry_after_s, details=self._full.details
            )  # a copy: an error that is raised again keeps its first traceback
        if not self.most or self.inside < self.most:
            return
        if now_s - self._asked_s >= ASK_S:
            self._asked_s = now_s
            return
        raise Overloaded(
            f"the server is full: {self.inside} requests run and wait (limit {self.most})",
            retry_after_s=self._wait_s(now_s),
        )

    def _wait_s(self, now_s: float) -> float:
        """Seconds until what is inside has left, about."""
        if self._full is not None and self._full.retry_after_s is not None and now_s - self._full_s < ESTIMATE_S:
            return self._full.retry_after_s
        left_s = [at_s for at_s in self._left_s if now_s - at_s < MAX_WAIT_S]
        if not left_s:
            return self._guess_s
        return min(max(self.inside * (now_s - left_s[0]) / len(left_s), 1.0), MAX_WAIT_S)
