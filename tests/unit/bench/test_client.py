"""The streaming client: what it reads from bytes, and what it makes of servers that behave and that do not."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest

from ai_engine.bench.client import Answer, payload, read_answer, read_events, send
from ai_engine.bench.load import Ask, Run, Slo, closed_loop, figures, merged, open_loop

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def text(content: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": content}]}


USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
}
STREAM = [text(""), text("a"), text("b"), text("c"), USAGE, b"[DONE]"]


def answered(parts: Sequence[tuple[float, bytes]], **fields: Any) -> Answer:
    answer = Answer(**fields)
    read_answer(answer, list(parts))
    return answer


def test_first_token_is_the_first_text_and_the_end_is_the_last() -> None:
    parts = [(float(i), chunk(event(value))) for i, value in enumerate(STREAM)]
    got = answered([(0.0, HEAD), *parts], intended_s=0.5)
    assert got.ok
    assert got.texts_s == [1.0, 2.0, 3.0]  # not the empty text at 0, nor usage at 4, nor [DONE] at 5
    assert (got.ttft_s, got.latency_s, got.tpot_s) == (0.5, 2.5, 1.0)
    assert (got.prompt_tokens, got.completion_tokens, got.cached_tokens) == (7, 3, 4)
    assert got.gaps_s == [1.0, 1.0]


@pytest.mark.parametrize("size", [1, 2, 7, 64, 1000])
def test_an_event_comes_when_its_last_byte_comes(size: int) -> None:
    """However the network cuts the bytes, through chunk borders and heads."""
    body = b"".join(event(value) for value in STREAM)
    raw = HEAD + b"".join(chunk(body[i : i + 11]) for i in range(0, len(body), 11)) + b"0\r\n\r\n"
    parts = [(float(i), raw[i : i + size]) for i in range(0, len(raw), size)]
    status, events, got = read_events(parts)
    assert (status, got) == (200, body)
    assert [data for _, data in events] == [event(value)[6:-2].decode() for value in STREAM]
    for (at, _), whole in zip(events, (b"".join(event(v) for v in STREAM[: i + 1]) for i in range(6)), strict=True):
        before = b"".join(data for when, data in parts if when < at)
        received = b"".join(data for when, data in parts if when <= at)
        assert len(read_body(received)) >= len(whole) - 1  # the second newline may be the piece's last byte
        assert len(read_body(before)) < len(whole)


def read_body(raw: bytes) -> bytes:
    try:
        return read_events([(0.0, raw)])[2]
    except ValueError:
        return b""


def test_chat_deltas_tools_and_plain_bodies_are_read() -> None:
    deltas = [
        {"role": "assistant"},
        {"content": ""},
        {"content": "x"},
        {"reasoning_content": "y"},
        {"tool_calls": [{}]},
    ]
    values = [{"choices": [{"delta": delta}]} for delta in deltas]
    raw = b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(map(event, [*values, USAGE, b"[DONE]"]))
    assert len(answered([(1.0, raw)]).texts_s) == 3
    windows = raw.replace(b"\n\n", b"\r\n\r\n").replace(b"HTTP/1.1 200 OK\r\n\r\n\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n")
    assert answered([(1.0, windows)]).completion_tokens == 3


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"", "before the response's head"),
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy", "HTTP 503: busy"),
        (HEAD + chunk(event(text("a"))), "without \\[DONE\\]"),
        (HEAD + chunk(event(text("a"))) + chunk(event(b"[DONE]")), "no usage"),
        (HEAD + chunk(event(USAGE)) + chunk(event(b"[DONE]")), "no text"),
        (HEAD + chunk(event({"error": {"message": "out of pages"}})) + chunk(event(b"[DONE]")), "out of pages"),
        (HEAD + chunk(event(b"{not json")), "cannot be read"),
    ],
)
def test_what_is_no_whole_answer_is_a_failure(raw: bytes, error: str) -> None:
    got = answered([(0.0, raw)])
    assert not got.ok
    with pytest.raises(AssertionError, match=error):
        raise AssertionError(got.error)


def test_who_left_early_did_not_fail() -> None:
    for raw in (b"", HEAD + chunk(event(text("a")))):
        got = answered([(0.0, raw)], aborted=True)
        assert (got.ok, got.error) == (False, "")


# --- over sockets

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def served(handler: Handler) -> AsyncIterator[str]:
    """A server on the loopback; its URL. Waits for the handlers at the end."""
    running: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
            await handler(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await asyncio.gather(*running)


async def whole(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gap_s: float = 0.0) -> None:
    writer.write(HEAD)
    for value in STREAM:
        await asyncio.sleep(gap_s)
        writer.write(chunk(event(value)))
        await writer.drain()


def ask(url: str) -> Ask:
    return Ask(payload(url, "/v1/completions", {"prompt": "x"}, key="k"))


def test_payload_is_one_whole_request() -> None:
    raw = payload("http://127.0.0.1:80/base", "/v1/completions", {"prompt": [1, 2]}, key="secret")
    head, _, body = raw.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /base/v1/completions HTTP/1.1\r\n")
    assert b"authorization: Bearer secret" in head
    assert f"content-length: {len(body)}".encode() in head
    assert json.loads(body) == {"prompt": [1, 2]}


async def test_send_ends_at_done_though_the_server_keeps_the_connection() -> None:
    async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await whole(reader, writer)
        await reader.read()  # until the client leaves

    async with served(keep) as url:
        got = await send(url, ask(url).data, timeout_s=5)
    assert got.ok, got.error
    assert got.sent_s <= got.texts_s[0] <= got.texts_s[-1] <= got.ended_s


async def test_send_never_raises() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with served(silent) as url:
        assert "no end within" in (await send(url, ask(url).data, timeout_s=0.05)).error
        left = await send(url, ask(url).data, abort_after_s=0.05)
        assert left.aborted
        assert not left.error
    assert "no connection" in (await send(url, b"x", timeout_s=1)).error


async def test_closed_loop_keeps_as_many_requests_out_as_it_has_streams() -> None:
    out, most = 0, 0

    async def counted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal out, most
        out += 1
        most = max(most, out)
        await asyncio.sleep(0.01)
        out -= 1
        await whole(reader, writer)

    async with served(counted) as url:
        answers = await closed_loop(url, [ask(url)] * 9, 3)
    assert [answer.ok for answer in answers] == [True] * 9
    assert most == 3


async def test_open_loop_does_not_wait_for_a_slow_server() -> None:
    """Ten arrivals within 50 ms at a server that takes 200 ms and serves one at a time: coordinated omission would show
    ten latencies of 200 ms; in truth the last waits for all before it."""
    one_at_a_time = asyncio.Lock()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with one_at_a_time:
            await asyncio.sleep(0.05)
            await whole(reader, writer)

    async with served(slow) as url:
        answers = await open_loop(url, [ask(url)] * 10, [0.005 * i for i in range(10)])
    assert all(answer.ok for answer in answers)
    assert max(answer.sent_s - answer.intended_s for answer in answers) < 0.2
    assert max(answer.ttft_s for answer in answers) > 0.35
    assert min(answer.intended_s for answer in answers) == answers[0].intended_s


# --- figures of a run


def good(start: float, texts: Sequence[float], tokens: int = 0) -> Answer:
    times = [start + t for t in texts]
    return Answer(
        intended_s=start, sent_s=start, ended_s=times[-1], texts_s=times, prompt_tokens=5,
        completion_tokens=tokens or len(times),
    )  # fmt: skip


def test_figures_count_failures_against_the_goal_and_leavers_not() -> None:
    answers = [
        good(0, [0.1, 0.2, 0.3]),
        good(0, [2.0, 2.1]),  # first text too late
        good(0, [0.1, 0.9]),  # a gap too long
        Answer(error="HTTP 503: busy"),
        Answer(aborted=True),
    ]
    row = figures(Run(answers, 0.0, 2.1, cpu_s=1.4, client_cpu_s=0.21), Slo(ttft_s=1.0, tpot_s=1.0, gap_s=0.5))
    assert (row["requests"], row["good"], row["failures"], row["left_by_client"]) == (5, 3, 1, 1)
    assert row["slo_kept_share"] == 1 / 4
    assert row["errors"] == ["HTTP 503: busy"]
    assert row["output_tokens"] == 7
    assert row["server_cpu_s_per_1000_tokens"] == pytest.approx(200)
    assert row["client_cpu_share"] == pytest.approx(0.1)
    assert row["ttft_ms"]["p50"] is None  # three samples


def test_tokens_of_coalesced_chunks_count_in_tpot_and_show() -> None:
    run = Run([good(0, [1.0, 2.0], tokens=11)], 0.0, 2.0)
    assert run.all("tpot") == [0.1]
    assert figures(run)["tokens_per_chunk"] == 5.5


def test_merged_rounds_keep_the_rate() -> None:
    rounds = [Run([good(0, [0.5, 1.0])], 0.0, 1.0, cpu_s=1.0), Run([good(100, [0.5, 3.0])], 100.0, 103.0, cpu_s=3.0)]
    both = merged(rounds)
    assert (both.seconds, both.tokens_per_s, both.cpu_s) == (4.0, 1.0, 4.0)
