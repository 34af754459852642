"""How much one caller may ask for at a time. Pure: time is passed in."""

from __future__ import annotations

from lmkv.errors import TooManyRequests

BURST_SECONDS = 1.0
"""What was not asked for in this time may be asked for at once."""


class TokenBucket:
    """A bucket that fills by the second, and a count of what is under way. 0 is no limit."""

    def __init__(self, per_second: int, concurrent: int, now: float) -> None:
        self._per_second = per_second
        self._concurrent = concurrent
        self._left = per_second * BURST_SECONDS
        self._time = now
        self.in_flight_count = 0
        """Requests that have begun and not ended."""

    def has_limits(self, per_second: int, concurrent: int) -> bool:
        """Whether these are its limits."""
        return (per_second, concurrent) == (self._per_second, self._concurrent)

    def acquire(self, now: float) -> None:
        """Lets one request in, until `end`. Raises `TooManyRequests`, which says when to come back."""
        if self._concurrent and self.in_flight_count >= self._concurrent:
            raise TooManyRequests(
                f"{self.in_flight_count} requests of this token are under way, and no more may be; end some, or raise "
                "its max_concurrent_requests",
                limit=self._concurrent,
                retry_seconds=BURST_SECONDS,
            )
        self.take(now)
        self.in_flight_count += 1

    def take(self, now: float) -> None:
        """Lets one more question of a request in. Raises as `begin` does."""
        if not self._per_second:
            return
        earned = (now - self._time) * self._per_second
        self._left = min(self._left + earned, self._per_second * BURST_SECONDS)
        self._time = now
        if self._left < 1:
            raise TooManyRequests(
                f"this token may ask {self._per_second} times a second; ask less often, or raise its "
                "max_requests_per_second",
                limit=self._per_second,
                retry_seconds=round((1 - self._left) / self._per_second, 3),
            )
        self._left -= 1

    def release(self) -> None:
        """One request is over."""
        self.in_flight_count -= 1
