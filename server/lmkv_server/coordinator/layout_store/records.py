"""The contents of a shared map: the entries of a shard's log, and the chunks of instances. Pure.

A chunk is one record of 37 bytes or more:

    tier (1) | fingerprint (16, zeros for none) | chunk key (16) | tokens (4, little-endian) | parent (16) | digests
    '---------------- field of the hash ------------------------'  '--------------------- value -------------------'

The token count is always stored: a coordinator that reads a record may not know the chunk's spec yet. A chunk in which
prompts end and whose parent is known has that in the value; the highest bit of its token count is set. If its prefix
digests are known, they follow, after their number (4, little-endian); then the next bit of its token count is set, too.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple
from zlib import crc32

import msgspec

from lmkv.keys import KEY_BYTES, PREFIX_DIGEST_BYTES, Digest
from lmkv_server.coordinator.core.layout_map import MAX_TOKENS, TIER_COUNT, Change

FINGERPRINT_BYTES = 16
PREFIX_BYTES = 1 + FINGERPRINT_BYTES
FIELD_BYTES = PREFIX_BYTES + KEY_BYTES
RECORD_BYTES = FIELD_BYTES + 4
MARKER = bytes(RECORD_BYTES)
"""The record that every hash starts with. It stands for no chunk: a hash without it was lost."""

_TOKENS = struct.Struct("<I")
_HAS_PARENT = 1 << 31
_HAS_DIGESTS = 1 << 30


def size_of(change: Change) -> int:
    """Approximate size in memory."""
    partial_bytes = 16 * len(change.partial_token_counts) + 48 * len(change.partial_parents)
    digest_bytes = sum(16 + len(digests) for digests in change.prefix_digests.values())
    return len(change.admitted) + len(change.evicted) + partial_bytes + digest_bytes + 64


def field_prefix(change: Change) -> bytes:
    """The first bytes of the fields of its chunks: tier and fingerprint."""
    return bytes([change.tier]) + change.fingerprint.ljust(FINGERPRINT_BYTES, b"\0")


def writes(change: Change) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Yields the steps that write a change: values, and keys of admitted and of evicted chunks.

    The values of a step have the same length; a single one of 4 bytes counts for all chunks.
    """
    if not change.partial_parents:
        yield token_values(change), change.admitted, change.evicted
        return
    by_length: dict[int, list[int]] = {}
    for index in sorted(change.partial_parents):
        by_length.setdefault(len(change.prefix_digests.get(index, b"")), []).append(index)
    for indices in by_length.values():
        yield (
            b"".join(_value_with_parent(change, index) for index in indices),
            b"".join(change.admitted[index * KEY_BYTES : (index + 1) * KEY_BYTES] for index in indices),
            b"",
        )
    rest = change.without_parents()
    yield token_values(rest), rest.admitted, rest.evicted


def _value_with_parent(change: Change, index: int) -> bytes:
    tokens = change.partial_token_counts.get(index, change.chunk_size) | _HAS_PARENT
    digests = change.prefix_digests.get(index, b"")
    if not digests:
        return _TOKENS.pack(tokens) + change.partial_parents[index]
    counted = _TOKENS.pack(len(digests) // PREFIX_DIGEST_BYTES) + digests
    return _TOKENS.pack(tokens | _HAS_DIGESTS) + change.partial_parents[index] + counted


def token_values(change: Change) -> bytes:
    """The values of its admitted chunks without parents; a single value if all are equal."""
    if not change.partial_token_counts:
        return _TOKENS.pack(change.chunk_size)
    counts = [change.chunk_size] * (len(change.admitted) // KEY_BYTES)
    for index, tokens in change.partial_token_counts.items():
        counts[index] = tokens
    return struct.pack(f"<{len(counts)}I", *counts)


def split_records(records: bytes) -> Iterator[tuple[bytes, bytes, int, bytes, bytes]]:
    """Tier and fingerprint, key, tokens, parent and prefix digests of each record. Raises `ValueError` if they are
    malformed."""
    at = 0
    while at < len(records):
        key_at, tokens_at, end = at + PREFIX_BYTES, at + FIELD_BYTES, at + RECORD_BYTES
        tokens = int.from_bytes(records[tokens_at:end], "little")
        parent = digests = b""
        if tokens & _HAS_PARENT:
            parent, end = records[end : end + KEY_BYTES], end + KEY_BYTES
        if tokens & _HAS_DIGESTS:
            digests_at = end + _TOKENS.size
            count = int.from_bytes(records[end:digests_at], "little")
            end = digests_at + count * PREFIX_DIGEST_BYTES
            digests = records[digests_at:end]
        if end > len(records):
            raise ValueError(f"{len(records)} bytes are not whole records")
        count = tokens & ~(_HAS_PARENT | _HAS_DIGESTS)
        yield records[at:key_at], records[key_at:tokens_at], count, parent, digests
        at = end


def has_marker(records: bytes) -> bool:
    """Whether `MARKER` is among the records. Raises `ValueError` if they are malformed."""
    return any(not prefix[0] for prefix, *_ in split_records(records))


def admissions(records: bytes) -> Iterator[Change]:
    """The chunks in `records`, one `Change` per tier, fingerprint and token count, and for those with parents.

    Raises `ValueError` if malformed.
    """
    groups: dict[tuple[bytes, int], list[bytes]] = {}
    with_parents: dict[bytes, list[tuple[bytes, int, bytes, bytes]]] = {}
    for prefix, key, tokens, parent, digests in split_records(records):
        if not prefix[0]:  # 0 is the marker
            continue
        if parent:
            with_parents.setdefault(prefix, []).append((key, tokens, parent, digests))
        else:
            groups.setdefault((prefix, tokens), []).append(key)
    for (prefix, tokens), keys in groups.items():
        yield Change(prefix[0], _fingerprint(prefix), tokens, b"".join(keys))
    for prefix, chunks in with_parents.items():
        yield Change(
            prefix[0],
            _fingerprint(prefix),
            chunks[0][1],
            b"".join(key for key, *_ in chunks),
            {index: tokens for index, (_, tokens, *_) in enumerate(chunks)},
            partial_parents={index: parent for index, (_, _, parent, _) in enumerate(chunks)},
            prefix_digests={index: digests for index, (_, _, _, digests) in enumerate(chunks) if digests},
        )


def _fingerprint(prefix: bytes) -> bytes:
    return prefix[1:] if any(prefix[1:]) else b""


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
    """The kind of an event of an instance."""

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
