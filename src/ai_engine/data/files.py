"""Files that are whole or absent: atomic writes, digests, manifests of a folder, locks between processes.

Knows nothing of models or of where files come from.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec


def write_atomic(path: Path, content: bytes) -> None:
    """Write ``content`` so that ``path`` holds all of it or what it held before. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def sha256_of(path: Path, advance: Callable[[int], None] | None = None) -> str:
    """Hex SHA-256 of a file; ``advance`` hears how many bytes each read took."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            if advance:
                advance(len(block))
    return digest.hexdigest()


def git_blob_sha1_of(path: Path) -> str:
    """The id that git gives this content."""
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


class FileRecord(msgspec.Struct, frozen=True):
    size: int
    mtime_ns: int
    digest: str  # 64 hex digits: SHA-256; 40: git blob


class Manifest:
    """What a folder's files must be: `manifest.json` beside them. A file counts only once it is recorded here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, FileRecord] = {}
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            self.files = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=dict[str, FileRecord])

    def looks_right(self, name: str) -> bool:
        """Whether the file is as it was recorded, by size and time of change: microseconds, whatever the size."""
        record = self.files.get(name)
        try:
            info = (self.folder / name).stat()
        except OSError:
            return False
        return record is not None and (info.st_size, info.st_mtime_ns) == (record.size, record.mtime_ns)

    def is_right(self, name: str) -> bool:
        """Whether the file's content has the recorded digest; reads all of it."""
        record, path = self.files.get(name), self.folder / name
        if record is None or not path.is_file() or path.stat().st_size != record.size:
            return False
        if (sha256_of(path) if len(record.digest) == 64 else git_blob_sha1_of(path)) != record.digest:
            return False
        if not self.looks_right(name):
            self.record(name, record.digest)
        return True

    def record(self, name: str, digest: str) -> None:
        info = (self.folder / name).stat()
        self.files[name] = FileRecord(info.st_size, info.st_mtime_ns, digest)
        write_atomic(self.folder / "manifest.json", msgspec.json.format(msgspec.json.encode(self.files)))


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path`` (created, never removed); waits for another process that holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
