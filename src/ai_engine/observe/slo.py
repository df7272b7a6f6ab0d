"""Service level objectives: a file that says what is good enough, and a verdict with its confidence and burn rate.

    [[objective]]                     # TOML
    name = "first token"
    signal = "ttft"                   # ttft | time_per_token | gap | e2e (seconds) | errors | refusals
    percentile = 99                   # 99 % of requests are to be at or below ...
    threshold_s = 0.5                 # ... this; errors and refusals have max_ratio instead of both
    model = ""                        # of one model or key only; "" or absent: all
    key = ""
    min_events = 100
    confidence = 0.95

The verdict is an exact binomial test at the limit: *met* when so few bad requests would be unlikely (1 - confidence) if
the true share were just the limit, *missed* when so many would be, *inconclusive* between, and with fewer than
``min_events``. Burn rate: the share of bad requests over the allowed share. Owns the file, the counting and the test.
"""

from __future__ import annotations

import json
import math
import threading
import time
import tomllib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from ai_engine.observe.host import Sample
from ai_engine.observe.logs import request_fields
from ai_engine.ports.errors import ConfigError
from ai_engine.ports.telemetry import Event, RequestTraced

Signal = Literal["ttft", "time_per_token", "gap", "e2e", "errors", "refusals"]
Verdict = Literal["met", "missed", "inconclusive"]
FIELDS: Final = {"ttft": "ttft_seconds", "gap": "max_gap_seconds", "e2e": "seconds"}
STATES: Final = {"met": 1.0, "missed": 0.0, "inconclusive": -1.0}
EXIT_STATUS: Final = {"met": 0, "missed": 1, "inconclusive": 3}
_REFUSED: Final = frozenset({429, 503})
_SLICES: Final = 60  # of the window


