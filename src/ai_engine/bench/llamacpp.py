"""llama.cpp as the other side of a comparison: its binaries found or built, its benchmarks run, its server started.

Owns every command line of llama.cpp. Builds from the sdist of llama-cpp-python (pinned), which carries llama.cpp's
sources. Children are ended when the command ends, also by Ctrl-C, and each is bounded in time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ai_engine.hardware.ceilings import ceilings_path
from ai_engine.hardware.machine import read_machine
from ai_engine.ports.errors import ConfigError, EngineError
from ai_engine.ports.progress import Progress
from ai_engine.testing.process import cpu_seconds, free_port, process_tree

SDIST = "llama-cpp-python==0.3.36"
TOOLS = ("llama-bench", "llama-batched-bench", "llama-server", "llama-quantize")
CMAKE_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF",
)  # fmt: skip
_EXPLICIT = {
    "avx2": "AVX2", "fma": "FMA", "f16c": "F16C", "bmi2": "BMI2", "avx512bw": "AVX512", "avx512vbmi": "AVX512_VBMI",
    "avx512vnni": "AVX512_VNNI", "avx512bf16": "AVX512_BF16", "avxvnni": "AVX_VNNI",
}  # fmt: skip
_SERVER_READY_S = 120.0


def explicit_flags(features: Sequence[str]) -> list[str]:
    """cmake flags for these CPU features without AMX: where a hypervisor hides it, a native build faults."""
    flags = [flag for flag in CMAKE_FLAGS if "NATIVE" not in flag] + ["-DGGML_NATIVE=OFF"]
    return flags + [f"-DGGML_{name}={'ON' if feature in features else 'OFF'}" for feature, name in _EXPLICIT.items()]


def build_fraction(line: str) -> float | None:
    """How far a build is, from a line of cmake --build: '[ 45%] Building ...'."""
    found = re.match(r"\[ *(\d+)%\]", line)
    return int(found[1]) / 100 if found else None


@dataclass(frozen=True)
class LlamaCpp:
    """Its binaries in one folder."""

    folder: Path

    def tool(self, name: str) -> Path:
        return self.folder / name

    def version(self) -> str:
        """'0.10.0-... (commit)', as llama-bench prints; '' where it does not."""
        out = subprocess.run([self.tool("llama-bench"), "--version"], capture_output=True, text=True, timeout=30)
        return " ".join((out.stdout + out.stderr).split())[:200]

    def runs(self, model: Path) -> bool:
        """Whether its kernels run on this CPU: a few tokens of the model."""
        try:
            self.bench(model, 1, prompt=8, generate=2, timeout_s=120)
        except EngineError:
            return False
        return True

    def _output(self, command: Sequence[str | Path], timeout_s: float) -> str:
        try:
            done = subprocess.run(list(command), capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise EngineError(f"{Path(command[0]).name} took longer than {timeout_s:.0f} s and was ended") from None
        if done.returncode != 0:
            why = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise EngineError(f"{Path(command[0]).name} ended with status {done.returncode}: {why}")
        return done.stdout

    def bench(
        self, model: Path, threads: int, *, prompt: int = 512, generate: int = 128, timeout_s: float = 300
    ) -> dict[str, float]:
        """Tokens a second of a prompt and of decoding, once each after llama-bench's own warm-up."""
        out = self._output(
            [self.tool("llama-bench"), "-m", model, "-t", str(threads), "-p", str(prompt), "-n", str(generate),
             "-r", "1", "-o", "json"],
            timeout_s,
        )  # fmt: skip
        rows = {("prefill" if row["n_prompt"] else "decode"): row for row in json.loads(out)}
        return {"prefill": float(rows["prefill"]["avg_ts"]), "decode": float(rows["decode"]["avg_ts"])}

    def batched(self, model: Path, threads: int, batch: int, steps: int, depth: int, timeout_s: float = 300) -> float:
        """Tokens a second of ``batch`` sequences decoding together, by llama-batched-bench."""
        context = batch * (steps + depth) + 256
        out = self._output(
            [self.tool("llama-batched-bench"), "-m", model, "-t", str(threads), "-tb", str(threads),
             "-c", str(context), "-npp", str(depth), "-ntg", str(steps), "-npl", str(batch),
             "--output-format", "jsonl"],
            timeout_s,
        )  # fmt: skip
        rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        return float(rows[-1]["speed_tg"])

    def quantize(self, source: Path, target: Path, kind: str = "Q4_0") -> None:
        """``source`` requantised, whole or not at all."""
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(".part")
        try:
            command: list[str | Path] = [self.tool("llama-quantize"), "--allow-requantize", source, part, kind]
            self._output(command, 900)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)


def find(folder: Path | None, model: Path, progress: Progress) -> LlamaCpp:
    """--llama-bin, else $AI_ENGINE_LLAMA_BIN or the folder of $LLAMA_BENCH, else an earlier build, else a new one."""
    if folder is None and os.environ.get("AI_ENGINE_LLAMA_BIN"):
        folder = Path(os.environ["AI_ENGINE_LLAMA_BIN"])
    if folder is None and os.environ.get("LLAMA_BENCH"):
        folder = Path(os.environ["LLAMA_BENCH"]).parent
    if folder is not None:
        missing = [name for name in TOOLS if not (folder / name).exists()]
        if missing:
            raise ConfigError(f"--llama-bin {folder} has no {missing[0]}; name the folder of llama.cpp's binaries")
        return LlamaCpp(folder)
    built = LlamaCpp(_home() / "bin")
    if all(built.tool(name).exists() for name in TOOLS) and built.runs(model):
        return built
    return build(model, progress)


def _home() -> Path:
    return ceilings_path().parent / "llama.cpp"


