"""What structured output costs: tokens a second under a schema against free ones, A B A B, and the time of a mask.

    python -m bench.structured_output [--model smollm2] [--rounds 5] [--tokens 200]

Both sides draw from the same prompt with the same seeds; guesses are off, so a token is a step. Owns the comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from typing import Any

from ai_engine import app
from ai_engine.config import EngineConfig, ServeConfig
from ai_engine.data.models import resolve
from ai_engine.ports.grammar import U32, Constraint, Grammar, Grammars, Matcher
from ai_engine.ports.sampling import SamplingParams
from ai_engine.ports.serving import GenerateRequest
from ai_engine.ports.telemetry import StepDone
from ai_engine.testing.telemetry import MemoryTelemetry
from bench.machine import save, stolen_s

ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "description": {"type": "string"},
        "legs": {"type": "integer", "minimum": 0, "maximum": 1000},
        "diet": {"enum": ["plants", "meat", "both"]},
    },
    "required": ["name", "description", "legs", "diet"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 3}
ASKED = [{"role": "user", "content": "List many different animals as JSON: name, description, legs, diet."}]


class Timed:
    """Grammars, a grammar or a matcher of another implementation, whose masks are timed."""

    def __init__(self, inner: Any, seconds: list[float]) -> None:
        self._inner, self._seconds = inner, seconds

    def compile(self, constraint: Constraint) -> Grammar:
        made: Grammar = Timed(self._inner.compile(constraint), self._seconds)  # type: ignore[assignment]
        return made

    def open(self) -> Matcher:
        made: Matcher = Timed(self._inner.open(), self._seconds)  # type: ignore[assignment]
        return made

    def fill(self, row: U32, tokens_left: int) -> None:
        began = time.perf_counter()
        self._inner.fill(row, tokens_left)
        self._seconds.append(time.perf_counter() - began)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


async def steps(local: app.Local, telemetry: MemoryTelemetry, requests: list[GenerateRequest]) -> list[float]:
    """Seconds from step to step while all of them ran."""
    telemetry.events.clear()

    async def one(request: GenerateRequest) -> None:
        async for chunk in await local.serving.submit(request):
            assert chunk.finish in (None, "stop", "length"), chunk

    await asyncio.gather(*map(one, requests))
    full = [e for e in telemetry.events if isinstance(e, StepDone) and e.decode_tokens == len(requests)]
    return [later.started_s - earlier.started_s for earlier, later in itertools.pairwise(full)]


async def run(args: argparse.Namespace) -> dict[str, Any]:
    telemetry, seconds = MemoryTelemetry(), list[float]()
    engine = EngineConfig(speculation="off", max_context=1024, max_seqs=16)
    path = resolve(args.model)
    local = await app.open_local(str(path), engine, ServeConfig(), telemetry=telemetry)
    grammars: Grammars = Timed(app.build_grammars(path, local.limits, local.text.eos_ids), seconds)  # type: ignore[assignment]
    local.serving._compilers._grammars = grammars
    prompt = (await local.text.encode_chat(ASKED)).ids
    constraint = Constraint(kind="json_schema", text=json.dumps(SCHEMA))
    results: dict[str, Any] = {}
    number = 0
    for together in (1, 8):
        gaps: dict[bool, list[float]] = {False: [], True: []}
        for round_number in range(args.rounds):
            for held in (False, True):
                requests = []
                for index in range(together):
                    number += 1
                    params = SamplingParams(
                        seed=round_number * 100 + index, max_tokens=args.tokens, ignore_eos=not held
                    )
                    requests.append(
                        GenerateRequest(
                            request_id=f"r{number}", trace_id=f"{number:032x}", prompt=prompt, params=params,
                            constraint=constraint if held else None,
                        )
                    )  # fmt: skip
                gaps[held] += await steps(local, telemetry, requests)
        free, held_s = statistics.median(gaps[False]), statistics.median(gaps[True])
        results[f"together {together}"] = {
            "free step ms": round(1e3 * free, 3), "held step ms": round(1e3 * held_s, 3), "steps held": len(gaps[True]),
            "speed held over free": round(free / held_s, 3),
        }  # fmt: skip
    await local.close()
    cuts = statistics.quantiles(seconds, n=100)
    results["mask us"] = {"p50": round(1e6 * cuts[49]), "p90": round(1e6 * cuts[89]), "p99": round(1e6 * cuts[98])}
    results["masks"] = len(seconds)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="What structured output costs.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=200)
    args = parser.parse_args()
    before = stolen_s()
    results = asyncio.run(run(args))
    results["stolen s"] = round(stolen_s() - before, 2)
    print(json.dumps(results, indent=1))
    save(f"structured-output-{args.model}", results)


if __name__ == "__main__":
    main()
