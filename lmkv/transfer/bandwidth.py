"""How fast bytes come from somewhere: measured, averaged, and forgotten when it is old. Pure.

What is not known is None, never a guess: whoever asks decides what that means. That measurements are forgotten makes
every decision that rests on them one for a while: a peer that was slow is tried again.
"""

from __future__ import annotations

from collections.abc import Iterable

DECAY = 0.8
"""What of the earlier measurements stays with each new one."""
FORGET_SECONDS = 30.0
"""A measurement that nothing has renewed for so long is forgotten."""
LATE_FACTOR = 4
"""An answer that takes this many times what it should is late."""
LATE_LEAST_SECONDS = 0.1
"""No answer is late before: event loops and machines stall for this long."""
LATE_RATE = float(64 << 20)
"""Bytes per second that are expected of a peer that has answered, and whose bandwidth was never measured."""
LEAST_BYTES = 1 << 20
"""Smaller reads say how long an answer takes, not how fast bytes come."""


class Bandwidth:
    """One way for bytes: from one peer, or from several at once. Times are on any one clock, in seconds."""

    def __init__(self) -> None:
        self._bytes = 0.0
        self._seconds = 0.0
        self._latency_seconds = 0.0
        self._read_at = self._answered_at = float("-inf")
        self._connected = False

    def record_read(self, size_bytes: int, seconds: float, now: float) -> None:
        """A read of so many bytes took so long. The first one counts for nothing: it connects, too."""
        if size_bytes < LEAST_BYTES or seconds <= 0:
            return
        if not self._connected:
            self._connected = True
            return
        weight = DECAY if now < self._read_at + FORGET_SECONDS else 0.0
        self._bytes = weight * self._bytes + size_bytes
        self._seconds = weight * self._seconds + seconds
        self._read_at = now

    def record_response(self, seconds: float, now: float) -> None:
        """An answer to a question without bytes took so long."""
        weight = DECAY if now < self._answered_at + FORGET_SECONDS else 0.0
        self._latency_seconds = weight * self._latency_seconds + (1 - weight) * seconds
        self._answered_at = now

    def rate(self, now: float) -> float | None:
        """Bytes per second."""
        return self._bytes / self._seconds if now < self._read_at + FORGET_SECONDS else None

    def latency_seconds(self, now: float) -> float:
        """What it takes before the first byte comes; 0 if that is not known."""
        return self._latency_seconds if now < self._answered_at + FORGET_SECONDS else 0.0

    def late_after_seconds(self, size_bytes: int) -> float | None:
        """The time after which an answer with so many bytes is late; None if the peer never answered.

        Uses measurements of any age: they decide only when another peer is asked as well.
        """
        if self._answered_at == float("-inf"):
            return None
        rate = self._bytes / self._seconds if self._seconds else LATE_RATE
        return max(LATE_LEAST_SECONDS, LATE_FACTOR * (self._latency_seconds + size_bytes / rate))

    def seconds(self, size_bytes: int, now: float) -> float | None:
        """What it should take to ask for so many bytes and get them."""
        rate = self.rate(now)
        return None if rate is None else self.latency_seconds(now) + size_bytes / rate


def shortest_seconds(bandwidths: Iterable[Bandwidth], size_bytes: int, now: float) -> float | None:
    """What the best of them should take for so many bytes; None if one is unknown, for that one may be better."""
    seconds = [bandwidth.seconds(size_bytes, now) for bandwidth in bandwidths]
    known = [each for each in seconds if each is not None]
    return min(known) if known and len(known) == len(seconds) else None
