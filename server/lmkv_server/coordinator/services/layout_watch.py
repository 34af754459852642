"""`CacheService.Watch`: sends every change of the layout map to every watcher; a short history serves reconnects.

A watcher that starts with a snapshot scans the map while changes are queued for it. Applied in order, the changes
correct what the scan saw too early or missed, because each of them states what is held, not a difference.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from lmkv.errors import Full, RevisionCompacted, WatcherTooSlow
from lmkv.keys import KEY_BYTES, split_keys
from lmkv.runtime.places import Places
from lmkv.v1 import cache_service_pb2 as pb
from lmkv_server.coordinator.core.layout_map import LayoutMap, tier_id

MAX_WATCHERS = 64
MAX_WATCHERS_PER_CLIENT = 16
"""Watches of one identity: the name of a token or certificate, otherwise an address."""
HISTORY_BYTES = 16 << 20
"""Size of the history: up to a million keys."""
QUEUE_BYTES = 16 << 20
"""Size of the events queued for one watcher."""
FRAME_BYTES = 256 << 10
"""Approximate size of one response."""
SCAN_KEYS = 4096
"""Keys of a snapshot that are read before other tasks run."""
EVENT_BYTES = 256
"""Approximate size of an event without its keys. As a message of protobuf, it would take from 600 bytes to 1200."""
BOOKMARK_SECONDS = 5.0
"""Longest time between two responses."""


@dataclass(frozen=True, slots=True)
class LayoutEvent:
    """A `LayoutChange`, and the revision that it led to."""

    revision: int
    instance_id: str
    tier: int = 0
    fingerprint: bytes = b""
    admitted_keys: bytes = b""
    evicted_keys: bytes = b""
    instance_gone: bool = False

    @property
    def size_bytes(self) -> int:
        """Approximate size in memory."""
        return EVENT_BYTES + len(self.admitted_keys) + len(self.evicted_keys)

    def concerns(self, fingerprint: bytes) -> bool:
        """Whether a watcher of this spec receives it; an empty `fingerprint` selects every spec."""
        return not fingerprint or self.instance_gone or self.fingerprint == fingerprint

    def to_proto(self) -> pb.LayoutChange:
        """The message for watchers."""
        return pb.LayoutChange(
            instance_id=self.instance_id,
            tier=tier_id(self.tier),
            fingerprint=self.fingerprint,
            admitted_keys=split_keys(self.admitted_keys),
            evicted_keys=split_keys(self.evicted_keys),
            instance_gone=self.instance_gone,
        )


class _Queue:
    """Events up to a total size, oldest first."""

    def __init__(self, limit_bytes: int) -> None:
        self.events: deque[LayoutEvent] = deque()
        self._limit_bytes = limit_bytes
        self._size_bytes = 0

    @property
    def is_over_limit(self) -> bool:
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
    """The events queued for one watcher."""

    def __init__(self) -> None:
        self.queue = _Queue(QUEUE_BYTES)
        self.wake = asyncio.Event()
        self.is_too_slow = False

    def push(self, event: LayoutEvent) -> None:
        if self.is_too_slow:
            return
        self.queue.push(event)
        if self.queue.is_over_limit:
            self.is_too_slow = True
            self.queue.clear()
        self.wake.set()

    def take(self) -> list[LayoutEvent]:
        """Removes the events of the next response. Raises `WatcherTooSlow` if events were dropped."""
        if self.is_too_slow:
            raise WatcherTooSlow(
                "the watcher reads changes too slowly; restart with start_revision 0", retry_seconds=0.1
            )
        taken: list[LayoutEvent] = []
        size_bytes = 0
        while self.queue.events and size_bytes < FRAME_BYTES:
            taken.append(self.queue.pop())
            size_bytes += taken[-1].size_bytes
        return taken


class LayoutWatch:
    """All watchers of one layout map, whose listener it is. One event loop owns it."""

    def __init__(self, layout: LayoutMap) -> None:
        self._layout = layout
        self._watchers = Places[_Watcher]("watches", MAX_WATCHERS, MAX_WATCHERS_PER_CLIENT)
        self._history = _Queue(HISTORY_BYTES)
        self._forgotten_revision = layout.revision
        """The history starts after this revision."""
        layout.listener = self

    @property
    def watcher_count(self) -> int:
        """Open watches."""
        return len(self._watchers)

    # --- LayoutListener ------------------------------------------------------------------------------------------

    def changed(
        self, revision: int, instance_id: str, tier: int, fingerprint: bytes, gained: bytes, lost: bytes
    ) -> None:
        """Publishes chunks that an instance gained or lost, in parts that are small enough for a response."""
        step = FRAME_BYTES // KEY_BYTES * KEY_BYTES
        for start in range(0, max(len(gained), len(lost)), step):
            part = slice(start, start + step)
            self._publish(LayoutEvent(revision, instance_id, tier, fingerprint, gained[part], lost[part]))

    def replaced(self, revision: int, instance_id: str, content: Sequence[tuple[int, bytes, bytes]]) -> None:
        """Publishes that an instance's chunks were replaced."""
        self.gone(revision, instance_id)
        for tier, fingerprint, keys in content:
            for event in _admissions(revision, instance_id, tier, fingerprint, keys):
                self._publish(event)

    def gone(self, revision: int, instance_id: str) -> None:
        """Publishes that an instance left."""
        self._publish(LayoutEvent(revision, instance_id, instance_gone=True))

    def _publish(self, event: LayoutEvent) -> None:
        self._history.push(event)
        while self._history.is_over_limit:
            self._forgotten_revision = self._history.pop().revision
        for watcher in self._watchers:
            watcher.push(event)

    # --- Watchers ------------------------------------------------------------------------------------------------

    async def watch(
        self, start_revision: int, fingerprint: bytes = b"", client: str = ""
    ) -> AsyncIterator[pb.WatchResponse]:
        """The responses of `CacheService.Watch`, without end; an empty `fingerprint` selects every spec.

        Each `client` has a share of the watches. Raises `RevisionCompacted`, `WatcherTooSlow`, `Full`.
        """
        try:
            self._watchers.check(client)
        except Full as error:
            raise Full(str(error), retry_seconds=10) from None
        watcher = _Watcher()
        revision = self._layout.revision
        for event in self._since(start_revision) if start_revision else ():
            watcher.push(event)
        self._watchers.take(watcher, client)
        try:
            if not start_revision:
                async for response in self._snapshot(revision, fingerprint):
                    yield response
                yield pb.WatchResponse(revision=revision)
            clock = asyncio.get_running_loop().time
            due = clock() + BOOKMARK_SECONDS
            while True:
                if not watcher.queue.events and not watcher.is_too_slow:
                    with suppress(TimeoutError):
                        async with asyncio.timeout_at(due):
                            await watcher.wake.wait()
                watcher.wake.clear()
                events = watcher.take()
                changes = [event.to_proto() for event in events if event.concerns(fingerprint)]
                if changes or not events or clock() >= due:  # changes of other specs must not delay a bookmark
                    due = clock() + BOOKMARK_SECONDS
                    reached = events[-1].revision if events else self._layout.revision
                    # A revision with unsent events is not reached: a client that resumes here needs the rest.
                    in_part = watcher.queue.events and watcher.queue.events[0].revision == reached
                    yield pb.WatchResponse(revision=reached - 1 if in_part else reached, changes=changes)
        finally:
            self._watchers.release(watcher)

    def _since(self, revision: int) -> Iterator[LayoutEvent]:
        """The events after a revision. Raises `RevisionCompacted` if the history does not reach back to it."""
        if not self._forgotten_revision <= revision <= self._layout.revision:
            raise RevisionCompacted(
                f"start_revision {revision} is not between {self._forgotten_revision} and {self._layout.revision}; "
                "restart with 0",
                oldest_revision=self._forgotten_revision,
                revision=self._layout.revision,
            )
        return (event for event in self._history.events if event.revision > revision)

    async def _snapshot(self, revision: int, fingerprint: bytes) -> AsyncIterator[pb.WatchResponse]:
        cursor = 0
        while True:
            cursor, parts = self._layout.scan(cursor, SCAN_KEYS)
            events = (event for part in parts for event in _admissions(revision, *part))
            changes = [event.to_proto() for event in events if event.concerns(fingerprint)]
            if changes:
                yield pb.WatchResponse(revision=revision, snapshot=True, changes=changes)
            if not cursor:
                return
            await asyncio.sleep(0)


def _admissions(revision: int, instance_id: str, tier: int, fingerprint: bytes, keys: bytes) -> Iterator[LayoutEvent]:
    """Events that admit `keys`, each small enough for a response."""
    step = FRAME_BYTES // KEY_BYTES * KEY_BYTES
    for start in range(0, len(keys), step):
        yield LayoutEvent(revision, instance_id, tier, fingerprint, keys[start : start + step])
