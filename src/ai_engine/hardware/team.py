"""A team of native threads that costs nothing while idle and wakes in microseconds.

Owns the helper threads and how they wait. Each helper is a Python thread inside one ctypes call (no GIL) of the native
loop below; Python starts and joins it and never runs on it. Does not own what the threads run.

Waiting is by a 32-bit word: spin on it for a bounded time, then futex. A thread that is about to sleep first counts
itself in `sleepers`; a thread that changes a word does so before it reads `sleepers`. Both are sequentially
consistent, and futex compares the word again, so no wake-up is lost.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ai_engine.ports.errors import ConfigError

SPIN_US = 50.0

# The control block, in 64-bit words: 0 generation (i32), 16 sleepers (i32), 32 stop, function, syscall, spin cycles,
# size; from byte 512 on one 128-byte line per thread: done generation (i32), +8 argument.
_GENERATION, _SLEEPERS, _PLAIN, _LINES, _LINE = 0, 128, 256, 512, 128

_IR = """
target triple = "%(triple)s"
%(declare)s

define internal i64 @cycles() alwaysinline {
  %%c = %(cycles)s
  ret i64 %%c
}

; Return once *word != old. Spin, then sleep.
define internal void @wait(ptr %%team, ptr %%word, i32 %%old) noinline {
entry:
  %%start = call i64 @cycles()
  %%limit_at = getelementptr i8, ptr %%team, i64 272
  %%limit = load i64, ptr %%limit_at
  %%sleepers = getelementptr i8, ptr %%team, i64 128
  br label %%check
check:
  %%now = load atomic i32, ptr %%word acquire, align 4
  %%same = icmp eq i32 %%now, %%old
  br i1 %%same, label %%again, label %%done
again:
  %%c = call i64 @cycles()
  %%spent = sub i64 %%c, %%start
  %%early = icmp slt i64 %%spent, %%limit
  br i1 %%early, label %%spin, label %%sleep
spin:
  %(pause)s
  br label %%check
sleep:
  %%up = atomicrmw add ptr %%sleepers, i32 1 seq_cst
  %%wide = zext i32 %%old to i64
  call void @futex(ptr %%team, ptr %%word, i64 128, i64 %%wide)
  %%down = atomicrmw sub ptr %%sleepers, i32 1 seq_cst
  br label %%check
done:
  ret void
}

define internal void @futex(ptr %%team, ptr %%word, i64 %%operation, i64 %%value) noinline {
  %%at = getelementptr i8, ptr %%team, i64 264
  %%syscall = load ptr, ptr %%at
  %%address = ptrtoint ptr %%word to i64
  %%r = call i64 (i64, ...) %%syscall(i64 %(futex)d, i64 %%address, i64 %%operation, i64 %%value, i64 0, i64 0, i64 0)
  ret void
}

; Store a new value, then wake who sleeps on it.
define internal void @publish(ptr %%team, ptr %%word, i32 %%value) noinline {
  store atomic i32 %%value, ptr %%word seq_cst, align 4
  %%sleepers_at = getelementptr i8, ptr %%team, i64 128
  %%sleepers = load atomic i32, ptr %%sleepers_at seq_cst, align 4
  %%some = icmp ne i32 %%sleepers, 0
  br i1 %%some, label %%wake, label %%done
wake:
  call void @futex(ptr %%team, ptr %%word, i64 129, i64 2147483647)
  br label %%done
done:
  ret void
}

define internal void @work(ptr %%team, ptr %%line) {
  %%function_at = getelementptr i8, ptr %%team, i64 256
  %%function = load ptr, ptr %%function_at
  %%argument_at = getelementptr i8, ptr %%line, i64 8
  %%argument = load ptr, ptr %%argument_at
  call void %%function(ptr %%argument)
  ret void
}

; A helper: wait for each next generation, work, say so; until the function is null.
define void @team_helper(ptr %%team, i64 %%thread) {
entry:
  %%offset = mul i64 %%thread, 128
  %%from = add i64 %%offset, 512
  %%line = getelementptr i8, ptr %%team, i64 %%from
  %%first = load i32, ptr %%line
  br label %%next
next:
  %%seen = phi i32 [ %%first, %%entry ], [ %%now, %%run ]
  call void @wait(ptr %%team, ptr %%team, i32 %%seen)
  %%now = load atomic i32, ptr %%team acquire, align 4
  %%function_at = getelementptr i8, ptr %%team, i64 256
  %%function = load ptr, ptr %%function_at
  %%stop = icmp eq ptr %%function, null
  br i1 %%stop, label %%done, label %%run
run:
  call void @work(ptr %%team, ptr %%line)
  call void @publish(ptr %%team, ptr %%line, i32 %%now)
  br label %%next
done:
  ret void
}

