"""Results of the scripts here, with the machine's identity; stolen time and memory of processes. Measures nothing."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from ai_engine.bench.host import identity

RESULTS = Path(__file__).resolve().parent / "results"


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
