"""What waits to be published: bounded, in order for each shard. Pure."""

from __future__ import annotations

from collections import deque

from lmkv_server.coordinator.layout_store.publication import Note

MAX_BACKLOG_BYTES = 64 << 20
MAX_BATCH_BYTES = 256 << 10
MAX_BATCH_NOTES = 128


class Backlog:
    """Notes that wait. One that no longer fits is dropped, and with it the whole: it is then `overflown` for good."""

    def __init__(self, limit_bytes: int = MAX_BACKLOG_BYTES) -> None:
        self.size_bytes = 0
        self.overflown = False
        self._limit_bytes = limit_bytes
        self._by_shard: dict[int, deque[Note]] = {}

    @property
    def is_roomy(self) -> bool:
        """Whether less than half of the room is taken."""
        return self.size_bytes < self._limit_bytes // 2

    def put(self, note: Note) -> None:
        """Adds one."""
        if self.overflown:
            return
        self.size_bytes += note.size_bytes
        if self.size_bytes > self._limit_bytes:
            self.overflown, self.size_bytes = True, 0
            self._by_shard.clear()
            return
        self._by_shard.setdefault(note.owner.shard, deque()).append(note)

    def take(self) -> dict[int, list[Note]]:
        """The next batch of each shard that has any."""
        batches: dict[int, list[Note]] = {}
        for shard, waiting in list(self._by_shard.items()):
            batch = batches[shard] = []
            size_bytes = 0
            while waiting and len(batch) < MAX_BATCH_NOTES and size_bytes < MAX_BATCH_BYTES:
                batch.append(waiting.popleft())
                size_bytes += batch[-1].size_bytes
            self.size_bytes -= size_bytes
            if not waiting:
                del self._by_shard[shard]
        return batches
