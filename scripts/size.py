"""Prints the lines of code of each room beside the design's mirror. A mirror, not a gate."""

from __future__ import annotations

import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "src" / "ai_engine"
MIRROR = {
    "ports": 500,
    "contracts": 1200,
    "(top level)": 700,
    "hardware": 600,
    "kernels": 2500,
    "runtime": 2800,
    "data": 1300,
    "serving": 1500,
    "observe": 1500,
    "api": 1800,
    "testing": 500,
    "bench": 2000,
}
HOT = (
    "serving/scheduler.py",
    "serving/loop.py",
    "runtime/step.py",
    "runtime/kv.py",
    "runtime/engine.py",
    "runtime/models/llama.py",
)


def code_lines(path: Path) -> int:
    """Lines that hold code: no blank lines, comments or docstrings."""
    lines: set[int] = set()
    previous = tokenize.NEWLINE
    skip = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    with path.open("rb") as source:
        for token in tokenize.tokenize(io.BytesIO(source.read()).readline):
            if token.type in skip or token.type == tokenize.ENCODING:
                previous = token.type if token.type != tokenize.COMMENT else previous
                continue
            is_doc = token.type == tokenize.STRING and previous in (
                tokenize.NEWLINE,
                tokenize.INDENT,
                tokenize.NL,
                tokenize.ENCODING,
                tokenize.DEDENT,
            )
            if not is_doc:
                lines.update(range(token.start[0], token.end[0] + 1))
            previous = token.type
    return len(lines)


def main() -> int:
    rooms: dict[str, int] = dict.fromkeys(MIRROR, 0)
    for path in sorted(ROOT.rglob("*.py")):
        inside = path.relative_to(ROOT)
        room = inside.parts[0] if len(inside.parts) > 1 else "(top level)"
        rooms[room] = rooms.get(room, 0) + code_lines(path)
    out = [f"{'room':<12} {'code':>6} {'mirror':>7}"]
    out += [f"{room:<12} {n:>6} {MIRROR.get(room, 0):>7}" for room, n in rooms.items()]
    out.append(f"{'all':<12} {sum(rooms.values()):>6} {sum(MIRROR.values()):>7}")
    hot = sum(code_lines(ROOT / name) for name in HOT if (ROOT / name).exists())
    out.append(f"hot path {hot} (mirror 1500): {', '.join(HOT)}")
    sys.stdout.write("\n".join(out) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
