"""Text without generation: tokenize, detokenize, and what a conversation looks like to the model.

Owns these routes' fields and answers, each in both shapes that clients know: ``prompt`` or ``messages`` as vLLM's, and
``content`` as llama.cpp's. They need no place in the queue and work while the server drains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

from ai_engine.api import rest
from ai_engine.api.http import Exchange
from ai_engine.api.openai_types import Ask, ServedModel, chat_ask, chat_fields
from ai_engine.api.replies import encode
from ai_engine.api.shapes import COUNT, TEXT, TEXT_OR_NULL, arr, obj
from ai_engine.contracts.fields import Check, Checking, Flag, Integer, ListOf, Record, Schema, Text
from ai_engine.ports.errors import InvalidValue
from ai_engine.ports.text import TextService

_CHAT: Final = ("model", "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
"""Fields that mean here what they mean in a chat."""
_SOURCES: Final = ("prompt", "messages", "content")


@cache
def tokenize_fields(vocab_size: int) -> Record:
    """The fields of POST /tokenize: one of prompt, messages and content."""
    chat = chat_fields(vocab_size).fields
    fields: dict[str, Check] = {
        **{name: chat[name] for name in _CHAT},
        "prompt": Text(),
        "content": Text(),
        "add_special_tokens": Flag(),
        "add_special": Flag(),
        "parse_special": Flag(),
        "return_token_strs": Flag(),
        "with_pieces": Flag(),
    }
    return Record(fields)


@cache
def detokenize_fields(vocab_size: int) -> Record:
    """The fields of POST /detokenize."""
    tokens = ListOf(Integer(0, vocab_size - 1))
    return Record({"model": Text(1, 512), "tokens": tokens}, frozenset({"tokens"}))


@cache
def template_fields(vocab_size: int) -> Record:
    """The fields of POST /apply-template."""
    chat = chat_fields(vocab_size).fields
    return Record({name: chat[name] for name in _CHAT}, frozenset({"messages"}))


def _ask(got: Mapping[str, Any], model: ServedModel, at: Checking) -> Ask:
    return chat_ask({name: got[name] for name in _CHAT if name in got}, model, at)


async def _read(door: rest.Door, exchange: Exchange, fields: Record) -> tuple[dict[str, Any], Checking]:
    at = Checking(strict=rest.is_strict(exchange))
    got = fields.check(await exchange.json(), at)
    name = got.get("model", door.model.id)
    door.model.check_name(name)
    if not exchange.key.may_use(name, door.model.id):
        raise door.model.not_found(name, [])
    return got, at


def _warned(reply: dict[str, Any], at: Checking) -> bytes:
    return encode(reply | ({"warnings": at.warnings} if at.warnings else {}))


async def tokenize(door: rest.Door, exchange: Exchange) -> None:
    """POST /tokenize"""
    got, at = await _read(door, exchange, tokenize_fields(door.model.vocab_size))
    sources = [name for name in _SOURCES if name in got]
    if len(sources) != 1:
        raise InvalidValue(
            f"found {' and '.join(sources) or 'none'} of prompt, messages and content, expected one of them.",
            param=sources[1] if sources else "prompt",
        )
    ids = await exchange.unless_disconnected(_ids(door, got, at))
    if "content" in got:
        pieces = [{"id": token, "piece": _piece(door.text.token_bytes(token))} for token in ids]
        await exchange.reply(200, _warned({"tokens": pieces if got.get("with_pieces") else ids}, at))
        return
    reply: dict[str, Any] = {"count": len(ids), "max_model_len": door.model.max_context, "tokens": ids}
    if got.get("return_token_strs") or got.get("with_pieces"):
        reply["token_strs"] = [_shown(door.text, [token]) for token in ids]
    await exchange.reply(200, _warned(reply, at))


async def _ids(door: rest.Door, got: Mapping[str, Any], at: Checking) -> list[int]:
    if "messages" in got:
        return (await rest.encode_source(door.text, _ask(got, door.model, at))).ids
    text, special = ("prompt", True) if "prompt" in got else ("content", False)
    special = got.get("add_special_tokens", got.get("add_special", special))
    parse = got.get("parse_special", True)
    return (await door.text.encode_prompt(got[text], add_special=special, parse_special=parse)).ids


def _piece(data: bytes) -> str | list[int]:
    """A token's text, or its bytes if they are not whole characters."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def _shown(text: TextService, tokens: Sequence[int]) -> str:
    """The tokens' text, control tokens by their names."""
    return b"".join(map(text.token_bytes, tokens)).decode("utf-8", "replace")


async def detokenize(door: rest.Door, exchange: Exchange) -> None:
    """POST /detokenize: ``prompt`` and ``content`` are the same text, for clients of either shape"""
    got, at = await _read(door, exchange, detokenize_fields(door.model.vocab_size))
    text = _shown(door.text, got["tokens"])
    await exchange.reply(200, _warned({"prompt": text, "content": text}, at))


async def apply_template(door: rest.Door, exchange: Exchange) -> None:
    """POST /apply-template: the text whose tokens the model would get"""
    got, at = await _read(door, exchange, template_fields(door.model.vocab_size))
    encoded = await exchange.unless_disconnected(rest.encode_source(door.text, _ask(got, door.model, at)))
    await exchange.reply(200, _warned({"prompt": _shown(door.text, encoded.ids)}, at))


async def tokenizer_info(door: rest.Door, exchange: Exchange) -> None:
    """GET /tokenizer_info: what a client needs to use /tokenize as its tokeniser"""
    text = door.text
    ends = [_shown(text, [token]) for token in sorted(text.eos_ids)]
    info = {
        "bos_token": None if text.bos_id is None else _shown(text, [text.bos_id]),
        "eos_token": ends[0] if ends else None,
        "eos_tokens": ends,
        "vocab_size": door.model.vocab_size,
        "model_max_length": door.model.max_context,
        "chat_template": text.template_source,
    }
    await exchange.reply(200, encode(info))


_WARNED: Final[Mapping[str, Schema]] = {"warnings": arr(TEXT)}
_PIECES: Final = arr(obj({"id": COUNT, "piece": {"anyOf": [TEXT, arr(COUNT)]}}))
TEXT_SHAPES: Final[dict[str, Schema]] = {
    "Tokens": {
        "anyOf": [
            obj({"count": COUNT, "max_model_len": COUNT, "tokens": arr(COUNT)}, {"token_strs": arr(TEXT), **_WARNED}),
            obj({"tokens": {"anyOf": [arr(COUNT), _PIECES]}}, _WARNED),
        ]
    },
    "Tokenizer": obj(
        {
            "bos_token": TEXT_OR_NULL,
            "eos_token": TEXT_OR_NULL,
            "eos_tokens": arr(TEXT),
            "vocab_size": COUNT,
            "model_max_length": COUNT,
            "chat_template": TEXT,
        }
    ),
    "Detokenized": obj({"prompt": TEXT, "content": TEXT}, _WARNED),
    "Template": obj({"prompt": TEXT}, _WARNED),
}
