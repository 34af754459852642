"""The remote tier: chunks of the host tier that are also in a store which all nodes share (docs/remote.md).

The store alone knows what it has, and evicts for itself: it is asked. Nothing waits for it but who asks for a chunk
that is only there. Whatever happens to it, the node goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any

from lmkv.keys import ChunkKey
from lmkv.pool.pool import Pool
from lmkv.spec import KvSpec
from lmkv_server.node.cache.events import CacheEvents
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.tiers.reader import TierReader
from lmkv_server.node.tiers.remote.backend import RemoteStore
from lmkv_server.node.tiers.remote.chunk import HEADER_BYTES, ROOT, RemoteChunk, object_name, spec_root
from lmkv_server.node.tiers.remote.health import WRITE_THREADS, BackendHealth
from lmkv_server.node.tiers.remote.writer import RemoteWriter

KNOWN_SECONDS = 10.0
"""What the store said to have is believed for so long: from a lookup to its load."""
MAX_KNOWN = 65_536
FIRST_ASKED = 16
MOST_ASKED = 1024
"""Chunks of a prompt that are asked about at a time: few at first, for most prompts are not there at all."""
PROBES = 4
"""The same, where each costs a request of its own."""
OPEN_SECONDS = 2.0
"""A node that starts waits so long for the store."""
FLUSH_SECONDS = 3.0
"""A node that ends puts for so long what waits to be put."""


class RemoteTier:
    """Chunks in a shared store. To be used as an async context manager, inside that of the pool; one loop owns it."""

    def __init__(
        self,
        store: RemoteStore,
        *,
        tier: HostTier,
        pool: Pool,
        events: CacheEvents,
        lookup_seconds: float,
        **seconds: float,
    ) -> None:
        """`lookup_seconds` bounds a lookup's wait for the store; `seconds` are for the `BackendHealth`."""
        self.link = BackendHealth(store, on_open=self._opened, on_lost=lambda: self.writer.give_up(), **seconds)
        self.writer = RemoteWriter(self, tier, pool)
        self.reader: TierReader[RemoteChunk] = TierReader(self, tier, pool)
        self._tier = tier
        events.subscribe(self.writer)
        self._lookup_seconds = lookup_seconds
        self._known: OrderedDict[ChunkKey, tuple[RemoteChunk, float]] = OrderedDict()  # until when
        self._owed: set[str] = set()
        """Roots of names that are to be removed; until then nothing is read."""
        self._keepers: list[asyncio.Task[None]] = []
        self._removals: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> RemoteTier:
        self._keepers.append(asyncio.create_task(self.link.keep()))
        self._keepers += [asyncio.create_task(self.writer.run()) for _ in range(WRITE_THREADS)]
        with suppress(TimeoutError):
            async with asyncio.timeout(OPEN_SECONDS):
                await self.link.attempted.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Puts what waits, as far as that is done soon, and lets go of the store. Idempotent."""
        if self._keepers and self.link.takes_more:
            with suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_SECONDS):
                    await self.writer.flush()
        keepers, self._keepers = self._keepers, []
        for keeper in keepers:
            keeper.cancel()
        if keepers:
            await asyncio.wait(keepers)
        await self.link.aclose()
        await self.reader.aclose()
        if self._removals:
            await asyncio.wait(self._removals)

    # --- What is there -------------------------------------------------------------------------------------------

    @property
    def is_usable(self) -> bool:
        """Whether it makes sense to ask."""
        return self.link.is_usable and not self._owed

    async def count(self, spec: KvSpec, keys: Sequence[ChunkKey], after: int = 0) -> int:
        """How many chunks the store has without a gap, from `keys[after]` on, as far as it answers in time."""
        deadline = time.monotonic() + self._lookup_seconds
        if not self.is_usable:
            return 0
        stop = after
        while stop < len(keys) and self.knows(keys[stop]):
            stop += 1
        search = self._search if self.link.asks_singly else self._ask_all
        return await search(spec, keys, stop, deadline) - after

    async def _ask_all(self, spec: KvSpec, keys: Sequence[ChunkKey], stop: int, deadline: float) -> int:
        """The end of the run that begins before `keys[stop]`: asks about one chunk after the other, many at a time."""
        asked_at_once = FIRST_ASKED
        while stop < len(keys):
            asked = keys[stop : stop + asked_at_once]
            there = self._note(spec, asked, await self._sizes(spec, asked, deadline))
            stop += there
            if there < len(asked):
                break
            asked_at_once = min(4 * asked_at_once, MOST_ASKED)
        return stop

    async def _search(self, spec: KvSpec, keys: Sequence[ChunkKey], stop: int, deadline: float) -> int:
        """The same with few questions: the first and the last, then some between what is there and what is not.

        Of the others it is supposed that where a chunk is, those before it are, and whole. A load notices if not.
        """
        low, high, probes = stop, len(keys), {stop, len(keys) - 1}
        while low < high:
            asked = sorted(probes)
            sizes = await self._sizes(spec, [keys[index] for index in asked], deadline)
            for index, size in zip(asked, sizes, strict=False):
                if not self._note(spec, [keys[index]], [size]):
                    high = index
                    break
                low = index + 1
            if len(sizes) < len(asked):
                break
            probes = {low + (high - low) * part // (PROBES + 1) for part in range(1, PROBES + 1)}
        for key in keys[stop:low]:
            if not self.knows(key):
                self._note(spec, [key], [HEADER_BYTES + spec.chunk_bytes])
        return low

    async def _sizes(self, spec: KvSpec, keys: Sequence[ChunkKey], deadline: float) -> Sequence[int]:
        """Lengths of objects; nothing if they are not known in time."""
        left = deadline - time.monotonic()
        if left <= 0 or not self.is_usable:
            return ()
        return await self.link.sizes([object_name(spec.fingerprint, key) for key in keys], left)

    def _note(self, spec: KvSpec, keys: Sequence[ChunkKey], sizes: Sequence[int]) -> int:
        """Believes the store for a while; how many of the chunks it has before the first that it has not."""
        until = time.monotonic() + KNOWN_SECONDS
        for index, (key, size) in enumerate(zip(keys, sizes, strict=False)):
            if not 0 < (size_bytes := size - HEADER_BYTES) <= spec.chunk_bytes:
                return index
            chunk = RemoteChunk(key=key, spec=spec, size_bytes=size_bytes)
            if (known := self._known.pop(key, None)) and known[0] == chunk:
                chunk = known[0]  # which somebody may be reading
            self._known[key] = (chunk, until)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return min(len(keys), len(sizes))

    def knows(self, key: ChunkKey) -> bool:
        """Whether the store said a short while ago that it has the chunk."""
        found = self._known.get(key)
        return found is not None and time.monotonic() < found[1]

    def find(self, key: ChunkKey) -> tuple[BackendHealth, RemoteChunk] | None:
        """The chunk, if the store said a short while ago that it has it."""
        return (self.link, self._known[key][0]) if self.is_usable and self.knows(key) else None

    def is_wanted(self, _place: BackendHealth, chunk: RemoteChunk) -> bool:
        """Whether nobody has dropped the chunk since it was found."""
        found = self._known.get(chunk.key)
        return self.link.is_open and found is not None and found[0] is chunk

    # --- What changes --------------------------------------------------------------------------------------------

    def discard(self, _place: BackendHealth, chunks: Iterable[RemoteChunk]) -> None:
        """Forgets chunks that turned out not to be what they should, and removes them."""
        names = []
        for chunk in chunks:
            self._known.pop(chunk.key, None)
            names.append(chunk.name)
        self.remove(names)

    def remove(self, names: Sequence[str]) -> None:
        """Removes objects; soon done. A store that fails keeps them, and they are looked at when they are next read."""

        async def remove() -> None:
            with suppress(OSError):
                await self.link.remove(names)

        self._start(remove())

    async def drop(self, fingerprints: Iterable[bytes], keys: Sequence[ChunkKey], *, dry_run: bool = False) -> int:
        """Removes chunks of some specs; how many there were. Raises `OSError` if the store fails."""
        names = [object_name(fingerprint, key) for fingerprint in fingerprints for key in keys]
        if not dry_run:
            named = set(keys)
            self.writer.forget(lambda chunk: chunk.key in named)
            for key in keys:
                self._known.pop(key, None)
        return await self.link.remove(names, dry_run=dry_run)

    async def clear(self, fingerprint: bytes = b"", *, dry_run: bool = False) -> int:
        """Removes all chunks of a spec, or of all; how many there were. Raises `OSError` if the store fails.

        Nothing is read until that is done: if the store fails, until it is back and has done it.
        """
        root = spec_root(fingerprint) if fingerprint else ROOT
        if dry_run:
            return await self.link.remove_all(root, dry_run=True)
        self.writer.forget(lambda chunk: fingerprint in (b"", chunk.fingerprint))
        self._known.clear()
        self._owed.add(root)
        count = await self.link.remove_all(root)
        self._owed.discard(root)
        return count

    def forget(self, fingerprint: bytes) -> None:
        """As `clear`, but nobody waits for it."""

        async def forget() -> None:
            with suppress(OSError):
                await self.clear(fingerprint)

        self._start(forget())

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)

    def _opened(self) -> None:
        self._known.clear()
        self._start(self._pay())
        for unwritten in self._tier:  # perhaps since there was nowhere to put it
            self.writer.add(unwritten)

    async def _pay(self) -> None:
        """Removes what was to be removed while the store was away."""
        with suppress(OSError):
            for root in list(self._owed):
                await self.link.remove_all(root)
                self._owed.discard(root)
