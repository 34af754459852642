"""A host tier over a real pool, and a disk tier over real folders."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from operator import eq
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lmkv.keys import ChunkKey
from lmkv.misses import MissReason
from lmkv.pool.pool import Pool
from lmkv.spec import KvSpec
from lmkv.transfer.channel import Region
from lmkv.transfer.nixl.channel import NixlFiles
from lmkv_kernels import checksum
from lmkv_server.node.cache.build import HostCache
from lmkv_server.node.cache.events import CachedChunk, CacheEvents
from lmkv_server.node.cache.host import Chunk, HostTier
from lmkv_server.node.tiers.base import Needs
from lmkv_server.node.tiers.codec import ChunkCodec
from lmkv_server.node.tiers.disk.tier import DiskTier
from lmkv_server.node.tiers.disk.volume import DISK_TIMES
from lmkv_server.node.tiers.encryption import ChunkEncryption
from tests.server.node.cases import chunk_key, chunk_keys, put
from tests.support.specs import small_spec
from tests.waiting import WAIT_SECONDS as WAIT_SECONDS
from tests.waiting import until as until

CHUNK_BYTES = 8192
SPEC = small_spec()
FINGERPRINT = SPEC.fingerprint


def content(number: int, size_bytes: int) -> bytes:
    """The bytes of a chunk."""
    return np.random.default_rng(number).bytes(size_bytes)


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """What chunks of a test are like."""

    spec: KvSpec = SPEC
    token_count: int = 7
    content: Callable[[int, int], bytes] = content
    """The bytes of a chunk by its number and size."""
    is_same: Callable[[bytes, bytes], bool] = eq
    """Whether what was read may be what was stored."""


RANDOM = Chunks()


class Host:
    """A pool of a number of chunks whose tier sends its events to the disk tier, as in a node."""

    def __init__(self, chunk_count: int, chunks: Chunks = RANDOM) -> None:
        self.chunks = chunks
        self.pool = Pool.create(chunk_count * CHUNK_BYTES, huge_pages="never")
        self.events = CacheEvents(self)
        self.tier = HostTier(self.pool.size_bytes, self.events)
        self.cache = HostCache(pool=self.pool, tier=self.tier, events=self.events)
        self._disk: DiskTier | None = None
        self.on_disk: set[ChunkKey] = set()
        """What the disk tier has said to hold."""

    @property
    def disk(self) -> DiskTier:
        assert self._disk
        return self._disk

    @disk.setter
    def disk(self, disk: DiskTier) -> None:
        self._disk = disk

    def stored(self, tier: str, chunk: CachedChunk) -> None:
        if tier == "disk":
            assert chunk.key not in self.on_disk
            self.on_disk.add(chunk.key)

    def removed(self, tier: str, chunk: CachedChunk, reason: MissReason) -> None:
        if tier == "disk":
            self.on_disk.remove(chunk.key)

    def words(self, chunk: Chunk) -> NDArray[np.uint64]:
        return np.frombuffer(self.pool.buffer, np.uint64, chunk.size_bytes // 8, chunk.offset)

    def store(self, number: int, parent: int | None = None, size_bytes: int = CHUNK_BYTES, owner: bytes = b"") -> Chunk:
        """A chunk whose bytes follow from its number."""
        return put(
            self.tier,
            chunk_key(number),
            size_bytes,
            fingerprint=self.chunks.spec.fingerprint,
            token_count=self.chunks.token_count,
            parent=None if parent is None else chunk_key(parent),
            pool=self.pool,
            content=self.chunks.content(number, size_bytes),
            owner=owner,
        )

    def drop(self, *numbers: int) -> None:
        """Forgets chunks in host memory."""
        self.tier.drop(chunk_keys(*numbers))

    async def count(self, *numbers: int, spec: KvSpec | None = None) -> int:
        """How many of the chunks can be read from disk, from the first on without a gap."""
        keys = chunk_keys(*numbers)
        needs = Needs(spec=spec or self.chunks.spec, keys=keys, indices=range(len(keys)))
        return (await self.disk.lookup(needs)).run_from(0)

    async def read(self, *numbers: int, seconds: float = WAIT_SECONDS) -> dict[int, Chunk]:
        """Reads chunks from disk; those that came, each looked at byte by byte."""
        came: dict[int, Chunk] = {}
        fingerprint = self.chunks.spec.fingerprint
        await self.disk.reader.read(
            fingerprint, chunk_keys(*numbers), seconds, lambda at, chunk: came.update({numbers[at]: chunk})
        )
        for number, chunk in came.items():
            found = bytes(self.pool.buffer[chunk.offset : chunk.offset + chunk.size_bytes])
            assert self.chunks.is_same(found, self.chunks.content(number, chunk.size_bytes))
            assert (chunk.key, chunk.fingerprint) == (chunk_key(number), fingerprint)
            assert chunk.token_count == self.chunks.token_count
            assert chunk.checksum == checksum(found)
        return came

    def check(self) -> None:
        """Nothing is left over, and all parts agree on what is stored."""
        self.tier.check()
        assert not self.tier.reserved_count
        assert not any(chunk.holds for chunk in self.tier)
        for volume in self.disk.volumes:
            volume.index.check()
        if self.disk.quotas is not None:
            self.disk.quotas.check(self.disk)
        assert {chunk.key for chunk in self.disk} == self.on_disk


@asynccontextmanager
async def host_with_disk(
    paths: Path | Sequence[Path],
    *,
    host_chunks: int = 8,
    disk_chunks: int = 32,
    quota_chunks: int = 0,
    nixl: bool = False,
    encryption: ChunkEncryption | None = None,
    codec: ChunkCodec | None = None,
    chunks: Chunks = RANDOM,
    **seconds: float,
) -> AsyncIterator[Host]:
    """A host tier and a disk tier for a number of chunks."""
    host = Host(host_chunks, chunks)
    folders = [paths] if isinstance(paths, Path) else list(paths)
    try:
        async with DiskTier(
            folders,
            disk_chunks * CHUNK_BYTES,
            host.cache,
            io=NixlFiles(Region(address=host.pool.address, size_bytes=host.pool.size_bytes)) if nixl else None,
            encryption=encryption,
            codec=codec,
            times=replace(DISK_TIMES, **seconds),
            quota_bytes=quota_chunks * CHUNK_BYTES,
        ) as disk:
            host.disk = disk
            yield host
            host.check()
    finally:
        host.pool.close()


async def flushed(host: Host) -> None:
    """Waits until everything is written."""
    async with asyncio.timeout(WAIT_SECONDS):
        await host.disk.writer.flush()


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.chunk"))
