"""What HTTP asks of the doors: routes, errors in one shape, ids, bodies, keys, CORS, drain, disconnects, pings."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
from collections.abc import Mapping
from typing import Any

import pytest

from ai_engine.api.app import Api
from ai_engine.api.generation import MAILBOX_SIZE
from ai_engine.api.keys import Keys
from ai_engine.ports.errors import ERRORS_BY_CODE, AiEngineError, DeadlineExceeded, Overloaded
from ai_engine.ports.serving import Chunk, GenerateRequest, Health
from ai_engine.ports.telemetry import HttpDone
from ai_engine.testing import HANG, MemoryTelemetry, ScriptedServing, answer, failing
from tests.unit.api.doors import MODEL, ByteText, Reply, api_config, client

BODY = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
RAW = json.dumps(BODY).encode()
CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


def code_of(reply: Reply, status: int, *, details: bool = False) -> str:
    """The error's code, after checking the shape and the headers that every error has."""
    assert reply.status == status, reply.body
    error = reply.json()["error"]
    assert set(error) - ({"details"} if details else set()) == {"message", "type", "param", "code"}
    assert all(isinstance(error[name], str) for name in ("message", "type", "code"))
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"]
    assert len(reply.headers["x-ai-trace-id"]) == 32
    retryable = ERRORS_BY_CODE[error["code"]].retryable
    assert ("retry-after" in reply.headers) is retryable
    assert (reply.headers.get("x-should-retry") == "false") is (status >= 500 and not retryable)
    return str(error["code"])


# --- routes ---


@pytest.mark.parametrize("path", [CHAT, CHAT + "/", "/chat/completions", "/v1//chat/completions/"])
async def test_paths_with_and_without_v1_and_slash(path: str) -> None:
    assert (await client()("POST", path, BODY)).status == 200


@pytest.mark.parametrize("path", ["/", "/v1", "/v2/models", "/v1/chat", "/v1/chat/completions/x", "/models/{id}/.."])
async def test_unknown_paths(path: str) -> None:
    reply = await client()("GET", path)
    assert code_of(reply, 404) in ("not_found", "model_not_found")


@pytest.mark.parametrize(
    ("method", "path"), [("GET", CHAT), ("DELETE", "/v1/models"), ("POST", "/livez"), ("BREW", CHAT)]
)
async def test_wrong_methods(method: str, path: str) -> None:
    reply = await client()(method, path)
    assert code_of(reply, 405) == "method_not_allowed"
    assert reply.headers["allow"] in ("POST, OPTIONS", "GET, HEAD, OPTIONS")


async def test_head_is_get_without_a_body() -> None:
    door = client()
    get, head = await door("GET", "/v1/models"), await door("HEAD", "/v1/models")
    assert (head.status, head.body) == (200, b"")
    assert head.headers["content-length"] == get.headers["content-length"]


async def test_metrics_come_from_who_provides_them() -> None:
    reply = await client(metrics=lambda: b"a_metric 1\n")("GET", "/metrics")
    assert (reply.status, reply.body) == (200, b"a_metric 1\n")
    assert reply.headers["content-type"].startswith("text/plain")


# --- ids ---


@pytest.mark.parametrize("path", ["/v1/models", "/nothing", CHAT])
async def test_ids_are_on_every_response(path: str) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    given = {"x-request-id": "mine-1", "traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
    reply = await client()("GET", path, headers=given)
    assert reply.headers["x-request-id"] == "mine-1"
    assert reply.headers["x-ai-trace-id"] == trace


@pytest.mark.parametrize("bad", ["", "a b", "x" * 129, "a\r\nset-cookie: b", "\u00e9"])
async def test_ids_that_are_not_sane_are_replaced(bad: str) -> None:
    reply = await client()("GET", "/livez", headers={"x-request-id": bad, "traceparent": f"00-{'0' * 32}-{bad}-01"})
    assert reply.headers["x-request-id"].startswith("req-")
    assert len(reply.headers["x-ai-trace-id"]) == 32
    assert set(reply.headers["x-ai-trace-id"]) != {"0"}


async def test_the_trace_id_goes_down_with_the_request() -> None:
    serving = ScriptedServing()
    reply = await client(serving).chat()
    assert serving.requests[0].trace_id == reply.headers["x-ai-trace-id"]
    assert serving.requests[0].request_id == reply.json()["id"]


# --- bodies ---


@pytest.mark.parametrize(
    "kind",
    [
        "",
        "application/json",
        "Application/JSON; charset=UTF-8",
        'application/json; charset="utf8"',
        "application/x+json",
    ],
)
async def test_content_types_that_pass(kind: str) -> None:
    headers = {"content-type": kind} if kind else {}
    assert (await client()("POST", CHAT, RAW, headers)).status == 200


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/json; charset=utf-16",
    ],
)
async def test_content_types_that_do_not(kind: str) -> None:
    assert code_of(await client()("POST", CHAT, RAW, {"content-type": kind}), 415) == "unsupported_media_type"


