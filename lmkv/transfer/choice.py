"""Which of two channels the reads from one peer use, by the bandwidth of the reads themselves. Pure: time is passed in.

preferred channel ── SAMPLE_BYTES were read ──► trial: the next SAMPLE_BYTES by the other channel
        ▲                                          │ not clearly faster ──► back, and the next trial is later
        └── a failed read: the other at once ──────┴ clearly faster ──────► the channels change places
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

SAMPLE_BYTES = 64 << 20
"""Bytes that a bandwidth is measured by."""
LEAST_BYTES = 1 << 20
"""Smaller reads measure latency rather than bandwidth, and are ignored."""
SWITCH_FACTOR = 1.3
"""A channel replaces another one only if it is faster by this factor."""
MOST_SLOWDOWN = 2.0
"""A trial ends when it has taken this multiple of the time that the other channel needs for `SAMPLE_BYTES`."""
FIRST_PAUSE_SECONDS = 60.0
"""Least time between a trial and the next one. It doubles with each trial."""
LAST_PAUSE_SECONDS = 3600.0


@dataclass(slots=True, eq=False)
class RunningRead:
    """A read that was begun and has not ended."""

    name: str
    """Its channel."""
    started: float
    is_mixed: bool = False
    """Whether reads by the other channel ran at the same time: it measures neither."""


@dataclass(slots=True)
class _Sample:
    """The bandwidth of one channel."""

    rate: float | None = None
    """Bytes per second of the last complete sample."""
    size_bytes: int = 0
    seconds: float = 0.0
    is_connected: bool = False
    """Whether a read was made: the first one is ignored, because it includes connecting."""
    last_end: float = field(default=-math.inf)

    def add(self, size_bytes: int, seconds: float) -> bool:
        """Adds a read; whether this completes a sample."""
        if not self.is_connected:
            self.is_connected = True
            return False
        if size_bytes < LEAST_BYTES or seconds <= 0:
            return False
        self.size_bytes += size_bytes
        self.seconds += seconds
        if self.size_bytes < SAMPLE_BYTES:
            return False
        self.rate = self.size_bytes / self.seconds
        self.size_bytes, self.seconds = 0, 0.0
        return True


class ChannelChoice:
    """The choice between two channels to one peer."""

    def __init__(self, preferred: str, other: str) -> None:
        self.used = preferred
        """The channel of all reads outside of trials."""
        self.is_trial = False
        self._other = other
        self._samples = {preferred: _Sample(), other: _Sample()}
        self._running: set[RunningRead] = set()
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._next_trial = -math.inf
        self._is_due = False

    @property
    def current(self) -> str:
        """The channel of the next read."""
        return self._other if self.is_trial else self.used

    @property
    def is_trial_due(self) -> bool:
        """Whether the caller should connect by the other channel, then call `begin_trial` or `end_trial`."""
        return self._is_due and not self.is_trial

    def other_than(self, name: str) -> str:
        """The other one of the two channels."""
        return self._other if name == self.used else self.used

    def rate(self, name: str) -> float | None:
        """Measured bytes per second of a channel; None: unknown."""
        return self._samples[name].rate

    def begin(self, name: str, now: float) -> RunningRead:
        """Notes that a read by a channel begins."""
        read = RunningRead(name, now)
        for other in self._running:
            if other.name != name:
                read.is_mixed = other.is_mixed = True
        self._running.add(read)
        return read

    def end(self, read: RunningRead, size_bytes: int, now: float) -> None:
        """Notes that a read has ended and that `size_bytes` were read; 0: it failed or was cancelled."""
        self._running.discard(read)
        sample = self._samples[read.name]
        seconds = now - max(read.started, sample.last_end)  # reads of one channel share its bandwidth
        sample.last_end = now
        is_complete = not read.is_mixed and size_bytes > 0 and sample.add(size_bytes, seconds)
        if self.is_trial and read.name == self._other:
            self._judge(now)
        elif is_complete and read.name == self.used and now >= self._next_trial:
            self._is_due = True

    def begin_trial(self) -> None:
        """Begins a trial: the other channel is connected."""
        self._samples[self._other] = _Sample()
        self.is_trial = True

    def end_trial(self, now: float) -> None:
        """Ends a trial without a change, or gives up one that is due; the next one is later."""
        self.is_trial = self._is_due = False
        self._next_trial = now + self._pause_seconds
        self._pause_seconds = min(2 * self._pause_seconds, LAST_PAUSE_SECONDS)

    def fail(self, name: str, now: float) -> None:
        """A read by this channel failed: the next ones use the other channel."""
        if name == self.current:
            if not self.is_trial:
                self._change_places()
            self.end_trial(now)

    def _judge(self, now: float) -> None:
        """Ends the trial if the other channel is known to be faster, or not to be."""
        used, other = self._samples[self.used], self._samples[self._other]
        assert used.rate is not None, "a trial follows a sample"
        if other.rate is not None and other.rate > SWITCH_FACTOR * used.rate:
            self._change_places()
            self.end_trial(now)
        elif other.rate is not None or other.seconds > MOST_SLOWDOWN * SAMPLE_BYTES / used.rate:
            self.end_trial(now)

    def _change_places(self) -> None:
        self.used, self._other = self._other, self.used
