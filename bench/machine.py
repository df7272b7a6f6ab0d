"""The machine's identity beside every result, and the memory of processes. Owns no measurement of its own."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import msgspec

from ai_engine.hardware.machine import read_machine
from ai_engine.version import __version__

RESULTS = Path(__file__).resolve().parent / "results"


def identity() -> dict[str, Any]:
    """What a reader must know to compare: CPU, cores, memory, kernel, Python, our version, load at the time."""
    machine = read_machine()
    facts: dict[str, Any] = msgspec.to_builtins(machine)
    keep = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni", "asimddp")
    facts["cpu_features"] = [name for name in machine.cpu_features if name in keep or "vnni" in name]
    facts |= {"system": platform.platform(), "python": platform.python_version(), "ai_engine": __version__}
    facts["load_1m"] = round(os.getloadavg()[0], 2)
    return facts


def save(name: str, result: dict[str, Any]) -> Path:
    """Writes bench/results/NAME.json with the identity."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    whole = {"when": time.strftime("%Y-%m-%d"), "machine": identity(), **result}
    path.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def stolen_s() -> float:
    """Seconds that the hypervisor gave to others while a core of ours wanted to run, all cores, since boot; 0 where the
    system does not say."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return 0.0
    return int(fields[8]) / os.sysconf("SC_CLK_TCK") if len(fields) > 8 else 0.0


def pss_bytes(pids: list[int]) -> int:
    """Proportional set size of the processes together."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total
