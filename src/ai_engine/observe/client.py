"""Traces of a running server, or of a file that `trace export --format json` wrote.

Owns how they are fetched. Raises ConfigError with what to change.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from ai_engine.observe.render import chosen_step
from ai_engine.observe.slo import STATES, Slo, Verdict
from ai_engine.observe.traces import Tree
from ai_engine.ports.errors import ConfigError

_TIMEOUT_S = 60.0


def fetch(url: str, key: str, path: str) -> Any:
    """The JSON at ``path`` of the server."""
    return json.loads(_get(url, key, path))


def _get(url: str, key: str, path: str) -> bytes:
    request = urllib.request.Request(url.rstrip("/") + path)
    if key:
        request.add_header("authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
            body: bytes = reply.read()
            return body
    except urllib.error.HTTPError as error:
        with error:
            answer = error.read(4096)
        try:
            message = json.loads(answer)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = answer.decode("utf-8", "replace")[:200]
        raise ConfigError(f"{url} answered {error.code}: {message}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"no server answers at {url}: {error}. Give --url, and --key where it wants one") from None


def slo_states(url: str, key: str, wanted: Slo) -> list[tuple[str, Verdict, float]]:
    """(objective, verdict, burn rate) as the server's /metrics has them."""
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(_get(url, key, "/metrics").decode()):
        for sample in family.samples:
            found[sample.name, sample.labels.get("objective", "")] = sample.value
    verdicts: dict[float, Verdict] = {state: verdict for verdict, state in STATES.items()}  # type: ignore[misc]
    rows = []
    for objective in wanted.objective:
        state = found.get(("ai_engine_l6_slo_state", objective.name))
        if state is None:
            raise ConfigError(f"{url} does not judge {objective.name!r}: start it with --slo and this file")
        burn = found.get(("ai_engine_l6_slo_burn_rate_ratio", objective.name), 0.0)
        rows.append((objective.name, verdicts[state], burn))
    return rows


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
