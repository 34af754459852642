"""Secondary tiers that keep chunks in backends share their lifetime, counters, reading and writing.

Chunks of the host tier are written in the background.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self

from lmkv.errors import LmkvError
from lmkv.keys import ChunkKey
from lmkv.misses import MissReason
from lmkv.tiers import HOST
from lmkv_server.node.cache.allocator import align
from lmkv_server.node.cache.build import HostCache
from lmkv_server.node.cache.events import CachedChunk
from lmkv_server.node.cache.host import Chunk
from lmkv_server.node.cache.quotas import OwnedChunk, OwnerQuotas
from lmkv_server.node.tiers.backend import Backend, C, WriteResult
from lmkv_server.node.tiers.base import Presence, Progress, TierStats
from lmkv_server.node.tiers.codec import ChunkCodec
from lmkv_server.node.tiers.reader import TierReader

if TYPE_CHECKING:  # it needs `cryptography`, which is optional
    from lmkv_server.node.tiers.encryption import ChunkEncryption


class TierWriter:
    """The chunks to write. One event loop owns it; `run` it once for each thread of each backend."""

    def __init__(self, backends: Sequence[Backend[Any]], cache: HostCache) -> None:
        self._backends = backends
        self._tier = cache.tier
        self._pool = cache.pool
        self._waiting: dict[ChunkKey, Chunk] = {}  # oldest first
        self._writing: dict[Chunk, bool] = {}  # and whether it is still wanted; as many as there are threads at most
        self._flushed = asyncio.Event()
        self._flushed.set()
        self._written_chunks = 0
        self._written_bytes = 0
        self._present_count = 0
        self._skipped_count = 0

    def stats(self) -> TierStats:
        """Counts the chunks that were written, and those that wait."""
        return TierStats(
            written_chunks=self._written_chunks,
            written_bytes=self._written_bytes,
            present_chunks=self._present_count,
            skipped_chunks=self._skipped_count,
            waiting_chunks=len(self._waiting) + len(self._writing),
        )

    def stored(self, tier: str, chunk: CachedChunk) -> None:
        """Queues chunks that the host tier stores."""
        if tier == HOST and isinstance(chunk, Chunk):
            self.add(chunk)

    def removed(self, tier: str, chunk: CachedChunk, _reason: MissReason) -> None:
        """Skips chunks that leave the host tier before they are written."""
        if tier == HOST and self._waiting.pop(chunk.key, None) is not None:
            self._skipped_count += 1

    def has(self, key: ChunkKey) -> bool:
        """Whether a backend is known to hold the chunk."""
        return any(backend.find(key) for backend in self._backends)

    @property
    def writing(self) -> Collection[Chunk]:
        """The chunks that are being written."""
        return self._writing.keys()

    def add(self, chunk: Chunk) -> None:
        """Queues a chunk of the host tier, unless the secondary tier holds it or no backend is open."""
        if any(backend.health.is_open for backend in self._backends) and not self.has(chunk.key):
            self._waiting[chunk.key] = chunk
            self._flushed.clear()
            self._wake()

    def forget(self, is_selected: Callable[[Chunk], bool]) -> None:
        """Removes chunks from the queue; those that are being written are removed from the backend afterwards."""
        for chunk in [chunk for chunk in self._waiting.values() if is_selected(chunk)]:
            del self._waiting[chunk.key]
        self._writing.update({chunk: False for chunk in self._writing if is_selected(chunk)})

    async def flush(self) -> None:
        """Returns once no chunk waits. While no backend is writable that may be never."""
        await self._flushed.wait()

    async def run(self, backend: Backend[Any]) -> None:
        """Writes to one backend, one chunk at a time, until cancelled."""
        while True:
            if chunk := self._next(backend):
                await self._write(backend, chunk)
                self._wake()  # another backend may wait to see whether this one has room
            else:
                if not (self._waiting or self._writing):
                    self._flushed.set()
                backend.health.work.clear()
                await backend.health.work.wait()

    def clear(self) -> None:
        """Empties the queue, because no backend is open. A backend that is opened adds the chunks again."""
        self._waiting.clear()

    def _next(self, backend: Backend[Any]) -> Chunk | None:
        """Takes the oldest waiting chunk, unless another backend has room for it and this one has not."""
        chunk = next(iter(self._waiting.values()), None)
        if chunk is None or not backend.writable:
            return None
        size_bytes = align(chunk.size_bytes)
        if not backend.has_room(size_bytes) and any(other.has_room(size_bytes) for other in self._backends):
            return None
        return self._waiting.pop(chunk.key)

    async def _write(self, backend: Backend[Any], chunk: Chunk) -> None:
        if self.has(chunk.key):
            return
        self._tier.hold([chunk])  # for good if this is cancelled: the thread continues to read
        self._writing[chunk] = True
        memory = self._pool.buffer[chunk.offset : chunk.offset + align(chunk.size_bytes)]
        result = await backend.write(chunk, memory, lambda: self._writing[chunk])
        del self._writing[chunk]
        self._tier.unhold([chunk])
        if result is WriteResult.WRITTEN:
            self._written_chunks += 1
            self._written_bytes += chunk.size_bytes
        self._present_count += result is WriteResult.PRESENT
        self._skipped_count += result is WriteResult.SKIPPED

    def _wake(self) -> None:
        for backend in self._backends:
            backend.health.work.set()


FLUSH_SECONDS = 3.0
"""Most time that a node which ends takes to write waiting chunks."""


class KeptChunk(CachedChunk, OwnedChunk, Protocol):
    """A chunk of a backend that knows what it holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _KeptChunks:
    """The `EvictableChunks` of a tier."""

    backends: Sequence[Backend[Any]]
    writer: TierWriter

    def __contains__(self, key: ChunkKey) -> bool:
        """Also a chunk that is about to be kept, behind one that is kept: a backend writes several at a time."""
        writing = {chunk.key: chunk for chunk in self.writer.writing}
        for _ in range(len(writing) + 1):
            if any(backend.keeps(key) for backend in self.backends):
                return True
            chunk = writing.get(key)
            if chunk is None or chunk.parent in (None, chunk.owner):
                return chunk is not None
            assert chunk.parent is not None
            key = chunk.parent
        return False

    def is_free(self, key: ChunkKey) -> bool:
        """Also not free: a chunk that one which is about to be kept continues, unless it is itself just being added."""
        writing = self.writer.writing
        continued = any(chunk.parent == key for chunk in writing) and all(chunk.key != key for chunk in writing)
        return not continued and any(backend.is_free(key) for backend in self.backends)


