"""Ordinary memory as an arena. Aligns nothing and gives nothing back by itself."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class PlainArena:
    """Implements ports.hardware.Arena. ``closed`` records that it was."""

    def __init__(self, nbytes: int) -> None:
        self.data: npt.NDArray[np.uint8] = np.zeros(nbytes, np.uint8)
        self.address, self.nbytes = self.data.ctypes.data, nbytes
        self.closed = False

    def close(self) -> None:
        self.closed = True
