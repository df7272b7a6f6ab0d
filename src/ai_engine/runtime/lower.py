"""A compiled graph becomes a list of Calls: values share placed buffers, and barriers stand only where data demands.

Owns liveness, buffer placement and barriers. Does not know what a call does, only what it reads and writes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from ai_engine.ports.kernels import Attr, Buffer, BufferType, Call
from ai_engine.runtime.ir import Graph, Op, tied_operand

ALIGN_BYTES: Final = 256
_CAN_SHARE: Final = ("matmul",)  # calls that may write disjoint columns of one buffer side by side


@dataclass(frozen=True)
class Lowered:
    calls: list[Call]
    activation_bytes: int  # of the arena all buffers lie in
    unshared_bytes: int  # what they would take without sharing


@dataclass
class _Storage:
    """One buffer-to-be: all values tied to each other."""

    name: str
    first: int
    last: int
    nbytes: int
    offset: int = -1


@dataclass(frozen=True)
class _Access:
    """What calls since the last barrier touched: byte ranges, with the columns where a call writes only some."""

    start: int
    end: int
    write: bool
    cols: tuple[int, int] | None = None  # with start == the buffer's start

    def conflicts(self, other: _Access) -> bool:
        if not (self.write or other.write) or self.end <= other.start or other.end <= self.start:
            return False
        if self.cols and other.cols and (self.start, self.end) == (other.start, other.end):
            return self.cols[0] < other.cols[1] and other.cols[0] < self.cols[1]
        return True


@dataclass
class _Placement:
    of_value: dict[int, _Storage] = field(default_factory=dict)
    storages: list[_Storage] = field(default_factory=list)


def _storages(graph: Graph, nbytes: Callable[[BufferType], int]) -> _Placement:
    """Storage and life of every value; a tied result continues its operand's storage."""
    made = _Placement()
    for at, op in enumerate(graph.ops):
        for value in op.operands:
            made.of_value[value.id].last = at
        if op.result is None:
            continue
        tied = tied_operand(op)
        if tied is not None:
            storage = made.of_value[tied.id]
            storage.last = at
        else:
            storage = _Storage(f"b{len(made.storages)}", at, at, nbytes(op.result.type))
            made.storages.append(storage)
        made.of_value[op.result.id] = storage
    return made


def _place(storages: list[_Storage], share: bool) -> int:
    """First fit, largest first: each at the lowest offset free during its life. Returns the arena's bytes."""
    placed: list[_Storage] = []
    total = 0
    for storage in sorted(storages, key=lambda s: (-s.nbytes, s.first)):
        offset = 0
        for other in sorted(placed, key=lambda s: s.offset):
            overlaps = not share or (other.first <= storage.last and storage.first <= other.last)
            if overlaps and offset < other.offset + other.nbytes and other.offset < offset + storage.nbytes:
                offset = other.offset + other.nbytes
        storage.offset = offset
        placed.append(storage)
        total = max(total, offset + storage.nbytes)
    return total


def lower(
    graph: Graph,
    buffer_bytes: Callable[[BufferType, int], int],
    max_tokens: int,
    max_logit_rows: int,
    *,
    share: bool = True,
) -> Lowered:
    """Calls of a graph at stage "quantised". ``share`` False gives every value its own memory."""

    def nbytes(type: BufferType) -> int:
        rows = max_tokens if type.rows == "tokens" else max_logit_rows
        return -(-buffer_bytes(type, rows) // ALIGN_BYTES) * ALIGN_BYTES

    made = _storages(graph, nbytes)
    total = _place(made.storages, share)
    calls: list[Call] = []
    since_barrier: list[_Access] = []
    for op in graph.ops:
        if op.name == "empty":
            continue
        call, accesses = _call(op, graph, made)
        if any(access.conflicts(old) for access in accesses for old in since_barrier):
            calls[-1] = _with_barrier(calls[-1])
            since_barrier = []
        since_barrier += accesses
        calls.append(call)
    if calls:
        calls[-1] = _with_barrier(calls[-1])
    return Lowered(calls, total, sum(storage.nbytes for storage in made.storages))


def _with_barrier(call: Call) -> Call:
    return Call(
        op=call.op, inputs=call.inputs, outputs=call.outputs, weights=call.weights, attrs=call.attrs, layer=call.layer,
        barrier=True,
    )  # fmt: skip


def _call(op: Op, graph: Graph, made: _Placement) -> tuple[Call, list[_Access]]:
    """The call without a barrier, and the memory it touches."""
    tied = tied_operand(op)

    def buffer(value_id: int, type: BufferType) -> Buffer:
        storage = made.of_value[value_id]
        return Buffer(storage.name, type, storage.offset)

    inputs = tuple(buffer(value.id, value.type) for value in op.operands if not (op.name == "matmul" and value is tied))
    outputs = () if op.result is None else (buffer(op.result.id, op.result.type),)
    attrs: dict[str, Attr] = dict(op.attrs)
    if op.name in ("rope_store", "attention"):
        attrs["layer"] = op.layer
    accesses = []
    for value in op.operands:
        storage = made.of_value[value.id]
        if not (op.name in _CAN_SHARE and value is tied):
            accesses.append(_Access(storage.offset, storage.offset + storage.nbytes, False))
    if op.result is not None:
        storage = made.of_value[op.result.id]
        cols = None
        if op.name in _CAN_SHARE and tied is not None:
            start = int(op.attrs.get("out_col", 0))
            cols = (start, start + graph.weights[op.weights[0]].rows)
        accesses.append(_Access(storage.offset, storage.offset + storage.nbytes, True, cols))
    call = Call(
        op=op.name, inputs=inputs, outputs=outputs, weights=op.weights, attrs=attrs, layer=op.layer, barrier=False
    )
    return call, accesses


def calls_table(lowered: Lowered) -> str:
    """The program as a table: one line per call, ``|`` where all threads meet."""
    lines = [f"{'#':>4} {'op':<13}{'layer':>5}  {'in':<16}{'out':<10} {'|':<2} weights and attributes"]
    for number, call in enumerate(lowered.calls):
        ins, outs = (
            ",".join(f"{b.name}{'q' if b.type.kind == 'act' else ''}" for b in side)
            for side in (call.inputs, call.outputs)
        )
        attrs = " ".join(f"{key}={value}" for key, value in call.attrs.items() if key != "layer")
        layer = "" if call.layer < 0 else str(call.layer)
        lines.append(
            f"{number:>4} {call.op:<13}{layer:>5}  {ins:<16}{outs:<10} {'|' if call.barrier else ' ':<2} "
            f"{' '.join(call.weights)} {attrs}".rstrip()
        )
    return "\n".join(lines) + "\n"
