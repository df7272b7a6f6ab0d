"""Who gets in and how far: every route, every key, every limit, as a client sees it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from ai_engine.api.app import ADMIN_ROUTES, METRICS_ROUTES, OPEN_ROUTES, ROUTES
from ai_engine.api.keys import Key, Keys, digest_of, write_keys
from ai_engine.api.limits import Limiter
from ai_engine.ports.errors import Overloaded
from ai_engine.ports.telemetry import RequestRefused
from ai_engine.testing import HANG, MemoryTelemetry, ScriptedServing, VirtualClock, answer
from tests.unit.api.doors import client
from tests.unit.api.test_transport import code_of

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


def keys_of(folder: Path, *entries: Key) -> Keys:
    """A keys file; the key of each entry is its name twice ("aa")."""
    path = folder / "keys.json"
    named = [Key(**{f: getattr(e, f) for f in e.__struct_fields__} | {"sha256": digest_of(2 * e.name.encode())})
             for e in entries]  # fmt: skip
    write_keys(path, named)
    return Keys(path)


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {2 * name}"}


def target(route: str) -> str:
    return "/v1" + route.replace("{", "").replace("}", "")


# --- routes ---


def test_the_routes_that_need_no_key_are_these() -> None:
    """A new open route is a decision that somebody takes here."""
    health, console = {"/livez", "/readyz", "/health"}, {"/console", "/console/{id}"}  # the console's files, no data
    assert health | console == OPEN_ROUTES
    assert set(ROUTES) >= OPEN_ROUTES | ADMIN_ROUTES
    assert set(METRICS_ROUTES) == health | {"/metrics"}


@pytest.mark.parametrize("route", sorted(ROUTES))
async def test_every_route_denies_by_default(route: str, tmp_path: Path) -> None:
    door = client(keys=keys_of(tmp_path, Key(name="a")))
    for method in (*ROUTES[route], "HEAD", "PUT", "BREW"):
        for headers in ({}, bearer("b"), {"x-api-key": "b"}, {"authorization": "Basic YWE6YWE="}):
            reply = await door(method, target(route), None, headers)
            if route in OPEN_ROUTES:
                assert reply.status in (200, 404, 405)
            else:
                assert reply.status == 401
                assert reply.headers["www-authenticate"] == "Bearer"
                assert method == "HEAD" or "API key" in reply.json()["error"]["message"]


@pytest.mark.parametrize("route", sorted(ADMIN_ROUTES))
async def test_what_tells_of_everybody_needs_an_admin(route: str, tmp_path: Path) -> None:
    door = client(keys=keys_of(tmp_path, Key(name="a"), Key(name="r", admin=True)))
    assert code_of(await door("GET", target(route), None, bearer("a")), 403) == "permission_denied"
    assert (await door("GET", target(route), None, bearer("r"))).status == 200


async def test_a_path_that_is_not_there_tells_nobody_without_a_key(tmp_path: Path) -> None:
    door = client(keys=keys_of(tmp_path, Key(name="a")))
    assert code_of(await door("GET", "/v1/nothing"), 401) == "invalid_api_key"
    assert code_of(await door("GET", "/v1/nothing", None, bearer("a")), 404) == "not_found"


async def test_the_listener_for_scrapers_has_metrics_and_health_only() -> None:
    door = client(routes=METRICS_ROUTES)
    for route in ROUTES:
        reply = await door("GET", target(route))
        assert reply.status == (200 if route in METRICS_ROUTES else 404), route


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer aa"},
        {"authorization": "bearer aa"},
        {"authorization": "BEARER   aa "},
        {"x-api-key": "aa"},
        {"X-Api-Key": " aa "},
    ],
)
async def test_ways_to_send_a_key(headers: dict[str, str], tmp_path: Path) -> None:
    assert (await client(keys=keys_of(tmp_path, Key(name="a")))("GET", "/v1/models", None, headers)).status == 200


async def test_a_key_beyond_ascii(tmp_path: Path) -> None:
    """A client's library sends UTF-8 or Latin-1; this client's headers are bytes as Latin-1."""
    door = client(keys=Keys(admin_key="schlüssel"))
    for sent in ("schlüssel", "schlüssel".encode().decode("latin-1")):
        assert (await door("GET", "/v1/models", None, {"authorization": f"Bearer {sent}"})).status == 200
    assert (await door("GET", "/v1/models", None, {"authorization": "Bearer schlussel"})).status == 401


# --- what a key makes of a request ---


async def test_the_key_goes_down_with_the_request(tmp_path: Path) -> None:
    serving = ScriptedServing()
    door = client(serving, keys=keys_of(tmp_path, Key(name="a", weight=2.5, priority=7), Key(name="b")))
    await door("POST", CHAT, BODY, bearer("a"))
    await door("POST", CHAT, {**BODY, "priority": 3}, bearer("b"))
    one, other = serving.requests
    assert (one.tenant, one.weight, one.priority) == ("a", 2.5, 7)
    assert (other.tenant, other.weight, other.priority) == ("b", 1.0, 3)
    assert one.cache_scope != other.cache_scope


async def test_a_salt_makes_the_shared_prefixes_fewer_and_never_another_key_s(tmp_path: Path) -> None:
    serving = ScriptedServing()
    door = client(serving, keys=keys_of(tmp_path, Key(name="a"), Key(name="b"), Key(name="c", shared_prefix="a")))
    for name in "abc":
        for salt in (None, "s", "t", "a", "key:b"):
            await door("POST", CHAT, {**BODY, "cache_salt": salt}, bearer(name))
    assert len({request.cache_scope for request in serving.requests}) == 15
    await door("POST", CHAT, {**BODY, "cache_salt": "s"}, bearer("a"))
    assert serving.requests[-1].cache_scope == serving.requests[1].cache_scope


async def test_nobody_but_an_admin_goes_first(tmp_path: Path) -> None:
    serving = ScriptedServing()
    keys = keys_of(tmp_path, Key(name="a", priority=5), Key(name="s", strict=True), Key(name="r", admin=True))
    door = client(serving, keys=keys)
    reply = await door("POST", CHAT, {**BODY, "priority": -1000}, bearer("a"))
    assert serving.requests[-1].priority == 5
    assert "priority: found -1000" in reply.json()["warnings"][0]
    await door("POST", CHAT, {**BODY, "priority": -1000}, bearer("r"))
    assert serving.requests[-1].priority == -1000
    reply = await door("POST", CHAT, {**BODY, "priority": -1}, bearer("s"))
    assert code_of(reply, 400) == "unsupported_parameter"
    assert reply.json()["error"]["param"] == "priority"


async def test_a_strict_key_gets_errors_instead_of_warnings(tmp_path: Path) -> None:
    door = client(keys=keys_of(tmp_path, Key(name="a"), Key(name="s", strict=True)))
    lenient = await door("POST", CHAT, {**BODY, "tempreature": 1}, bearer("a"))
    assert lenient.json()["warnings"] == ["tempreature: unknown field, ignored."]
    strict = await door("POST", CHAT, {**BODY, "tempreature": 1}, bearer("s"))
    assert code_of(strict, 400) == "unsupported_parameter"
    assert strict.json()["error"]["param"] == "tempreature"
    assert code_of(await client(strict=True)("POST", CHAT, {**BODY, "x": 1}), 400) == "unsupported_parameter"


async def test_models_of_a_key(tmp_path: Path) -> None:
    keys = keys_of(
        tmp_path, Key(name="a", models=["gpt-4o"]), Key(name="b", models=["other"]), Key(name="c", models=["m"])
    )
    door = client(keys=keys)
    listed = {name: (await door("GET", "/v1/models", None, bearer(name))).json()["data"] for name in "abc"}
    assert [[model["id"] for model in listed[name]] for name in "abc"] == [["gpt-4o"], [], ["m", "org/name", "gpt-4o"]]
    for name, model, status in (("a", "gpt-4o", 200), ("a", "m", 404), ("b", "m", 404), ("c", "gpt-4o", 200)):
        chat = await door("POST", CHAT, {**BODY, "model": model}, bearer(name))
        one = await door("GET", f"/v1/models/{model}", None, bearer(name))
        assert (chat.status, one.status) == (status, status)
        if status == 404:
            assert {code_of(chat, 404), code_of(one, 404)} == {"model_not_found"}
    unknown = await door("POST", CHAT, {**BODY, "model": "nothing"}, bearer("b"))
    assert code_of(unknown, 404) == "model_not_found"


# --- limits ---


async def test_a_key_s_limits_are_429_with_numbers_and_nobody_else_s(tmp_path: Path) -> None:
    clock, telemetry = VirtualClock(), MemoryTelemetry()
    keys = keys_of(tmp_path, Key(name="a", requests_per_minute=2, tokens_per_minute=10_000), Key(name="b"))
    door = client(keys=keys, clock=clock, telemetry=telemetry)
    first = await door("POST", CHAT, BODY, bearer("a"))
    assert first.status == 200
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-reset-requests"] == "30.000s"
    assert int(first.headers["x-ratelimit-remaining-tokens"]) < 10_000
    assert (await door("POST", CHAT, b"{", bearer("a"))).status == 400, "it counts"
    reply = await door("POST", CHAT, BODY, bearer("a"))
    assert code_of(reply, 429, details=True) == "rate_limit_exceeded"
    assert reply.headers["retry-after"] == "30"
    assert reply.headers["x-ratelimit-remaining-requests"] == "0"
    assert reply.json()["error"]["details"] == {
        "limit": "requests_per_minute", "max": 2, "remaining": 0, "reset_s": 30.0
    }  # fmt: skip
    assert [event.reason for event in telemetry.of(RequestRefused)] == ["rate_limit_exceeded"]
    assert (await door("GET", "/v1/models", None, bearer("a"))).status == 200, "only work is limited"
    assert (await door("POST", CHAT, BODY, bearer("b"))).status == 200
    clock.advance(30)
    assert (await door("POST", CHAT, BODY, bearer("a"))).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_are_settled_by_what_was_used(stream: bool, tmp_path: Path) -> None:
    limiter = Limiter(VirtualClock())
    key = Key(name="a", tokens_per_minute=1000)
    door = client(keys=keys_of(tmp_path, key), limiter=limiter)
    reply = await door("POST", CHAT, {**BODY, "max_tokens": 200, "stream": stream, "n": 2}, bearer("a"))
    assert reply.status == 200
    left = int(dict(limiter.of(key).headers())[b"x-ratelimit-remaining-tokens"])
    prompt = len("Huser\nHiE\nHassistant\n")  # a byte a token, and three special ones
    assert 1000 - left == prompt + 2 * len("Hello")


async def test_tokens_of_a_refused_request_are_given_back(tmp_path: Path) -> None:
    limiter = Limiter(VirtualClock())
    key = Key(name="a", tokens_per_minute=1000)
    door = client(ScriptedServing(refusal=Overloaded("full")), keys=keys_of(tmp_path, key), limiter=limiter)
    assert (await door("POST", CHAT, BODY, bearer("a"))).status == 503
    assert dict(limiter.of(key).headers())[b"x-ratelimit-remaining-tokens"] == b"1000"


async def test_too_many_tokens_are_a_429(tmp_path: Path) -> None:
    door = client(keys=keys_of(tmp_path, Key(name="a", tokens_per_minute=300)))
    assert (await door("POST", CHAT, {**BODY, "max_tokens": 100}, bearer("a"))).status == 200
    reply = await door("POST", CHAT, {**BODY, "max_tokens": 300, "stream": True}, bearer("a"))
    assert code_of(reply, 429, details=True) == "rate_limit_exceeded"
    details = reply.json()["error"]["details"]
    assert details["limit"] == "tokens_per_minute"
    assert details["requested"] > 256


@pytest.mark.parametrize("leaves", [False, True])
async def test_requests_at_once_are_counted_until_they_end(leaves: bool, tmp_path: Path) -> None:
    serving = ScriptedServing(lambda r: [answer(r, b"ab")[0], HANG])
    door = client(serving, keys=keys_of(tmp_path, Key(name="a", concurrent=1)))
    hang_up = asyncio.Event()
    first = asyncio.create_task(door("POST", CHAT, BODY, bearer("a"), hang_up=hang_up))
    await asyncio.sleep(0.01)
    reply = await door("POST", CHAT, BODY, bearer("a"))
    assert code_of(reply, 429, details=True) == "rate_limit_exceeded"
    assert reply.json()["error"]["details"]["limit"] == "concurrent"
    if leaves:
        hang_up.set()
    else:
        await serving.cancel(serving.requests[0].request_id)
    await first
    again = asyncio.create_task(door("POST", CHAT, BODY, bearer("a"), hang_up=hang_up))
    await asyncio.sleep(0.01)
    assert len(serving.requests) == 2
    hang_up.set()
    await again


async def test_a_key_taken_out_stops_new_requests_and_not_those_that_run(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    class Slow(ScriptedServing):
        async def submit(self, request: Any) -> Any:
            async def chunks() -> Any:
                first, second = answer(request, b"ab")
                yield first
                await go_on.wait()
                yield second

            return chunks()

    keys = keys_of(tmp_path, Key(name="a", concurrent=5))
    door = client(Slow(), keys=keys)
    running = asyncio.create_task(door("POST", CHAT, {**BODY, "stream": True}, bearer("a")))
    await asyncio.sleep(0.01)
    write_keys(tmp_path / "keys.json", [])
    assert keys.reload()
    assert code_of(await door("POST", CHAT, BODY, bearer("a")), 401) == "invalid_api_key"
    go_on.set()
    assert (await running).text() == "ab"


# --- overload ---


async def test_the_server_s_overload_is_a_503_with_the_estimated_wait() -> None:
    reply = await client(ScriptedServing(refusal=Overloaded("the queue is full", retry_after_s=7.25))).chat()
    assert code_of(reply, 503, details=True) == "server_overloaded"
    assert reply.headers["retry-after"] == "8"
    assert reply.json()["error"]["details"] == {"estimated_wait_s": 7.25}
    assert reply.json()["error"]["type"] == "server_error"


# --- time ---


@pytest.mark.parametrize(("asked", "limit_s"), [(None, 60.0), ("5", 5.0), ("0.5", 0.5), ("600", 60.0)])
async def test_a_client_may_shorten_its_time(asked: str | None, limit_s: float) -> None:
    serving = ScriptedServing()
    door = client(serving, request_timeout_s=60.0)
    await door("POST", CHAT, BODY, {"x-request-timeout": asked} if asked else {})
    assert serving.requests[0].timeout_s == limit_s


@pytest.mark.parametrize("asked", ["0", "-1", "soon", "nan", "inf", "1e999"])
async def test_a_time_that_is_none_is_refused(asked: str) -> None:
    reply = await client()("POST", CHAT, BODY, {"x-request-timeout": asked})
    assert code_of(reply, 400) == "invalid_value"
    assert reply.json()["error"]["param"] == "x-request-timeout"


async def test_a_client_that_never_reads_is_cut_off() -> None:
    serving = ScriptedServing(lambda r: [*answer(r, b"abc")[:2], HANG])
    aborted: list[bool] = []

    async def stuck(message: dict[str, Any]) -> None:
        if message.get("body"):
            await asyncio.sleep(60)

    door = client(serving, write_timeout_s=0.02)
    inner = door.api.__call__

    async def with_abort(scope: Any, receive: Any, send: Any) -> None:
        connection = {"abort": lambda: aborted.append(True), "is_closing": lambda: False}
        scope["extensions"] = {"connection": connection}
        await inner(scope, receive, send)

    door.api = with_abort  # type: ignore[assignment]
    with pytest.raises(AssertionError, match="not ended"):
        await door.chat(stream=True, sending=stuck)
    assert aborted == [True]
    assert serving.cancelled
    assert serving.open_requests == 0


# --- pages in browsers ---


async def test_pages_of_other_sites_may_not_use_an_open_server() -> None:
    """A POST without a preflight is sent before anybody asks: it must do nothing."""
    serving = ScriptedServing()
    door = client(serving)
    raw = json.dumps(BODY).encode()
    for origin in ("https://evil.example", "null", "http://127.0.0.1:9999"):
        reply = await door("POST", CHAT, raw, {"origin": origin, "host": "127.0.0.1:8000"})
        assert code_of(reply, 403) == "permission_denied"
    assert serving.requests == []
    own = {"origin": "http://127.0.0.1:8000", "host": "127.0.0.1:8000"}
    assert (await door("POST", CHAT, raw, own)).status == 200
    for allowed in ("https://a.example", "*"):
        door = client(cors_origins=(allowed,))
        assert (await door("POST", CHAT, raw, {"origin": "https://a.example", "host": "x"})).status == 200


async def test_every_header_that_a_page_needs_is_exposed(tmp_path: Path) -> None:
    keys = keys_of(tmp_path, Key(name="a", requests_per_minute=5, tokens_per_minute=5000))
    door = client(keys=keys, cors_origins=("https://a.example",))
    reply = await door("POST", CHAT, {**BODY, "stream": True}, bearer("a") | {"origin": "https://a.example"})
    exposed = set(reply.headers["access-control-expose-headers"].split(", "))
    assert {name for name in reply.headers if name.startswith("x-ratelimit")} <= exposed
    assert {"x-request-id", "x-ai-trace-id", "retry-after", "x-should-retry"} <= exposed


# --- names in errors ---


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_an_error_names_the_field_that_was_sent(field: str) -> None:
    long = await client()("POST", CHAT, {"messages": BODY["messages"], field: 9999})
    assert code_of(long, 400) == "context_length_exceeded"
    assert f"lower {field}." in long.json()["error"]["message"]
    none = await client()("POST", "/v1/completions", {"prompt": "Hi", field: 0})
    assert none.json()["error"]["param"] == field
    assert none.json()["error"]["message"].startswith(f"{field}: found 0")


async def test_a_post_that_is_sent_again_does_no_harm() -> None:
    """An SDK repeats a POST when its connection broke: what it left is cancelled, and the same seed says the same."""
    serving = ScriptedServing(lambda r: [HANG] if len(serving.requests) == 1 else answer(r, b"ok"))
    door, hang_up = client(serving), asyncio.Event()
    headers = {"idempotency-key": "stainless-python-retry-1"}
    first = asyncio.create_task(door("POST", CHAT, {**BODY, "seed": 1}, headers, hang_up=hang_up))
    await asyncio.sleep(0.01)
    hang_up.set()
    await first
    assert (await door("POST", CHAT, {**BODY, "seed": 1}, headers)).status == 200
    one, other = serving.requests
    assert one.request_id != other.request_id
    assert one.params == other.params
    assert serving.open_requests == 0
