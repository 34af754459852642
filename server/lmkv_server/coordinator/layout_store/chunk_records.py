"""The chunks of an instance as a shared map stores them: one record of 37 or 53 bytes per chunk. Pure.

    tier (1) | fingerprint (16, zeros for none) | chunk key (16) | tokens (4, little-endian) | parent (16)
    '---------------- field of the hash ------------------------'  '----------------- value -------------'

The token count is always stored: a coordinator that reads a record may not know the chunk's spec yet. A partial chunk
whose parent is known has that in the value; the highest bit of its token count is set.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from lmkv.keys import KEY_BYTES
from lmkv_server.coordinator.core.layout_map import Change

FINGERPRINT_BYTES = 16
PREFIX_BYTES = 1 + FINGERPRINT_BYTES
FIELD_BYTES = PREFIX_BYTES + KEY_BYTES
RECORD_BYTES = FIELD_BYTES + 4
MARKER = bytes(RECORD_BYTES)
"""The record that every hash starts with. It stands for no chunk: a hash without it was lost."""

_TOKENS = struct.Struct("<I")
_HAS_PARENT = 1 << 31


def size_of(change: Change) -> int:
    """Approximate size in memory."""
    partial_bytes = 16 * len(change.partial_token_counts) + 48 * len(change.partial_parents)
    return len(change.admitted) + len(change.evicted) + partial_bytes + 64


def field_prefix(change: Change) -> bytes:
    """The first bytes of the fields of its chunks: tier and fingerprint."""
    return bytes([change.tier]) + change.fingerprint.ljust(FINGERPRINT_BYTES, b"\0")


def writes(change: Change) -> Iterator[tuple[bytes, bytes, bytes]]:
    """What is to be written for a change: values, and keys of admitted and of evicted chunks.

    The values of a step have the same length; a single one of 4 bytes counts for all chunks.
    """
    if not change.partial_parents:
        yield token_values(change), change.admitted, change.evicted
        return
    indices = sorted(change.partial_parents)
    yield (
        b"".join(
            _TOKENS.pack(change.partial_token_counts[index] | _HAS_PARENT) + change.partial_parents[index]
            for index in indices
        ),
        b"".join(change.admitted[index * KEY_BYTES : (index + 1) * KEY_BYTES] for index in indices),
        b"",
    )
    rest = change.without_parents()
    yield token_values(rest), rest.admitted, rest.evicted


def token_values(change: Change) -> bytes:
    """The values of its admitted chunks without parents; a single value if all are equal."""
    if not change.partial_token_counts:
        return _TOKENS.pack(change.chunk_size)
    counts = [change.chunk_size] * (len(change.admitted) // KEY_BYTES)
    for index, tokens in change.partial_token_counts.items():
        counts[index] = tokens
    return struct.pack(f"<{len(counts)}I", *counts)


def split_records(records: bytes) -> Iterator[tuple[bytes, bytes, int, bytes]]:
    """Tier and fingerprint, key, tokens and parent of each record. Raises `ValueError` if they are malformed."""
    at = 0
    while at < len(records):
        key_at, tokens_at, end = at + PREFIX_BYTES, at + FIELD_BYTES, at + RECORD_BYTES
        tokens = int.from_bytes(records[tokens_at:end], "little")
        if tokens & _HAS_PARENT:
            end += KEY_BYTES
        if end > len(records):
            raise ValueError(f"{len(records)} bytes are not whole records")
        yield records[at:key_at], records[key_at:tokens_at], tokens & ~_HAS_PARENT, records[at + RECORD_BYTES : end]
        at = end


def has_marker(records: bytes) -> bool:
    """Whether `MARKER` is among the records. Raises `ValueError` if they are malformed."""
    return any(not prefix[0] for prefix, _, _, _ in split_records(records))


def admissions(records: bytes) -> Iterator[Change]:
    """The chunks in `records`, one `Change` per tier, fingerprint and token count, and for those with parents.

    Raises `ValueError` if malformed.
    """
    groups: dict[tuple[bytes, int], list[bytes]] = {}
    with_parents: dict[bytes, list[tuple[bytes, int, bytes]]] = {}
    for prefix, key, tokens, parent in split_records(records):
        if not prefix[0]:  # 0 is the marker
            continue
        if parent:
            with_parents.setdefault(prefix, []).append((key, tokens, parent))
        else:
            groups.setdefault((prefix, tokens), []).append(key)
    for (prefix, tokens), keys in groups.items():
        yield Change(prefix[0], _fingerprint(prefix), tokens, b"".join(keys))
    for prefix, chunks in with_parents.items():
        yield Change(
            prefix[0],
            _fingerprint(prefix),
            chunks[0][1],
            b"".join(key for key, _, _ in chunks),
            {index: tokens for index, (_, tokens, _) in enumerate(chunks)},
            partial_parents={index: parent for index, (_, _, parent) in enumerate(chunks)},
        )


def _fingerprint(prefix: bytes) -> bytes:
    return prefix[1:] if any(prefix[1:]) else b""
