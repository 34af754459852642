"""Brings back what the pool held when an earlier life of the node ended, however it did. Used by `Node`.

    in the ledger ──► reserved where it is ──► summed ──► committed: found like any other chunk
                                                 └── damaged, or stored again meanwhile: dropped

The node serves all along; nothing waits for this. The ledger records where chunks are, in memory that outlives the node
as the pool does:

    slot 0 │ slot 1 │ slot 2 │ …        each empty, or a record: what is known of one chunk, and a seal
    put ──► the first empty slot        drop ──► the slot is empty again

A node may be killed between any two bytes that it writes. A record is valid if its seal, a checksum, matches; a record
that was written or emptied in part is not. Nothing has to be replayed, and the ledger does not grow.
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import NamedTuple, Self
from zlib import crc32

from lmkv.keys import ChunkKey
from lmkv.misses import MissReason
from lmkv.pool.file import PoolFile
from lmkv.runtime.deadline_timer import DeadlineTimer
from lmkv.tiers import HOST
from lmkv.units import format_bytes
from lmkv_kernels import checksum
from lmkv_server.node.cache.events import CachedChunk
from lmkv_server.node.cache.host import Chunk, HostTier, batched

logger = logging.getLogger(__name__)

STAMP = b"lmkv pool, ledger 1"
"""The first bytes of the table in a pool's file; the number changes whenever slots mean something else."""
POOL_BYTES_PER_SLOT = 128 << 10
"""Bytes of the pool for each slot. Chunks are larger, except those of very small models."""
MIN_SLOTS = 4096

_FIELDS = struct.Struct("<QQQQI?16s16s16s")  # serial, offset, size, checksum, tokens, has a parent, its key, key, spec
_SEAL = struct.Struct("<I")
SLOT_BYTES = _FIELDS.size + _SEAL.size
_EMPTY = bytes(SLOT_BYTES)
_MAX_SERIAL = (1 << 64) - 1
"""No node gets this far, but a damaged table can. No serial follows it: chunks then have no record."""
_READ_SLOTS = 1024


