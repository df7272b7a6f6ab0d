"""The real schemas of JSONSchemaBench as requests to an engine, and what became of each.

Owns running them and the table by folder:

    python -m tests.integration.json_schemas            runs all, writes bench/results and docs/structured-output.md
    python -m tests.integration.json_schemas --table    writes the page's table from the results that are there

The schemas are read from ``AI_ENGINE_VECTORS/json-schemas``, else from beside the checkout; they have no licence that
would let them into it. Each is one request: its title or description as the prompt, max_tokens 1,024, temperature 1,
seed its number. The judge of answers is the jsonschema package, by the draft that the schema states.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jsonschema
import msgspec
import referencing.exceptions

from ai_engine import app
from ai_engine.config import EngineConfig, ServeConfig
from ai_engine.ports.errors import AiEngineError, InvalidRequest
from ai_engine.ports.grammar import Constraint, Grammars
from ai_engine.ports.sampling import SamplingParams
from ai_engine.ports.serving import GenerateRequest
from bench.machine import save
from tests.conftest import ROOT

MAX_TOKENS = 1024
IN_FLIGHT = 64
TABLE = ROOT / "docs" / "structured-output.md"
RESULTS = ROOT / "bench" / "results" / "structured-output-schemas.json"
SMALL_TOKENS = 256
"""A schema whose smallest instance takes at most so many must nearly always be finished."""


class Outcome(msgspec.Struct):
    """``finish``: refused, no room, stop, length, failed. ``keyword``: what a refusal names. ``valid``: of a stop."""

    folder: str
    name: str
    finish: str
    min_tokens: int = 0  # 0: no smallest instance is known
    num_tokens: int = 0
    keyword: str = ""
    valid: bool | None = None
    message: str = ""


def schema_files() -> list[Path]:
    """All of them, by folder and name; empty where the folder is absent."""
    named = os.environ.get("AI_ENGINE_VECTORS")
    root = Path(named) if named else ROOT.parent / "shared" / "data"
    return sorted((root / "json-schemas").glob("*/*.json"))


def judge(schema_text: str, answer: str) -> str:
    """ "" when the answer is valid JSON that follows the schema, else why not."""
    schema = json.loads(schema_text)
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        validator(schema).validate(json.loads(answer))
    except jsonschema.ValidationError as error:
        return f"{error.message[:200]} ({'/'.join(map(str, error.absolute_schema_path))})"
    except ValueError as error:
        return f"not JSON: {error}"
    except referencing.exceptions.Unresolvable as error:  # the judge resolves fewer references than we do
        return f"not judged: {error}"
    return ""


class Runner:
    def __init__(self, local: app.Local, grammars: Grammars, max_tokens: int) -> None:
        self._local, self._grammars, self._max_tokens = local, grammars, max_tokens

    async def run(self, number: int, path: Path) -> Outcome:
        """One schema's request."""
        text = await asyncio.to_thread(path.read_text)
        outcome = Outcome(path.parent.name, path.name, "")
        constraint = Constraint(kind="json_schema", text=text)
        try:
            outcome.min_tokens = (await asyncio.to_thread(self._grammars.compile, constraint)).min_tokens
            await self._answer(number, text, constraint, outcome)
        except InvalidRequest as error:
            outcome.finish, outcome.message = "refused", error.message
            outcome.keyword = named(error.message)
            if error.param == "max_tokens":  # a schema that can be enforced, with a limit that holds no instance
                outcome.finish, outcome.keyword = "no room", ""
        except AiEngineError as error:
            outcome.finish, outcome.message = "failed", error.message
        return outcome

    async def _answer(self, number: int, text: str, constraint: Constraint, outcome: Outcome) -> None:
        said = await self._local.text.encode_chat([{"role": "user", "content": prompt_of(text, outcome.name)}])
        request = GenerateRequest(
            request_id=f"{outcome.folder}/{outcome.name}",
            trace_id=f"{number + 1:032x}",
            prompt=said.ids,
            params=SamplingParams(seed=number, max_tokens=self._max_tokens),
            constraint=constraint,
        )
        tokens: list[int] = []
        async for chunk in await self._local.serving.submit(request):
            tokens += chunk.tokens
            if chunk.finish is not None:
                outcome.finish, outcome.message = chunk.finish, chunk.error_message or ""
        outcome.num_tokens = len(tokens)
        if outcome.finish == "stop":
            outcome.message = judge(text, self._local.text.decode(tokens))
            outcome.valid = not outcome.message


def named(message: str) -> str:
    """The keyword that a refusal names; of one that cannot tell, the keywords of the schema that it points at."""
    one = re.search(r"the schema's '([^']+)' at '", message)
    return one.group(1) if one else "/".join(re.findall(r"'([$\w]+)'", message.partition(" with ")[2]))


