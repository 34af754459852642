"""The publication of an instance that reports to this coordinator, and the queue of entries to write."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from lmkv_server.coordinator.core.layout_map import Change
from lmkv_server.coordinator.layout_store.records import ChunkOwner, EntryKind, LogEntry, size_of

MAX_BACKLOG_BYTES = 64 << 20
MAX_BATCH_BYTES = 256 << 10
MAX_BATCH_ENTRIES = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingEntry:
    """An entry that is to be written."""

    entry: LogEntry
    is_logged: bool = True
    """Whether it goes into the log. Parts of a snapshot change the hash only."""

    @property
    def owner(self) -> ChunkOwner:
        """The instance that the entry is about."""
        return self.entry.owner

    @property
    def size_bytes(self) -> int:
        """Approximate size in memory."""
        return 128 + sum(size_of(change) for change in self.entry.changes)


class Backlog:
    """Entries to write, in order within each shard, up to `limit_bytes`.

    An entry that does not fit empties the backlog, and sets `has_overflowed` for good.
    """

    def __init__(self, limit_bytes: int = MAX_BACKLOG_BYTES) -> None:
        self.size_bytes = 0
        self.has_overflowed = False
        self.added = asyncio.Event()
        """Is set whenever an entry was added."""
        self._limit_bytes = limit_bytes
        self._by_shard: dict[int, deque[PendingEntry]] = {}

    @property
    def is_below_half(self) -> bool:
        """Whether less than half of the limit is used."""
        return self.size_bytes < self._limit_bytes // 2

    def put(self, pending: PendingEntry) -> None:
        """Adds an entry."""
        self.added.set()
        if self.has_overflowed:
            return
        self.size_bytes += pending.size_bytes
        if self.size_bytes > self._limit_bytes:
            self.has_overflowed, self.size_bytes = True, 0
            self._by_shard.clear()
            return
        self._by_shard.setdefault(pending.owner.shard, deque()).append(pending)

    def take(self) -> dict[int, list[PendingEntry]]:
        """Removes and returns the next batch of each shard that has entries."""
        batches: dict[int, list[PendingEntry]] = {}
        for shard, queue in list(self._by_shard.items()):
            batch = batches[shard] = []
            size_bytes = 0
            while queue and len(batch) < MAX_BATCH_ENTRIES and size_bytes < MAX_BATCH_BYTES:
                batch.append(queue.popleft())
                size_bytes += batch[-1].size_bytes
            self.size_bytes -= size_bytes
            if not queue:
                del self._by_shard[shard]
        return batches


class Publication:
    """One term of one instance; its report stream calls it. Adds its entries to a backlog."""

    def __init__(self, owner: ChunkOwner, epoch: int, term: int, backlog: Backlog) -> None:
        self.owner = owner
        self.epoch = epoch
        self.term = term
        self.is_complete = False
        """Whether the snapshot has been published."""
        self._backlog: Backlog | None = backlog

    def publish_changes(self, changes: Sequence[Change], digests: Sequence[tuple[int, int, int]] = ()) -> None:
        """Publishes chunks gained and lost; before `publish_complete` they are part of the snapshot."""
        if changes or (digests and self.is_complete):
            self._publish(EntryKind.CHANGES, changes, digests)

    def publish_complete(self) -> None:
        """Publishes that the snapshot is complete."""
        self.is_complete = True
        self._publish(EntryKind.COMPLETE)

    def publish_gone(self) -> None:
        """Publishes that the instance left, then closes."""
        self._publish(EntryKind.GONE)
        self.close()

    def close(self) -> None:
        """Stops publishing. Idempotent."""
        self._backlog = None

    def _publish(
        self, kind: EntryKind, changes: Sequence[Change] = (), digests: Sequence[tuple[int, int, int]] = ()
    ) -> None:
        if self._backlog is None:
            return
        tenant, instance_id = self.owner
        entry = LogEntry(kind, tenant, instance_id, self.epoch, self.term, list(changes), list(digests))
        self._backlog.put(PendingEntry(entry=entry, is_logged=kind is not EntryKind.CHANGES or self.is_complete))
