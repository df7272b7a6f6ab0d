"""Bytes to a JSON value (RFC 8259), where whatever is wrong is an InvalidJson that says where.

Owns syntax: encoding, numbers, depth, duplicate keys. What the value may be is fields.py's. Choices: a duplicate key
is an error (readers disagree on which one wins, so no choice would be safe); NaN and Infinity are not JSON; a number
must fit a double, or 64 bits unless it is exact below; a byte-order mark and half a surrogate pair are errors.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from ai_engine.ports.errors import InvalidJson

MAX_DEPTH = 64
_KEY_END = re.compile(rb'"[ \t\r\n]*:')
_BYTE = re.compile(r" \(byte (\d+)\)")


def decode_json(body: bytes, *, max_depth: int = MAX_DEPTH) -> Any:
    """The value of ``body``. Raises InvalidJson; never anything else, whatever the bytes."""
    if not body:
        raise InvalidJson("The request body is empty; expected a JSON object.")
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep(max_depth) from None
    except msgspec.MsgspecError as error:
        raise InvalidJson(_explain(body, str(error))) from None
    num_keys = _count_keys(value, max_depth)
    # Ends of keys, counted in the text, are never fewer than the keys written there; more may be text in a string.
    if num_keys != len(_KEY_END.findall(body)):
        _reject_duplicates(body)
    return value


def _too_deep(max_depth: int) -> InvalidJson:
    return InvalidJson(f"The JSON is nested more than {max_depth} levels deep. Fix: flatten the value.")


def _count_keys(value: Any, max_depth: int) -> int:
    """Keys of all objects of a decoded value."""
    num_keys = 0
    level: list[Any] = [value]
    for _ in range(max_depth + 1):
        deeper: list[Any] = []
        for item in level:
            if type(item) is dict:
                num_keys += len(item)
                deeper += [child for child in item.values() if type(child) is dict or type(child) is list]
            elif type(item) is list:
                deeper += [child for child in item if type(child) is dict or type(child) is list]
        if not deeper:
            return num_keys
        level = deeper
    raise _too_deep(max_depth)


def _reject_duplicates(body: bytes) -> None:
    def unique(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise InvalidJson(f"The JSON object has the key {key[:80]!r} twice. Fix: send each key once.")
            seen.add(key)

    json.loads(body, object_pairs_hook=unique, parse_int=len, parse_float=len)


def _explain(body: bytes, problem: str) -> str:
    """The parser's words with a position; it gives none for bad UTF-8 and for an early end."""
    found = _BYTE.search(problem)
    at = int(found[1]) if found else len(body)
    problem = _BYTE.sub("", problem)
    if "UTF-8" in problem:
        try:
            body.decode()
        except UnicodeDecodeError as error:
            at = error.start
        return f"The body is not valid UTF-8: byte 0x{body[at]:02x} {_place(body, at)}. Fix: send the JSON as UTF-8."
    if "truncated" in problem:
        if _ends_well(body):
            return "A \\u escape in a string is half a surrogate pair. Fix: send whole characters."
        return f"The JSON ends too early, {_place(body, at)}. Fix: close every string, array and object."
    if "out of range" in problem:
        where = problem.partition(" - at ")[2]
        return f"A number{' at ' + where if where else ''} is too large to represent. Fix: send a smaller number."
    return f"{problem[:1].upper()}{problem[1:]}, {_place(body, at)}. Fix: send one JSON value as RFC 8259 writes it."


def _ends_well(body: bytes) -> bool:
    try:
        json.loads(body, parse_int=len, parse_float=len)
    except (ValueError, RecursionError):
        return False
    return True


def _place(body: bytes, at: int) -> str:
    line_start = body.rfind(b"\n", 0, at) + 1
    return f"at byte {at} (line {body.count(10, 0, at) + 1}, column {at - line_start + 1})"
