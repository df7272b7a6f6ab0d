"""The one adapter between the engine and the golden tests: ids of a text, logits of given ids, an engine over a file.

Owns nothing else, and is the only file under tests/golden that imports the engine. Where real models are is conftest's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from ai_engine.app import build_kernels
from ai_engine.config import EngineConfig
from ai_engine.data.models import open_model
from ai_engine.data.tokenizer import ModelTokenizer
from ai_engine.hardware.arena import MappedArena
from ai_engine.hardware.machine import read_machine
from ai_engine.ports.clock import SystemClock
from ai_engine.runtime import inspect
from ai_engine.runtime.engine import Engine, build_engine
from ai_engine.runtime.plan import EngineOptions

KernelsName = Literal["cpu", "reference"]

CONTEXT = 1024
"""Tokens that one sequence may hold in `loaded`: no document has as many."""


@contextmanager
def engine_of(
    path: Path, *, threads: int = 2, target: str = "auto", kernels: str = "cpu", **options: Any
) -> Iterator[Engine]:
    """An engine over a model file, not warmed up; ``options`` are EngineOptions."""
    built = build_kernels(msgspec.convert({"threads": threads, "cpu": target, "kernels": kernels}, EngineConfig))
    with closing(built), closing(open_model(path)) as file:
        free_bytes = read_machine().memory_available_bytes
        engine = build_engine(
            file, built, MappedArena, free_bytes, SystemClock(), EngineOptions(**options), warm_up=False
        )
        with closing(engine):
            yield engine


class TeacherForced:
    """An engine that is asked for the logits of given tokens, ``chunk`` of them a step at most."""

    def __init__(self, engine: Engine, chunk: int) -> None:
        self._engine, self._chunk = engine, chunk

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """See ai_engine.runtime.inspect.teacher_forced_logits."""
        return inspect.teacher_forced_logits(self._engine, ids, self._chunk)


@contextmanager
def loaded(path: Path, *, threads: int = 2, chunk: int = 256, kernels: KernelsName = "cpu") -> Iterator[TeacherForced]:
    """The engine over a GGUF file or a folder with safetensors; it runs `chunk` tokens a step at most."""
    with closing(open_model(path)) as file:
        max_context = min(CONTEXT, file.config.max_context)
    with engine_of(
        path,
        threads=threads,
        kernels=kernels,
        max_context=max_context,
        max_step_tokens=max(chunk, 64),
        max_seqs=max(chunk // 2, 1),  # two logits rows per sequence: so many that a chunk is one run
        prefix_cache=False,
    ) as engine:
        yield TeacherForced(engine, chunk)


def teacher_forced_logits(
    path: Path, ids: Sequence[int], *, threads: int = 2, chunk: int = 256, kernels: KernelsName = "cpu"
) -> NDArray[np.float32]:
    """`TeacherForced.logits` of one sequence; `loaded` saves loading the model for several."""
    with loaded(path, threads=threads, chunk=chunk, kernels=kernels) as model:
        return model.logits(ids)


def tokenize(path: Path, text: str, parse_special: bool) -> list[int]:
    """The engine's ids of a text, without a BOS."""
    return list(_tokenizer(path).encode(text, add_special=False, parse_special=parse_special).ids)


@lru_cache(maxsize=2)  # a SentencePiece vocabulary takes seconds to prepare
def _tokenizer(path: Path) -> ModelTokenizer:
    with closing(open_model(path)) as file:
        return ModelTokenizer(file.tokenizer())
