"""Two servers on one machine: ours and llama-server on the same file, the same client, the same token ids, A B A B.

Owns the rounds, the tuning of llama-server (the best of a few settings, which is recorded) and the ratios. Both run all
the time; one is idle while the other is asked. Caches are off on both sides, or on for both (`prefix`), never mixed.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from ai_engine.bench import compare
from ai_engine.bench.host import LoadWatch
from ai_engine.bench.llamacpp import LlamaCpp, LlamaServer, server_flags
from ai_engine.bench.load import Run, Slo, closed_loop, figures, in_loop, merged
from ai_engine.bench.report import Deadline, Report
from ai_engine.bench.serve import Target, listed_model, our_server, prefix_run
from ai_engine.bench.stats import percentile, ratio_of_pools, ratio_of_rounds
from ai_engine.bench.workloads import Prompts
from ai_engine.ports.errors import ConfigError, EngineError
from ai_engine.progress import ProgressBar
from ai_engine.testing.process import Server, cpu_seconds, process_tree

STREAMS = 8
CONTEXT = 1024
SETTINGS: dict[str, list[str]] = {
    "base": [],
    "-b 2048 -ub 512": ["-b", "2048", "-ub", "512"],
    "--poll 0": ["--poll", "0"],
    "--kv-unified": ["--kv-unified"],
}
EQUAL_SAMPLING: dict[str, Any] = {
    "samplers": ["temperature"], "top_k": 1, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0,
}  # fmt: skip
"""llama-server's own defaults are others; this is plain greedy, as ours."""
Size = Literal["tiny", "short", "full"]
Load = Callable[[Target, Size], Run]


def streams(target: Target, size: Size) -> Run:
    count, output = {"tiny": (4, 8), "short": (STREAMS, 64), "full": (4 * STREAMS, 128)}[size]
    return target.closed(target.prompts.asks(count, 128, output), STREAMS)


def single(target: Target, size: Size) -> Run:
    count, output = {"tiny": (1, 8), "short": (1, 128), "full": (4, 128)}[size]
    return target.closed(target.prompts.asks(count, 128, output), 1)


def prefix(target: Target, size: Size) -> Run:
    count, output = {"tiny": (3, 8), "short": (8, 32), "full": (16, 64)}[size]
    return prefix_run(target, 512, count, 32, output, STREAMS)


LOADS: dict[str, tuple[Load, bool, int]] = {
    "streams": (streams, False, 6), "single": (single, False, 2), "prefix": (prefix, True, 4),
}  # fmt: skip
"""Name: what is asked, whether the prefix caches are on, and its share of the time."""
MUSTS: dict[str, dict[str, float]] = {
    "Q4_1": {"streams": 3.0, "single": 1.7, "prefix": 3.0},
    "Q4_0": {"streams": 2.0, "single": 1.5, "prefix": 3.0},
}


class Pair:
    """Both servers with the same kind of caching, llama-server with given settings."""

    def __init__(self, ours: Server, llama: LlamaCpp, model: Path, threads: int, cache: bool) -> None:
        self._llama, self._model, self._threads, self._cache = llama, model, threads, cache
        self.ours = self._target(ours.url, ours.process.pid, {})
        self.theirs: Target | None = None
        self.server: LlamaServer | None = None

    def _target(self, url: str, pid: int, extra: dict[str, Any]) -> Target:
        prompts = Prompts(url, listed_model(url), self._model, secrets.randbits(32), extra)
        return Target(url, pid, prompts, Slo(), quick=False, timeout_s=180.0)

    def start_theirs(self, extra: Sequence[str]) -> Target:
        """llama-server with these settings on top of the base, instead of the one before."""
        self.stop_theirs()
        flags = server_flags(self._threads, STREAMS, CONTEXT, extra, cache=self._cache)
        self.server = LlamaServer(self._llama, self._model, flags)
        sampling = EQUAL_SAMPLING | {"cache_prompt": self._cache}
        self.theirs = self._target(self.server.url, self.server.process.pid, sampling)
        return self.theirs

    def stop_theirs(self) -> None:
        if self.theirs is not None:
            self.theirs.prompts.close()
        if self.server is not None:
            self.server.stop()
        self.theirs = self.server = None

    def close(self) -> None:
        self.stop_theirs()
        self.ours.prompts.close()


def warm(target: Target) -> None:
    answers = in_loop(closed_loop(target.url, target.prompts.asks(STREAMS, 64, 16), STREAMS, target.timeout_s))
    failed = [answer.error for answer in answers if answer.error]
    if failed:
        raise EngineError(f"warming up {target.url} failed: {failed[0]}")


def tune(pair: Pair, load: Load, names: Sequence[str], size: Size) -> tuple[str, dict[str, float]]:
    """The setting with which llama-server does most tokens a second, and what each did."""
    found = {}
    for name in names:
        target = pair.start_theirs(SETTINGS[name])
        warm(target)
        found[name] = load(target, size).tokens_per_s
    return max(found, key=lambda name: found[name]), found


