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

from ai_engine.data.gguf import GgufFile
from ai_engine.data.tokenizer import ModelTokenizer

MODEL_VARIABLES = {"smollm2": "AI_ENGINE_TEST_SMOLLM2", "gemma3-270m": "AI_ENGINE_TEST_GEMMA3_270M"}
"""Environment variables that name a real model's file; without one the engine's own resolver is asked."""


def model_path(name: str) -> Path:
    """The file of a real model. Where there is none the test is skipped, but fails under CI=true."""
    named = os.environ.get(MODEL_VARIABLES[name])
    found = Path(named) if named else _resolve(name)
    if found is not None and found.exists():
        return found
    message = f"{name} is not on this machine: set {MODEL_VARIABLES[name]} to its file"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


def _resolve(name: str) -> Path | None:
    """Where the engine keeps this model, or None when it does not know or have it. Never downloads."""
    return None


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
    file = GgufFile(path)
    try:
        return ModelTokenizer(file.tokenizer())
    finally:
        file.close()
