"""The kernel cache: cold and warm, damaged, stale, unusable; failures of the child are errors with a text."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from ai_engine.kernels.cpu import abi, build
from ai_engine.kernels.cpu.lang import AVX2, NEON, Target
from ai_engine.ports.errors import EngineError
from ai_engine.ports.progress import Progress


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AI_ENGINE_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "MODULES", ("executor",))
    monkeypatch.setattr(build, "build_objects", _one_object)
    return tmp_path / "kernels"


_builds: list[str] = []


def _one_object(target: Target, progress: Progress) -> list[bytes]:
    """As build_objects, in this process."""
    _builds.append(target.name)
    return [build.compile_ir(build.emit_module(build.definitions(target), target), target)]


def _works(loaded: build.Loaded) -> bool:
    from ai_engine.kernels.cpu.executor import read_cycles

    out = np.zeros(1, np.uint64)
    loaded.call("read_cycles", int(read_cycles.args.pack(out=out.ctypes.data).ctypes.data), 0)
    return bool(out[0] > 0)


def test_second_load_does_not_build(cache: Path) -> None:
    _builds.clear()
    assert _works(build.load(AVX2))
    assert _builds == ["avx2"]
    phases: list[str] = []
    start = time.perf_counter()
    assert _works(build.load(AVX2, lambda phase, fraction: phases.append(phase)))
    assert time.perf_counter() - start < 1
    assert _builds == ["avx2"]
    assert phases == ["load kernels"]


def _llvm_code_bytes() -> int:
    """Bytes of LLVM's code that are in this process's memory."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = "libllvmlite" in line and " r-xp " in line
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads Linux's /proc/self/smaps")
def test_llvm_leaves_memory_when_the_kernels_are_loaded(cache: Path) -> None:
    loaded = build.load(AVX2)  # compiled in this process: that reads in 30 MB or more
    assert _llvm_code_bytes() < 8 << 20
    assert _works(loaded)


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "header"])
def test_damaged_file_is_rebuilt(cache: Path, damage: str) -> None:
    build.load(AVX2)
    (path,) = cache.iterdir()
    data = bytearray(path.read_bytes())
    match damage:
        case "flip":
            data[-100] ^= 1
        case "cut":
            del data[-1:]
        case "empty":
            data.clear()
        case "header":
            data[20:30] = b"x" * 10
    path.write_bytes(data)
    _builds.clear()
    assert _works(build.load(AVX2))
    assert _builds == ["avx2"]
    assert build.unpack_objects(path.read_bytes()) is not None


def test_old_builds_are_deleted(cache: Path) -> None:
    cache.mkdir(parents=True)
    for i in range(6):
        old = cache / f"avx2-{i}.bin"
        old.write_bytes(b"")
        os.utime(old, (i, i))
    (cache / "avx512-0.bin").write_bytes(b"")
    build.load(AVX2)
    names = {p.name for p in cache.iterdir()}
    assert {"avx512-0.bin", "avx2-3.bin", "avx2-4.bin", "avx2-5.bin"} < names
    assert len(names) == 5


def test_unusable_directory_warns_and_builds(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AI_ENGINE_CACHE", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match="not usable"):
        assert _works(build.load(AVX2))


def test_key_depends_on_target_and_source(monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.cache_key(AVX2) != build.cache_key(NEON)
    before = build.cache_key(AVX2)
    assert before == build.cache_key(AVX2)
    monkeypatch.setattr(abi, "VERSION", 10_000)
    assert build.cache_key(AVX2) != before


def test_failed_child_is_an_error_with_its_text() -> None:
    broken = Target("avx2", 8, "no-such-triple", "", "")
    with pytest.raises(EngineError, match=r"(?s)failed.*no-such-triple"):
        build.build_objects(broken, lambda phase, fraction: None)


def test_all_kernels_build_in_children_and_every_definition_loads() -> None:
    """The real thing, whatever its cache says: also the progress."""
    target = build.host_target()
    seen: list[float] = []
    objects = build.build_objects(target, lambda phase, fraction: seen.append(fraction))
    assert seen[0] == 0.0
    assert seen[-1] == 1.0
    loaded = build.load_objects(objects, target)
    for definition in build.definitions(target):
        assert loaded.address(definition.name) > 0
