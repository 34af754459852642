"""Moves chunks from a peer's memory into this node's, for fetches and for handoffs.

reserve ──► read ──► verify ──► commit         Several reads run at a time: while one batch is verified, the next ones
  reserve ──► read ──► verify ──► commit       are being read.
    reserve ──► read ──► ...
                  └── damaged, failed or cancelled: released, or in quarantine until the read has stopped
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from lmkv.errors import LmkvError
from lmkv.keys import ChunkKey
from lmkv.pool.pool import Pool
from lmkv.spec import KvSpec
from lmkv.transfer import Channels, Copy
from lmkv_kernels import checksum
from lmkv_server.node.cache.host import UNKNOWN_ORIGIN, Chunk, HostTier, Reservation
from lmkv_server.node.peers.connection import PeerChunk, PeerConnection
from lmkv_server.node.tiers.codec import ChunkCodec
from lmkv_server.node.tiers.threads import ThreadBuffer

logger = logging.getLogger(__name__)

SHM = "shm"


@dataclass(frozen=True, kw_only=True, slots=True)
class IncomingChunk:
    """A chunk in a peer's memory, and the extent that it is read into; what is encoded is decoded in place."""

    remote: PeerChunk
    reserved: Reservation


class PendingWrites:
    """The reserved extents of one batch. Each is committed, or released once no transfer can write to it any more."""

    def __init__(self, tier: HostTier, quarantine: set[PendingWrites] | None = None) -> None:
        """`tier` has the extents: the node's tier, or that of a device buffer. `quarantine` has this while
        `is_quarantined`."""
        self.chunks: list[IncomingChunk] = []
        self.peer: PeerConnection | None = None
        """The peer whose chunks are read, once that has begun."""
        self._tier = tier
        self._quarantine = quarantine if quarantine is not None else set()
        self._open: dict[int, Reservation] = {}  # by offset: neither committed nor released
        self._is_writing = False
        self._is_closed = False

    @property
    def is_quarantined(self) -> bool:
        """Whether extents stay reserved only because a transfer has not stopped."""
        return self._is_closed and self._is_writing

    @property
    def open_bytes(self) -> int:
        """Bytes of the extents that are neither committed nor released."""
        return sum(reserved.size_bytes for reserved in self._open.values())

    def add(self, remote: PeerChunk, reserved: Reservation) -> IncomingChunk:
        """Takes ownership of an extent that was reserved for this chunk."""
        chunk = IncomingChunk(remote=remote, reserved=reserved)
        self.chunks.append(chunk)
        self._open[reserved.offset] = reserved
        return chunk

    def begin(self) -> Callable[[], None]:
        """Marks the start of a transfer; the caller calls the result when the transfer has stopped."""
        self._is_writing = True
        return self._stopped

    def commit(
        self,
        key: ChunkKey,
        parent: ChunkKey | None,
        fingerprint: bytes,
        chunk: IncomingChunk,
        decoded_checksum: int | None = None,
    ) -> Chunk | None:
        """Makes an intact chunk visible. The chunk of that key in the tier, if another transfer committed it first.

        `decoded_checksum` is that of a chunk that was encoded.
        """
        remote = chunk.remote
        self._open.pop(chunk.reserved.offset, None)
        intact = Chunk(
            key=key,
            fingerprint=fingerprint,
            offset=chunk.reserved.offset,
            size_bytes=remote.size_bytes,
            checksum=remote.checksum if decoded_checksum is None else decoded_checksum,
            token_count=remote.token_count,
            parent=parent,
            prefix_digests=remote.prefix_digests,
            origin=self.peer.origin(fingerprint) if self.peer else UNKNOWN_ORIGIN,
        )
        return self._tier.commit(intact) or self._tier.get(key)

    def close(self) -> None:
        """Releases what was not committed: now, or when the transfer has stopped."""
        self._is_closed = True
        if self._is_writing:
            self._quarantine.add(self)
        else:
            self._release()

    def _stopped(self) -> None:
        self._is_writing = False
        self._quarantine.discard(self)
        if self._is_closed:
            self._release()

    def _release(self) -> None:
        for offset in self._open:
            self._tier.give_back(offset)
        self._open.clear()


THREADS = 2
"""Each compares half of a batch, which halves the time after the last read."""


