"""The JSON that goes back: answers, log probabilities, usage, models, errors. No decisions, no I/O.

Log probabilities are the model's own (before temperature, penalties and masks), floored at -9999.0 since JSON has no
infinity. Tokens of a matched stop string, of the reasoning and of calls, and the end-of-sequence token are not listed;
the concatenated bytes are the text's. In completions, offsets count characters from the prompt's start whether it is
echoed or not, and of two tokens with the same text in one ``top_logprobs`` the likelier stays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from ai_engine.api.generation import Piece, Prompt, join_calls
from ai_engine.api.openai_types import DEFAULT_COMPLETION_TOKENS, Ask, ServedModel
from ai_engine.ports.errors import AiEngineError, Overloaded
from ai_engine.ports.sampling import SamplingParams
from ai_engine.ports.serving import TokenLogprob, Usage
from ai_engine.ports.text import ANY_CALL, TextService, TokenEntry, ToolChoice

LOWEST_LOGPROB = -9999.0
encode = msgspec.json.Encoder().encode


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB) if math.isfinite(logprob) else LOWEST_LOGPROB


def _show(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def chat_logprobs(entries: Sequence[TokenEntry], text: TextService) -> dict[str, Any]:
    """``choices[].logprobs`` of a chat completion or chunk."""

    def one(data: bytes, logprob: float) -> dict[str, Any]:
        return {"token": _show(data), "logprob": finite(logprob), "bytes": list(data)}

    content = []
    for entry in entries:
        found = entry.logprob or TokenLogprob(entry.token, LOWEST_LOGPROB)
        item = one(entry.data, found.logprob)
        item["top_logprobs"] = [one(text.token_bytes(token), logprob) for token, logprob in found.top]
        content.append(item)
    return {"content": content, "refusal": None}


def completion_logprobs(piece: Piece, prompt: Prompt, text: TextService) -> dict[str, Any]:
    """``choices[].logprobs`` of a text completion or chunk; the prompt's tokens first when it is echoed."""
    base = len(prompt.text)
    reply: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for start, entries in ((0, piece.echoed), (base, piece.entries)):
        for entry in entries:
            token = _show(entry.data)
            found = _narrowed(entry.logprob, prompt.request.params.logprobs or 0)
            reply["tokens"].append(token)
            reply["text_offset"].append(start + entry.text_offset)
            reply["token_logprobs"].append(None if found is None else finite(found.logprob))
            reply["top_logprobs"].append(None if found is None else _top(token, found, text))
    return reply


def _narrowed(found: TokenLogprob | None, num_top: int) -> TokenLogprob | None:
    """As many of the best as ``logprobs`` asked for; ``prompt_logprobs`` may have asked for more."""
    if found is None or len(found.top) <= num_top:
        return found
    return TokenLogprob(found.token, found.logprob, found.top[:num_top])


def prompt_logprobs_reply(prompt: Prompt, text: TextService) -> list[dict[str, Any] | None]:
    """One entry a prompt token, none for the first: the token itself and the likeliest, by id. ``rank`` counts from 1;
    of a token that is not among the likeliest it is not known."""
    reply: list[dict[str, Any] | None] = [None]
    for found in prompt.logprobs:
        ranked: list[tuple[int, float, int | None]] = [
            (token, logprob, rank) for rank, (token, logprob) in enumerate(found.top, 1)
        ]
        if all(token != found.token for token, _ in found.top):
            ranked.insert(0, (found.token, found.logprob, None))
        reply.append(
            {
                str(token): {
                    "logprob": finite(logprob),
                    "rank": rank,
                    "decoded_token": _show(text.token_bytes(token)),
                }
                for token, logprob, rank in ranked
            }
        )
    return reply


def _top(token: str, found: TokenLogprob, text: TextService) -> dict[str, float]:
    top: dict[str, float] = {}
    for other, logprob in found.top:
        top.setdefault(_show(text.token_bytes(other)), finite(logprob))
    top.setdefault(token, finite(found.logprob))
    return top


def usage_reply(usage: Usage) -> dict[str, Any]:
    thought = usage.reasoning_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        **({} if thought is None else {"completion_tokens_details": {"reasoning_tokens": thought}}),
    }


def message_reply(piece: Piece) -> dict[str, Any]:
    """``content`` is null when there are only calls; the reasoning has both names that clients read."""
    message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
    if piece.reasoning:
        message["reasoning_content"] = message["reasoning"] = piece.reasoning
    if piece.calls:
        message["content"] = piece.text or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in join_calls(piece.calls)
        ]
    return message


