"""Encoded copies of chunks in the pool, which peers read in place of the chunks (docs/guides/codecs.md).

Of granted chunks, and of those of handoffs, if the reader has named the codec.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from lmkv.misses import MissReason
from lmkv.pool.pool import Pool
from lmkv.v1 import chunk_pb2
from lmkv_kernels import checksum
from lmkv_server.node.cache.allocator import ALIGNMENT, align
from lmkv_server.node.cache.host import Chunk, HostTier, Reservation
from lmkv_server.node.tiers.codec import ChunkCodec, most_encoded_bytes

COPIES_SHARE = 8
"""Encoded copies take at most 1/8 of the pool; chunks beyond that are read as they are."""
THREADS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedCopy:
    """The encoded bytes of one chunk, in an extent that is reserved for them."""

    offset: int
    size_bytes: int
    checksum: int


class EncodedCopies:
    """Makes and releases encoded copies. One event loop owns it. It ends by `aclose`."""

    def __init__(self, tier: HostTier, pool: Pool, codec: ChunkCodec | None) -> None:
        """Without a `codec` nothing is encoded."""
        self.scope = codec.scope if codec else ""
        """The codec and its parameters; empty: none."""
        self._codec = codec
        self._tier = tier
        self._pool = pool
        self._used_bytes = 0
        self._threads = ThreadPoolExecutor(THREADS, "lmkv-encode")

    @property
    def used_bytes(self) -> int:
        """Bytes of the pool that copies take."""
        return self._used_bytes

    async def aclose(self) -> None:
        """Ends the threads. Every copy must have been released. Idempotent."""
        await asyncio.to_thread(self._threads.shutdown)

    async def make(self, chunks: Sequence[Chunk], codec: str) -> dict[Chunk, EncodedCopy]:
        """Encodes chunks, which the caller holds, but for those for which there is no room, or that gain nothing. None
        if the `codec` that the reader names is not this one.

        The caller releases the copies. Cancelled, it ends when no thread reads or writes the pool any more.
        """
        if not codec or codec != self.scope:
            return {}
        work = [(chunk, extent) for chunk in chunks if (extent := self._reserve(chunk)) is not None]
        loop = asyncio.get_running_loop()
        runs = [loop.run_in_executor(self._threads, self._encode, chunk, extent) for chunk, extent in work]
        try:
            encoded = await asyncio.shield(asyncio.gather(*runs))
        except BaseException:
            if runs:
                await asyncio.wait(runs)
            for _, extent in work:
                self._release(extent.offset, extent.size_bytes)
            raise
        copies = {chunk: self._shrunk(extent, *result) for (chunk, extent), result in zip(work, encoded, strict=True)}
        return {chunk: copy for chunk, copy in copies.items() if copy is not None}

    def release(self, copies: Iterable[EncodedCopy]) -> None:
        """Frees the memory of copies that no reader may use any more."""
        for copy in copies:
            self._release(copy.offset, align(copy.size_bytes))

    def _reserve(self, chunk: Chunk) -> Reservation | None:
        size_bytes = most_encoded_bytes(chunk.size_bytes)
        if self._used_bytes + size_bytes > self._tier.size_bytes // COPIES_SHARE:
            return None
        reserved = self._tier.reserve(size_bytes, evict=MissReason.EVICTED_BY_FETCH)
        self._used_bytes += reserved.size_bytes if reserved else 0
        return reserved

    def _encode(self, chunk: Chunk, extent: Reservation) -> tuple[int, int]:
        """Encodes on a thread; returns the bytes that it took, and their checksum."""
        assert self._codec is not None
        memory = self._pool.buffer[chunk.offset : chunk.offset + chunk.size_bytes]
        pages, encoded_bytes = self._codec.encode(chunk, memory)
        self._pool.buffer[extent.offset : extent.offset + encoded_bytes] = pages[:encoded_bytes]
        return encoded_bytes, checksum(self._pool.buffer, extent.offset, encoded_bytes)

    def _shrunk(self, extent: Reservation, encoded_bytes: int, total: int) -> EncodedCopy | None:
        """The copy in an extent of its own size, at the same place; None if it takes as much as the chunk."""
        self._release(extent.offset, extent.size_bytes)
        if encoded_bytes > extent.size_bytes - ALIGNMENT:
            return None
        kept = self._tier.reserve_at(extent.offset, encoded_bytes)
        if kept is None:  # the pool's memory ends before it by now
            return None
        self._used_bytes += kept.size_bytes
        return EncodedCopy(offset=extent.offset, size_bytes=encoded_bytes, checksum=total)

    def _release(self, offset: int, size_bytes: int) -> None:
        self._used_bytes -= size_bytes
        self._tier.give_back(offset)


def offer_copies(
    messages: Iterable[chunk_pb2.GrantedChunk], chunks: Iterable[Chunk], copies: Mapping[Chunk, EncodedCopy]
) -> None:
    """Changes the messages of chunks that have copies: the reader is to read these."""
    for message, chunk in zip(messages, chunks, strict=True):
        if copy := copies.get(chunk):
            message.extent.offset, message.extent.size_bytes = copy.offset, copy.size_bytes
            message.checksum, message.decoded_bytes = copy.checksum, chunk.size_bytes
