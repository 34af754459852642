"""What secondary tiers that keep chunks in backends share: lifetime, writing, reading, counters."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, Self

from lmkv.errors import LmkvError
from lmkv.keys import ChunkKey
from lmkv.pool.pool import Pool
from lmkv_server.node.cache.events import CacheEvents
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.tiers.backend import Backend, C
from lmkv_server.node.tiers.base import Presence, TierStats
from lmkv_server.node.tiers.progress import Progress
from lmkv_server.node.tiers.reader import TierReader
from lmkv_server.node.tiers.writer import TierWriter

if TYPE_CHECKING:  # it needs `cryptography`, which is optional
    from lmkv_server.node.tiers.encryption.chunks import ChunkEncryption

FLUSH_SECONDS = 3.0
"""Most time that a node which ends takes to write waiting chunks."""


class BackendTier(Generic[C]):
    """The base of `DiskTier` and `RemoteTier`. Use it as an async context manager, inside that of the pool."""

    def __init__(
        self,
        name: str,
        backends: Sequence[Backend[C]],
        *,
        tier: HostTier,
        pool: Pool,
        events: CacheEvents,
        write_threads: int,
        open_seconds: float,
        encryption: ChunkEncryption | None = None,
    ) -> None:
        """`open_seconds`: how long a node that starts waits for the backends to open.

        `encryption`: what the backends encrypt with, for the tier's counts.
        """
        self.name = name
        self.writer = TierWriter(backends, tier, pool, self.has)
        self.reader: TierReader[C] = TierReader(backends, tier, pool)
        self.tier = tier
        self._backends = backends
        self._write_threads = write_threads
        self._open_seconds = open_seconds
        self._encryption = encryption
        self._runners: list[asyncio.Task[None]] = []
        self._background: set[asyncio.Task[None]] = set()
        events.subscribe(self.writer)

    async def __aenter__(self) -> Self:
        for backend in self._backends:
            self._runners.append(asyncio.create_task(backend.health.keep_open()))
            self._runners += [asyncio.create_task(self.writer.run(backend)) for _ in range(self._write_threads)]
        opening = [asyncio.ensure_future(backend.health.attempted.wait()) for backend in self._backends]
        _, late = await asyncio.wait(opening, timeout=self._open_seconds)
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
        await self.settle()

    async def settle(self) -> None:
        """Returns once removals that were started have ended."""
        while self._background:
            await asyncio.wait(self._background)

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
        return any(backend.find(key) for backend in self._backends)

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

    def expected_seconds(self, _presence: Presence, size_bytes: int, /) -> float | None:
        """How long a read of `size_bytes` is expected to take; None if that is not known."""
        return self.reader.expected_seconds(size_bytes)

    def stats(self) -> TierStats:
        """What the tier has done since the start."""
        now = TierStats(
            undecryptable_chunks=self._encryption.rejected_count if self._encryption else 0,
            down_backends=sum(not (backend.usable and backend.health.usable) for backend in self._backends),
        )
        backends = (backend.health.stats() for backend in self._backends)
        return sum((self.reader.stats(), now, *backends), start=self.writer.stats())

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs work in the background; `settle` waits for it."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
