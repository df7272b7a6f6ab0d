"""The worker process: serving, runtime, kernels and hardware behind a Unix socket.

    python -m ai_engine.worker < job

Reads one Job, a line, from standard input; writes one Report to standard output when it is ready or has failed, then
serves its one gateway until that is gone. The gateway keeps the other end of standard input open: when it closes,
however the gateway ended, the worker leaves, in the middle of loading too. Progress bars go to standard error. Owns the
process; app.py owns the wiring.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import BinaryIO

import msgspec

from ai_engine.config import EngineConfig, ServeConfig
from ai_engine.ports.errors import AiEngineError
from ai_engine.ports.runtime import Limits, MemoryReport
from ai_engine.ports.trace import TraceSource
from ai_engine.progress import ProgressBar

LEAVE_S = 10.0
"""A worker that serves sees its socket close and leaves in order; after this long it is made to."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    socket: str
    engine: EngineConfig
    serve: ServeConfig
    eos_ids: frozenset[int]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Ready (limits and memory, and what its traces are read from) or failed (code and message)."""

    limits: Limits | None = None
    memory: MemoryReport | None = None
    trace: TraceSource | None = None
    code: str = ""
    message: str = ""


def read_job(stdin: int) -> Job:
    """The first line. Reads the descriptor itself: a buffered reader would be locked by the thread that watches it."""
    line = b""
    while not line.endswith(b"\n") and (part := os.read(stdin, 1 << 16)):
        line += part
    return msgspec.json.decode(line, type=Job)


def leave_with_gateway(stdin: int, serving: threading.Event) -> None:
    """Wait until the gateway's end of standard input closes; then end this process and the compilers it started."""
    while os.read(stdin, 1 << 16):
        pass
    if serving.is_set():
        time.sleep(LEAVE_S)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


async def run(job: Job, out: BinaryIO, serving: threading.Event) -> None:
    from ai_engine import app
    from ai_engine.data.models import open_model
    from ai_engine.wire import TelemetryClient, serve_serving

    telemetry = TelemetryClient()
    with contextlib.closing(open_model(Path(job.path))) as file:
        runtime = await asyncio.to_thread(app.build_runtime, file, job.engine, ProgressBar(), telemetry, job.eos_ids)
    del file  # its token lists
    app.give_back()
    grammars = app.build_grammars(Path(job.path), runtime.limits, job.eos_ids)
    events = app.recorded(runtime, telemetry)
    service = app.build_service(runtime, job.engine, job.serve, events, job.eos_ids, grammars)
    await service.start()
    try:
        report = Report(limits=runtime.limits, memory=runtime.memory, trace=app.trace_source(runtime))
        out.write(msgspec.json.encode(report) + b"\n")
        out.flush()
        serving.set()
        await serve_serving(job.socket, service, telemetry=telemetry)
    finally:
        await service.close()
        runtime.close()


def main() -> int:
    """Exit status 0 when the gateway has gone, 1 when the engine could not be built."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the gateway's to handle: it drains, then hangs up
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing but the report may reach the gateway's pipe
    job, serving = read_job(0), threading.Event()
    threading.Thread(target=leave_with_gateway, args=(0, serving), name="leave-with-gateway", daemon=True).start()
    try:
        asyncio.run(run(job, out, serving))
    except AiEngineError as error:
        with contextlib.suppress(BrokenPipeError):
            out.write(msgspec.json.encode(Report(code=error.code, message=error.message)) + b"\n")
            out.flush()
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
