"""What this machine can do at best, as `ai-engine bench machine` measured it, in a file for whoever draws a roofline.

Owns the figures' names and units and their file. Does not measure (bench/ceilings.py). Whoever needs the figures calls
`load_ceilings()` and hands them down; None means that nobody has measured here, or that the file is another machine's.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

import msgspec

from ai_engine.hardware.machine import read_machine


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """Each map goes from a number of threads to that many threads' rate together."""

    cpu_name: str
    cores: int
    measured_s: float  # Unix time
    target: str  # instruction set of the kernels that measured: avx2, avx512, neon
    read_gb_s: dict[int, float]  # reading memory: 10^9 bytes a second, the median of the rounds' best passes
    fma_gflop_s: dict[int, float]  # f32 fused multiply-adds, two operations each
    dot_gop_s: dict[int, float]  # int8 products and sums, two operations each

    def best(self, figures: dict[int, float], threads: int) -> float:
        """The figure at ``threads``, or at the next lower number that was measured; 0 where there is none."""
        counts = [count for count in figures if count <= threads]
        return figures[max(counts)] if counts else 0.0


def ceilings_path() -> Path:
    """``$AI_ENGINE_CACHE/bench/machine.json`` or ``~/.cache/ai-engine/bench/machine.json``."""
    root = os.environ.get("AI_ENGINE_CACHE")
    base = Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ai-engine"
    return base / "bench" / "machine.json"


def load_ceilings(path: Path | None = None) -> Ceilings | None:
    """The stored figures, if they are of this machine (CPU name and cores agree)."""
    try:
        found = msgspec.json.decode((path or ceilings_path()).read_bytes(), type=Ceilings)
    except (OSError, msgspec.MsgspecError):
        return None
    machine = read_machine()
    return found if (found.cpu_name, found.cores) == (machine.cpu_name, machine.cores) else None


def save_ceilings(ceilings: Ceilings, path: Path | None = None) -> Path:
    """Written whole or not at all."""
    target = path or ceilings_path()
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=".machine-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(ceilings), indent=1) + b"\n")
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    return target
