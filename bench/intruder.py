"""One long prompt against running streams, through the real server over HTTP on the loopback.

    python -m bench.intruder [--model smollm2] [--rounds 7] [--streams 4] [--prompt 4000] [--step-target-ms 50] [--save]

A round: the long prompt alone, then again (other tokens, nothing cached) while streams run. Reported are the streams'
gaps from its arrival to its first token, its time to first token in both cases, and the steps in between as the server
itself timed them (its trace). What the hypervisor took (steal) is read every 10 ms and subtracted from the step in
which it fell. Owns the experiment and its verdicts; a step that carries the smallest chunk may exceed the bound.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import secrets
import statistics
import sys
import threading
import time
import urllib.request
from bisect import bisect_left, bisect_right
from typing import Any

import msgspec

from ai_engine.bench.client import Answer, payload, send
from ai_engine.serving.config import ServingConfig
from ai_engine.testing.process import Server
from bench.machine import save, stolen_s

SLACK_S = 0.025  # a step may exceed its bound by this much
GAP_S = 0.100  # p99.5 of the running streams
RATIO = 2.0  # time to first token, in company to alone
SMALLEST = ServingConfig.__struct_defaults__[ServingConfig.__struct_fields__.index("min_prefill_tokens")]


class StealWatch:
    """Samples of the seconds stolen since boot, every 10 ms, in a thread that does little else."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._stolen: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> StealWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.01):
            self._stolen.append(stolen_s())
            self._times.append(time.monotonic())

    def between_s(self, start_s: float, end_s: float) -> float:
        """Stolen between two moments of the monotonic clock, by the samples around them."""
        if not self._times:
            return 0.0
        first = max(0, bisect_right(self._times, start_s) - 1)
        last = min(len(self._times) - 1, bisect_left(self._times, end_s))
        return max(0.0, self._stolen[last] - self._stolen[first])


