"""The keys file: what is in it, how a presented key is found, and what a change does while the server runs."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from ai_engine.api.keys import (
    MAX_FILE_BYTES,
    Key,
    Keyring,
    Keys,
    add_key,
    digest_of,
    keys_table,
    new_key,
    parse_keys,
    read_keys,
    remove_keys,
    write_keys,
)
from ai_engine.cli import main
from ai_engine.ports.errors import ConfigError, InvalidApiKey

NOW_S = 1_700_000_000.0


def entry(key: str = "k", **fields: Any) -> dict[str, Any]:
    return {"name": "a", "sha256": digest_of(key.encode())} | fields


def parse(*entries: dict[str, Any]) -> list[Key]:
    return parse_keys(json.dumps({"keys": entries}).encode(), "keys.json")


def test_an_entry_has_the_rights_that_it_states() -> None:
    (key,) = parse(
        entry(models=["m"], requests_per_minute=60, tokens_per_minute=1e6, concurrent=2, priority=-3, weight=2.5,
              strict=True, admin=True, shared_prefix="team", expires="2027-01-31T00:00:00+01:00")
    )  # fmt: skip
    assert (key.requests_per_minute, key.tokens_per_minute, key.concurrent) == (60, 1_000_000, 2)
    assert (key.priority, key.weight, key.strict, key.admin, key.models) == (-3, 2.5, True, True, ["m"])
    (plain,) = parse(entry())
    assert plain == Key(name="a", sha256=digest_of(b"k"))


@pytest.mark.parametrize(
    ("bad", "where"),
    [
        (entry(nmae="a"), "keys[0].nmae"),
        ({"name": "a"}, "keys[0].sha256"),
        (entry() | {"sha256": "secret-in-plain"}, "keys[0].sha256"),
        (entry() | {"sha256": digest_of(b"k").upper()}, "keys[0].sha256"),
        (entry(name="a b"), "keys[0].name"),
        (entry(name=""), "keys[0].name"),
        (entry(name="Ä"), "keys[0].name"),
        (entry(weight=0), "keys[0].weight"),
        (entry(admin="yes"), "keys[0].admin"),
        (entry(tokens_per_minute=-1), "keys[0].tokens_per_minute"),
        (entry(tokens_per_minute=True), "keys[0].tokens_per_minute"),
        (entry(expires="2027-01-31T00:00:00"), "keys[0].expires"),
        (entry(expires="soon"), "keys[0].expires"),
        (entry(models="m"), "keys[0].models"),
    ],
)
def test_a_wrong_entry_is_named(bad: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(bad)
    assert f"keys file keys.json: {where}: " in caught.value.message


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{}", b"{", b'{"keys":{}}', b'{"keys":[],"keys":[]}', b'{"keys":[1]}', b"\xff"]
)
def test_what_is_no_keys_file_is_refused(text: bytes) -> None:
    with pytest.raises(ConfigError, match="keys file x"):
        parse_keys(text, "x")


def test_one_digest_has_one_entry() -> None:
    with pytest.raises(ConfigError, match=r"keys\[1\]\.sha256 is keys\[0\]'s too"):
        parse(entry(), entry(name="b"))


def test_a_file_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "k.json"
    path.write_bytes(b" " * (MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="more than"):
        read_keys(path)


# --- finding a key ---


@pytest.mark.parametrize("key", ["plain", "späßchen-ключ-🔑", "with space", new_key()])
def test_a_key_is_found_whatever_its_letters(key: str) -> None:
    ring = Keyring(parse(entry("other"), entry(key, name="me")))
    assert ring.find(key.encode(), NOW_S).name == "me"
    for wrong in (key[:-1], key + "x", key.upper() + "x", ""):
        with pytest.raises(InvalidApiKey):
            ring.find(wrong.encode(), NOW_S)


def test_latin_1_from_older_clients_is_the_same_key() -> None:
    assert Keyring(parse(entry("é"))).find(b"\xe9", NOW_S).name == "a"


def test_a_key_ends_at_its_moment() -> None:
    ring = Keyring(parse(entry(expires="2023-11-14T22:13:20Z")))  # NOW_S
    assert ring.find(b"k", NOW_S - 1).name == "a"
    with pytest.raises(InvalidApiKey, match="expired at 2023"):
        ring.find(b"k", NOW_S)


def test_prefixes_are_shared_within_a_name_or_as_declared() -> None:
    one, rotated, other, x, y = parse(
        entry("1"), entry("2"), entry("3", name="b"), entry("4", name="x", shared_prefix="s"),
        entry("5", name="y", shared_prefix="s"),
    )  # fmt: skip
    assert one.cache_scope == rotated.cache_scope != other.cache_scope
    assert x.cache_scope == y.cache_scope not in (one.cache_scope, other.cache_scope)
    (tricky,) = parse(entry(name="s"))
    assert tricky.cache_scope != x.cache_scope  # a name is not a group's


# --- while the server runs ---


class Reads:
    def __init__(self) -> None:
        self.seen: list[tuple[int, bool]] = []

    def __call__(self, num_keys: int, good: bool) -> None:
        self.seen.append((num_keys, good))


def touch(path: Path, text: str) -> None:
    """Write, with a time of its own: tests are faster than some clocks."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.write_text(text)
    os.utime(path, ns=(before + 10**9, before + 10**9))


