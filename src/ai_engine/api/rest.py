"""What each route does: the hop from an HTTP exchange to the serving port and back.

Owns the order of work in a request. Does not own fields (openai_types.py), shapes (replies.py) or events (stream.py).
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from ai_engine.api.console import NoPages
from ai_engine.api.constraints import with_form
from ai_engine.api.generation import Generation, Piece, Prompt
from ai_engine.api.http import Exchange
from ai_engine.api.keys import Key
from ai_engine.api.openai_types import (
    SEED_SPAN,
    Ask,
    ServedModel,
    chat_fields,
    completion_fields,
    read_chat,
    read_completion,
    room_for,
)
from ai_engine.api.replies import Answer, encode, model_reply, whole_answer
from ai_engine.api.stream import stream_answer
from ai_engine.api.traces import NoTraces, describe, describe_end, log_tokens
from ai_engine.contracts.fields import Record
from ai_engine.ports.clock import Clock
from ai_engine.ports.errors import NotReady, ShuttingDown, UnsupportedParameter
from ai_engine.ports.serving import GenerateRequest, Health, Serving
from ai_engine.ports.telemetry import Event
from ai_engine.ports.text import ANY_CALL, Encoded, ReplyForm, TextService, ToolChoice
from ai_engine.ports.trace import PagesReader, TraceReader

METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


@dataclass
class Door:
    """What the routes need: ports, the model, and ``draining``, which the gateway sets before it drains serving."""

    serving: Serving
    text: TextService
    model: ServedModel
    clock: Clock
    metrics: Callable[[], bytes]
    entropy: Callable[[int], bytes]
    traces: TraceReader = field(default_factory=NoTraces)
    pages: PagesReader = field(default_factory=NoPages)
    emit: Callable[[Event], None] = lambda event: None
    draining: bool = False
    chat: Record = field(init=False)
    completion: Record = field(init=False)

    def __post_init__(self) -> None:
        self.chat = chat_fields(self.model.vocab_size)
        self.completion = completion_fields(self.model.vocab_size)


async def chat_completions(door: Door, exchange: Exchange) -> None:
    """POST /v1/chat/completions"""
    refuse_while_draining(door)
    body = await exchange.json()
    ask = read_chat(body, door.chat, door.model, strict=is_strict(exchange))
    await exchange.unless_disconnected(answer(door, exchange, ask, "chatcmpl-", write_answer))


async def completions(door: Door, exchange: Exchange) -> None:
    """POST /v1/completions"""
    refuse_while_draining(door)
    body = await exchange.json()
    ask = read_completion(body, door.completion, door.model, strict=is_strict(exchange))
    await exchange.unless_disconnected(answer(door, exchange, ask, "cmpl-", write_answer))


def is_strict(exchange: Exchange) -> bool:
    return exchange.config.strict or exchange.key.strict


def refuse_while_draining(door: Door) -> None:
    if door.draining:
        raise ShuttingDown("The server is shutting down and takes no new work. Fix: retry, another replica may answer.")


Writer = Callable[[Exchange, Answer, Generation, TextService], Awaitable[None]]
"""Writes the answer of a generation that has started, in the shapes of one door."""


async def answer(door: Door, exchange: Exchange, ask: Ask, prefix: str, write: Writer) -> None:
    """Encode, submit, have the answer written; cancel what nobody waits for."""
    answer_id = f"{prefix}{door.entropy(12).hex()}"
    created = int(door.clock.wall_s())
    ask = with_seed(as_allowed(ask, exchange, door.model), door.entropy)
    prompts = await _prompts(door, exchange, ask, answer_id)
    ask = _warned(ask, exchange, prompts[0].form)
    generation = Generation(ask, prompts, door.serving, door.text, exchange.parts)
    describe(exchange, ask, prompts, answer_id)
    if exchange.logs_tokens:
        generation.on_chunk = functools.partial(log_tokens, door.emit, exchange)
    started = False
    try:
        _reserve(exchange, prompts)
        await generation.start()
        started = True
        await write(
            exchange, Answer(answer_id, created, ask, door.model, prompts[0].request.params), generation, door.text
        )
    finally:
        try:
            await generation.close()
        finally:  # a client that hangs up now, with all it asked for, has still to be accounted for
            usage = generation.usage()
            describe_end(exchange, generation, usage)
            if exchange.quota is not None:
                exchange.quota.settle(usage.prompt_tokens + usage.completion_tokens if started else 0)


def as_allowed(ask: Ask, exchange: Exchange, model: ServedModel) -> Ask:
    """What the key makes of a request. Raises ModelNotFound for a model that it may not use, as for one that is not
    there: which models there are is not everybody's to know."""
    key = exchange.key
    if not key.may_use(ask.model, model.id):
        raise model.not_found(ask.model, [name for name in model.names if key.may_use(name, model.id)])
    if ask.priority >= 0 or key.admin:
        return ask
    reason = f"priority: found {ask.priority}; requests of this key may give way (0 or more) but not go first."
    if is_strict(exchange):
        raise UnsupportedParameter(f"{reason} Fix: leave it out.", param="priority")
    return msgspec.structs.replace(ask, priority=0, warnings=[*ask.warnings, f"{reason} 0 is used."])


