"""Protocol buffers, the writing half: enough for two published schemas, and no generated code.

A message is the join of its fields; `field` chooses the wire type by the value's type. Owns the wire format only
(https://protobuf.dev/programming-guides/encoding/); field numbers stand where a message is made.
"""

from __future__ import annotations

import struct


class Fixed64(int):
    """An integer that the schema calls fixed64."""


class Fixed32(int):
    """An integer that the schema calls fixed32."""


Value = int | float | str | bytes | Fixed64 | Fixed32


def varint(value: int) -> bytes:
    """A negative number takes ten bytes, as int32 and int64 want it."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(number: int, value: Value) -> bytes:
    """One field. A message is passed as the bytes that it is; a float becomes a double, a bool an int."""
    if isinstance(value, Fixed64):
        return varint(number << 3 | 1) + struct.pack("<Q", value)
    if isinstance(value, Fixed32):
        return varint(number << 3 | 5) + struct.pack("<I", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 1) + struct.pack("<d", value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data
