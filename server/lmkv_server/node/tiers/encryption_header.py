"""The header before the bytes of an encrypted chunk, and the data that is authenticated with them. Pure.

    magic, version | key id | nonce | checksum, encrypted | tag

The chunk's checksum is encrypted before its bytes, as if both were one text: in clear it would identify them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Protocol

from lmkv.keys import KEY_BYTES, ChunkKey

_MAGIC, _VERSION = b"lmkvenc", 1
KEY_ID_BYTES = 8
NONCE_BYTES = 12
TAG_BYTES = 16
CHECKSUM_BYTES = 16
"""A block of the cipher, so that the chunk's bytes begin with one: 8 bytes of checksum, and zeros."""
_FIELDS = struct.Struct(f"<7sB{KEY_ID_BYTES}s{NONCE_BYTES}s{CHECKSUM_BYTES}s{TAG_BYTES}s")
_CHUNK = struct.Struct("<7sB16s16s16s?QQ")
HEADER_BYTES = _FIELDS.size
STEP_BYTES = 1 << 20
"""Bytes that a thread encrypts or decrypts at a time. No part of the format."""


class ChunkDescription(Protocol):
    """A chunk as a tier knows it without its bytes; an encrypted chunk is readable only as what it was written as."""

    @property
    def key(self) -> ChunkKey: ...
    @property
    def parent(self) -> ChunkKey | None: ...
    @property
    def fingerprint(self) -> bytes: ...
    @property
    def token_count(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def checksum(self) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EncryptionHeader:
    """The header of one encrypted chunk."""

    key_id: bytes
    nonce: bytes
    checksum: bytes
    tag: bytes
    """Authenticates checksum and bytes, and `associated_data`."""

    def packed(self) -> bytes:
        """The header as it is stored."""
        return _FIELDS.pack(_MAGIC, _VERSION, self.key_id, self.nonce, self.checksum, self.tag)


def parse_encryption_header(data: bytes) -> EncryptionHeader | None:
    """The header; None if it is none, or of another version."""
    if len(data) != HEADER_BYTES:
        return None
    magic, version, key_id, nonce, checksum, tag = _FIELDS.unpack(data)
    if (magic, version) != (_MAGIC, _VERSION):
        return None
    return EncryptionHeader(key_id=key_id, nonce=nonce, checksum=checksum, tag=tag)


def associated_data(chunk: ChunkDescription) -> bytes:
    """Packs what identifies a chunk: it is authenticated, so a file or object under another name is not decrypted."""
    parent = chunk.parent or bytes(KEY_BYTES)
    return _CHUNK.pack(
        _MAGIC,
        _VERSION,
        chunk.fingerprint,
        chunk.key,
        parent,
        chunk.parent is not None,
        chunk.token_count,
        chunk.size_bytes,
    )
