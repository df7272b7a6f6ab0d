"""The thread team: every thread runs, idle costs nothing, closing and interpreter exit are clean."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from ai_engine.hardware.team import NativeTeam
from ai_engine.ports.errors import ConfigError

_LIBC = ctypes.CDLL(None)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_runs_on_every_thread(size: int) -> None:
    team = NativeTeam(size)
    assert team.size == size
    increment = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_add_one)  # Python as the native function: takes the GIL
    out = np.zeros(size, np.int64)
    for _ in range(50):
        team.run(ctypes.cast(increment, ctypes.c_void_p).value or 0, [out.ctypes.data + 8 * i for i in range(size)])
    np.testing.assert_array_equal(out, 50)
    time.sleep(0.002)
    team.run(ctypes.cast(increment, ctypes.c_void_p).value or 0, [out.ctypes.data + 8 * i for i in range(size)])
    np.testing.assert_array_equal(out, 51)
    team.close()
    team.close()
    with pytest.raises(AssertionError):
        team.run(1, [0] * size)


def test_a_team_that_the_system_refuses_leaves_no_thread_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    before, start = threading.active_count(), threading.Thread.start

    def refuse_the_fifth(thread: threading.Thread) -> None:
        if thread.name == "ai-engine-team-5":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_the_fifth)
    with pytest.raises(ConfigError, match="lets 5 threads run, 8 were asked for; lower --threads"):
        NativeTeam(8)
    assert threading.active_count() == before


def _add_one(address: int) -> None:
    ctypes.cast(address, ctypes.POINTER(ctypes.c_int64))[0] += 1


def test_idle_team_uses_no_cpu() -> None:
    team = NativeTeam(4)
    time.sleep(0.02)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.02
    names = {t.name for t in threading.enumerate()}
    assert "ai-engine-team-3" in names
    team.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("ai-engine-team")]


@pytest.mark.parametrize("ending", ["", "team.close()", "del team", "raise SystemExit(0)"])
def test_interpreter_exit_is_clean(ending: str) -> None:
    code = f"from ai_engine.hardware.team import NativeTeam; team = NativeTeam(3); {ending}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
