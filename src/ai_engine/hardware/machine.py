"""Facts about this machine, as far as this process may use it, from /proc, /sys and the cgroup files.

Owns reading and interpreting them; a fact that cannot be read is 0, "" or absent, never an error. ``root`` is the
directory that stands for "/" (tests use a fixture). Does not own decisions about threads or memory.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from pathlib import Path

from ai_engine.ports.hardware import Machine

# /proc/cpuinfo's names -> LLVM's, where they differ; the others are the same
_X86_NAMES = {
    "avx512_vnni": "avx512vnni",
    "avx_vnni": "avxvnni",
    "avx512_vbmi2": "avx512vbmi2",
    "avx512_bf16": "avx512bf16",
    "avx512_fp16": "avx512fp16",
    "avx512_bitalg": "avx512bitalg",
    "avx512_vpopcntdq": "avx512vpopcntdq",
    "amx_int8": "amx-int8",
    "amx_tile": "amx-tile",
    "amx_bf16": "amx-bf16",
    "sse4_1": "sse4.1",
    "sse4_2": "sse4.2",
    "pni": "sse3",
    "abm": "lzcnt",
    "bmi1": "bmi",
    "cx16": "cx16",
}
_ARM_NAMES = {"asimd": "neon", "asimddp": "dotprod", "asimdhp": "fullfp16"}
_GPU_CLASSES = ("0x0300", "0x0302", "0x0380")  # PCI display controllers


def read_machine(root: Path | str = "/") -> Machine:
    """The machine under ``root``. With another root than "/", the affinity mask is that tree's whole CPU list."""
    base = Path(root)
    name, features, listed = _cpu(_text(base / "proc/cpuinfo"))
    cores = len(os.sched_getaffinity(0)) if base == Path("/") else listed
    total, available = _memory(base)
    caches = _caches(base / "sys/devices/system/cpu/cpu0/cache")
    nodes = [p for p in _children(base / "sys/devices/system/node") if p.name[:4] == "node" and p.name[4:].isdigit()]
    return Machine(
        cpu_name=name,
        cpu_features=features,
        cores=max(1, cores),
        quota_cores=_quota(base),
        memory_total_bytes=total,
        memory_available_bytes=available,
        cache_l1d_bytes=caches.get((1, "Data"), 0),
        cache_l2_bytes=caches.get((2, "Unified"), 0),
        cache_l3_bytes=caches.get((3, "Unified"), 0),
        numa_nodes=max(1, len(nodes)),
        gpus=_gpus(base / "sys/bus/pci/devices"),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _children(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except OSError:
        return []


def _cpu(cpuinfo: str) -> tuple[str, tuple[str, ...], int]:
    """Name, LLVM feature names and number of processors listed."""
    name, flags, count = "", "", 0
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        key, value = key.strip(), value.strip()
        if key == "processor":
            count += 1
        elif key in ("model name", "Model") and not name:
            name = value
        elif key in ("flags", "Features") and not flags:
            flags = value
    names = _ARM_NAMES if "asimd" in flags.split() else _X86_NAMES
    features = tuple(sorted({names.get(flag, flag) for flag in flags.split()}))
    return name or platform.machine(), features, count


def _own_cgroups(root: Path) -> Iterable[tuple[str, Path]]:
    """("v2" | controller, directory) of this process's cgroup and its ancestors, leaf first."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        hierarchy, controllers, path = [*line.split(":", 2), "", ""][:3]
        if hierarchy == "0":
            mounts = [("v2", "")]
        else:
            mounts = [(name, name) for name in controllers.split(",") if name in ("cpu", "memory")]
        for kind, mount in mounts:
            directory = root / "sys/fs/cgroup" / mount
            relative = Path(path.lstrip("/"))
            for part in (relative, *relative.parents):
                yield kind, directory / part


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _quota(root: Path) -> float:
    """Cores' worth of CPU time that the tightest cgroup allows; inf without a quota."""
    best = float("inf")
    for kind, directory in _own_cgroups(root):
        quota: float | None
        period: float | None
        if kind == "v2":
            first, second = (*_text(directory / "cpu.max").split(), "", "")[:2]
            quota, period = _number(first), _number(second)
        else:
            quota = _number(_text(directory / "cpu.cfs_quota_us"))
            period = _number(_text(directory / "cpu.cfs_period_us"))
        if quota and period and quota > 0 and period > 0:
            best = min(best, quota / period)
    return best


def _memory(root: Path) -> tuple[int, int]:
    """Total and available bytes; of machine and cgroups the least."""
    facts = {}
    for line in _text(root / "proc/meminfo").splitlines():
        key, _, value = line.partition(":")
        parts = value.split()
        if parts and parts[0].isdigit():
            facts[key] = int(parts[0]) * 1024
    total, available = facts.get("MemTotal", 0), facts.get("MemAvailable", facts.get("MemFree", 0))
    for kind, directory in _own_cgroups(root):
        if kind == "cpu":
            continue
        names = ("memory.max", "memory.current") if kind == "v2" else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, used = _number(_text(directory / names[0])), _number(_text(directory / names[1])) or 0.0
        if limit is not None and limit < total:
            cached = 0
            for line in _text(directory / "memory.stat").splitlines():
                key, _, value = line.partition(" ")
                if key in ("inactive_file", "total_inactive_file") and value.isdigit():
                    cached = int(value)  # given back under pressure
            total = int(limit)
            available = min(available, max(0, int(limit - used) + cached))
    return total, min(available, total)


def _caches(directory: Path) -> dict[tuple[int, str], int]:
    sizes: dict[tuple[int, str], int] = {}
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    for index in _children(directory):
        level, kind, size = (_text(index / n).strip() for n in ("level", "type", "size"))
        number = size.rstrip("KMG")
        if level.isdigit() and number.isdigit():
            sizes[int(level), kind] = int(number) * units.get(size[len(number) :], 1)
    return sizes


def _gpus(devices: Path) -> tuple[str, ...]:
    """Driver and "vendor:device" of each display controller that has a compute driver bound."""
    found = []
    for device in _children(devices):
        if _text(device / "class").strip()[:6] in _GPU_CLASSES:
            driver = os.path.basename(os.path.realpath(device / "driver")) if (device / "driver").exists() else ""
            if driver in ("nvidia", "amdgpu", "xe", "i915"):
                ids = [_text(device / n).strip().removeprefix("0x") for n in ("vendor", "device")]
                found.append(f"{driver} {ids[0]}:{ids[1]}")
    return tuple(found)
