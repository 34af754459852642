"""What objects in the remote store contain: the bytes of a chunk, plain or encrypted. Used by `StoreBackend`."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from lmkv_server.node.tiers.encryption import header as encryption_header
from lmkv_server.node.tiers.encryption.header import STEP_BYTES
from lmkv_server.node.tiers.remote.chunk import (
    ENCRYPTED_ROOT,
    HEADER_BYTES,
    ROOT,
    RemoteChunk,
    RemoteObject,
    object_name,
)
from lmkv_server.node.tiers.remote.store import RemoteStore

if TYPE_CHECKING:  # it needs `cryptography`, which is optional
    from lmkv_server.node.tiers.encryption.chunks import ChunkEncryption


class ObjectFormat(Protocol):
    """Puts and gets chunks. Called on several threads at a time; raises what the store raises."""

    @property
    def root(self) -> str:
        """What the names of all objects begin with."""

    @property
    def header_bytes(self) -> int:
        """How much longer objects are than their chunks."""

    def put(self, store: RemoteStore, chunk: RemoteObject, memory: memoryview) -> bool:
        """Puts a chunk of which `memory` has the bytes; False if the store has it already."""

    def get(self, store: RemoteStore, chunk: RemoteChunk, memory: memoryview) -> RemoteObject | None:
        """Gets a chunk; None if it is absent or not what it should be. Its checksum is not verified."""


class PlainObjects:
    """Objects of the bytes of chunks, which are copied directly from and to the pool."""

    root = ROOT
    header_bytes = HEADER_BYTES

    def put(self, store: RemoteStore, chunk: RemoteObject, memory: memoryview) -> bool:
        return store.put(object_name(chunk.fingerprint, chunk.key), (memoryview(chunk.header), memory))

    def get(self, store: RemoteStore, chunk: RemoteChunk, memory: memoryview) -> RemoteObject | None:
        header = bytearray(HEADER_BYTES)
        if not store.get(chunk.name, (memoryview(header), memory)):
            return None
        return chunk.described(bytes(header))


class EncryptedObjects:
    """Objects of encrypted bytes. Each thread that writes has a buffer of the largest chunk that it has written."""

    header_bytes = HEADER_BYTES + encryption_header.HEADER_BYTES

    def __init__(self, encryption: ChunkEncryption) -> None:
        self.root = f"{ENCRYPTED_ROOT}{encryption.scope}/"
        self._encryption = encryption
        self._buffers = threading.local()

    def put(self, store: RemoteStore, chunk: RemoteObject, memory: memoryview) -> bool:
        buffer = self._buffer(len(memory))
        encryptor = self._encryption.encryptor(chunk)
        for at in range(0, len(memory), STEP_BYTES):
            encryptor.update_into(memory[at : at + STEP_BYTES], buffer[at : min(at + STEP_BYTES, len(memory))])
        header = replace(chunk, checksum=0).header + encryptor.header()
        name = object_name(chunk.fingerprint, chunk.key, self.root)
        return store.put(name, (memoryview(header), buffer[: len(memory)]))

    def get(self, store: RemoteStore, chunk: RemoteChunk, memory: memoryview) -> RemoteObject | None:
        """Decrypts in place, step by step. If this returns None, `memory` may contain anything."""
        header = bytearray(self.header_bytes)
        if not store.get(chunk.name, (memoryview(header), memory)):
            return None
        described = chunk.described(bytes(header[:HEADER_BYTES]))
        decryptor = self._encryption.decryptor(described, bytes(header[HEADER_BYTES:])) if described else None
        if described is None or decryptor is None:
            return None
        buffer = self._buffer(min(STEP_BYTES, len(memory)))
        for at in range(0, len(memory), STEP_BYTES):
            part = memory[at : at + STEP_BYTES]
            decryptor.update_into(part, buffer[: len(part)])
            part[:] = buffer[: len(part)]
        checksum = decryptor.checksum()
        return None if checksum is None else replace(described, checksum=checksum)

    def _buffer(self, size_bytes: int) -> memoryview:
        """A buffer of this thread of at least this size."""
        buffer: memoryview | None = getattr(self._buffers, "memory", None)
        if buffer is None or len(buffer) < size_bytes:
            buffer = self._buffers.memory = memoryview(bytearray(size_bytes))
        return buffer
