"""Where a measurement was taken: the machine's identity, and what else the machine did meanwhile.

Owns reading /proc and /sys for that. Does not decide whether a result counts: it is recorded beside it.
"""

from __future__ import annotations

import math
import os
import platform
import time
from pathlib import Path
from typing import Any

import msgspec

from ai_engine.hardware.machine import read_machine
from ai_engine.version import __version__

_TICKS = os.sysconf("SC_CLK_TCK")
_TELLING = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vbmi", "avx512bf16", "amx-int8", "dotprod", "fullfp16")


def identity() -> dict[str, Any]:
    """What a reader must know to compare: CPU, cores, quota, memory, kernel, governor, huge pages, Python, version."""
    machine = read_machine()
    facts: dict[str, Any] = msgspec.to_builtins(machine)
    facts["cpu_features"] = [name for name in machine.cpu_features if name in _TELLING or "vnni" in name]
    facts["quota_cores"] = None if math.isinf(machine.quota_cores) else machine.quota_cores
    return facts | {
        "system": platform.platform(),
        "governor": _text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor") or "unknown",
        "huge_pages": _chosen(_text("/sys/kernel/mm/transparent_hugepage/enabled")),
        "python": platform.python_version(),
        "ai_engine": __version__,
        "load_1m": round(os.getloadavg()[0], 2),
    }


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _chosen(text: str) -> str:
    """The bracketed word of 'always [madvise] never'."""
    return text.partition("[")[2].partition("]")[0] or "unknown"


def machine_cpu(stat: str) -> tuple[float, float]:
    """(busy seconds without steal, stolen seconds) of all cores since boot, from /proc/stat's text."""
    fields = [int(n) for n in stat.splitlines()[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = (*fields, *[0] * 8)[:8]
    return (user + nice + system + irq + softirq) / _TICKS, steal / _TICKS


def own_cpu() -> float:
    """User and system seconds of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class LoadWatch:
    """What the machine did during a measurement: `report` gives shares of all cores' time since the start.

    ``foreign`` is CPU time of processes that are neither this one nor among those whose CPU time the caller adds with
    `count_as_ours` (servers that are still running).
    """

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._busy, self._steal = machine_cpu(_text("/proc/stat") or "cpu 0")
        self._own = own_cpu()
        self._counted = 0.0

    def count_as_ours(self, seconds: float) -> None:
        self._counted += seconds

    def report(self) -> dict[str, float]:
        elapsed = max(time.monotonic() - self._started, 1e-9)
        busy, steal = machine_cpu(_text("/proc/stat") or "cpu 0")
        cores = os.cpu_count() or 1
        ours = own_cpu() - self._own + self._counted
        foreign = max(0.0, busy - self._busy - ours)
        return {
            "seconds": round(elapsed, 1),
            "steal_share": round((steal - self._steal) / elapsed / cores, 4),
            "foreign_share": round(foreign / elapsed / cores, 4),
        }
