"""A step that does not end: said once with every thread's stack and the batch, then only its own requests fail.

Looks from the event loop, since the step loop's thread is the one that is stuck. Nothing is killed: when the step ends
after all, everyone else goes on. Owns the look and the words; the service fails the requests.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Sequence

from ai_engine.ports.clock import Clock
from ai_engine.serving.config import ServingConfig
from ai_engine.serving.loop import StepLoop

logger = logging.getLogger(__name__)


class Watchdog:
    """``fail(request_ids, seconds)`` is called once for a step that has run for ``fail_stuck_s``."""

    def __init__(
        self, loop: StepLoop, clock: Clock, config: ServingConfig, fail: Callable[[Sequence[str], float], None]
    ) -> None:
        self._loop, self._clock, self._config, self._fail = loop, clock, config, fail
        self._told_beat_s = self._failed_beat_s = -1.0

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(min(self._config.stall_s, self._config.fail_stuck_s) / 4)
            self.look()

    def look(self) -> None:
        """Compare the step loop's last beat with the limits."""
        loop, beat_s = self._loop, self._loop.beat_s
        silent_s = self._clock.now_s() - beat_s
        if loop.idle or not loop.alive:
            return
        if silent_s > self._config.stall_s and self._told_beat_s != beat_s:
            self._told_beat_s = beat_s
            logger.error("the step loop has been silent for %.1f s, in %s\n%s", silent_s, _batch(loop), _stacks())
        if silent_s > self._config.fail_stuck_s and self._failed_beat_s != beat_s:
            self._failed_beat_s = beat_s
            self._fail(sorted({request_id for _, request_id, _ in loop.in_step()}), silent_s)


def _batch(loop: StepLoop) -> str:
    parts = [f"sequence {work.seq_id} of {name}: {work.num_tokens} tokens after {computed}, {len(work.draft)} guesses"
             for work, name, computed in loop.in_step()]  # fmt: skip
    return f"step {loop.state.step}: {'; '.join(parts)}" if parts else "no step"


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )
