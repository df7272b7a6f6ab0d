"""Api: the ASGI application. Finds the route, checks the key, and turns whatever happens into a response.

Owns routing, keys, CORS, the error shape on every status, drain and lifespan. Does not own the routes' work (rest.py)
nor bodies and ids (http.py). Paths work with and without /v1, and with a trailing slash.
"""

from __future__ import annotations

import hmac
import logging
import math
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ai_engine.api import rest
from ai_engine.api.http import ApiConfig, Caller, ClientDisconnected, Exchange, Header, Receive, Scope, Send
from ai_engine.api.openai_types import ServedModel
from ai_engine.api.replies import encode, error_reply
from ai_engine.ports.clock import Clock, SystemClock
from ai_engine.ports.errors import (
    AiEngineError,
    InvalidApiKey,
    MethodNotAllowed,
    NotFound,
    RequestTimeout,
    ShuttingDown,
)
from ai_engine.ports.serving import Serving
from ai_engine.ports.telemetry import HttpDone, Telemetry
from ai_engine.ports.text import TextService

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
}
OPEN_ROUTES = frozenset({"/livez", "/readyz", "/health"})
"""Routes that never need a key."""
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
        config: ApiConfig | None = None,
        clock: Clock | None = None,
        entropy: Callable[[int], bytes] = os.urandom,
        on_startup: Callable[[], Awaitable[None]] | None = None,
        on_shutdown: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.config = config or ApiConfig()
        self._clock = clock or SystemClock()
        self._telemetry = telemetry
        self._door = rest.Door(serving, text, model, self._clock, metrics, entropy)
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
        exchange = Exchange(scope, receive, send, self.config, self._door.entropy)
        route, handlers = _find(exchange)
        try:
            await self._dispatch(exchange, route, handlers)
        except ClientDisconnected:
            exchange.status = _GONE
        except AiEngineError as error:
            await self._error(exchange, error)
        except Exception:  # the last line of defence: a response in shape, and the cause in the log
            logger.exception("%s %s failed, trace %s", exchange.method, route, exchange.trace_id)
            await self._error(exchange, AiEngineError("internal error; the server's log has it under this trace id"))
        method = exchange.method if exchange.method in _METHODS else "other"
        self._telemetry.emit(HttpDone(route, method, exchange.status, self._clock.now_s() - started_s))

    async def _dispatch(self, exchange: Exchange, route: str, handlers: Mapping[str, Handler]) -> None:
        exchange.common += self._cors(exchange)
        if exchange.method == "OPTIONS" and handlers:
            await exchange.reply(204, b"", headers=self._preflight(exchange, handlers))
            return
        if route not in OPEN_ROUTES:
            exchange.caller = self.authenticate(exchange)
        if not handlers:
            raise NotFound(f"There is nothing at {exchange.path[:200]!r}. Fix: check the path; the API is under /v1.")
        handler = handlers.get("GET" if exchange.method == "HEAD" else exchange.method)
        if handler is None:
            exchange.common.append((b"allow", _allow(handlers)))
            raise MethodNotAllowed(
                f"{exchange.method[:20]} is not allowed at {exchange.path[:200]!r}. Fix: use {' or '.join(handlers)}."
            )
        await handler(self._door, exchange)

    def authenticate(self, exchange: Exchange) -> Caller:
        """Who asks. Raises InvalidApiKey. The one place where keys are looked at."""
        expected = self.config.api_key
        if expected is None:
            return Caller()
        scheme, _, found = exchange.header(b"authorization").partition(" ")
        key = found.strip() if scheme.lower() == "bearer" else exchange.header(b"x-api-key")
        if not hmac.compare_digest(key.encode("latin-1"), expected.encode()):
            exchange.common.append((b"www-authenticate", b"Bearer"))
            what = "The API key is wrong." if key else "There is no API key."
            raise InvalidApiKey(f"{what} Fix: send 'Authorization: Bearer <key>'.")
        return Caller()

    async def _error(self, exchange: Exchange, error: AiEngineError) -> None:
        """The error as a response, unless one has been started already (a handler's own bug, which is logged)."""
        if exchange.started:
            return
        headers: list[Header] = []
        if error.retryable:
            wait_s = self.config.retry_after_s if error.retry_after_s is None else error.retry_after_s
            headers.append((b"retry-after", b"%d" % max(1, math.ceil(wait_s))))
        elif error.http_status >= 500:
            headers.append((b"x-should-retry", b"false"))
        if isinstance(error, ShuttingDown | RequestTimeout) and (b"connection", b"close") not in exchange.common:
            headers.append((b"connection", b"close"))
        await exchange.reply(error.http_status, encode(error_reply(error)), headers=headers)

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
            headers.append((b"access-control-expose-headers", b"x-request-id, x-ai-trace-id, retry-after"))
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


def _find(exchange: Exchange) -> Route:
    """The route's name (a bounded set: it labels metrics) and its handlers; sets path parameters."""
    parts = [part for part in exchange.path.split("/") if part]
    if parts[:1] == ["v1"]:
        parts = parts[1:]
    path = "/" + "/".join(parts)
    if path in ROUTES and "{" not in path:
        return path, ROUTES[path]
    if len(parts) > 1 and parts[0] == "models":
        exchange.params = {"id": "/".join(parts[1:])}
        return "/models/{id}", ROUTES["/models/{id}"]
    return "unmatched", {}


def _allow(handlers: Mapping[str, Handler]) -> bytes:
    methods = [*handlers, *(["HEAD"] if "GET" in handlers else []), "OPTIONS"]
    return ", ".join(methods).encode()
