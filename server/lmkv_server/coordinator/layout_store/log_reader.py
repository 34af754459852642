"""Reads a shared map: the log of each shard from its end on, and the chunks that followers need. Used by `Session`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from lmkv_server.coordinator.layout_store.follower import InstanceFollower
from lmkv_server.coordinator.layout_store.records import READ_ENTRIES, ChunkOwner, LogEntry, LogPosition, decode

if TYPE_CHECKING:  # it imports valkey, which is optional
    from lmkv_server.coordinator.layout_store.valkey_client import ValkeyClient

logger = logging.getLogger(__name__)

GATHER_SECONDS = 0.05
"""Pause between two reads, so that each returns many entries."""
ENTRIES_PER_STEP = 16
"""Entries that are applied before other tasks run."""


class LogListener(Protocol):
    """Receives what a `LogReader` reads."""

    def handle_entry(self, entry: LogEntry) -> None:
        """An entry was read."""

    def advance(self, shard: int) -> None:
        """All entries up to the reader's position were handled."""

    def handle_gap(self, shard: int) -> None:
        """Entries were trimmed before they were read, or cannot be decoded, or the log was dropped."""


class LogReader:
    """Reads one shard's log."""

    def __init__(self, store: ValkeyClient, shard: int, listener: LogListener) -> None:
        self.position: LogPosition = (0, 0)
        """Of the last entry that was read."""
        self._store = store
        self._shard = shard
        self._listener = listener

    async def begin(self) -> None:
        """Sets the position to the newest entry. Raises `StoreLost`."""
        self.position = await self._store.tail(self._shard)

    async def run(self) -> None:
        """Reads until cancelled. Raises `StoreLost`."""
        while True:
            logged = await self._store.read(self._shard, self.position)
            for number, (position, previous, data) in enumerate(logged):
                if previous != self.position:
                    logger.warning("fell behind the log of the shared layout map; reloading shard %d", self._shard)
                    self._listener.handle_gap(self._shard)
                self.position = position
                try:
                    entry = decode(data)
                except ValueError as error:
                    logger.warning("cannot decode an entry of the shared layout map: %s", error)
                    self._listener.handle_gap(self._shard)
                else:
                    self._listener.handle_entry(entry)
                self._listener.advance(self._shard)
                if number % ENTRIES_PER_STEP == ENTRIES_PER_STEP - 1:
                    await asyncio.sleep(0)
            if not logged:
                await self._check_dropped()
            if len(logged) < READ_ENTRIES:  # else more entries are available already
                await asyncio.sleep(GATHER_SECONDS)

    async def _check_dropped(self) -> None:
        """Reads the log from its beginning if the store has dropped the one that was read. Raises `StoreLost`.

        Positions contain the time of the store. If its clock was set back since, those of a new log are lower than the
        reader's: nothing follows that one, and nothing shows a gap.
        """
        if await self._store.tail(self._shard) < self.position:
            logger.warning("the log of the shared layout map was dropped; reloading shard %d", self._shard)
            self.position = (0, 0)
            self._listener.handle_gap(self._shard)


if TYPE_CHECKING:  # it imports valkey, which is optional
    from lmkv_server.coordinator.layout_store.valkey_client import ValkeyClient

CONCURRENT_LOADS = 8
RETRY_SECONDS = 1.0
"""Delay of a load after two failed ones in a row."""


class SnapshotLoader:
    """Loads through one connected store. `position` returns how far a shard's log has been read."""

    def __init__(self, store: ValkeyClient, position: Callable[[int], LogPosition]) -> None:
        self._store = store
        self._position = position
        self._queue: asyncio.Queue[tuple[ChunkOwner, InstanceFollower]] = asyncio.Queue()  # at most one per instance
        self._catching_up: dict[int, set[InstanceFollower]] = {}
        """Loaded followers that wait for the log to be read up to the end of their load, by shard."""
        self.load_count = 0
        """Instances that were loaded."""

    def load(self, owner: ChunkOwner, follower: InstanceFollower) -> None:
        """Schedules a load."""
        if follower.failure_count > 1:
            asyncio.get_running_loop().call_later(RETRY_SECONDS, self._queue.put_nowait, (owner, follower))
        else:
            self._queue.put_nowait((owner, follower))

    def advance(self, shard: int) -> None:
        """The log of a shard was read further: completes the loads that waited for it."""
        waiting = self._catching_up.get(shard)
        if waiting:
            position = self._position(shard)
            for follower in waiting:
                follower.advance(position)
            self._catching_up[shard] = {follower for follower in waiting if follower.is_catching_up}

    async def run(self) -> None:
        """Loads one instance after the other until cancelled; `CONCURRENT_LOADS` tasks run it. Raises `StoreLost`."""
        while True:
            owner, follower = await self._queue.get()
            if follower.needs_load and not follower.is_closed:
                await self._load(owner, follower)

    async def _load(self, owner: ChunkOwner, follower: InstanceFollower) -> None:
        if follower.needs_resync:
            follower.needs_resync = False
            await self._store.next_term(owner)  # fences the publisher, which has the instance send a new snapshot
        load = follower.begin_load()
        if not follower.set_term(load, await self._store.current(owner)):
            return
        cursor = -1
        while cursor and follower.is_loading(load):
            cursor, records = await self._store.scan(owner, load.term, max(cursor, 0))
            follower.add_records(load, records)
            await asyncio.sleep(0)
        if not follower.is_loading(load):
            return
        follower.finish_scan(load, await self._store.tail(owner.shard))
        follower.advance(self._position(owner.shard))
        self.load_count += 1
        if follower.is_catching_up:
            self._catching_up.setdefault(owner.shard, set()).add(follower)
