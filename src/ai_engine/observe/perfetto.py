"""A trace as a Perfetto file (.pftrace), by the published proto (perfetto.protos.Trace): open it at ui.perfetto.dev.

Owns the tracks: one for the request, one for each of its parts, one for the engine's steps, one for each compute thread
with its ops. On every track slices follow one another; none overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ai_engine.observe.proto import field
from ai_engine.observe.traces import Tree

_BEGIN, _END = 1, 2
_SEQUENCE = 1
_PID = 1


def encode(trace: Tree) -> bytes:
    """All requests of a trace, with the steps whose layers it shows."""
    writer = _Writer()
    done: set[str] = set()
    for number, request in enumerate(trace["requests"]):
        _request(writer, number, request)
        for step in request["steps"]:
            if step["span_id"] not in done:
                done.add(step["span_id"])
                _step(writer, request["started_monotonic"], step)
    return writer.bytes()


def _request(writer: _Writer, number: int, request: Tree) -> None:
    origin, attributes = request["started_monotonic"], request["attributes"]
    name = f"request {number + 1}"
    said = {"trace_id": request["trace_id"], "status": request["status"], **attributes}
    writer.slice(writer.track(name), origin, request["seconds"], request["route"], said)
    for part in request["parts"]:
        track = writer.track(f"{name}: {part['name']}")
        said = {"busy_seconds": part["seconds"], "count": part["count"]}
        writer.slice(track, origin + part["at"], part["until"] - part["at"], part["name"], said)


def _step(writer: _Writer, origin: float, step: Tree) -> None:
    said = {name: step[name] for name in ("step", "share", "all_rows", "sequences", "queued", "plan_seconds")}
    said["requests"] = ", ".join(link["trace_id"] for link in step["links"])
    writer.slice(writer.track("steps"), origin + step["at"], step["seconds"], f"step {step['step']}", said)
    for op in (op for run in step.get("runs", ()) for layer in run for op in layer["ops"]):
        said = {name: op[name] for name in ("slot", "kernel", "shape", "dtype", "bytes", "flops")}
        said["weights"] = ", ".join(op["weights"])
        for thread in op["threads"]:
            track = writer.track(f"compute thread {thread['thread']}", thread["thread"])
            writer.slice(track, origin + thread["at"], thread["seconds"], op["op"], said)


class _Writer:
    """Packets of one sequence. Slices of a track may come in any order; they are sorted at the end."""

    def __init__(self) -> None:
        self._tracks: dict[str, int] = {}
        self._head: list[bytes] = []
        self._slices: dict[int, list[tuple[int, int, str, Mapping[str, Any]]]] = {}

    def track(self, name: str, thread: int | None = None) -> int:
        """The track of that name, made when it is new."""
        if name not in self._tracks:
            uuid = self._tracks[name] = len(self._tracks) + 1
            what = field(2, name)
            if thread is not None:
                what = field(4, field(1, _PID) + field(2, _PID + 1 + thread) + field(5, name))
            self._head.append(field(60, field(1, uuid) + what) + field(10, _SEQUENCE))
        return self._tracks[name]

    def slice(self, track: int, start_s: float, seconds: float, name: str, said: Mapping[str, Any]) -> None:
        start = round(start_s * 1e9)
        self._slices.setdefault(track, []).append((start, round((start_s + seconds) * 1e9), name, said))

    def bytes(self) -> bytes:
        packets = list(self._head)
        for track, slices in self._slices.items():
            reached = 0
            for start, end, name, said in sorted(slices, key=lambda item: item[:2]):
                start = max(start, reached)  # two stamps within a nanosecond
                reached = max(start, end)
                event = field(9, _BEGIN) + field(11, track) + field(23, name) + _annotations(said)
                packets.append(field(8, start) + field(11, event) + field(10, _SEQUENCE))
                packets.append(field(8, reached) + field(11, field(9, _END) + field(11, track)) + field(10, _SEQUENCE))
        return b"".join(field(1, packet) for packet in packets)


def _annotations(said: Mapping[str, Any]) -> bytes:
    return b"".join(field(4, field(10, key) + _value(value)) for key, value in _plain(said))


def _plain(said: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    return ((key, ", ".join(map(str, value)) if isinstance(value, list) else value) for key, value in said.items())


def _value(value: Any) -> bytes:
    match value:
        case bool():
            return field(2, int(value))
        case int():
            return field(4, value)
        case float():
            return field(5, value)
        case _:
            return field(6, str(value))