class Objective(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    signal: Signal
    percentile: float = 0.0
    threshold_s: float = 0.0
    max_ratio: float = 0.0
    model: str = ""
    key: str = ""
    min_events: int = 100
    confidence: float = 0.95

    @property
    def allowed(self) -> float:
        """The share of requests that may be bad."""
        return self.max_ratio if self.signal in ("errors", "refusals") else 1.0 - self.percentile / 100.0

    def judge(self, record: Mapping[str, Any]) -> bool | None:
        """Whether a request was bad; None: it is none of this objective's."""
        if (self.model and record.get("model") != self.model) or (self.key and record.get("key") != self.key):
            return None
        status = int(record["status"])
        if self.signal == "refusals":
            return status in _REFUSED
        if status in _REFUSED or 400 <= status < 500:  # refused, the client's mistake, or gone
            return None
        if self.signal == "errors":
            return status >= 500 or bool(record.get("failed"))
        value = _value(self.signal, record)
        return None if value is None else value > self.threshold_s


class Slo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``window_s``: how far back a running server looks."""

    objective: list[Objective]
    window_s: float = 3600.0


class Result(msgspec.Struct, frozen=True):
    objective: Objective
    verdict: Verdict
    events: int
    bad: int

    @property
    def burn_rate(self) -> float:
        return self.bad / self.events / self.objective.allowed if self.events else 0.0


def _value(signal: str, record: Mapping[str, Any]) -> float | None:
    if signal in FIELDS:
        found = record.get(FIELDS[signal])
        return None if found is None else float(found)
    tokens, first = int(record.get("completion_tokens") or 0), record.get("ttft_seconds")
    return None if tokens < 2 or first is None else (float(record["seconds"]) - float(first)) / (tokens - 1)


def read_slo(path: Path) -> Slo:
    """Raises ConfigError, naming the field and what was expected."""
    try:
        slo = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Slo)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if not slo.objective:
        raise ConfigError(f"{path}: there is no [[objective]]")
    if len({one.name for one in slo.objective}) < len(slo.objective):
        raise ConfigError(f"{path}: two objectives have one name")
    for one in slo.objective:
        needs = "max_ratio" if one.signal in ("errors", "refusals") else "percentile and threshold_s"
        if not 0 < one.allowed < 1 or (needs != "max_ratio" and one.threshold_s <= 0):
            raise ConfigError(f"{path}: objective {one.name!r} of signal {one.signal} needs {needs}, within (0, 1) or "
                              "(0, 100) and above 0 s")  # fmt: skip
        if not 0.5 < one.confidence < 1 or one.min_events < 1:
            raise ConfigError(f"{path}: objective {one.name!r}: confidence lies in (0.5, 1), min_events is 1 or more")
    return slo


def decide(objective: Objective, events: int, bad: int) -> Verdict:
    """The exact test at the objective's limit."""
    if events < objective.min_events:
        return "inconclusive"
    doubt = 1.0 - objective.confidence
    if binomial_tail(events, objective.allowed, bad) <= doubt:
        return "met"
    if 1.0 - binomial_tail(events, objective.allowed, bad - 1) <= doubt:
        return "missed"
    return "inconclusive"


def binomial_tail(n: int, p: float, most: int) -> float:
    """P(X <= most) of n draws with probability p."""
    if most < 0:
        return 0.0
    log_p, log_q, head = math.log(p), math.log1p(-p), math.lgamma(n + 1)
    total = math.fsum(
        math.exp(head - math.lgamma(k + 1) - math.lgamma(n - k + 1) + k * log_p + (n - k) * log_q)
        for k in range(min(most, n) + 1)
    )
    return min(1.0, total)


def check(slo: Slo, records: Iterable[Mapping[str, Any]]) -> list[Result]:
    """The verdicts over a run's requests."""
    counts = [[0, 0] for _ in slo.objective]
    for record in records:
        for count, objective in zip(counts, slo.objective, strict=True):
            bad = objective.judge(record)
            if bad is not None:
                count[0] += 1
                count[1] += bad
    return [
        Result(one, decide(one, events, bad), events, bad)
        for one, (events, bad) in zip(slo.objective, counts, strict=True)
    ]


def read_records(path: Path) -> Iterator[Mapping[str, Any]]:
    """The requests of a log in JSON lines; other lines are passed over. Raises ConfigError when it cannot be read."""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    found = json.loads(line)
                except ValueError:
                    continue
                if isinstance(found, dict) and found.get("event") == "request" and "status" in found:
                    yield found
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def report(results: Iterable[Result]) -> str:
    """One line an objective."""
    lines = []
    for result in results:
        one = result.objective
        what = f"{one.max_ratio:.2%} at most" if one.max_ratio else f"p{one.percentile:g} <= {one.threshold_s:g} s"
        share = result.bad / result.events if result.events else 0.0
        lines.append(
            f"{result.verdict:<13}{one.name}: {one.signal} {what}; {result.bad} of {result.events} bad ({share:.2%}), "
            f"burn rate {result.burn_rate:.2f}, confidence {one.confidence:.0%}\n"
        )
    return "".join(lines)


def worst(results: Iterable[Result]) -> Verdict:
    """Of all objectives: one missed is missed, one inconclusive is inconclusive."""
    verdicts = {result.verdict for result in results}
    return "missed" if "missed" in verdicts else "inconclusive" if "inconclusive" in verdicts else "met"


class Monitor:
    """Implements ports.telemetry.Telemetry; counts the requests of the window in slices, and is a metrics probe."""

    def __init__(self, slo: Slo, now_s: Callable[[], float] = time.monotonic) -> None:
        self._slo, self._now_s = slo, now_s
        self._slices: deque[tuple[float, list[list[int]]]] = deque()  # (begin, [events, bad] of each objective)
        self._lock = threading.Lock()

    def emit(self, event: Event) -> None:
        if not isinstance(event, RequestTraced):
            return
        record = request_fields(event)
        with self._lock:
            counts = self._now()
            for count, objective in zip(counts, self._slo.objective, strict=True):
                bad = objective.judge(record)
                if bad is not None:
                    count[0] += 1
                    count[1] += bad

    def _now(self) -> list[list[int]]:
        now, width = self._now_s(), self._slo.window_s / _SLICES
        while self._slices and self._slices[0][0] <= now - self._slo.window_s:
            self._slices.popleft()
        if not self._slices or now - self._slices[-1][0] >= width:
            self._slices.append((now, [[0, 0] for _ in self._slo.objective]))
        return self._slices[-1][1]

    def results(self) -> list[Result]:
        with self._lock:
            self._now()
            sums = [[sum(counts[i][j] for _, counts in self._slices) for j in (0, 1)]
                    for i in range(len(self._slo.objective))]  # fmt: skip
        return [
            Result(one, decide(one, events, bad), events, bad)
            for one, (events, bad) in zip(self._slo.objective, sums, strict=True)
        ]

    def __call__(self) -> Iterator[Sample]:
        for result in self.results():
            labels = (result.objective.name,)
            yield "l6_slo_state", STATES[result.verdict], labels
            yield "l6_slo_burn_rate_ratio", result.burn_rate, labels
            yield "l6_slo_events", result.events, labels