def test_a_change_of_the_file_is_in_force_without_a_restart(tmp_path: Path) -> None:
    path, reads = tmp_path / "k.json", Reads()
    first = add_key(path, {"name": "a"})
    keys = Keys(path, on_read=reads)
    assert not keys.reload(), "nothing changed"
    second = add_key(path, {"name": "b", "concurrent": 3})
    with pytest.raises(InvalidApiKey):
        keys.find(second.encode(), NOW_S)
    assert keys.reload()
    assert keys.find(second.encode(), NOW_S).concurrent == 3
    remove_keys(path, "a")
    assert keys.reload()
    with pytest.raises(InvalidApiKey):
        keys.find(first.encode(), NOW_S)
    assert reads.seen == [(1, True), (2, True), (1, True)]


@pytest.mark.parametrize("broken", ["", "{", '{"keys":[{"name":"a"}]}', None])
def test_a_broken_file_keeps_the_old_keys_and_says_so(
    broken: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, reads = tmp_path / "k.json", Reads()
    key = add_key(path, {"name": "a"})
    good = path.read_text()
    keys = Keys(path, on_read=reads)
    if broken is None:
        path.unlink()
    else:
        touch(path, broken)
    assert not keys.reload()
    assert "keys.json" not in keys.error
    assert str(path) in keys.error
    assert keys.find(key.encode(), NOW_S).name == "a"
    assert any(record.levelname == "ERROR" and "stay in force" in record.message for record in caplog.records)
    assert not keys.reload(), "said once"
    touch(path, good)
    assert keys.reload()
    assert keys.error == ""
    assert reads.seen == [(1, True), (1, False), (1, True)]


def test_a_server_does_not_start_without_the_keys_it_was_told_to_ask_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        Keys(tmp_path / "none.json")


def test_no_entries_lets_nobody_in(tmp_path: Path) -> None:
    write_keys(tmp_path / "k.json", [])
    keys = Keys(tmp_path / "k.json")
    assert not keys.open
    with pytest.raises(InvalidApiKey):
        keys.find(b"", NOW_S)
    assert Keys().open


def test_the_key_of_the_command_line_is_an_admin_s_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "k.json"
    add_key(path, {"name": "a"})
    keys = Keys(path, admin_key="späß")
    assert keys.find("späß".encode(), NOW_S).admin
    remove_keys(path, "a")
    assert keys.reload()
    assert keys.find("späß".encode(), NOW_S).admin


# --- the command ---


def test_add_list_remove_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "k.json")
    assert main(["keys", "add", path, "team", "--tokens-per-minute", "5", "--model", "m", "--weight", "2"]) == 0
    key = capsys.readouterr().out.strip()
    assert main(["keys", "add", path, "team", "--admin"]) == 0
    capsys.readouterr()
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
    assert key not in Path(path).read_text()
    found = Keys(Path(path)).find(key.encode(), NOW_S)
    assert (found.name, found.tokens_per_minute, found.models, found.weight) == ("team", 5, ["m"], 2.0)
    assert main(["keys", "list", path]) == 0
    shown = capsys.readouterr().out
    assert "5 tokens/min" in shown
    assert key not in shown
    assert digest_of(key.encode()) not in shown
    assert main(["keys", "remove", path, digest_of(key.encode())[:12]]) == 0
    assert [left.admin for left in read_keys(Path(path))] == [True]
    assert main(["keys", "check", path]) == 0
    assert "1 keys" in capsys.readouterr().out
    assert main(["keys", "remove", path, "nobody"]) == 2
    assert "nobody" in capsys.readouterr().err


def test_a_wrong_option_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "k.json"
    assert main(["keys", "add", str(path), "a", "--weight", "-1"]) == 2
    assert "weight" in capsys.readouterr().err
    assert not path.exists()
    assert list(tmp_path.iterdir()) == []


def test_the_table_says_what_has_expired() -> None:
    table = keys_table(parse(entry(expires="2023-11-14T22:13:20Z"), entry("2", expires="2033-11-14T22:13:20Z")), NOW_S)
    assert "expired 2023" in table
    assert "until 2033" in table
