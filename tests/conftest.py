"""Fixtures that need a real model or a real server. Owns how tests find the small models.

Without network and without a cached model these tests are skipped; under CI=true they fail instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from ai_engine.ports.errors import DownloadError
from ai_engine.testing.process import Server

ROOT = Path(__file__).resolve().parent.parent


MODEL_VARIABLES = {"smollm2": "AI_ENGINE_TEST_SMOLLM2", "gemma3-270m": "AI_ENGINE_TEST_GEMMA3_270M"}
"""Environment variables that name a packaged model's file."""


def model_path(name: str) -> Path:
    """A packaged model's file: as the environment names it, else the engine's own copy, fetched once. Skips the test
    (fails it under CI=true) when it cannot be had."""
    named = os.environ.get(MODEL_VARIABLES[name])
    found = Path(named) if named else _resolved(name)
    if isinstance(found, DownloadError):
        if os.environ.get("CI") == "true":
            raise found
        pytest.skip(f"{name} is not on disk and cannot be fetched, set {MODEL_VARIABLES[name]}: {found.message}")
    return found


@cache
def _resolved(name: str) -> Path | DownloadError:
    """Asked once: a network that is not there takes a while to say so."""
    from ai_engine.data.models import resolve

    try:
        return resolve(name)
    except DownloadError as error:
        return error


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return model_path("smollm2")


@pytest.fixture(scope="session")
def server(smollm2: Path) -> Iterator[Server]:
    """SmolLM2 behind real HTTP, gateway and worker as two processes; shared by the tests that leave it as it was."""
    running = Server(str(smollm2), "--served-name", "smollm2")
    yield running
    assert running.stop() == 0
