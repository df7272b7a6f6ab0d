"""The one adapter between the engine and the golden tests: where model files are, ids of a text, logits of given ids.

Owns nothing else, and is the only file under tests/golden that imports the engine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from ai_engine.app import build_kernels
from ai_engine.config import EngineConfig
from ai_engine.data.models import open_model, resolve
from ai_engine.data.tokenizer import ModelTokenizer
from ai_engine.hardware.arena import MappedArena
from ai_engine.hardware.machine import read_machine
from ai_engine.ports.clock import SystemClock
from ai_engine.ports.errors import DownloadError
from ai_engine.ports.kernels import Buffer, Call, Kernels, Program, Resources, SampleOut, StepBatch
from ai_engine.ports.runtime import SequenceSpec, StepPlan, Work
from ai_engine.ports.sampling import SamplingParams
from ai_engine.runtime.engine import Engine, build_engine
from ai_engine.runtime.plan import EngineOptions

MODEL_VARIABLES = {"smollm2": "AI_ENGINE_TEST_SMOLLM2", "gemma3-270m": "AI_ENGINE_TEST_GEMMA3_270M"}
"""Environment variables that name a real model's file."""


def model_path(name: str) -> Path:
    """The file of a real model: as the environment names it, else the engine's own copy.

    Under CI=true it is fetched, and a missing one fails the test; elsewhere nothing is downloaded and the test is
    skipped.
    """
    ci = os.environ.get("CI") == "true"
    named = os.environ.get(MODEL_VARIABLES[name])
    if named:
        return Path(named)
    try:
        return resolve(name, offline=not ci)
    except DownloadError as error:
        message = f"{name} is not on this machine: set {MODEL_VARIABLES[name]} to its file ({error})"
        if ci:
            pytest.fail(message)
        pytest.skip(message)


KernelsName = Literal["cpu", "reference"]

CONTEXT = 1024
"""Tokens that one sequence may hold here: no document has as many."""


@contextmanager
def loaded(
    model_path: Path, *, threads: int = 2, chunk: int = 256, kernels: KernelsName = "cpu"
) -> Iterator[TeacherForced]:
    """The engine over a GGUF file or a folder with safetensors; it runs `chunk` tokens a step at most."""
    file = open_model(model_path)
    inner = build_kernels(EngineConfig(threads=threads, kernels=kernels))
    tap = LogitsTap(inner)
    options = EngineOptions(
        max_context=min(CONTEXT, file.config.max_context),
        max_step_tokens=max(chunk, 64),
        max_seqs=max(chunk // 2, 1),  # two logits rows per sequence: so many that a chunk is one run
        prefix_cache=False,
    )
    free_bytes = read_machine().memory_available_bytes
    try:
        engine = build_engine(file, cast(Kernels, tap), MappedArena, free_bytes, SystemClock(), options, warm_up=False)
        try:
            yield TeacherForced(engine, tap, chunk)
        finally:
            engine.close()
    finally:
        inner.close()
        file.close()


def teacher_forced_logits(
    model_path: Path, ids: Sequence[int], *, threads: int = 2, chunk: int = 256, kernels: KernelsName = "cpu"
) -> NDArray[np.float32]:
    """`TeacherForced.logits` of one sequence; `loaded` saves loading the model for several."""
    with loaded(model_path, threads=threads, chunk=chunk, kernels=kernels) as model:
        return model.logits(ids)


class TeacherForced:
    """An engine that is asked for the logits of given tokens."""

    def __init__(self, engine: Engine, tap: LogitsTap, chunk: int) -> None:
        self._engine, self._tap, self._chunk = engine, tap, chunk

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Logits [len(ids), vocab] of one sequence that starts at position 0; nothing is added to ids.

        Row i holds the distribution of the token after ids[:i + 1].
        """
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)  # these keep every row
        self._engine.open(SequenceSpec(seq_id=1, tokens=list(ids), prompt_len=len(ids), params=params))
        for start in range(0, len(ids), self._chunk):
            self._engine.step(StepPlan(step=start, work=[Work(1, min(self._chunk, len(ids) - start))]))
        self._engine.step(StepPlan(step=len(ids), release=[1]))
        return self._tap.taken()


class LogitsTap:
    """Implements ports.kernels.Kernels: passes every call on, and copies the logits that each run leaves behind."""

    def __init__(self, inner: Kernels) -> None:
        self._inner = inner
        self._rows: list[NDArray[np.float32]] = []
        self._buffer: Buffer | None = None
        self._resources: Resources | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def compile(self, calls: Sequence[Call], resources: Resources) -> Program:
        (sample,) = (call for call in calls if call.op == "sample")
        self._buffer, self._resources = sample.inputs[0], resources
        return self._inner.compile(calls, resources)

    def run(self, program: Program, batch: StepBatch) -> SampleOut:
        out = self._inner.run(program, batch)
        buffer, resources = self._buffer, self._resources
        assert buffer is not None
        assert resources is not None
        assert buffer.type.kind == "f32"
        rows, columns = len(batch.logit_rows), buffer.type.cols
        raw = resources.activations[buffer.offset : buffer.offset + 4 * rows * columns]
        self._rows.append(raw.view(np.float32).reshape(rows, columns)[:, : resources.vocab_size].copy())
        return out

    def taken(self) -> NDArray[np.float32]:
        """All rows since the last call."""
        rows, self._rows = self._rows, []
        return np.concatenate(rows)


def tokenize(model_path: Path, text: str, parse_special: bool) -> list[int]:
    """The engine's ids of a text, without a BOS."""
    return list(_tokenizer(model_path).encode(text, add_special=False, parse_special=parse_special).ids)


@lru_cache(maxsize=2)  # a SentencePiece vocabulary takes seconds to prepare
def _tokenizer(path: Path) -> ModelTokenizer:
    file = open_model(path)
    try:
        return ModelTokenizer(file.tokenizer())
    finally:
        file.close()
