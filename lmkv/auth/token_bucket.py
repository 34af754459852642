"""Rate and concurrency limit of one caller. Pure: time is passed in."""

from __future__ import annotations

from lmkv.errors import TooManyRequests

BURST_SECONDS = 1.0
"""Unused capacity of this period may be used at once."""
MIN_REFUSALS_PER_SECOND = 100
"""Rate at which refusals are sent to a caller whose own limit is lower, or which has no rate limit."""
MAX_DELAYED_REFUSALS = 1_000
"""Maximum number of refusals of one caller that wait to be sent; further refusals are sent at once."""


class TokenBucket:
    """A token bucket and a count of concurrent requests. A limit of 0 means unlimited.

    A caller that repeats refused requests at once would cost more than its limit allows. Therefore refusals are to be
    sent one after another, at the rate of the limit: `TooManyRequests.delay_seconds` says when.
    """

    def __init__(self, per_second: int, concurrent: int, now: float) -> None:
        self._per_second = per_second
        self._concurrent = concurrent
        self._left = per_second * BURST_SECONDS
        self._time = now
        self._last_refusal = now
        self.in_flight_count = 0
        """Requests between `acquire` and `release`."""

    def has_limits(self, per_second: int, concurrent: int) -> bool:
        return (per_second, concurrent) == (self._per_second, self._concurrent)

    def acquire(self, now: float) -> None:
        """Admits one request, until `release`. Raises `TooManyRequests` with the time after which to retry."""
        if self._concurrent and self.in_flight_count >= self._concurrent:
            raise self._refusal(
                now,
                f"{self.in_flight_count} requests of this token are in flight, which is its limit; end some, or "
                "raise its max_concurrent_requests",
                limit=self._concurrent,
                retry_seconds=BURST_SECONDS,
            )
        self.take(now)
        self.in_flight_count += 1

    def take(self, now: float) -> None:
        """Takes one token, for each further request of a stream. Raises as `acquire` does."""
        if not self._per_second:
            return
        earned = (now - self._time) * self._per_second
        self._left = min(self._left + earned, self._per_second * BURST_SECONDS)
        self._time = now
        if self._left < 1:
            raise self._refusal(
                now,
                f"this token may make {self._per_second} requests per second; send fewer, or raise its "
                "max_requests_per_second",
                limit=self._per_second,
                retry_seconds=round((1 - self._left) / self._per_second, 3),
            )
        self._left -= 1

    def release(self) -> None:
        """Ends one request."""
        self.in_flight_count -= 1

    def _refusal(self, now: float, message: str, *, limit: int, retry_seconds: float) -> TooManyRequests:
        refusal = TooManyRequests(message, limit=limit, retry_seconds=retry_seconds)
        rate = max(self._per_second, MIN_REFUSALS_PER_SECOND)
        due = max(self._last_refusal, now) + 1 / rate
        if (due - now) * rate < MAX_DELAYED_REFUSALS + 0.5:
            self._last_refusal = due
            refusal.delay_seconds = due - now
        return refusal
