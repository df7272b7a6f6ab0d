"""A weight file in memory: mapped privately and read-only. Owns views, page advice and the watch over the file's size;
knows no format."""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ai_engine.ports.errors import ModelFileError


class MappedFile:
    """Raises ModelFileError unless ``path`` is a readable regular file of at least ``min_bytes``."""

    def __init__(self, path: Path, min_bytes: int) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            raise ModelFileError(f"{path}: cannot be opened: {error}; check the path and its permissions") from error
        try:
            info = os.fstat(self._fd)
            if not stat.S_ISREG(info.st_mode):
                raise ModelFileError(f"{path}: not a regular file; give a .gguf file or a folder with safetensors")
            self.size = info.st_size
            if self.size < min_bytes:
                raise ModelFileError(f"{path}: byte {self.size}: the file ends inside its header; fetch it again")
            self.map = mmap.mmap(self._fd, self.size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        except BaseException:
            os.close(self._fd)
            raise

    def view(self, start: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """A read-only view. Raises ModelFileError if the file was shortened meanwhile: touching a page past its end
        would kill the process."""
        assert 0 <= start <= start + nbytes <= self.size, (start, nbytes, self.size)
        if os.fstat(self._fd).st_size < self.size:
            raise ModelFileError(f"{self.path}: was shortened while in use; restore it and start again")
        return np.frombuffer(self.map, np.uint8, nbytes, start)

    def drop(self, start: int, nbytes: int) -> None:
        """Give the pages of this range back to the system; a later read maps them again."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        self.map.madvise(mmap.MADV_DONTNEED, first, start + nbytes - first)

    def close(self) -> None:
        """Unmap; views that callers still hold keep the mapping alive until they go. Idempotent."""
        with contextlib.suppress(BufferError):
            self.map.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
