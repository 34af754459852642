"""Reads the log of one shard, from where it was when the map began to be shared. Used by `SharedMap`."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

from lmkv_server.coordinator.layout_store.entry import READ_ENTRIES, Entry, Position, decode

if TYPE_CHECKING:  # it needs a package that not everybody has
    from lmkv_server.coordinator.layout_store.store import Store

logger = logging.getLogger(__name__)

GATHER_SECONDS = 0.05
"""Between two calls, so that each brings much."""
ENTRIES_AT_ONCE = 16
"""Entries that are taken in before others have a turn."""


class Listener(Protocol):
    """Who is told what the log says."""

    def hear(self, entry: Entry) -> None:
        """An entry came."""

    def reached(self, shard: int) -> None:
        """All entries up to the reader's position were told."""

    def missed(self, shard: int) -> None:
        """Entries are gone that nobody here has read, or that nobody can read."""


class Reader:
    """One shard's log."""

    def __init__(self, store: Store, shard: int, listener: Listener) -> None:
        self.position: Position = (0, 0)
        """Of the last entry that was read."""
        self._store = store
        self._shard = shard
        self._listener = listener

    async def begin(self) -> None:
        """Begins behind the newest entry. Raises `StoreLost`."""
        self.position = await self._store.tail(self._shard)

    async def run(self) -> None:
        """Reads for ever. Raises `StoreLost`."""
        while True:
            logged = await self._store.read(self._shard, self.position)
            for number, (position, previous, data) in enumerate(logged):
                if previous != self.position:
                    logger.warning("fell behind in the shared layout map; loading a part of it anew")
                    self._listener.missed(self._shard)
                self.position = position
                try:
                    entry = decode(data)
                except ValueError as error:
                    logger.warning("the shared layout map has an entry that is none: %s", error)
                    self._listener.missed(self._shard)
                else:
                    self._listener.hear(entry)
                self._listener.reached(self._shard)
                if number % ENTRIES_AT_ONCE == ENTRIES_AT_ONCE - 1:
                    await asyncio.sleep(0)
            if len(logged) < READ_ENTRIES:  # else there is more already
                await asyncio.sleep(GATHER_SECONDS)
