"""Hostile JSON is an InvalidJson that says where, and nothing else; good JSON reads as the standard reader reads it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ai_engine.contracts.json_text import MAX_DEPTH, decode_json
from ai_engine.ports.errors import InvalidJson

SUITE = sorted((Path(__file__).parents[2] / "vectors" / "json-test-suite" / "test_parsing").glob("*.json"))
DEEP = {"arrays": b"[" * 100_000, "objects": b'[{"":' * 50_000}


def test_the_suite_is_there() -> None:
    assert len(SUITE) == 316


def problem(body: bytes) -> str | None:
    """The error's message, None when the body is good; any other exception is a failure of the test."""
    try:
        decode_json(body)
    except InvalidJson as error:
        return error.message
    return None


@pytest.mark.parametrize("path", SUITE, ids=lambda path: path.stem)
def test_json_test_suite(path: Path) -> None:
    body = path.read_bytes()
    accepted = problem(body) is None
    if path.name.startswith("y_"):
        duplicate = path.stem in ("y_object_duplicated_key", "y_object_duplicated_key_and_value")
        assert accepted is not duplicate
    elif path.name.startswith("n_"):
        assert not accepted


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "empty"),
        (b'{"a": tru}', "at byte 10 (line 1, column 11)"),
        (b'{\n "a": 1,\n}', "at byte 11 (line 3, column 1)"),
        (b'{"a": [1, 2', "ends too early, at byte 11"),
        (b'{"a": "\xff"}', "0xff at byte 7"),
        (b'"\\ud800"', "half a surrogate pair"),
        (b'{"a": NaN}', "at byte 6"),
        (b'{"a": Infinity}', "at byte 6"),
        (b'{"a": 1e400}', "too large"),
        (b"9" * 5000, "too large"),
        (b"\xef\xbb\xbf{}", "at byte 0"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "'c' twice"),
        (b'{"a": 1, "\\u0061": 2}', "'a' twice"),
    ],
)
def test_errors_say_what_and_where(body: bytes, words: str) -> None:
    with pytest.raises(InvalidJson) as caught:
        decode_json(body)
    assert words in caught.value.message


@pytest.mark.parametrize("kind", DEEP)
def test_deep_nesting_is_an_error_whatever_the_depth(kind: str) -> None:
    with pytest.raises(InvalidJson, match="nested"):
        decode_json(DEEP[kind])
    with pytest.raises(InvalidJson, match="nested"):
        decode_json(b"[" * (MAX_DEPTH + 2) + b"]" * (MAX_DEPTH + 2))
    decode_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)


def test_text_that_looks_like_keys_is_not_a_duplicate() -> None:
    body = json.dumps({"a": '{"b": 1, "b": 2}', "c": 'x": "y"'}).encode()
    assert decode_json(body) == json.loads(body)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(VALUES, st.booleans())
def test_reads_what_the_standard_reader_reads(value: object, ascii_only: bool) -> None:
    assert decode_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@given(st.binary(max_size=60) | st.text(alphabet='{}[]",:\\u0123dDeE+-. \ntrue', max_size=60).map(str.encode))
def test_any_bytes_give_a_value_or_invalid_json(body: bytes) -> None:
    message = problem(body)
    assert message is None or 0 < len(message) < 400


def test_a_large_body_is_read_in_linear_time() -> None:
    body = json.dumps({"prompt": list(range(100_000)), "text": 'a":' * 100_000}).encode()
    started = time.perf_counter()
    decode_json(body)
    assert time.perf_counter() - started < 2.0
