"""Metrics that nobody emits: what tracing itself holds and has lost, asked at a scrape.

Owns the mapping of attributes to families. host.py has the probes of processes and the machine.
"""

from __future__ import annotations

from collections.abc import Iterator

from ai_engine.observe.host import Sample
from ai_engine.observe.otlp import Exporter
from ai_engine.observe.recorder import Fanout
from ai_engine.observe.traces import Traces


def tracing(traces: Traces, fanout: Fanout, exporter: Exporter | None) -> Iterator[Sample]:
    store = traces.store
    lost, read = store.lost, store.entries_read
    yield "l6_ops_trace_ring_entries", read, ()
    yield "l6_ops_trace_coverage_ratio", read / (read + lost) if read + lost else 1.0, ()
    yield "l6_ops_trace_dropped", lost, ("ring entries",)
    yield "l6_ops_trace_dropped", store.steps_dropped, ("steps",)
    yield "l6_ops_trace_dropped", traces.dropped, ("requests",)
    yield "l6_ops_trace_failures", store.failures + fanout.failures, ()
    yield "l6_ops_trace_retained_bytes", store.raw_bytes, ("stamps",)
    yield "l6_ops_trace_retained_bytes", store.step_bytes, ("steps",)
    yield "l6_ops_trace_retained_bytes", traces.nbytes, ("requests",)
    if exporter is not None:
        yield "l6_ops_trace_exported_spans", exporter.sent, ()
        yield "l6_ops_trace_dropped", exporter.dropped, ("spans",)
