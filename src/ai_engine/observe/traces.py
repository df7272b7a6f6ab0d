"""Traces of requests: one tree from the HTTP exchange to the single op, assembled when somebody asks.

    request -> receive, contract, template, tokenise, queue, prefill, decode, detokenise, send
               prefill, decode -> steps (each names all its requests) -> layers -> ops

Owns what is kept of requests (bounded in bytes), whose trace is whose, and the tree's shape. Does not own steps
(steps.py) nor formats (otlp.py, perfetto.py). A step belongs to all requests in it: a request's ``share`` of it goes by
rows and is no measurement. Every span's id follows from what it is, so that all exports of a trace agree.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal

import msgspec

from ai_engine.observe.sampled import UNKNOWN, Roofline
from ai_engine.observe.steps import Engine, Op, StepKey, StepStore, kernel_seconds
from ai_engine.ports.kernels import Call
from ai_engine.ports.telemetry import ClockPair, Event, RequestTraced, SequenceOpened, StepDone, StepWork, TokenTimes
from ai_engine.ports.trace import Part, ProgramInfo

GATEWAY_PARTS: Final = ("submit", "first_token")
"""What the gateway sees while the worker queues and computes; the worker's own stamps say more."""
PART_ORDER: Final = (
    "receive", "contract", "encode_wait", "template", "tokenise", "handover", "queue", "prefill", "decode",
    "detokenise", "send",
)  # fmt: skip
_REQUEST_BYTES: Final = 4096  # what a request's record takes, about, its gaps aside
Tree = dict[str, Any]


class _Request:
    """One request in serving, as the worker told of it."""

    __slots__ = ("nbytes", "opened", "times", "trace_id")

    def __init__(self, trace_id: str) -> None:
        self.trace_id = trace_id
        self.opened: list[tuple[int, SequenceOpened]] = []  # (life, event)
        self.times: list[TokenTimes] = []
        self.nbytes = _REQUEST_BYTES // 2


