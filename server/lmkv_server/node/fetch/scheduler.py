"""Assigns the missing chunks of a fetch to the peers that hold them. Pure.

                ┌──── unassign: a holder failed, or does not have it ◄──┐
    missing ──► unassigned ──── assign: from the front, a window at a time ──► assigned ──► committed
                  ▲                                 ├── steal: from the end ──► assigned to another
                  └──────────────────────────────── └── late: what other holders may have is unassigned

The nearest holder begins. Another becomes active where chunks are unassigned that no active holder has, or where it
should deliver some of them sooner: it is assigned what is unassigned, or what another has not begun to read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from lmkv.keys import ChunkKey
from lmkv.transfer.bandwidth import Bandwidth
from lmkv_server.node.cache.host import Chunk
from lmkv_server.node.tiers.base import Progress


class InflightFetches:
    """Knows the fetch that transfers each chunk, and the other fetches that wait for it."""

    def __init__(self) -> None:
        self._waiting: dict[ChunkKey, list[tuple[Progress, int]]] = {}
        self._owners: dict[ChunkKey, Progress | None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._waiting

    def begin(self, keys: Iterable[ChunkKey], progress: Progress | None = None) -> None:
        """A fetch transfers these chunks; each must be ended by `commit` or `end`."""
        for key in keys:
            assert key not in self._waiting, "a chunk is transferred twice"
            self._waiting[key] = []
            self._owners[key] = progress

    def subscribe(self, progress: Progress) -> bool:
        """Adds to the fetch what other fetches transfer and it misses, once that arrives; whether there is any."""
        subscribed = False
        for index in progress.missing:
            key = progress.keys[index]
            waiting = self._waiting.get(key)
            if waiting is not None and self._owners[key] is not progress:
                subscribed = True
                if (progress, index) not in waiting:
                    waiting.append((progress, index))
        return subscribed

    def commit(self, chunk: Chunk, instance_id: str) -> None:
        """The chunk has arrived from a peer and is in the tier: adds it to the fetches that wait for it."""
        self._owners.pop(chunk.key, None)
        for progress, index in self._waiting.pop(chunk.key, ()):
            progress.add([(index, chunk)], instance_id)
            progress.changed.set()

    def end(self, keys: Iterable[ChunkKey]) -> None:
        """The chunks of these that have not arrived are no longer transferred: notifies the fetches that wait."""
        for key in keys:
            self._owners.pop(key, None)
            for progress, _ in self._waiting.pop(key, ()):
                progress.changed.set()


WINDOW_SECONDS = 0.5
"""Expected duration of a window's transfer: long compared to a call, short compared to the life of a grant."""
MAX_WINDOW_BYTES = 1 << 30
UNKNOWN_WINDOW_BYTES = 256 << 20
"""Window of a single holder whose bandwidth is not known."""
WINDOW_CHUNKS = 1024
PROBE_BYTES = 8 << 20
"""First window of a holder whose bandwidth is not known, if there are others."""
WORTH_PROBING = 4
"""A holder of unknown bandwidth becomes active beside others only if this many probes are left to fetch."""
LEAST_GAIN = 0.1
"""A holder becomes active beside others only to take at least this fraction of what is left."""
MAX_ACTIVE = 4
"""Most active holders of one fetch."""
BATCH_SECONDS = 0.005
"""Expected duration of a batch's read: short, so that chunks are verified and delivered soon."""
FIRST_BATCH_BYTES = 2 << 20
"""Batch of a holder whose bandwidth is not known."""
MIN_BATCH_BYTES = 1 << 20
MAX_BATCH_BYTES = 32 << 20


@dataclass(kw_only=True, slots=True, eq=False)
class HolderState:
    """One holder, as one fetch sees it."""

    indices: Collection[int]
    """The chunks that it may hold; if they have one part, a range from the first one of the prompt on."""
    is_near: bool = False
    """Whether it is on this host."""
    bandwidth: Bandwidth = field(default_factory=Bandwidth)
    moved_share: float = 1.0
    """Bytes that its reads move for each byte of the chunks."""
    unavailable: set[int] = field(default_factory=set)
    """Chunks that it turned out not to have, or that arrived damaged from it."""
    failed: bool = False
    """Whether a call to it or a read from it failed: it is assigned nothing more."""
    pending: deque[int] = field(default_factory=deque)
    """Assigned chunks whose read has not begun, in prompt order; other holders may steal them."""
    assigned: set[int] = field(default_factory=set)
    """Chunks that are pending, being read or being verified."""
    is_late: bool = False
    """Whether an answer of it is overdue. It is assigned only what no other holder has."""
    hedged: set[int] = field(default_factory=set)
    """Chunks that were being read from it when it became late. It is not assigned them again; others may be."""

    def may_hold(self, index: int) -> bool:
        """Whether it may hold this chunk."""
        return not self.failed and index in self.indices and index not in self.unavailable


