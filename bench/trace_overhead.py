"""What recording costs: steps of a real model with recording on and off by turns; the figure and its interval.

    python -m bench.trace_overhead [--model smollm2] [--pairs 2000] [--sequences 1]

On: the rings are stamped, the step's events are made, taken in and kept, and the collector copies every 10 ms, all in
this one process. Off: none of it. The two steps of a pair follow each other and which comes first is drawn, so drift
and other load fall on both alike. The figure is the median of (on - off) / median(off) over the pairs, with the 95 %
interval of a median by order statistics, which assumes nothing of the distribution. Exit status 1 when the interval
does not lie below 2 %.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import sys
import time
from collections.abc import Sequence

from ai_engine import app
from ai_engine.config import EngineConfig, ServeConfig
from ai_engine.kernels.cpu.backend import CpuKernels
from ai_engine.observe.recorder import Recorder
from ai_engine.observe.steps import StepStore
from ai_engine.observe.traces import Traces
from ai_engine.ports.clock import SystemClock
from ai_engine.ports.sampling import SamplingParams
from ai_engine.ports.serving import Chunk, GenerateRequest
from ai_engine.ports.telemetry import Event, StepDone, Telemetry
from ai_engine.progress import ProgressBar
from ai_engine.runtime.engine import Engine
from ai_engine.serving.config import ServingConfig
from ai_engine.serving.loop import Arrive, StepLoop
from ai_engine.serving.state import Group

LIMIT = 0.02


class Switch:
    """Implements ports.telemetry.Telemetry: passes events on while it is on."""

    def __init__(self, target: Telemetry) -> None:
        self.target = target
        self.on = True

    def emit(self, event: Event) -> None:
        if self.on or not isinstance(event, StepDone):
            self.target.emit(event)


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, low, high): a 95 % interval from the binomial distribution of ranks."""
    ranked, n = sorted(values), len(values)
    half = 1.96 * math.sqrt(n) / 2
    low, high = max(0, math.floor(n / 2 - half)), min(n - 1, math.ceil(n / 2 + half))
    return ranked[n // 2], ranked[low], ranked[high]


async def open_engine(model: str, threads: int) -> Engine:
    config = EngineConfig(threads=threads, max_context=8192, prefix_cache=False)
    local = await app.open_local(model, config, ServeConfig(), ProgressBar())
    await local.serving.close()
    assert isinstance(local.runtime, Engine)
    return local.runtime


def measure(engine: Engine, num_pairs: int, num_sequences: int) -> tuple[list[float], list[float], StepStore]:
    """Seconds of the steps with and without recording, pair by pair."""
    kernels = engine.kernels
    assert isinstance(kernels, CpuKernels)
    store = StepStore(32 << 20, app.cost_of)
    traces = Traces(store)
    store.attach(app.trace_source(engine))
    store.start()
    switch = Switch(Recorder(traces, kernels.clock.now))
    loop = StepLoop(engine, _drop, config=ServingConfig(speculation="off"), clock=SystemClock(), telemetry=switch)
    draw, started = random.Random(1), 0

    def set_recording(on: bool) -> None:
        switch.on = kernels.recording = on

    def timed(on: bool) -> float:
        set_recording(on)
        begun = time.perf_counter()
        loop.run_once()
        return time.perf_counter() - begun

    with_it: list[float] = []
    without: list[float] = []
    while len(with_it) < num_pairs:
        for _ in range(num_sequences):  # a new set of requests: prompt, then output until its context is used
            started += 1
            loop.post(Arrive(Group(_request(started), time.monotonic(), 64)))
        set_recording(True)
        for _ in range(4):
            loop.run_once()
        for _ in range(min(num_pairs - len(with_it), 400)):
            first = draw.random() < 0.5
            pair = {first: timed(first), (not first): timed(not first)}
            with_it.append(pair[True])
            without.append(pair[False])
        while loop.run_once():
            pass
    store.stop()
    return with_it, without, store


def _request(number: int) -> GenerateRequest:
    params = SamplingParams(temperature=0.0, max_tokens=820, seed=1, ignore_eos=True)
    return GenerateRequest(request_id=f"r{number}", trace_id=f"{number:032x}", prompt=[5, 17, 3], params=params)


def _drop(chunks: list[Chunk]) -> None:
    """Nobody reads the answers."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    engine = asyncio.run(open_engine(args.model, args.threads))
    with_it, without, store = measure(engine, args.pairs, args.sequences)
    base = median_interval(without)[0]
    middle, low, high = median_interval([(on - off) / base for on, off in zip(with_it, without, strict=True)])
    print(
        f"{args.model}, {args.sequences} sequences, {engine.kernels.name}: {len(with_it)} pairs of steps, "
        f"{base * 1e3:.3f} ms without recording\n"
        f"recording costs {middle:+.3%} of a step, 95 % interval {low:+.3%} to {high:+.3%}; limit {LIMIT:.0%}\n"
        f"{store.entries_read} ring entries copied, {store.lost} lost"
    )
    engine.close()
    return 0 if high < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
