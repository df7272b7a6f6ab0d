"""An answer as typed events: what the Messages and the Responses door have in common.

Owns the frames, keep-alives, failures before and after the first byte, and that an answer in one piece is made from the
very events that a stream sends. Does not own which events there are (message_events.py, response_events.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

from ai_engine.api.generation import Generation, Piece
from ai_engine.api.http import ClientDisconnected, Exchange
from ai_engine.api.replies import Answer, encode
from ai_engine.ports.errors import AiEngineError
from ai_engine.ports.serving import Usage

Event = dict[str, Any]
"""``type`` names it; the frame's ``event:`` repeats that name."""
logger = logging.getLogger(__name__)


class Voice(Protocol):
    """One door's way to tell an answer of one choice: ``start``, ``take`` for each piece, ``end`` or ``fail``."""

    def start(self) -> list[Event]: ...

    def take(self, piece: Piece) -> list[Event]: ...

    def end(self, usage: Usage) -> list[Event]: ...

    def fail(self, error: AiEngineError) -> list[Event]:
        """The failure of a stream that has begun."""
        ...

    def silence(self) -> bytes:
        """A keep-alive."""
        ...

    def whole(self, events: Sequence[Event]) -> Any:
        """The body of an answer in one piece, from all its events."""
        ...


def frames(events: Sequence[Event]) -> bytes:
    return b"".join(b"event: " + event["type"].encode() + b"\ndata: " + encode(event) + b"\n\n" for event in events)


async def write_events(exchange: Exchange, answer: Answer, generation: Generation, voice: Voice) -> None:
    """The whole answer, as events or in one piece. Raises only before the first byte."""
    if answer.ask.stream:
        await _stream(exchange, answer, generation, voice)
        return
    events = voice.start()
    while (pieces := await generation.next()) is not None:
        for piece in pieces:
            events += voice.take(piece)
    events += voice.end(await generation.settle())
    await exchange.reply(200, encode(voice.whole(events)))


async def _stream(exchange: Exchange, answer: Answer, generation: Generation, voice: Voice) -> None:
    pieces = await generation.next()
    await exchange.start_stream()
    events = voice.start()
    try:
        while pieces is not None:
            for piece in pieces:
                events += voice.take(piece)
            data = frames(events) if pieces else voice.silence()
            if data:
                await exchange.write(data)
            events = []
            pieces = await generation.next(exchange.config.ping_s)
        events += voice.end(await generation.settle())
    except AiEngineError as error:
        events += voice.fail(error)
    except ClientDisconnected:  # nobody reads what could be said
        raise
    except Exception:  # the status is out: the stream itself must say that it broke
        logger.exception("stream %s failed, trace %s", answer.id, exchange.trace_id)
        events += voice.fail(AiEngineError("internal error while streaming; see the server's log"))
    await exchange.write(frames(events))
    await exchange.end()
