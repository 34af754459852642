"""Which holder brings which of the missing chunks. Pure; for `Fetch`.

                ┌──── give back: a holder failed, or does not have it ◄──┐
    missing ──► open ──── take: from the front, a window at a time ──► taken ──► landed
                  ▲                                 ├── steal: from the back ──► taken by another
                  └──────────────────────────────── └── late: what others may have is open for them

The nearest holder begins. Another joins where chunks are open that no holder at work has, or where it should get some
there sooner: it takes what is open, or what another has taken and not begun to read.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from lmkv.transfer.bandwidth import Bandwidth
from lmkv_server.node.cache.host import Chunk
from lmkv_server.node.fetch.inflight import InflightFetches
from lmkv_server.node.tiers.progress import Progress

WINDOW_SECONDS = 0.5
"""A window is what should come in that time: long against a question, short against the life of a grant."""
MAX_WINDOW_BYTES = 1 << 30
UNKNOWN_WINDOW_BYTES = 256 << 20
"""A window of a lone holder whose bandwidth is not known."""
WINDOW_CHUNKS = 1024
PROBE_BYTES = 8 << 20
"""What a holder whose bandwidth is not known takes beside others."""
WORTH_PROBING = 4
"""Times that; where less is left, a holder of unknown bandwidth does not join others."""
LEAST_GAIN = 0.1
"""A holder joins others only to take at least this share of what is left from them."""
MAX_WORKING = 4
"""Most holders that work for one fetch at a time."""
BATCH_SECONDS = 0.005
"""A batch is what should come in that time: little, so that chunks come one after the other and are soon verified."""
FIRST_BATCH_BYTES = 2 << 20
"""A batch of a holder whose bandwidth is not known."""
MIN_BATCH_BYTES = 1 << 20
MAX_BATCH_BYTES = 32 << 20


@dataclass(kw_only=True, slots=True, eq=False)
class HolderState:
    """One holder, as far as one fetch is concerned."""

    matched_count: int
    """It may hold the first so many chunks."""
    near: bool = False
    """Whether it is on this host."""
    bandwidth: Bandwidth = field(default_factory=Bandwidth)
    refused: set[int] = field(default_factory=set)
    """Chunks that it does not have after all, or has damaged."""
    exhausted: bool = False
    """Whether it failed."""
    pending: deque[int] = field(default_factory=deque)
    """Taken chunks that it has not begun to read, in prompt order; others may steal them."""
    taken: set[int] = field(default_factory=set)
    """Chunks that it shall bring, and has not: those pending, and those being read and verified."""
    late: bool = False
    """Whether it takes longer than it should for an answer. It is given only what no other holder has."""
    hedged: set[int] = field(default_factory=set)
    """Chunks that were being read from it when it was late, and that others bring as well. It reads none again."""

    def has(self, index: int) -> bool:
        """Whether it may hold the chunk."""
        return not self.exhausted and index < self.matched_count and index not in self.refused


class FetchPlan:
    """Who brings what of one fetch."""

    def __init__(
        self,
        progress: Progress,
        flights: InflightFetches,
        sources: Iterable[HolderState],
        together: Bandwidth,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`together` is what several holders at once have given: more than that the own side does not take."""
        now = clock()
        self.sources: Sequence[HolderState] = sorted(
            sources, key=lambda one: (one.late, not one.near, -(one.bandwidth.rate(now) or 0), -one.matched_count)
        )
        """Those that are late last; nearest first, then by what they gave, then by how much they hold."""
        self.working: list[HolderState] = []
        self.changed = asyncio.Event()
        """Set whenever somebody may have something to do that had not."""
        self._progress = progress
        self._flights = flights
        self._together = together
        self._clock = clock
        self._chunk_bytes = progress.spec.chunk_bytes

    def open(self) -> list[int]:
        """Missing chunks that somebody may have and nobody brings, in order, up to the first that is of no use."""
        found = []
        for index in sorted(self._progress.missing):
            if self._progress.keys[index] in self._flights:
                continue
            if any(source.has(index) for source in self.sources):
                found.append(index)
            elif self._progress.in_order:
                break  # a hole that nobody fills: what comes behind it is of no use
        return found

    def join(self) -> list[HolderState]:
        """Those that go to work now. Each has chunks pending, and works until `leave`."""
        joined = []
        for source in self.sources:
            if len(self._on_time()) >= MAX_WORKING:
                break
            if source not in self.working and self._is_worth_it(source) and self.take(source):
                self.working.append(source)
                joined.append(source)
        return joined

    def take(self, source: HolderState) -> bool:
        """Gives a holder something to do; whether there is anything. It must have nothing pending."""
        assert not source.pending
        mine = [index for index in self.open() if self._may_take(source, index)][: self._window_count(source)]
        if mine:
            self._flights.start((self._progress.keys[index] for index in mine), self._progress)
        else:
            mine = self._steal(source)
        source.pending.extend(mine)
        source.taken.update(mine)
        return bool(mine)

    def batch(self, source: HolderState) -> list[int]:
        """Takes off what a holder shall read next."""
        rate = source.bandwidth.rate(self._clock())
        size_bytes = (
            FIRST_BATCH_BYTES if rate is None else min(max(rate * BATCH_SECONDS, MIN_BATCH_BYTES), MAX_BATCH_BYTES)
        )
        count = max(1, int(size_bytes // self._chunk_bytes))
        return [source.pending.popleft() for _ in range(min(count, len(source.pending)))]

    def land(self, source: HolderState, index: int, chunk: Chunk, instance_id: str) -> None:
        """A chunk that it took is in the tier, whether or not another has been asked for it since."""
        for one in self.sources:
            if index in one.taken:
                one.taken.discard(index)
                if one is not source:
                    one.pending = deque(left for left in one.pending if left != index)
        self._flights.land(chunk, instance_id)

    def late(self, source: HolderState) -> int:
        """A holder is late: what it has taken is open for others that may have it; the count of these chunks.

        What it does not read yet is moved. What it reads goes on being read: of the two answers the first counts. A
        chunk is read at most once from each holder.
        """
        source.late = True
        others = [other for other in self.sources if other is not source and not other.late]
        mine = [index for index in source.taken if any(other.has(index) for other in others)]
        source.hedged.update(index for index in mine if index not in source.pending)
        self.give_back(source, mine)
        return len(mine)

    def give_back(self, source: HolderState, indices: Iterable[int]) -> None:
        """It does not bring these after all."""
        if mine := source.taken.intersection(indices):
            source.taken -= mine
            source.pending = deque(index for index in source.pending if index not in mine)
            self._flights.end(self._progress.keys[index] for index in mine)
            self.changed.set()

    def leave(self, source: HolderState) -> None:
        """It stops working."""
        self.working.remove(source)
        self.give_back(source, tuple(source.taken))
        self.changed.set()

    def measured(self, source: HolderState, size_bytes: int, seconds: float) -> None:
        """A holder gave so many bytes in so long.

        Beside others that says how much the own side takes, and of the holder only that it is no faster: nothing new,
        unless it is slower than even sharing explains.
        """
        now, count = self._clock(), max(1, len(self._on_time()))
        if count > 1:
            self._together.record_read(size_bytes, seconds / count, now)
        known = source.bandwidth.rate(now)
        if count == 1 or known is None or size_bytes / seconds < known / count:
            source.bandwidth.record_read(size_bytes, seconds, now)

    def _window_count(self, source: HolderState) -> int:
        rate = source.bandwidth.rate(self._clock())
        if rate is not None:
            size_bytes = min(max(rate * WINDOW_SECONDS, PROBE_BYTES), MAX_WINDOW_BYTES)
        else:
            alone = sum(not other.exhausted for other in self.sources) == 1
            size_bytes = UNKNOWN_WINDOW_BYTES if alone else PROBE_BYTES
        return max(1, min(int(size_bytes // self._chunk_bytes), WINDOW_CHUNKS))

    def _on_time(self) -> list[HolderState]:
        """The holders at work that are not late."""
        return [source for source in self.working if not source.late]

    def _may_take(self, source: HolderState, index: int) -> bool:
        """Whether a holder may be asked for an open chunk."""
        if not source.has(index) or index in source.hedged:
            return False
        return not source.late or not any(other.has(index) and not other.late for other in self.sources)

    def _is_worth_it(self, source: HolderState) -> bool:
        """Whether a holder that does nothing should begin."""
        open_, working = self.open(), self._on_time()
        if not working or any(source.has(index) and not any(other.has(index) for other in working) for index in open_):
            return True
        left = [index for index in (*open_, *(i for other in working for i in other.pending)) if source.has(index)]
        now = self._clock()
        rate, rates = source.bandwidth.rate(now), [other.bandwidth.rate(now) for other in working]
        known = [each for each in rates if each is not None]
        if rate is None or len(known) < len(rates):
            return len(left) * self._chunk_bytes >= WORTH_PROBING * PROBE_BYTES
        if (most := self._together.rate(now)) is not None:
            rate = min(rate, most - sum(known))
        gain = self._share(len(left), source, rate, sum(known))
        return gain >= max(1, LEAST_GAIN * len(left))

    def _steal(self, source: HolderState) -> list[int]:
        """Takes from the holder that has the most to do what the thief should have sooner: the last of it."""
        if source.late:
            return []
        now = self._clock()

        def left(other: HolderState) -> float:
            return len(other.pending) / (other.bandwidth.rate(now) or 1.0)

        victim = max((other for other in self.working if other is not source), key=left, default=None)
        if victim is None:
            return []
        loot = [index for index in victim.pending if source.has(index)]
        rate, other_rate = source.bandwidth.rate(now), victim.bandwidth.rate(now)
        if rate is None:
            count = min(self._window_count(source), len(loot) // 2)
        else:
            count = int(self._share(len(loot), source, rate, other_rate or rate))
        stolen = loot[len(loot) - count :]
        victim.taken.difference_update(stolen)
        victim.pending = deque(index for index in victim.pending if index in victim.taken)
        return stolen

    def _share(self, count: int, source: HolderState, rate: float, other_rate: float) -> float:
        """Of so many chunks that come at `other_rate`, those that a holder should take to be done at the same time."""
        ahead_seconds = count * self._chunk_bytes / other_rate - source.bandwidth.latency_seconds(self._clock())
        return max(0.0, ahead_seconds) / (1 / rate + 1 / other_rate) / self._chunk_bytes if rate > 0 else 0.0
