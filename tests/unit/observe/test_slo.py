"""Objectives are met, missed or undecided by an exact test: three prepared runs, from a log and live."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ai_engine.cli import main
from ai_engine.observe.slo import Monitor, Objective, binomial_tail, check, decide, read_slo, worst
from ai_engine.ports.errors import ConfigError
from ai_engine.ports.trace import Part
from tests.unit.observe.rig import traced

FILE = """
window_s = 600

[[objective]]
name = "first token"
signal = "ttft"
percentile = 99
threshold_s = 0.5

[[objective]]
name = "steady"
signal = "gap"
percentile = 95
threshold_s = 0.2

[[objective]]
name = "errors"
signal = "errors"
max_ratio = 0.01

[[objective]]
name = "team-a speed"
signal = "time_per_token"
percentile = 90
threshold_s = 0.05
key = "team-a"
"""


def run_of(seed: int, count: int, *, slow: float, broken: float = 0.0) -> list[dict[str, Any]]:
    """A run's request lines: a share of them slow, a share of them broken."""
    draw = random.Random(seed)
    lines = []
    for _ in range(count):
        is_slow = draw.random() < slow
        lines.append({
            "event": "request", "status": 500 if draw.random() < broken else 200, "seconds": 5.0 if is_slow else 1.2,
            "ttft_seconds": 1.0 if is_slow else 0.2, "max_gap_seconds": 0.4 if is_slow else 0.05,
            "completion_tokens": 41, "model": "m", "key": "team-a",
        })  # fmt: skip
    return lines


GOOD, BAD, SHORT = run_of(1, 2000, slow=0.001), run_of(2, 2000, slow=0.3, broken=0.05), run_of(3, 60, slow=0.0)


@pytest.mark.parametrize(
    ("run", "verdict", "status"), [(GOOD, "met", 0), (BAD, "missed", 1), (SHORT, "inconclusive", 3)]
)
def test_three_prepared_runs(
    run: list[dict[str, Any]], verdict: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slo.toml").write_text(FILE, encoding="utf-8")
    noise = ["", "ready: http://...", '{"event": "log", "message": "x"}', "[1, 2]"]
    lines = [*noise, *map(json.dumps, run)]
    (tmp_path / "log").write_text("\n".join(lines), encoding="utf-8")
    assert main(["slo", "check", str(tmp_path / "slo.toml"), "--log", str(tmp_path / "log")]) == status
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 4
    assert worst(check(read_slo(tmp_path / "slo.toml"), run)) == verdict
    assert all(line.startswith(verdict) for line in out), out
    assert all("burn rate" in line for line in out)


def test_the_burn_rate_is_the_bad_share_over_the_allowed() -> None:
    objective = Objective(name="x", signal="ttft", percentile=99, threshold_s=0.5)
    (result,) = check(
        _slo(objective), [{"status": 200, "ttft_seconds": 1.0 if n % 50 == 0 else 0.1} for n in range(500)]
    )
    assert (result.events, result.bad) == (500, 10)
    assert result.burn_rate == pytest.approx(2.0)


def _slo(*objectives: Objective) -> Any:
    from ai_engine.observe.slo import Slo

    return Slo(objective=list(objectives))


def test_the_tail_is_the_binomials() -> None:
    assert binomial_tail(299, 0.01, 0) == pytest.approx(0.99**299)
    assert binomial_tail(10, 0.5, 5) == pytest.approx(sum(math.comb(10, k) for k in range(6)) / 1024)
    assert binomial_tail(10, 0.5, 10) == pytest.approx(1.0)
    assert binomial_tail(10, 0.5, -1) == 0.0
    assert binomial_tail(100_000, 0.01, 1000) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    ("events", "bad", "verdict"),
    [(298, 0, "inconclusive"), (299, 0, "met"), (99, 50, "inconclusive"), (1000, 10, "inconclusive"),
     (1000, 17, "missed"), (1000, 4, "met")],
)  # fmt: skip
def test_what_the_number_of_requests_can_tell(events: int, bad: int, verdict: str) -> None:
    """Of 99 % at 95 % confidence; 299 good ones in a row are the fewest that say anything good."""
    assert decide(Objective(name="x", signal="ttft", percentile=99, threshold_s=1), events, bad) == verdict


def test_the_verdict_is_wrong_no_more_often_than_it_says() -> None:
    """At the very limit, met and missed are both wrong: together in a tenth of the runs at most."""
    objective = Objective(name="x", signal="ttft", percentile=95, threshold_s=1)
    draw = random.Random(5)
    verdicts = [decide(objective, 400, sum(draw.random() < 0.05 for _ in range(400))) for _ in range(1000)]
    assert verdicts.count("met") <= 70
    assert verdicts.count("missed") <= 70


def test_refusals_and_the_clients_mistakes_are_no_slow_requests() -> None:
    refused = Objective(name="r", signal="refusals", max_ratio=0.1)
    slow = Objective(name="s", signal="ttft", percentile=99, threshold_s=0.5)
    errors = Objective(name="e", signal="errors", max_ratio=0.1)
    records = [{"status": s, "ttft_seconds": 9.0} for s in (200, 400, 401, 429, 499, 503)] + [{"status": 500}]
    results = {r.objective.name: (r.events, r.bad) for r in check(_slo(refused, slow, errors), records)}
    assert results == {"r": (7, 2), "s": (1, 1), "e": (2, 1)}


def test_a_running_server_judges_its_window() -> None:
    now = [0.0]
    monitor = Monitor(
        msgspec.structs.replace(_slo(Objective(name="x", signal="ttft", percentile=50, threshold_s=0.5)), window_s=600),
        lambda: now[0],
    )
    slow, quick = ([Part("receive", 10.0, at, 0.1), Part("detokenise", at, 12.0, 0.1)] for at in (11.0, 10.1))
    for _ in range(200):
        monitor.emit(traced(10.0, 12.0, slow))
    assert {name: value for name, value, _ in monitor()} == {
        "l6_slo_state": 0.0, "l6_slo_burn_rate_ratio": 2.0, "l6_slo_events": 200,
    }  # fmt: skip
    now[0] = 500.0
    for _ in range(200):
        monitor.emit(traced(10.0, 12.0, quick))
    assert monitor.results()[0].verdict == "inconclusive"
    now[0] = 700.0
    (result,) = monitor.results()
    assert (result.verdict, result.events, result.bad) == ("met", 200, 0), "the slow ones are out of the window"


@pytest.mark.parametrize(
    "text",
    [
        "", "x", "[[objective]]", '[[objective]]\nname="a"\nsignal="ttft"', '[[objective]]\nname="a"\nsignal="speed"',
        '[[objective]]\nname="a"\nsignal="errors"\npercentile=99\nthreshold_s=1',
        '[[objective]]\nname="a"\nsignal="ttft"\npercentile=100\nthreshold_s=1',
        '[[objective]]\nname="a"\nsignal="errors"\nmax_ratio=0.1\ncolour="red"',
        '[[objective]]\nname="a"\nsignal="errors"\nmax_ratio=0.1\nconfidence=1',
        '[[objective]]\nname="a"\nsignal="errors"\nmax_ratio=0.1\n' * 2,
    ],
)  # fmt: skip
def test_a_file_that_says_nothing_clear_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "slo.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError):
        read_slo(path)
