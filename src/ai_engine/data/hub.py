"""Downloads from a model hub that speaks the Hugging Face HTTP API. Owns the protocol: listing, choice of files,
redirects, resuming, retries, digests. Does not own names that are no hub ids, nor reading models.

    GET {endpoint}/api/models/{repo}/revision/{revision}   -> {"sha": commit, "siblings": [{"rfilename": path}, ...]}
    GET {endpoint}/{repo}/resolve/{commit}/{file}          -> the bytes, or a redirect to another host that has them

A file's digest comes with the first answer: X-Linked-Etag (SHA-256) for large files, ETag (git blob id) for small ones.
The access token goes to the endpoint's own origin and nowhere else. Source: huggingface.co/docs/hub/api.
"""

from __future__ import annotations

import http.client
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from email.message import Message
from pathlib import Path
from typing import Any, Final

import msgspec

from ai_engine.data.files import Manifest, git_blob_sha1_of, locked, sha256_of, write_atomic
from ai_engine.ports.errors import DownloadError, ModelNotFound, UnsupportedModel
from ai_engine.ports.progress import Progress

MAX_REDIRECTS: Final = 8
MAX_LISTING_BYTES: Final = 64 << 20
TRIES_WITHOUT_PROGRESS: Final = 5
_RETRY_STATUS: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_WANTED: Final = re.compile(
    r"(?!consolidated)[^/]+\.safetensors|model\.safetensors\.index\.json|(config|generation_config|tokenizer"
    r"|tokenizer_config|special_tokens_map)\.json|chat_template\.jinja|LICENSE.*|NOTICE.*"
)
_HUB_ID: Final = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([\w.\-]+))?(?:/(.+))?")


class HubId(msgspec.Struct, frozen=True):
    """`org/name[:revision][/file.gguf or quantisation tag]`."""

    repo: str
    revision: str = "main"
    pick: str = ""

    @classmethod
    def parse(cls, text: str) -> HubId | None:
        match = _HUB_ID.fullmatch(text)
        return cls(match[1], match[2] or "main", match[3] or "") if match else None

    def __str__(self) -> str:
        revision = "" if self.revision == "main" else f":{self.revision}"
        return f"{self.repo}{revision}" + (f"/{self.pick}" if self.pick else "")


class _Refs(msgspec.Struct):
    """What was resolved before, so that a cached model needs no network: revision -> commit and its file names."""

    commits: dict[str, str] = {}
    files: dict[str, list[str]] = {}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any) -> None:
        return None  # surfaces as HTTPError; Hub follows by itself, minding the token


