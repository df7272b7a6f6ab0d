"""Api: the ASGI application. Finds the route, checks the key, and turns whatever happens into a response.

Owns routing, keys, CORS, the error shape on every status, drain and lifespan. Does not own the routes' work (rest.py)
nor bodies and ids (http.py). Paths work with and without /v1, and with a trailing slash.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ai_engine.api import console, messages, openapi, responses, rest, texts, traces
from ai_engine.api.crowd import Crowd
from ai_engine.api.http import ApiConfig, ClientDisconnected, Exchange, Header, Receive, Scope, Send
from ai_engine.api.keys import ANYBODY, Key, Keys
from ai_engine.api.limits import Limiter
from ai_engine.api.message_events import message_error
from ai_engine.api.openai_types import ServedModel
from ai_engine.api.replies import encode, error_reply
from ai_engine.ports.clock import Clock, SystemClock
from ai_engine.ports.errors import (
    AiEngineError,
    InvalidApiKey,
    MethodNotAllowed,
    NotFound,
    Overloaded,
    PermissionDenied,
    RateLimitExceeded,
    RequestTimeout,
    ShuttingDown,
)
from ai_engine.ports.serving import Serving
from ai_engine.ports.telemetry import HttpDone, HttpStarted, RequestRefused, RequestTraced, Telemetry
from ai_engine.ports.text import TextService
from ai_engine.ports.trace import PagesReader, TraceReader

logger = logging.getLogger(__name__)

Handler = Callable[[rest.Door, Exchange], Awaitable[None]]
Route = tuple[str, Mapping[str, Handler]]

ROUTES: dict[str, Mapping[str, Handler]] = {
    "/chat/completions": {"POST": rest.chat_completions},
    "/completions": {"POST": rest.completions},
    "/models": {"GET": rest.models},
    "/models/{id}": {"GET": rest.model_by_id},
    "/livez": {"GET": rest.livez},
    "/readyz": {"GET": rest.readyz},
    "/health": {"GET": rest.readyz},
    "/metrics": {"GET": rest.metrics},
    "/messages": {"POST": messages.messages},
    "/messages/count_tokens": {"POST": messages.count_tokens},
    "/responses": {"POST": responses.responses},
    "/responses/input_tokens": {"POST": responses.input_tokens},
    "/tokenize": {"POST": texts.tokenize},
    "/tokenizer_info": {"GET": texts.tokenizer_info},
    "/detokenize": {"POST": texts.detokenize},
    "/apply-template": {"POST": texts.apply_template},
    "/openapi.json": {"GET": openapi.openapi},
    "/traces": {"GET": traces.recent},
    "/traces/{id}": {"GET": traces.one},
    "/console": {"GET": console.page},
    "/console/{id}": {"GET": console.asset},
    "/console/kv": {"GET": console.kv},
}
OPEN_ROUTES = frozenset({"/livez", "/readyz", "/health", "/console", "/console/{id}"})
"""Routes that never need a key: health, and the console's files. Every other one does, once there are keys."""
ADMIN_ROUTES = frozenset({"/metrics", "/console/kv"})
"""Routes that need an admin's key: they tell of everybody."""
ERROR_SHAPES = dict.fromkeys(("/messages", "/messages/count_tokens"), message_error)
"""Routes whose clients know another shape of error than OpenAI's."""
GENERATING_ROUTES = frozenset({"/chat/completions", "/completions", "/messages", "/responses"})
"""Routes whose requests wait and run in serving."""
METRICS_ROUTES = {route: ROUTES[route] for route in ("/livez", "/readyz", "/health", "/metrics")}
"""All that a listener for scrapers (``--metrics-addr``) answers; it asks for no key."""
EXPOSED_HEADERS = (
    b"x-request-id, x-ai-trace-id, retry-after, x-should-retry, x-ratelimit-limit-requests, "
    b"x-ratelimit-remaining-requests, x-ratelimit-reset-requests, x-ratelimit-limit-tokens, "
    b"x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)
_METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE", "PATCH"})
_GONE = 499


class Api:
    """``Api(...)`` is what uvicorn runs. ``draining = True`` makes it refuse new work while the rest finishes."""

    def __init__(
        self,
        *,
        serving: Serving,
        text: TextService,
        model: ServedModel,
        telemetry: Telemetry,
        metrics: Callable[[], bytes],
        config: ApiConfig,
        keys: Keys | None = None,
        limiter: Limiter | None = None,
        routes: Mapping[str, Mapping[str, Handler]] = ROUTES,
        traces: TraceReader | None = None,
        pages: PagesReader | None = None,
        clock: Clock | None = None,
        entropy: Callable[[int], bytes] = os.urandom,
        on_startup: Callable[[], Awaitable[None]] | None = None,
        on_shutdown: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.config = config
        self._clock = clock or SystemClock()
        self._keys = keys or Keys()
        self._limiter = limiter or Limiter(self._clock)
        self._routes = routes
        self._crowd = Crowd(config.max_open_requests, self._clock, config.retry_after_s)
        self._telemetry = telemetry
        self._door = rest.Door(serving, text, model, self._clock, metrics, entropy)
        self._door.emit = telemetry.emit
        if traces is not None:
            self._door.traces = traces
        if pages is not None:
            self._door.pages = pages
        self._on_startup = on_startup
        self._on_shutdown = on_shutdown

    @property
    def draining(self) -> bool:
        return self._door.draining

    @draining.setter
    def draining(self, value: bool) -> None:
        self._door.draining = value

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1003})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_s = self._clock.now_s()
        self._telemetry.emit(HttpStarted())
        exchange = Exchange(scope, receive, send, self.config, self._door.entropy, self._clock.now_s)
        route, handlers = _find(exchange, self._routes)
        try:
            await self._dispatch(exchange, route, handlers)
        except ClientDisconnected:
            if not exchange.ended:
                exchange.status = _GONE
        except AiEngineError as error:
            await self._error(exchange, route, error)
        except Exception:  # the last line of defence: a response in shape, and the cause in the log
            logger.exception("%s %s failed, trace %s", exchange.method, route, exchange.trace_id)
            await self._error(
                exchange, route, AiEngineError("internal error; the server's log has it under this trace id")
            )
        finally:
            if exchange.quota is not None:
                exchange.quota.leave()
        method = exchange.method if exchange.method in _METHODS else "other"
        ended_s = self._clock.now_s()
        self._telemetry.emit(
            HttpDone(
                route=route,
                method=method,
                status=exchange.status,
                seconds=ended_s - started_s,
                malformed_trace=exchange.malformed_trace,
                request_bytes=exchange.request_bytes,
                response_bytes=exchange.response_bytes,
                checked=exchange.body_read,
            )
        )
        if exchange.requests or (exchange.status >= 400 and route not in OPEN_ROUTES):
            self._telemetry.emit(self._traced(exchange, route, started_s, ended_s))

    def _traced(self, exchange: Exchange, route: str, started_s: float, ended_s: float) -> RequestTraced:
        """To the last byte, if the answer is whole: what is tidied up afterwards is nobody's wait."""
        if exchange.ended:
            ended_s = exchange.sent_s
        return RequestTraced(
            context=exchange.context,
            route=route,
            method=exchange.method,
            status=exchange.status,
            started_s=started_s,
            ended_s=ended_s,
            wall_s=self._clock.wall_s() - (self._clock.now_s() - started_s),
            parts=exchange.parts.end(ended_s),
            key=exchange.key.name,
            requests=exchange.requests,
            attributes=exchange.attributes,
            response_bytes=exchange.response_bytes,
        )

    async def _dispatch(self, exchange: Exchange, route: str, handlers: Mapping[str, Handler]) -> None:
        exchange.common += self._cors(exchange)
        if exchange.method == "OPTIONS" and handlers:
            await exchange.reply(204, b"", headers=self._preflight(exchange, handlers))
            return
        if route not in OPEN_ROUTES:
            exchange.key = self.authenticate(exchange)
        if route in ADMIN_ROUTES and not exchange.key.admin:
            raise PermissionDenied(f"{route} needs an admin's key. Fix: ask the operator for one.")
        if not handlers:
            raise NotFound(f"There is nothing at {exchange.path[:200]!r}. Fix: check the path; the API is under /v1.")
        handler = handlers.get("GET" if exchange.method == "HEAD" else exchange.method)
        if handler is None:
            exchange.common.append((b"allow", _allow(handlers)))
            raise MethodNotAllowed(
                f"{exchange.method[:20]} is not allowed at {exchange.path[:200]!r}. Fix: use {' or '.join(handlers)}."
            )
        if exchange.method == "POST":
            exchange.quota = self._limiter.of(exchange.key)
            exchange.quota.enter()
        if route not in GENERATING_ROUTES:
            await handler(self._door, exchange)
            return
        with self._crowd.enter():
            await handler(self._door, exchange)

    def authenticate(self, exchange: Exchange) -> Key:
        """Who asks. Raises InvalidApiKey, and PermissionDenied for a page of another site where nobody needs a key.
        The one place where keys are looked at."""
        if self._keys.open:
            self._refuse_foreign_pages(exchange)
            return ANYBODY
        scheme, _, found = exchange.headers.get(b"authorization", b"").strip().partition(b" ")
        presented = found if scheme.lower() == b"bearer" else exchange.headers.get(b"x-api-key", b"")
        try:
            if not presented.strip():
                raise InvalidApiKey("There is no API key. Fix: send 'Authorization: Bearer <key>'.")
            return self._keys.find(presented.strip(), self._clock.wall_s())
        except InvalidApiKey:
            exchange.common.append((b"www-authenticate", b"Bearer"))
            raise

    def _refuse_foreign_pages(self, exchange: Exchange) -> None:
        """A web page may send a POST to this machine's loopback unseen, and needs no answer to do harm."""
        origin, allowed = exchange.header(b"origin"), self.config.cors_origins
        here = origin.partition("://")[2] == exchange.header(b"host")
        if exchange.method == "POST" and origin and not here and origin not in allowed and "*" not in allowed:
            raise PermissionDenied(
                f"Pages of {origin[:200]!r} may not use this server. Fix: start it with --cors-origin {origin[:200]}."
            )

    async def _error(self, exchange: Exchange, route: str, error: AiEngineError) -> None:
        """The error as a response, unless one has been started already (a handler's own bug, which is logged)."""
        if exchange.started:
            return
        at_the_door = isinstance(error, Overloaded) and not exchange.body_read  # serving counts what it refuses itself
        if at_the_door or isinstance(error, RateLimitExceeded):
            self._telemetry.emit(RequestRefused(error.code))
        headers: list[Header] = []
        if error.retryable:
            wait_s = self.config.retry_after_s if error.retry_after_s is None else error.retry_after_s
            headers.append((b"retry-after", b"%d" % max(1, math.ceil(wait_s))))
        elif error.http_status >= 500:
            headers.append((b"x-should-retry", b"false"))
        if isinstance(error, ShuttingDown | RequestTimeout) and (b"connection", b"close") not in exchange.common:
            headers.append((b"connection", b"close"))
        await exchange.reply(error.http_status, encode(ERROR_SHAPES.get(route, error_reply)(error)), headers=headers)

    # --- CORS: off unless origins are configured; then only those, never a reflection of any ---

    def _cors(self, exchange: Exchange) -> list[Header]:
        origins = self.config.cors_origins
        if not origins:
            return []
        origin = exchange.header(b"origin")
        headers = [(b"vary", b"origin")]
        if origin and (origin in origins or "*" in origins):
            allowed = origin if origin in origins else "*"
            headers.append((b"access-control-allow-origin", allowed.encode("latin-1")))
            headers.append((b"access-control-expose-headers", EXPOSED_HEADERS))
        return headers

    def _preflight(self, exchange: Exchange, handlers: Mapping[str, Handler]) -> list[Header]:
        headers: list[Header] = [(b"allow", _allow(handlers))]
        if any(name == b"access-control-allow-origin" for name, _ in exchange.common):
            asked = exchange.headers.get(b"access-control-request-headers", b"authorization, content-type")
            headers += [
                (b"access-control-allow-methods", _allow(handlers)),
                (b"access-control-allow-headers", asked),
                (b"access-control-max-age", b"600"),
            ]
        return headers

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message: dict[str, Any] = await receive()
            stage = "startup" if message["type"] == "lifespan.startup" else "shutdown"
            hook = self._on_startup if stage == "startup" else self._on_shutdown
            try:
                if hook is not None:
                    await hook()
            except Exception as error:  # the server reports it and stops
                logger.exception("%s failed", stage)
                await send({"type": f"lifespan.{stage}.failed", "message": str(error)})
                return
            await send({"type": f"lifespan.{stage}.complete"})
            if stage == "shutdown":
                return


def _find(exchange: Exchange, routes: Mapping[str, Mapping[str, Handler]]) -> Route:
    """The route's name (a bounded set: it labels metrics) and its handlers; sets path parameters."""
    parts = [part for part in exchange.path.split("/") if part]
    if parts[:1] == ["v1"]:
        parts = parts[1:]
    path = "/" + "/".join(parts)
    if path in routes and "{" not in path:
        return path, routes[path]
    route = f"/{parts[0]}/{{id}}" if len(parts) > 1 else ""
    if route in routes:
        exchange.params = {"id": "/".join(parts[1:])}
        return route, routes[route]
    return "unmatched", {}


def _allow(handlers: Mapping[str, Handler]) -> bytes:
    methods = [*handlers, *(["HEAD"] if "GET" in handlers else []), "OPTIONS"]
    return ", ".join(methods).encode()
