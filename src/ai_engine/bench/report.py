"""How results leave: a table for the terminal, JSON with the machine's identity, SVG files beside it."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ai_engine.bench.host import identity
from ai_engine.ports.errors import ConfigError


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns padded to their widest cell: the first to the left, others to the right."""
    cells = [list(head), *([cell(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = []
    for row in cells:
        first, *rest = zip(row, widths, strict=True)
        lines.append("  ".join([first[0].ljust(first[1]), *(text.rjust(w) for text, w in rest)]).rstrip())
    return "\n".join(lines)


def cell(value: Any) -> str:
    """Three significant digits for a float, '-' for what is not there."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


class Report:
    """Collects one command's result; `finish` prints and writes it.

    ``out`` is a folder for NAME.json and NAME-*.svg (None: no files); ``as_json`` prints the JSON instead of tables.
    """

    def __init__(self, name: str, out: Path | None = None, as_json: bool = False) -> None:
        self.name, self.out, self.as_json = name, out, as_json
        self.plots: dict[str, str] = {}
        self._texts: list[str] = []
        if out is not None:
            try:
                out.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"--out {out}: {error}; name a folder that can be written", param="out") from None

    def say(self, text: str) -> None:
        """A line or a table, at once; to standard error when standard output is to be JSON."""
        stream = sys.stderr if self.as_json else sys.stdout
        stream.write(text + "\n")
        stream.flush()

    def table(self, title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.say(f"\n{title}\n{table(head, rows)}")

    def plot(self, name: str, svg: str) -> None:
        self.plots[name] = svg

    def finish(self, result: Mapping[str, Any]) -> None:
        whole = plain({"when": time.strftime("%Y-%m-%d"), "machine": identity(), **result})
        text = msgspec.json.format(msgspec.json.encode(whole), indent=1).decode() + "\n"
        if self.out is not None:
            written = [self.out / f"{self.name}.json", *(self.out / f"{self.name}-{name}.svg" for name in self.plots)]
            for path, content in zip(written, [text, *self.plots.values()], strict=True):
                path.write_text(content, encoding="utf-8")
            self.say("written: " + ", ".join(str(path) for path in written))
        if self.as_json:
            sys.stdout.write(text)


def plain(value: Any) -> Any:
    """The same with keys as text, floats to six digits, and null for what is not a number: JSON that anybody reads."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if hasattr(value, "__dataclass_fields__"):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return value


def file_name(text: str) -> str:
    """A name for a file from a model's name or path: 'org/name' -> 'org-name', '/a/b.gguf' -> 'b'."""
    if text.lower().endswith(".gguf"):
        text = Path(text).stem
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-") or "model"


class Deadline:
    """The bound on a command's time. Rounds ask `passed` before they start; children get `left_s` as their timeout."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes

    @property
    def left_s(self) -> float:
        return max(1.0, self._end - time.monotonic())

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self._end
