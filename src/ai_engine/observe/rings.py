"""Reading the threads' rings from outside: raw copies of what is new, and the count of what was overwritten before.

Owns the mapping and the bookkeeping of one reader. Does not own the layout (ports.trace.RingsHandle) nor what the
entries mean (steps.py). The writers never wait and do not know that anybody reads.
"""

from __future__ import annotations

import mmap
import os

import numpy as np
import numpy.typing as npt

from ai_engine.ports.trace import RingsHandle

ENTRY_WORDS = 4
Entries = npt.NDArray[np.int64]
"""i64[n, 4]: step, slot, start cycles, end cycles."""


class RingReader:
    """Raises OSError when the rings cannot be mapped. What was written before it began is not read."""

    def __init__(self, handle: RingsHandle) -> None:
        self._entries = handle.entries
        stride = handle.header_bytes + handle.entries * 8 * ENTRY_WORDS
        fd = os.open(handle.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(fd, handle.num_threads * stride, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        words = np.frombuffer(self._map, np.int64).reshape(handle.num_threads, stride // 8)
        self._written = words[:, 0]
        self._rings = words[:, handle.header_bytes // 8 :].reshape(handle.num_threads, handle.entries, ENTRY_WORDS)
        self._read: list[int] = self._written.tolist()
        self._lost = 0

    @property
    def num_threads(self) -> int:
        return len(self._read)

    @property
    def lost(self) -> int:
        """Entries overwritten before they were read: those passed over, and those that the next read will pass over."""
        behind = (self._written - np.array(self._read, np.int64) - self._entries).clip(0)
        return self._lost + int(behind.sum())

    def read_new(self) -> list[tuple[int, Entries]]:
        """(thread, its entries since the last call, oldest first) of each thread that has any."""
        found = []
        for thread, done in enumerate(self._read):
            end = int(self._written[thread])
            if end == done:
                continue
            first = max(done, end - self._entries)
            at = np.arange(first, end) % self._entries
            entries = self._rings[thread][at]
            # Meanwhile the writer went on; it may be inside the entry after its last.
            safe = max(first, int(self._written[thread]) + 1 - self._entries)
            self._lost += min(safe, end) - done
            self._read[thread] = end
            if safe < end:
                found.append((thread, entries[safe - first :]))
        return found

    def close(self) -> None:
        del self._written, self._rings
        self._map.close()
