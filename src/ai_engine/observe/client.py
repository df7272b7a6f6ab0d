"""Traces of a running server, or of a file that `trace export --format json` wrote.

Owns how they are fetched. Raises ConfigError with what to change.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from ai_engine.observe.render import chosen_step
from ai_engine.observe.traces import Tree
from ai_engine.ports.errors import ConfigError

_TIMEOUT_S = 60.0


def fetch(url: str, key: str, path: str) -> Any:
    """The JSON at ``path`` of the server."""
    request = urllib.request.Request(url.rstrip("/") + path)
    if key:
        request.add_header("authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            body = error.read(4096)
        try:
            message = json.loads(body)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = body.decode("utf-8", "replace")[:200]
        raise ConfigError(f"{url} answered {error.code}: {message}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"no server answers at {url}: {error}. Give --url, and --key where it wants one") from None


def load(name: str, url: str, key: str, step: str = "") -> Tree:
    """A trace by its id or by a file's path. ``step``: numbers with commas, "all", "none", or "" for one that is worth
    a look."""
    file = Path(name)
    if file.suffix == ".json" or file.is_file():
        try:
            found: Tree = json.loads(file.read_text(encoding="utf-8"))
            return {**found, "requests": [{**request} for request in found["requests"]]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{name} is no trace: {error}. `ai-engine trace export --format json` writes one"
            ) from None
    if step == "":
        plain = fetch(url, key, f"/traces/{name}")
        chosen = chosen_step(plain["requests"][0])
        if chosen is None:
            return dict(plain)
        step = str(chosen)
    return dict(fetch(url, key, f"/traces/{name}" + ("" if step == "none" else f"?step={step}")))
