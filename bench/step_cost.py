"""How well the scheduler knows what a step will take: predicted beside measured, per kind of step.

    python -m bench.step_cost [--model smollm2] [--threads 2] [--save]

Traffic in process through the serving layer: a cold start, prompts alone, batches of 1 to 16, a long prompt beside
streams, a deep prefix out of the cache, text that repeats itself (guesses). Owns the traffic and the quantiles; an
error is measured / predicted - 1, so 0.1 is a step that took a tenth longer than was thought.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ai_engine import app
from ai_engine.config import EngineConfig, ServeConfig
from ai_engine.data.models import open_model, resolve
from ai_engine.ports.progress import no_progress
from ai_engine.ports.runtime import Runtime
from ai_engine.ports.sampling import SamplingParams
from ai_engine.ports.serving import GenerateRequest
from ai_engine.ports.telemetry import StepDone
from ai_engine.serving.service import Service
from ai_engine.testing.telemetry import MemoryTelemetry
from bench.machine import save, stolen_s

QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)


class Traffic:
    """Requests of random tokens, one phase at a time."""

    def __init__(self, service: Service, vocab: int) -> None:
        self._service, self._vocab, self._draw, self._requests = service, vocab, random.Random(0), 0

    def tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(500, self._vocab) for _ in range(count)]

    async def ask(self, prompt: list[int], max_tokens: int) -> None:
        self._requests += 1
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens, ignore_eos=True)
        request = GenerateRequest(request_id=str(self._requests), trace_id="0" * 32, prompt=prompt, params=params)
        async for chunk in await self._service.submit(request):
            assert chunk.finish != "failed", chunk.error_message

    async def batch(self, num_seqs: int, max_tokens: int) -> None:
        await asyncio.gather(*(self.ask(self.tokens(40), max_tokens) for _ in range(num_seqs)))

    async def beside_streams(self, prompt: list[int]) -> None:
        streams = [asyncio.create_task(self.ask(self.tokens(64), 300)) for _ in range(4)]
        await asyncio.sleep(1.0)
        await self.ask(prompt, 2)
        await asyncio.gather(*streams)

    async def phases(self, telemetry: MemoryTelemetry) -> dict[str, list[StepDone]]:
        steps: dict[str, list[StepDone]] = {}

        def ended(name: str) -> None:
            steps[name] = [step for step in telemetry.of(StepDone) if step.num_seqs]
            telemetry.events.clear()

        deep = self.tokens(3000)
        await self.batch(2, 12)
        ended("the first steps of all")
        await self.ask(deep, 1)
        ended("a prompt of 3,000 alone")
        for num_seqs in (1, 4, 16):
            await self.batch(num_seqs, 60)
            ended(f"batch of {num_seqs}")
        await self.beside_streams(self.tokens(2000))
        ended("a prompt of 2,000 beside 4 streams")
        await self.beside_streams(deep + self.tokens(200))
        ended("200 after 3,000 cached, beside 4 streams")
        phrase = self.tokens(12)
        await self.ask(phrase * 12, 150)
        ended("guesses")
        return steps


def row_of(steps: Sequence[StepDone]) -> dict[str, Any]:
    took = np.array([step.ended_s - step.started_s for step in steps])
    errors = took / np.array([max(step.predicted_s, 1e-9) for step in steps]) - 1
    row: dict[str, Any] = {"steps": len(steps), "step_p50_ms": round(float(np.median(took)) * 1e3, 2)}
    row["step_max_ms"] = round(float(took.max()) * 1e3, 2)
    return row | {f"error_p{q * 100:g}": round(float(np.quantile(errors, q)), 3) for q in QUANTILES}


async def measure(runtime: Runtime) -> dict[str, Any]:
    telemetry = MemoryTelemetry()
    service = app.build_service(runtime, EngineConfig(), ServeConfig(), telemetry, frozenset())
    await service.start()
    try:
        phases = await Traffic(service, runtime.limits.vocab_size - 500).phases(telemetry)
    finally:
        await service.close()
    return {name: row_of(steps) for name, steps in phases.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="write bench/results/step-cost-MODEL.json")
    args = parser.parse_args()
    before_s, config = stolen_s(), EngineConfig(threads=args.threads)
    with contextlib.closing(open_model(resolve(args.model))) as file:
        runtime = app.build_runtime(file, config, no_progress, app.NoTelemetry(), frozenset())
    with contextlib.closing(runtime):
        table = asyncio.run(measure(runtime))
    for name, row in table.items():
        errors = " ".join(f"{row[f'error_p{q * 100:g}']:+.2f}" for q in QUANTILES)
        sys.stdout.write(f"{name:<42} {row['steps']:>4} steps, median {row['step_p50_ms']:6.1f} ms, errors {errors}\n")
    result = {"model": args.model, "threads": args.threads, "stolen_s": stolen_s() - before_s, "phases": table}
    if args.save:
        sys.stdout.write(f"written: {save('step-cost-' + args.model, result).name}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
