"""The chunks of an instance as a shared map stores them: one record of 37 bytes per chunk. Pure.

    tier (1) | fingerprint (16, zeros for none) | chunk key (16) | tokens (4, little-endian)
    '---------------- field of the hash ------------------------'  '------- value ---------'

The token count is always stored: a coordinator that reads a record may not know the chunk's spec yet.
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


def size_of(change: Change) -> int:
    """Approximate size in memory."""
    return len(change.admitted) + len(change.evicted) + 16 * len(change.partial_token_counts) + 64


def field_prefix(change: Change) -> bytes:
    """The first bytes of the fields of its chunks: tier and fingerprint."""
    return bytes([change.tier]) + change.fingerprint.ljust(FINGERPRINT_BYTES, b"\0")


def token_values(change: Change) -> bytes:
    """The values of its admitted chunks; a single value if all are equal."""
    if not change.partial_token_counts:
        return _TOKENS.pack(change.chunk_size)
    counts = [change.chunk_size] * (len(change.admitted) // KEY_BYTES)
    for index, tokens in change.partial_token_counts.items():
        counts[index] = tokens
    return struct.pack(f"<{len(counts)}I", *counts)


def admissions(records: bytes) -> Iterator[Change]:
    """The chunks in `records`, one `Change` per tier, fingerprint and token count. Raises `ValueError` if malformed."""
    if len(records) % RECORD_BYTES:
        raise ValueError(f"{len(records)} bytes is not a multiple of the record size {RECORD_BYTES}")
    groups: dict[tuple[bytes, bytes], list[bytes]] = {}
    for at in range(0, len(records), RECORD_BYTES):
        group = records[at : at + PREFIX_BYTES], records[at + FIELD_BYTES : at + RECORD_BYTES]
        groups.setdefault(group, []).append(records[at + PREFIX_BYTES : at + FIELD_BYTES])
    for (prefix, tokens), keys in groups.items():
        if prefix[0]:  # 0 is the marker
            fingerprint = prefix[1:] if any(prefix[1:]) else b""
            yield Change(prefix[0], fingerprint, _TOKENS.unpack(tokens)[0], b"".join(keys))
