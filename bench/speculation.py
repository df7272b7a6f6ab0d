"""What prompt look-up gains: committed transcripts replayed with and without it, A B A B.

    python -m bench.speculation [--model smollm2] [--rounds 7] [--threads 2] [--together 5]

Teacher forcing: the model computes and samples every position as always, and the sample is then replaced by the
transcript's token, before the engine compares it with the guesses. So verification, acceptance and the adaptive length
are the real ones, and what is said does not depend on the model. Owns the replay and the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ai_engine import app
from ai_engine.config import EngineConfig, ServeConfig
from ai_engine.data.models import open_model, resolve
from ai_engine.hardware.arena import MappedArena
from ai_engine.hardware.machine import read_machine
from ai_engine.ports.clock import SystemClock
from ai_engine.ports.kernels import Kernels, Program, SampleOut, StepBatch
from ai_engine.ports.sampling import SamplingParams
from ai_engine.ports.serving import GenerateRequest
from ai_engine.ports.telemetry import StepDone
from ai_engine.runtime.engine import Engine, build_engine
from ai_engine.serving.service import Service
from ai_engine.testing.telemetry import MemoryTelemetry
from bench.machine import save, stolen_s

TRANSCRIPTS = Path(__file__).resolve().parent / "transcripts"
BORDER = "\n=====\n"


class Transcript(msgspec.Struct, frozen=True):
    name: str
    prompt: list[int]
    answer: list[int]

    @property
    def repeats(self) -> bool:
        return self.name.startswith("repeat")


class Forced:
    """Kernels whose samples are a transcript's tokens: the row that draws position p of the sequence with seed s gets
    ``texts[s][p]``. Everything else is the kernels' own."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.texts: Mapping[int, Sequence[int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def run(self, program: Program, batch: StepBatch) -> SampleOut:
        out = self._kernels.run(program, batch)
        sample = batch.sample
        for row, (seed, position) in enumerate(zip(sample.seed.tolist(), sample.position.tolist(), strict=True)):
            text = self.texts.get(seed, ())
            if position < len(text):
                out.token[row] = text[position]
        return out


def read_texts() -> list[tuple[str, str, str]]:
    """(name, prompt, answer) of each transcript."""
    parts = [
        (path.stem, path.read_text(encoding="utf-8").partition(BORDER)) for path in sorted(TRANSCRIPTS.glob("*.txt"))
    ]
    return [(name, prompt, answer) for name, (prompt, _, answer) in parts]


async def read_transcripts(model: str) -> list[Transcript]:
    """The transcripts as the model's tokens."""
    with contextlib.closing(open_model(resolve(model))) as file:
        text = app.build_text(file.tokenizer())
    made = []
    for name, *parts in read_texts():
        prompt, answer = [list((await text.encode_prompt(part)).ids) for part in parts]
        made.append(Transcript(name, prompt, answer))
    text.close()
    return made


@contextlib.contextmanager
def forced_engine(model: str, threads: int) -> Iterator[tuple[Engine, Forced]]:
    config = EngineConfig(threads=threads, prefix_cache=False)
    kernels: Any = Forced(app.build_kernels(config))
    with contextlib.closing(open_model(resolve(model))) as file:
        engine = build_engine(
            file, kernels, MappedArena, read_machine().memory_available_bytes, SystemClock(), app.engine_options(config)
        )
    with contextlib.closing(engine):
        yield engine, kernels


class Player:
    """One placement of the serving layer over the engine, and what its steps said."""

    def __init__(self, engine: Engine, speculation: Any) -> None:
        self.telemetry = MemoryTelemetry()
        self.service: Service = app.build_service(
            engine, EngineConfig(speculation=speculation), ServeConfig(), self.telemetry, frozenset()
        )
        self._requests = 0

    async def play(self, script: Transcript, seed: int) -> float:
        """Seconds from the first token to the last."""
        self._requests += 1
        params = SamplingParams(temperature=0.0, seed=seed, max_tokens=len(script.answer), ignore_eos=True)
        request = GenerateRequest(
            request_id=str(self._requests), trace_id="0" * 32, prompt=script.prompt, params=params
        )
        got: list[int] = []
        first_s = 0.0
        async for chunk in await self.service.submit(request):
            assert chunk.finish != "failed", chunk.error_message
            first_s = first_s or time.perf_counter()
            got += chunk.tokens
        assert got == script.answer, f"{script.name}: the answer is not the transcript's"
        return time.perf_counter() - first_s

    async def play_all(self, scripts: Sequence[Transcript]) -> float:
        """All at once: seconds until the last has ended."""
        started = time.perf_counter()
        await asyncio.gather(*(self.play(script, seed) for seed, script in enumerate(scripts)))
        return time.perf_counter() - started

    async def settled(self) -> tuple[int, int, int]:
        """(steps, guesses, of them right) since the last call, once the engine is free for the other player."""
        while not self.service.loop.idle:  # noqa: ASYNC110 - a thread that releases sequences and then just sleeps
            await asyncio.sleep(0.001)
        steps = self.telemetry.of(StepDone)
        self.telemetry.events.clear()
        return len(steps), sum(s.drafted for s in steps), sum(s.accepted for s in steps)


