"""Writes what waits to be published, and keeps it from vanishing. A task each; used by `SharedMap`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from lmkv_server.coordinator.layout_store.backlog import MAX_BATCH_BYTES, Backlog
from lmkv_server.coordinator.layout_store.counts import Counts
from lmkv_server.coordinator.layout_store.entry import EntryKind
from lmkv_server.coordinator.layout_store.lost import StoreLost, all_of
from lmkv_server.coordinator.layout_store.owner import Owner
from lmkv_server.coordinator.layout_store.publication import Note, Publication

if TYPE_CHECKING:  # it needs a package that not everybody has
    from lmkv_server.coordinator.layout_store.store import Store

GATHER_SECONDS = 0.05
"""Between two calls, so that each tells much: a call costs as much as dozens of changes."""
ROOM_SECONDS = 1.0
RENEWED_AT_ONCE = 200


class Publisher:
    """Publishes through one connected store. `on_refused` is told whose term is over, or whose content was lost."""

    def __init__(self, store: Store, counts: Counts, on_refused: Callable[[Owner, int, str], None]) -> None:
        self._store = store
        self._counts = counts
        self._on_refused = on_refused
        self._backlog = Backlog()
        self._complete: dict[Owner, int] = {}
        """The newest term of each instance whose snapshot is published."""
        self._wake = asyncio.Event()
        self._room = asyncio.Event()

    def tell(self, note: Note) -> None:
        """Has something published soon."""
        self._backlog.put(note)
        self._wake.set()

    async def has_room(self) -> None:
        """Waits, a second at most, while much waits already."""
        if not self._backlog.is_roomy:
            self._room.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(ROOM_SECONDS):
                    await self._room.wait()

    async def run(self) -> None:
        """Publishes for ever. Raises `StoreLost`, also if more waits than there is room for."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while batches := self._backlog.take():
                await all_of(self._publish(shard, notes) for shard, notes in batches.items())
                if self._backlog.is_roomy:
                    self._room.set()
                if self._backlog.size_bytes < MAX_BATCH_BYTES:  # else snapshots are on their way
                    await asyncio.sleep(GATHER_SECONDS)
            if self._backlog.overflown:
                raise StoreLost("more waits to be published than there is room for")

    async def renew(self, publications: Callable[[], Iterable[Publication]], interval_seconds: float) -> None:
        """Renews what is published, for ever. Raises `StoreLost`."""
        while True:
            await asyncio.sleep(interval_seconds)
            by_shard: dict[int, list[Publication]] = {}
            for publication in publications():
                by_shard.setdefault(publication.owner.shard, []).append(publication)
            for shard, renewed in by_shard.items():
                for start in range(0, len(renewed), RENEWED_AT_ONCE):
                    await self._renew(shard, renewed[start : start + RENEWED_AT_ONCE])

    async def _publish(self, shard: int, notes: list[Note]) -> None:
        replies = await self._store.publish(shard, notes)
        self._counts.published += len(notes)
        for note, reply in zip(notes, replies, strict=True):
            if reply == b"ok" and note.entry.kind is EntryKind.COMPLETE:
                self._complete[note.owner] = note.entry.term
            elif reply != b"ok":
                self._on_refused(note.owner, note.entry.term, reply.decode())

    async def _renew(self, shard: int, publications: list[Publication]) -> None:
        told = [(each.owner, each.term, self._complete.get(each.owner) == each.term) for each in publications]
        replies = await self._store.renew(shard, told)
        for publication, reply in zip(publications, replies, strict=True):
            if reply != b"ok":
                self._on_refused(publication.owner, publication.term, reply.decode())
