"""Files of encrypted chunks: a page with the header, then the encrypted bytes, padded to whole pages with zeros.

Every thread encrypts and decrypts by way of a buffer of its own, which is aligned as direct I/O requires.
"""

from __future__ import annotations

import mmap
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from lmkv_server.node.cache.allocator import ALIGNMENT, align
from lmkv_server.node.tiers.disk.chunk import DiskChunk
from lmkv_server.node.tiers.disk.folder import read_at, write_at
from lmkv_server.node.tiers.encryption.header import HEADER_BYTES, STEP_BYTES

if TYPE_CHECKING:  # it needs `cryptography`, which is optional
    from lmkv_server.node.tiers.encryption.chunks import ChunkEncryption

assert STEP_BYTES % ALIGNMENT == 0
assert HEADER_BYTES <= ALIGNMENT


class EncryptedFiles:
    """The `ChunkFiles` of a tier with encryption."""

    def __init__(self, encryption: ChunkEncryption) -> None:
        self._encryption = encryption
        self._buffers = threading.local()

    @property
    def key_id(self) -> bytes:
        """The id of the active key."""
        return self._encryption.active_key_id

    def can_read(self, chunk: DiskChunk) -> bool:
        """Whether the chunk is encrypted with a known key."""
        return bool(chunk.key_id) and self._encryption.knows(chunk.key_id)

    def read(self, fd: int, chunk: DiskChunk, memory: memoryview) -> DiskChunk | None:
        """Decrypts step by step. If this returns None, `memory` may contain anything."""
        buffer = self._buffer()
        page = buffer[:ALIGNMENT]
        if read_at(fd, page, 0) < ALIGNMENT:
            return None
        decryptor = self._encryption.decryptor(chunk, bytes(page[:HEADER_BYTES]))
        if decryptor is None:
            return None
        for at in range(0, chunk.size_bytes, STEP_BYTES):
            count = min(STEP_BYTES, chunk.size_bytes - at)
            if read_at(fd, buffer[: align(count)], ALIGNMENT + at) < align(count):
                return None
            decryptor.update_into(buffer[:count], memory[at : at + count])
        checksum = decryptor.checksum()
        return None if checksum is None else replace(chunk, checksum=checksum)

    def write(self, fd: int, chunk: DiskChunk, memory: memoryview) -> None:
        """Encrypts step by step, and writes the header last, because it authenticates what was written."""
        buffer = self._buffer()
        encryptor = self._encryption.encryptor(chunk)
        for at in range(0, chunk.size_bytes, STEP_BYTES):
            count = min(STEP_BYTES, chunk.size_bytes - at)
            encryptor.update_into(memory[at : at + count], buffer[:count])
            buffer[count : align(count)] = bytes(align(count) - count)
            write_at(fd, buffer[: align(count)], ALIGNMENT + at)
        buffer[:ALIGNMENT] = encryptor.header().ljust(ALIGNMENT, b"\0")
        write_at(fd, buffer[:ALIGNMENT], 0)

    def _buffer(self) -> memoryview:
        """The buffer of this thread, for one step."""
        buffer: memoryview | None = getattr(self._buffers, "memory", None)
        if buffer is None:
            buffer = self._buffers.memory = memoryview(mmap.mmap(-1, STEP_BYTES))
        return buffer
