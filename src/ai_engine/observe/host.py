"""Processes and the machine at the moment of a scrape: CPU, memory by category, threads, descriptors.

Owns reading /proc, and the sum of the engine's memory: every mapping of the worker belongs to one category, so that the
categories add up to what the kernel says the process takes (its proportional set size). Facts that cannot be read are
left out. Does not own families (catalogue.py).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np

Sample = tuple[str, float, tuple[str, ...]]
MEMORY_EVERY_S: Final = 5.0
"""Reading a process's mappings takes the kernel milliseconds for each gigabyte: not at every scrape."""
_TICK: Final = os.sysconf("SC_CLK_TCK")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_PAGEMAP_READ: Final = 1 << 20
_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ *(.*)")


class Host:
    """A metrics probe. ``processes`` gives name -> pid at the moment of asking; ``quota_cores`` and
    ``available_bytes`` are the machine's."""

    def __init__(self, processes: Callable[[], Mapping[str, int]], quota_cores: float, root: Path = Path("/")) -> None:
        self._processes, self._quota, self._root = processes, quota_cores, root
        self._cpu = self._read_cpu()

    def __call__(self) -> Iterator[Sample]:
        yield "l1_host_cpu_quota_cores", self._quota, ()
        yield from self._cores()
        available = _fields(self._root / "proc/meminfo").get("MemAvailable")
        if available is not None:
            yield "l1_host_memory_available_bytes", available, ()
        throttled = _throttled_s(self._root)
        if throttled is not None:
            yield "l1_host_cpu_throttled_seconds", throttled, ()
        for name, pid in self._processes().items():
            yield from _process(self._root / f"proc/{pid}", name)

    def _cores(self) -> Iterator[Sample]:
        before, self._cpu = self._cpu, self._read_cpu()
        spent = [now - then for now, then in zip(self._cpu, before, strict=True)]
        total = sum(spent)
        if total > 0:  # user nice system idle iowait irq softirq steal
            yield "l1_host_cpu_utilisation_ratio", 1 - (spent[3] + spent[4]) / total, ()
            yield "l1_host_cpu_steal_ratio", spent[7] / total, ()

    def _read_cpu(self) -> list[int]:
        try:
            line = (self._root / "proc/stat").read_text().split("\n", 1)[0]
            return [int(field) for field in line.split()[1:9]]
        except (OSError, ValueError):
            return [0] * 8


def _process(folder: Path, name: str) -> Iterator[Sample]:
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        yield "l1_host_process_cpu_seconds", (int(fields[11]) + int(fields[12])) / _TICK, (name,)
        yield "l1_host_process_threads", int(fields[17]), (name,)
        yield "l1_host_process_resident_bytes", int(fields[21]) * _PAGE, (name,)
        yield "l1_host_process_open_fds", sum(1 for _ in (folder / "fd").iterdir()), (name,)
    except (OSError, ValueError, IndexError):
        return


def _throttled_s(root: Path) -> float | None:
    try:
        text = (root / "sys/fs/cgroup/cpu.stat").read_text()
    except OSError:
        return None
    found = re.search(r"^throttled_usec (\d+)", text, re.M)
    return int(found[1]) / 1e6 if found else None


def _fields(path: Path) -> dict[str, int]:
    """Bytes by name of a file of "Name: N kB" lines."""
    try:
        rows = re.findall(r"^(\w+): +(\d+) kB", path.read_text(), re.M)
    except OSError:
        return {}
    return {name: int(value) * 1024 for name, value in rows}


def pss_bytes(pid: int) -> int:
    """The process's proportional set size; 0 when it cannot be read."""
    return _fields(Path(f"/proc/{pid}/smaps_rollup")).get("Pss", 0)


def memory_by_category(pid: int, arenas: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Proportional bytes of a process: those of each arena (name -> address, bytes), of "code" (files mapped), "shared"
    (memory files, the rings among them) and "heap" (everything else). {} when it cannot be read."""
    found = dict.fromkeys([*arenas, "code", "shared", "heap"], 0)
    kind = "heap"
    try:
        with open(f"/proc/{pid}/smaps", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("Pss:"):
                    found[kind] += int(line.split()[1]) * 1024
                elif (mapping := _MAPPING.match(line)) is not None:
                    kind = _kind(mapping[1])
        for name, (address, nbytes) in arenas.items():
            found[name] = min(_resident(pid, address, nbytes), found["heap"])
            found["heap"] -= found[name]
    except (OSError, ValueError):
        return {}
    return found


def _kind(file: str) -> str:
    if file.startswith(("/memfd:", "/dev/shm")):
        return "shared"
    return "code" if file.startswith("/") else "heap"


def _resident(pid: int, address: int, nbytes: int) -> int:
    """Bytes of the range that are in memory (/proc/pid/pagemap: a word a page, the highest bit says so). The kernel
    joins neighbouring mappings, so what it says of whole mappings does not tell arenas apart."""
    first, last = address // _PAGE, -(-(address + nbytes) // _PAGE)
    present = 0
    with open(f"/proc/{pid}/pagemap", "rb", buffering=0) as words:
        words.seek(first * 8)
        left = (last - first) * 8
        while left > 0 and (data := words.read(min(left, _PAGEMAP_READ))):
            present += int((np.frombuffer(data, np.uint64) >> np.uint64(63)).sum())
            left -= len(data)
    return present * _PAGE


class EngineMemory:
    """A metrics probe: the engine's process by category. ``arenas`` names "weights", "kv", "activations" and
    "workspace"; the KV arena's resident bytes are told apart by the states of its pages."""

    def __init__(self, pages: Callable[[], tuple[int, int, int, float]], now_s: Callable[[], float] = time.monotonic):
        self._pages = pages  # (held, cached, total, share of held room that no token fills)
        self._now_s = now_s
        self._read_s = float("-inf")
        self._found: dict[str, int] = {}
        self.pid = 0
        self.arenas: Mapping[str, tuple[int, int]] = {}

    def attach(self, pid: int, arenas: Mapping[str, tuple[int, int]]) -> None:
        self.pid, self.arenas, self._read_s = pid, arenas, float("-inf")

    def categories(self) -> dict[str, int]:
        """Bytes by category; they add up to the process's proportional set size."""
        found = memory_by_category(self.pid, self.arenas) if self.pid else {}
        if "kv" in found:
            held, cached, total, unfilled = self._pages()
            resident = found.pop("kv")
            page = self.arenas["kv"][1] / total if total else 0.0
            in_use = min(resident, round(held * page))
            kept = min(resident - in_use, round(cached * page))
            gaps = round(in_use * unfilled)
            found |= {
                "kv in use": in_use - gaps, "kv fragmentation": gaps, "kv cached": kept,
                "kv free": resident - in_use - kept,
            }  # fmt: skip
        return found

    def __call__(self) -> Iterator[Sample]:
        if self._now_s() >= self._read_s + MEMORY_EVERY_S:
            self._read_s = self._now_s()
            self._found = self.categories()
            total = pss_bytes(self.pid) if self.pid else 0
            if total:
                yield "l1_host_process_pss_bytes", total, ("engine",)
        for category, nbytes in self._found.items():
            yield "l3_model_memory_bytes", nbytes, (category,)
