"""`bench serve`: workloads over HTTP against any OpenAI-compatible server, or against one of ours started for the run.

Owns the order of a run: calibrate the client, warm up, measure each workload, report. Requests are load.py's, lengths
and texts workloads.py's. Raw answers go to NAME.jsonl beside the summary.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import secrets
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from ai_engine import app
from ai_engine.bench.client import Answer, send
from ai_engine.bench.host import LoadWatch
from ai_engine.bench.load import Ask, Run, Slo, closed_loop, figures, in_loop, merged, open_loop, timed
from ai_engine.bench.report import Deadline, Report, cell, file_name
from ai_engine.bench.stats import cdf, poisson_arrivals, summary
from ai_engine.bench.svg import Series, lines
from ai_engine.bench.workloads import SHAPES, Prompts, Shape
from ai_engine.ports.errors import ConfigError, EngineError
from ai_engine.progress import ProgressBar
from ai_engine.testing.process import Server, cpu_seconds, process_tree

WARM_UP = 20
LOADS = (0.3, 0.6, 0.9)
NULL_TOKENS, NULL_GAP_MS, NULL_STREAMS = 64, 5.0, 8
INTRUDER_TOKENS = 4000
VICTIM_LEAD = 64
"""Pieces that every running stream has received before the intruder comes."""


@dataclass
class Target:
    """A server under test: where it is, its process (0: unknown), and how to ask it."""

    url: str
    pid: int
    prompts: Prompts
    slo: Slo
    quick: bool
    timeout_s: float = 120.0

    def closed(self, asks: Sequence[Ask], streams: int) -> Run:
        return timed(closed_loop(self.url, asks, streams, self.timeout_s), self.pid)

    def scaled(self, shape: Shape) -> Shape:
        """The same, smaller, for --quick."""
        if not self.quick:
            return shape
        return replace(
            shape, requests=min(shape.requests, 6), prompt=min(shape.prompt, 128), output=min(shape.output, 24)
        )


@contextlib.contextmanager
def our_server(model: Path, *flags: str) -> Iterator[Server]:
    """`ai-engine serve` on a free port for as long as the block runs."""
    try:
        server = Server(str(model), *flags)
    except AssertionError as error:
        raise EngineError(str(error)) from None
    try:
        yield server
    finally:
        with contextlib.suppress(AssertionError):
            server.stop()


def calibrate(tokens: int = NULL_TOKENS) -> dict[str, Any]:
    """What the client itself costs: against a server that streams at a fixed pace without thinking."""
    command = [sys.executable, "-m", "ai_engine.bench.null_server", str(tokens), str(NULL_GAP_MS)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        url = f"http://127.0.0.1:{int(child.stdout.readline())}"
        prompts = Prompts(url, "null", None, 0)
        asks = prompts.asks(2 * NULL_STREAMS, 8, tokens)
        prompts.close()
        run = timed(closed_loop(url, asks, NULL_STREAMS, timeout_s=20.0), child.pid)
    finally:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()
    if not run.good:
        raise EngineError(f"the client cannot be calibrated: {run.answers[0].error}")
    late = [1000 * gap - NULL_GAP_MS for gap in run.all("gap")]
    first = [1000 * value - NULL_GAP_MS for value in run.all("ttft")]
    return {
        "client_cpu_s_per_1000_tokens": 1000 * run.client_cpu_s / max(1, run.tokens),
        "gap_error_ms": summary([abs(value) for value in late], (50, 99)),
        "ttft_above_pace_ms": max(first, default=None),
        "failures": len(run.answers) - len(run.good),
    }


def listed_model(url: str) -> str:
    """The first id of /v1/models. EngineError where nobody answers."""
    try:
        with urllib.request.urlopen(url + "/v1/models", timeout=10) as reply:
            return str(json.load(reply)["data"][0]["id"])
    except (OSError, urllib.error.URLError, ValueError, KeyError, IndexError) as error:
        raise EngineError(f"{url}/v1/models does not answer as an OpenAI server does: {error}") from None


# --- workloads: each gives named runs


def closed(target: Target, shape: Shape) -> dict[str, Run]:
    asks = target.prompts.asks(shape.requests, shape.prompt, shape.output, shape.name)
    return {shape.name: target.closed(asks, shape.streams)}


def mixed(target: Target, shape: Shape) -> dict[str, Run]:
    """The most that a closed loop gets through, then arrivals at shares of it."""
    asks, _ = target.prompts.mixed(shape.requests)
    most = target.closed(asks, shape.streams)
    rate = len(most.good) / most.seconds
    runs = {f"{shape.name} most": most}
    for share in LOADS[: 1 if target.quick else None]:
        asks, _ = target.prompts.mixed(shape.requests)
        arrivals = poisson_arrivals(max(share * rate, 0.01), len(asks), target.prompts.arrivals_rng())
        run = timed(open_loop(target.url, asks, arrivals, target.timeout_s), target.pid)
        run.extra["offered_requests_per_s"] = share * rate
        runs[f"{shape.name} {share:.0%}"] = run
    return runs


def intruder(target: Target, shape: Shape) -> dict[str, Run]:
    """The intruder alone, then among the running streams; `victim_gap_ms` are gaps that ended before its first text."""
    size = 256 if target.quick else INTRUDER_TOKENS
    alone = target.closed([target.prompts.ask(target.prompts.prompt(size), 8, name="alone")], 1)
    victims = target.prompts.asks(shape.streams, shape.prompt, shape.output, "victim")
    long = target.prompts.ask(target.prompts.prompt(size), 8, name="intruder")
    run = timed(_intrude(target, victims, long, 8 if target.quick else VICTIM_LEAD), target.pid)
    entered = next(answer for answer in run.answers if answer.name == "intruder")
    others = [answer for answer in run.good if answer.name == "victim"]
    if entered.ok and alone.good and others:
        window = (entered.sent_s, entered.texts_s[0])
        gaps = [
            1000 * (b - a) for answer in others for a, b in zip(answer.texts_s, answer.texts_s[1:], strict=False)
            if b > window[0] and a < window[1]
        ]  # fmt: skip
        run.extra |= {
            "intruder_ttft_ms": 1000 * entered.ttft_s, "intruder_alone_ttft_ms": 1000 * alone.good[0].ttft_s,
            "intruder_ttft_ratio": entered.ttft_s / alone.good[0].ttft_s,
            "victim_gap_ms": summary(gaps, (50, 99, 99.5)),
        }  # fmt: skip
    return {f"{shape.name} alone": alone, shape.name: run}


async def _intrude(target: Target, victims: Sequence[Ask], long: Ask, lead: int) -> list[Answer]:
    """Start the victims; when each has received ``lead`` pieces (or its whole answer), send the long prompt."""
    going = [asyncio.Event() for _ in victims]

    async def victim(ask: Ask, event: asyncio.Event) -> Answer:
        def on_part(count: int) -> None:
            if count >= lead:
                event.set()

        try:
            return await send(target.url, ask.data, name=ask.name, on_part=on_part, timeout_s=target.timeout_s)
        finally:
            event.set()

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(victim(*pair)) for pair in zip(victims, going, strict=True)]
        for event in going:
            await event.wait()
        entered = await send(target.url, long.data, name=long.name, timeout_s=target.timeout_s)
    return [*(task.result() for task in running), entered]


def shared_prefix(target: Target, shape: Shape) -> dict[str, Run]:
    """The first request alone, as whoever fills the cache; then the others together. All of them count."""
    return {shape.name: prefix_run(target, shape.prompt, shape.requests, 32, shape.output, shape.streams)}


def prefix_run(target: Target, prefix: int, count: int, suffix: int, output: int, streams: int) -> Run:
    prompts = target.prompts.shared(prefix, count, suffix)
    first, *rest = (target.prompts.ask(prompt, output, name="prefix") for prompt in prompts)

    async def both() -> list[Answer]:
        alone = await closed_loop(target.url, [first], 1, target.timeout_s)
        return alone + await closed_loop(target.url, rest, streams, target.timeout_s)

    return timed(both(), target.pid)


def cancel_storm(target: Target, shape: Shape) -> dict[str, Run]:
    """Every other client leaves at a random moment of the time a whole answer takes; the survivors' throughput."""
    probe = target.closed(target.prompts.asks(1, shape.prompt, shape.output), 1)
    whole_s = max(0.2, probe.seconds) * shape.streams / 2
    rng = target.prompts.arrivals_rng()
    asks = [
        target.prompts.ask(
            target.prompts.prompt(shape.prompt), shape.output, name="leaver" if i % 2 else "survivor",
            abort_after_s=float(rng.uniform(0.02, whole_s)) if i % 2 else None,
        )
        for i in range(shape.requests)
    ]  # fmt: skip
    run = target.closed(asks, shape.streams)
    run.extra["survivors"] = sum(answer.ok for answer in run.answers if answer.name == "survivor")
    return {shape.name: run}


