"""Wiring: the one file that knows every layer and hands each the ports it needs.

Owns how parts are put together (in one process, or gateway and worker) and the order of start and stop. Layers are
imported inside functions, so that the gateway never loads a compiler and `--help` loads nothing.

    find_model -> open_model -> build_runtime -> Service            the worker's half   (worker.py, or in process)
                             -> ModelText                           the gateway's half
    gateway.py: uvicorn(Gate(Api)); Api -> Relay -> ServingClient | Service
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ai_engine.config import EngineConfig, ServeConfig
from ai_engine.ports.errors import NotReady
from ai_engine.ports.grammar import Grammars
from ai_engine.ports.progress import Progress, no_progress
from ai_engine.ports.runtime import Limits, MemoryReport, Runtime
from ai_engine.ports.serving import Chunk, GenerateRequest, Health, Serving
from ai_engine.ports.telemetry import Event, PhaseDone, Telemetry
from ai_engine.ports.trace import PagesHandle, ProgramInfo, RingsHandle, TraceSource

if TYPE_CHECKING:
    from ai_engine.data.service import ModelText
    from ai_engine.kernels.catalog import Cost
    from ai_engine.kernels.cpu.lang import Target
    from ai_engine.observe.sampled import Roofline
    from ai_engine.ports.kernels import Call, Kernels
    from ai_engine.ports.model import ModelFile, TokenizerData
    from ai_engine.runtime.plan import EngineOptions
    from ai_engine.serving.service import Service


class NoTelemetry:
    """Implements ports.telemetry.Telemetry for in-process use without a metrics page."""

    def emit(self, event: Event) -> None:
        return


# parts


def find_model(name: str, *, offline: bool, progress: Progress) -> Path:
    """The local file or folder of a model name; fetched if it has to be."""
    from ai_engine.data.models import resolve

    return resolve(name, progress=progress, offline=offline)


def build_kernels(config: EngineConfig) -> Kernels:
    """The kernels that the config names, on this machine's threads."""
    if config.kernels == "reference":
        from ai_engine.kernels.reference.backend import ReferenceKernels

        return ReferenceKernels()
    from ai_engine.hardware.machine import read_machine
    from ai_engine.hardware.team import NativeTeam
    from ai_engine.kernels.cpu import registry
    from ai_engine.kernels.cpu.backend import CpuKernels

    machine = read_machine()
    threads = config.threads or machine.default_threads
    kernels = CpuKernels(NativeTeam(threads), cpu_target(config.cpu), owns_team=True)
    kernels.choices = registry.load(kernels.target, machine, threads)
    return kernels


def cpu_target(name: str) -> Target | None:
    """The instruction set of that name; None for the best here."""
    from ai_engine.kernels.cpu.lang import TARGETS

    return None if name == "auto" else TARGETS[name]


def build_runtime(
    file: ModelFile, config: EngineConfig, progress: Progress, telemetry: Telemetry, eos_ids: frozenset[int]
) -> Runtime:
    """Weights packed, kernels ready, pages allocated, shapes warmed up."""
    from ai_engine.hardware.arena import MappedArena
    from ai_engine.hardware.machine import read_machine
    from ai_engine.hardware.shared import SharedBytes
    from ai_engine.ports.clock import SystemClock
    from ai_engine.runtime.engine import build_engine

    kernels = build_kernels(config)
    try:
        return build_engine(
            file,
            kernels,
            MappedArena,
            read_machine().memory_available_bytes,
            SystemClock(),
            engine_options(config, eos_ids),
            progress=phase_timer(progress, telemetry),
            make_page_map=SharedBytes,
        )
    except BaseException:
        kernels.close()
        raise


def engine_options(config: EngineConfig, eos_ids: frozenset[int] = frozenset()) -> EngineOptions:
    from ai_engine.runtime.plan import EngineOptions

    return EngineOptions(
        max_context=config.max_context,
        max_seqs=config.max_seqs,
        max_step_tokens=config.max_step_tokens,
        kv_memory=config.kv_memory,
        kv_type=config.kv_type,
        page_tokens=config.page_tokens,
        eviction=config.eviction,
        prefix_cache=config.prefix_cache,
        approximate_head=config.approximate_head,
        eos_ids=tuple(sorted(eos_ids)),
    )


def build_grammars(path: Path, limits: Limits, eos_ids: frozenset[int]) -> Grammars:
    """What compiles constraints; reads the model's vocabulary when the first one comes."""
    from ai_engine.data.grammar import LlGrammars
    from ai_engine.data.models import open_model
    from ai_engine.data.tokenizer import TokenPieces, token_pieces

    def load() -> TokenPieces:
        with contextlib.closing(open_model(path)) as file:
            tokens = token_pieces(file.tokenizer())
        give_back()
        return tokens

    return LlGrammars(load, eos_ids, limits.vocab_size)