class BackendTier(Generic[C]):
    """The base of `DiskTier` and `RemoteTier`. Use it as an async context manager, inside that of the pool."""

    write_threads: int
    """Chunks that are written to each backend at a time."""
    open_seconds: float
    """The time that a node that starts waits for the backends to open; they are used whenever they are open."""

    def __init__(
        self,
        name: str,
        backends: Sequence[Backend[C]],
        cache: HostCache,
        encryption: ChunkEncryption | None,
        quota_bytes: int = 0,
        codec: ChunkCodec | None = None,
    ) -> None:
        """`encryption` and `codec` are those of the backends; `quota_bytes` are the most bytes of the chunks of one
        owner, 0: no limit."""
        self.name = name
        self.quotas = OwnerQuotas(quota_bytes) if quota_bytes else None
        """Bytes by owner, if they are limited."""
        self.writer = TierWriter(backends, cache)
        self._kept = _KeptChunks(backends=backends, writer=self.writer)
        self.reader: TierReader[C] = TierReader(backends, cache, codec)
        self.tier = cache.tier
        self._events = cache.events
        self._backends = backends
        self._encryption = encryption
        self._evicted_count = 0
        self._runners: list[asyncio.Task[None]] = []
        cache.events.subscribe(self.writer)

    async def __aenter__(self) -> Self:
        for backend in self._backends:
            self._runners.append(asyncio.create_task(backend.health.keep_open()))
            self._runners += [asyncio.create_task(self.writer.run(backend)) for _ in range(self.write_threads)]
        opening = [asyncio.ensure_future(backend.health.attempted.wait()) for backend in self._backends]
        _, late = await asyncio.wait(opening, timeout=self.open_seconds)
        for wait in late:
            wait.cancel()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Writes waiting chunks for a bounded time, and closes the backends. Idempotent."""
        if self._runners and any(backend.writable for backend in self._backends):
            with suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_SECONDS):
                    await self.writer.flush()
        runners, self._runners = self._runners, []
        for runner in runners:
            runner.cancel()
        if runners:
            await asyncio.wait(runners)
        await asyncio.gather(*(backend.aclose() for backend in self._backends))
        await self.reader.aclose()

    async def settle(self) -> None:
        """Returns once removals that were started have ended. Raises `Unreachable` if they are known to hang."""
        await asyncio.gather(*(backend.settle() for backend in self._backends))

    # --- Called by backends --------------------------------------------------------------------------------------

    def opened(self, _backend: Backend[C]) -> None:
        """A backend is open: queues the chunks of the host tier, which may have been stored while none was."""
        for unwritten in self.tier:
            self.writer.add(unwritten)

    def lost(self) -> None:
        """A backend has failed."""
        if not any(backend.health.is_open for backend in self._backends):
            self.writer.clear()

    def stored(self, chunk: KeptChunk) -> None:
        """Reports that a backend holds a chunk, if it is one that knows what it holds, and keeps its owner's quota."""
        self._events.stored(self.name, chunk)
        self.charge(chunk)

    def removed(self, chunks: Sequence[KeptChunk], reason: MissReason) -> None:
        """Reports that a backend no longer holds chunks."""
        self._evicted_count += len(chunks) * (reason is MissReason.EVICTED_FROM_TIER)
        for chunk in chunks:
            self.refund(chunk)
            self._events.removed(self.name, chunk, reason)

    def charge(self, chunk: OwnedChunk) -> None:
        """Counts a chunk of a backend towards its owner's quota, and evicts the owner's own chunks beyond that."""
        if self.quotas is None:
            return
        self.quotas.add(chunk)
        for key in self.quotas.surplus(chunk, self._kept):
            self.quotas.count_evicted()
            for backend in self._backends:
                backend.evict(key)

    def count_evicted(self) -> None:
        """Counts a chunk that left a backend which does not report what it holds."""
        self._evicted_count += 1

    def refund(self, chunk: OwnedChunk) -> None:
        """Ends the charge of a chunk that the backend does not hold any more, if there is one."""
        if self.quotas is not None:
            self.quotas.remove(chunk)

    # --- As a secondary tier -------------------------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """Whether a backend can be used."""
        return any(backend.usable for backend in self._backends)

    @property
    def is_down(self) -> bool:
        """Whether no backend can be used, or none answers now."""
        return not any(backend.usable and backend.health.usable for backend in self._backends)

    def has(self, key: ChunkKey) -> bool:
        """Whether a backend is known to hold the chunk."""
        return self.writer.has(key)

    async def read(self, progress: Progress, _presence: Presence, timeout_seconds: float, /) -> LmkvError | None:
        """Reads all missing chunks that a backend is known to hold. A chunk that fails is a miss, not an error."""
        progress.find_own()
        missing = sorted(progress.missing)
        await self.reader.read(
            progress.spec.fingerprint,
            [progress.keys[index] for index in missing],
            timeout_seconds,
            lambda at, chunk: progress.add([(missing[at], chunk)]),
        )
        return None

    def expected_seconds(self, presence: Presence, size_bytes: int, /) -> float | None:
        """Estimates the seconds that a read of `size_bytes` takes; None if that is not known."""
        share = presence.moved_share
        return None if share is None else self.reader.expected_seconds(share * size_bytes)

    def stats(self) -> TierStats:
        """Returns the tier's counters since the start."""
        now = TierStats(
            evicted_chunks=self._evicted_count,
            undecryptable_chunks=self._encryption.rejected_count if self._encryption else 0,
            down_backends=sum(not (backend.usable and backend.health.usable) for backend in self._backends),
        )
        backends = (backend.health.stats() for backend in self._backends)
        return sum((self.reader.stats(), now, *backends), start=self.writer.stats())
