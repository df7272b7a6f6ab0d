"""One line a request, tokens on demand, a bounded rate, and a writer that nobody waits for."""

from __future__ import annotations

import io
import json
import logging
import threading
import time
from typing import Any

import pytest

from ai_engine.observe.logs import Handler, Log
from ai_engine.ports.telemetry import SequencePreempted, TokensSent
from ai_engine.ports.trace import Part
from tests.unit.observe.rig import TRACE, step_done, traced


def lines_of(log: Log, out: io.StringIO) -> list[dict[str, Any]]:
    log.close()
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_a_request_is_one_line_with_its_trace() -> None:
    out = io.StringIO()
    log = Log(out, wall_s=lambda: 1_764_547_200.5)
    log.emit(
        traced(10.0, 12.5, [Part("receive", 10.0, 10.5, 0.5), Part("detokenise", 10.75, 12.5, 0.1, 3)], key="team")
    )
    log.emit(step_done(1, 0.0, 1.0))
    (line,) = lines_of(log, out)
    assert line == {
        "time": "2025-12-01T00:00:00.500Z", "level": "info", "event": "request", "trace": TRACE, "method": "POST",
        "route": "/chat/completions", "status": 200, "seconds": 2.5, "ttft_seconds": 0.75, "key": "team",
        "model": "m", "completion_tokens": 3, "finish": ["stop"], "stream": True,
    }  # fmt: skip


@pytest.mark.parametrize(("least", "count"), [("debug", 1), ("info", 1), ("warning", 0), ("error", 0)])
def test_the_level_decides(least: Any, count: int) -> None:
    out = io.StringIO()
    log = Log(out, level=least)
    log.emit(traced(1.0, 2.0, []))
    assert len(lines_of(log, out)) == count


def test_the_rate_is_bounded_and_what_was_left_out_is_said() -> None:
    out, now = io.StringIO(), [0.0]
    log = Log(out, rate=10.0, burst=5.0, now_s=lambda: now[0])
    for _ in range(100):
        log.emit(traced(1.0, 2.0, []))
    now[0] = 0.1
    log.emit(traced(1.0, 2.0, []))
    lines = lines_of(log, out)
    assert len(lines) == 6
    assert lines[-1]["suppressed_before"] == 95
    assert log.suppressed == 95


def test_a_token_line_names_step_and_trace_and_no_text() -> None:
    out = io.StringIO()
    log = Log(out)
    log.emit(TokensSent(TRACE, "team", "cmpl-1", 1, 77, [5, 6]))
    assert [(line["token"], line["step"], line["trace"], line["choice"]) for line in lines_of(log, out)] == [
        (5, 77, TRACE, 1), (6, 77, TRACE, 1),
    ]  # fmt: skip


def test_a_preemption_is_a_line_with_its_reason() -> None:
    out = io.StringIO()
    log = Log(out)
    log.emit(SequencePreempted(3, "chat-9", 1, "kv_pages", 700, 50, 1, 128))
    (line,) = lines_of(log, out)
    assert {key: line[key] for key in ("event", "request", "choice", "reason", "computed_tokens", "pages_free")} == {
        "event": "preempted", "request": "chat-9", "choice": 1, "reason": "kv_pages", "computed_tokens": 700,
        "pages_free": 1,
    }  # fmt: skip


def test_on_a_terminal_a_line_is_text_and_stays_one_line() -> None:
    out = io.StringIO()
    log = Log(out, as_json=False)
    log.write_line("info", "log", {"message": "two\nlines\x1b[31m", "n": [1, 2]})
    log.close()
    assert out.getvalue().count("\n") == 1
    assert "\x1b" not in out.getvalue()
    assert "n=1,2" in out.getvalue()


class Stuck(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()

    def write(self, text: str) -> int:
        self.free.wait(10)
        raise OSError(28, "No space left on device")


def test_a_full_disk_or_a_stuck_pipe_costs_lines_and_no_time() -> None:
    out = Stuck()
    log = Log(out, rate=1e9, burst=1e9)
    started = time.perf_counter()
    for _ in range(6000):
        log.write_line("info", "request", {})
    assert time.perf_counter() - started < 2.0
    assert log.suppressed >= 6000 - 4097
    out.free.set()
    log.close(10.0)
    assert log.failures + log.suppressed == 6000


def test_pythons_loggers_write_lines_with_their_traceback() -> None:
    out = io.StringIO()
    log = Log(out)
    logger = logging.getLogger("test.of.the.log")
    logger.propagate = False
    handler = Handler(log)
    logger.addHandler(handler)
    try:
        raise ValueError("what went wrong")
    except ValueError:
        logger.exception("it failed: %s", 5)
    logger.removeHandler(handler)
    (line,) = lines_of(log, out)
    assert (line["level"], line["logger"], line["message"]) == ("error", "test.of.the.log", "it failed: 5")
    assert "what went wrong" in line["traceback"]
