"""Loads the chunks of instances from the shared store, for the followers that need them. Used by `Session`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from lmkv_server.coordinator.layout_store.follower import InstanceFollower
from lmkv_server.coordinator.layout_store.log_entry import ChunkOwner, LogPosition

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
