"""The command line as a person or a script uses it: help, pipes, errors in one line, exit statuses."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT

COMMANDS = ("serve", "generate", "chat", "models", "inspect", "graph", "bench")


def run(*args: str, text: str | None = None, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ai_engine.cli", *args],
        input=text, stdin=subprocess.DEVNULL if text is None else None,
        capture_output=True, text=True, timeout=120, cwd=ROOT, env={**os.environ, **(env or {})},
    )  # fmt: skip


def refused(done: subprocess.CompletedProcess[str], status: int = 1) -> str:
    """The one line on standard error of a command that could not do it."""
    assert done.returncode == status, done.stderr
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("ai-engine: ")
    return line


def only_progress(text: str) -> bool:
    """Nothing but a line per phase that took a while."""
    return all(re.fullmatch(r"[a-z ]+: [0-9.]+ s", line) for line in text.splitlines())


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    """Under 0.3 s: the best of five by wall time, the processor time of the cheapest on a busy machine."""
    wall, cpu = [], []
    for _ in range(5):
        started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = run("--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        wall.append(time.monotonic() - started)
        cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0
    for command in COMMANDS:
        assert re.search(rf"^    {command} ", done.stdout, re.M)
    assert min(*cpu, *wall) < 0.3, (wall, cpu)
    heavy = "numpy llvmlite tokenizers jinja2 uvicorn prometheus_client asyncio"
    code = (
        f"import sys, ai_engine.cli as c; c.build_parser(); print([m for m in '{heavy}'.split() if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.parametrize(
    "command", [*((name,) for name in COMMANDS), ("models", "list"), ("models", "pull"), ("bench", "serve")]
)
def test_help_of_every_command(command: tuple[str, ...]) -> None:
    done = run(*command, "--help")
    assert done.returncode == 0
    assert done.stderr == ""
    assert f"usage: ai-engine {' '.join(command)}" in done.stdout
    assert "default" in done.stdout or command[0] == "models" or command == ("bench",)


def test_wrong_usage() -> None:
    for args in ((), ("fly",), ("serve",), ("serve", "x", "--port", "ten"), ("generate", "x", "y", "--kernels", "gpu")):
        done = run(*args)
        assert done.returncode == 2
        assert "usage: ai-engine" in done.stderr
        assert "Traceback" not in done.stderr
    assert "--page-tokens" in refused(run("generate", "x", "y", "--page-tokens", "16"), 2)
    assert "--port" in refused(run("serve", "x", "--port", "70000"), 2)
    assert run("--version").stdout.startswith("ai-engine ")


@pytest.mark.integration
def test_generate_in_a_pipe(smollm2: Path) -> None:
    options = ("--temperature", "0", "--max-tokens", "12")
    given = run("generate", str(smollm2), "The capital of France is", *options)
    piped = run("generate", str(smollm2), *options, text="The capital of France is")
    for done in (given, piped):
        assert done.returncode == 0
        assert only_progress(done.stderr)
    assert given.stdout == piped.stdout
    assert len(given.stdout.strip()) > 3
    stop = given.stdout[4:8]
    stopped = run("generate", str(smollm2), "The capital of France is", *options, "--stop", stop)
    assert stopped.stdout == given.stdout[: given.stdout.index(stop)] + "\n"
    chat = run("generate", str(smollm2), "--chat", "--temperature", "0", "--max-tokens", "50",
               text="What is the capital of France? Answer in one sentence.")  # fmt: skip
    assert "Paris" in chat.stdout


@pytest.mark.integration
def test_chat_in_a_pipe(smollm2: Path) -> None:
    """A line in, an answer out; the conversation is remembered; the end of the input ends it."""
    lines = "What is the capital of France? Answer in one sentence.\nAnd of Italy?\n"
    done = run("chat", str(smollm2), "--temperature", "0", "--max-tokens", "40", text=lines)
    assert done.returncode == 0
    assert only_progress(done.stderr)
    assert "Paris" in done.stdout
    assert len(done.stdout.splitlines()) >= 2
    assert ">" not in done.stdout, "no prompt sign where no terminal is"


def test_a_closed_pipe_is_no_error_message(tiny_model: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m ai_engine.cli generate {tiny_model} hello --max-tokens 2000 | head -c 5"],
        capture_output=True, timeout=60, cwd=ROOT,
    )  # fmt: skip
    assert len(done.stdout) == 5
    assert done.stderr == b""


def test_ctrl_c_ends_generate(tiny_model: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "ai_engine.cli", "generate", str(tiny_model), "hello", "--max-tokens", "8000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert said.strip() == b"ai-engine: stopped"


def test_models_list() -> None:
    done = run("models", "list")
    assert done.returncode == 0
    head, *rows = done.stdout.splitlines()
    assert head.split() == ["NAME", "SIZE", "STATE", "WHAT"]
    assert {row.split()[0] for row in rows} >= {"smollm2", "gemma3-270m"}


def test_a_name_that_is_almost_right() -> None:
    for command in (("generate", "smolm2", "x"), ("inspect", "smolm2"), ("models", "pull", "smolm2")):
        line = refused(run(*command))
        assert "smolm2" in line
        assert "smollm2" in line


def damaged_files(model: Path, folder: Path) -> list[Path]:
    whole = model.read_bytes()
    wrong = {
        "empty.gguf": b"",
        "text.gguf": b"this is not a model\n" * 50,
        "header.gguf": whole[:40],
        "cut.gguf": whole[: len(whole) // 2],
        "counts.gguf": whole[:8] + b"\xff" * 16 + whole[24:],
    }
    for name, data in wrong.items():
        (folder / name).write_bytes(data)
    (folder / "empty-folder").mkdir()
    return [*(folder / name for name in wrong), folder / "empty-folder", folder / "absent.gguf"]


def test_damaged_files(tiny_model: Path, tmp_path: Path) -> None:
    """Every command says what is wrong with which file, in a line."""
    for number, path in enumerate(damaged_files(tiny_model, tmp_path)):
        command = (("generate", str(path), "x"), ("inspect", str(path)), ("serve", str(path), "--port", "0"))[
            number % 3
        ]
        assert path.name in refused(run(*command)), command


def test_inspect(tiny_model: Path) -> None:
    done = run("inspect", str(tiny_model))
    assert (done.returncode, done.stderr) == (0, "")
    for word in ("llama", "Q8_0", "16384"):
        assert word in done.stdout, word
    listed = run("inspect", str(tiny_model), "--tensors")
    assert "blk.1.ffn_down.weight" in listed.stdout
    found = json.loads(run("inspect", str(tiny_model), "--json").stdout)
    assert isinstance(found, dict)
    assert found


def test_graph(tiny_model: Path) -> None:
    done = run("graph", str(tiny_model))
    assert (done.returncode, done.stderr) == (0, "")
    for op in ("embed", "rope_store", "attention", "matmul", "glu", "sample"):
        assert op in done.stdout, op
    every = run("graph", str(tiny_model), "--passes", "--layers", "1")
    assert every.returncode == 0
    assert every.stdout.count("attention") < run("graph", str(tiny_model), "--passes").stdout.count("attention")
