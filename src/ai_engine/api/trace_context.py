"""W3C trace context (https://www.w3.org/TR/trace-context/): which trace a request belongs to, and what we answer.

Owns the two headers' grammar. A traceparent that breaks it starts a new trace and is told to the caller of `read`, who
counts it; a broken tracestate is dropped and the trace goes on.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable

from ai_engine.ports.trace import TraceContext

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MEMBER = re.compile(r"([a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})=([ -~]{0,256})")
_MAX_MEMBERS = 32


def read_context(
    headers: Iterable[tuple[bytes, bytes]], new_trace_id: Callable[[], str], *salt: str
) -> tuple[TraceContext, bool]:
    """(context of the request, whether its traceparent was malformed). The span id follows from the trace and ``salt``,
    which must differ from request to request."""
    found = list(headers)
    parents = [value.decode("latin-1").strip() for name, value in found if name == b"traceparent"]
    parent = _parse_parent(parents[0]) if len(parents) == 1 else None
    trace_id = parent[0] if parent else new_trace_id()
    span_id = hashlib.blake2b("\0".join((trace_id, *salt)).encode(), digest_size=8).hexdigest()
    if parent is None:
        return TraceContext(trace_id, span_id), bool(parents)
    states = [value.decode("latin-1") for name, value in found if name == b"tracestate"]
    return TraceContext(trace_id, span_id, parent[1], parent[2], _parse_state(",".join(states))), False


def _parse_parent(text: str) -> tuple[str, str, bool] | None:
    """(trace id, parent id, sampled), or None. A version after 00 may say more than we know of."""
    found = _PARENT.fullmatch(text)
    if found is None:
        return None
    version, trace_id, parent_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more is not None) or not trace_id.strip("0") or not parent_id.strip("0"):
        return None
    return trace_id, parent_id, bool(int(flags, 16) & 1)


def _parse_state(text: str) -> str:
    """The list without empty members; "" when it breaks the rules."""
    members = [member.strip(" \t") for member in text.split(",")]
    members = [member for member in members if member]
    keys = []
    for member in members:
        found = _MEMBER.fullmatch(member)
        if found is None or "=" in found[2] or found[2].endswith(" "):
            return ""
        keys.append(found[1])
    return ",".join(members) if len(set(keys)) == len(keys) <= _MAX_MEMBERS else ""


def response_header(context: TraceContext) -> bytes:
    """The value of ``traceresponse``: our span in the caller's trace."""
    return f"00-{context.trace_id}-{context.span_id}-{context.sampled:02x}".encode()
