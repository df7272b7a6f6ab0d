"""What a key may use, on a clock that moves only when told."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ai_engine.api.keys import Key
from ai_engine.api.limits import EXPECTED_OUTPUT_TOKENS, Limiter, Pass
from ai_engine.ports.errors import RateLimitExceeded
from ai_engine.testing import VirtualClock


def limiter() -> tuple[Limiter, VirtualClock]:
    clock = VirtualClock()
    return Limiter(clock), clock


def entered(limits: Limiter, key: Key) -> Pass:
    made = limits.of(key)
    made.enter()
    return made


def refused(act: Any, *args: Any) -> RateLimitExceeded:
    with pytest.raises(RateLimitExceeded) as caught:
        act(*args)
    assert caught.value.retry_after_s is not None
    return caught.value


def test_requests_per_minute_refill_evenly() -> None:
    limits, clock = limiter()
    key = Key(name="a", requests_per_minute=3)
    for _ in range(3):
        entered(limits, key)
    error = refused(limits.of(key).enter)
    assert error.retry_after_s == pytest.approx(20)
    assert error.details == {"limit": "requests_per_minute", "max": 3, "remaining": 0, "reset_s": 20.0}
    clock.advance(19.9)
    refused(limits.of(key).enter)
    clock.advance(0.2)
    entered(limits, key)
    refused(limits.of(key).enter)


def test_waiting_as_told_is_enough() -> None:
    limits, clock = limiter()
    key = Key(name="a", requests_per_minute=7, tokens_per_minute=700)
    for _ in range(40):
        made = limits.of(key)
        try:
            made.enter()
            made.reserve(50, [50])
        except RateLimitExceeded as error:
            clock.advance((error.retry_after_s or 0) + 1e-9)
            continue
        made.settle(100)
        made.leave()


def test_an_idle_key_saves_up_a_minute_and_no_more() -> None:
    limits, clock = limiter()
    key = Key(name="a", requests_per_minute=2)
    clock.advance(86400)
    entered(limits, key)
    entered(limits, key)
    refused(limits.of(key).enter)


def test_requests_at_once() -> None:
    limits, _ = limiter()
    key = Key(name="a", concurrent=2)
    one, _two = entered(limits, key), entered(limits, key)
    error = refused(limits.of(key).enter)
    assert error.details["limit"] == "concurrent"
    one.leave()
    one.leave()  # once
    third = entered(limits, key)
    refused(limits.of(key).enter)
    refused_one = limits.of(key)
    with pytest.raises(RateLimitExceeded):
        refused_one.enter()
    refused_one.leave()  # it was never in
    refused(limits.of(key).enter)
    third.leave()
    entered(limits, key)


def test_tokens_are_estimated_and_settled() -> None:
    limits, clock = limiter()
    key = Key(name="a", tokens_per_minute=1000)
    made = entered(limits, key)
    made.reserve(100, [8000])  # nobody pays for a whole context first
    headers = dict(made.headers())
    assert headers[b"x-ratelimit-limit-tokens"] == b"1000"
    assert headers[b"x-ratelimit-remaining-tokens"] == b"%d" % (900 - EXPECTED_OUTPUT_TOKENS)
    made.settle(110)
    assert dict(made.headers())[b"x-ratelimit-remaining-tokens"] == b"890"
    made.settle(5000)  # the first settlement was the right one to show; the last word counts
    assert dict(made.headers())[b"x-ratelimit-remaining-tokens"] == b"0"
    error = refused(limits.of(key).reserve, 1, [1])
    assert error.retry_after_s == pytest.approx((4000 + 2) * 60 / 1000)  # the debt, and what it asks
    clock.advance(241)
    limits.of(key).reserve(1, [1])


def test_an_estimate_over_the_whole_limit_passes_when_the_bucket_is_full() -> None:
    limits, clock = limiter()
    key = Key(name="a", tokens_per_minute=100)
    limits.of(key).reserve(500, [10])
    error = refused(limits.of(key).reserve, 500, [10])
    assert error.details["requested"] == 510
    assert error.retry_after_s == pytest.approx(510 * 60 / 100)
    clock.advance(error.retry_after_s or 0)
    limits.of(key).reserve(500, [10])


def test_limits_are_by_name_and_names_do_not_share_them() -> None:
    limits, _ = limiter()
    old, new = Key(name="a", sha256="1", concurrent=1), Key(name="a", sha256="2", concurrent=1)
    entered(limits, old)
    refused(limits.of(new).enter)
    entered(limits, Key(name="b", concurrent=1))


def test_a_changed_limit_keeps_what_was_used() -> None:
    limits, _ = limiter()
    for _ in range(3):
        entered(limits, Key(name="a", requests_per_minute=3))
    wider = Key(name="a", requests_per_minute=5)
    entered(limits, wider)
    entered(limits, wider)
    refused(limits.of(wider).enter)
    entered(limits, Key(name="a"))  # no limit any more


def test_a_key_without_limits_has_no_headers() -> None:
    limits, _ = limiter()
    made = entered(limits, Key(name="a"))
    made.reserve(10**9, [10**9])
    assert made.headers() == []


def test_names_that_have_gone_are_forgotten() -> None:
    limits, clock = limiter()
    for number in range(5000):
        made = entered(limits, Key(name=f"n{number}", requests_per_minute=60))
        made.leave()
        clock.advance(2)
    assert len(limits._uses) < 1100


@given(
    st.lists(st.tuples(st.floats(0, 30), st.integers(1, 400), st.integers(0, 600), st.integers(0, 600)), max_size=60)
)
def test_over_time_the_rate_holds(steps: list[tuple[float, int, int, int]]) -> None:
    """Whatever is asked and used: use in excess of a minute's worth and the rate is at most one request's."""
    limits, clock = limiter()
    key, used, largest = Key(name="a", tokens_per_minute=600), 0, 0
    for wait_s, prompt, asked, spent in steps:
        clock.advance(wait_s)
        made = entered(limits, key)
        try:
            made.reserve(prompt, [asked])
        except RateLimitExceeded:
            continue
        finally:
            made.leave()
        made.settle(prompt + spent)
        used, largest = used + prompt + spent, max(largest, prompt + spent)
        assert used <= 600 + clock.now_s() * 10 + largest + 1e-6