def build(model: Path, progress: Progress) -> LlamaCpp:
    """From the sdist, natively; with explicit flags where the native build does not run here. About ten minutes on two
    cores. Needs cmake and a C++ compiler."""
    for name in ("cmake", "c++"):
        if shutil.which(name) is None:
            raise ConfigError(
                f"{name} is not installed, which building llama.cpp needs; install it (Debian: apt install cmake g++) "
                "or give --llama-bin FOLDER with llama.cpp's binaries"
            )
    with tempfile.TemporaryDirectory(prefix="ai-engine-llama-") as scratch:
        progress("fetch llama.cpp", 0.0)
        fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-binary", ":all:", "--no-deps"]
        _step([*fetch, SDIST, "-d", scratch], 600)
        archive = next(Path(scratch).glob("*.tar.gz"))
        with tarfile.open(archive) as packed:
            packed.extractall(scratch, filter="data")
        progress("fetch llama.cpp", 1.0)
        source = next(Path(scratch).glob("*/vendor/llama.cpp"))
        for flags in (list(CMAKE_FLAGS), explicit_flags(read_machine().cpu_features)):
            made = Path(scratch) / f"build-{len(flags)}"
            _step(["cmake", "-S", str(source), "-B", str(made), *flags], 300)
            _build(made, progress)
            if LlamaCpp(made / "bin").runs(model):
                shutil.rmtree(_home() / "bin", ignore_errors=True)
                shutil.copytree(made / "bin", _home() / "bin", symlinks=True)
                (_home() / "flags.txt").write_text(" ".join(flags) + "\n", encoding="utf-8")
                _set_run_path(_home() / "bin")
                return LlamaCpp(_home() / "bin")
    raise EngineError("llama.cpp was built but does not run on this CPU, natively nor with explicit flags")


def _set_run_path(folder: Path) -> None:
    """Copied binaries must find their libraries beside them whatever their build folder was called."""
    for name in TOOLS:
        real, script = folder / f"{name}.bin", folder / name
        script.replace(real)
        script.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH="{folder}" exec "{real}" "$@"\n', encoding="utf-8")
        script.chmod(0o755)


def _step(command: Sequence[str], timeout_s: float) -> None:
    done = subprocess.run(list(command), capture_output=True, text=True, timeout=timeout_s)
    if done.returncode != 0:
        raise EngineError(f"{command[0]} failed: {(done.stderr.strip() or done.stdout.strip())[-500:]}")


def _build(folder: Path, progress: Progress) -> None:
    jobs = str(max(1, read_machine().default_threads))
    command = ["cmake", "--build", str(folder), "-j", jobs, "--target", *TOOLS]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert child.stdout is not None
    last: list[str] = []
    try:
        for line in child.stdout:
            last = [*last[-20:], line]
            fraction = build_fraction(line)
            if fraction is not None:
                progress("build llama.cpp", min(fraction, 0.999))
        if child.wait() != 0:
            raise EngineError("building llama.cpp failed: " + "".join(last)[-800:])
        progress("build llama.cpp", 1.0)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()


def requantised(llama: LlamaCpp, source: Path, kind: str = "Q4_0") -> Path:
    """``source`` as ``kind``, made once and kept beside the ceilings; the name carries the source's digest."""
    target = ceilings_path().parent / "models" / f"{source.stem}-{digest(source)[:12]}-{kind}.gguf"
    if not target.exists():
        llama.quantize(source, target, kind)
    return target


def digest(path: Path) -> str:
    """sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class LlamaServer:
    """llama-server as a child on a free port of the loopback; `url`, `pids`, `cpu_s`, `stop`."""

    def __init__(self, llama: LlamaCpp, model: Path, flags: Sequence[str]) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.command = [
            str(llama.tool("llama-server")), "-m", str(model), "--host", "127.0.0.1", "--port", str(port), *flags,
        ]  # fmt: skip
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed by stop)
        self.process = subprocess.Popen(self.command, stdout=self._log, stderr=subprocess.STDOUT)
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def _wait(self) -> None:
        end = time.monotonic() + _SERVER_READY_S
        while True:
            if self.process.poll() is not None:
                self._log.seek(0)
                tail = self._log.read()[-600:]
                raise EngineError(f"llama-server ended with status {self.process.returncode}: {tail}")
            with (
                contextlib.suppress(OSError, urllib.error.URLError),
                urllib.request.urlopen(self.url + "/health", timeout=2) as reply,
            ):
                if reply.status == 200:
                    return
            if time.monotonic() > end:
                raise EngineError(f"llama-server was not ready within {_SERVER_READY_S:.0f} s")
            time.sleep(0.05)

    def pids(self) -> list[int]:
        return process_tree(self.process.pid)

    def cpu_s(self) -> float:
        return cpu_seconds(self.pids())

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._log.close()


def server_flags(threads: int, streams: int, context: int, extra: Sequence[str], *, cache: bool) -> list[str]:
    """The fair base of every server run: as many slots as streams, no web page, no context shift."""
    flags = {
        "-t": str(threads), "-tb": str(threads), "-np": str(streams), "-c": str(streams * context), "-b": "512",
        "-ub": "256", "-fa": "auto",
    }  # fmt: skip
    pairs: dict[str, Any] = dict(flags)
    loose: list[str] = []
    rest = list(extra)
    while rest:
        name = rest.pop(0)
        if rest and not rest[0].startswith("-"):
            pairs[name] = rest.pop(0)
        else:
            loose.append(name)
    if not cache:
        pairs["--cache-ram"] = "0"
    listed = [word for pair in pairs.items() for word in pair]
    return [*listed, *loose, "--no-webui", "--no-context-shift"]