@contextlib.asynccontextmanager
async def players(engine: Engine) -> AsyncIterator[dict[str, Player]]:
    made = {mode: Player(engine, mode) for mode in ("off", "lookup")}
    for player in made.values():
        await player.service.start()
    try:
        yield made
    finally:
        for player in made.values():
            await player.service.close()


def tell(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


async def measure(args: argparse.Namespace, engine: Engine, forced: Forced) -> dict[str, Any]:
    scripts = await read_transcripts(args.model)
    together = [script for script in scripts if script.repeats][: args.together]
    seconds: dict[str, dict[str, list[float]]] = {}
    counts: dict[str, tuple[int, int, int]] = {}
    async with players(engine) as by_mode:
        for round_number in range(-1, args.rounds):  # the first one warms up and teaches the cost model
            order = list(by_mode) if round_number % 2 else list(reversed(by_mode))
            for script in scripts:
                forced.texts = {0: [*script.prompt, *script.answer]}
                for mode in order:
                    took_s = await by_mode[mode].play(script, 0)
                    counts[f"{script.name} {mode}"] = await by_mode[mode].settled()
                    if round_number >= 0:
                        seconds.setdefault(script.name, {}).setdefault(mode, []).append(took_s)
            forced.texts = {n: [*script.prompt, *script.answer] for n, script in enumerate(together)}
            for mode in order if len(together) > 1 else ():
                took_s = await by_mode[mode].play_all(together)
                await by_mode[mode].settled()
                if round_number >= 0:
                    seconds.setdefault("together", {}).setdefault(mode, []).append(took_s)
            tell(f"\rround {round_number + 1} of {args.rounds}")
    tell("\n")
    table: dict[str, Any] = {}
    for name, took in seconds.items():
        ratios = sorted(off / on for off, on in zip(took["off"], took["lookup"], strict=True))
        row: dict[str, Any] = {"ratio": statistics.median(ratios), "low": ratios[0], "high": ratios[-1]}
        row |= {f"{mode}_s": statistics.median(times) for mode, times in took.items()}
        table[name] = {key: round(value, 3) for key, value in row.items()}
        if f"{name} lookup" in counts:
            table[name] |= dict(zip(("steps", "guesses", "accepted"), counts[f"{name} lookup"], strict=True))
            table[name]["tokens"] = next(len(script.answer) for script in scripts if script.name == name)
    return table


def summary(table: Mapping[str, Any], kind: str) -> float:
    """Time of all transcripts of a kind without look-up to their time with it."""
    rows = [row for name, row in table.items() if name.startswith(kind)]
    off_s, on_s = (sum(float(row[key]) for row in rows) for key in ("off_s", "lookup_s"))
    return round(off_s / on_s, 3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--together", type=int, default=5, help="transcripts that are also replayed at the same time")
    parser.add_argument("--save", action="store_true", help="write bench/results/speculation-MODEL.json")
    args = parser.parse_args()
    before_s = stolen_s()
    with forced_engine(args.model, args.threads) as (engine, forced):
        table = asyncio.run(measure(args, engine, forced))
    for name, row in table.items():
        sys.stdout.write(f"{name:<18} {row['ratio']:5.2f} x ({row['low']:.2f} to {row['high']:.2f})")
        if "steps" in row:
            sys.stdout.write(f"  {row['tokens']} tokens, {row['guesses']} guesses, {row['accepted']} right")
        sys.stdout.write("\n")
    result = {"model": args.model, "threads": args.threads, "rounds": args.rounds, "stolen_s": stolen_s() - before_s}
    result |= {"repeating": summary(table, "repeat"), "fresh": summary(table, "fresh"), "transcripts": table}
    sys.stdout.write(f"repeating {result['repeating']:.2f} x (must 1.5), fresh {result['fresh']:.2f} x (must 0.97)\n")
    if args.save:
        sys.stdout.write(f"written: {save('speculation-' + args.model, result).name}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
