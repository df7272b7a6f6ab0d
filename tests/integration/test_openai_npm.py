"""The official JavaScript client from npm: it streams, ends and fails as its Python sibling does.

Owns the comparison; openai_client.mjs asks. .ci/run installs the package and sets AI_ENGINE_TEST_NODE to the folder
that holds its node_modules.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_openai_client import scripted_api
from tests.unit.api.doors import InThread

SCRIPT = Path(__file__).parent / "openai_client.mjs"
VARIABLE = "AI_ENGINE_TEST_NODE"


@pytest.fixture(scope="module", params=["scripted", pytest.param("engine", marks=pytest.mark.integration)])
def heard(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the client saw."""
    folder, node = os.environ.get(VARIABLE), shutil.which("node")
    if folder is None or node is None:
        missing = f"{VARIABLE} is not set or node is not there: a folder where `npm install openai` was run"
        if os.environ.get("CI") == "true":
            pytest.fail(f"{missing}; .ci/run does that")
        pytest.skip(missing)
    server = InThread(scripted_api()) if request.param == "scripted" else None
    url = server.url if server else request.getfixturevalue("server").url
    try:
        done = subprocess.run(
            [node, str(SCRIPT), folder, f"{url}/v1"], capture_output=True, text=True, timeout=120, check=False
        )
    finally:
        if server:
            server.stop()
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_streams_say_what_whole_answers_say(heard: dict[str, Any]) -> None:
    assert heard["whole"]
    assert heard["streamed"] == heard["accumulated"] == heard["whole"]
    counts = [
        [heard[usage][name] for name in ("prompt_tokens", "completion_tokens")] for usage in ("usage", "wholeUsage")
    ]
    assert counts[0] == counts[1]


def test_responses_stream_to_their_final_object(heard: dict[str, Any]) -> None:
    assert heard["deltas"] == heard["final"] == heard["whole"]
    assert heard["status"] in ("response.completed", "response.incomplete")


def test_failures_have_status_code_and_param(heard: dict[str, Any]) -> None:
    assert heard["failure"] == {
        "kind": "BadRequestError",
        "status": 400,
        "code": "invalid_value",
        "param": "temperature",
    }
