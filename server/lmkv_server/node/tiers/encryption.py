"""Encrypts chunks at rest, for tiers that keep them outside of memory (docs/operate/security.md).

Each tier has one `ChunkEncryption`. It works in steps, so that no thread needs memory for a second chunk. Only this
module imports the package `cryptography`, which is optional; `encryption_header` has the format.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from lmkv.auth.encryption_keys import read_encryption_keys
from lmkv.runtime.reload import Reloadable
from lmkv.telemetry.logs import LimitedLogger
from lmkv_server.node.tiers.encryption_header import (
    CHECKSUM_BYTES,
    KEY_ID_BYTES,
    NONCE_BYTES,
    ChunkDescription,
    EncryptionHeader,
    associated_data,
    parse_encryption_header,
)

logger = logging.getLogger(__name__)


def derive(secret: bytes, purpose: bytes, size_bytes: int) -> bytes:
    """Bytes that follow from a secret and a purpose, and do not reveal the secret."""
    return HKDF(algorithm=SHA256(), length=size_bytes, salt=None, info=purpose).derive(secret)


class Encryptor:
    """Encrypts one text in steps."""

    def __init__(self, key: bytes, nonce: bytes, associated: bytes) -> None:
        """`associated` is authenticated with the text, and is no part of it."""
        self._context = Cipher(algorithms.AES256(key), modes.GCM(nonce)).encryptor()
        self._context.authenticate_additional_data(associated)

    def update_into(self, source: bytes | memoryview, target: bytearray | memoryview) -> None:
        """Encrypts the next bytes; `target` has the length of `source` and does not overlap it."""
        self._context.update_into(source, target)

    def tag(self) -> bytes:
        """Ends the text; returns what authenticates it."""
        self._context.finalize()
        return self._context.tag


class Decryptor:
    """Decrypts one text in steps. What it returns is not to be trusted before `is_authentic`."""

    def __init__(self, key: bytes, nonce: bytes, associated: bytes) -> None:
        self._context = Cipher(algorithms.AES256(key), modes.GCM(nonce)).decryptor()
        self._context.authenticate_additional_data(associated)

    def update_into(self, source: bytes | memoryview, target: bytearray | memoryview) -> None:
        """Decrypts the next bytes; `target` has the length of `source` and does not overlap it."""
        self._context.update_into(source, target)

    def is_authentic(self, tag: bytes) -> bool:
        """Ends the text; whether it and its associated data are what was encrypted with this key."""
        try:
            self._context.finalize_with_tag(tag)
        except InvalidTag:
            return False
        return True


KEY_BYTES = 32
_PURPOSE = b"lmkv chunks at rest v1\0"


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantKey:
    """A key of one tenant. `repr` does not show its bytes."""

    name: str
    """Its name in the file, for messages."""
    id: bytes
    """Follows from key and tenant: two files that give two keys one name do not confuse them."""
    secret: bytes = field(repr=False)


class TenantKeys:
    """The keys of one tenant. Raises `ConfigError` if the file is invalid; if it becomes so later, keys stay.

    Thread-safe; each call costs one `stat`.
    """

    def __init__(self, path: str, tenant: str = "") -> None:
        self.scope = hashlib.sha256(_PURPOSE + tenant.encode()).hexdigest()[:16]
        """Separates names of this tenant's objects from those of others in a shared store; independent of keys."""
        self._tenant = tenant
        self._keys = Reloadable([path], lambda: self._read(path))

    @property
    def active(self) -> TenantKey:
        """The key to write with."""
        return next(iter(self._keys.get().values()))

    def find(self, key_id: bytes) -> TenantKey | None:
        """The key to read with; None if it is another tenant's, or no longer in the file."""
        return self._keys.get().get(key_id)

    def _read(self, path: str) -> dict[bytes, TenantKey]:
        keys = {}
        for one in read_encryption_keys(path):
            derived = derive(one.secret, _PURPOSE + self._tenant.encode(), KEY_BYTES + KEY_ID_BYTES)
            secret, key_id = derived[:KEY_BYTES], derived[KEY_BYTES:]
            keys[key_id] = TenantKey(name=one.name, id=key_id, secret=secret)
        return keys


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
        """The part that names of this tenant's chunks have in common in a store that tenants share."""
        return self._keys.scope

    @property
    def active_key_id(self) -> bytes:
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