class _Interrupted(Exception):
    """An answer broke off or a server is busy: try again. ``wait_s`` is the server's wish."""

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class Hub:
    """One hub and a folder to keep its models in: `<root>/<org>--<name>/<commit>/`. Safe across processes.

    ``sleep`` is how to wait between tries (seconds).
    """

    def __init__(
        self,
        root: Path,
        *,
        endpoint: str = "https://huggingface.co",
        token: str = "",
        timeout_s: float = 30.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._root, self._endpoint, self._token = root, endpoint.rstrip("/"), token
        self._timeout_s, self._sleep = timeout_s, sleep
        self._opener = urllib.request.build_opener(_NoRedirect)

    def fetch(self, hub_id: HubId, *, progress: Progress | None = None, offline: bool = False) -> Path:
        """The local folder (safetensors) or .gguf file, downloaded if need be. A revision once fetched is not looked up
        again. Raises ModelNotFound, DownloadError, UnsupportedModel (nothing in the repository that we read)."""
        folder = self._root / hub_id.repo.replace("/", "--")
        refs_path = folder / "refs.json"
        if cached := self._cached(folder, hub_id, Manifest.looks_right):
            return cached
        if offline:
            if cached := self._cached(folder, hub_id, Manifest.is_right):
                return cached
            raise DownloadError(f"{hub_id} is not in the cache ({folder}), and the network is off; run once without it")
        with locked(self._root / f"{folder.name}.lock"):
            if cached := self._cached(folder, hub_id, Manifest.looks_right):
                return cached  # another process was faster
            commit, names = self._list(hub_id)
            wanted = choose_files(names, hub_id)
            manifest = Manifest(folder / commit)
            for index, name in enumerate(wanted):
                if not manifest.looks_right(name) and not manifest.is_right(name):
                    self._download(
                        hub_id, commit, name, manifest, f"fetch {name} ({index + 1}/{len(wanted)})", progress
                    )
            refs = _load_refs(refs_path)
            refs.commits[hub_id.revision], refs.files[commit] = commit, names
            write_atomic(refs_path, msgspec.json.encode(refs))
        return _entry(folder / commit, wanted)

    def locate(self, hub_id: HubId) -> Path | None:
        """Where a fetched model is, in whatever state its files are."""
        return self._cached(self._root / hub_id.repo.replace("/", "--"), hub_id, lambda *_: True)

    def _cached(self, folder: Path, hub_id: HubId, check: Callable[[Manifest, str], bool]) -> Path | None:
        refs = _load_refs(folder / "refs.json")
        commit = refs.commits.get(hub_id.revision, hub_id.revision)
        if commit not in refs.files:
            return None
        wanted = choose_files(refs.files[commit], hub_id)
        manifest = Manifest(folder / commit)
        return _entry(folder / commit, wanted) if all(check(manifest, name) for name in wanted) else None

    def _list(self, hub_id: HubId) -> tuple[str, list[str]]:
        """The commit that the revision names, and its files."""
        url = f"{self._endpoint}/api/models/{hub_id.repo}/revision/{urllib.parse.quote(hub_id.revision, safe='')}"
        body = self._retry(lambda _: self._read_listing(url, str(hub_id)), lambda: 0)
        try:
            listing = msgspec.json.decode(body)
            commit, names = listing["sha"], [entry["rfilename"] for entry in listing["siblings"]]
        except (msgspec.MsgspecError, LookupError, TypeError) as error:
            raise DownloadError(f"{url}: the answer is no model listing ({error}); is HF_ENDPOINT right?") from error
        if not isinstance(commit, str) or not re.fullmatch("[0-9a-f]{7,64}", commit):
            raise DownloadError(f"{url}: the commit is {commit!r}, expected hexadecimal digits")
        for name in names:
            if not isinstance(name, str) or not _is_safe(name):
                raise DownloadError(f"{url}: refuses a repository with a file called {name!r}")
        return commit, names

    def _read_listing(self, url: str, what: str) -> bytes:
        answer, _ = self._open(url, what)
        with answer:
            body: bytes = answer.read(MAX_LISTING_BYTES + 1)
        if len(body) > MAX_LISTING_BYTES:
            raise DownloadError(f"{url}: the listing is longer than {MAX_LISTING_BYTES} bytes")
        return body

    def _download(
        self, hub_id: HubId, commit: str, name: str, manifest: Manifest, phase: str, progress: Progress | None
    ) -> None:
        """Fetch one file into the manifest's folder, resuming what an earlier try or process left."""
        url = f"{self._endpoint}/{hub_id.repo}/resolve/{commit}/{urllib.parse.quote(name)}"
        target = manifest.folder / name
        partial = target.with_name(target.name + ".incomplete")
        target.parent.mkdir(parents=True, exist_ok=True)
        for fresh in (False, True):
            digest = self._retry(
                lambda _: self._transfer(url, f"{hub_id}: {name}", partial, phase, progress),
                lambda: partial.stat().st_size if partial.exists() else 0,
            )
            found = sha256_of(partial) if len(digest) == 64 else git_blob_sha1_of(partial)
            if found == digest:
                partial.replace(target)
                manifest.record(name, digest)
                return
            partial.unlink()
            if fresh:
                raise DownloadError(f"{url}: the content's digest is {found}, the hub says {digest}; try again later")

    def _transfer(self, url: str, what: str, partial: Path, phase: str, progress: Progress | None) -> str:
        """One try at the rest of a file; returns the digest that the whole must have."""
        have = partial.stat().st_size if partial.exists() else 0
        answer, first = self._open(url, what, {"Range": f"bytes={have}-"} if have else {})
        digest = (first.get("X-Linked-Etag") or first.get("ETag") or "").removeprefix("W/").strip('"').lower()
        if not re.fullmatch("[0-9a-f]{64}|[0-9a-f]{40}", digest):
            answer.close()
            raise DownloadError(f"{url}: the answer states no digest (ETag {digest!r}), so the file cannot be checked")
        with answer:
            if answer.status == 416:  # nothing left, or the partial file is of something else
                if have != _total(answer.headers, first, -1):
                    partial.unlink()
                    raise _Interrupted("the server refused to resume")
                return digest
            if answer.status != 206 or not (answer.headers.get("Content-Range") or "").startswith(f"bytes {have}-"):
                have = 0
            total = _total(answer.headers, first, have)
            with partial.open("r+b" if have else "wb") as file:
                file.seek(have)
                while block := answer.read(1 << 18):
                    have += len(block)
                    if total is not None and have > total:
                        raise DownloadError(f"{url}: sends more than the {total} bytes it announced")
                    file.write(block)
                    if progress:
                        progress(phase, have / total if total else 0.0)
        if total is not None and have < total:
            raise _Interrupted(f"the connection ended after {have} of {total} bytes")
        return digest

    def _open(
        self, url: str, what: str, headers: Mapping[str, str] | None = None
    ) -> tuple[http.client.HTTPResponse, Message]:
        """The final answer to a GET and the headers of the endpoint's own last answer; errors become ours."""
        first: Message | None = None
        for _ in range(MAX_REDIRECTS):
            own = _origin(url) == _origin(self._endpoint)
            request = urllib.request.Request(url, headers={"User-Agent": "ai-engine", **(headers or {})})
            request.add_header("Accept-Encoding", "identity")
            if own and self._token:
                request.add_unredirected_header("Authorization", f"Bearer {self._token}")
            try:
                answer = self._opener.open(request, timeout=self._timeout_s)
            except urllib.error.HTTPError as error:
                answer = error
            if own and (first is None or "X-Linked-Etag" not in first):
                first = answer.headers
            if answer.status not in (301, 302, 303, 307, 308):
                if answer.status >= 400 and answer.status != 416:
                    answer.close()
                    raise self._failure(answer.status, answer.headers, url, what)
                return answer, first if first is not None else answer.headers
            answer.close()
            target = urllib.parse.urljoin(url, answer.headers.get("Location") or "")
            if _origin(target)[0] not in ("http", "https") or (_origin(url)[0] == "https" != _origin(target)[0]):
                raise DownloadError(f"{url}: redirects to {target!r}, which is not followed")
            url = target
        raise DownloadError(f"{url}: more than {MAX_REDIRECTS} redirects")

    def _failure(self, status: int, headers: Message, url: str, what: str) -> Exception:
        if status in (401, 403):
            advice = "the token in HF_TOKEN has no access" if self._token else "set HF_TOKEN"
            return DownloadError(
                f"{what}: the hub answers {status} ({url}); the model is private, gated or misspelt: check its name, "
                f"accept its terms on its page, and {advice}"
            )
        if status in (404, 410):
            return ModelNotFound(f"{what}: the hub has no such model, revision or file ({url}); check the spelling")
        if status in _RETRY_STATUS:
            wait = headers.get("Retry-After") or ""
            return _Interrupted(f"the hub answers {status}", min(float(wait), 120.0) if wait.isdigit() else None)
        return DownloadError(f"{what}: the hub answers {status} ({url})")

    def _retry(self, attempt: Callable[[int], Any], progress_mark: Callable[[], int]) -> Any:
        """Run ``attempt`` until it returns. Gives up after some failures in a row without getting any further."""
        failures, mark = 0, progress_mark()
        while True:
            try:
                return attempt(failures)
            except ValueError as error:
                raise DownloadError(f"the hub's address, or one it redirects to, is no URL: {error}") from error
            except (OSError, http.client.HTTPException, _Interrupted) as error:
                now = progress_mark()
                failures, mark = (1 if now > mark else failures + 1), now
                if failures >= TRIES_WITHOUT_PROGRESS:
                    raise DownloadError(
                        f"gave up after {failures} tries: {error}; what came is kept, run again"
                    ) from error
                wait_s = error.wait_s if isinstance(error, _Interrupted) else None
                self._sleep(wait_s if wait_s is not None else 0.5 * 2 ** (failures - 1))


def choose_files(names: list[str], hub_id: HubId) -> list[str]:
    """The files to fetch: those of the safetensors model, or one GGUF (all its parts)."""
    ggufs = [name for name in names if name.lower().endswith(".gguf")]
    weights = [name for name in names if name.endswith(".safetensors") and _WANTED.fullmatch(name)]
    if hub_id.pick:
        tag = re.compile(rf"(^|[-._/]){re.escape(hub_id.pick)}([-._/]|$)", re.IGNORECASE)
        chosen = [name for name in ggufs if name == hub_id.pick] or [name for name in ggufs if tag.search(name)]
        if not chosen:
            raise ModelNotFound(f"{hub_id.repo} has no GGUF file {hub_id.pick!r}; it has: {_some(ggufs)}")
    elif weights:
        return sorted(name for name in names if _WANTED.fullmatch(name))
    else:
        chosen = ggufs
    sets = {re.sub(r"-\d{5}-of-\d{5}\.gguf$", ".gguf", name): name for name in chosen}
    if len(sets) > 1:
        default = [name for name in sets if re.search("q4_k_m", name, re.IGNORECASE)]
        if hub_id.pick or len(default) != 1:
            raise ModelNotFound(f"{hub_id} names {len(sets)} files, add one of: {_some(sorted(sets))}")
        sets = {default[0]: sets[default[0]]}
    if not sets:
        pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
        reason = "only pickle files, which are never read; convert it to safetensors" if pickles else "no such file"
        raise UnsupportedModel(f"{hub_id.repo}: expected safetensors or GGUF files, found {reason}")
    (stem,) = sets
    return sorted(name for name in names if re.sub(r"-\d{5}-of-\d{5}\.gguf$", ".gguf", name) == stem)


def _entry(folder: Path, wanted: list[str]) -> Path:
    return folder / wanted[0] if wanted[0].lower().endswith(".gguf") else folder


def _some(names: list[str]) -> str:
    return ", ".join(names[:20]) + (" ..." if len(names) > 20 else "") if names else "none"


def _load_refs(path: Path) -> _Refs:
    try:
        refs = msgspec.json.decode(path.read_bytes(), type=_Refs)
    except (OSError, msgspec.MsgspecError):
        return _Refs()
    safe = {sha: names for sha, names in refs.files.items() if _is_safe(sha) and all(map(_is_safe, names))}
    return _Refs(refs.commits, safe)


def _is_safe(name: str) -> bool:
    """Whether a file name from the network stays inside its folder."""
    parts = name.split("/")
    return bool(name) and "\\" not in name and "\0" not in name and ":" not in name and not {"", ".", ".."} & set(parts)


def _origin(url: str) -> tuple[str, str, int | None]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _total(headers: Message, first: Message, have: int) -> int | None:
    """Size of the whole file, as far as the answers tell; ``have``: bytes that this answer does not repeat."""
    ranged = re.fullmatch(r"bytes (?:\d+-\d+|\*)/(\d+)", headers.get("Content-Range") or "")
    if ranged:
        return int(ranged[1])
    length = headers.get("Content-Length") or ""
    linked = first.get("X-Linked-Size") or ""
    if linked.isdigit():
        return int(linked)
    return have + int(length) if length.isdigit() and have >= 0 else None