; The caller is thread 0: start a generation, work, wait for the others.
define void @team_run(ptr %%team, i64 %%size) {
entry:
  %%old = load i32, ptr %%team
  %%new = add i32 %%old, 1
  call void @publish(ptr %%team, ptr %%team, i32 %%new)
  %%function_at = getelementptr i8, ptr %%team, i64 256
  %%function = load ptr, ptr %%function_at
  %%stop = icmp eq ptr %%function, null
  br i1 %%stop, label %%done, label %%run
run:
  %%mine = getelementptr i8, ptr %%team, i64 512
  call void @work(ptr %%team, ptr %%mine)
  br label %%others
others:
  %%t = phi i64 [ 1, %%run ], [ %%t1, %%other ]
  %%more = icmp slt i64 %%t, %%size
  br i1 %%more, label %%other, label %%done
other:
  %%offset = mul i64 %%t, 128
  %%from = add i64 %%offset, 512
  %%line = getelementptr i8, ptr %%team, i64 %%from
  call void @wait(ptr %%team, ptr %%line, i32 %%old)
  %%t1 = add i64 %%t, 1
  br label %%others
done:
  ret void
}
"""

_X86 = {
    "declare": "declare void @llvm.x86.sse2.pause()\ndeclare i64 @llvm.readcyclecounter()",
    "cycles": "call i64 @llvm.readcyclecounter()",
    "pause": "call void @llvm.x86.sse2.pause()",
    "futex": 202,
}
_ARM = {
    "declare": "declare void @llvm.aarch64.hint(i32)\ndeclare i64 @llvm.readsteadycounter()",
    "cycles": "call i64 @llvm.readsteadycounter()",
    "pause": "call void @llvm.aarch64.hint(i32 1)",  # yield
    "futex": 98,
}


def _native() -> tuple[Any, int, int]:
    """Compile the loop: (what keeps it alive, address of team_helper, address of team_run)."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    arm = platform.machine() in ("aarch64", "arm64")
    text = _IR % {**(_ARM if arm else _X86), "triple": llvm.get_process_triple()}
    machine = llvm.Target.from_default_triple().create_target_machine(opt=1)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(text), machine)
    engine.finalize_object()
    return engine, int(engine.get_function_address("team_helper")), int(engine.get_function_address("team_run"))


class NativeTeam:
    """See ports.hardware.ThreadTeam. Not for use from two threads at once."""

    def __init__(self, size: int, spin_us: float = SPIN_US) -> None:
        assert size >= 1, size
        self._size = size
        self._engine, helper, run = _native()
        raw = np.zeros(_LINES + size * _LINE + _LINE, np.uint8)
        start = -raw.ctypes.data % _LINE
        self._block: npt.NDArray[np.uint8] = raw[start : start + _LINES + size * _LINE]
        self._address = int(self._block.ctypes.data)
        words = self._block.view(np.uint64)
        self._plain = words[_PLAIN // 8 : _PLAIN // 8 + 3]  # function, syscall, spin cycles
        self._arguments = words[_LINES // 8 + 1 :: _LINE // 8]
        self._plain[1] = ctypes.cast(ctypes.CDLL(None).syscall, ctypes.c_void_p).value or 0
        if size > len(os.sched_getaffinity(0)):
            spin_us = 0.0  # who spins may keep the awaited one off the core
        self._plain[2] = int(spin_us * _cycles_per_us())
        self._run = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(run)
        native_helper = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(helper)
        threads = [
            threading.Thread(
                target=native_helper, args=(self._address, thread), name=f"ai-engine-team-{thread}", daemon=True
            )
            for thread in range(1, size)
        ]
        started: list[threading.Thread] = []
        # also at interpreter exit: helpers leave native code before their memory goes
        self._stop = weakref.finalize(self, _stop, self._run, self._address, self._plain, started, (self._engine, raw))
        try:
            for thread in threads:
                thread.start()
                started.append(thread)
        except RuntimeError:
            self.close()
            raise ConfigError(
                f"the system lets {len(started) + 1} threads run, {size} were asked for; lower --threads",
                param="threads",
            ) from None

    @property
    def size(self) -> int:
        return self._size

    def run(self, function: int, args: Sequence[int]) -> None:
        assert len(args) == self._size, (len(args), self._size)
        assert function != 0
        assert self._stop.alive, "team is closed"
        self._plain[0] = function
        self._arguments[:] = args
        self._run(self._address, self._size)

    def close(self) -> None:
        self._stop()


def _stop(run: Any, address: int, plain: Any, threads: list[threading.Thread], keep: object) -> None:
    plain[0] = 0  # a null function ends the helpers
    run(address, 0)
    for thread in threads:
        thread.join()
    del keep


def _cycles_per_us() -> float:
    """Rate of the counter that the loop reads, near enough for a spin limit."""
    if platform.machine() in ("aarch64", "arm64"):
        return 25.0  # between the 24 MHz and 50 MHz that are common
    return 2500.0
