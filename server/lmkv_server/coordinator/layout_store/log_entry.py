"""One entry of a shard's log: what a coordinator publishes about an instance. Pure."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple
from zlib import crc32

import msgspec

from lmkv.keys import KEY_BYTES, PREFIX_DIGEST_BYTES, Digest
from lmkv_server.coordinator.core.layout_map import MAX_TOKENS, TIER_COUNT, Change

SHARD_COUNT = 4
"""Shards of the map. A cluster keeps the keys of a shard on one server, so that a script can change them together.

Fewer shards put more changes into a call; a coordinator is saturated long before one server per shard is.
"""
MAX_ENTRY_BYTES = 65_536
"""Larger entries are replaced by `RELOAD`, which keeps the log small."""
READ_ENTRIES = 256
"""Maximum number of entries that one call reads."""

LogPosition = tuple[int, int]
"""Position of an entry in its log; the first entry is after (0, 0)."""


class ChunkOwner(NamedTuple):
    """An instance of a tenant, which owns chunks in the shared map."""

    tenant: str
    instance_id: str

    @property
    def name(self) -> str:
        """The name in keys. Tenant names contain no slash, so it is unique."""
        return f"{self.tenant}/{self.instance_id}"

    @property
    def shard(self) -> int:
        """The shard that stores its chunks."""
        return crc32(self.name.encode()) % SHARD_COUNT


class EntryKind(IntEnum):
    """What happened to the instance."""

    CHANGES = 1
    """It gained and lost chunks; afterwards its digests were these."""
    COMPLETE = 2
    """The snapshot of this term is complete."""
    RELOAD = 3
    """It gained and lost too many chunks for one entry; load its chunks again."""
    GONE = 4
    """It left, or its lease expired."""


class LogEntry(msgspec.Struct, array_like=True, frozen=True):
    """An event of an instance. A term is one stream of reports; a later stream has a higher term."""

    kind: EntryKind
    tenant: str
    instance_id: str
    epoch: int
    term: int
    changes: list[Change] = []
    digests: list[tuple[int, int, int]] = []
    """Tier, chunk count and key sum."""

    @property
    def owner(self) -> ChunkOwner:
        """The instance that the entry is about."""
        return ChunkOwner(self.tenant, self.instance_id)

    def digest_by_tier(self) -> dict[int, Digest]:
        """The digests in the layout map's form."""
        return {tier: Digest(chunk_count=count, key_sum=key_sum) for tier, count, key_sum in self.digests}


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(LogEntry)


def encode(entry: LogEntry) -> bytes:
    """The entry as MessagePack, as the log stores it."""
    return _encoder.encode(entry)


def decode(data: bytes) -> LogEntry:
    """The inverse of `encode`. Raises `ValueError` if `data` is not an entry, or has changes that no map can apply."""
    entry = _decoder.decode(data)
    for change in entry.changes:
        _check(change)
    return entry


def _check(change: Change) -> None:
    if not 1 <= change.tier <= TIER_COUNT:
        raise ValueError(f"there is no tier {change.tier}")
    counts = change.partial_token_counts
    if not all(0 <= tokens <= MAX_TOKENS for tokens in (change.chunk_size, *counts.values())):
        raise ValueError("a chunk has too many tokens")
    if len(change.admitted) % KEY_BYTES or len(change.evicted) % KEY_BYTES:
        raise ValueError("keys must be 16 bytes each")
    if not all(0 <= index < len(change.admitted) // KEY_BYTES for index in counts):
        raise ValueError("a partial chunk is not among the keys")
    if not change.partial_parents.keys() <= counts.keys() | change.prefix_digests.keys():
        raise ValueError("a chunk with a parent has neither a token count nor prefix digests")
    if not change.prefix_digests.keys() <= change.partial_parents.keys():
        raise ValueError("a chunk with prefix digests has no parent")
    if not all(0 <= index < len(change.admitted) // KEY_BYTES for index in change.prefix_digests):
        raise ValueError("a chunk with prefix digests is not among the keys")
    if not all(
        len(digests) % PREFIX_DIGEST_BYTES == 0
        and len(digests) <= PREFIX_DIGEST_BYTES * counts.get(index, change.chunk_size)
        for index, digests in change.prefix_digests.items()
    ):
        raise ValueError("prefix digests must be 8 bytes each, at most one for each token")
    if any(
        len(part) != KEY_BYTES for part in (*change.partial_parents.values(), change.fingerprint or bytes(KEY_BYTES))
    ):
        raise ValueError("a parent or a fingerprint does not have 16 bytes")
