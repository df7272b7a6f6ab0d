"""The one adapter between the engine and the golden tests: where model files are, ids of a text, logits of given ids.

Owns nothing else, and is the only file under tests/golden that imports the engine.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ai_engine.data.models import open_model, resolve
from ai_engine.data.tokenizer import ModelTokenizer
from ai_engine.ports.errors import DownloadError

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


def teacher_forced_logits(
    model_path: Path, ids: Sequence[int], *, threads: int = 2, chunk: int = 512
) -> NDArray[np.float32]:
    """The engine's logits [len(ids), vocab] of one sequence that starts at position 0, `chunk` tokens a step at most.

    `model_path` is a GGUF file or a folder with safetensors. Row i holds the distribution of the token after ids[:i +
    1]. Nothing is added to ids.
    """
    raise NotImplementedError


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
