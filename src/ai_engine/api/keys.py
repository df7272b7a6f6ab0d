"""Who may ask, and for what: API keys, the file that lists them, and the keys of the moment.

Owns the file's fields, the look-up of a presented key, and re-reading while the server runs. Does not own what a key's
limits do (limits.py) nor which routes need one (app.py).

The file is JSON: ``{"keys": [{"name": "team-a", "sha256": "<64 hex digits>", ...}]}``. It holds no key, only SHA-256
digests: our keys are 256 random bits, so there is no dictionary to try and nothing that a slow hash would add. Several
entries may share a name: two keys of one tenant while one replaces the other; its limits are counted once, by name.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any, Final

import msgspec

from ai_engine.contracts.fields import Check, Checking, Flag, Integer, ListOf, Number, Record, Text, show
from ai_engine.contracts.json_text import decode_json
from ai_engine.ports.errors import ConfigError, InvalidApiKey, InvalidRequest

logger = logging.getLogger(__name__)

KEY_PREFIX: Final = "sk-ai-"
MAX_KEYS: Final = 10_000
MAX_FILE_BYTES: Final = 16 << 20


class Key(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry of the keys file, and who asks: `Exchange.key`. Limits of 0 are none.

    ``priority``: lower runs first. ``weight``: share of the machine against other names that want it too. Cached
    prefixes are shared within a name, and between names whose ``shared_prefix`` is the same text. ``admin`` may read
    everything (all traces, the metrics).
    """

    name: str
    sha256: str = ""
    models: list[str] = []  # ids that it may use; empty: all
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent: int = 0  # requests at once
    priority: int = 0
    weight: float = 1.0
    strict: bool = False  # unknown and unused fields are errors
    admin: bool = False
    shared_prefix: str = ""
    expires: str = ""  # RFC 3339 with a zone

    @property
    def cache_scope(self) -> str:
        """Who shares cached prefixes with it."""
        return f"shared:{self.shared_prefix}" if self.shared_prefix else f"key:{self.name}" if self.name else ""

    @property
    def expires_s(self) -> float:
        """Unix seconds."""
        return datetime.fromisoformat(self.expires).timestamp() if self.expires else float("inf")

    def may_use(self, *names: str) -> bool:
        """Whether any of these names of one model is among its own."""
        return not self.models or any(name in self.models for name in names)


ANYBODY: Final = Key(name="", admin=True)
"""Who asks where there are no keys: the machine's own user."""


class _Name:
    """Printable ASCII: names go into logs, labels and files."""

    expected = "1 to 64 letters, digits, dots, dashes and underscores"

    def check(self, value: Any, at: Checking) -> str:
        good = type(value) is str and value.isascii() and value.replace(".", "").replace("-", "").replace("_", "")
        if not good or not good.isalnum() or len(value) > 64:
            at.fail(show(value), self.expected)
        return str(value)


class _Digest:
    expected = "64 lower-case hex digits; `ai-engine keys add` makes them"

    def check(self, value: Any, at: Checking) -> str:
        if type(value) is not str or len(value) != 64 or set(value) - set("0123456789abcdef"):
            at.fail(show(value), self.expected)
        return str(value)


class _Moment:
    expected = 'a time with its zone, such as "2027-01-31T00:00:00Z"'

    def check(self, value: Any, at: Checking) -> str:
        if type(value) is not str or _zone_of(value) is None:
            at.fail(show(value), self.expected)
        return value


def _zone_of(text: str) -> tzinfo | None:
    try:
        return datetime.fromisoformat(text).tzinfo
    except ValueError:
        return None


_FIELDS: Final[dict[str, Check]] = {
    "name": _Name(),
    "sha256": _Digest(),
    "models": ListOf(Text(1, 512), 0, 256),
    "requests_per_minute": Integer(0, 1 << 31),
    "tokens_per_minute": Integer(0, 1 << 40),
    "concurrent": Integer(0, 1 << 20),
    "priority": Integer(-1000, 1000),
    "weight": Number(0.01, 100),
    "strict": Flag(),
    "admin": Flag(),
    "shared_prefix": _Name(),
    "expires": _Moment(),
}
_FILE: Final = Record(
    {"keys": ListOf(Record(_FIELDS, frozenset({"name", "sha256"})), 0, MAX_KEYS)}, frozenset({"keys"})
)


SETTINGS: Final = tuple(name for name in _FIELDS if name != "sha256")
"""What an operator says of a key."""


def digest_of(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def new_key() -> str:
    """A key of 256 random bits."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def parse_keys(text: bytes, where: str) -> list[Key]:
    """The entries of a keys file. Raises ConfigError naming the entry, what was found and what was expected."""
    try:
        entries = _FILE.check(decode_json(text), Checking(strict=True))["keys"]
    except InvalidRequest as error:
        raise ConfigError(f"keys file {where}: {error.message}", param="keys") from None
    seen: dict[str, int] = {}
    for index, entry in enumerate(entries):
        first = seen.setdefault(entry["sha256"], index)
        if first != index:
            raise ConfigError(
                f"keys file {where}: keys[{index}].sha256 is keys[{first}]'s too. Fix: remove one of the two.",
                param="keys",
            )
    return [Key(**entry) for entry in entries]


def read_keys(path: Path) -> list[Key]:
    """Raises ConfigError when the file cannot be read or is not one."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"keys file {path}: {error.strerror or error}", param="keys") from None
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"keys file {path}: more than {MAX_FILE_BYTES} bytes", param="keys")
    return parse_keys(text, str(path))


def write_keys(path: Path, keys: Iterable[Key]) -> None:
    """Replace the file in one step, for its owner only: whoever reads sees the old one or the new one."""
    text = msgspec.json.format(msgspec.json.encode({"keys": list(keys)}), indent=2) + b"\n"
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ConfigError(f"keys file {path}: {error.strerror or error}", param="keys") from None


