"""What README.md tells a newcomer to send, sent: its curl body, word for word, against the server that it starts."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from ai_engine.testing.process import Server
from tests.conftest import ROOT
from tests.integration.client import ask

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_connection_left")]


def curl_body() -> dict[str, Any]:
    """The JSON of the first curl line in a code block."""
    found = re.search(
        r"```\ncurl http://127.0.0.1:8000(/v1/\S+) .*? -d '(.*?)'\n```", (ROOT / "README.md").read_text(), re.S
    )
    assert found is not None, "README.md has no curl line"
    assert found[1] == "/v1/chat/completions"
    body: dict[str, Any] = json.loads(found[2])
    return body


async def test_the_capital_of_france(server: Server) -> None:
    body = curl_body()
    assert body["messages"][-1] == {"role": "user", "content": "What is the capital of France?"}
    assert body["temperature"] == 0
    first = await ask(server.url, body, "/v1/chat/completions")
    assert "Paris" in first["choices"][0]["message"]["content"]
    assert first["choices"][0]["finish_reason"] == "stop"
    assert (await ask(server.url, body, "/v1/chat/completions"))["choices"] == first["choices"]