@pytest.mark.parametrize("body", [b"", b"[1]", b'"x"', b"null", b"{", b'{"a":\xff}', b"NaN", b"\x00"])
async def test_bodies_that_are_not_an_object(body: bytes) -> None:
    assert code_of(await client()("POST", CHAT, body, JSON), 400) in ("invalid_json", "invalid_value")


async def test_a_body_in_pieces() -> None:
    reply = await client()("POST", CHAT, headers=JSON, chunks=[RAW[:5], b"", RAW[5:20], RAW[20:]])
    assert reply.status == 200


@pytest.mark.parametrize("declared", [None, "10", "999999999"])
@pytest.mark.parametrize("size", [2_000, 100_000])
async def test_a_body_over_the_limit_whatever_its_length_claims(declared: str | None, size: int) -> None:
    headers = {**JSON, **({"content-length": declared} if declared else {})}
    reply = await client(max_body_bytes=1000)("POST", CHAT, headers=headers, chunks=[b"x" * 500] * (size // 500))
    assert code_of(reply, 413) == "body_too_large"
    assert (reply.headers.get("connection") == "close") is (size == 100_000 or declared == "999999999")


async def test_a_body_at_the_limit_passes() -> None:
    assert (await client(max_body_bytes=len(RAW))("POST", CHAT, RAW, JSON)).status == 200


async def test_a_body_that_does_not_come_is_a_408() -> None:
    reply = await client(body_timeout_s=0.02)("POST", CHAT, headers=JSON, chunks=[RAW[:9], 5.0, RAW[9:]])
    assert code_of(reply, 408) == "request_timeout"
    assert reply.headers["connection"] == "close"


async def test_gzip_bodies() -> None:
    door = client(max_body_bytes=10_000)
    zipped = {**JSON, "content-encoding": "gzip"}
    assert (await door("POST", CHAT, gzip.compress(RAW), zipped)).status == 200
    assert code_of(await door("POST", CHAT, RAW, zipped), 400) == "invalid_request"
    assert code_of(await door("POST", CHAT, gzip.compress(RAW)[:-9], zipped), 400) == "invalid_value"
    assert code_of(await door("POST", CHAT, gzip.compress(b" " * 10_000_000), zipped), 413) == "body_too_large"
    assert code_of(await door("POST", CHAT, RAW, {**JSON, "content-encoding": "br"}), 415) == "unsupported_media_type"


# --- keys and CORS ---


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({}, False),
        ({"authorization": "Bearer secret"}, True),
        ({"authorization": "bearer  secret"}, True),
        ({"x-api-key": "secret"}, True),
        ({"authorization": "Bearer secrets"}, False),
        ({"authorization": "Basic secret"}, False),
        ({"authorization": "Bearer"}, False),
        ({"authorization": "Bearer \u00e9"}, False),
    ],
)
async def test_with_a_key_every_route_but_health_needs_it(headers: dict[str, str], allowed: bool) -> None:
    door = client(keys=Keys(admin_key="secret"))
    for path in ("/v1/models", "/metrics", "/v1/nothing"):
        reply = await door("GET", path, headers=headers)
        if allowed:
            assert reply.status in (200, 404)
        else:
            assert code_of(reply, 401) == "invalid_api_key"
            assert reply.headers["www-authenticate"] == "Bearer"
            assert "secret" not in reply.json()["error"]["message"]
    for path in ("/livez", "/readyz", "/health"):
        assert (await door("GET", path, headers=headers)).status == 200


