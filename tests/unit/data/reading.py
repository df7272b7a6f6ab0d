"""An answer read through the output path, cut into tokens in any way, as a client has it when the stream is over."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

from ai_engine.data.output import OutputPath
from ai_engine.ports.text import ReplyForm, TextDelta
from ai_engine.testing import ByteTokenizer


class Cut(ByteTokenizer):
    """Token i is the i-th piece of a text."""

    def __init__(self, pieces: list[bytes]) -> None:
        super().__init__()
        self.pieces = pieces

    def piece(self, token: int, *, skip_special: bool = True) -> bytes:
        return self.pieces[token]


class Read(NamedTuple):
    """What a client has when the stream is over."""

    content: str
    calls: tuple[tuple[str, str], ...]
    reasoning: str = ""


def accumulate(deltas: list[TextDelta]) -> Read:
    """As the official client does: indexes in order, id and name once, arguments joined."""
    content, reasoning = "".join(d.text for d in deltas), "".join(d.reasoning for d in deltas)
    calls: list[list[str]] = []
    for call in [call for delta in deltas for call in delta.calls]:
        if call.id is not None:
            assert call.index == len(calls), "indexes are contiguous and in order"
            assert call.name
            assert call.id == f"call_x{call.index:02x}"
            calls.append([call.name, ""])
        else:
            assert call.name is None
            assert call.index == len(calls) - 1, "a call is over when the next one begins"
            assert call.arguments, "no empty delta"
        calls[-1][1] += call.arguments
    return Read(content, tuple((name, arguments) for name, arguments in calls), reasoning)


def read(data: bytes, cuts: Iterable[int] = (), **form: Any) -> Read:
    at = [0, *sorted(cuts), len(data)]
    pieces = [data[a:b] for a, b in itertools.pairwise(at)]
    path = OutputPath(Cut(pieces), form=ReplyForm(**form), call_ids="x")
    return accumulate([*(path.push((token,)) for token in range(len(pieces))), path.finish()])
