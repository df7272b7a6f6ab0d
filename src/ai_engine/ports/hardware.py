"""The hardware port: what the machine has, memory in arenas, a team of threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about this machine as far as the process may use it; unknown is 0 or ""."""

    cpu_name: str
    cpu_features: tuple[str, ...]  # LLVM names, e.g. "avx2", "avx512vnni"
    cores: int  # in the affinity mask
    quota_cores: float  # cgroup CPU quota; inf without one
    memory_total_bytes: int
    memory_available_bytes: int  # cgroup limit respected
    cache_l1d_bytes: int = 0
    cache_l2_bytes: int = 0
    cache_l3_bytes: int = 0
    numa_nodes: int = 1
    gpus: tuple[str, ...] = ()

    @property
    def default_threads(self) -> int:
        """Cores in the affinity mask and cgroup quota, at least 1."""
        return max(1, min(self.cores, int(self.quota_cores) if self.quota_cores < 1e6 else self.cores))


class Arena(Protocol):
    """One anonymous mapping, 2 MiB aligned, huge pages asked for; zeroed. ``data`` is uint8[nbytes]."""

    @property
    def data(self) -> npt.NDArray[np.uint8]: ...

    @property
    def address(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def close(self) -> None: ...


class ThreadTeam(Protocol):
    """``size`` threads; the caller is thread 0. ``run`` calls ``function(args[i])`` on thread i and returns when all
    have returned. Idle helpers spin for a bounded time, then sleep: no CPU when idle."""

    @property
    def size(self) -> int: ...

    def run(self, function: int, args: Sequence[int]) -> None:
        """``function`` is the address of a native ``void f(void*)``; one argument address per thread."""
        ...

    def close(self) -> None: ...
