"""Anonymous memory, 2 MiB aligned, backed by huge pages where the kernel grants them.

Owns mappings and their end. Does not own what lies in them.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import numpy.typing as npt

HUGE_PAGE_BYTES = 2 << 20


class MappedArena:
    """See ports.hardware.Arena. Pages are touched by whoever writes them first."""

    def __init__(self, nbytes: int, huge_pages: bool = True) -> None:
        assert nbytes >= 0, nbytes
        self._nbytes = nbytes
        self._map: mmap.mmap | None = mmap.mmap(
            -1, nbytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        if huge_pages and nbytes >= HUGE_PAGE_BYTES:
            with contextlib.suppress(OSError):  # kernels without transparent huge pages
                self._map.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(self._map, np.uint8)
        self._address = -(-whole.ctypes.data // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        start = self._address - whole.ctypes.data
        self._data: npt.NDArray[np.uint8] | None = whole[start : start + nbytes]

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        assert self._data is not None, "arena is closed"
        return self._data

    @property
    def address(self) -> int:
        return self._address

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def close(self) -> None:
        """Give the memory back now. Views of ``data`` that are still alive read zeros; the mapping, addresses without
        memory, ends with the last of them."""
        self._data = None
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)
            with contextlib.suppress(BufferError):
                self._map.close()
            self._map = None
