"""Server-sent events of one answer: what comes in which order, and how it ends.

Owns the frames and their order: for chat, after the first output of the engine one role chunk per choice in index
order; then reasoning, text and calls; one finish chunk per choice; a usage chunk only if asked for; [DONE] always,
after an error event too. A piece without any is not sent. A comment ``: ping`` goes out after silence, never before the
first event.
Nothing is written before the first output, so that what fails earlier still gets its own HTTP status.

The parts of a frame that do not change are encoded once per answer: a token costs one string escape and one join.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ai_engine.api.generation import Generation, Piece, join_calls
from ai_engine.api.http import ClientDisconnected, Exchange
from ai_engine.api.replies import (
    Answer,
    chat_logprobs,
    completion_logprobs,
    cut_by_default,
    encode,
    error_reply,
    finish_reason,
    prompt_extras,
    usage_reply,
)
from ai_engine.ports.errors import AiEngineError
from ai_engine.ports.serving import Usage
from ai_engine.ports.text import TextService, ToolDelta

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
logger = logging.getLogger(__name__)


class Frames:
    """Bytes of each kind of event of one answer."""

    def __init__(self, answer: Answer, generation: Generation, text: TextService) -> None:
        ask = answer.ask
        self._answer = answer
        self._generation = generation
        self._text = text
        self._chat = ask.messages is not None
        self._has_logprobs = ask.sampling.logprobs is not None
        head: dict[str, Any] = {
            "id": answer.id,
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": answer.created,
            "model": ask.model,
        }
        if answer.model.fingerprint:
            head["system_fingerprint"] = answer.model.fingerprint
        self._head = b"data: " + encode(head)[:-1] + b',"choices":['
        self._before_text = b',"delta":{"content":' if self._chat else b',"text":'
        self._after_text = b"}" if self._chat else b""
        self._plain_usage = b',"usage":null' if ask.include_usage else b""
        self._continuous = ask.include_usage and ask.continuous_usage
        self._begun: set[int] = set()  # text choices whose prompt has been told

    def roles(self) -> bytes:
        """The first chunk of every choice, in index order; warnings ride on the very first."""
        if not self._chat:
            return b""
        delta = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        frames = []
        ask = self._answer.ask
        extras = {
            **self._answer.extras(ask.warnings),
            **prompt_extras(ask, self._generation.prompts[0], self._text),
        }
        for index in range(self._generation.num_choices):
            frames.append(self._frame(b'{"index":%d' % index + delta, extras if index == 0 else {}))
        return b"".join(frames)

    def piece(self, piece: Piece, extras: dict[str, Any]) -> bytes:
        """A text chunk if there is text, and the finish chunk if the choice ended."""
        frames = b""
        if piece.reasoning:
            thought = {"reasoning_content": piece.reasoning, "reasoning": piece.reasoning}
            frames, extras = self._delta(piece.index, thought, extras), {}
        if piece.text or piece.entries or piece.echoed or piece.tokens:
            body = b'{"index":%d%s%s%s,"logprobs":%s,"finish_reason":null%s}' % (
                piece.index,
                self._before_text,
                encode(piece.text),
                self._after_text,
                self._logprobs(piece),
                self._tokens(piece),
            )
            frames += self._frame(body, extras)
            extras = {}
        if piece.calls:
            frames += self._delta(piece.index, {"tool_calls": list(map(_call_delta, join_calls(piece.calls)))}, extras)
            extras = {}
        if piece.finish is not None:
            frames += self._finish(piece, extras)
        return frames

    def _delta(self, index: int, delta: dict[str, Any], extras: dict[str, Any]) -> bytes:
        body = b'{"index":%d,"delta":%s,"logprobs":null,"finish_reason":null}' % (index, encode(delta))
        return self._frame(body, extras)

    def _tokens(self, piece: Piece) -> bytes:
        """The token ids, if they were asked for; with a text choice's first ones its prompt's."""
        ask = self._answer.ask
        if not ask.show_tokens:
            return b""
        told: dict[str, Any] = {"token_ids": piece.tokens}
        if not self._chat and piece.index not in self._begun:
            self._begun.add(piece.index)
            told |= prompt_extras(ask, self._generation.prompts[piece.index // ask.n], self._text)
        return b"," + encode(told)[1:-1]

    def _finish(self, piece: Piece, extras: dict[str, Any]) -> bytes:
        late = cut_by_default(self._answer.ask, piece.finish)
        if late:
            extras = {**extras, "warnings": extras.get("warnings", []) + late}
        body = b'{"index":%d%s,"logprobs":null,"finish_reason":%s' % (
            piece.index,
            b',"delta":{}' if self._chat else b',"text":""',
            encode(finish_reason(self._answer.ask, piece.finish)),
        )
        if piece.stop_reason is not None:
            body += b',"stop_reason":' + encode(piece.stop_reason)
        return self._frame(body + b"}", extras)

    def usage(self, usage: Usage) -> bytes:
        return self._head + b'],"usage":' + encode(usage_reply(usage)) + b"}\n\n"

    def _logprobs(self, piece: Piece) -> bytes:
        if not self._has_logprobs:
            return b"null"
        if self._chat:
            return encode(chat_logprobs(piece.entries, self._text))
        prompt = self._generation.prompts[piece.index // self._answer.ask.n]
        return encode(completion_logprobs(piece, prompt, self._text))

    def _frame(self, choice: bytes, extras: dict[str, Any]) -> bytes:
        usage = self._plain_usage
        if self._continuous:
            usage = b',"usage":' + encode(usage_reply(self._generation.usage()))
        extra = b"," + encode(extras)[1:-1] if extras else b""
        return self._head + choice + b"]" + usage + extra + b"}\n\n"


def _call_delta(call: ToolDelta) -> dict[str, Any]:
    """The id, type and name come with a call's first delta and no other."""
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


async def stream_answer(exchange: Exchange, answer: Answer, generation: Generation, text: TextService) -> None:
    """Write the whole stream. Raises only before its first byte, or ClientDisconnected."""
    frames = Frames(answer, generation, text)
    pieces = await generation.next()
    await exchange.start_stream()
    try:
        await _write_pieces(exchange, frames, answer, generation, pieces)
        last = frames.usage(await generation.settle()) if answer.ask.include_usage else b""
    except AiEngineError as error:
        last = _failure(error)
    except ClientDisconnected:  # nobody reads what could be said
        raise
    except Exception:  # the status is out: the stream itself must say that it broke
        logger.exception("stream %s failed, trace %s", answer.id, exchange.trace_id)
        last = _failure(AiEngineError("internal error while streaming; see the server's log"))
    await exchange.write(last + DONE)
    await exchange.end()


def _failure(error: AiEngineError) -> bytes:
    return b"data: " + encode(error_reply(error)) + b"\n\n"


async def _write_pieces(
    exchange: Exchange, frames: Frames, answer: Answer, generation: Generation, pieces: Sequence[Piece] | None
) -> None:
    data = frames.roles()
    extras = {} if data else answer.extras(answer.ask.warnings)
    while pieces is not None:
        if not pieces:
            data = PING
        for piece in pieces:
            frame = frames.piece(piece, extras)
            if frame:
                data, extras = data + frame, {}
        if data:
            await exchange.write(data)
        data = b""
        pieces = await generation.next(exchange.config.ping_s)
