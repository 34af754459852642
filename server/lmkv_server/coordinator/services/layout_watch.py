"""Watching the layout map: every change goes to every watcher, and into a short history for those who come back.

A watcher that begins with a snapshot walks the map while changes already queue for it. Applied in order they make up
for all that the walk saw too early or not at all, for each of them says what is so, not what is different.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from lmkv.errors import Full, RevisionCompacted, WatcherTooSlow
from lmkv.keys import KEY_BYTES
from lmkv.v1 import cache_service_pb2 as pb
from lmkv.v1 import chunk_pb2
from lmkv_server.coordinator.core.layout_map import LayoutMap

MAX_WATCHERS = 64
MAX_WATCHERS_PER_CLIENT = 16
"""Watches of one identity: a token's name, a certificate's, or without either an address."""
HISTORY_BYTES = 16 << 20
"""Size of the history: up to a million keys."""
QUEUE_BYTES = 16 << 20
"""Size of what may wait for one watcher."""
FRAME_BYTES = 256 << 10
"""Size of one response, about."""
SCAN_KEYS = 4096
"""Keys of a snapshot that are read between two looks at what else there is to do."""
EVENT_BYTES = 128
"""What an event takes besides its keys, about."""
BOOKMARK_SECONDS = 5.0
"""A watcher hears something at least this often."""


@dataclass(frozen=True, slots=True)
class LayoutEvent:
    revision: int
    change: pb.LayoutChange

    @property
    def size_bytes(self) -> int:
        return EVENT_BYTES + len(self.change.admitted_keys) + len(self.change.evicted_keys)


class _Queue:
    """Events within bounds, oldest first."""

    def __init__(self, limit_bytes: int) -> None:
        self.events: deque[LayoutEvent] = deque()
        self._limit_bytes = limit_bytes
        self._size_bytes = 0

    @property
    def over_full(self) -> bool:
        return self._size_bytes > self._limit_bytes

    def push(self, event: LayoutEvent) -> None:
        self.events.append(event)
        self._size_bytes += event.size_bytes

    def pop(self) -> LayoutEvent:
        event = self.events.popleft()
        self._size_bytes -= event.size_bytes
        return event

    def clear(self) -> None:
        self.events.clear()
        self._size_bytes = 0


class _Watcher:
    """What is on its way to one watcher."""

    def __init__(self) -> None:
        self.queue = _Queue(QUEUE_BYTES)
        self.wake = asyncio.Event()
        self.too_slow = False

    def push(self, event: LayoutEvent) -> None:
        if self.too_slow:
            return
        self.queue.push(event)
        if self.queue.over_full:
            self.too_slow = True
            self.queue.clear()
        self.wake.set()

    def take(self) -> list[LayoutEvent]:
        """The next events that fit into one response. Raises `WatcherTooSlow` if some were lost."""
        if self.too_slow:
            raise WatcherTooSlow(
                "more changes came than wait for one watcher; begin again with start_revision 0", retry_seconds=0.1
            )
        taken: list[LayoutEvent] = []
        size_bytes = 0
        while self.queue.events and size_bytes < FRAME_BYTES:
            taken.append(self.queue.pop())
            size_bytes += taken[-1].size_bytes
        return taken


class LayoutWatch:
    """All watchers of one layout map; it is the map's listener. One event loop owns it."""

    def __init__(self, layout: LayoutMap) -> None:
        self._layout = layout
        self._watchers: dict[_Watcher, str] = {}
        """With the identity of each one's client."""
        self._history = _Queue(HISTORY_BYTES)
        self._forgotten_revision = layout.revision
        """What happened up to here is no longer in the history."""
        layout.listener = self

    @property
    def watcher_count(self) -> int:
        """Watchers that are there now."""
        return len(self._watchers)

    # --- What the layout map tells -------------------------------------------------------------------------------

    def changed(
        self, revision: int, instance_id: str, tier: int, fingerprint: bytes, gained: bytes, lost: bytes
    ) -> None:
        """See `LayoutListener`."""
        change = pb.LayoutChange(
            instance_id=instance_id,
            tier=chunk_pb2.Tier.ValueType(tier),
            fingerprint=fingerprint,
            admitted_keys=gained,
            evicted_keys=lost,
        )
        self._tell(LayoutEvent(revision, change))

    def replaced(self, revision: int, instance_id: str, content: Sequence[tuple[int, bytes, bytes]]) -> None:
        """See `LayoutListener`."""
        self.gone(revision, instance_id)
        for tier, fingerprint, keys in content:
            for change in _admissions(instance_id, tier, fingerprint, keys):
                self._tell(LayoutEvent(revision, change))

    def gone(self, revision: int, instance_id: str) -> None:
        """See `LayoutListener`."""
        self._tell(LayoutEvent(revision, pb.LayoutChange(instance_id=instance_id, instance_gone=True)))

    def _tell(self, event: LayoutEvent) -> None:
        self._history.push(event)
        while self._history.over_full:
            self._forgotten_revision = self._history.pop().revision
        for watcher in self._watchers:
            watcher.push(event)

    # --- Watchers ------------------------------------------------------------------------------------------------

    async def watch(
        self, start_revision: int, fingerprint: bytes = b"", client: str = ""
    ) -> AsyncIterator[pb.WatchResponse]:
        """What `CacheService.Watch` answers, for as long as it is read; `fingerprint` empty means every spec.

        `client` is the identity that shares of watches count by. Raises `RevisionCompacted`, `WatcherTooSlow`, `Full`.
        """
        if len(self._watchers) >= MAX_WATCHERS:
            raise Full(f"{MAX_WATCHERS} watchers are there already", retry_seconds=10)
        if (count := list(self._watchers.values()).count(client)) >= MAX_WATCHERS_PER_CLIENT:
            raise Full(f"this client has {count} watches open, as many as one may have; end some", retry_seconds=10)
        watcher = _Watcher()
        revision = self._layout.revision
        for event in self._since(start_revision) if start_revision else ():
            watcher.push(event)
        self._watchers[watcher] = client
        try:
            if not start_revision:
                async for response in self._snapshot(revision, fingerprint):
                    yield response
                yield pb.WatchResponse(revision=revision)
            while True:
                if not watcher.queue.events and not watcher.too_slow:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(BOOKMARK_SECONDS):
                            await watcher.wake.wait()
                watcher.wake.clear()
                events = watcher.take()
                changes = [event.change for event in events if _concerns(event.change, fingerprint)]
                if changes or not events:
                    reached = events[-1].revision if events else self._layout.revision
                    # A revision whose events went out in part is not reached: who returns from here needs the rest.
                    in_part = watcher.queue.events and watcher.queue.events[0].revision == reached
                    yield pb.WatchResponse(revision=reached - 1 if in_part else reached, changes=changes)
        finally:
            self._watchers.pop(watcher, None)

    def _since(self, revision: int) -> Iterator[LayoutEvent]:
        """What happened after a revision. Raises `RevisionCompacted` if that is not known any more, or not yet."""
        if not self._forgotten_revision <= revision <= self._layout.revision:
            raise RevisionCompacted(
                f"start_revision {revision} is not between {self._forgotten_revision} and {self._layout.revision}; "
                "begin again with 0",
                oldest_revision=self._forgotten_revision,
                revision=self._layout.revision,
            )
        return (event for event in self._history.events if event.revision > revision)

    async def _snapshot(self, revision: int, fingerprint: bytes) -> AsyncIterator[pb.WatchResponse]:
        cursor = 0
        while True:
            cursor, parts = self._layout.scan(cursor, SCAN_KEYS)
            changes = [change for part in parts for change in _admissions(*part) if _concerns(change, fingerprint)]
            if changes:
                yield pb.WatchResponse(revision=revision, snapshot=True, changes=changes)
            if not cursor:
                return
            await asyncio.sleep(0)


def _admissions(instance_id: str, tier: int, fingerprint: bytes, keys: bytes) -> Iterator[pb.LayoutChange]:
    """Keys now held, in changes that each fit into a response."""
    step = FRAME_BYTES // KEY_BYTES * KEY_BYTES
    for start in range(0, len(keys), step):
        yield pb.LayoutChange(
            instance_id=instance_id,
            tier=chunk_pb2.Tier.ValueType(tier),
            fingerprint=fingerprint,
            admitted_keys=keys[start : start + step],
        )


def _concerns(change: pb.LayoutChange, fingerprint: bytes) -> bool:
    return not fingerprint or change.instance_gone or change.fingerprint == fingerprint