async def test_cors_is_off_unless_configured() -> None:
    reply = await client()("OPTIONS", CHAT, headers={"origin": "https://a.example"})
    assert reply.status == 204
    assert not any(name.startswith("access-control") for name in reply.headers)


async def test_preflight_without_a_key_and_headers_on_streams_and_errors() -> None:
    door = client(keys=Keys(admin_key="k"), cors_origins=("https://a.example",))
    origin = {"origin": "https://a.example"}
    asked = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization,x-y"}
    reply = await door("OPTIONS", CHAT, headers=asked)
    assert reply.status == 204
    assert reply.headers["access-control-allow-origin"] == "https://a.example"
    assert reply.headers["access-control-allow-headers"] == "authorization,x-y"
    assert "POST" in reply.headers["access-control-allow-methods"]
    stream = await door("POST", CHAT, {**BODY, "stream": True}, {**origin, "authorization": "Bearer k"})
    error = await door("POST", CHAT, BODY, origin)
    assert (stream.status, error.status) == (200, 401)
    for reply in (stream, error):
        assert reply.headers["access-control-allow-origin"] == "https://a.example"
        assert "x-ai-trace-id" in reply.headers["access-control-expose-headers"]
        assert reply.headers["vary"] == "origin"
    other = await door("OPTIONS", CHAT, headers={"origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers


# --- health, drain, failures ---


async def test_health_routes() -> None:
    serving = ScriptedServing()
    door = client(serving, health_timeout_s=0.02)
    for path in ("/livez", "/readyz", "/health", "/v1/health"):
        assert (await door("GET", path)).status == 200
    serving.health_value = Health(live=True, ready=False, reason="loading weights")
    assert (await door("GET", "/livez")).status == 200
    reply = await door("GET", "/readyz")
    assert code_of(reply, 503) == "not_ready"
    assert "loading weights" in reply.json()["error"]["message"]
    serving.health_value = Health(live=False, ready=False, reason="step loop stuck")
    assert code_of(await door("GET", "/livez"), 503) == "not_ready"


async def test_health_of_an_engine_that_does_not_answer() -> None:
    class Stuck(ScriptedServing):
        async def health(self) -> Health:
            await asyncio.sleep(60)
            raise AssertionError

    door = client(Stuck(), health_timeout_s=0.02)
    assert code_of(await door("GET", "/livez"), 503) == "not_ready"
    assert code_of(await door("GET", "/readyz"), 503) == "not_ready"


async def test_draining_refuses_new_work_only() -> None:
    door = client()
    door.api.draining = True
    for reply in (await door.chat(), await door.complete(), await door("GET", "/readyz")):
        assert code_of(reply, 503) == "shutting_down"
        assert reply.headers["connection"] == "close"
    assert (await door("GET", "/livez")).status == 200
    assert (await door("GET", "/v1/models")).status == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("code", sorted(ERRORS_BY_CODE))
async def test_refusals_keep_their_status_even_for_streams(code: str, stream: bool) -> None:
    refusal = ERRORS_BY_CODE[code]("no")
    reply = await client(ScriptedServing(refusal=refusal)).chat(stream=stream)
    assert code_of(reply, refusal.http_status) == code


async def test_retry_after_is_the_error_s_own_or_the_default() -> None:
    reply = await client(ScriptedServing(refusal=Overloaded("full", retry_after_s=7.2))).chat()
    assert reply.headers["retry-after"] == "8"
    reply = await client(ScriptedServing(refusal=Overloaded("full"))).chat()
    assert reply.headers["retry-after"] == "2"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_any_output_has_its_own_status(stream: bool) -> None:
    serving = ScriptedServing(lambda r: failing(r, b"", "deadline_exceeded", "too late"))
    reply = await client(serving).chat(stream=stream)
    assert code_of(reply, DeadlineExceeded.http_status) == "deadline_exceeded"


async def test_a_failure_later_fails_a_whole_answer() -> None:
    serving = ScriptedServing(lambda r: failing(r, b"abc"))
    assert code_of(await client(serving).chat(), 500) == "engine_error"


async def test_what_was_said_before_a_failure_is_sent_first() -> None:
    class Merging(ScriptedServing):
        """Serving's stream merges chunks, so the last tokens may come with the failure."""

        async def submit(self, request: GenerateRequest) -> Any:
            async def chunks() -> Any:
                yield answer(request, b"abc")[0]
                await asyncio.sleep(0.01)
                yield Chunk(request_id=request.request_id, tokens=[98])
                yield Chunk(request_id=request.request_id, tokens=[99], finish="failed", error_message="boom")

            return chunks()

    reply = await client(Merging()).chat(stream=True)
    assert "".join(e["choices"][0]["delta"]["content"] for e in reply.events()[:-1]) == "abc"
    assert reply.events()[-1]["error"]["message"] == "boom"


async def test_one_failed_choice_ends_the_others() -> None:
    def script(request: GenerateRequest) -> list[Any]:
        return [answer(request, b"ab")[0], Chunk(request_id=request.request_id, index=1, finish="failed"), HANG]

    serving = ScriptedServing(script)
    reply = await client(serving).chat(n=2, stream=True)
    assert reply.events()[-1]["error"]["code"] == "engine_error"
    assert serving.cancelled
    assert serving.open_requests == 0


async def test_choices_cut_by_a_drain_end_with_a_retryable_error() -> None:
    def script(request: GenerateRequest) -> list[Any]:
        last = Chunk(request_id=request.request_id, finish="failed", error_code="shutting_down", error_message="bye")
        return [answer(request, b"ab")[0], last]

    reply = await client(ScriptedServing(script)).chat(stream=True)
    assert reply.events()[-1]["error"]["code"] == "shutting_down"
    assert code_of(await client(ScriptedServing(script)).chat(), 503) == "shutting_down"


@pytest.mark.parametrize("bug", [RuntimeError("boom"), AiEngineError("internal")])
async def test_our_own_bugs_are_a_500_in_shape(bug: Exception, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.CRITICAL):
        reply = await client(ScriptedServing(lambda r: [bug])).chat()
    assert code_of(reply, 500) == "internal_error"
    assert "boom" not in reply.body.decode()


async def test_a_bug_in_the_middle_of_a_stream_still_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.CRITICAL):
        reply = await client(ScriptedServing(lambda r: [answer(r, b"ab")[0], RuntimeError("boom")])).chat(stream=True)
    assert reply.events()[-1]["error"]["code"] == "internal_error"


async def test_a_stream_that_ends_without_a_terminal_chunk_is_an_error() -> None:
    reply = await client(ScriptedServing(lambda r: answer(r, b"ab")[:1])).chat(stream=True)
    assert "error" in reply.events()[-1]


async def test_the_second_prompt_s_refusal_cancels_the_first() -> None:
    class Full(ScriptedServing):
        async def submit(self, request: GenerateRequest) -> Any:
            self.refusal = Overloaded("full") if self.requests else None
            return await super().submit(request)

    serving = Full(lambda r: [HANG])
    reply = await client(serving).complete(prompt=["a", "b"])
    assert code_of(reply, 503) == "server_overloaded"
    assert [request_id for request_id, _ in serving.cancelled] == [serving.requests[0].request_id]
    assert serving.open_requests == 0


# --- disconnects ---


@pytest.mark.parametrize("after", ["queued", "started"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_a_client_that_leaves_cancels_its_work(path: str, stream: bool, after: str) -> None:
    telemetry = MemoryTelemetry()
    head: list[Any] = [] if after == "queued" else [0.001]
    serving = ScriptedServing(lambda r: [*(answer(r, b"abc")[:1] if head else []), HANG])
    hang_up = asyncio.Event()
    body: Mapping[str, Any] = {"model": "m", "prompt": "x"} if path != CHAT else BODY
    door = client(serving, telemetry=telemetry)
    call = asyncio.create_task(door("POST", path, {**body, "n": 2, "stream": stream}, hang_up=hang_up))
    await asyncio.sleep(0.02)
    assert serving.open_requests == 1
    hang_up.set()
    with contextlib.suppress(AssertionError):  # a stream that had begun has no end
        await asyncio.wait_for(call, 1)
    assert serving.cancelled == [(serving.requests[0].request_id, None)]
    assert serving.open_requests == 0
    assert [event.status for event in telemetry.of(HttpDone)] == [499]


async def test_a_client_that_leaves_while_sending_its_body() -> None:
    telemetry = MemoryTelemetry()
    hang_up = asyncio.Event()
    hang_up.set()
    door = client(telemetry=telemetry)
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        raise AssertionError(message)

    await door.api(scope, receive, send)
    assert [event.status for event in telemetry.of(HttpDone)] == [499]


# --- streams in time ---


async def test_pings_fill_silence_after_the_first_event_only() -> None:
    def script(request: GenerateRequest) -> list[Any]:
        first, last = answer(request, b"ab")
        return [0.05, first, 0.07, last]

    reply = await client(ScriptedServing(script), ping_s=0.02).chat(stream=True)
    parts = reply.body.decode().split("\n\n")
    pings = [i for i, part in enumerate(parts) if part == ": ping"]
    assert 2 <= len(pings) <= 4
    assert pings[0] == 2  # after the role chunk and the first text
    assert reply.text() == "ab"


async def test_tokens_that_are_ready_together_are_written_together() -> None:
    class Eager(ScriptedServing):
        async def submit(self, request: GenerateRequest) -> Any:
            async def all_at_once() -> Any:
                for chunk in answer(request, b"Hello there"):
                    yield chunk

            return all_at_once()

    reply = await client(Eager()).chat(stream=True)
    assert reply.text() == "Hello there"
    assert len(reply.events()) == 3  # role, text, finish
    assert len(reply.writes) <= 4


async def test_a_slow_client_does_not_pile_up_chunks() -> None:
    made = 0

    class Eager(ScriptedServing):
        async def submit(self, request: GenerateRequest) -> Any:
            async def all_at_once() -> Any:
                nonlocal made
                for chunk in answer(request, b"x" * 400):
                    made += 1
                    yield chunk

            return all_at_once()

    blocked = asyncio.Event()
    ahead: list[int] = []

    async def slow(message: dict[str, Any]) -> None:
        if message.get("body") and not ahead:
            await asyncio.sleep(0.02)  # the first write: everything behind it has to wait
            ahead.append(made)
            blocked.set()

    await client(Eager()).chat(stream=True, sending=slow)
    assert blocked.is_set()
    assert ahead[0] <= 2 * MAILBOX_SIZE + 2
    assert made == 400


async def test_nothing_is_written_before_the_first_output() -> None:
    serving = ScriptedServing(lambda r: [HANG])
    written: list[bytes] = []
    hang_up = asyncio.Event()
    door = client(serving, ping_s=0.01)
    call = asyncio.create_task(door("POST", CHAT, {**BODY, "stream": True}, hang_up=hang_up, on_write=written.append))
    await asyncio.sleep(0.05)
    assert written == []
    hang_up.set()
    await call


async def test_stream_headers() -> None:
    reply = await client().chat(stream=True)
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"


# --- telemetry and life ---


async def test_every_exchange_is_counted_by_route() -> None:
    telemetry = MemoryTelemetry()
    door = client(telemetry=telemetry)
    await door.chat()
    await door("GET", "/v1/models/a/b/c")
    await door("BREW", "/secret/path")
    seen = [(event.route, event.method, event.status) for event in telemetry.of(HttpDone)]
    assert seen == [("/chat/completions", "POST", 200), ("/models/{id}", "GET", 404), ("unmatched", "other", 404)]


async def test_lifespan_runs_the_hooks_and_reports_failure() -> None:
    seen: list[str] = []

    async def start() -> None:
        seen.append("start")

    async def stop() -> None:
        raise RuntimeError("cannot stop")

    api = Api(
        serving=ScriptedServing(),
        text=ByteText(),
        model=MODEL,
        telemetry=MemoryTelemetry(),
        metrics=lambda: b"",
        config=api_config(),
        on_startup=start,
        on_shutdown=stop,
    )
    inbox = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    outbox: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return inbox.pop(0)

    async def send(message: dict[str, Any]) -> None:
        outbox.append(message)

    logging.disable(logging.CRITICAL)
    try:
        await api({"type": "lifespan"}, receive, send)
    finally:
        logging.disable(logging.NOTSET)
    assert seen == ["start"]
    assert [m["type"] for m in outbox] == ["lifespan.startup.complete", "lifespan.shutdown.failed"]


async def test_websockets_are_closed() -> None:
    outbox: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: dict[str, Any]) -> None:
        outbox.append(message)

    await client().api({"type": "websocket", "path": "/"}, receive, send)
    assert outbox[0]["type"] == "websocket.close"