def prompt_of(schema_text: str, name: str) -> str:
    schema = json.loads(schema_text)
    about = " ".join(str(schema.get("description") or schema.get("title") or Path(name).stem).split())[:300]
    return f"Write an example in JSON of: {about}"


async def run_all(
    model: Path, numbered: Sequence[tuple[int, Path]], *, max_tokens: int = MAX_TOKENS, tell: bool = False
) -> list[Outcome]:
    """Every schema's outcome, in order."""
    engine = EngineConfig(max_seqs=IN_FLIGHT, max_context=4096, kv_memory=1 << 30)
    local = await app.open_local(str(model), engine, ServeConfig(offline=True))
    grammars = app.build_grammars(model, local.limits, local.text.eos_ids)
    runner, seats, began = Runner(local, grammars, max_tokens), asyncio.Semaphore(IN_FLIGHT), time.monotonic()
    finished: list[Outcome] = []

    async def seated(number: int, path: Path) -> Outcome:
        async with seats:
            outcome = await runner.run(number, path)
        finished.append(outcome)
        if tell and len(finished) % 50 == 0:
            tokens = sum(one.num_tokens for one in finished)
            print(f"{len(finished)} schemas, {tokens} tokens, {time.monotonic() - began:.0f} s", file=sys.stderr)  # noqa: T201
        return outcome

    try:
        return await asyncio.gather(*(seated(number, path) for number, path in numbered))
    finally:
        with contextlib.suppress(AiEngineError):
            await local.close()


# --- what is required of them, and the table


def accepted(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [one for one in outcomes if one.finish != "refused"]


def check(outcomes: Sequence[Outcome]) -> None:
    """The acceptance of structured output."""
    taken = accepted(outcomes)
    assert len(taken) >= 0.85 * len(outcomes), f"{len(taken)} of {len(outcomes)} schemas are accepted"
    assert not [one for one in outcomes if one.finish == "refused" and not one.keyword], "a refusal names no keyword"
    invalid = [one for one in taken if one.finish == "stop" and not one.valid]
    assert not invalid, invalid[:3]
    small = [one for one in taken if one.min_tokens <= SMALL_TOKENS]
    cut = [one.name for one in small if one.finish != "stop"]
    assert len(cut) <= 0.1 * len(small), f"{len(cut)} of {len(small)} are not finished: {cut[:10]}"


def table(outcomes: Sequence[Outcome]) -> str:
    """By folder, as Markdown."""
    rows = [
        "| folder | schemas | accepted | stop | of these valid | length | no room | failed | tokens, median |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    folders = sorted({one.folder for one in outcomes})
    for folder in [*folders, ""]:
        group = [one for one in outcomes if folder in ("", one.folder)]
        taken = accepted(group)
        counts = [sum(one.finish == how for one in taken) for how in ("stop", "length", "no room", "failed")]
        sizes = sorted(one.num_tokens for one in taken)
        cells = [
            folder or "all", len(group), f"{len(taken)} ({100 * len(taken) / len(group):.0f} %)", counts[0],
            sum(one.valid is True for one in taken), *counts[1:], sizes[len(sizes) // 2] if sizes else 0,
        ]  # fmt: skip
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def refusals(outcomes: Sequence[Outcome]) -> str:
    """Keywords that refusals name, most frequent first."""
    counts: dict[str, int] = {}
    for one in outcomes:
        if one.finish == "refused":
            counts[one.keyword] = counts.get(one.keyword, 0) + 1
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"`{keyword}` {count}" for keyword, count in ordered)


def written(page: str, outcomes: Sequence[Outcome]) -> str:
    """The page with its generated part made anew."""
    before, _, rest = page.partition("<!-- table -->\n")
    _, _, after = rest.partition("<!-- end of table -->")
    body = f"{table(outcomes)}\n\nRefused for: {refusals(outcomes)}.\n"
    return f"{before}<!-- table -->\n{body}<!-- end of table -->{after}"


def main() -> None:
    from ai_engine.data.models import resolve

    files = list(enumerate(schema_files()))
    if sys.argv[1:] == ["--table"]:
        outcomes = msgspec.convert(json.loads(RESULTS.read_bytes())["outcomes"], list[Outcome])
    else:
        outcomes = asyncio.run(run_all(resolve("smollm2"), files, tell=True))
    print(table(outcomes))  # noqa: T201
    if sys.argv[1:] != ["--table"]:
        save(RESULTS.stem, {"model": "smollm2", "outcomes": msgspec.to_builtins(outcomes)})
    TABLE.write_text(written(TABLE.read_text(), outcomes))
    check(outcomes)


if __name__ == "__main__":
    main()
