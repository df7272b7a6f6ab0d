"""The states of the KV pages, read from the bytes that the engine keeps them in. Owns the mapping; the engine is not
asked and does not know."""

from __future__ import annotations

import mmap
import os

from ai_engine.ports.trace import PagesHandle

_DIGITS = bytes.maketrans(bytes(range(4)), b"0123")


class PageReader:
    """Implements ports.trace.PagesReader: of the engine attached last."""

    def __init__(self) -> None:
        self._handle: PagesHandle | None = None
        self._map: mmap.mmap | None = None

    def attach(self, handle: PagesHandle | None) -> None:
        """Where the states lie now. Bytes that cannot be mapped are no pages."""
        self._handle, self._map = handle, None
        if handle is None:
            return
        try:
            file = os.open(handle.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._map = mmap.mmap(file, handle.num_pages, prot=mmap.PROT_READ)
            finally:
                os.close(file)
        except (OSError, ValueError):
            self._handle = None

    def read(self) -> tuple[int, str]:
        if self._handle is None or self._map is None:
            return 0, ""
        return self._handle.page_tokens, self._map[:].translate(_DIGITS).decode("ascii", "replace")