def build_service(
    runtime: Runtime,
    engine: EngineConfig,
    serve: ServeConfig,
    telemetry: Telemetry,
    eos_ids: frozenset[int],
    grammars: Grammars | None = None,
) -> Service:
    from ai_engine.serving.config import ServingConfig
    from ai_engine.serving.service import Service

    config = ServingConfig(
        max_queue_requests=serve.max_queue_requests,
        max_queue_tokens=serve.max_queue_tokens,
        step_target_s=serve.step_target_ms / 1000.0,
        speculation=engine.speculation,
    )
    return Service(runtime, telemetry=telemetry, config=config, eos_ids=eos_ids, grammars=grammars)


def trace_source(runtime: Runtime) -> TraceSource | None:
    """What traces of this engine are read from; None where the kernels leave no stamps."""
    from ai_engine.hardware.shared import SharedBytes
    from ai_engine.kernels.cpu import abi
    from ai_engine.kernels.cpu.backend import CpuKernels
    from ai_engine.runtime.engine import Engine

    if not isinstance(runtime, Engine) or not isinstance(runtime.kernels, CpuKernels):
        return None
    rings, resources, pages = runtime.kernels.rings, runtime.resources, runtime.pool.page_map
    return TraceSource(
        RingsHandle(f"/proc/{os.getpid()}/fd/{rings.fd}", rings.num_threads, rings.entries, abi.RING_HEADER_BYTES),
        ProgramInfo(
            device=runtime.kernels.name,
            calls=list(runtime.plan.lowered.calls),
            kernels=[slot.kernel for slot in runtime.program.slots],
            weights={name: spec for name, (spec, _) in resources.weights.items()},
            kv_shape=resources.kv_shape,
        ),
        PagesHandle(pages.path, len(pages), runtime.pool.page_tokens) if isinstance(pages, SharedBytes) else None,
        runtime.limits.max_step_tokens,
        os.getpid(),
        {name: (arena.address, arena.nbytes) for name, arena in runtime.arenas.items()}
        | {"workspace": runtime.kernels.workspace_of(runtime.program)},
    )


def load_roofline(threads: int) -> Roofline | None:
    """What `ai-engine bench machine` found that so many threads can do here; None: it has not run on this machine."""
    from ai_engine.hardware.ceilings import load_ceilings
    from ai_engine.observe.sampled import Roofline

    found = load_ceilings()
    if found is None:
        return None
    return Roofline(
        found.best(found.read_gb_s, threads) * 1e9,
        found.best(found.fma_gflop_s, threads) * 1e9,
        found.best(found.dot_gop_s, threads) * 1e9,
    )


def recorded(runtime: Runtime, telemetry: Telemetry) -> Telemetry:
    """The telemetry of an engine's steps, with the clock pairs that its rings are read by."""
    from ai_engine.kernels.cpu.backend import CpuKernels
    from ai_engine.observe.recorder import Recorder
    from ai_engine.runtime.engine import Engine

    if isinstance(runtime, Engine) and isinstance(runtime.kernels, CpuKernels):
        return Recorder(telemetry, runtime.kernels.clock.now)
    return telemetry


def cost_of(
    call: Call, program: ProgramInfo, tokens: int, logit_rows: int, sequences: Sequence[tuple[int, int]]
) -> Cost:
    """Implements ports.trace.CostOf."""
    from ai_engine.kernels import catalog

    shape = catalog.StepShape(tokens, logit_rows, tuple(sequences))
    return catalog.cost(call, program.weights, program.kv_shape, shape)


def build_text(data: TokenizerData) -> ModelText:
    from ai_engine.data.models import cache_dir
    from ai_engine.data.service import ModelText

    return ModelText(data, cache_dir=cache_dir() / "tokenizers")


def give_back() -> None:
    """Hand memory that loading needed back to the system (glibc keeps it otherwise)."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def phase_timer(progress: Progress, telemetry: Telemetry) -> Progress:
    """The same progress, with each phase's duration emitted when it ends."""
    started: dict[str, float] = {}

    def tell(phase: str, fraction: float) -> None:
        begun = started.setdefault(phase, time.monotonic())
        if fraction >= 1.0:
            del started[phase]
            telemetry.emit(PhaseDone(phase, time.monotonic() - begun))
        progress(phase, fraction)

    return tell


# everything in this process


@dataclass
class Local:
    """An engine in this process behind its serving port."""

    serving: Service
    runtime: Runtime
    text: ModelText
    defaults: dict[str, float]

    @property
    def limits(self) -> Limits:
        return self.runtime.limits

    async def close(self) -> None:
        await self.serving.close()
        self.runtime.close()
        self.text.close()
        give_back()


