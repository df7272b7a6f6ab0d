"""Hub downloads against a local server that speaks the API: redirects, resuming, broken answers, digests, tokens."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ai_engine.data import models
from ai_engine.data.hub import Hub, HubId, choose_files
from ai_engine.ports.errors import DownloadError, ModelFileError, ModelNotFound, UnsupportedModel

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = bytes(range(256)) * 4000
CONFIG = b'{"architectures": ["LlamaForCausalLM"]}'


class Server(ThreadingHTTPServer):
    """Serves one repository. ``faults`` are taken one per file request: a status, or bytes after which it hangs up."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {"config.json": CONFIG, "model.safetensors": WEIGHTS}
        self.large = {"model.safetensors"}
        self.faults: list[int | str] = []
        self.seen: list[tuple[str, str | None, str | None]] = []  # path, Range, Authorization
        self.mirror: Server | None = None  # where large files are
        self.digest: str | None = None  # a lie about the content
        self.ranges = True
        self.listing: Any = None
        self.redirect = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: Any) -> None:
        """Hanging up is part of the tests."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        server = self.server
        server.seen.append((self.path, self.headers.get("Range"), self.headers.get("Authorization")))
        if self.path.startswith("/api/models/org/name/revision/main"):
            listing = server.listing or {"sha": COMMIT, "siblings": [{"rfilename": name} for name in server.files]}
            self.answer(200, msgspec.json.encode(listing))
            return
        name = self.path.partition("?")[0].removeprefix(f"/org/name/resolve/{COMMIT}/").removeprefix("/blob/")
        if name not in server.files:
            self.answer(404, b"Entry not found")
            return
        fault = server.faults.pop(0) if server.faults and name in server.large else None
        if isinstance(fault, int) and fault < 600:
            self.answer(fault, b"", {"Retry-After": "7"} if fault == 429 else {})
        elif server.redirect and name in server.large:
            self.answer(302, b"", {"Location": server.redirect})
        elif server.mirror and name in server.large and not self.path.startswith("/blob/"):
            headers = {"Location": f"{server.mirror.url}/blob/{name}", **self.digest_of(name)}
            self.answer(302, b"", headers)
        else:
            self.content(name, fault)

    def digest_of(self, name: str) -> dict[str, str]:
        body = self.server.files[name]
        if name in self.server.large:
            digest = self.server.digest or hashlib.sha256(body).hexdigest()
            return {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(body))}
        return {"ETag": f'"{hashlib.sha1(b"blob %d" % len(body) + bytes(1) + body).hexdigest()}"'}

    def content(self, name: str, fault: int | str | None) -> None:
        body, status, headers = self.server.files[name], 200, self.digest_of(name)
        ranged = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if ranged and self.server.ranges:
            start = int(ranged[1])
            if start >= len(body):
                self.answer(416, b"", {"Content-Range": f"bytes */{len(body)}", **headers})
                return
            status, headers["Content-Range"] = 206, f"bytes {start}-{len(body) - 1}/{len(body)}"
            body = body[start:]
        self.answer(status, body, headers, cut=fault if isinstance(fault, int) else None)

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None, cut: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.wfile.flush()
            self.connection.close()


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield running
        running.shutdown()


@pytest.fixture
def mirror() -> Iterator[Server]:
    with Server() as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield running
        running.shutdown()


class Waits(list[float]):
    def __call__(self, seconds: float) -> None:
        self.append(seconds)


def hub(server: Server, root: Path, waits: Waits | None = None, token: str = "") -> Hub:
    return Hub(root, endpoint=server.url, token=token, timeout_s=5.0, sleep=waits if waits is not None else Waits())


def fetch(server: Server, root: Path, name: str = "org/name", **options: Any) -> Path:
    hub_id = HubId.parse(name)
    assert hub_id
    return hub(server, root).fetch(hub_id, **options)


def test_fetches_and_then_needs_no_network(server: Server, tmp_path: Path) -> None:
    server.files["model.bin"] = b"pickle"
    heard: list[float] = []
    folder = fetch(server, tmp_path, progress=lambda _, share: heard.append(share))
    assert folder == tmp_path / "org--name" / COMMIT
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert (folder / "config.json").read_bytes() == CONFIG
    assert not (folder / "model.bin").exists()
    assert heard[-1] == 1.0
    requests = len(server.seen)
    assert fetch(server, tmp_path, offline=True) == folder
    assert len(server.seen) == requests
    with pytest.raises(DownloadError, match="network is off"):
        fetch(server, tmp_path, "org/other", offline=True)


def test_token_stays_with_the_endpoint(server: Server, mirror: Server, tmp_path: Path) -> None:
    server.mirror = mirror
    folder = hub(server, tmp_path, token="secret").fetch(HubId("org/name"))
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert {authorization for _, _, authorization in server.seen} == {"Bearer secret"}
    assert [authorization for _, _, authorization in mirror.seen] == [None]


def test_resumes_after_broken_connections(server: Server, tmp_path: Path) -> None:
    server.faults = [300_000, 0, 503, 500_000]
    waits = Waits()
    folder = hub(server, tmp_path, waits).fetch(HubId("org/name"))
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    ranges = [wanted for path, wanted, _ in server.seen if path.endswith("safetensors")]
    assert ranges == [None, "bytes=300000-", "bytes=300000-", "bytes=300000-", "bytes=800000-"]
    assert len(waits) == 4


def test_many_interruptions_are_fine_as_long_as_it_gets_further(server: Server, tmp_path: Path) -> None:
    server.faults = [20_000] * 40
    assert (fetch(server, tmp_path) / "model.safetensors").read_bytes() == WEIGHTS


def test_server_that_ignores_ranges(server: Server, tmp_path: Path) -> None:
    server.faults, server.ranges = [300_000], False
    assert (fetch(server, tmp_path) / "model.safetensors").read_bytes() == WEIGHTS


def test_gives_up_and_keeps_what_came(server: Server, tmp_path: Path) -> None:
    server.faults = [300_000, 503, 503, 503, 503, 503]
    with pytest.raises(DownloadError, match=r"gave up after 5 tries.*run again"):
        fetch(server, tmp_path)
    server.faults = []
    assert (fetch(server, tmp_path) / "model.safetensors").read_bytes() == WEIGHTS
    assert server.seen[-1][1] == "bytes=300000-"


def test_waits_as_long_as_the_server_asks(server: Server, tmp_path: Path) -> None:
    server.faults, waits = [429], Waits()
    hub(server, tmp_path, waits).fetch(HubId("org/name"))
    assert waits == [7.0]


def test_wrong_content_is_never_kept(server: Server, tmp_path: Path) -> None:
    server.digest = "0" * 64
    with pytest.raises(DownloadError, match="the content's digest is"):
        fetch(server, tmp_path)
    assert not list(tmp_path.rglob("*.safetensors"))
    assert not list(tmp_path.rglob("*.incomplete"))


def test_leftover_of_another_file_is_replaced(server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "org--name" / COMMIT
    folder.mkdir(parents=True)
    for leftover in (b"x" * 1000, b"x" * (len(WEIGHTS) + 5), WEIGHTS):
        (folder / "model.safetensors.incomplete").write_bytes(leftover)
        assert (fetch(server, tmp_path) / "model.safetensors").read_bytes() == WEIGHTS
        (folder / "model.safetensors").unlink()


def test_damaged_cache_is_fetched_again(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AI_ENGINE_HOME", str(tmp_path.parent))
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    root = tmp_path.parent / "hub"
    path = models.resolve("org/name") / "model.safetensors"
    assert path.is_relative_to(root)
    assert models.verify("org/name") == path.parent
    assert [entry.state for entry in models.list_models() if entry.name == "org/name"] == ["cached"]
    os.utime(path)
    assert models.resolve("org/name", offline=True) == path.parent, "touched, but its content is right"
    path.write_bytes(b"damaged")
    with pytest.raises(ModelFileError, match="differs from what was downloaded"):
        models.verify("org/name")
    with pytest.raises(DownloadError, match="network is off"):
        models.resolve("org/name", offline=True)
    models.resolve("org/name")
    assert path.read_bytes() == WEIGHTS
    tmp_path = root
    assert (fetch(server, tmp_path) / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("file:///etc/passwd", "not followed"),
        ("?again", "redirects"),
        ("ftp://127.0.0.1/x", "not"),
        ("http://[bad", "no URL"),
    ],
)
def test_odd_redirects_are_not_followed(target: str, words: str, server: Server, tmp_path: Path) -> None:
    server.redirect = target
    with pytest.raises((DownloadError, ModelNotFound), match=words):
        fetch(server, tmp_path)


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [(401, DownloadError, "HF_TOKEN"), (403, DownloadError, "accept its terms"), (400, DownloadError, "answers 400")],
)
def test_refusals_are_not_retried(
    status: int, error: type[Exception], words: str, server: Server, tmp_path: Path
) -> None:
    server.faults = [status]
    with pytest.raises(error, match=words):
        fetch(server, tmp_path)
    assert len(server.seen) == 3


def test_unknown_names(server: Server, tmp_path: Path) -> None:
    for name in ("org/nobody", "org/name:v9"):
        with pytest.raises(ModelNotFound, match="no such model, revision or file"):
            fetch(server, tmp_path, name)
    with pytest.raises(ModelNotFound, match="no GGUF file 'Q4_0'"):
        fetch(server, tmp_path, "org/name/Q4_0")


@pytest.mark.parametrize("name", ["../x.json", "/etc/x.json", "a/../../x", "a\\b", "", "a//b", "C:x", "./config.json"])
def test_names_that_leave_the_folder_are_refused(name: str, server: Server, tmp_path: Path) -> None:
    server.listing = {"sha": COMMIT, "siblings": [{"rfilename": "config.json"}, {"rfilename": name}]}
    with pytest.raises(DownloadError, match="refuses a repository"):
        fetch(server, tmp_path)
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("listing", [[], {"sha": "../x", "siblings": []}, {"sha": COMMIT}, {"siblings": [1]}, "text"])
def test_odd_listings(listing: Any, server: Server, tmp_path: Path) -> None:
    server.listing = listing or [0]
    with pytest.raises((DownloadError, UnsupportedModel)):
        fetch(server, tmp_path)


def test_files_are_chosen(tmp_path: Path) -> None:
    def pick(names: list[str], hub_id: str = "org/name") -> list[str]:
        parsed = HubId.parse(hub_id)
        assert parsed
        return choose_files(names, parsed)

    safetensors = [
        "a.safetensors",
        "b.safetensors",
        "config.json",
        "consolidated.safetensors",
        "x/y.safetensors",
        "z.md",
    ]
    assert pick(safetensors) == ["a.safetensors", "b.safetensors", "config.json"]
    ggufs = ["m-Q4_0.gguf", "m-Q4_K_M.gguf", "m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf", "README.md"]
    assert pick(ggufs) == ["m-Q4_K_M.gguf"]
    assert pick(ggufs, "org/name/q4_0") == ["m-Q4_0.gguf"]
    assert pick(ggufs, "org/name/m-Q4_0.gguf") == ["m-Q4_0.gguf"]
    assert pick(ggufs, "org/name:main/Q8_0") == ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]
    with pytest.raises(ModelNotFound, match="names 2 files"):
        pick(["a.gguf", "b.gguf"])
    with pytest.raises(UnsupportedModel, match="pickle files, which are never read"):
        pick(["pytorch_model.bin", "config.json"])
    assert HubId.parse("a/b:c/d.gguf") == HubId("a/b", "c", "d.gguf")
    assert HubId.parse("plain") is None
    assert str(HubId("a/b", "c", "d.gguf")) == "a/b:c/d.gguf"


def test_two_at_once_fetch_once(server: Server, tmp_path: Path) -> None:
    threads = [threading.Thread(target=fetch, args=(server, tmp_path)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(path.endswith("model.safetensors") for path, _, _ in server.seen) == 1
