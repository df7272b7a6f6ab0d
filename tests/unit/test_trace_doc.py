"""docs/trace.md stays true: each file it names exists, and each function it names is defined in that file."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CELL = re.compile(r"^\|(?: *\d+ *\|)? *(`[^|]+`)[^|]*\|", re.M)
NAME = re.compile(r"`([\w/]+?\.py|[\w/]+/)(?: : (\w+))?`")


def test_every_hop_exists() -> None:
    text = (ROOT / "docs" / "trace.md").read_text(encoding="utf-8")
    hops = [name for cell in CELL.findall(text) for name in NAME.findall(cell)]
    assert len(hops) >= 17
    folder = ROOT / "src" / "ai_engine"
    for file, function in hops:
        path = folder / file
        if not path.exists():  # further files of a row stand beside the first
            beside = [(folder / first).parent / file for first, _ in hops]
            path = next(other for other in beside if other.exists())
        assert path.exists(), f"docs/trace.md names {file}"
        if function:
            source = path.read_text(encoding="utf-8")
            assert re.search(rf"\b(?:def|class) {function}\b", source), f"docs/trace.md names {file} : {function}"