def body_of(tokens: list[int], max_tokens: int) -> dict[str, Any]:
    return {
        "prompt": tokens, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip


async def ask(url: str, body: dict[str, Any], trace_id: str = "", on_part: Any = None) -> Answer:
    data = payload(url, "/v1/completions", body)
    if trace_id:
        parent = f"traceparent: 00-{trace_id}-{secrets.token_hex(8)}-01\r\n".encode()
        at = data.index(b"\r\n") + 2
        data = data[:at] + parent + data[at:]
    answer = await send(url, data, timeout_s=300, on_part=on_part)
    assert not answer.error, answer.error
    return answer


def steps_of(url: str, trace_id: str) -> list[dict[str, Any]]:
    """The steps that the request ran in, with ``started_s`` on the monotonic clock."""
    for _ in range(50):  # its last words are on their way
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/traces/{trace_id}", timeout=30) as reply:
            (request,) = json.load(reply)["requests"]
            if request["steps"]:
                for step in request["steps"]:
                    step["started_s"] = request["started_monotonic"] + step["at"]
                return list(request["steps"])
        time.sleep(0.1)
    raise AssertionError(f"there is no trace {trace_id}")


async def play_round(url: str, args: argparse.Namespace, draw: random.Random, watch: StealWatch) -> dict[str, Any]:
    def tokens(count: int) -> list[int]:
        return [draw.randrange(500, args.vocab) for _ in range(count)]

    solo = await ask(url, body_of(tokens(args.prompt), 4))
    running = asyncio.Event()
    waiting = set(range(args.streams))

    def counts(number: int, parts: int) -> None:
        if parts > 8:
            waiting.discard(number)
            if not waiting:
                running.set()

    streams = [
        asyncio.create_task(ask(url, body_of(tokens(64), args.depth - 64), on_part=lambda n, i=i: counts(i, n)))
        for i in range(args.streams)
    ]
    await asyncio.wait_for(running.wait(), 120)
    trace_id = secrets.token_hex(16)
    began_s = time.monotonic()
    intruder = await ask(url, body_of(tokens(args.prompt), 4), trace_id)
    answers = await asyncio.gather(*streams)
    ended_s = began_s + intruder.ttft_s
    gaps = sorted(
        b - a
        for answer in answers
        for a, b in zip(answer.texts_s, answer.texts_s[1:], strict=False)
        if b > began_s and a < ended_s
    )
    alone_s = sum(max(0.0, ended_s - max(began_s, answer.texts_s[-1])) for answer in answers)
    mixed = [s for s in steps_of(url, trace_id) if s["prefill_rows"] and s["all_rows"] > s["prefill_rows"]]
    took = [(s, s["seconds"] - watch.between_s(s["started_s"], s["started_s"] + s["seconds"])) for s in mixed]
    bound_s = args.step_target_ms / 1000
    over = [(s, seconds) for s, seconds in took if seconds > bound_s + SLACK_S and s["prefill_rows"] > SMALLEST]
    return {
        "ttft_s": intruder.ttft_s, "solo_ttft_s": solo.ttft_s, "ratio": intruder.ttft_s / solo.ttft_s,
        "gap_p50_s": gaps[len(gaps) // 2], "gap_p99.5_s": gaps[min(len(gaps) - 1, int(0.995 * len(gaps)))],
        "gap_max_s": gaps[-1], "num_gaps": len(gaps), "streams_ended_early_s": alone_s, "num_mixed_steps": len(mixed),
        "step_p50_s": statistics.median(seconds for _, seconds in took),
        "step_max_s": max(seconds for _, seconds in took),
        "step_max_above_smallest_s": max((t for s, t in took if s["prefill_rows"] > SMALLEST), default=0.0),
        "over": [[s["prefill_rows"], s["context"], round(seconds, 4)] for s, seconds in over],
        "stolen_s": watch.between_s(began_s, ended_s),
    }  # fmt: skip


def verdicts(rounds: list[dict[str, Any]]) -> dict[str, int]:
    """In how many rounds each requirement held."""
    return {
        "gap p99.5 <= 100 ms": sum(r["gap_p99.5_s"] <= GAP_S for r in rounds),
        "no step above its bound + 25 ms": sum(not r["over"] for r in rounds),
        "ttft <= 2 x solo": sum(r["ratio"] <= RATIO for r in rounds),
    }


async def measure(url: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    draw, until_s = random.Random(args.seed), time.monotonic() + args.limit_s
    rounds: list[dict[str, Any]] = []
    with StealWatch() as watch:
        for number in range(args.rounds):
            if rounds and time.monotonic() > until_s:
                sys.stderr.write(f"the time is up after {number} rounds\n")
                break
            made = await play_round(url, args, draw, watch)
            rounds.append({k: round(v, 4) if isinstance(v, float) else v for k, v in made.items()})
            sys.stderr.write(f"round {number + 1} of {args.rounds}: {msgspec.json.encode(rounds[-1]).decode()}\n")
    return rounds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of the long prompt")
    parser.add_argument("--depth", type=int, default=512, help="tokens of a stream, prompt and answer")
    parser.add_argument("--step-target-ms", type=float, default=50.0)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--vocab", type=int, default=40000, help="token ids are drawn from 500 to this")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=600.0, help="no new round after this long")
    parser.add_argument("--save", action="store_true", help="write bench/results/intruder-MODEL.json")
    args = parser.parse_args()
    server = Server(
        args.model, "--step-target-ms", str(args.step_target_ms), "--threads", str(args.threads), "--max-seqs", "16"
    )
    try:
        rounds = asyncio.run(measure(server.url, args))
    finally:
        server.stop()
    result = {"settings": vars(args), "held_in_rounds": verdicts(rounds), "of": len(rounds), "rounds": rounds}
    sys.stdout.write(
        msgspec.json.format(msgspec.json.encode(result["held_in_rounds"])).decode() + f" of {len(rounds)}\n"
    )
    if args.save:
        sys.stdout.write(f"written: {save('intruder-' + args.model, result).name}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
