"""Brings back what the pool held when an earlier life of the node ended, however it did. Used by `Node`.

    in the ledger ──► reserved where it is ──► summed ──► committed: found like any other chunk
                                                 └── damaged, or stored again meanwhile: dropped

The node serves all along; nothing waits for this.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import Self

from lmkv.pool.file import PoolFile
from lmkv.runtime.deadline_timer import DeadlineTimer
from lmkv.units import format_bytes
from lmkv_kernels import checksum
from lmkv_server.node.cache.batches import batched
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.cache.ledger import Ledger, LedgerRecord

logger = logging.getLogger(__name__)

MAX_THREADS = 4
"""Threads that sum; more hardly gain anything, and engines need them."""
BATCH_BYTES = 64 << 20
"""Bytes that a thread sums before it reports to the loop: about 10 ms."""
BATCH_CHUNKS = 256
LOOK_SECONDS = 0.1
"""How often it looks whether workers of an earlier life have let go of the pool."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmStats:
    """What was found again so far."""

    found_chunks: int
    """Chunks that were there, and whole."""
    found_bytes: int
    """Bytes of these."""
    damaged_chunks: int
    """Chunks whose bytes or place were not what the ledger says; they were dropped."""
    waiting_chunks: int
    """Chunks that are not verified yet."""
    unrecorded_chunks: int
    """Chunks of this process that do not fit into the ledger: the next process does not find them."""


class WarmStart:
    """What is found again in a pool. To be used as an async context manager, on the loop that owns the tier.

    As long as a worker of an earlier life has the pool mapped, the tier is sealed: chunks that are found can be used,
    and nothing is overwritten, for that worker may still be reading or writing anything.
    """

    def __init__(self, file: PoolFile, ledger: Ledger, tier: HostTier) -> None:
        self._found_chunks = 0
        self._found_bytes = 0
        self._damaged_count = 0
        self._ledger = ledger
        self._file = file
        self._tier = tier
        self._waiting: dict[int, LedgerRecord] = {}  # by offset
        self._threads = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "lmkv-warm")
        self._stopping = Event()
        self._alarm = DeadlineTimer(self._look)
        self._verifying: asyncio.Task[None] | None = None

    def stats(self) -> WarmStats:
        """What was found again, and what is still to be verified."""
        return WarmStats(
            found_chunks=self._found_chunks,
            found_bytes=self._found_bytes,
            damaged_chunks=self._damaged_count,
            waiting_chunks=len(self._waiting),
            unrecorded_chunks=self._ledger.unrecorded_count,
        )

    async def __aenter__(self) -> Self:
        records = self._ledger.records
        for record in sorted(records, key=lambda record: record.offset):
            if self._tier.reserve_at(record.offset, record.size_bytes):
                self._waiting[record.offset] = record
            else:
                self._damaged_count += 1
                self._ledger.drop(record.offset)
        self._look()
        await self._alarm.__aenter__()
        self._verifying = asyncio.create_task(self._verify([one for one in records if one.offset in self._waiting]))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Ends; what was not verified yet can be found by the next life. Idempotent."""
        self._stopping.set()
        await self._alarm.aclose()
        if self._verifying:
            self._verifying.cancel()
            await asyncio.wait([self._verifying])
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    def _look(self) -> float | None:
        """Whether the tier has to be sealed; when to look again if so."""
        if self._file.has_earlier_users:
            if not self._tier.sealed:
                logger.info("workers of an earlier life have the pool mapped: nothing is stored until they let go")
            self._tier.sealed = True
            return time.monotonic() + LOOK_SECONDS
        if self._tier.sealed:
            logger.info("no process of the previous node maps the pool any more")
        self._tier.sealed = False
        return None

    async def _verify(self, records: Sequence[LedgerRecord]) -> None:
        if self._file.replaced_because:
            logger.info("the pool starts empty: %s", self._file.replaced_because)
            return
        began = time.monotonic()
        batches = batched(records, BATCH_BYTES, BATCH_CHUNKS)
        async with asyncio.TaskGroup() as group:
            for _ in range(MAX_THREADS):
                group.create_task(self._settle_all(batches))
        logger.info(
            "pool of the node's earlier life: %d chunks found again, %s, %d dropped as damaged, in %.1f s",
            self._found_chunks,
            format_bytes(self._found_bytes),
            self._damaged_count,
            time.monotonic() - began,
        )

    async def _settle_all(self, batches: Iterator[Sequence[LedgerRecord]]) -> None:
        loop = asyncio.get_running_loop()
        for batch in batches:
            sums = await loop.run_in_executor(self._threads, self._sum, batch)
            for record, found in zip(batch, sums, strict=True):
                self._settle(record, is_whole=found == record.checksum)

    def _settle(self, record: LedgerRecord, *, is_whole: bool) -> None:
        """Makes a chunk visible, or gives its extent back."""
        del self._waiting[record.offset]
        if not is_whole or self._tier.get(record.key):
            self._damaged_count += not is_whole
            self._ledger.drop(record.offset)
            self._tier.give_back(record.offset)
            return
        self._found_chunks += 1
        self._found_bytes += record.size_bytes
        self._tier.commit(
            record.offset,
            key=record.key,
            fingerprint=record.fingerprint,
            size_bytes=record.size_bytes,
            checksum=record.checksum,
            token_count=record.token_count,
            parent=record.parent,
        )

    def _sum(self, batch: Sequence[LedgerRecord]) -> list[int]:
        """Checksums of the bytes that are there, on a thread; of none any more once this is to end."""
        buffer = self._file.pool.buffer
        return [
            -1 if self._stopping.is_set() else checksum(buffer, record.offset, record.size_bytes) for record in batch
        ]