class ChecksumVerifier:
    """Finds chunks whose bytes are not what their owner committed. One event loop owns it. It ends by `aclose`."""

    def __init__(self, pool: Pool, *, enabled: bool, codec: ChunkCodec | None = None) -> None:
        """`codec` is that of chunks that arrive encoded."""
        self.enabled = enabled
        """Whether checksums are compared; otherwise every chunk counts as intact."""
        self._pool = pool
        self._codec = codec
        self._encoded = ThreadBuffer()
        self._threads = ThreadPoolExecutor(THREADS, "lmkv-verify")

    async def aclose(self) -> None:
        """Waits for running comparisons. Idempotent."""
        await asyncio.to_thread(self._threads.shutdown)

    async def intact(self, chunks: Sequence[IncomingChunk], checksums: Sequence[int] | None) -> list[bool]:
        """Compares chunks with their checksums. `checksums` are those of the read bytes, if they are known."""
        if not self.enabled or not chunks:
            return [True] * len(chunks)
        if checksums is not None:
            return [found == chunk.remote.checksum for found, chunk in zip(checksums, chunks, strict=True)]
        loop, middle = asyncio.get_running_loop(), (len(chunks) + 1) // 2
        halves = [half for half in (chunks[:middle], chunks[middle:]) if half]
        found = await asyncio.gather(*(loop.run_in_executor(self._threads, self._compare, half) for half in halves))
        return [intact for half in found for intact in half]

    def _compare(self, chunks: Sequence[IncomingChunk]) -> list[bool]:
        return [
            checksum(self._pool.buffer, chunk.reserved.offset, chunk.remote.read_bytes) == chunk.remote.checksum
            for chunk in chunks
        ]

    async def decoded(
        self, fingerprint: bytes, writes: PendingWrites, chunks: Sequence[IncomingChunk]
    ) -> list[int | None]:
        """Decodes those of the chunks, all intact, that are encoded; the checksum of each chunk, None if it is damaged.

        Their extents stay reserved until the threads have ended, also if this is cancelled.
        """
        if not any(chunk.remote.encoded_bytes for chunk in chunks):
            return [chunk.remote.checksum for chunk in chunks]
        loop, stopped = asyncio.get_running_loop(), writes.begin()
        run = asyncio.gather(
            *(loop.run_in_executor(self._threads, self._decode, fingerprint, chunk) for chunk in chunks)
        )
        run.add_done_callback(lambda _: stopped())
        return await asyncio.shield(run)

    def _decode(self, fingerprint: bytes, chunk: IncomingChunk) -> int | None:
        remote, start = chunk.remote, chunk.reserved.offset
        if not remote.encoded_bytes:
            return remote.checksum
        encoded = self._encoded.get(remote.encoded_bytes)[: remote.encoded_bytes]
        encoded[:] = self._pool.buffer[start : start + remote.encoded_bytes]
        memory = self._pool.buffer[start : start + remote.size_bytes]
        if self._codec is None or self._codec.decode(fingerprint, encoded, memory) != remote.size_bytes:
            return None
        return checksum(self._pool.buffer, start, remote.size_bytes)


