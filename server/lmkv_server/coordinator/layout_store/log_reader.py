"""Reads the log of one shard, starting at its end when the map is connected. Used by `Session`."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

from lmkv_server.coordinator.layout_store.log_entry import READ_ENTRIES, LogEntry, LogPosition, decode

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
