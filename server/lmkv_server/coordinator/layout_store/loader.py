"""Loads what instances hold, for those that want it. Used by `SharedMap`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from lmkv_server.coordinator.layout_store.counts import Counts
from lmkv_server.coordinator.layout_store.entry import Position
from lmkv_server.coordinator.layout_store.follower import Follower
from lmkv_server.coordinator.layout_store.owner import Owner

if TYPE_CHECKING:  # it needs a package that not everybody has
    from lmkv_server.coordinator.layout_store.store import Store

LOADS_AT_ONCE = 8
RETRY_SECONDS = 1.0
"""How long a load waits after two that came to nothing."""


class Loader:
    """Loads through one connected store. `position` says how far a shard's log has been read."""

    def __init__(self, store: Store, counts: Counts, position: Callable[[int], Position]) -> None:
        self._store = store
        self._counts = counts
        self._position = position
        self._wanting: asyncio.Queue[tuple[Owner, Follower]] = asyncio.Queue()  # no more than there are instances
        self._reading_on: dict[int, set[Follower]] = {}
        """Those that have all, and wait for the log to be read up to there; by shard."""

    def load(self, owner: Owner, follower: Follower) -> None:
        """Loads soon what an instance holds."""
        if follower.failure_count > 1:
            asyncio.get_running_loop().call_later(RETRY_SECONDS, self._wanting.put_nowait, (owner, follower))
        else:
            self._wanting.put_nowait((owner, follower))

    def reached(self, shard: int) -> None:
        """The log was read a step further."""
        waiting = self._reading_on.get(shard)
        if waiting:
            position = self._position(shard)
            for follower in waiting:
                follower.reach(position)
            self._reading_on[shard] = {follower for follower in waiting if follower.is_reading_on}

    async def run(self) -> None:
        """Loads one after the other, for ever; `LOADS_AT_ONCE` of these may run. Raises `StoreLost`."""
        while True:
            owner, follower = await self._wanting.get()
            if follower.is_wanting and not follower.is_closed:
                await self._load(owner, follower)

    async def _load(self, owner: Owner, follower: Follower) -> None:
        if follower.is_hopeless:
            follower.is_hopeless = False
            await self._store.next_term(owner)  # whoever publishes it is refused, and has the instance tell it anew
        load = follower.begin()
        if not follower.found(load, await self._store.current(owner)):
            return
        cursor = -1
        while cursor and follower.is_loading(load):
            cursor, records = await self._store.scan(owner, load.term, max(cursor, 0))
            follower.loaded(load, records)
            await asyncio.sleep(0)
        if not follower.is_loading(load):
            return
        follower.ended(load, await self._store.tail(owner.shard))
        follower.reach(self._position(owner.shard))
        self._counts.loads += 1
        if follower.is_reading_on:
            self._reading_on.setdefault(owner.shard, set()).add(follower)
