"""Records where chunks are in a pool that outlives its node, in memory that does, too. Pure; used by `WarmStart`.

    slot 0 │ slot 1 │ slot 2 │ …        each empty, or a record: what is known of one chunk, and a seal
    put ──► the first empty slot        drop ──► the slot is empty again

A node may be killed between any two bytes that it writes. A record is valid if its seal, a checksum, matches; a record
that was written or emptied in part is not. Nothing has to be replayed, and the ledger does not grow.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple
from zlib import crc32

from lmkv.keys import ChunkKey
from lmkv.misses import MissReason
from lmkv.tiers import HOST
from lmkv_server.node.cache.events import CachedChunk
from lmkv_server.node.cache.host import Chunk

STAMP = b"lmkv pool, ledger 1"
"""What the file of a pool begins its table with; another number where slots mean something else."""
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
