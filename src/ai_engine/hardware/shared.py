"""Bytes that other processes of this user may look at. Owns the mapping and its name; not what the bytes say."""

from __future__ import annotations

import mmap
import os
import weakref
from typing import Self


class SharedBytes(mmap.mmap):
    """``nbytes`` (at least 1) zeros in memory. While this object lives, whoever opens ``path`` can map the same
    bytes."""

    path: str

    def __new__(cls, nbytes: int) -> Self:
        file = os.memfd_create("ai-engine-shared", os.MFD_CLOEXEC)
        os.ftruncate(file, nbytes)
        self = super().__new__(cls, file, nbytes)
        self.path = f"/proc/{os.getpid()}/fd/{file}"
        weakref.finalize(self, os.close, file)
        return self