def ledger_bytes(pool_bytes: int) -> int:
    """Memory for the ledger of a pool."""
    return max(MIN_SLOTS, pool_bytes // POOL_BYTES_PER_SLOT) * SLOT_BYTES


class LedgerRecord(NamedTuple):  # a fraction of what a frozen dataclass takes to make, and a start makes one per chunk
    """The record of one chunk."""

    serial: int
    """Rises with every record: chunks in the order in which they came."""
    offset: int
    size_bytes: int
    checksum: int
    token_count: int
    parent: ChunkKey | None
    """The chunk before it in its prompts, if that is known."""
    key: ChunkKey
    fingerprint: bytes


class Ledger:
    """The slots in `table`. Not thread-safe: one event loop owns it."""

    def __init__(self, table: memoryview) -> None:
        """Reads what is there; see `records`."""
        self._table = table
        self._count = len(table) // SLOT_BYTES
        self._slots: dict[int, int] = {}  # by offset in the pool
        self._empty: list[int] = []  # those before `_untouched`
        self._untouched = 0
        self._serial = 0
        self._unrecorded_count = 0
        self.records = sorted(self._read(), key=lambda record: record.serial)
        """The records at the start, oldest first."""

    @property
    def recorded_count(self) -> int:
        """Chunks that have a record."""
        return len(self._slots)

    @property
    def unrecorded_count(self) -> int:
        """Chunks without a slot: the next process does not find them."""
        return self._unrecorded_count

    def stored(self, tier: str, chunk: CachedChunk) -> None:
        """Records a chunk of the pool."""
        if tier == HOST and isinstance(chunk, Chunk):
            self.put(chunk)

    def removed(self, tier: str, chunk: CachedChunk, _reason: MissReason) -> None:
        """Removes the record of a chunk of the pool."""
        if tier == HOST and isinstance(chunk, Chunk):
            self.drop(chunk.offset)

    def put(self, chunk: Chunk) -> None:
        """Records a complete chunk. Does nothing if it has a record."""
        if chunk.offset in self._slots:
            return
        if self._serial == _MAX_SERIAL:
            self._unrecorded_count += 1
            return
        if self._empty:
            slot = self._empty.pop()
        elif self._untouched < self._count:
            slot, self._untouched = self._untouched, self._untouched + 1
        else:
            self._unrecorded_count += 1
            return
        self._serial += 1
        self._slots[chunk.offset] = slot
        self._write(slot, _pack(self._serial, chunk))

    def drop(self, offset: int) -> None:
        """Removes the record at this offset; call it before the bytes may change."""
        slot = self._slots.pop(offset, None)
        if slot is not None:
            self._write(slot, _EMPTY)
            self._empty.append(slot)

    def _write(self, slot: int, content: bytes) -> None:
        self._table[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES] = content

    def _read(self) -> Iterator[LedgerRecord]:
        """Every record, and notes which slots are empty. A slot whose seal is wrong is, too, and so is a second one."""
        for first in range(0, self._count, _READ_SLOTS):
            last = min(first + _READ_SLOTS, self._count)
            content = bytes(self._table[first * SLOT_BYTES : last * SLOT_BYTES])
            if content == bytes(len(content)):
                continue
            self._empty += range(self._untouched, first)
            self._untouched = last
            for slot in range(first, last):
                record = _unpack(content[(slot - first) * SLOT_BYTES : (slot - first + 1) * SLOT_BYTES])
                if record is None or record.offset in self._slots:
                    if record is not None:  # else the next start finds it once the first one is dropped
                        self._write(slot, _EMPTY)
                    self._empty.append(slot)
                    continue
                self._slots[record.offset] = slot
                self._serial = max(self._serial, record.serial)
                yield record
        self._empty.reverse()  # the first ones are used first


def _pack(serial: int, chunk: Chunk) -> bytes:
    parent = chunk.parent
    fields = _FIELDS.pack(
        serial,
        chunk.offset,
        chunk.size_bytes,
        chunk.checksum,
        chunk.token_count,
        parent is not None,
        parent or b"",
        chunk.key,
        chunk.fingerprint,
    )
    return fields + _SEAL.pack(crc32(fields))


def _unpack(slot: bytes) -> LedgerRecord | None:
    fields, seal = slot[: _FIELDS.size], slot[_FIELDS.size :]
    if slot == _EMPTY or _SEAL.pack(crc32(fields)) != seal:
        return None
    serial, offset, size_bytes, checksum, token_count, has_parent, parent, key, fingerprint = _FIELDS.unpack(fields)
    above = ChunkKey(parent) if has_parent else None
    return LedgerRecord(serial, offset, size_bytes, checksum, token_count, above, ChunkKey(key), fingerprint)


MAX_THREADS = 4
"""Threads that sum; more hardly gain anything, and engines need them."""
BATCH_BYTES = 64 << 20
"""Bytes that a thread sums before it reports to the loop: about 10 ms."""
BATCH_CHUNKS = 256
LOOK_SECONDS = 0.1
"""The interval at which it checks whether workers of an earlier life have let go of the pool."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmStats:
    """Counts the chunks that were found again so far."""

    found_chunks: int
    """Chunks that were there, and whole."""
    found_bytes: int
    damaged_chunks: int
    """Chunks whose bytes or place were not what the ledger says; they were dropped."""
    waiting_chunks: int
    """Chunks that are not verified yet."""
    unrecorded_chunks: int
    """Chunks of this process that do not fit into the ledger: the next process does not find them."""


class WarmStart:
    """Finds chunks again in a pool. To be used as an async context manager, on the loop that owns the tier.

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
        """Counts the chunks that were found again, and those that are still to be verified."""
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
        found = Chunk(
            key=record.key,
            fingerprint=record.fingerprint,
            offset=record.offset,
            size_bytes=record.size_bytes,
            checksum=record.checksum,
            token_count=record.token_count,
            parent=record.parent,
        )
        self._tier.commit(found)

    def _sum(self, batch: Sequence[LedgerRecord]) -> list[int]:
        """Checksums of the bytes that are there, on a thread; of none any more once this is to end."""
        buffer = self._file.pool.buffer
        return [
            -1 if self._stopping.is_set() else checksum(buffer, record.offset, record.size_bytes) for record in batch
        ]
