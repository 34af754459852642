"""The disk tier: chunks of the host tier that are in files, too, and stay there when the host tier evicts them.

Nothing waits for a disk but who asks for a chunk that is only there. Whatever happens to a folder, the node goes on.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

from lmkv.keys import ChunkKey
from lmkv.pool.pool import Pool
from lmkv_server.node.cache.events import CacheEvents
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.tiers.disk.chunk import DiskChunk
from lmkv_server.node.tiers.disk.folder import DiskFolder, FileIo
from lmkv_server.node.tiers.disk.volume import WRITE_THREADS, DiskVolume
from lmkv_server.node.tiers.disk.writer import DiskWriter
from lmkv_server.node.tiers.reader import TierReader

NAME = "disk"
"""Name of the tier."""
OPEN_SECONDS = 5.0
"""A node that starts waits so long for what its folders hold; a longer list comes in later."""
FLUSH_SECONDS = 3.0
"""A node that ends writes for so long what waits to be written."""


class DiskTier:
    """Chunks in folders. To be used as an async context manager, inside that of the pool; one loop owns it."""

    def __init__(
        self,
        paths: Sequence[Path],
        capacity_bytes: int,
        *,
        tier: HostTier,
        pool: Pool,
        events: CacheEvents,
        io: FileIo | None = None,
        **seconds: float,
    ) -> None:
        """Each of the folders may hold the same part of `capacity_bytes`; `seconds` are for each `DiskVolume`."""
        self.writer = DiskWriter(self, tier, pool)
        self.reader: TierReader[DiskChunk] = TierReader(self, tier, pool)
        self.evicted_count = 0
        """Chunks that had to go for others."""
        self.shelves = [
            DiskVolume(
                DiskFolder(path, io),
                capacity_bytes // len(paths),
                on_open=self._opened,
                on_lost=self._lost,
                **seconds,
            )
            for path in paths
        ]
        self._tier = tier
        self._events = events
        events.subscribe(self.writer)
        self._keepers: list[asyncio.Task[None]] = []
        self._removals: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> DiskTier:
        for shelf in self.shelves:
            self._keepers.append(asyncio.create_task(shelf.keep()))
            self._keepers += [asyncio.create_task(self.writer.run(shelf)) for _ in range(WRITE_THREADS)]
        opening = [asyncio.ensure_future(shelf.attempted.wait()) for shelf in self.shelves]
        _, late = await asyncio.wait(opening, timeout=OPEN_SECONDS)
        for wait in late:
            wait.cancel()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Writes what waits, as far as that is done soon, and lets go of the folders. Idempotent."""
        if self._keepers and self.is_usable:
            with suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_SECONDS):
                    await self.writer.flush()
        keepers, self._keepers = self._keepers, []
        for keeper in keepers:
            keeper.cancel()
        if keepers:
            await asyncio.wait(keepers)
        await asyncio.gather(*(shelf.aclose() for shelf in self.shelves))
        await self.reader.aclose()
        await self.settle()

    # --- What is there -------------------------------------------------------------------------------------------

    @property
    def capacity_bytes(self) -> int:
        """Bytes that files may take: none in a folder that cannot be used, less in one on a full disk."""
        return sum(shelf.index.limit_bytes for shelf in self.shelves if shelf.is_open)

    @property
    def used_bytes(self) -> int:
        """Bytes that files take."""
        return sum(shelf.index.used_bytes for shelf in self.shelves)

    @property
    def open_count(self) -> int:
        """Folders that can be used."""
        return sum(shelf.is_usable for shelf in self.shelves)

    @property
    def is_usable(self) -> bool:
        """Whether there is a folder that can be used."""
        return any(shelf.is_usable for shelf in self.shelves)

    @property
    def failure_count(self) -> int:
        """Times that a folder could not be opened or written."""
        return sum(shelf.failure_count for shelf in self.shelves)

    @property
    def chunk_count(self) -> int:
        """Chunks on disk."""
        return sum(len(shelf.index) for shelf in self.shelves)

    def __iter__(self) -> Iterator[DiskChunk]:
        return chain.from_iterable(shelf.index for shelf in self.shelves)

    def find(self, key: ChunkKey) -> tuple[DiskVolume, DiskChunk] | None:
        """The chunk and where it is, if it is on disk. Does not count as a use."""
        for shelf in self.shelves:
            if chunk := shelf.index.get(key):
                return shelf, chunk
        return None

    def get(self, key: ChunkKey) -> DiskChunk | None:
        """The chunk, if it is on disk. Does not count as a use."""
        return found[1] if (found := self.find(key)) else None

    def count(self, fingerprint: bytes, keys: Sequence[ChunkKey], after: int = 0) -> int:
        """How many chunks can be read without a gap, from `keys[after]` on. Counts as a use of these and those before.

        What stands before is in the host tier: were it not kept here too, what is used most would be the first to go.
        """
        stop = after
        for key in keys[after:]:
            found = self.find(key)
            if found is None or found[1].fingerprint != fingerprint or not found[0].is_usable:
                break
            stop += 1
        for shelf in self.shelves:
            shelf.index.use(keys[:stop])
        return stop - after

    def is_wanted(self, shelf: DiskVolume, chunk: DiskChunk) -> bool:
        """Whether the chunk that was found there has not been dropped since."""
        return shelf.index.get(chunk.key) is chunk

    # --- What changes --------------------------------------------------------------------------------------------

    def stored(self, shelf: DiskVolume, chunk: DiskChunk) -> None:
        """A chunk that room was reserved for has been written."""
        shelf.index.admit(chunk)
        self._events.stored(NAME, chunk)

    def evicted(self, chunks: Collection[DiskChunk]) -> None:
        """Chunks have left an index, to make room for another."""
        self.evicted_count += len(chunks)
        self._lost(chunks)

    def drop(self, keys: Collection[ChunkKey]) -> list[DiskChunk]:
        """Forgets the chunks, also those that are about to be written; those that were there. `settle` sees it done."""
        self.writer.forget(keys)
        dropped: defaultdict[DiskVolume, list[DiskChunk]] = defaultdict(list)
        for key in keys:
            if found := self.find(key):
                dropped[found[0]].append(found[1])
        for shelf, chunks in dropped.items():
            self.discard(shelf, chunks)
        return list(chain.from_iterable(dropped.values()))

    def discard(self, shelf: DiskVolume, chunks: Sequence[DiskChunk]) -> None:
        """Forgets chunks of one folder, and removes their files."""
        for chunk in chunks:
            shelf.index.remove(chunk.key)
        self._lost(chunks)
        self.remove(shelf, chunks)

    def remove(self, shelf: DiskVolume, chunks: Sequence[DiskChunk]) -> None:
        """Removes the files of chunks that are in no index; soon done."""
        task = asyncio.create_task(shelf.remove(chunks))
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)

    async def settle(self) -> None:
        """Returns once the files of what was dropped are gone."""
        if self._removals:
            await asyncio.wait(self._removals)

    def _opened(self, shelf: DiskVolume) -> None:
        others = [other for other in self.shelves if other is not shelf]
        twice = [chunk for chunk in shelf.index if any(other.index.get(chunk.key) for other in others)]
        for chunk in twice:
            shelf.index.remove(chunk.key)
        self.remove(shelf, twice)
        for chunk in shelf.index:
            self._events.stored(NAME, chunk)
        for unwritten in self._tier:  # perhaps since there was nowhere to write it
            self.writer.add(unwritten)

    def _lost(self, chunks: Iterable[DiskChunk]) -> None:
        for chunk in chunks:
            self._events.removed(NAME, chunk)
        if not self.is_usable:
            self.writer.give_up()
