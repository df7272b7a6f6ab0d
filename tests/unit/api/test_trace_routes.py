"""Trace context by W3C's rules, and the routes that hand out traces."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

import pytest

from ai_engine.api.app import Api
from ai_engine.api.trace_context import read_context
from ai_engine.ports.telemetry import HttpDone, RequestTraced
from ai_engine.testing import MemoryTelemetry
from tests.unit.api.doors import Client, client, make_api, saying

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01"


def read(*headers: tuple[str, str]) -> tuple[str, str, str, bool, bool]:
    """(trace, parent, state, sampled, malformed)"""
    context, malformed = read_context([(k.encode(), v.encode("latin-1")) for k, v in headers], lambda: "e" * 32, "salt")
    return context.trace_id, context.parent_id, context.state, context.sampled, malformed


@pytest.mark.parametrize(
    "header",
    [GOOD, f"cc-{TRACE}-{SPAN}-01", f"cc-{TRACE}-{SPAN}-01-what-the-future-says", f"01-{TRACE}-{SPAN}-09", f" {GOOD} "],
)
def test_a_good_traceparent_is_taken(header: str) -> None:
    assert read(("traceparent", header)) == (TRACE, SPAN, "", True, False)


@pytest.mark.parametrize(
    "header",
    [
        "", "x", f"ff-{TRACE}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"{GOOD}-more",
        f"00-{TRACE.upper()}-{SPAN}-01", f"00-{TRACE}-{SPAN}-1", f"00-{TRACE}-{SPAN}", f"0-{TRACE}-{SPAN}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01", f"00-{TRACE}-{SPAN}-0g", f"00_{TRACE}_{SPAN}_01", f"cc-{TRACE}-{SPAN}-01.x",
        f"{GOOD},{GOOD}",
    ],
)  # fmt: skip
def test_a_malformed_traceparent_starts_a_new_trace_and_is_told(header: str) -> None:
    assert read(("traceparent", header), ("tracestate", "a=b")) == ("e" * 32, "", "", True, True)


def test_two_traceparents_are_malformed_and_none_is_not() -> None:
    assert read(("traceparent", GOOD), ("traceparent", GOOD))[-1] is True
    assert read()[-1] is False


def test_the_sampled_flag_is_the_lowest_bit() -> None:
    assert read(("traceparent", GOOD[:-2] + "00"))[3] is False
    assert read(("traceparent", GOOD[:-2] + "fe"))[3] is False
    assert read(("traceparent", GOOD[:-2] + "ff"))[3] is True


@pytest.mark.parametrize(
    ("state", "kept"),
    [
        ("rojo=00f067aa0ba902b7,congo=t61rcWkgMzE", "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"),
        ("a=1, \t,b=2", "a=1,b=2"),
        ("fw529a3039@dt=FfAD", "fw529a3039@dt=FfAD"),
        ("a=1,a=2", ""), ("A=1", ""), ("a", ""), ("a=x=y", ""), ("=1", ""), ("a=\x01", ""), ("a=" + "v" * 257, ""),
        ("k" * 257 + "=1", ""), (",".join(f"k{n}=1" for n in range(33)), ""),
        (",".join(f"k{n}=1" for n in range(32)), ",".join(f"k{n}=1" for n in range(32))),
    ],
)  # fmt: skip
def test_a_tracestate_is_passed_on_or_dropped_alone(state: str, kept: str) -> None:
    trace, _, found, _, malformed = read(("traceparent", GOOD), ("tracestate", state))
    assert (trace, found, malformed) == (TRACE, kept, False)


def test_several_tracestate_headers_are_one_list() -> None:
    assert read(("traceparent", GOOD), ("tracestate", "a=1"), ("tracestate", "b=2"))[2] == "a=1,b=2"


class OneTrace:
    """A TraceReader with one trace, of the key "a"."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def recent(self, *, key: str | None, limit: int) -> list[dict[str, Any]]:
        self.asked.append((key, limit))
        return [{"trace_id": TRACE}] if key in (None, "a") else []

    def tree(self, trace_id: str, *, key: str | None, steps: Sequence[int] | Literal["all"]) -> dict[str, Any] | None:
        self.asked.append((trace_id, key, steps))
        return {"trace_id": trace_id} if trace_id == TRACE and key in (None, "a") else None


