"""Encrypts and decrypts the chunks of one tier, each in steps, so that no thread needs memory for a second chunk."""

from __future__ import annotations

import logging
import os
import struct
import threading
from collections.abc import Callable

from lmkv.telemetry.logs import LimitedLogger
from lmkv_server.node.tiers.encryption.cipher import Decryptor, Encryptor
from lmkv_server.node.tiers.encryption.header import (
    CHECKSUM_BYTES,
    NONCE_BYTES,
    ChunkDescription,
    EncryptionHeader,
    associated_data,
    parse_encryption_header,
)
from lmkv_server.node.tiers.encryption.keys import TenantKey, TenantKeys

logger = logging.getLogger(__name__)

LOG_SECONDS = 10.0
"""Minimum time between two lines about chunks that cannot be decrypted."""
OnReject = Callable[[ChunkDescription, str], None]
_CHECKSUM = struct.Struct("<QQ")  # and zeros
assert _CHECKSUM.size == CHECKSUM_BYTES


class ChunkEncryption:
    """The encryption of one tier's chunks. Thread-safe."""

    def __init__(self, keys: TenantKeys, tier: str) -> None:
        """`tier` is its name in messages."""
        self._keys = keys
        self._tier = tier
        self._log = LimitedLogger(logger, LOG_SECONDS)
        self._lock = threading.Lock()
        self._rejected_count = 0

    @property
    def scope(self) -> str:
        """What names of this tenant's chunks have in common in a store that tenants share."""
        return self._keys.scope

    @property
    def active_key_id(self) -> bytes:
        """The id of the key that new chunks are encrypted with."""
        return self._keys.active.id

    @property
    def rejected_count(self) -> int:
        """Chunks that were read and could not be decrypted."""
        return self._rejected_count

    def knows(self, key_id: bytes) -> bool:
        """Whether chunks of this key can be decrypted now."""
        return self._keys.find(key_id) is not None

    def encryptor(self, chunk: ChunkDescription) -> ChunkEncryptor:
        """Encrypts a chunk with the active key."""
        return ChunkEncryptor(self._keys.active, chunk)

    def decryptor(self, chunk: ChunkDescription, header: bytes) -> ChunkDecryptor | None:
        """Decrypts what is said to be the chunk; None, and counted, if the header is invalid or its key is unknown.

        The chunk's checksum is not used: `ChunkDecryptor.checksum` has it.
        """
        parsed = parse_encryption_header(header)
        if parsed is None:
            self._reject(chunk, "it has no valid header")
            return None
        key = self._keys.find(parsed.key_id)
        if key is None:
            self._reject(chunk, f"its key {parsed.key_id.hex()} is another tenant's, or not in the key file")
            return None
        return ChunkDecryptor(key, chunk, parsed, self._reject)

    def _reject(self, chunk: ChunkDescription, why: str) -> None:
        with self._lock:
            self._rejected_count += 1
            self._log.warning("%s: chunk %s cannot be decrypted: %s", self._tier, chunk.key.hex(), why)


class ChunkEncryptor:
    """One chunk that is being encrypted."""

    def __init__(self, key: TenantKey, chunk: ChunkDescription) -> None:
        self._key_id = key.id
        self._nonce = os.urandom(NONCE_BYTES)
        self._cipher = Encryptor(key.secret, self._nonce, associated_data(chunk))
        self._checksum = bytearray(CHECKSUM_BYTES)
        self._cipher.update_into(_CHECKSUM.pack(chunk.checksum, 0), self._checksum)
        self.update_into = self._cipher.update_into

    def header(self) -> bytes:
        """Ends the chunk; returns what stands before its bytes."""
        return EncryptionHeader(
            key_id=self._key_id, nonce=self._nonce, checksum=bytes(self._checksum), tag=self._cipher.tag()
        ).packed()


class ChunkDecryptor:
    """One chunk that is being decrypted. Its bytes are not to be used unless it has a `checksum`."""

    def __init__(self, key: TenantKey, chunk: ChunkDescription, header: EncryptionHeader, on_reject: OnReject) -> None:
        self._chunk = chunk
        self._key = key
        self._tag = header.tag
        self._on_reject = on_reject
        self._cipher = Decryptor(key.secret, header.nonce, associated_data(chunk))
        self._checksum = bytearray(CHECKSUM_BYTES)
        self._cipher.update_into(header.checksum, self._checksum)
        self.update_into = self._cipher.update_into

    def checksum(self) -> int | None:
        """Ends the chunk; its checksum, or None, and counted, if it is not what was encrypted under this name."""
        if not self._cipher.is_authentic(self._tag):
            self._on_reject(self._chunk, f"it is not what was written with key {self._key.name}")
            return None
        checksum: int = _CHECKSUM.unpack(self._checksum)[0]
        return checksum
