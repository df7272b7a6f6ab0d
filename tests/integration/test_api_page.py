"""Every curl line of docs/api.md works as printed, and its answer is what the OpenAPI document says.

Owns the check of the page. The lines run with curl itself, against SmolLM2; only the address differs.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ai_engine.api.openapi import OPERATIONS
from ai_engine.testing.process import Server

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
BLOCKS = re.findall(r"```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
LINES = [line for block in BLOCKS for line in re.findall(r"^curl .*?(?=^curl |\Z)", block, re.S | re.M)]
pytestmark = pytest.mark.integration


def test_there_are_lines_for_every_route_that_takes_a_body() -> None:
    paths = {re.sub(r"^/v1", "", re.search(r"8000(\S+)", line)[1]) for line in LINES}  # type: ignore[index]
    assert paths >= {route for route, op in OPERATIONS.items() if op.body}


@pytest.mark.parametrize("line", LINES, ids=lambda line: " ".join(line.split())[5:90])
def test_a_line_does_what_the_document_says(line: str, server: Server) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    words = shlex.split(line.replace("http://127.0.0.1:8000", server.url))
    done = subprocess.run([*words, "-sS", "--fail-with-body"], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    route = re.sub(r"^/v1", "", re.search(r"8000(\S+)", line)[1])  # type: ignore[index]
    document = json.loads(subprocess.run(["curl", "-sS", f"{server.url}/openapi.json"], capture_output=True).stdout)
    op = OPERATIONS[route]

    def check(value: Any, name: str) -> None:
        schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        jsonschema.Draft202012Validator(schema).validate(value)

    if b'"stream": true' not in line.encode():
        check(json.loads(done.stdout), op.reply)
        return
    events = [line[6:] for line in done.stdout.decode().splitlines() if line.startswith("data: ")]
    assert len(events) > 3
    for event in events:
        if event != "[DONE]":
            check(json.loads(event), op.event)