def _reserve(exchange: Exchange, prompts: Sequence[Prompt]) -> None:
    """Take what the prompts may use out of the key's tokens per minute. Raises RateLimitExceeded."""
    if exchange.quota is not None:
        requests = [prompt.request for prompt in prompts]
        exchange.quota.reserve(
            sum(len(request.prompt) for request in requests), [request.params.max_tokens for request in requests
            for _ in range(request.n)]
        )  # fmt: skip


async def write_answer(exchange: Exchange, answer: Answer, generation: Generation, text: TextService) -> None:
    """In OpenAI's shapes: one piece, or events."""
    if answer.ask.stream:
        await stream_answer(exchange, answer, generation, text)
        return
    pieces = await collect(generation)
    usage = await generation.settle()
    await exchange.reply(200, whole_answer(answer, pieces, generation.prompts, usage, text))


def _warned(ask: Ask, exchange: Exchange, form: ReplyForm) -> Ask:
    """What was asked of the model and it cannot do: a warning, or an error for a strict caller."""
    if form.warnings and is_strict(exchange):
        param = form.warnings[0].partition(":")[0]
        raise UnsupportedParameter(f"{form.warnings[0]} Fix: leave it out.", param=param)
    return msgspec.structs.replace(ask, warnings=[*ask.warnings, *form.warnings]) if form.warnings else ask


def with_seed(ask: Ask, entropy: Callable[[int], bytes]) -> Ask:
    """The request with a seed: its own, or one that is drawn."""
    if ask.sampling.seed is not None:
        return ask
    seed = int.from_bytes(entropy(8), "little") % SEED_SPAN
    return msgspec.structs.replace(ask, sampling=msgspec.structs.replace(ask.sampling, seed=seed))


def must_call(ask: Ask) -> bool:
    """Whether the answer is a call, which then has a grammar of its own."""
    choice: ToolChoice = ask.template.get("tool_choice", ANY_CALL)
    return choice.mode == "required"


async def _prompts(door: Door, exchange: Exchange, ask: Ask, answer_id: str) -> list[Prompt]:
    """Every prompt as tokens, with room for what it asks."""
    needs_text = ask.prompts is not None and (ask.echo or ask.sampling.logprobs is not None)
    prompts: list[Prompt] = []
    sources: Sequence[str | list[int]] = [""] if ask.prompts is None else ask.prompts
    for index, source in enumerate(sources):
        exchange.parts.enter("encode_wait")
        encoded = await encode_source(door.text, ask, source)
        exchange.parts.encoded(encoded.stamps)
        ids = encoded.ids
        room = room_for(ask, len(ids), door.model)
        request = GenerateRequest(
            request_id=answer_id if not prompts else f"{answer_id}-{index}",
            trace_id=exchange.trace_id,
            prompt=ids,
            params=msgspec.structs.replace(ask.sampling, max_tokens=max(1, room)),
            n=ask.n,
            model=door.model.id,
            tenant=exchange.key.name,
            weight=exchange.key.weight,
            cache_scope=_cache_scope(exchange.key, ask),
            priority=exchange.key.priority + ask.priority,
            timeout_s=exchange.timeout_s,
            constraint=with_form(ask.constraint, encoded.form, must_call=must_call(ask)),
        )
        text = "" if not needs_text else source if isinstance(source, str) else door.text.decode(ids)
        prompts.append(Prompt(request, text, form=encoded.form))
    return prompts