class Traces:
    """Implements ports.telemetry.Telemetry (events in) and ports.trace.TraceReader (trees out). ``limits`` of what is
    kept come from the store: a quarter of its bytes is for requests."""

    def __init__(self, store: StepStore, *, seed: bytes | None = None, roofline: Roofline | None = None) -> None:
        self.store = store
        self.roofline = roofline
        self._seed = os.urandom(8) if seed is None else seed  # of step spans, which belong to no request's trace
        self._traced: OrderedDict[str, list[RequestTraced]] = OrderedDict()  # by trace id, oldest first
        self._requests: OrderedDict[str, _Request] = OrderedDict()  # by request id
        self._sequences: dict[tuple[int, int], SequenceOpened] = {}  # by (life, seq id)
        self._firsts: dict[str, str] = {}  # of a body with several prompts, request id -> the first one's
        self.nbytes = 0
        self.dropped = 0  # requests given up to stay within the bytes
        self._lock = threading.Lock()  # of who emits; readers copy

    # --- events in

    def emit(self, event: Event) -> None:
        with self._lock:
            self._take(event)

    def _take(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self.store.add_step(event)
        elif isinstance(event, ClockPair):
            self.store.add_pair(event)
        elif isinstance(event, SequenceOpened):
            self.store.wake()
            self._sequences[self.store.life, event.seq_id] = event
            self._request(event.request_id, event.trace_id).opened.append((self.store.life, event))
        elif isinstance(event, TokenTimes):
            self._request(event.request_id, event.trace_id).times.append(event)
            self._grow(self._requests[event.request_id], 400 + 32 * len(event.gaps_s))
        elif isinstance(event, RequestTraced) and event.requests:
            self._traced.setdefault(event.context.trace_id, []).append(event)
            self._firsts |= dict.fromkeys(event.requests[1:], event.requests[0])
            self.nbytes += _REQUEST_BYTES
            self._trim()

    def _request(self, request_id: str, trace_id: str) -> _Request:
        found = self._requests.get(request_id)
        if found is None:
            found = self._requests[request_id] = _Request(trace_id)
            self.nbytes += found.nbytes
            self._trim()
        return found

    def _grow(self, request: _Request, nbytes: int) -> None:
        request.nbytes += nbytes
        self.nbytes += nbytes
        self._trim()

    def _trim(self) -> None:
        limit = self.store.max_bytes // 4
        while self.nbytes > limit and len(self._requests) > 1:
            _, request = self._requests.popitem(last=False)
            for life, opened in request.opened:
                self._sequences.pop((life, opened.seq_id), None)
            self.nbytes -= request.nbytes
            self.dropped += 1
        while self.nbytes > limit and len(self._traced) > 1:
            _, gone = self._traced.popitem(last=False)
            self.nbytes -= _REQUEST_BYTES * len(gone)
            for traced in gone:
                for name in traced.requests[1:]:
                    self._firsts.pop(name, None)

    # --- trees out

    def recent(self, *, key: str | None, limit: int) -> list[Tree]:
        found: list[Tree] = []
        for trace_id in reversed(list(self._traced)):
            for traced in reversed(self._traced.get(trace_id, [])):
                if key in (None, traced.key) and len(found) < limit:
                    found.append(self._summary(traced))
        return found

    def tree(self, trace_id: str, *, key: str | None, steps: Sequence[int] | Literal["all"]) -> Tree | None:
        traced = [item for item in self._traced.get(trace_id, []) if key in (None, item.key)]
        if not traced:
            return None
        return {
            "trace_id": trace_id,
            "collector": self.store.status(),
            "roofline": UNKNOWN if self.roofline is None else msgspec.to_builtins(self.roofline),
            "requests": [self.request_tree(item, steps) for item in traced],
        }

    def _summary(self, traced: RequestTraced) -> Tree:
        return {
            "trace_id": traced.context.trace_id,
            "span_id": traced.context.span_id,
            "route": traced.route,
            "status": traced.status,
            "key": traced.key,
            "started_unix": traced.wall_s,
            "seconds": traced.ended_s - traced.started_s,
            "attributes": traced.attributes,
            "parts": {part["name"]: part["seconds"] for part in self._parts(traced, [])},
        }

    def request_tree(self, traced: RequestTraced, wanted: Sequence[int] | Literal["all"]) -> Tree:
        """One request of a trace; ``wanted`` steps show their layers and ops."""
        origin, e2e = traced.started_s, traced.ended_s - traced.started_s
        runs = self._runs(traced)
        parts = self._parts(traced, runs)
        total = sum(part["seconds"] for part in parts)
        steps, ops = self._steps(traced, runs, wanted)
        return {
            **self._summary(traced),
            "parent_id": traced.context.parent_id,
            "trace_state": traced.context.state,
            "method": traced.method,
            "started_monotonic": origin,
            "parts": parts,
            "parts_seconds": total,
            "unaccounted_seconds": e2e - total,
            "choices": [_choice(times, origin) for times in runs],
            "steps": steps,
            "ops": ops,
        }

    def _runs(self, traced: RequestTraced) -> list[TokenTimes]:
        return [times for name in traced.requests if name in self._requests for times in self._requests[name].times]

    def _parts(self, traced: RequestTraced, runs: Sequence[TokenTimes]) -> list[Tree]:
        runs = runs or self._runs(traced)
        parts = {part.name: part for part in traced.parts}
        waits = [parts.pop(name) for name in GATEWAY_PARTS if name in parts]
        for part in _worker_parts(waits, runs):
            parts[part.name] = _joined(part, parts.get(part.name))
        if "decode" not in parts and any(times.completion_tokens > 1 for times in runs):
            begun = parts["prefill"].ended_s if "prefill" in parts else traced.started_s
            parts["decode"] = Part("decode", begun, begun, 0.0, 0)  # it took steps, and nobody waited: all came at once
        origin, context = traced.started_s, traced.context
        order = {name: index for index, name in enumerate(PART_ORDER)}
        return [
            {
                "name": part.name,
                "span_id": span_id(context.trace_id, traced.requests[0], part.name),
                "at": part.started_s - origin,
                "until": part.ended_s - origin,
                "seconds": part.seconds,
                "count": part.count,
            }
            for part in sorted(parts.values(), key=lambda part: (order.get(part.name, 99), part.started_s))
        ]

    def _steps(
        self, traced: RequestTraced, runs: Sequence[TokenTimes], wanted: Sequence[int] | Literal["all"]
    ) -> tuple[list[Tree], list[Tree]]:
        """The request's steps, and its ops summed over them."""
        mine = {
            (life, opened.seq_id)
            for name in traced.requests
            if name in self._requests
            for life, opened in self._requests[name].opened
        }
        if not mine:
            return [], []
        trees, sums = [], _OpSums()
        for key, step in self.store.steps():
            own = [work for work in step.work if (key[0], work.seq_id) in mine]
            if not own:
                continue
            engine = self.store.engine(key[0])
            walks = self.store.ops(key) if engine is not None else []
            share = _share(own, step)
            for walk in walks:
                sums.add(walk, share, engine)
            shown = walks if wanted == "all" or key[1] in wanted else None
            trees.append(self.step_tree(key, step, walks, traced.started_s, own=own, shown=shown))
        return trees, sums.rows()

    def step_tree(
        self,
        key: StepKey,
        step: StepDone,
        walks: list[list[Op]],
        origin: float,
        *,
        own: Sequence[StepWork],
        shown: list[list[Op]] | None,
    ) -> Tree:
        """A step as a span that links its requests. Its layers and ops are there where they are ``shown``."""
        identity = self.step_id(key)
        engine = self.store.engine(key[0])
        kernels = sum(kernel_seconds(walk) for walk in walks)
        seconds = step.ended_s - step.started_s
        tree: Tree = {
            "step": step.step,
            "life": key[0],
            "span_id": identity,
            "trace_id": self.step_trace_id(key),
            "part": "prefill" if any(work.prefill for work in own) else "decode",
            "at": step.started_s - origin,
            "seconds": seconds,
            "plan_seconds": step.plan_s,
            "kernel_seconds": kernels if walks else None,
            "host_seconds": seconds - kernels if walks else None,
            "share": _share(own, step),
            "rows": {name: sum(getattr(work, name) for work in own) for name in ("prefill", "decode", "draft")},
            "context": max((work.context for work in own), default=0),
            "all_rows": sum(work.rows for work in step.work),
            "sequences": step.num_seqs,
            "prefill_rows": step.prefill_tokens,
            "queued": step.queued_requests,
            "preempted": step.preempted,
            "links": self._links(key, step),
        }
        if shown is not None and engine is not None and engine.program is not None:
            tree["runs"] = [
                self._layers(identity, number, walk, engine.program, origin) for number, walk in enumerate(shown)
            ]
        return tree

    def _layers(self, step_span: str, run: int, walk: Sequence[Op], program: ProgramInfo, origin: float) -> list[Tree]:
        """Consecutive ops of one layer; -1 is what stands before and after the layers."""
        layers: list[Tree] = []
        for op in walk:
            call = program.calls[op.slot]
            if not layers or layers[-1]["layer"] != call.layer:
                name = span_id(step_span, str(run), f"layer {call.layer} from {op.slot}")
                layers.append({"layer": call.layer, "span_id": name, "ops": []})
            op_span = span_id(step_span, str(run), str(op.slot))
            layers[-1]["ops"].append({"span_id": op_span, **_op(op, program, origin, self.roofline)})
        for layer in layers:
            first = min(op["at"] for op in layer["ops"])
            layer["at"], layer["seconds"] = first, max(op["at"] + op["seconds"] for op in layer["ops"]) - first
        return layers

    def _links(self, key: StepKey, step: StepDone) -> list[Tree]:
        """The requests that the step ran for: their prefill or decode span, and their rows."""
        links = []
        for work in step.work:
            opened = self._sequences.get((key[0], work.seq_id))
            if opened is not None:
                part = "prefill" if work.prefill else "decode"
                links.append({
                    "trace_id": opened.trace_id,
                    "span_id": span_id(opened.trace_id, self._firsts.get(opened.request_id, opened.request_id), part),
                    "request_id": opened.request_id,
                    "rows": work.rows,
                })  # fmt: skip
        return links

    def step_id(self, key: StepKey) -> str:
        return span_id(self._seed.hex(), *map(str, key))

    def step_trace_id(self, key: StepKey) -> str:
        """Steps belong to no request: each is a trace of its own, which links to the requests'."""
        return span_id(self._seed.hex(), "trace", *map(str, key)) + self.step_id(key)


def span_id(*names: str) -> str:
    """16 hex digits that follow from the names."""
    return hashlib.blake2b("\0".join(names).encode(), digest_size=8).hexdigest()


def _worker_parts(waits: Sequence[Part], runs: Sequence[TokenTimes]) -> list[Part]:
    """What the gateway waited for, from the submit to its first wake-up, by the worker's stamps: queue, prefill, decode
    where the whole answer was there by then, and the handover before and after. Of several choices the one whose token
    came first is what was waited for."""
    if not waits:
        return []
    begun, ended = waits[0].started_s, waits[-1].ended_s
    first = min(runs, key=lambda times: _first_token_s(times) or float("inf"), default=None)
    if first is None:
        return list(waits)
    arrived = _within(first.ended_s - first.e2e_s, begun, ended)
    scheduled = _within(first.ended_s - first.e2e_s + first.queue_s, arrived, ended)
    token = _within(_first_token_s(first) or first.ended_s, scheduled, ended)
    last = max(token, first.ended_s) if first.ended_s <= ended else token
    found = [
        Part("handover", begun, ended, (arrived - begun) + (ended - last), 2),
        Part("queue", arrived, scheduled, scheduled - arrived),
        Part("prefill", scheduled, token, token - scheduled),
    ]
    if last > token:
        busy = (ended - begun) - sum(part.seconds for part in waits)  # with tokens that made no text yet
        found.append(Part("decode", token, last, max(0.0, last - token - busy)))
    return found


def _joined(part: Part, other: Part | None) -> Part:
    """Two stretches of one part."""
    if other is None:
        return part
    begun, ended = min(part.started_s, other.started_s), max(part.ended_s, other.ended_s)
    return Part(part.name, begun, ended, part.seconds + other.seconds, part.count + other.count)


def _within(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def _first_token_s(times: TokenTimes) -> float | None:
    return None if times.ttft_s is None else times.ended_s - times.e2e_s + times.ttft_s


def _choice(times: TokenTimes, origin: float) -> Tree:
    return {
        "request_id": times.request_id,
        "index": times.index,
        "finish": times.finish,
        "at": times.ended_s - times.e2e_s - origin,
        "e2e_seconds": times.e2e_s,
        "queue_seconds": times.queue_s,
        "ttft_seconds": times.ttft_s,
        "prompt_tokens": times.prompt_tokens,
        "cached_tokens": times.cached_tokens,
        "completion_tokens": times.completion_tokens,
        "max_gap_seconds": max(times.gaps_s, default=None),
    }


def _share(own: Iterable[StepWork], step: StepDone) -> float:
    rows = sum(work.rows for work in step.work)
    return sum(work.rows for work in own) / rows if rows else 0.0


def op_shape(call: Call, program: ProgramInfo) -> str:
    """As "R x 576 -> 49152": rows are the step's tokens (T) or its kept logits rows (R)."""
    types = [buffer.type for buffer in (*call.inputs, *call.outputs)]
    rows = "R" if types[-1].rows == "logits" else "T"
    widths = [str(call.inputs[0].type.cols)] if call.inputs else []
    if call.outputs:
        widths.append(str(program.weights[call.weights[0]].rows if call.op == "matmul" else call.outputs[0].type.cols))
    return f"{rows} x {' -> '.join(widths)}"


def op_dtype(call: Call, program: ProgramInfo) -> str:
    """The stored type that the op reads: of its weight, of the KV cache, or of its input."""
    if call.weights:
        return program.weights[call.weights[0]].dtype.value
    return program.kv_shape.dtype if call.op == "attention" else call.inputs[0].type.kind


def _op(op: Op, program: ProgramInfo, origin: float, roofline: Roofline | None) -> Tree:
    call = program.calls[op.slot]
    memory, arithmetic = roofline.shares(call, program, op.cost, op.seconds) if roofline else (None, None)
    return {
        "op": call.op,
        "slot": op.slot,
        "kernel": program.kernels[op.slot],
        "weights": list(call.weights),
        "shape": op_shape(call, program),
        "dtype": op_dtype(call, program),
        "device": program.device,
        "at": op.started_s - origin,
        "seconds": op.seconds,
        "bytes": op.cost.nbytes,
        "flops": op.cost.flops,
        "gb_per_s": op.cost.nbytes / op.seconds / 1e9 if op.seconds else None,
        "gflop_per_s": op.cost.flops / op.seconds / 1e9 if op.seconds else None,
        "memory_share": memory,
        "arithmetic_share": arithmetic,
        "threads": [{"thread": t, "at": start - origin, "seconds": end - start} for t, start, end in op.threads],
    }


class _OpSums:
    """Ops of one kind and shape, added up over layers and steps."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str, str], list[float]] = {}

    def add(self, walk: Sequence[Op], share: float, engine: Engine | None) -> None:
        assert engine is not None
        assert engine.program is not None
        for op in walk:
            call = engine.program.calls[op.slot]
            name = call.op, op_shape(call, engine.program), op_dtype(call, engine.program)
            row = self._rows.setdefault(name, [0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
            for index, value in enumerate((1, op.seconds, op.seconds * share, op.cost.nbytes, op.cost.flops)):
                row[index] += value
            row[5] = max(row[5], op.seconds)

    def rows(self) -> list[Tree]:
        """Longest first."""
        found = []
        for (op, shape, dtype), (count, seconds, shared, nbytes, flops, longest) in self._rows.items():
            found.append({
                "op": op, "shape": shape, "dtype": dtype, "count": int(count), "seconds": seconds,
                "share_seconds": shared, "max_seconds": longest, "bytes": int(nbytes), "flops": int(flops),
                "gb_per_s": nbytes / seconds / 1e9 if seconds else None,
                "gflop_per_s": flops / seconds / 1e9 if seconds else None,
            })  # fmt: skip
        return sorted(found, key=lambda row: -row["seconds"])
