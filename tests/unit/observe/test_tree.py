"""The tree of a request: it nests, adds up, links, belongs to its key, and stays within its bytes."""

from __future__ import annotations

from typing import Any

import pytest

from ai_engine.observe import render
from ai_engine.observe.traces import Traces
from ai_engine.ports import telemetry as ev
from ai_engine.ports.trace import Part, Parts
from tests.unit.observe.rig import NUM_SLOTS, TRACE, play, recording, traced


def tree_of(traces: Traces, steps: Any = "all") -> dict[str, Any]:
    tree = traces.tree(TRACE, key=None, steps=steps)
    assert tree is not None
    found: dict[str, Any] = tree["requests"][0]
    return found


def test_the_parts_are_measured_and_add_up() -> None:
    with recording() as (traces, rings):
        play(traces, rings)
        request = tree_of(traces)
        parts = {part["name"]: part for part in request["parts"]}
        assert list(parts) == ["receive", "contract", "handover", "queue", "prefill", "decode", "detokenise", "send"]
        assert parts["queue"]["seconds"] == pytest.approx(0.02), "the worker's stamps: arrival to first step"
        assert parts["prefill"]["seconds"] == pytest.approx(0.02), "first step to first token"
        assert parts["handover"]["seconds"] == pytest.approx(0.006), "what lies between the two processes' stamps"
        assert abs(request["unaccounted_seconds"]) < 1e-9
        assert request["seconds"] == pytest.approx(0.155)


@pytest.mark.parametrize(
    ("until", "busy", "decode", "handover"),
    [
        (10.153, 0.0, 0.101, 0.006),  # the worker was done 2 ms before
        (10.153, 0.004, 0.097, 0.006),  # and 4 ms of it went into tokens that made no text
        (10.150, 0.0, 0.0, 0.104),  # late for the first token, and the worker still at it
    ],
)
def test_an_answer_that_came_at_once_was_decoded_by_the_workers_stamps(
    until: float, busy: float, decode: float, handover: float
) -> None:
    with recording() as (traces, rings):
        parts = [
            Part("receive", 10.0, 10.006, 0.006), Part("submit", 10.006, 10.012, 0.006),
            Part("first_token", 10.012, until, until - 10.012 - busy),
            Part("detokenise", 10.05, 10.154, 10.154 - until + busy), Part("send", 10.154, 10.155, 0.001),
        ]  # fmt: skip
        play(traces, rings, parts=parts)
        request = tree_of(traces)
        seconds = {part["name"]: part["seconds"] for part in request["parts"]}
        assert seconds["prefill"] == pytest.approx(0.02)
        assert seconds["decode"] == pytest.approx(decode)
        assert seconds["handover"] == pytest.approx(handover)
        assert abs(request["unaccounted_seconds"]) < 1e-9


def test_what_came_at_once_and_what_was_waited_for_is_one_decode() -> None:
    """Of two choices the first was all there at the first wake-up, the other was not."""
    with recording() as (traces, rings):
        parts = [
            Part("submit", 10.0, 10.012, 0.012), Part("first_token", 10.012, 10.153, 0.141),
            Part("decode", 10.154, 10.164, 0.010), Part("detokenise", 10.153, 10.165, 0.002, 2),
        ]  # fmt: skip
        play(traces, rings, parts=parts, until=10.165)
        request = tree_of(traces)
        decode = next(part for part in request["parts"] if part["name"] == "decode")
        assert decode["seconds"] == pytest.approx(0.101 + 0.010)
        assert (decode["at"], decode["until"]) == pytest.approx((0.05, 0.164))
        assert abs(request["unaccounted_seconds"]) < 1e-9


def test_steps_nest_in_the_request_layers_in_steps_and_ops_in_layers() -> None:
    with recording() as (traces, rings):
        play(traces, rings)
        request = tree_of(traces)
        assert [(s["step"], s["part"]) for s in request["steps"]] == [(1, "prefill"), (2, "decode"), (3, "decode")]
        for step in request["steps"]:
            assert 0 <= step["at"] <= step["at"] + step["seconds"] <= request["seconds"]
            (layers,) = step["runs"]
            assert [layer["layer"] for layer in layers] == [-1, 0, 1, -1]
            assert sum(len(layer["ops"]) for layer in layers) == NUM_SLOTS
            for layer in layers:
                assert step["at"] - 1e-6 <= layer["at"]
                assert layer["at"] + layer["seconds"] <= step["at"] + step["seconds"] + 1e-6
                for op in layer["ops"]:
                    assert layer["at"] <= op["at"]
                    assert op["at"] + op["seconds"] <= layer["at"] + layer["seconds"] + 1e-9
            assert step["kernel_seconds"] + step["host_seconds"] == pytest.approx(step["seconds"])


def test_a_step_links_all_its_requests_and_the_share_goes_by_rows() -> None:
    with recording() as (traces, rings):
        play(traces, rings)
        request = tree_of(traces, steps=[])
        last = request["steps"][-1]
        assert {(link["trace_id"], link["rows"]) for link in last["links"]} == {(TRACE, 1), ("f" * 32, 3)}
        assert last["share"] == 0.25
        decode = next(part for part in request["parts"] if part["name"] == "decode")
        assert [link["span_id"] for link in last["links"] if link["trace_id"] == TRACE] == [decode["span_id"]]
        assert "runs" not in last, "layers and ops only where they are asked for"
        assert request["steps"][0]["share"] == 1.0


