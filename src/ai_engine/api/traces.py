"""GET /traces and /traces/{id}: where the time of a request went, down to the single op. Nothing here holds text.

Owns the query's fields. Whose trace is whose is observe's to say: a key sees its own, an admin's key all.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ai_engine.api.replies import encode
from ai_engine.ports.errors import InvalidValue, NotFound
from ai_engine.ports.telemetry import Event, TokensSent

if TYPE_CHECKING:
    from ai_engine.api.generation import Generation, Prompt
    from ai_engine.api.http import Exchange
    from ai_engine.api.openai_types import Ask
    from ai_engine.api.rest import Door
    from ai_engine.ports.serving import Chunk, Usage

MAX_RECENT = 1000
_TRACE_ID = re.compile(r"[0-9a-f]{32}")


async def recent(door: Door, exchange: Exchange) -> None:
    """GET /traces?limit=N: summaries, newest first"""
    limit = _number(exchange.query.get("limit", "50"), "limit", MAX_RECENT)
    found = await asyncio.to_thread(door.traces.recent, key=_whose(exchange), limit=limit)
    await exchange.reply(200, encode({"object": "list", "data": found}))


async def one(door: Door, exchange: Exchange) -> None:
    """GET /traces/{id}?step=N,M or step=all: the tree of a trace; the named steps with their layers and ops"""
    trace_id = exchange.params["id"]
    steps = exchange.query.get("step", "")
    wanted: Sequence[int] | Literal["all"] = "all"
    if steps != "all":
        wanted = [_number(step, "step", 1 << 62) for step in steps.split(",") if step]
    tree = None
    if _TRACE_ID.fullmatch(trace_id):  # off the event loop: decoding a long request's steps takes a while
        tree = await asyncio.to_thread(door.traces.tree, trace_id, key=_whose(exchange), steps=wanted)
    if tree is None:
        raise NotFound(
            f"There is no trace {trace_id[:64]!r} that this key may see. Fix: take the id from x-ai-trace-id, soon "
            "after the request: old traces are given up."
        )
    await exchange.reply(200, encode(tree))


def log_tokens(emit: Callable[[Event], None], exchange: Exchange, chunk: Chunk) -> None:
    """Each token with the step that made it, for the log of whoever asked."""
    if chunk.tokens:
        emit(
            TokensSent(
                exchange.trace_id, exchange.key.name, chunk.request_id, chunk.index, chunk.step, list(chunk.tokens)
            )
        )


class NoTraces:
    """Implements ports.trace.TraceReader where nothing is recorded."""

    def recent(self, *, key: str | None, limit: int) -> list[dict[str, Any]]:
        return []

    def tree(self, trace_id: str, *, key: str | None, steps: Sequence[int] | Literal["all"]) -> dict[str, Any] | None:
        return None


def describe(exchange: Exchange, ask: Ask, prompts: Sequence[Prompt], answer_id: str) -> None:
    """What the trace of an exchange says of the request, by the GenAI semantic conventions where they have a name."""
    sampling = ask.sampling
    exchange.requests = [prompt.request.request_id for prompt in prompts]
    exchange.attributes |= {
        "gen_ai.operation.name": "text_completion" if ask.messages is None else "chat",
        "gen_ai.provider.name": "ai_engine",
        "gen_ai.request.model": ask.model[:200],
        "gen_ai.response.model": prompts[0].request.model,
        "gen_ai.response.id": answer_id,
        "gen_ai.request.choice.count": ask.n,
        "gen_ai.request.max_tokens": prompts[0].request.params.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.stream": ask.stream,
        "ai_engine.warnings": len(ask.warnings),
        "gen_ai.usage.input_tokens": sum(len(prompt.request.prompt) for prompt in prompts),
    }


def describe_end(exchange: Exchange, generation: Generation, usage: Usage) -> None:
    exchange.attributes |= {
        "gen_ai.response.finish_reasons": generation.finishes,
        "ai_engine.stop_matches": generation.num_stopped,
        "ai_engine.max_gap_seconds": round(generation.max_gap_s, 6),
        "ai_engine.failed": generation.has_failed,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
    }


def _whose(exchange: Exchange) -> str | None:
    return None if exchange.key.admin else exchange.key.name


def _number(text: str, name: str, most: int) -> int:
    if not text.isdecimal() or len(text) > 20 or int(text) > most:
        raise InvalidValue(f"{name}: found {text[:40]!r}, expected an integer from 0 to {most}.", param=name)
    return int(text)