def run(
    report: Report, llama: LlamaCpp, model: Path, threads: int, args: argparse.Namespace, deadline: Deadline,
    watch: LoadWatch,
) -> dict[str, Any]:  # fmt: skip
    """All loads that were named; returns the part of the result that is the servers'."""
    names = [name.strip() for name in args.workload.split(",") if name.strip()]
    unknown = [name for name in names if name not in LOADS]
    if unknown or not names:
        raise ConfigError(f"--workload is {args.workload!r}; use some of {', '.join(LOADS)}", param="workload")
    rounds = 1 if args.quick else args.rounds or 7
    share = {name: LOADS[name][2] / sum(LOADS[other][2] for other in names) for name in names}
    minutes = deadline.left_s / 60
    result: dict[str, Any] = {}
    table: dict[str, dict[str, Any]] = {}
    for cache in (False, True):
        chosen = [name for name in names if LOADS[name][1] is cache]
        if not chosen:
            continue
        flags = ["--threads", str(threads), *([] if cache else ["--no-prefix-cache"])]
        with our_server(model, *flags) as server:
            pair = Pair(server, llama, model, threads, cache)
            with contextlib.closing(pair):
                warm(pair.ours)
                for name in chosen:
                    result[name] = one_load(report, pair, name, rounds, args.quick, Deadline(share[name] * minutes))
                    must = None if args.quick else compare.asked_for(model, MUSTS).get(name)
                    table |= rows_of(name, result[name], must)
                for target in (pair.ours, pair.theirs):
                    if target is not None:
                        watch.count_as_ours(cpu_seconds(process_tree(target.pid)))
    compare.show_ratios(report, "servers: tokens/s, ms, CPU s per 1,000 tokens", table)
    for part in result.values():
        part["runs"] = {side: [figures(one) for one in each] for side, each in part["runs"].items()}
    return {"loads": result, "ratios": table}


def one_load(report: Report, pair: Pair, name: str, rounds: int, quick: bool, deadline: Deadline) -> dict[str, Any]:
    """Tune theirs for this load, then rounds of A B, B A with the same prompts."""
    load, progress = LOADS[name][0], ProgressBar()
    settings = list(SETTINGS)[: 1 if quick else None]
    best, tried = tune(pair, load, settings, "tiny" if quick else "short")
    theirs = pair.start_theirs(SETTINGS[best])
    warm(theirs)
    seed = secrets.randbits(32)
    for target in (pair.ours, theirs):
        target.prompts.reseed(seed)  # the same token ids in the same order
    runs: dict[str, list[Run]] = {"ours": [], "llama.cpp": []}
    done = 0
    while done < rounds and not (done and deadline.passed):
        for side, target in (("ours", pair.ours), ("llama.cpp", theirs))[:: 1 if done % 2 == 0 else -1]:
            target.timeout_s = min(180.0, deadline.left_s + 30)
            run = load(target, "tiny" if quick else "full")
            if not run.good:
                raise EngineError(f"{name}: no request to {side} succeeded: {run.answers[0].error}")
            runs[side].append(run)
        done += 1
        progress(f"servers, {name}", done / rounds)
    report.say(
        f"{name}: llama-server at its best with '{best}' ({', '.join(f'{k}: {v:.0f}' for k, v in tried.items())} tok/s)"
    )
    return {"setting": best, "tried_tokens_per_s": tried, "rounds": done, "runs": runs,
            "command": pair.server.command[1:] if pair.server else []}  # fmt: skip


def rows_of(name: str, part: dict[str, Any], must: float | None) -> dict[str, dict[str, Any]]:
    """Rows of the table: throughput, tails where there are enough samples, CPU."""
    ours, theirs = part["runs"]["ours"], part["runs"]["llama.cpp"]
    rows: dict[str, dict[str, Any]] = {}

    def row(label: str, a: float, b: float, ratio: Any, must: float | None, at_most: bool) -> None:
        rows[f"{name}: {label}"] = {"ours": a, "llama.cpp": b, "ratio": ratio, "must": must, "at_most": at_most}

    speeds = [[one.tokens_per_s for one in side] for side in (ours, theirs)]
    a, b = (percentile(values, 50) for values in speeds)
    row("tokens/s", a, b, ratio_of_rounds(*speeds), must, False)
    tails = (("ttft", 95.0, 200), ("gap", 99.0, 1000))
    for what, q, enough in tails if name == "streams" else ():
        pools = [[one.all(what) for one in side] for side in (ours, theirs)]
        if all(sum(map(len, pool)) >= enough for pool in pools):
            ends = [1000 * percentile([x for part in pool for x in part], q) for pool in pools]
            ratio = ratio_of_pools(pools[0], pools[1], lambda values, q=q: percentile(values, q))  # type: ignore[misc]
            row(f"{what} p{q:g} ms", ends[0], ends[1], ratio, 1.05, True)
    spent = [[one.cpu_s_per_1000 for one in side] for side in (ours, theirs)]
    if all(value > 0 for side in spent for value in side):  # the kernel counts by 10 ms: short runs may have none
        a, b = (merged(side).cpu_s_per_1000 for side in (ours, theirs))
        row("CPU s/1k tokens", a, b, ratio_of_rounds(*spent), 1.0, True)
    failures = [sum(bool(x.error) for one in side for x in one.answers) for side in (ours, theirs)]
    part["failures"] = dict(zip(("ours", "llama.cpp"), failures, strict=True))
    return rows