class Keyring:
    """Finds the key that was presented. Immutable."""

    def __init__(self, keys: Iterable[Key]) -> None:
        self._keys = {bytes.fromhex(key.sha256): key for key in keys}
        self._expires_s = {digest: key.expires_s for digest, key in self._keys.items()}

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, presented: bytes, wall_s: float) -> Key:
        """The entry of a key as it came in a header. Raises InvalidApiKey.

        The table is searched by digest, so how long it takes tells of digests only, which nobody can choose. Bytes
        beyond ASCII are UTF-8 from some clients and Latin-1 from others: both are the same key.
        """
        for form in {presented, presented.decode("latin-1").encode()}:
            digest = hashlib.sha256(form).digest()
            key = self._keys.get(digest)
            if key is not None and hmac.compare_digest(bytes.fromhex(key.sha256), digest):
                if wall_s >= self._expires_s[digest]:
                    raise InvalidApiKey(f"This API key expired at {key.expires}. Fix: ask for a new one.")
                return key
        raise InvalidApiKey("The API key is wrong. Fix: send 'Authorization: Bearer <key>'.")


class Keys:
    """The keys of the moment: those of a file, re-read when it changes, and one given on the command line.

    A file that is broken or gone changes nothing: the last good keys stay, `error` says why, and the log too. A key
    that is taken out is refused from then on; what runs for it runs on.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        admin_key: str = "",
        on_read: Callable[[int, bool], None] = lambda n, ok: None,
    ) -> None:
        """``on_read(number of keys, whether the file was good)``. Raises ConfigError: a server must not start without
        the keys that it was told to ask for."""
        self._path = path
        self._fixed = [Key(name="admin", sha256=digest_of(admin_key.encode()), admin=True)] if admin_key else []
        self._on_read = on_read
        self._stamp: tuple[int, ...] = ()
        self.error = ""
        self._ring = Keyring(self._fixed)
        if path is not None:
            self._stamp = _stamp(path)
            self._take(read_keys(path))

    @property
    def open(self) -> bool:
        """Nobody needs a key. A file without entries is not that: it lets nobody in."""
        return self._path is None and not self._fixed

    def __len__(self) -> int:
        return len(self._ring)

    def find(self, presented: bytes, wall_s: float) -> Key:
        """Raises InvalidApiKey."""
        return self._ring.find(presented, wall_s)

    def reload(self, *, force: bool = False) -> bool:
        """Read the file again if it has changed (or anyway); whether its keys are now in force."""
        if self._path is None:
            return False
        stamp = _stamp(self._path)
        if stamp == self._stamp and not force:
            return False
        self._stamp = stamp
        try:
            self._take(read_keys(self._path))
        except ConfigError as error:
            self.error = error.message
            logger.error("%s; the %d keys read before stay in force", error.message, len(self._ring))
            self._on_read(len(self._ring), False)
            return False
        logger.warning("keys file %s: read again, %d keys in force", self._path, len(self._ring))
        return True

    def _take(self, keys: list[Key]) -> None:
        self._ring, self.error = Keyring([*keys, *self._fixed]), ""
        self._on_read(len(self._ring), True)


def _stamp(path: Path) -> tuple[int, ...]:
    """Differs when the file has been written or replaced."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_ino, found.st_size


# what `ai-engine keys` does


def add_key(path: Path, fields: Mapping[str, Any]) -> str:
    """Append an entry and return its key, which is written nowhere else. Raises ConfigError."""
    keys = read_keys(path) if path.exists() else []
    key = new_key()
    entry = {name: value for name, value in fields.items() if value is not None} | {"sha256": digest_of(key.encode())}
    made = parse_keys(msgspec.json.encode({"keys": [entry]}), str(path))
    write_keys(path, [*keys, *made])
    return key


def remove_keys(path: Path, which: str) -> list[Key]:
    """Take out every entry of that name, or the one whose digest begins so (8 digits or more). Raises ConfigError."""
    keys = read_keys(path)
    gone = [key for key in keys if key.name == which]
    if not gone and len(which) >= 8:
        gone = [key for key in keys if key.sha256.startswith(which)]
        if len(gone) > 1:
            raise ConfigError(f"keys file {path}: {len(gone)} digests begin with {which}; give more digits")
    if not gone:
        raise ConfigError(f"keys file {path}: no key has the name or digest {which!r}; see `ai-engine keys list`")
    write_keys(path, [key for key in keys if key not in gone])
    return gone


def keys_table(keys: Iterable[Key], wall_s: float) -> str:
    """Entries for people to read; digests are cut."""
    rows = [("NAME", "DIGEST", "LIMITS", "RIGHTS")]
    for key in keys:
        limits = [
            f"{value:g} {unit}"
            for value, unit in (
                (key.requests_per_minute, "requests/min"),
                (key.tokens_per_minute, "tokens/min"),
                (key.concurrent, "at once"),
            )
            if value
        ]
        rights = [word for word, has in (("admin", key.admin), ("strict", key.strict)) if has]
        rights += [f"priority {key.priority}"] * bool(key.priority) + [f"weight {key.weight:g}"] * (key.weight != 1)
        rights += [f"models {' '.join(key.models)}"] * bool(key.models)
        rights += [f"shares prefixes as {key.shared_prefix}"] * bool(key.shared_prefix)
        if key.expires:
            rights.append(("expired " if wall_s >= key.expires_s else "until ") + key.expires)
        rows.append((key.name, key.sha256[:12], ", ".join(limits) or "none", ", ".join(rights) or "-"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows
    )
