"""The disk tier: chunks of the host tier in files, which stay when the host tier evicts them.

Only a load of chunks that are nowhere else waits for a disk. A folder that fails costs its chunks, not the node.
The file of an encrypted chunk begins with a page for the header, and its bytes are padded to whole pages with zeros.
Every thread encodes and encrypts by buffers of its own, which are aligned as direct I/O requires.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Self

from lmkv.keys import ChunkKey
from lmkv.misses import MissReason
from lmkv_kernels import checksum
from lmkv_server.node.cache.allocator import ALIGNMENT, align
from lmkv_server.node.cache.build import HostCache
from lmkv_server.node.tiers.backend import Backend, BackendTimes
from lmkv_server.node.tiers.backend_tier import BackendTier
from lmkv_server.node.tiers.base import Dropped, Needs, Presence, Selection, TierUsage
from lmkv_server.node.tiers.codec import WORD_BYTES, ChunkCodec, most_encoded_bytes
from lmkv_server.node.tiers.disk.folder import (
    ChunkFiles,
    DiskChunk,
    DiskFolder,
    FileIo,
    PlainFiles,
    PlainIo,
    read_at,
    write_at,
)
from lmkv_server.node.tiers.disk.volume import DISK_TIMES, WRITE_THREADS, DiskVolume
from lmkv_server.node.tiers.encryption_header import HEADER_BYTES, STEP_BYTES
from lmkv_server.node.tiers.threads import ThreadBuffer

if TYPE_CHECKING:  # it needs `cryptography`, which is optional
    from lmkv_server.node.tiers.encryption import ChunkEncryption

assert STEP_BYTES % ALIGNMENT == 0
assert HEADER_BYTES <= ALIGNMENT


class EncryptedFiles:
    """The `ChunkFiles` of a tier with encryption."""

    def __init__(self, encryption: ChunkEncryption) -> None:
        self._encryption = encryption
        self._buffer = ThreadBuffer()

    @property
    def key_id(self) -> bytes:
        """The id of the active key."""
        return self._encryption.active_key_id

    def planned(self, chunk: DiskChunk) -> DiskChunk:
        """The chunk with the id of the key."""
        return replace(chunk, key_id=self.key_id)

    def can_read(self, chunk: DiskChunk) -> bool:
        """Whether the chunk is encrypted with a known key."""
        return bool(chunk.key_id) and self._encryption.knows(chunk.key_id) and not chunk.codec

    def read(self, fd: int, chunk: DiskChunk, memory: memoryview) -> DiskChunk | None:
        """Decrypts step by step. If this returns None, `memory` may contain anything."""
        buffer = self._buffer.get(STEP_BYTES)
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

    def write(self, fd: int, chunk: DiskChunk, memory: memoryview) -> DiskChunk:
        """Encrypts step by step, and writes the header last, because it authenticates what was written."""
        buffer = self._buffer.get(STEP_BYTES)
        encryptor = self._encryption.encryptor(chunk)
        for at in range(0, chunk.size_bytes, STEP_BYTES):
            count = min(STEP_BYTES, chunk.size_bytes - at)
            encryptor.update_into(memory[at : at + count], buffer[:count])
            buffer[count : align(count)] = bytes(align(count) - count)
            write_at(fd, buffer[: align(count)], ALIGNMENT + at)
        buffer[:ALIGNMENT] = encryptor.header().ljust(ALIGNMENT, b"\0")
        write_at(fd, buffer[:ALIGNMENT], 0)
        return chunk


class EncodedFiles:
    """The `ChunkFiles` of a tier with a codec: what it encodes is written by others, plain or encrypted."""

    def __init__(self, codec: ChunkCodec, files: ChunkFiles) -> None:
        self._codec = codec
        self._files = files
        self._buffer = ThreadBuffer()

    @property
    def key_id(self) -> bytes:
        return self._files.key_id

    def planned(self, chunk: DiskChunk) -> DiskChunk:
        most = most_encoded_bytes(chunk.size_bytes)
        return self._files.planned(replace(chunk, codec=self._codec.scope, encoded_bytes=most))

    def can_read(self, chunk: DiskChunk) -> bool:
        """Whether the chunk is of this codec."""
        return chunk.codec == self._codec.scope and self._files.can_read(replace(chunk, codec=""))

    def read(self, fd: int, chunk: DiskChunk, memory: memoryview) -> DiskChunk | None:
        """Verifies the stored bytes, and decodes them. If this returns None, `memory` may contain anything."""
        buffer = self._buffer.get(align(chunk.encoded_bytes))[: align(chunk.encoded_bytes)]
        stored = self._files.read(fd, _stored(chunk, chunk.encoded_bytes, chunk.checksum), buffer)
        if stored is None:
            return None
        encoded = buffer[: chunk.encoded_bytes]
        if len(encoded) % WORD_BYTES or checksum(encoded) != stored.checksum:
            return None
        if self._codec.decode(chunk.fingerprint, encoded, memory) != chunk.size_bytes:
            return None
        return replace(chunk, checksum=checksum(memory[: chunk.size_bytes]), is_verified=True)

    def write(self, fd: int, chunk: DiskChunk, memory: memoryview) -> DiskChunk:
        """Encodes the chunk, and writes that, padded with zeros."""
        pages, encoded_bytes = self._codec.encode(chunk, memory[: chunk.size_bytes])
        stored = _stored(chunk, encoded_bytes, checksum(pages[:encoded_bytes]))
        self._files.write(fd, stored, pages)
        return replace(chunk, encoded_bytes=encoded_bytes, checksum=stored.checksum)


def _stored(chunk: DiskChunk, encoded_bytes: int, checksum: int) -> DiskChunk:
    """An encoded chunk as those see it that write and read its bytes."""
    return replace(chunk, size_bytes=encoded_bytes, encoded_bytes=encoded_bytes, checksum=checksum)


NAME = "disk"
DROPPED_AT_ONCE = 4096
"""Chunks that a drop looks at before other tasks run: a few milliseconds."""


class DiskTier(BackendTier[DiskChunk]):
    """Chunks in folders, each a `DiskVolume`. One event loop owns it."""

    is_local = True
    write_threads = WRITE_THREADS
    open_seconds = 5.0
    """Folders that are not indexed by then are indexed later."""

    def __init__(
        self,
        paths: Sequence[Path],
        capacity_bytes: int,
        cache: HostCache,
        *,
        io: FileIo | None = None,
        encryption: ChunkEncryption | None = None,
        codec: ChunkCodec | None = None,
        times: BackendTimes = DISK_TIMES,
        quota_bytes: int = 0,
    ) -> None:
        """Each of the folders may hold an equal part of `capacity_bytes`, and all together `quota_bytes` of one owner.

        With `encryption` files are encrypted, and `io` is not used. With a `codec` they are encoded before.
        """
        files: ChunkFiles = EncryptedFiles(encryption) if encryption else PlainFiles(io or PlainIo())
        files = EncodedFiles(codec, files) if codec else files
        share_bytes = capacity_bytes // len(paths)
        self.volumes = [DiskVolume(DiskFolder(path, files), share_bytes, self, times) for path in paths]
        super().__init__(NAME, self.volumes, cache, encryption, quota_bytes, codec)

    async def __aenter__(self) -> Self:
        """Opens the folders. Raises `ConfigError` for a folder that another user could have planted."""
        await super().__aenter__()
        if refusal := next((volume.folder.refusal for volume in self.volumes if volume.folder.refusal), None):
            await self.aclose()
            raise refusal
        return self

    @property
    def capacity_bytes(self) -> int:
        """Bytes that files may take now: none in a closed folder, fewer where the file system is full."""
        return sum(volume.index.limit_bytes for volume in self.volumes if volume.health.is_open)

    @property
    def used_bytes(self) -> int:
        """Bytes that files take."""
        return sum(volume.index.used_bytes for volume in self.volumes)

    @property
    def chunk_count(self) -> int:
        return sum(len(volume.index) for volume in self.volumes)

    def __iter__(self) -> Iterator[DiskChunk]:
        return chain.from_iterable(volume.index for volume in self.volumes)

    def get(self, key: ChunkKey) -> DiskChunk | None:
        """The chunk, if it is on disk. Does not count as a use."""
        for volume in self.volumes:
            if chunk := volume.find(key):
                return chunk
        return None

    async def lookup(self, needs: Needs) -> Presence:
        """Finds the chunks that are in folders that can be read. Answers at once.

        Chunks of the prompt that are in host memory count as used here, too: otherwise the chunks that are used most
        would be evicted from disk first.
        """
        found: list[int] = []
        for index in needs.indices:
            if all(self._readable(key, needs.spec.fingerprint) for key in needs.parts_of(index)):
                found.append(index)
                if needs.any_of:
                    break
            elif needs.in_order:
                break
        end = found[-1] + 1 if found else needs.indices[0] if needs.indices else 0
        if needs.any_of:
            used: Sequence[ChunkKey] = [key for index in found for key in needs.parts_of(index)]
        else:
            used = needs.items.used_with(found, needs.indices) if needs.items else needs.keys[:end]
        for volume in self.volumes:
            volume.index.use(used)
        if self.quotas is not None:
            self.quotas.use(chunk for key in used if (chunk := self.get(key)))
        return Presence(asked=needs.indices, indices=found, moved_share=self.reader.moved_share(needs.spec))

    def supersede(self, key: ChunkKey) -> None:
        """Has the chunk, if it is on disk and not used again, evicted before others."""
        for volume in self.volumes:
            volume.index.supersede(key)

    async def drop(self, selection: Selection) -> Dropped:
        """Removes chunks that are not pinned in memory; returns when their files are gone.

        Raises `Unreachable` if a folder does not answer: none of the chunks is found, but files may be left.
        """
        chunks = [self.get(key) for key in selection.keys] if selection.keys else list(self)
        chunk_count = token_count = 0
        for start in range(0, len(chunks), DROPPED_AT_ONCE):
            if start:
                await asyncio.sleep(0)
            selected = [
                chunk
                for chunk in chunks[start : start + DROPPED_AT_ONCE]
                if chunk and chunk.key not in selection.kept and selection.has_spec(chunk.fingerprint)
            ]
            counted = [chunk for chunk in selected if chunk.key not in selection.counted]
            chunk_count += len(counted)
            token_count += sum(chunk.token_count for chunk in counted)
            if not selection.dry_run:
                reason = MissReason.DROPPED if selection.keys else MissReason.CLEARED
                self.forget([chunk.key for chunk in selected], reason)
        await self.settle()
        return Dropped(chunk_count=chunk_count, token_count=token_count)

    def forget(self, keys: Collection[ChunkKey], reason: MissReason = MissReason.DROPPED) -> list[DiskChunk]:
        """Drops chunks, also those that are about to be written; their files are removed in the background."""
        named = set(keys)
        self.writer.forget(lambda chunk: chunk.key in named)
        dropped: defaultdict[DiskVolume, list[DiskChunk]] = defaultdict(list)
        for key in named:
            for volume in self.volumes:
                if chunk := volume.find(key):
                    dropped[volume].append(chunk)
        for volume, chunks in dropped.items():
            volume.discard(chunks, reason)
        return list(chain.from_iterable(dropped.values()))

    def usage(self) -> TierUsage:
        """Returns the usage of the folders."""
        return TierUsage(capacity_bytes=self.capacity_bytes, used_bytes=self.used_bytes, chunk_count=self.chunk_count)

    def _readable(self, key: ChunkKey, fingerprint: bytes) -> bool:
        for volume in self.volumes:
            if chunk := volume.find(key):
                return volume.usable and chunk.fingerprint == fingerprint
        return False

    def opened(self, volume: Backend[DiskChunk]) -> None:
        """Reports the chunks of an opened volume, but for those that other volumes hold, which it removes."""
        assert isinstance(volume, DiskVolume)
        others = [other for other in self.volumes if other is not volume]
        duplicates = [chunk for chunk in volume.index if any(other.find(chunk.key) for other in others)]
        for chunk in duplicates:
            volume.index.remove(chunk.key)
        volume.remove(duplicates)
        for chunk in list(volume.index):
            self.stored(chunk)
        super().opened(volume)
