"""The server's log: one line a request, a line a token where it is asked for, and what Python's loggers say.

    {"time": "2026-12-01T00:00:00.123Z", "level": "info", "event": "request", "trace": "4bf9...", "status": 200, ...}

JSON lines, or text on a terminal. Owns format, level, rate and the thread that writes: a full disk or a stuck pipe
costs lines, which are counted, and holds nobody up. Nothing here is text of a prompt or an answer: a token is its id.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, Final, Literal, TextIO

from ai_engine.observe.host import Sample
from ai_engine.ports.telemetry import Event, RequestTraced, SequencePreempted, TokensSent

Level = Literal["debug", "info", "warning", "error"]
LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}
LINES_PER_S: Final = 200.0
BURST: Final = 400.0
_QUEUE: Final = 4096


class Bucket:
    """``rate`` lines a second on average, ``burst`` at once."""

    def __init__(self, rate: float, burst: float, now_s: Callable[[], float]) -> None:
        self._rate, self._burst, self._now_s = rate, burst, now_s
        self._left, self._at_s = burst, now_s()

    def take(self) -> bool:
        now = self._now_s()
        self._left = min(self._burst, self._left + (now - self._at_s) * self._rate)
        self._at_s = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class Log:
    """Implements ports.telemetry.Telemetry. ``write_line`` takes (level, event, fields). Token lines are what somebody
    asked for and are not held to the rate, only to the queue's room."""

    def __init__(
        self,
        out: TextIO,
        *,
        level: Level = "info",
        as_json: bool = True,
        rate: float = LINES_PER_S,
        burst: float = BURST,
        now_s: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._out, self._least, self._wall_s = out, LEVELS[level], wall_s
        self._format = _json_line if as_json else _text_line
        self._bucket = Bucket(rate, burst, now_s)
        self._queue: queue.Queue[str | None] = queue.Queue(_QUEUE)
        self.lines = dict.fromkeys(LEVELS, 0)
        self.suppressed = self.failures = 0
        self._told = 0  # of the suppressed
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def emit(self, event: Event) -> None:
        if isinstance(event, RequestTraced):
            level: Level = "error" if event.status >= 500 else "warning" if event.status >= 400 else "info"
            self.write_line(level, "request", request_fields(event))
        elif isinstance(event, SequencePreempted):
            self.write_line("info", "preempted", preempted_fields(event))
        elif isinstance(event, TokensSent):
            for token in event.tokens:
                fields = {"trace": event.trace_id, "key": event.key, "request": event.request_id,
                          "choice": event.index, "step": event.step, "token": token}  # fmt: skip
                self._put("info", self._format(self._wall_s(), "info", "token", fields))

    def write_line(self, level: Level, event: str, fields: dict[str, Any]) -> None:
        if LEVELS[level] < self._least:
            return
        if not self._bucket.take():
            self.suppressed += 1
            return
        if self.suppressed > self._told:
            fields = {**fields, "suppressed_before": self.suppressed - self._told}
            self._told = self.suppressed
        self._put(level, self._format(self._wall_s(), level, event, fields))

    def _put(self, level: Level, line: str) -> None:
        try:
            self._queue.put_nowait(line)
            self.lines[level] += 1
        except queue.Full:
            self.suppressed += 1

    def _run(self) -> None:
        while (line := self._queue.get()) is not None:
            try:
                self._out.write(line)
                if self._queue.empty():
                    self._out.flush()
            except (OSError, ValueError):  # the disk is full, the pipe or the file is closed
                self.failures += 1

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what waits, for so long at most."""
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def probe(self) -> Iterator[Sample]:
        """For metrics."""
        for level, count in self.lines.items():
            yield "l6_ops_log_lines", count, (level,)
        yield "l6_ops_log_suppressed", self.suppressed + self.failures, ()


def preempted_fields(event: SequencePreempted) -> dict[str, Any]:
    """Who lost how much, why, and how short the pages were."""
    return {
        "request": event.request_id,
        "choice": event.index,
        "reason": event.reason,
        "computed_tokens": event.computed_tokens,
        "output_tokens": event.output_tokens,
        "pages_free": event.pages_free,
        "pages_total": event.pages_total,
    }


def request_fields(event: RequestTraced) -> dict[str, Any]:
    """What one request's line says; absent fields are left out."""
    said = event.attributes
    first = next((part for part in event.parts if part.name == "detokenise"), None)  # begins with the first token
    fields: dict[str, Any] = {
        "trace": event.context.trace_id,
        "method": event.method,
        "route": event.route,
        "status": event.status,
        "seconds": round(event.ended_s - event.started_s, 6),
        "ttft_seconds": None if first is None else round(first.started_s - event.started_s, 6),
        "max_gap_seconds": said.get("ai_engine.max_gap_seconds"),
        "key": event.key or None,
        "model": said.get("gen_ai.request.model"),
        "prompt_tokens": said.get("gen_ai.usage.input_tokens"),
        "cached_tokens": said.get("gen_ai.usage.cache_read.input_tokens"),
        "completion_tokens": said.get("gen_ai.usage.output_tokens"),
        "finish": said.get("gen_ai.response.finish_reasons"),
        "stream": said.get("gen_ai.request.stream"),
        "failed": said.get("ai_engine.failed") or None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _stamp(wall_s: float) -> str:
    return datetime.fromtimestamp(wall_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _json_line(wall_s: float, level: str, event: str, fields: dict[str, Any]) -> str:
    head = {"time": _stamp(wall_s), "level": level, "event": event}
    return json.dumps(head | fields, ensure_ascii=False, default=str) + "\n"


def _text_line(wall_s: float, level: str, event: str, fields: dict[str, Any]) -> str:
    said = " ".join(f"{name}={_plain(value)}" for name, value in fields.items())
    return f"{_stamp(wall_s)[11:23]} {level:<7} {event} {said}\n"


def _plain(value: Any) -> str:
    """A value on one line, whatever it holds."""
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return json.dumps(text) if any(not char.isprintable() or char == " " for char in text) else text


class Handler(logging.Handler):
    """Python's loggers write into the log; tracebacks are a field."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        level: Level = "error" if record.levelno >= 40 else "warning" if record.levelno >= 30 else "info"
        fields: dict[str, Any] = {"logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            fields["traceback"] = logging.Formatter().formatException(record.exc_info)
        self._log.write_line(level, "log", fields)