def traced_api() -> tuple[Api, OneTrace]:
    api, reader = make_api(), OneTrace()
    api._door.traces = reader
    return api, reader


@pytest.mark.parametrize(
    ("query", "steps"), [("", []), ("step=all", "all"), ("step=3,5", [3, 5]), ("step=7&other=1", [7])]
)
async def test_a_trace_and_the_steps_that_it_shows(query: str, steps: Any) -> None:
    api, reader = traced_api()
    reply = await Client(api)("GET", f"/traces/{TRACE}", query=query)
    assert reply.status == 200
    assert reader.asked == [(TRACE, None, steps)]


@pytest.mark.parametrize(
    ("path", "query", "status"),
    [
        (f"/traces/{'0' * 32}", "", 404), ("/traces/..", "", 404), (f"/traces/{TRACE.upper()}", "", 404),
        (f"/traces/{TRACE}/x", "", 404), (f"/traces/{TRACE}", "step=-1", 400), (f"/traces/{TRACE}", "step=x", 400),
        (f"/traces/{TRACE}", "step=" + "9" * 30, 400), ("/traces", "limit=1001", 400), ("/traces", "limit=", 400),
    ],
)  # fmt: skip
async def test_what_is_no_trace_or_no_number_is_refused(path: str, query: str, status: int) -> None:
    api, _ = traced_api()
    assert (await Client(api)("GET", path, query=query)).status == status


async def test_recent_requests_are_listed() -> None:
    api, reader = traced_api()
    reply = await Client(api)("GET", "/traces", query="limit=5")
    assert reply.json() == {"object": "list", "data": [{"trace_id": TRACE}]}
    assert reader.asked == [(None, 5)]


async def test_a_request_is_told_with_its_parts_and_without_its_text() -> None:
    telemetry = MemoryTelemetry()
    ask = client(saying("The secret answer"), telemetry=telemetry)
    reply = await ask(
        "POST", "/v1/chat/completions",
        {"model": "m", "messages": [{"role": "user", "content": "A secret question"}], "user": "secret-user"},
        {"traceparent": GOOD, "tracestate": "a=1"},
    )  # fmt: skip
    assert reply.headers["x-ai-trace-id"] == TRACE
    (event,) = telemetry.of(RequestTraced)
    assert (event.context.trace_id, event.context.parent_id, event.context.state) == (TRACE, SPAN, "a=1")
    assert reply.headers["traceresponse"] == f"00-{TRACE}-{event.context.span_id}-01"
    assert {part.name for part in event.parts} >= {"receive", "contract", "submit", "first_token", "detokenise", "send"}
    assert event.attributes["gen_ai.usage.output_tokens"] == len("The secret answer")
    assert event.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert "secret" not in repr(event)


async def test_malformed_trace_context_is_counted() -> None:
    telemetry = MemoryTelemetry()
    ask = client(telemetry=telemetry)
    await ask("GET", "/v1/models", None, {"traceparent": "nonsense"})
    await ask("GET", "/v1/models", None, {"traceparent": GOOD})
    assert [event.malformed_trace for event in telemetry.of(HttpDone)] == [True, False]


async def test_a_client_that_hangs_up_with_its_whole_answer_has_not_left_early() -> None:
    """It stops at a stop string: serving has still to hear of it when the client closes."""
    telemetry, left = MemoryTelemetry(), asyncio.Event()
    ask = client(saying("abcdef"), telemetry=telemetry)

    async def sending(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body"):
            left.set()

    body = {"model": "m", "prompt": "Hi", "stop": ["c"], "stream": True}
    await ask("POST", "/v1/completions", body, hang_up=left, sending=sending)
    (event,) = telemetry.of(RequestTraced)
    assert event.status == 200
    assert event.attributes["ai_engine.stop_matches"] == 1
    assert event.attributes["gen_ai.usage.output_tokens"] == 3
