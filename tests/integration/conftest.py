"""Fixtures of the integration tests: a tiny model and a server on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from ai_engine.testing.process import Server
from tests.integration.client import OPEN
from tests.integration.engines import write_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama with room for long answers: a few hundred microseconds a token."""
    return write_model(tmp_path_factory.mktemp("tiny"), "llama", "Q8_0", max_position_embeddings=16384)


@pytest.fixture(scope="session")
def tiny_server(tiny_model: Path) -> Iterator[Server]:
    """Shared by tests that leave it as it was."""
    running = Server(str(tiny_model), "--served-name", "tiny")
    yield running
    assert running.stop() == 0


@pytest.fixture
async def no_connection_left() -> AsyncIterator[None]:
    """Ends the connections that the test opened and did not close."""
    yield
    for exchange in list(OPEN):
        exchange.abort()
    await asyncio.sleep(0)