def test_rates_are_bytes_and_operations_over_time() -> None:
    with recording() as (traces, rings):
        play(traces, rings)
        request = tree_of(traces)
        for step in request["steps"]:
            rows = step["all_rows"]
            matmul = step["runs"][0][1]["ops"][0]
            assert matmul["op"] == "matmul"
            assert matmul["shape"] == "T x 64 -> 32"
            assert matmul["dtype"] == "F32"
            nbytes = 32 * 64 * 4 + rows * (64 + 32) * 4
            assert matmul["gb_per_s"] == pytest.approx(nbytes / matmul["seconds"] / 1e9, rel=1e-9)
            assert matmul["gflop_per_s"] == pytest.approx(2 * rows * 32 * 64 / matmul["seconds"] / 1e9, rel=1e-9)
        sums = {(row["op"], row["shape"]): row for row in request["ops"]}
        assert sums["matmul", "T x 64 -> 32"]["count"] == 6
        assert sums["matmul", "T x 64 -> 32"]["seconds"] > sums["matmul", "T x 64 -> 32"]["share_seconds"] > 0


def test_every_span_has_its_own_id() -> None:
    with recording() as (traces, rings):
        play(traces, rings)
        request = tree_of(traces)
        ids = [request["span_id"], *(part["span_id"] for part in request["parts"])]
        for step in request["steps"]:
            ids.append(step["span_id"])
            for layer in step["runs"][0]:
                ids += [layer["span_id"], *(op["span_id"] for op in layer["ops"])]
        assert len(set(ids)) == len(ids)
        assert all(len(span) == 16 and int(span, 16) for span in ids)


def test_a_key_reads_its_own_traces_and_an_admin_all() -> None:
    with recording() as (traces, rings):
        play(traces, rings, key="team-a")
        assert traces.tree(TRACE, key="team-a", steps=[]) is not None
        assert traces.tree(TRACE, key="team-b", steps=[]) is None
        assert traces.tree(TRACE, key=None, steps=[]) is not None
        assert [row["key"] for row in traces.recent(key=None, limit=10)] == ["team-a"]
        assert traces.recent(key="team-b", limit=10) == []
        assert traces.tree("0" * 32, key=None, steps=[]) is None


def test_several_requests_may_share_a_trace() -> None:
    with recording() as (traces, _):
        for number in range(3):
            traces.emit(
                traced(number, number + 0.5, [Part("receive", number, number + 0.5, 0.5)], request=f"r{number}")
            )
        tree = traces.tree(TRACE, key=None, steps=[])
        assert tree is not None
        assert len(tree["requests"]) == 3
        assert [row["seconds"] for row in traces.recent(key=None, limit=2)] == [0.5, 0.5]


def test_requests_are_given_up_oldest_first_within_the_bytes() -> None:
    with recording(max_bytes=1 << 20) as (traces, _):
        for number in range(3000):
            trace = f"{number + 1:032x}"
            traces.emit(ev.SequenceOpened(number, f"q{number}", trace, 0, 1.0, 5, 0))
            traces.emit(
                ev.TokenTimes(f"q{number}", trace, "stop", 0.1, 0.2, 0.05, 5, 0, 9, [0.01] * 50, 1.2, 0)
            )  # fmt: skip
            traces.emit(traced(1.0, 1.3, [Part("receive", 1.0, 1.3, 0.3)], request=f"q{number}", trace=trace))
            assert traces.nbytes <= (1 << 20) // 4 + 8192
        assert traces.dropped > 2000
        assert traces.tree(f"{3000:032x}", key=None, steps=[]) is not None
        assert traces.tree(f"{1:032x}", key=None, steps=[]) is None


def test_the_stopwatch_is_always_in_one_part() -> None:
    now = [0.0]
    parts = Parts(lambda: now[0])
    for name, at in (("contract", 1.0), ("tokenise", 3.0), ("contract", 4.0), ("send", 4.5)):
        now[0] = at
        parts.enter(name)  # type: ignore[arg-type]
    now[0] = 6.0
    found = {part.name: (part.started_s, part.ended_s, part.seconds, part.count) for part in parts.end()}
    assert found == {
        "receive": (0.0, 1.0, 1.0, 1), "contract": (1.0, 4.5, 2.5, 2), "tokenise": (3.0, 4.0, 1.0, 1),
        "send": (4.5, 6.0, 1.5, 1),
    }  # fmt: skip


def test_a_stamp_of_another_thread_never_goes_back_before_the_part_it_ends() -> None:
    now = [10.0]
    parts = Parts(lambda: now[0])
    now[0] = 11.0
    parts.enter("encode_wait")
    now[0] = 15.0
    parts.encoded((10.5, 12.0, 14.0))
    found = {part.name: part.seconds for part in parts.end()}
    assert found["encode_wait"] == 0.0
    assert found["template"] == 1.0
    assert found["tokenise"] == 2.0
    assert sum(found.values()) == 5.0


def test_the_terminal_shows_every_op_of_the_chosen_step_and_what_differs() -> None:
    with recording() as (traces, rings):
        play(traces, rings)
        plain = traces.tree(TRACE, key=None, steps=[])
        assert plain is not None
        chosen = render.chosen_step(plain["requests"][0])
        assert chosen in (2, 3)
        tree = traces.tree(TRACE, key=None, steps=[chosen])
        assert tree is not None
        text = render.show(tree)
        for op in ("embed", "matmul", "add", "sample"):
            assert op in text
        assert text.count("GFLOP/s") == NUM_SLOTS + 1, "one line an op, and the table's head"
        assert "share 25%" in text or "share 100%" in text
        assert "matmul" in render.top(tree)
        assert "+0.000" in render.diff(tree, tree)
