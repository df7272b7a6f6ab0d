"""What leaves as OTLP and as Perfetto is read back by the published schemas; nothing of it is text of a user."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TracePacket, TrackEvent

from ai_engine.observe import otlp, perfetto
from ai_engine.observe.client import load
from ai_engine.observe.command import write_trace
from ai_engine.observe.proto import varint
from ai_engine.observe.traces import Traces
from tests.unit.observe.rig import NUM_SLOTS, TRACE, play, recording


@contextmanager
def played() -> Iterator[tuple[Traces, dict[str, Any]]]:
    with recording() as (traces, rings):
        play(traces, rings)
        tree = traces.tree(TRACE, key=None, steps="all")
        assert tree is not None
        yield traces, tree


@given(st.integers(-(1 << 63), (1 << 64) - 1))
def test_varints_decode(value: int) -> None:
    found = sum((byte & 0x7F) << 7 * at for at, byte in enumerate(varint(value)))
    assert found == value % (1 << 64)


def test_perfetto_has_a_track_per_thread_and_no_slices_that_overlap() -> None:
    with played() as (_, tree):
        trace = Trace.FromString(perfetto.encode(tree))
    names = {
        packet.track_descriptor.uuid: packet.track_descriptor.name or packet.track_descriptor.thread.thread_name
        for packet in trace.packet
        if packet.HasField("track_descriptor")
    }
    assert {"compute thread 0", "compute thread 1", "steps", "request 1"} <= set(names.values())
    assert len(set(names.values())) == len(names)
    opened: dict[int, list[TracePacket]] = {}
    closed: dict[int, list[tuple[int, int, str]]] = {}
    for packet in trace.packet:
        if packet.HasField("track_event"):
            track = packet.track_event.track_uuid
            if packet.track_event.type == TrackEvent.TYPE_SLICE_BEGIN:
                opened.setdefault(track, []).append(packet)
            else:
                begin = opened[track].pop()
                closed.setdefault(track, []).append((begin.timestamp, packet.timestamp, begin.track_event.name))
    assert not any(opened.values())
    for track, slices in closed.items():
        slices.sort()
        for (_, end, _), (start, _, _) in itertools.pairwise(slices):
            assert end <= start, names[track]
    by_name = {names[track]: slices for track, slices in closed.items()}
    assert len(by_name["compute thread 0"]) == 3 * NUM_SLOTS
    start, end, name = by_name["compute thread 1"][1]
    assert name == "matmul"
    assert end - start == pytest.approx(98_000, abs=2)
    annotated = next(p for p in trace.packet if p.track_event.name == "matmul")
    said = {a.name: a.string_value or a.int_value for a in annotated.track_event.debug_annotations}
    assert said["shape"] == "T x 64 -> 32"
    assert said["bytes"] > 0


def spans_in(body: bytes) -> dict[str, Any]:
    message = ExportTraceServiceRequest.FromString(body)
    (resource,) = message.resource_spans
    (scope,) = resource.scope_spans
    spans = {span.span_id.hex(): span for span in scope.spans}
    assert len(spans) == len(scope.spans), "a span id twice"
    return spans


def test_otlp_says_the_tree_with_parents_links_and_conventions() -> None:
    with played() as (_, tree):
        request = tree["requests"][0]
        spans = spans_in(otlp.encode(otlp.spans_of(request), {"service.name": "ai_engine"}))
    root = spans[request["span_id"]]
    assert root.name == "chat m"
    assert root.trace_id.hex() == TRACE
    assert root.kind == 2
    assert not root.parent_span_id
    said = {a.key: a.value for a in root.attributes}
    assert said["gen_ai.request.stream"].bool_value is True
    assert said["gen_ai.usage.output_tokens"].int_value == 3
    assert [v.string_value for v in said["gen_ai.response.finish_reasons"].array_value.values] == ["stop"]
    assert said["http.response.status_code"].int_value == 200
    by_name = {span.name: span for span in spans.values() if span.trace_id.hex() == TRACE}
    assert by_name["decode"].parent_span_id == root.span_id
    steps = [span for span in spans.values() if span.name.startswith("step ")]
    assert len(steps) == 3
    assert {link.span_id for link in by_name["decode"].links} <= {step.span_id for step in steps}
    assert {link.trace_id.hex() for link in steps[-1].links} == {TRACE, "f" * 32}
    for span in spans.values():
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        if span.parent_span_id:
            parent = spans[span.parent_span_id.hex()]
            assert parent.trace_id == span.trace_id
    assert sum(span.name == "matmul" for span in spans.values()) == 6


class Collector(BaseHTTPRequestHandler):
    bodies: list[bytes]
    statuses: list[int]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        status = self.statuses.pop(0) if self.statuses else 200
        if status == 200:
            self.bodies.append(body)
        self.send_response(status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def collector(*statuses: int) -> Iterator[tuple[str, list[bytes]]]:
    bodies: list[bytes] = []
    handler = type("Handler", (Collector,), {"bodies": bodies, "statuses": list(statuses)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", bodies
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_exporter_sends_each_request_and_each_step_once() -> None:
    with recording() as (traces, rings), collector() as (url, bodies):
        exporter = otlp.Exporter(url, traces, {"service.name": "x"})
        play(traces, rings)
        (event,) = traces._traced[TRACE]
        exporter.emit(event)
        exporter.emit(event)
        exporter.close()
        names = [s.name for b in bodies for r in ExportTraceServiceRequest.FromString(b).resource_spans
                 for scope in r.scope_spans for s in scope.spans]  # fmt: skip
        assert names.count("chat m") == 2
        assert sorted(name for name in names if name.startswith("step")) == ["step 1", "step 2", "step 3"]
        assert exporter.sent == len(names)
        assert exporter.dropped == 0


@pytest.mark.parametrize(("statuses", "sent"), [((503,), True), ((503, 503), False), ((400,), False)])
def test_a_busy_collector_is_asked_twice_and_losses_are_counted(statuses: tuple[int, ...], sent: bool) -> None:
    with collector(*statuses) as (url, bodies):
        waits: list[float] = []
        assert otlp.post(url, b"", 5.0, waits.append) is sent
        assert len(bodies) == sent
        assert len(waits) == (statuses[0] == 503)


def test_a_collector_that_is_gone_costs_spans_and_no_time() -> None:
    with recording() as (traces, rings):
        exporter = otlp.Exporter("http://127.0.0.1:9", traces, {})
        play(traces, rings)
        (event,) = traces._traced[TRACE]
        for _ in range(2000):
            exporter.emit(event)
        exporter.close(0.1)
        exporter._thread.join(20)
        assert exporter.sent == 0
        assert exporter.dropped > 2000


def test_a_trace_survives_a_file(tmp_path: Any) -> None:
    with played() as (_, tree):
        path = write_trace(tree, "json", str(tmp_path / "t.json"))
        assert load(str(path), "", "") == json.loads(json.dumps(tree))
        assert Trace.FromString(write_trace(tree, "perfetto", str(tmp_path / "t.pftrace")).read_bytes()).packet
        assert spans_in(write_trace(tree, "otlp", str(tmp_path / "t.pb")).read_bytes())