class FetchPlan:
    """Assigns each missing chunk of one fetch to a holder."""

    def __init__(
        self,
        progress: Progress,
        inflight: InflightFetches,
        holders: Iterable[HolderState],
        combined: Bandwidth,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`combined` is the bandwidth of several active holders together, which this node's side limits.

        `progress.changed` is set whenever `activate` may find something to do.
        """
        now = clock()
        self.holders: Sequence[HolderState] = sorted(
            holders, key=lambda one: (one.is_late, not one.is_near, -(one.bandwidth.rate(now) or 0), -len(one.indices))
        )
        """Ordered by lateness, distance, bandwidth (highest first) and the number of chunks that they hold."""
        self.active: list[HolderState] = []
        self._progress = progress
        self._inflight = inflight
        self._combined = combined
        self._clock = clock
        self._chunk_bytes = progress.mean_bytes * max((holder.moved_share for holder in self.holders), default=1.0)
        """Bytes that move for a chunk."""

    def unassigned(self) -> list[int]:
        """Missing chunks that a holder may have and no fetch transfers, in order, up to the first useless one."""
        found = []
        for index in sorted(self._progress.missing):
            if self._progress.keys[index] in self._inflight:
                continue
            if any(holder.may_hold(index) for holder in self.holders):
                found.append(index)
            elif self._progress.needs.in_order:
                break  # no holder has it, so the chunks behind it are of no use
        return found

    def activate(self) -> list[HolderState]:
        """The holders that become active now. Each has chunks pending, and is active until `deactivate`."""
        activated = []
        for holder in self.holders:
            if len(self._on_time()) >= MAX_ACTIVE:
                break
            if holder not in self.active and self._is_worthwhile(holder) and self.assign(holder):
                self.active.append(holder)
                activated.append(holder)
        return activated

    def assign(self, holder: HolderState) -> bool:
        """Assigns a window of chunks to a holder that has nothing pending; whether there was any."""
        assert not holder.pending
        selected = [index for index in self.unassigned() if self._may_assign(holder, index)][
            : self._window_count(holder)
        ]
        if selected:
            self._inflight.begin((self._progress.keys[index] for index in selected), self._progress)
        else:
            selected = self._steal(holder)
        holder.pending.extend(selected)
        holder.assigned.update(selected)
        return bool(selected)

    def next_batch(self, holder: HolderState) -> list[int]:
        """Removes and returns the pending chunks that are to be read next from a holder."""
        rate = holder.bandwidth.rate(self._clock())
        size_bytes = (
            FIRST_BATCH_BYTES if rate is None else min(max(rate * BATCH_SECONDS, MIN_BATCH_BYTES), MAX_BATCH_BYTES)
        )
        count = max(1, int(size_bytes // self._chunk_bytes))
        return [holder.pending.popleft() for _ in range(min(count, len(holder.pending)))]

    def commit(self, holder: HolderState, index: int, chunk: Chunk, instance_id: str) -> None:
        """A chunk that was read from this holder is in the tier, whichever holder it is assigned to now."""
        for one in self.holders:
            if index in one.assigned:
                one.assigned.discard(index)
                if one is not holder:
                    one.pending = deque(left for left in one.pending if left != index)
        self._inflight.commit(chunk, instance_id)

    def mark_late(self, holder: HolderState) -> int:
        """Unassigns the chunks of an overdue holder that other holders may have; the number of these chunks.

        The reads that have begun continue: of the two answers the first one counts. A chunk is read at most once from
        each holder.
        """
        holder.is_late = True
        others = [other for other in self.holders if other is not holder and not other.is_late]
        selected = [index for index in holder.assigned if any(other.may_hold(index) for other in others)]
        holder.hedged.update(index for index in selected if index not in holder.pending)
        self.unassign(holder, selected)
        return len(selected)

    def unassign(self, holder: HolderState, indices: Iterable[int]) -> None:
        """These chunks are not read from this holder any more; those that it was not assigned are ignored."""
        if selected := holder.assigned.intersection(indices):
            holder.assigned -= selected
            holder.pending = deque(index for index in holder.pending if index not in selected)
            self._inflight.end(self._progress.keys[index] for index in selected)
            self._progress.changed.set()

    def deactivate(self, holder: HolderState) -> None:
        """The holder is assigned nothing more until it is activated again."""
        self.active.remove(holder)
        self.unassign(holder, tuple(holder.assigned))
        self._progress.changed.set()

    def end(self) -> None:
        """No holder reads anything more: the task of one that is cancelled before it runs has not deactivated it."""
        for holder in tuple(self.active):
            self.deactivate(holder)

    def record_read(self, holder: HolderState, moved_bytes: int, seconds: float, share: float = 1.0) -> None:
        """Updates the bandwidths after a read; `share` is the part of its time that `seconds` are.

        With several active holders a read measures this node's side. The holder's own bandwidth is then updated only
        if it is lower than an even share of this node's bandwidth explains.
        """
        now, count = self._clock(), max(1, len(self._on_time()))
        if count > 1:
            self._combined.record_read(moved_bytes, seconds / count, now, share)
        known = holder.bandwidth.rate(now)
        if count == 1 or known is None or moved_bytes < seconds * known / count:
            holder.bandwidth.record_read(moved_bytes, seconds, now, share)

    def _window_count(self, holder: HolderState) -> int:
        rate = holder.bandwidth.rate(self._clock())
        if rate is not None:
            size_bytes = min(max(rate * WINDOW_SECONDS, PROBE_BYTES), MAX_WINDOW_BYTES)
        else:
            alone = sum(not other.failed for other in self.holders) == 1
            size_bytes = UNKNOWN_WINDOW_BYTES if alone else PROBE_BYTES
        return max(1, min(int(size_bytes // self._chunk_bytes), WINDOW_CHUNKS))

    def _on_time(self) -> list[HolderState]:
        """The active holders that are not late."""
        return [holder for holder in self.active if not holder.is_late]

    def _may_assign(self, holder: HolderState, index: int) -> bool:
        """Whether an unassigned chunk may be assigned to this holder."""
        if not holder.may_hold(index) or index in holder.hedged:
            return False
        return not holder.is_late or not any(other.may_hold(index) and not other.is_late for other in self.holders)

    def _is_worthwhile(self, holder: HolderState) -> bool:
        """Whether a holder that is not active should become so."""
        unassigned, active = self.unassigned(), self._on_time()
        if not active or any(
            holder.may_hold(index) and not any(other.may_hold(index) for other in active) for index in unassigned
        ):
            return True
        left = [
            index for index in (*unassigned, *(i for other in active for i in other.pending)) if holder.may_hold(index)
        ]
        now = self._clock()
        rate, rates = holder.bandwidth.rate(now), [other.bandwidth.rate(now) for other in active]
        known = [each for each in rates if each is not None]
        if rate is None or len(known) < len(rates):
            return len(left) * self._chunk_bytes >= WORTH_PROBING * PROBE_BYTES
        if (most := self._combined.rate(now)) is not None:
            rate = min(rate, most - sum(known))
        gain = self._share(len(left), holder, rate, sum(known))
        return gain >= max(1, LEAST_GAIN * len(left))

    def _steal(self, holder: HolderState) -> list[int]:
        """Unassigns the last pending chunks of the holder with the most work that this one should read sooner."""
        if holder.is_late:
            return []
        now = self._clock()

        def left(other: HolderState) -> float:
            return len(other.pending) / (other.bandwidth.rate(now) or 1.0)

        victim = max((other for other in self.active if other is not holder), key=left, default=None)
        if victim is None:
            return []
        stealable = [index for index in victim.pending if holder.may_hold(index)]
        rate, other_rate = holder.bandwidth.rate(now), victim.bandwidth.rate(now)
        if rate is None:
            count = min(self._window_count(holder), len(stealable) // 2)
        else:
            count = int(self._share(len(stealable), holder, rate, other_rate or rate))
        stolen = stealable[len(stealable) - count :]
        victim.assigned.difference_update(stolen)
        victim.pending = deque(index for index in victim.pending if index in victim.assigned)
        return stolen

    def _share(self, count: int, holder: HolderState, rate: float, other_rate: float) -> float:
        """The share of `count` chunks that a holder should take from one of `other_rate` for both to end together."""
        ahead_seconds = count * self._chunk_bytes / other_rate - holder.bandwidth.latency_seconds(self._clock())
        return max(0.0, ahead_seconds) / (1 / rate + 1 / other_rate) / self._chunk_bytes if rate > 0 else 0.0