WORKLOADS: dict[str, Callable[[Target, Shape], dict[str, Run]]] = {
    "S1": closed, "S2": closed, "S3": closed, "S4": mixed, "S5": intruder, "S6": shared_prefix, "S8": cancel_storm,
}  # fmt: skip


def measure(target: Target, names: Sequence[str], rounds: int, deadline: Deadline) -> dict[str, list[Run]]:
    """Rounds of all workloads, interleaved; fresh prompts in each."""
    progress, runs = ProgressBar(), dict[str, list[Run]]()
    for done in range(rounds):
        for i, name in enumerate(names):
            if (done or i) and deadline.passed:
                return runs
            for label, run in WORKLOADS[name](target, target.scaled(SHAPES[name])).items():
                runs.setdefault(label, []).append(run)
            progress("serve", (done * len(names) + i + 1) / (rounds * len(names)))
    return runs


def warm_up(target: Target) -> None:
    asks = target.prompts.asks(2 if target.quick else WARM_UP, 32, 16)
    answers = in_loop(closed_loop(target.url, asks, 4, target.timeout_s))
    failed = [answer.error for answer in answers if answer.error]
    if len(failed) == len(answers):
        raise EngineError(f"no request of the warm-up succeeded: {failed[0]}")


def run(args: argparse.Namespace) -> int:
    names = check(args)
    watch, deadline = LoadWatch(), Deadline(args.minutes)
    report = Report(f"serve-{file_name(args.model or args.served_model or 'url')}", args.out, args.json)
    seed = args.seed or secrets.randbits(32)
    client = calibrate(16 if args.quick else NULL_TOKENS)
    model = app.find_model(args.model, offline=False, progress=ProgressBar()) if args.model else None
    with contextlib.ExitStack() as stack:
        url, pid = args.url.rstrip("/").removesuffix("/v1"), args.pid
        if not url:
            assert model is not None
            server = stack.enter_context(our_server(model, *(["--threads", str(args.threads)] if args.threads else [])))
            url, pid = server.url, server.process.pid
        prompts = Prompts(url, args.served_model or listed_model(url), model, seed)
        stack.callback(prompts.close)
        target = Target(url, pid, prompts, Slo(args.slo_ttft, args.slo_tpot, args.slo_gap), args.quick)
        warm_up(target)
        before = cpu_seconds(process_tree(pid)) if pid else 0.0
        runs = measure(target, names, 1 if args.quick else args.rounds or 1, deadline)
        if pid:
            watch.count_as_ours(cpu_seconds(process_tree(pid)) - before)
    show(report, runs, target.slo)
    if args.out is not None:
        write_raw(args.out / f"{report.name}.jsonl", runs)
    result = {name: [figures(one, target.slo) for one in each] for name, each in runs.items()}
    report.finish({
        "url": args.url or "own server", "model": args.model, "quick": args.quick, "seed": seed, "client": client,
        "load": watch.report(), "slo": target.slo, "rounds": result,
        "together": {name: figures(merged(each), target.slo) for name, each in runs.items()},
    })  # fmt: skip
    return 0 if all(not answer.error for each in runs.values() for one in each for answer in one.answers) else 1


