"""Traces as OpenTelemetry spans: the message (opentelemetry-proto 1.x, `ExportTraceServiceRequest`), and its way out.

Owns which spans there are and the live exporter: a bounded queue, one thread, batches over HTTP; a collector that is
slow, full or gone costs spans, which are counted, and nothing else. A step belongs to no request: it is the root of a
trace of its own, linked both ways with the prefill and decode spans of all its requests.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from ai_engine.observe.proto import Fixed32, Fixed64, field
from ai_engine.observe.traces import Traces, Tree
from ai_engine.ports.telemetry import Event, RequestTraced

logger = logging.getLogger(__name__)
SERVER, INTERNAL = 2, 1
_ERROR = 2
_BATCH, _BATCH_S, _QUEUE, _TIMEOUT_S = 64, 1.0, 1024, 5.0
_RETRIED: Final = frozenset({429, 502, 503, 504})
_STEPS_REMEMBERED: Final = 65536


class Span(msgspec.Struct, frozen=True):
    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start_ns: int  # Unix time
    end_ns: int
    attributes: Mapping[str, Any]
    kind: int = INTERNAL
    links: tuple[tuple[str, str], ...] = ()  # (trace id, span id)
    state: str = ""
    sampled: bool = True
    failed: bool = False


def spans_of(request: Tree) -> Iterator[Span]:
    """The spans of one request of a trace: itself, its parts, its steps and the layers and ops that the tree shows."""
    attributes = request["attributes"]
    name = f"{attributes.get('gen_ai.operation.name', request['route'])} {attributes.get('gen_ai.request.model', '')}"
    yield Span(
        request["trace_id"], request["span_id"], request["parent_id"], name.strip(),
        *_times(request, 0.0, request["seconds"]),
        {
            **attributes, "http.request.method": request["method"], "http.route": request["route"],
            "http.response.status_code": request["status"], "ai_engine.key": request["key"],
        },
        kind=SERVER, state=request["trace_state"], failed=request["status"] >= 500,
    )  # fmt: skip
    for part in request["parts"]:
        links = tuple((s["trace_id"], s["span_id"]) for s in request["steps"] if s["part"] == part["name"])
        yield Span(
            request["trace_id"], part["span_id"], request["span_id"], part["name"],
            *_times(request, part["at"], part["until"] - part["at"]),
            {"ai_engine.busy_seconds": part["seconds"], "ai_engine.entries": part["count"]}, links=links,
        )  # fmt: skip
    for step in request["steps"]:
        yield from step_spans(request, step)


def step_spans(request: Tree, step: Tree) -> Iterator[Span]:
    """A step, and what of it is shown. ``request`` gives the origin of its times."""
    said = (
        "step", "seconds", "plan_seconds", "kernel_seconds", "host_seconds", "all_rows", "sequences", "prefill_rows",
        "queued", "preempted",
    )  # fmt: skip
    yield Span(
        step["trace_id"], step["span_id"], "", f"step {step['step']}", *_times(request, step["at"], step["seconds"]),
        {f"ai_engine.{name}": step[name] for name in said if step[name] is not None},
        links=tuple((link["trace_id"], link["span_id"]) for link in step["links"]),
    )  # fmt: skip
    for layer in (layer for run in step.get("runs", ()) for layer in run):
        where = "around the layers" if layer["layer"] < 0 else f"layer {layer['layer']}"
        yield Span(
            step["trace_id"], layer["span_id"], step["span_id"], where,
            *_times(request, layer["at"], layer["seconds"]), {"ai_engine.layer": layer["layer"]},
        )  # fmt: skip
        for op in layer["ops"]:
            said = ("op", "slot", "kernel", "shape", "dtype", "device", "bytes", "flops", "gb_per_s", "gflop_per_s")
            yield Span(
                step["trace_id"], op["span_id"], layer["span_id"], op["op"], *_times(request, op["at"], op["seconds"]),
                {f"ai_engine.{name}": op[name] for name in said if op[name] is not None},
            )  # fmt: skip


def _times(request: Tree, at: float, seconds: float) -> tuple[int, int]:
    start = int((request["started_unix"] + at) * 1e9)
    return start, start + int(seconds * 1e9)


def encode(spans: Iterable[Span], resource: Mapping[str, Any]) -> bytes:
    """An ExportTraceServiceRequest."""
    scope = field(1, "ai_engine")
    body = b"".join(field(2, _span(span)) for span in spans)
    return field(1, field(1, _attributes(1, resource)) + field(2, field(1, scope) + body))


def _span(span: Span) -> bytes:
    out = [
        field(1, bytes.fromhex(span.trace_id)), field(2, bytes.fromhex(span.span_id)), field(5, span.name),
        field(6, span.kind), field(7, Fixed64(span.start_ns)), field(8, Fixed64(span.end_ns)),
        _attributes(9, span.attributes), field(16, Fixed32(span.sampled)),
    ]  # fmt: skip
    if span.parent_id:
        out.append(field(4, bytes.fromhex(span.parent_id)))
    if span.state:
        out.append(field(3, span.state))
    if span.failed:
        out.append(field(15, field(3, _ERROR)))
    for trace_id, span_id in span.links:
        out.append(field(13, field(1, bytes.fromhex(trace_id)) + field(2, bytes.fromhex(span_id))))
    return b"".join(out)


def _attributes(number: int, values: Mapping[str, Any]) -> bytes:
    return b"".join(field(number, field(1, key) + field(2, _any(value))) for key, value in values.items())


def _any(value: Any) -> bytes:
    match value:
        case bool():
            return field(2, int(value))
        case int():
            return field(3, value)
        case float():
            return field(4, value)
        case list():
            return field(5, b"".join(field(1, _any(item)) for item in value))
        case _:
            return field(1, str(value))


class Exporter:
    """Implements ports.telemetry.Telemetry: sends each request's spans and those of its steps (without layers and ops)
    to a collector. ``endpoint`` is the collector's base URL; the path /v1/traces is added unless it has one."""

    def __init__(self, endpoint: str, traces: Traces, resource: Mapping[str, Any], *, timeout_s: float = _TIMEOUT_S):
        base = endpoint.rstrip("/")
        self.url = base if base.endswith("/v1/traces") else f"{base}/v1/traces"
        self._traces, self._resource, self._timeout_s = traces, resource, timeout_s
        self._queue: queue.Queue[RequestTraced | None] = queue.Queue(_QUEUE)
        self._steps_sent: dict[str, None] = {}  # span ids, oldest first: a step is in many requests and sent once
        self.sent = self.dropped = self.failures = 0
        self._thread = threading.Thread(target=self._run, name="otlp-export", daemon=True)
        self._thread.start()

    def emit(self, event: Event) -> None:
        if isinstance(event, RequestTraced) and event.requests and event.context.sampled:
            try:
                self._queue.put_nowait(event)
            except queue.Full:
                self.dropped += 1 + len(event.parts)

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what waits, for so long at most."""
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _run(self) -> None:
        running = True
        while running:
            batch = [self._queue.get()]
            deadline = time.monotonic() + _BATCH_S
            while len(batch) < _BATCH and batch[-1] is not None and (left := deadline - time.monotonic()) > 0:
                try:
                    batch.append(self._queue.get(timeout=left))
                except queue.Empty:
                    break
            running = batch[-1] is not None
            try:
                self._send([span for traced in batch if traced is not None for span in self._spans(traced)])
            except Exception:  # a bug of ours: spans are lost, the server goes on
                self.failures += 1
                logger.exception("the trace export failed")

    def _spans(self, traced: RequestTraced) -> Iterator[Span]:
        tree = self._traces.request_tree(traced, ())
        for span in spans_of(tree):
            if span.trace_id != traced.context.trace_id:
                if span.span_id in self._steps_sent:
                    continue
                self._steps_sent[span.span_id] = None
                if len(self._steps_sent) > _STEPS_REMEMBERED:
                    del self._steps_sent[next(iter(self._steps_sent))]
            yield span

    def _send(self, spans: list[Span]) -> None:
        if not spans:
            return
        if post(self.url, encode(spans, self._resource), self._timeout_s):
            self.sent += len(spans)
        else:
            self.dropped += len(spans)
            self.failures += 1


def post(url: str, body: bytes, timeout_s: float, sleep: Callable[[float], None] = time.sleep) -> bool:
    """Whether the collector took it; it is asked twice when it says that it is busy."""
    for last in (False, True):
        request = urllib.request.Request(url, body, {"content-type": "application/x-protobuf"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as reply:
                reply.read()
                return True
        except urllib.error.HTTPError as error:
            error.close()
            if last or error.code not in _RETRIED:
                return False
            sleep(min(float(error.headers.get("retry-after") or 1.0), timeout_s))
        except (OSError, ValueError):
            return False
    return False
