"""Bytes shared by name: what is written here is read there, and nothing is left open."""

from __future__ import annotations

import gc
import mmap
import os

from ai_engine.hardware.shared import SharedBytes


def test_another_mapping_sees_what_is_written_and_the_name_ends_with_the_object() -> None:
    before = len(os.listdir("/proc/self/fd"))
    cells = SharedBytes(100)
    assert len(cells) == 100
    assert list(bytes(cells)) == [0] * 100
    with open(cells.path, "rb") as file, mmap.mmap(file.fileno(), 100, prot=mmap.PROT_READ) as seen:
        cells[7] = 3
        assert (seen[7], cells[7], seen[8]) == (3, 3, 0)
    path = cells.path
    del cells
    gc.collect()
    assert not os.path.exists(path)
    assert len(os.listdir("/proc/self/fd")) == before