def check(args: argparse.Namespace) -> list[str]:
    """The workloads that were named. Raises ConfigError."""
    if not args.url and not args.model:
        raise ConfigError("name a model to serve it for the run, or --url of a server that runs", param="model")
    names = [name.strip().upper() for name in args.workload.split(",") if name.strip()]
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown or not names:
        raise ConfigError(f"--workload is {args.workload!r}; use some of {', '.join(WORKLOADS)}", param="workload")
    return names


def show(report: Report, runs: dict[str, list[Run]], slo: Slo) -> None:
    rows = []
    for name, each in runs.items():
        row = figures(merged(each), slo)
        rows.append([
            name, f"{row['good']}/{row['requests']}", row["failures"], row["tokens_per_s"], row["ttft_ms"]["p50"] or
            row["ttft_ms"]["mean"], row["ttft_ms"]["p95"], row["tpot_ms"]["mean"], row["gap_ms"]["p99"],
            row["gap_ms"]["max"], row["tokens_per_chunk"], row["cached_tokens"], row["server_cpu_s_per_1000_tokens"],
            f"{row['slo_kept_share']:.0%}",
        ])  # fmt: skip
    head = ["workload", "good", "failed", "tok/s", "TTFT ms", "p95", "TPOT ms", "gap p99", "gap max", "tok/chunk",
            "cached", "CPU s/1k", "SLO"]  # fmt: skip
    report.table("TTFT is the median where 100 answers allow one, else the mean; '-': too few samples", head, rows)
    for name, each in runs.items():
        extra = {key: value for one in each for key, value in one.extra.items()}
        if "intruder_ttft_ratio" in extra:
            gap = extra["victim_gap_ms"]
            tail = f"p99.5 {cell(gap['p99.5'])}, max {cell(gap['max'])} ms of {gap['count']}"
            report.say(
                f"{name}: intruder's TTFT {cell(extra['intruder_ttft_ms'])} ms, x "
                f"{cell(extra['intruder_ttft_ratio'])} of its own alone; running streams' gaps meanwhile: {tail}"
            )
    gaps = [Series(name, *cdf([1000 * g for one in each for g in one.all("gap")])) for name, each in runs.items()]
    report.plot("gaps", lines("Gaps between pieces of text", "milliseconds", "share at or below", gaps, log_x=True))
    firsts = [Series(name, *cdf([1000 * t for one in each for t in one.all("ttft")])) for name, each in runs.items()]
    report.plot("ttft", lines("Time to first text", "milliseconds", "share at or below", firsts))
    report.plot(
        "time", lines("Tokens over time", "seconds", "tokens a second", [timeline(n, e[0]) for n, e in runs.items()])
    )


def timeline(name: str, run: Run, points: int = 60) -> Series:
    """Pieces of text in each interval of a run, as a rate of tokens."""
    width = max(run.seconds / points, 0.05)
    counts = [0.0] * (int(run.seconds / width) + 1)
    scale = run.tokens / max(1, sum(len(answer.texts_s) for answer in run.good))
    for answer in run.good:
        for at in answer.texts_s:
            counts[min(int((at - run.started_s) / width), len(counts) - 1)] += scale / width
    return Series(name, [i * width for i in range(len(counts))], counts)


def write_raw(path: Path, runs: dict[str, list[Run]]) -> None:
    """One JSON line an answer."""
    with path.open("wb") as file:
        for name, each in runs.items():
            for number, one in enumerate(each):
                for answer in one.answers:
                    row = {"workload": name, "round": number, **msgspec.to_builtins(answer)}
                    row["texts_s"] = [round(t - one.started_s, 6) for t in answer.texts_s]
                    for key in ("intended_s", "sent_s", "ended_s"):
                        row[key] = round(row[key] - one.started_s, 6)
                    file.write(msgspec.json.encode(row) + b"\n")


__all__ = ["Target", "calibrate", "measure", "our_server", "prefix_run", "run", "time", "timeline"]
