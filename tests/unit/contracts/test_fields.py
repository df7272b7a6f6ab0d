"""Every check: what passes unchanged, what fails, and that the error has path, found, expected."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ai_engine.contracts.fields import (
    MAX_WARNINGS,
    ByType,
    Check,
    Checking,
    Choice,
    Flag,
    Integer,
    ListOf,
    Number,
    Record,
    Text,
    TokenKeys,
    Unsupported,
    Unused,
)
from ai_engine.ports.errors import InvalidRequest, InvalidValue, UnsupportedParameter

GOOD: list[tuple[Check, Any, Any]] = [
    (Flag(), True, True),
    (Integer(0, 5), 5, 5),
    (Integer(0, 5), 3.0, 3),
    (Integer(), -(1 << 63), -(1 << 63)),
    (Number(0, 2), 1, 1.0),
    (Number(0, 2), 2.0, 2.0),
    (Text(), "", ""),
    (Choice(("a", "b")), "b", "b"),
    (ListOf(Integer(0, 9)), [1, 2.0], [1, 2]),
    (ListOf(Text()), [], []),
    (TokenKeys(Number(-100, 100), 10), {"3": -100, "9": 1.5}, {3: -100.0, 9: 1.5}),
    (ByType({str: Text(), list: ListOf(Text())}), ["x"], ["x"]),
]
BAD: list[tuple[Check, Any, str]] = [
    (Flag(), 1, "found 1, expected true or false"),
    (Flag(), "true", "found the string 'true', expected true or false"),
    (Integer(0, 5), 6, "found 6, expected an integer from 0 to 5"),
    (Integer(0, 5), True, "found true, expected an integer"),
    (Integer(0, 5), 1.5, "found 1.5"),
    (Integer(0, 5), "3", "found the string '3'"),
    (Integer(0, 5), float("inf"), "found inf"),
    (Integer(), 1 << 63, "found 9223372036854775808"),
    (Integer(), 10**400, "an integer of 1329 bits"),
    (Number(0, 2), 2.1, "found 2.1, expected a number from 0 to 2"),
    (Number(0, 2), 10**400, "an integer of 1329 bits"),
    (Number(0, 2), False, "found false"),
    (Number(0, 2), float("nan"), "found nan"),
    (Text(1, 4), "", "found a string of 0 characters, expected 1 to 4"),
    (Text(), None, "found null, expected a string"),
    (Choice(("a", "b")), "c", 'found the string \'c\', expected one of "a", "b"'),
    (Choice(("a", "b")), {}, "found an object"),
    (ListOf(Text(), 0, 2), ["a"] * 3, "found 3 items, expected 0 to 2"),
    (ListOf(Text()), {}, "found an object, expected an array"),
    (ListOf(Integer(0, 9)), [1, 10], "x[1]: found 10"),
    (ListOf(Integer(0, 9)), [1, True], "x[1]: found true"),
    (ListOf(ListOf(Text())), [[], ["a", 1]], "x[1][1]: found 1, expected a string"),
    (TokenKeys(Number(-100, 100), 10), {"ten": 1}, "x.ten: found the string 'ten', expected a token id from 0 to 9"),
    (TokenKeys(Number(-100, 100), 10), {"10": 1}, "token id from 0 to 9"),
    (TokenKeys(Number(-100, 100), 10), {"-1": 1}, "token id"),
    (TokenKeys(Number(-100, 100), 10), {"1": 101}, "x.1: found 101, expected a number from -100 to 100"),
    (TokenKeys(Number(-100, 100), 10), {"9" * 5000: 1}, "token id"),
    (ByType({str: Text(), list: ListOf(Text())}), 5, "found 5, expected a string or an array"),
]


def run(check: Check, value: Any, *, strict: bool = False) -> tuple[Any, list[str]]:
    at = Checking(strict=strict)
    record = Record({"x": check}, frozenset({"x"}))
    return record.check({"x": value}, at).get("x"), at.warnings


@pytest.mark.parametrize(("check", "value", "expected"), GOOD)
def test_good_values_pass_unchanged(check: Check, value: Any, expected: Any) -> None:
    found, warnings = run(check, value)
    assert found == expected
    assert type(found) is type(expected)
    assert warnings == []


@pytest.mark.parametrize(("check", "value", "words"), BAD)
def test_errors_name_path_found_and_expected(check: Check, value: Any, words: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        run(check, value)
    assert words in caught.value.message
    assert caught.value.message.startswith("x")
    assert caught.value.param is not None
    assert caught.value.message.startswith(caught.value.param)
    assert len(caught.value.message) < 400


def test_null_is_absent_where_optional_and_an_error_where_required() -> None:
    optional = Record({"a": Integer(), "b": Integer()})
    assert optional.check({"a": None, "b": 1}, Checking()) == {"b": 1}
    with pytest.raises(InvalidValue, match="a: found null"):
        Record({"a": Integer()}, frozenset({"a"})).check({"a": None}, Checking())
    with pytest.raises(InvalidValue, match="a: found nothing, expected an integer"):
        Record({"a": Integer()}, frozenset({"a"})).check({}, Checking())


def test_unknown_and_unused_fields_warn_or_fail_when_strict() -> None:
    record = Record({"user": Unused(neutral=("",)), "inner": Record({})})
    at = Checking()
    assert record.check({"user": "me", "inner": {"zzz": 1}}, at) == {"inner": {}}
    assert at.warnings == ["user: accepted and not used.", "inner.zzz: unknown field, ignored."]
    at = Checking()
    record.check({"user": ""}, at)
    assert at.warnings == []
    for body in ({"user": "me"}, {"inner": {"zzz": 1}}):
        with pytest.raises(UnsupportedParameter):
            record.check(body, Checking(strict=True))


def test_unsupported_fields_fail_unless_they_ask_for_nothing() -> None:
    record = Record({"best_of": Unsupported("only 1.", neutral=(1,)), "tools": Unsupported("no.", neutral=([],))})
    assert record.check({"best_of": 1, "tools": []}, Checking()) == {}
    bodies: list[dict[str, Any]] = [{"best_of": 2}, {"best_of": True}, {"tools": [{}]}]
    for body in bodies:
        with pytest.raises(UnsupportedParameter) as caught:
            record.check(body, Checking())
        assert caught.value.param == next(iter(body))


def test_the_number_of_warnings_is_bounded() -> None:
    at = Checking()
    Record({}).check({f"f{i}": 1 for i in range(1000)}, at)
    assert len(at.warnings) == MAX_WARNINGS


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=10,
)


@given(VALUES, st.sampled_from([check for check, *_ in GOOD]))
def test_any_value_passes_or_is_an_invalid_request(value: Any, check: Check) -> None:
    with contextlib.suppress(InvalidRequest):
        run(check, value)
