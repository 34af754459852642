"""Writes publications to the store, and renews them before they expire. Used by `Session`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from lmkv_server.coordinator.layout_store.publication import MAX_BATCH_BYTES, Backlog, PendingEntry, Publication
from lmkv_server.coordinator.layout_store.records import ChunkOwner, EntryKind
from lmkv_server.coordinator.layout_store.store_lost import StoreLost, all_of

if TYPE_CHECKING:  # it imports valkey, which is optional
    from lmkv_server.coordinator.layout_store.valkey_client import ValkeyClient

GATHER_SECONDS = 0.05
"""Pause between two writes, so that each carries many entries: a call costs as much as dozens of changes."""
ROOM_SECONDS = 1.0
RENEWALS_PER_CALL = 200


class Publisher:
    """Publishes through one connected store.

    `on_refused` is called with the owner, the term and the reply for a publication whose term is over (`fenced`) or
    whose chunks were lost (`lost`).
    """

    def __init__(self, store: ValkeyClient, on_refused: Callable[[ChunkOwner, int, str], None]) -> None:
        self._store = store
        self._on_refused = on_refused
        self._backlog = Backlog()
        self._complete: dict[ChunkOwner, int] = {}
        """The newest term of each instance whose snapshot is published; cleared of others at each renewal."""
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self.published_count = 0
        """Entries that were written."""

    def enqueue(self, pending: PendingEntry) -> None:
        """Schedules an entry for writing."""
        self._backlog.put(pending)
        self._wake.set()

    async def wait_for_room(self) -> None:
        """Waits, at most a second, while the backlog is more than half full."""
        if not self._backlog.is_below_half:
            self._room.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(ROOM_SECONDS):
                    await self._room.wait()

    async def run(self) -> None:
        """Writes until cancelled. Raises `StoreLost`, also when the backlog overflows."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while batches := self._backlog.take():
                await all_of(self._publish(shard, batch) for shard, batch in batches.items())
                if self._backlog.is_below_half:
                    self._room.set()
                if self._backlog.size_bytes < MAX_BATCH_BYTES:  # else snapshots are being written
                    await asyncio.sleep(GATHER_SECONDS)
            if self._backlog.has_overflowed:
                raise StoreLost("the backlog of publications overflowed")

    async def renew(self, publications: Callable[[], Iterable[Publication]], interval_seconds: float) -> None:
        """Renews the publications at every interval until cancelled. Raises `StoreLost`."""
        while True:
            await asyncio.sleep(interval_seconds)
            by_shard: dict[int, list[Publication]] = {}
            current = {publication.owner: publication for publication in publications()}
            self._complete = {owner: term for owner, term in self._complete.items() if owner in current}
            for publication in current.values():
                by_shard.setdefault(publication.owner.shard, []).append(publication)
            for shard, renewed in by_shard.items():
                for start in range(0, len(renewed), RENEWALS_PER_CALL):
                    await self._renew(shard, renewed[start : start + RENEWALS_PER_CALL])

    async def _publish(self, shard: int, batch: list[PendingEntry]) -> None:
        replies = await self._store.publish(shard, batch)
        self.published_count += len(batch)
        for pending, reply in zip(batch, replies, strict=True):
            if reply == b"ok" and pending.entry.kind is EntryKind.COMPLETE:
                self._complete[pending.owner] = pending.entry.term
            elif reply != b"ok":
                self._on_refused(pending.owner, pending.entry.term, reply.decode())

    async def _renew(self, shard: int, publications: list[Publication]) -> None:
        terms = [(each.owner, each.term, self._complete.get(each.owner) == each.term) for each in publications]
        replies = await self._store.renew(shard, terms)
        for publication, reply in zip(publications, replies, strict=True):
            if reply != b"ok":
                self._on_refused(publication.owner, publication.term, reply.decode())