MAX_TRAFFIC = 1024
"""Maximum number of peers whose traffic is counted; the peer with the fewest bytes is dropped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerTraffic:
    """Counts the transfers from one peer since the start."""

    instance_id: str
    chunk_count: int = 0
    transferred_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferStats:
    """Counts all transfers since the start."""

    chunk_count: int
    """Chunks that were read, verified and committed."""
    transferred_bytes: int
    checksum_mismatches: int
    """Chunks that were damaged on arrival, and discarded."""
    quarantined_batches: int
    """Batches whose extents are reserved now only because their transfer has not stopped."""
    quarantined_bytes: int
    """Bytes of these extents."""
    traffic: tuple[PeerTraffic, ...]


class Transfer(Protocol):
    """The work that the pipeline moves chunks for: one holder of a fetch, or one `Commit` of a handoff."""

    @property
    def tier(self) -> HostTier:
        """The tier that the chunks are committed to."""

    @property
    def keys(self) -> Sequence[ChunkKey]:
        """Keys of the prompt, which the indices of chunks refer to."""

    def parent(self, index: int) -> ChunkKey | None:
        """The key of what must not be evicted before this chunk, if that is known."""

    @property
    def fingerprint(self) -> bytes: ...

    @property
    def instance_id(self) -> str:
        """The peer."""

    @property
    def reads_ahead(self) -> int:
        """Reads that run at a time."""

    def next_batch(self) -> Sequence[PeerChunk]:
        """The chunks to read next; empty: none."""

    def reserve(self, chunk: PeerChunk) -> Reservation | None:
        """An extent for this chunk; None: no room for it and for the rest of its batch."""

    async def read(self, writes: PendingWrites) -> Sequence[int] | None:
        """Reads the chunks; their checksums, if they were computed on the way. Raises why the read failed."""

    def is_missing(self, index: int) -> bool:
        """Whether this chunk is still to be committed."""

    def commit(self, chunks: Sequence[tuple[int, Chunk]]) -> None:
        """Takes chunks that were just committed; a chunk that is not held can be evicted after this returns."""

    def reject(self, index: int) -> None:
        """Notes that this chunk was damaged on arrival."""

    def end_batch(self, indices: Sequence[int]) -> None:
        """Notes that nothing more is done for these chunks, whether or not they were committed."""


class TransferPipeline:
    """All transfers of one node from its peers. One event loop owns it. It ends by `aclose`."""

    def __init__(
        self, tier: HostTier, channels: Channels, pool: Pool, *, verify: bool = True, codec: ChunkCodec | None = None
    ) -> None:
        """`codec` is that of chunks from other hosts."""
        self.tier = tier
        """The node's tier; transfers may have another one."""
        self.verifier = ChecksumVerifier(pool, enabled=verify, codec=codec)
        self._codec = codec
        self._channels = channels
        self._pool_address = pool.address
        self._mismatch_count = 0
        self._traffic: dict[str, PeerTraffic] = {}
        self._chunk_count = 0
        self._transferred_bytes = 0
        self._quarantine: set[PendingWrites] = set()

    @property
    def prefers_nixl(self) -> bool:
        """Whether this node reads by NIXL if its peer can."""
        return self._channels.prefers("nixl")

    def codec_for(self, spec: KvSpec, channel: str) -> str:
        """The codec in which chunks of a spec are asked for over this channel; empty: as they are.

        Shared memory is faster than any codec.
        """
        codec = self._codec
        if codec is None or channel == SHM or not codec.applies_to(spec):
            return ""
        return codec.scope

    async def aclose(self) -> None:
        """Ends the threads. Transfers must have ended. Idempotent."""
        await self.verifier.aclose()

    def stats(self) -> TransferStats:
        """The counters as they are now."""
        return TransferStats(
            chunk_count=self._chunk_count,
            transferred_bytes=self._transferred_bytes,
            checksum_mismatches=self._mismatch_count,
            quarantined_batches=len(self._quarantine),
            quarantined_bytes=sum(writes.open_bytes for writes in self._quarantine),
            traffic=tuple(self._traffic.values()),
        )

    async def run(self, transfer: Transfer) -> None:
        """Moves batch after batch until the transfer has no more.

        After a failed read no other batch begins; its error is raised when those that have begun have ended. Cancelled,
        it leaves no extent reserved but those that a transfer may still write to.
        """
        ahead = asyncio.Semaphore(transfer.reads_ahead)
        failures: list[LmkvError] = []
        async with asyncio.TaskGroup() as batches:
            while True:
                await ahead.acquire()
                batch = () if failures else transfer.next_batch()
                if not batch:
                    break
                batches.create_task(self._run_batch(transfer, batch, ahead, failures))
        if failures:
            raise failures[0]

    async def read(
        self, connection: PeerConnection, writes: PendingWrites, timeout_seconds: float, grant_id: str
    ) -> list[int] | None:
        """Reads chunks into the pool under a grant of the peer; their checksums, if they were computed on the way.

        Raises `Unreachable`.
        """
        writes.peer = connection
        copies = [
            Copy(
                remote_address=chunk.remote.address,
                local_address=self._pool_address + chunk.reserved.offset,
                size_bytes=chunk.remote.read_bytes,
            )
            for chunk in writes.chunks
        ]
        return await self._channels.read(connection.name, copies, timeout_seconds, writes.begin(), grant_id)

    async def _run_batch(
        self, transfer: Transfer, batch: Sequence[PeerChunk], ahead: asyncio.Semaphore, failures: list[LmkvError]
    ) -> None:
        writes = PendingWrites(transfer.tier, self._quarantine)
        try:
            try:
                for chunk in batch:
                    if (reserved := transfer.reserve(chunk)) is None:
                        break
                    writes.add(chunk, reserved)
                checksums = await transfer.read(writes) if writes.chunks else None
            finally:
                ahead.release()
            await self._commit(transfer, writes, checksums)
        except LmkvError as error:  # the other batches are still useful
            failures.append(error)
        finally:
            transfer.end_batch([chunk.index for chunk in batch])
            writes.close()

    async def _commit(self, transfer: Transfer, writes: PendingWrites, checksums: Sequence[int] | None) -> None:
        """Commits the chunks that are intact and still missing."""
        committed: list[tuple[int, Chunk]] = []
        intact = await self.verifier.intact(writes.chunks, checksums)
        whole = [chunk for chunk, is_intact in zip(writes.chunks, intact, strict=True) if is_intact]
        sums = await self.verifier.decoded(transfer.fingerprint, writes, whole)
        found = {chunk.remote.index: total for chunk, total in zip(whole, sums, strict=True)}
        for incoming in writes.chunks:
            index = incoming.remote.index
            total = found.get(index)
            if total is None:
                self._mismatch_count += 1
                logger.warning(
                    "chunk %s from peer %s does not match its checksum and was discarded",
                    transfer.keys[index].hex(),
                    transfer.instance_id,
                )
                transfer.reject(index)
            elif transfer.is_missing(index):
                key, parent = transfer.keys[index], incoming.remote.parent or transfer.parent(index)
                if chunk := writes.commit(key, parent, transfer.fingerprint, incoming, total):
                    self._count(transfer.instance_id, incoming.remote)
                    committed.append((index, chunk))
        transfer.commit(committed)

    def _count(self, instance_id: str, chunk: PeerChunk) -> None:
        self._chunk_count += 1
        self._transferred_bytes += chunk.read_bytes
        if instance_id not in self._traffic and len(self._traffic) >= MAX_TRAFFIC:
            del self._traffic[min(self._traffic, key=lambda peer: self._traffic[peer].transferred_bytes)]
        earlier = self._traffic.get(instance_id, PeerTraffic(instance_id=instance_id))
        self._traffic[instance_id] = PeerTraffic(
            instance_id=instance_id,
            chunk_count=earlier.chunk_count + 1,
            transferred_bytes=earlier.transferred_bytes + chunk.read_bytes,
        )
