"""A full door: what it refuses before it reads a body, and for how long it believes what it was told."""

from __future__ import annotations

import pytest

from ai_engine.api.crowd import ASK_S, ESTIMATE_S, HOLD_S, Crowd
from ai_engine.ports.errors import Overloaded
from ai_engine.testing import ScriptedServing, VirtualClock
from tests.unit.api.doors import client

FULL = Overloaded("the queue is full", retry_after_s=7.0, details={"queue": "full"})


def ask(crowd: Crowd, answer: Overloaded | None = None) -> bool:
    """Whether it was let in."""
    let_in = False
    try:
        with crowd.enter():
            let_in = True
            if answer is not None:
                raise answer
    except Overloaded:
        pass
    return let_in


def test_serving_s_word_holds_for_a_moment() -> None:
    clock = VirtualClock()
    crowd = Crowd(0, clock, 2.0)
    assert ask(crowd, FULL)
    with pytest.raises(Overloaded, match="the queue is full") as caught, crowd.enter():
        pass
    assert caught.value.retry_after_s == 7.0
    clock.advance(HOLD_S)
    assert ask(crowd)


def test_who_leaves_makes_room() -> None:
    clock = VirtualClock()
    crowd = Crowd(0, clock, 2.0)
    with crowd.enter():
        assert ask(crowd, FULL)
        assert not ask(crowd)
    assert ask(crowd), "somebody left"


def test_a_queue_short_of_tokens_may_have_room_for_a_smaller_one() -> None:
    crowd = Crowd(0, VirtualClock(), 2.0)
    assert ask(crowd, Overloaded("the queue is full", details={"queue": "short of tokens"}))
    assert ask(crowd)
    assert ask(crowd, Overloaded("shutting down"))
    assert ask(crowd)


def test_more_than_run_and_wait_are_refused_before_anybody_is_asked() -> None:
    clock = VirtualClock()
    crowd = Crowd(2, clock, 2.0)
    with crowd.enter(), crowd.enter():
        assert ask(crowd, FULL), "one goes and asks how long it takes"
        clock.advance(HOLD_S)
        with pytest.raises(Overloaded) as caught, crowd.enter():
            pass
        assert caught.value.retry_after_s == 7.0, "serving's own estimate"
        assert "limit 2" in caught.value.message
        clock.advance(ASK_S)
        assert ask(crowd)
        assert not ask(crowd)
    assert crowd.inside == 0
    assert ask(crowd)


def test_without_serving_s_estimate_the_pace_of_leaving_has_to_do() -> None:
    clock = VirtualClock()
    crowd = Crowd(3, clock, 2.0)

    fresh = Crowd(1, clock, 2.0)
    with fresh.enter():
        fresh._asked_s = clock.now_s()
        with pytest.raises(Overloaded) as caught, fresh.enter():
            pass
    assert caught.value.retry_after_s == 2.0, "nothing is known"
    for _ in range(10):
        clock.advance(2.0)
        assert ask(crowd)
    clock.advance(ESTIMATE_S)
    with crowd.enter(), crowd.enter(), crowd.enter():
        with crowd.enter():  # goes and asks
            pass
        with pytest.raises(Overloaded) as caught, crowd.enter():
            pass
    assert caught.value.retry_after_s == pytest.approx(3 * 28 / 11, abs=1)  # three inside; eleven left in 28 s


async def test_a_full_door_refuses_unread() -> None:
    """No body is read, nothing is encoded, serving is not asked."""
    serving = ScriptedServing(refusal=FULL)
    door = client(serving)
    first = await door.chat()
    assert first.status == 503
    sent: list[dict[str, object]] = []

    async def receive() -> dict[str, object]:
        raise AssertionError("the body is read")

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    await door.api({"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}, receive, send)
    assert sent[0]["status"] == 503
    assert (await door("POST", "/v1/tokenize", {"prompt": "Hi"})).status == 200, "other work goes on"
