"""Arenas are aligned, zeroed, writable, and end."""

from __future__ import annotations

import pytest

from ai_engine.hardware.arena import HUGE_PAGE_BYTES, MappedArena


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 3 << 20])
def test_arena(nbytes: int) -> None:
    arena = MappedArena(nbytes)
    assert arena.address % HUGE_PAGE_BYTES == 0
    assert arena.nbytes == len(arena.data) == nbytes
    assert not arena.data.any()
    arena.data[:] = 7
    if nbytes:
        assert arena.data.ctypes.data == arena.address
    arena.close()
    with pytest.raises(AssertionError, match="closed"):
        _ = arena.data
    arena.close()


def test_closing_while_a_view_lives_is_safe() -> None:
    arena = MappedArena(1 << 20)
    view = arena.data[10:20]
    arena.close()
    view[:] = 1
    assert view.sum() == 10
