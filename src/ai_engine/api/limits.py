"""What a key may use: requests and tokens per minute, requests at once. Limits are counted by the key's name.

Owns the buckets and the refusals (429 with numbers). Does not own the server's own limits (serving refuses with 503).

A request is counted when it comes, whatever becomes of it. Its tokens are counted twice: an estimate is taken when its
prompt is known - the prompt and, for each choice, what it may generate, at most EXPECTED_OUTPUT_TOKENS - and the
difference to what it used when it ends. So a long answer that nobody foresaw leaves the bucket in debt, and the next
request waits until the minute's rate has paid it: over time the rate holds exactly, and a request without
``max_tokens`` does not have to pay for a whole context first. An estimate over the whole limit passes when the bucket
is full.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from ai_engine.api.keys import Key
from ai_engine.ports.clock import Clock
from ai_engine.ports.errors import RateLimitExceeded

EXPECTED_OUTPUT_TOKENS: Final = 256
_IDLE_NAMES: Final = 1024
"""So many names' counters are kept although they are as new."""


class Bucket:
    """Holds at most ``per_minute``, refills at that rate; may go below nought."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self.level = float(per_minute)
        self._at_s = now_s

    def refill(self, per_minute: int, now_s: float) -> None:
        """Bring it up to now; a limit that has changed keeps what was used."""
        self.level += per_minute - self.per_minute
        self.per_minute = per_minute
        self.level = min(self.level + (now_s - self._at_s) * per_minute / 60, float(per_minute))
        self._at_s = now_s

    @property
    def remaining(self) -> int:
        return max(0, math.floor(self.level))

    def full_in_s(self) -> float:
        return max(0.0, self.per_minute - self.level) * 60 / self.per_minute

    def holds_in_s(self, amount: float) -> float:
        """Seconds until it holds that much, or is full."""
        return max(0.0, min(amount, self.per_minute) - self.level) * 60 / self.per_minute


class _Use:
    """What one name uses now."""

    def __init__(self) -> None:
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.running = 0

    def refresh(self, key: Key, now_s: float) -> None:
        self.requests = _current(self.requests, key.requests_per_minute, now_s)
        self.tokens = _current(self.tokens, key.tokens_per_minute, now_s)

    def as_new(self, now_s: float) -> bool:
        """Nothing runs, and every bucket is full again."""
        buckets = [bucket for bucket in (self.requests, self.tokens) if bucket is not None]
        for bucket in buckets:
            bucket.refill(bucket.per_minute, now_s)
        return not self.running and all(bucket.level >= bucket.per_minute for bucket in buckets)


def _current(bucket: Bucket | None, per_minute: int, now_s: float) -> Bucket | None:
    if not per_minute:
        return None
    if bucket is None:
        return Bucket(per_minute, now_s)
    bucket.refill(per_minute, now_s)
    return bucket


class Pass:
    """One request of a key: `enter`, `reserve` when its prompt is known, `settle` with what it used, `leave` whatever
    happened."""

    def __init__(self, limiter: Limiter, key: Key, use: _Use) -> None:
        self._limiter, self._key, self._use = limiter, key, use
        self._reserved = 0
        self._is_in = False

    def enter(self) -> None:
        """Count the request. Raises RateLimitExceeded."""
        use, key = self._use, self._key
        use.refresh(key, self._limiter.clock.now_s())
        if key.concurrent and use.running >= key.concurrent:
            raise _refusal(key, "concurrent", key.concurrent, 0, 1.0, f"{use.running} are running")
        if use.requests is not None:
            wait_s = use.requests.holds_in_s(1)
            if wait_s > 0:
                raise _refusal(key, "requests_per_minute", key.requests_per_minute, 0, wait_s, "none is left now")
            use.requests.level -= 1
        use.running += 1
        self._is_in = True

    def reserve(self, prompt_tokens: int, max_output_tokens: Sequence[int]) -> None:
        """Take the estimate out of the bucket; one maximum per choice. Raises RateLimitExceeded."""
        use, key = self._use, self._key
        use.refresh(key, self._limiter.clock.now_s())
        bucket = use.tokens
        if bucket is None:
            return
        estimate = prompt_tokens + sum(min(most, EXPECTED_OUTPUT_TOKENS) for most in max_output_tokens)
        wait_s = bucket.holds_in_s(estimate)
        if wait_s > 0:
            raise _refusal(
                key, "tokens_per_minute", bucket.per_minute, bucket.remaining, wait_s,
                f"this request asks for about {estimate}, {bucket.remaining} are left",
                requested=estimate,
            )  # fmt: skip
        bucket.level -= estimate
        self._reserved += estimate

    def settle(self, used_tokens: int) -> None:
        """Put right what was reserved; the last word counts."""
        if self._use.tokens is not None:
            self._use.tokens.level += self._reserved - used_tokens
        self._reserved = used_tokens

    def leave(self) -> None:
        if self._is_in:
            self._is_in = False
            self._use.running -= 1
            self._limiter.forget_idle()

    def headers(self) -> list[tuple[bytes, bytes]]:
        """OpenAI's x-ratelimit-* of the limits that the key has."""
        self._use.refresh(self._key, self._limiter.clock.now_s())
        found = []
        for unit, bucket in ((b"requests", self._use.requests), (b"tokens", self._use.tokens)):
            if bucket is not None:
                found += [
                    (b"x-ratelimit-limit-" + unit, b"%d" % bucket.per_minute),
                    (b"x-ratelimit-remaining-" + unit, b"%d" % bucket.remaining),
                    (b"x-ratelimit-reset-" + unit, b"%.3fs" % bucket.full_in_s()),
                ]
        return found


class Limiter:
    """Counters of every name. Lives as long as the server: keys and models come and go."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._uses: dict[str, _Use] = {}
        self._sweep_at = _IDLE_NAMES

    def of(self, key: Key) -> Pass:
        """A pass for one request, not entered yet."""
        return Pass(self, key, self._uses.setdefault(key.name, _Use()))

    def forget_idle(self) -> None:
        """Drop the counters of names that have used nothing for a while."""
        if len(self._uses) > self._sweep_at:
            now_s = self.clock.now_s()
            self._uses = {name: use for name, use in self._uses.items() if not use.as_new(now_s)}
            self._sweep_at = max(_IDLE_NAMES, 2 * len(self._uses))


def _refusal(
    key: Key, limit: str, most: int, remaining: int, wait_s: float, found: str, **more: float
) -> RateLimitExceeded:
    return RateLimitExceeded(
        f"{limit}: the key {key.name!r} may have {most}; {found}. Fix: try again in {wait_s:.1f} s.",
        retry_after_s=wait_s,
        details={"limit": limit, "max": most, "remaining": remaining, "reset_s": round(wait_s, 3), **more},
    )
