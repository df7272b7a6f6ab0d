"""`ai-engine serve` as a child process, as an operator sees it, for tests and benchmarks that look from outside.

Owns start, readiness, signals and end of a server, and what /proc tells of processes.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

READY = re.compile(r"ready: (http://\S+?)/v1")


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """`ai-engine serve` as a child process on a free port of the loopback.

    ``wait=False`` returns as soon as it runs: `url` is known, and nobody may listen there yet.
    """

    def __init__(
        self, *args: str, env: dict[str, str] | None = None, timeout_s: float = 120.0, wait: bool = True
    ) -> None:
        self.lines: list[str] = []
        port = 0 if wait else free_port()
        self.url = "" if wait else f"http://127.0.0.1:{port}"
        self._ready = threading.Event()
        started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ai_engine.cli", "serve", *args, "--port", str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            ready = not wait or (self._ready.wait(timeout_s) and bool(self.url))
        except BaseException:  # Ctrl-C while it starts
            self.stop()
            raise
        if not ready:
            self.stop()
            raise AssertionError("the server did not get ready:\n" + "".join(self.lines))
        self.ready_s = time.monotonic() - started

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            found = READY.search(line)
            if found:
                self.url = found[1]
                self._ready.set()
        self._ready.set()

    def pids(self) -> list[int]:
        """The server's process and all below it."""
        return process_tree(self.process.pid)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 30.0) -> int:
        """The exit status, once it has ended and said its last word; killed when that takes too long."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError("the server did not end:\n" + self.output) from None
        finally:
            self._reader.join(10)
        if self.process.stdout is not None and not self._reader.is_alive():
            self.process.stdout.close()
        return code

    def stop(self, timeout_s: float = 30.0) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.wait(timeout_s)

    @property
    def output(self) -> str:
        return "".join(self.lines)


def process_tree(pid: int) -> list[int]:
    """The process and all below it."""
    found, todo = [], [pid]
    while todo:
        found.append(todo.pop())
        for children in Path(f"/proc/{found[-1]}/task").glob("*/children"):  # each thread has its own
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                todo += [int(child) for child in children.read_text().split()]
    return found


def cpu_seconds(pids: Sequence[int]) -> float:
    """User and system time of all threads of the processes since they began."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")
