"""The console: a page that shows the server at work. Files are open to all; what they show needs a key.

Owns which files there are and their headers. The page reads the same routes as everybody: /metrics, /traces, /v1; the
one route of its own is the map of the KV pages.
"""

from __future__ import annotations

import functools
import hashlib
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING, Final

from ai_engine.api.replies import encode
from ai_engine.ports.errors import NotFound

if TYPE_CHECKING:
    from ai_engine.api.http import Exchange
    from ai_engine.api.rest import Door

TYPES: Final = {
    ".html": b"text/html; charset=utf-8", ".css": b"text/css; charset=utf-8", ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}  # fmt: skip
POLICY: Final = b"default-src 'self'; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'"
"""Nothing from elsewhere; the plotting library places its parts by style attributes."""


class NoPages:
    """Implements ports.trace.PagesReader where there is no pool."""

    def read(self) -> tuple[int, str]:
        return 0, ""


async def page(door: Door, exchange: Exchange) -> None:
    """GET /console: the page"""
    await _send(exchange, "index.html")


async def asset(door: Door, exchange: Exchange) -> None:
    """GET /console/{id}: its scripts, styles and pictures"""
    await _send(exchange, exchange.params["id"])


async def kv(door: Door, exchange: Exchange) -> None:
    """GET /console/kv: the state of every KV page, a digit each: 0 free, 1 cached, 2 held, 3 shared"""
    page_tokens, states = door.pages.read()
    await exchange.reply(200, encode({"page_tokens": page_tokens, "states": states}))


async def _send(exchange: Exchange, name: str) -> None:
    found = all_files().get(name)
    if found is None:
        raise NotFound(f"The console has no file {name[:80]!r}. Fix: open /console.")
    body, kind, tag = found
    headers = [
        (b"etag", tag), (b"cache-control", b"no-cache"), (b"content-security-policy", POLICY),
        (b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"),
    ]  # fmt: skip
    if exchange.header(b"if-none-match") == tag.decode():
        await exchange.reply(304, b"", headers=headers)
    else:
        await exchange.reply(200, body, content_type=kind, headers=headers)


@functools.cache
def all_files() -> dict[str, tuple[bytes, bytes, bytes]]:
    """(content, type, tag) by name; only these are ever sent."""
    found: dict[str, tuple[bytes, bytes, bytes]] = {}

    def add(folder: Traversable, prefix: str) -> None:
        for item in folder.iterdir():
            kind = TYPES.get("." + item.name.rpartition(".")[2])
            if item.is_dir():
                add(item, f"{prefix}{item.name}/")
            elif kind is not None:
                body = item.read_bytes()
                found[prefix + item.name] = body, kind, b'"%s"' % hashlib.sha256(body).hexdigest()[:32].encode()

    add(files("ai_engine.api") / "console_files", "")
    return found
