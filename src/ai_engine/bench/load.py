"""Many requests: a closed loop (each stream sends when its last answer is done) and an open loop (arrivals are given).

Owns when requests are sent, and the figures of a run. An open loop sends every request at its intended time however
many are out, and latency counts from that time, so a slow server cannot slow down its own test (coordinated omission).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import uvloop

from ai_engine.bench.client import Answer, send
from ai_engine.bench.stats import summary
from ai_engine.testing.process import cpu_seconds, process_tree

T = TypeVar("T")
MAX_OPEN = 512
"""Connections of an open loop; more is a failure of the request, not a wait."""


@dataclass(frozen=True)
class Ask:
    """A request made beforehand. ``abort_after_s``: the client leaves then."""

    data: bytes
    name: str = ""
    abort_after_s: float | None = None


@dataclass
class Run:
    """What came of one run. ``cpu_s``: the server's CPU time during it (0: not known)."""

    answers: list[Answer]
    started_s: float
    ended_s: float
    cpu_s: float = 0.0
    client_cpu_s: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.ended_s - self.started_s

    @property
    def good(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.ok]

    @property
    def tokens(self) -> int:
        return sum(answer.completion_tokens for answer in self.good)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def cpu_s_per_1000(self) -> float:
        return 1000 * self.cpu_s / max(1, self.tokens)

    def all(self, what: str) -> list[float]:
        """The samples of "ttft", "tpot", "gap" or "latency" of all good answers, in seconds."""
        if what == "gap":
            return [gap for answer in self.good for gap in answer.gaps_s]
        values = [getattr(answer, f"{what}_s") for answer in self.good]
        return [value for value in values if value is not None]


@dataclass(frozen=True)
class Slo:
    """What a good answer keeps, in seconds."""

    ttft_s: float = 1.0
    tpot_s: float = 0.1
    gap_s: float = 0.5

    def kept(self, answer: Answer) -> bool:
        return (
            answer.ok
            and answer.ttft_s <= self.ttft_s
            and (answer.tpot_s or 0.0) <= self.tpot_s
            and max(answer.gaps_s, default=0.0) <= self.gap_s
        )


def in_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run it on an event loop of its own."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def timed(work: Coroutine[Any, Any, list[Answer]], pid: int = 0) -> Run:
    """Run a load with the CPU time of the server (``pid`` and all below it; 0: unknown) and of this client."""
    pids = process_tree(pid) if pid else []
    server, client, started = cpu_seconds(pids), time.process_time(), time.monotonic()
    answers = in_loop(work)
    ended = max([answer.texts_s[-1] for answer in answers if answer.ok], default=time.monotonic())
    spent = cpu_seconds(pids) - server
    return Run(answers, started, ended, spent, time.process_time() - client)


async def closed_loop(url: str, asks: Sequence[Ask], streams: int, timeout_s: float = 120.0) -> list[Answer]:
    """All asks by ``streams`` clients, each with one request at a time. Answers in the order of the asks."""
    answers: list[Answer | None] = [None] * len(asks)
    todo: Iterator[tuple[int, Ask]] = iter(enumerate(asks))

    async def stream() -> None:
        for i, ask in todo:
            answers[i] = await send(url, ask.data, name=ask.name, abort_after_s=ask.abort_after_s, timeout_s=timeout_s)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(streams, len(asks))):
            group.create_task(stream())
    return [answer for answer in answers if answer is not None]


async def open_loop(
    url: str, asks: Sequence[Ask], arrivals_s: Sequence[float], timeout_s: float = 120.0
) -> list[Answer]:
    """Each ask at its arrival time (seconds after the start), whatever became of those before."""
    start = time.monotonic() + 0.05
    out = 0

    async def one(ask: Ask, at: float) -> Answer:
        nonlocal out
        await asyncio.sleep(max(0.0, start + at - time.monotonic()))
        if out >= MAX_OPEN:
            now = time.monotonic()
            return Answer(name=ask.name, intended_s=start + at, sent_s=now, ended_s=now, error=f"{MAX_OPEN} are out")
        out += 1
        try:
            return await send(
                url, ask.data, name=ask.name, intended_s=start + at, abort_after_s=ask.abort_after_s,
                timeout_s=timeout_s,
            )  # fmt: skip
        finally:
            out -= 1

    return await asyncio.gather(*(one(ask, at) for ask, at in zip(asks, arrivals_s, strict=True)))


def figures(run: Run, slo: Slo | None = None) -> dict[str, Any]:
    """The summary of a run. Times are milliseconds; a percentile without enough samples is None."""
    good, slo = run.good, slo or Slo()
    left = [answer for answer in run.answers if answer.aborted]
    failed = [answer for answer in run.answers if answer.error]
    chunks = sum(len(answer.texts_s) for answer in good)
    kept = sum(slo.kept(answer) for answer in good)

    def ms(what: str, qs: Sequence[float] = (50, 95, 99)) -> dict[str, Any]:
        return summary([1000 * value for value in run.all(what)], qs)

    delays = [1000 * (answer.sent_s - answer.intended_s) for answer in run.answers]
    return {
        "seconds": run.seconds,
        "requests": len(run.answers),
        "good": len(good),
        "left_by_client": len(left),
        "failures": len(failed),
        "errors": sorted({answer.error for answer in failed})[:5],
        "output_tokens": run.tokens,
        "prompt_tokens": sum(answer.prompt_tokens for answer in good),
        "cached_tokens": sum(answer.cached_tokens for answer in good),
        "tokens_per_s": run.tokens_per_s if good else 0.0,
        "requests_per_s": len(good) / run.seconds if good else 0.0,
        "goodput_requests_per_s": kept / run.seconds if good else 0.0,
        "slo_kept_share": kept / max(1, len(run.answers) - len(left)),
        "ttft_ms": ms("ttft"),
        "tpot_ms": ms("tpot"),
        "gap_ms": ms("gap", (50, 99, 99.5)),
        "latency_ms": ms("latency"),
        "tokens_per_chunk": run.tokens / max(1, chunks),
        "send_delay_ms": summary(delays, (50, 99)),
        "server_cpu_s_per_1000_tokens": run.cpu_s_per_1000 if run.cpu_s else None,
        "client_cpu_share": run.client_cpu_s / max(run.seconds, 1e-9),
    } | run.extra


def merged(runs: Sequence[Run]) -> Run:
    """Rounds as one run: samples together, times and CPU added."""
    first = runs[0]
    answers = [answer for run in runs for answer in run.answers]
    seconds = sum(run.seconds for run in runs)
    return Run(
        answers,
        first.started_s,
        first.started_s + seconds,
        sum(r.cpu_s for r in runs),
        sum(r.client_cpu_s for r in runs),
    )
