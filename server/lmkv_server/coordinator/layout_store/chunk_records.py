"""The chunks of an instance as a shared map stores them: one record of 37 bytes per chunk. Pure.

    tier (1) | fingerprint (16, zeros for none) | chunk key (16) | tokens (4, little-endian)
    '---------------- field of the hash ------------------------'  '------- value ---------'

The token count is always stored: a coordinator that reads a record may not know the chunk's spec yet.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from lmkv.keys import KEY_BYTES

FINGERPRINT_BYTES = 16
PREFIX_BYTES = 1 + FINGERPRINT_BYTES
FIELD_BYTES = PREFIX_BYTES + KEY_BYTES
RECORD_BYTES = FIELD_BYTES + 4
MARKER = bytes(RECORD_BYTES)
"""The record that every hash starts with. It stands for no chunk: a hash without it was lost."""

_TOKENS = struct.Struct("<I")


class Change(msgspec.Struct, array_like=True, frozen=True):
    """Chunks that one instance gained, then chunks that it lost, in one tier; the arguments of `LayoutMap.apply`."""

    tier: int
    fingerprint: bytes
    chunk_size: int
    admitted: bytes
    partial_token_counts: dict[int, int]
    evicted: bytes

    @property
    def size_bytes(self) -> int:
        """Approximate size in memory."""
        return len(self.admitted) + len(self.evicted) + 16 * len(self.partial_token_counts) + 64

    @property
    def field_prefix(self) -> bytes:
        """The first bytes of the fields of its chunks: tier and fingerprint."""
        return bytes([self.tier]) + self.fingerprint.ljust(FINGERPRINT_BYTES, b"\0")

    @property
    def tokens(self) -> bytes:
        """The values of its admitted chunks; a single value if all are equal."""
        if not self.partial_token_counts:
            return _TOKENS.pack(self.chunk_size)
        counts = [self.chunk_size] * (len(self.admitted) // KEY_BYTES)
        for index, tokens in self.partial_token_counts.items():
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
            yield Change(prefix[0], fingerprint, _TOKENS.unpack(tokens)[0], b"".join(keys), {}, b"")