async def open_local(
    model: str,
    engine: EngineConfig,
    serve: ServeConfig,
    progress: Progress | None = None,
    telemetry: Telemetry | None = None,
) -> Local:
    """Find, load and start a model here; raises from the error tree, leaving nothing behind."""
    told, events = progress or no_progress, telemetry or NoTelemetry()
    path = await asyncio.to_thread(find_model, model, offline=serve.offline, progress=told)
    return await open_local_path(path, engine, serve, told, events)


async def open_local_path(
    path: Path, engine: EngineConfig, serve: ServeConfig, progress: Progress, telemetry: Telemetry
) -> Local:
    from ai_engine.data.models import open_model

    with contextlib.closing(open_model(path)) as file:
        data = file.tokenizer()
        text = await asyncio.to_thread(build_text, data)
        try:
            runtime = await asyncio.to_thread(build_runtime, file, engine, progress, telemetry, text.eos_ids)
        except BaseException:
            text.close()
            raise
    grammars = build_grammars(path, runtime.limits, text.eos_ids)
    service = build_service(runtime, engine, serve, recorded(runtime, telemetry), text.eos_ids, grammars)
    await service.start()
    return Local(service, runtime, text, data.defaults)


class Relay:
    """Implements ports.serving.Serving by another one that may come later, go, and come back."""

    def __init__(self, reason: str) -> None:
        self.target: Serving | None = None
        self.reason = reason

    def _now(self) -> Serving:
        if self.target is None:
            raise NotReady(f"the server is not ready: {self.reason}", retry_after_s=2.0)
        return self.target

    async def submit(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        return await self._now().submit(request)

    async def cancel(self, request_id: str, index: int | None = None, *, stopped: bool = False) -> None:
        if self.target is not None:
            await self.target.cancel(request_id, index, stopped=stopped)

    async def health(self) -> Health:
        if self.target is None:
            return Health(live=True, ready=False, reason=self.reason)
        return await self.target.health()

    async def drain(self, deadline_s: float) -> None:
        if self.target is not None:
            await self.target.drain(deadline_s)


# commands


def models_table() -> str:
    from ai_engine.data.models import list_models

    rows = [("NAME", "SIZE", "STATE", "WHAT")]
    rows += [(entry.name, format_bytes(entry.nbytes), entry.state, entry.about) for entry in list_models()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[3]]).rstrip() for row in rows
    )


def pull(model: str, progress: Progress, *, verify: bool) -> str:
    from ai_engine.data import models

    path = models.resolve(model, progress=progress)
    if verify:
        models.verify(model)
    return f"{path}" + (" (digest checked)" if verify else "")


def inspect_model(model: str, config: EngineConfig, progress: Progress, *, tensors: bool, as_json: bool) -> str:
    """What the file holds and what serving it would take; nothing is loaded."""
    from ai_engine.hardware.machine import read_machine
    from ai_engine.runtime import inspect

    with opened(model, config, progress) as (file, kernels):
        found = inspect.inspect_model(file, kernels, engine_options(config), read_machine().memory_available_bytes)
        listed = list(file.tensors.values()) if tensors else []
    if as_json:
        return to_json({**msgspec.to_builtins(found), **({"tensors": msgspec.to_builtins(listed)} if tensors else {})})
    return inspect.inspection_text(found, listed).rstrip()


def graph_text(model: str, config: EngineConfig, progress: Progress, *, every_pass: bool, layers: int) -> str:
    """The graph as MLIR text and the program that it becomes."""
    from ai_engine.runtime.inspect import describe_graph

    with opened(model, config, progress) as (file, kernels):
        return describe_graph(file, kernels, engine_options(config), every_pass=every_pass, num_layers=layers)


@contextlib.contextmanager
def opened(model: str, config: EngineConfig, progress: Progress) -> Iterator[tuple[ModelFile, Kernels]]:
    """A model's file and the kernels that would run it, for looking at."""
    from ai_engine.data.models import open_model

    with (
        contextlib.closing(open_model(find_model(model, offline=False, progress=progress))) as file,
        contextlib.closing(build_kernels(config)) as kernels,
    ):
        yield file, kernels


def format_bytes(count: float) -> str:
    """'512 B', '93.8 MB', '1.42 GB' (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError


def memory_line(memory: MemoryReport, limits: Limits) -> str:
    """The sum that the start line prints."""
    parts = {name: getattr(memory, name) for name in ("weights", "kv", "activations", "workspace")}
    total = format_bytes(sum(parts.values()))
    listed = " + ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    tokens = memory.kv // max(1, memory.kv_bytes_per_token)
    return f"memory: {listed} = {total}; KV holds {tokens} tokens, a request at most {limits.max_context}"


def to_json(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
