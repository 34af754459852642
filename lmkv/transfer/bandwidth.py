"""Measured bandwidth and latency of a source, as decaying averages that expire. Pure: time is passed in.

Bytes are those that move: codecs make them fewer than those of the chunks (`MovedShares`).

Unknown values are None, never estimates. Because measurements expire, a peer that was slow is tried again. Few small
reads show little: one that a busy machine delays would make a source slow for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

DECAY = 0.8
"""Weight of the earlier measurements at each new one."""
EXPIRY_SECONDS = 30.0
"""Age after which measurements expire."""
LATE_FACTOR = 4
"""Multiple of the expected duration after which an answer is late."""
LATE_LEAST_SECONDS = 0.1
"""Minimum delay of a late answer: event loops and machines stall for this long."""
LATE_RATE = float(64 << 20)
"""Assumed bytes per second of a peer that has answered, but whose bandwidth was never measured."""
LEAST_BYTES = 1 << 20
"""Smaller reads measure latency rather than bandwidth, and are ignored."""
MAX_SHARES = 64
"""Maximum number of specs whose shares are known; the spec that was not read for longest is forgotten."""
LEAST_READS, LEAST_MEASURED_BYTES = 3, 16 << 20
"""Reads, or bytes of them, that say how long another one takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BusyTime:
    """The time that one of several concurrent reads adds to the busy time of their source."""

    seconds: float
    share: float
    """Fraction of the read's own time, 0 to 1."""


class Bandwidth:
    """Bandwidth and latency of reads from one peer, or from several at once. Times are in seconds on any one clock."""

    def __init__(self) -> None:
        self._bytes = 0.0
        self._seconds = 0.0
        self._reads = 0.0
        """Reads since the measurements expired; those that end together count as one."""
        self._latency_seconds = 0.0
        self._read_at = self._answered_at = self._busy_until = float("-inf")
        self._connected = False
        self.reading_bytes = 0
        """Bytes of the reads that run."""

    @contextmanager
    def reading(self, size_bytes: int) -> Iterator[None]:
        """Counts a read in `reading_bytes` while it runs."""
        self.reading_bytes += size_bytes
        try:
            yield
        finally:
            self.reading_bytes -= size_bytes

    def busy(self, began: float, now: float) -> BusyTime:
        """The time of a read that ends now in which no other read of the source has ended: reads that run at once
        share its bandwidth, and these times together are the time in which it was busy."""
        seconds = now - max(began, self._busy_until)
        self._busy_until = now
        return BusyTime(seconds=seconds, share=seconds / (now - began) if now > began else 0.0)

    def record_read(self, size_bytes: int, seconds: float, now: float, share: float = 1.0) -> None:
        """Records a read. The first one is ignored, because it includes connecting.

        `share`: the part of the read's time that `seconds` are. The earlier measurements lose weight by that: reads
        that end together count as one.
        """
        if size_bytes < LEAST_BYTES or seconds < 0 or (not seconds and share):
            return
        if not self._connected:
            self._connected = True
            self._busy_until = float("-inf")
            return
        weight = DECAY**share if now < self._read_at + EXPIRY_SECONDS else 0.0
        self._bytes = weight * self._bytes + size_bytes
        self._seconds = weight * self._seconds + seconds
        self._reads = share + (self._reads if weight else 0.0)
        self._read_at = now

    def record_response(self, seconds: float, now: float) -> None:
        """Records the latency of an answer without bytes."""
        weight = DECAY if now < self._answered_at + EXPIRY_SECONDS else 0.0
        self._latency_seconds = weight * self._latency_seconds + (1 - weight) * seconds
        self._answered_at = now

    def rate(self, now: float) -> float | None:
        """Bytes per second; None if unknown."""
        return self._bytes / self._seconds if now < self._read_at + EXPIRY_SECONDS else None

    def latency_seconds(self, now: float) -> float:
        """Latency of an answer; 0 if unknown."""
        return self._latency_seconds if now < self._answered_at + EXPIRY_SECONDS else 0.0

    def late_after_seconds(self, size_bytes: int) -> float | None:
        """Time after which an answer with `size_bytes` is late; None if the peer never answered.

        Uses measurements of any age, because they only decide when another peer is asked too.
        """
        if self._answered_at == float("-inf"):
            return None
        rate = self._bytes / self._seconds if self._seconds else LATE_RATE
        return max(LATE_LEAST_SECONDS, LATE_FACTOR * (self._latency_seconds + size_bytes / rate))

    def seconds(self, size_bytes: float, now: float) -> float | None:
        """Expected duration of a read of `size_bytes`, what is queued before it included; None if unknown."""
        rate = self.rate(now)
        if rate is None or (self._reads < LEAST_READS and self._bytes < LEAST_MEASURED_BYTES):
            return None
        return self.latency_seconds(now) + size_bytes / rate


class MovedShares:
    """The bytes that reads from one source move for each byte of the chunks, by the fingerprint of their spec."""

    def __init__(self) -> None:
        self._sums: dict[bytes, tuple[float, float]] = {}

    def record(self, fingerprint: bytes, moved_bytes: int, size_bytes: int) -> None:
        """Records a read of chunks of `size_bytes`."""
        if not size_bytes:
            return
        moved, whole = self._sums.pop(fingerprint, (0.0, 0.0))
        self._sums[fingerprint] = DECAY * moved + moved_bytes, DECAY * whole + size_bytes
        if len(self._sums) > MAX_SHARES:
            del self._sums[next(iter(self._sums))]

    def get(self, fingerprint: bytes) -> float | None:
        """The share; None if no chunk of this spec was read."""
        moved, whole = self._sums.get(fingerprint, (0.0, 0.0))
        return moved / whole if whole else None


def shortest_seconds(sources: Iterable[tuple[Bandwidth, float]], now: float) -> float | None:
    """Expected duration of a read from the source that is done first; None if one is unknown, because that may be it.

    Each source has a number of bytes to bring, and before.
    """
    seconds = [bandwidth.seconds(size_bytes, now) for bandwidth, size_bytes in sources]
    known = [each for each in seconds if each is not None]
    return min(known) if known and len(known) == len(seconds) else None