def finish_reason(ask: Ask, finish: str | None) -> str | None:
    """OpenAI's word: a call that was demanded by name is no decision of the model's, so it says "stop"."""
    choice: ToolChoice = ask.template.get("tool_choice", ANY_CALL)
    return "stop" if finish == "tool_calls" and choice.only else finish


class Answer(msgspec.Struct, frozen=True):
    """What every chunk or body of one answer repeats. ``effective`` are the values in force for its first prompt."""

    id: str
    created: int
    ask: Ask
    model: ServedModel
    effective: SamplingParams

    def extras(self, warnings: Sequence[str]) -> dict[str, Any]:
        """Our own fields beside OpenAI's: only there when there is something to say."""
        extra: dict[str, Any] = {}
        if warnings:
            extra["warnings"] = list(warnings)
        if self.ask.show_sampling:
            extra["sampling_params"] = self.effective
        return extra


def cut_by_default(ask: Ask, finish: str | None) -> list[str]:
    """The warning about a text completion that our default of 16 tokens ended."""
    if finish != "length" or ask.max_tokens is not None or ask.messages is not None:
        return []
    return [f"max_tokens: not given, so the default of {DEFAULT_COMPLETION_TOKENS} cut the text. Fix: set max_tokens."]


def whole_answer(
    answer: Answer, pieces: Sequence[Piece], prompts: Sequence[Prompt], usage: Usage, text: TextService
) -> bytes:
    """The body of a non-streamed answer. ``pieces`` holds one merged piece per choice."""
    ask = answer.ask
    choices = [_whole_choice(ask, piece, prompts[piece.index // ask.n], text) for piece in pieces]
    warnings = list(ask.warnings)
    for piece in pieces:
        warnings += [warning for warning in cut_by_default(ask, piece.finish) if warning not in warnings]
    return encode(
        {
            "id": answer.id,
            "object": "chat.completion" if ask.messages is not None else "text_completion",
            "created": answer.created,
            "model": ask.model,
            "choices": choices,
            "usage": usage_reply(usage),
            "system_fingerprint": answer.model.fingerprint or None,
            **(prompt_extras(ask, prompts[0], text) if ask.messages is not None else {}),
            **answer.extras(warnings),
        }
    )


def prompt_extras(ask: Ask, prompt: Prompt, text: TextService) -> dict[str, Any]:
    """What was asked to be told of a prompt: beside a chat's choices, in each choice of a text completion."""
    extra: dict[str, Any] = {}
    if ask.show_prompt_logprobs:
        extra["prompt_logprobs"] = prompt_logprobs_reply(prompt, text)
    if ask.show_tokens:
        extra["prompt_token_ids"] = prompt.request.prompt
    return extra


def _whole_choice(ask: Ask, piece: Piece, prompt: Prompt, text: TextService) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": piece.index}
    has_logprobs = ask.sampling.logprobs is not None
    if ask.messages is not None:
        choice["message"] = message_reply(piece)
        choice["logprobs"] = chat_logprobs(piece.entries, text) if has_logprobs else None
    else:
        choice["text"] = piece.text
        choice["logprobs"] = completion_logprobs(piece, prompt, text) if has_logprobs else None
        choice |= prompt_extras(ask, prompt, text)
    choice["finish_reason"] = finish_reason(ask, piece.finish)
    if ask.show_tokens:
        choice["token_ids"] = piece.tokens
    if piece.stop_reason is not None:
        choice["stop_reason"] = piece.stop_reason
    return choice


def model_reply(model: ServedModel, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": model.owned_by,
        "max_model_len": model.max_context,
        "root": model.id,
        "parent": None if name == model.id else model.id,
    }


def error_reply(error: AiEngineError) -> dict[str, Any]:
    """OpenAI's shape, on every path and every status; ``code`` is a string. Beside it ``details``, where there are any:
    of a limit its numbers, of an overload the estimated wait."""
    body = {"message": error.message, "type": error.error_type, "param": error.param, "code": error.code}
    details = dict(error.details)
    if isinstance(error, Overloaded) and error.retry_after_s is not None:
        details["estimated_wait_s"] = round(error.retry_after_s, 3)
    return {"error": body | {"details": details} if details else body}