async def encode_source(text: TextService, ask: Ask, source: str | list[int] = "") -> Encoded:
    """One prompt of a request: its conversation, or one of its texts or lists of ids."""
    if ask.messages is not None:
        return await text.encode_chat(ask.messages, **ask.template)
    if not isinstance(source, str):
        return Encoded(source)
    if ask.suffix:
        return await text.encode_infill(source, ask.suffix)
    return await text.encode_prompt(source, add_special=ask.add_special_tokens)


def _cache_scope(key: Key, ask: Ask) -> str:
    """The key's own; a salt makes it narrower and never another key's."""
    salt = f"\0{hashlib.sha256(ask.cache_salt.encode()).hexdigest()}" if ask.cache_salt else ""
    return key.cache_scope + salt


async def collect(generation: Generation) -> list[Piece]:
    """One merged piece per choice."""
    texts: list[list[str]] = [[] for _ in range(generation.num_choices)]
    thoughts: list[list[str]] = [[] for _ in range(generation.num_choices)]
    merged = [Piece(index, entries=[], tokens=[], logprobs=[], calls=[]) for index in range(generation.num_choices)]
    while (pieces := await generation.next()) is not None:
        for piece in pieces:
            whole = merged[piece.index]
            texts[piece.index].append(piece.text)
            whole.entries += piece.entries
            whole.echoed = whole.echoed or piece.echoed
            whole.tokens += piece.tokens
            whole.logprobs += piece.logprobs
            whole.num_tokens = piece.num_tokens
            whole.calls += piece.calls
            thoughts[piece.index].append(piece.reasoning)
            whole.finish, whole.stop_reason = piece.finish, piece.stop_reason
    for whole in merged:
        whole.text, whole.reasoning = "".join(texts[whole.index]), "".join(thoughts[whole.index])
    return merged


async def models(door: Door, exchange: Exchange) -> None:
    """GET /v1/models"""
    names = [name for name in door.model.names if exchange.key.may_use(name, door.model.id)]
    data = [model_reply(door.model, name) for name in names]
    await exchange.reply(200, encode({"object": "list", "data": data}))


async def model_by_id(door: Door, exchange: Exchange) -> None:
    """GET /v1/models/{id}; ids may contain slashes"""
    name = exchange.params["id"]
    door.model.check_name(name)
    if not exchange.key.may_use(name, door.model.id):
        raise door.model.not_found(name, [])
    await exchange.reply(200, encode(model_reply(door.model, name)))


async def livez(door: Door, exchange: Exchange) -> None:
    """GET /livez: the process and its engine loop are alive"""
    health = await _health(door, exchange)
    if not health.live:
        raise NotReady(f"not live: {health.reason or 'the engine does not answer'}")
    await exchange.reply(200, encode({"status": "live"}))


async def readyz(door: Door, exchange: Exchange) -> None:
    """GET /readyz and /health: work would be accepted now"""
    if door.draining:
        raise ShuttingDown("not ready: draining")
    health = await _health(door, exchange)
    if not health.ready:
        raise NotReady(f"not ready: {health.reason or 'starting'}")
    load = {
        "queued_requests": health.queued_requests,
        "queued_tokens": health.queued_tokens,
        "running_requests": health.running_requests,
    }
    await exchange.reply(200, encode({"status": "ready", **load}))


async def _health(door: Door, exchange: Exchange) -> Health:
    try:
        async with asyncio.timeout(exchange.config.health_timeout_s):
            return await door.serving.health()
    except TimeoutError:
        return Health(live=False, ready=False, reason="the engine does not answer")


async def metrics(door: Door, exchange: Exchange) -> None:
    """GET /metrics: Prometheus exposition text"""
    text = await asyncio.to_thread(door.metrics)  # a few milliseconds, not on the event loop
    await exchange.reply(200, text, content_type=METRICS_TYPE)
