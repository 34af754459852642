"""The remote tier: chunks of the host tier in a store that nodes share (docs/guides/remote-store.md).

Only the store knows what it holds, and it evicts by itself: each lookup asks it. Only a load of chunks that are nowhere
else waits for it. A store that fails costs its chunks, not the node.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Self

from lmkv.errors import Unreachable
from lmkv.keys import ChunkKey
from lmkv.prompt import Items
from lmkv.spec import ALL, KvSpec
from lmkv_server.node.cache.build import HostCache
from lmkv_server.node.tiers.backend import BackendTimes
from lmkv_server.node.tiers.backend_tier import BackendTier
from lmkv_server.node.tiers.base import Dropped, Needs, Presence, Selection, TierStats, TierUsage
from lmkv_server.node.tiers.codec import ChunkCodec
from lmkv_server.node.tiers.remote.backend import (
    WRITE_THREADS,
    EncodedObjects,
    StoreBackend,
    unencoded_objects,
)
from lmkv_server.node.tiers.remote.store import RemoteChunk, RemoteStore, object_name, spec_root

if TYPE_CHECKING:
    from lmkv_server.node.tiers.encryption import ChunkEncryption

NAME = "remote"
FIRST_ASKED = 16
MOST_ASKED = 1024
"""Chunks that one request asks for: few at first, because most prompts are not in the store at all."""
PROBES = 4
"""Chunks that one request asks for where each chunk takes a request of its own."""
_NO_SIZES: Mapping[ChunkKey, int] = {}
STORE_TIMES = BackendTimes()


class RemoteTier(BackendTier[RemoteChunk]):
    """Chunks in a shared store. One event loop owns it."""

    is_local = False
    write_threads = WRITE_THREADS
    open_seconds = 2.0

    def __init__(
        self,
        store: RemoteStore,
        cache: HostCache,
        name: str = NAME,
        *,
        lookup_seconds: float,
        encryption: ChunkEncryption | None = None,
        codec: ChunkCodec | None = None,
        times: BackendTimes = STORE_TIMES,
        quota_bytes: int = 0,
    ) -> None:
        """`lookup_seconds` bounds a lookup's wait for the store, unless its answer is worth more. `quota_bytes` are the
        most bytes of one owner among the chunks that this node has written since its start; 0: no limit.

        With `encryption` objects are encrypted, with a `codec` encoded before, and others are not looked up.
        """
        objects = unencoded_objects(encryption, store.pads_headers)
        if codec:
            objects = EncodedObjects(codec, encryption, store.pads_headers)
        self.name = name
        self.backend = StoreBackend(self, store, objects, times, encryption)
        super().__init__(name, [self.backend], cache, encryption, quota_bytes, codec)
        self._lookup_seconds = lookup_seconds

    async def __aenter__(self) -> Self:
        """Opens the store. Raises `ConfigError` if it cannot be used as it is configured."""
        await super().__aenter__()
        if refusal := self.backend.refusal:
            await self.aclose()
            raise refusal
        return self

    def stats(self) -> TierStats:
        """Returns the tier's counters; chunks that a store evicts by itself are not counted."""
        return super().stats() + TierStats(evicted_chunks=self.backend.evicted_count)

    async def lookup(self, needs: Needs) -> Presence:
        """Finds the chunks that the store holds, by the answers that arrive in time.

        Where a store takes a request for each chunk, a chunk is assumed to be there if the first and a later one are;
        a read notices if it is not.
        """
        found = await self._lookup(needs) if self.usable and needs.indices else ()
        return Presence(asked=needs.indices, indices=found, moved_share=self.reader.moved_share(needs.spec))

    async def _lookup(self, needs: Needs) -> Sequence[int]:
        """The indices of the chunks that the store holds."""
        deadline = time.monotonic() + needs.seconds(self._lookup_seconds)
        if needs.items and not needs.in_order:
            return await self._lookup_items(needs, needs.items, deadline)
        keys = [needs.keys[index] for index in needs.indices]
        if not needs.in_order:
            absent = [key for index in needs.indices for key in needs.parts_of(index) if not self.has(key)]
            await self._ask_all(needs.spec, absent, 0, deadline, _NO_SIZES, stop_early=False)
            return [index for index in needs.indices if all(map(self.has, needs.parts_of(index)))]
        return needs.indices[: await self._find_run(needs.spec, keys, deadline)]

    async def _lookup_items(self, needs: Needs, items: Items, deadline: float) -> Sequence[int]:
        """Asks for parts of which a hit needs every chunk; then for the others, the last chunks first.

        Not for those behind the first absent chunk: no hit here goes further.
        """
        end = len(items.prompt)
        rest: list[int] = []
        exact = {needs.keys[index]: items.sizes[index] for index in needs.indices}
        for number, part in enumerate(needs.spec.parts):
            indices = [index for index in needs.indices if items.parts[index] == number]
            if part.rule != ALL:
                rest += indices
                continue
            keys = [needs.keys[index] for index in indices]
            count = await self._find_run(needs.spec, keys, deadline, exact)
            if count < len(keys):
                end = min(end, int(items.chunks[indices[count]]))
        rest = sorted((index for index in rest if items.chunks[index] < end), key=lambda index: -items.chunks[index])
        keys = [needs.keys[index] for index in rest if not self.has(needs.keys[index])]
        await self._ask_all(needs.spec, keys, 0, deadline, exact, stop_early=False)
        return [index for index in needs.indices if items.chunks[index] < end and self.has(needs.keys[index])]

    async def _find_run(
        self, spec: KvSpec, keys: Sequence[ChunkKey], deadline: float, exact: Mapping[ChunkKey, int] = _NO_SIZES
    ) -> int:
        """Counts the chunks that the store holds, from the first on without a gap; `exact` has known sizes."""
        stop = 0
        while stop < len(keys) and self.has(keys[stop]):
            stop += 1
        search = self._search if self.backend.one_per_request else self._ask_all
        return await search(spec, keys, stop, deadline, exact)

    async def _ask_all(
        self,
        spec: KvSpec,
        keys: Sequence[ChunkKey],
        stop: int,
        deadline: float,
        exact: Mapping[ChunkKey, int],
        *,
        stop_early: bool = True,
    ) -> int:
        """The end of the run that begins before `keys[stop]`: asks for one chunk after the other, many at a time."""
        asked_at_once = FIRST_ASKED
        while stop < len(keys):
            asked = keys[stop : stop + asked_at_once]
            sizes = await self._sizes(spec, asked, deadline, exact)
            if stop_early:
                count = self.backend.note(spec, asked, sizes)
            else:
                for key, size in zip(asked, sizes, strict=False):
                    self.backend.note(spec, [key], [size])
                count = len(sizes)
            stop += count
            if count < len(asked):
                break
            asked_at_once = min(4 * asked_at_once, MOST_ASKED)
        return stop

    async def _search(
        self, spec: KvSpec, keys: Sequence[ChunkKey], stop: int, deadline: float, exact: Mapping[ChunkKey, int]
    ) -> int:
        """Finds the end of the run by few requests: first and last chunk, then some between present and absent."""
        low, high, probes = stop, len(keys), {stop, len(keys) - 1}
        while low < high:
            asked = sorted(probes)
            sizes = await self._sizes(spec, [keys[index] for index in asked], deadline, exact)
            for index, size in zip(asked, sizes, strict=False):
                if not self.backend.note(spec, [keys[index]], [size]):
                    high = index
                    break
                low = index + 1
            if len(sizes) < len(asked):
                break
            probes = {low + (high - low) * part // (PROBES + 1) for part in range(1, PROBES + 1)}
        for key in keys[stop:low]:
            if not self.has(key):
                self.backend.note(spec, [key], [exact.get(key, spec.chunk_bytes)])
        return low

    async def _sizes(
        self, spec: KvSpec, keys: Sequence[ChunkKey], deadline: float, exact: Mapping[ChunkKey, int]
    ) -> Sequence[int]:
        """Sizes of chunks, 0 of those that are not of their exact size; empty if they are not known in time."""
        left = deadline - time.monotonic()
        if left <= 0 or not self.usable or not self.backend.health.answers_within(left):
            return ()
        objects = self.backend.objects
        names = [object_name(spec.fingerprint, key, objects.root) for key in keys]
        sizes = [
            objects.chunk_bytes(size, exact.get(key, spec.chunk_bytes))
            for key, size in zip(keys, await self.backend.sizes(names, left), strict=False)
        ]
        if not exact:
            return sizes
        return [size if size == exact[key] else 0 for key, size in zip(keys, sizes, strict=False)]

    async def drop(self, selection: Selection) -> Dropped:
        """Removes chunks for all nodes that share the store, pinned or not; `keys` need a `fingerprint` or `specs`.

        `counted` is not regarded. Tokens are not known. Raises `Unreachable` if the store fails.
        """
        if not selection.dry_run:
            named = set(selection.keys)
            self.writer.forget(
                lambda chunk: selection.has_spec(chunk.fingerprint) and (not named or chunk.key in named)
            )
        try:
            return Dropped(chunk_count=await self._drop(selection))
        except OSError as error:
            raise Unreachable(f"{self.backend.health.name} did not remove them: {error}") from None

    async def _drop(self, selection: Selection) -> int:
        root = self.backend.objects.root
        if selection.keys:
            specs = [selection.fingerprint] if selection.fingerprint else selection.specs
            names = [object_name(spec, key, root) for spec in specs for key in selection.keys]
            if not selection.dry_run:
                self.backend.forget(selection.keys)
            return await self.backend.remove(names, dry_run=selection.dry_run)
        prefix = spec_root(selection.fingerprint, root) if selection.fingerprint else root
        return await self.backend.remove_all(prefix, dry_run=selection.dry_run)

    def usage(self) -> TierUsage | None:
        """Returns what this node has written if that counts towards quotas; else None: only the store knows."""
        if self.quotas is None:
            return None
        return TierUsage(capacity_bytes=0, used_bytes=self.quotas.total_bytes, chunk_count=self.backend.written_count)
