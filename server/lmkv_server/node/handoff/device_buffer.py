"""One engine's device buffer: the chunks in it, and the reads by which the engine's workers fill it.

Each worker lends its part. The node decides what is read where; the workers only transfer bytes
(docs/guides/disaggregated-prefill.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable

from google.protobuf.duration_pb2 import Duration

from lmkv import rpc
from lmkv.errors import BadMessage, LmkvError, Unreachable
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.fetch.pending_writes import PendingWrites
from lmkv_server.node.peers.connection import PeerConnection

REGION = 1
"""The region of extents in the buffer."""
MAX_WAITING_READS = 1024
"""Reads that may wait for a worker's stream; with more of them the worker counts as stuck."""
ANSWER_SECONDS = 1.0
"""A worker reports the timeout of a read at most this much later."""
CHECKSUM_MODULUS = 1 << 64


class WorkerRead:
    """One read, by all workers of the engine: it is done when all of them are, and failed when one of them has."""

    def __init__(self, ranks: Iterable[int], chunk_count: int, on_stopped: Callable[[], None]) -> None:
        """`on_stopped` is called once, when no worker can receive any more bytes of it."""
        self.outcome: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        """The checksum of each chunk: the sum of the workers' checksums."""
        self._reading = set(ranks)
        self._writing = set(self._reading)
        self._checksums = [0] * chunk_count
        self._on_stopped = on_stopped

    @property
    def stopped(self) -> bool:
        """Whether no more bytes can arrive."""
        return not self._writing

    def report(self, rank: int, result: pb.BufferReadResult) -> None:
        """Takes one worker's result. Raises `BadMessage` if it is not a valid one."""
        if rank in self._reading:
            self._reading.discard(rank)
            if result.HasField("status"):
                self.fail(rpc.from_status(result.status))
            elif len(result.checksums) != len(self._checksums) or not result.stopped:
                raise BadMessage("a completed read has a checksum per chunk, and has stopped", field="checksums")
            self._checksums = [
                (own + more) % CHECKSUM_MODULUS
                for own, more in zip(self._checksums, result.checksums or self._checksums, strict=True)
            ]
        if result.stopped and rank in self._writing:
            self._writing.discard(rank)
            if not self._writing:
                self._on_stopped()
        if not self._reading and not self.outcome.done():
            self.outcome.set_result(self._checksums)

    def fail(self, error: LmkvError) -> None:
        """Fails the read, though bytes may still arrive."""
        if not self.outcome.done():
            self.outcome.set_exception(error)
            self.outcome.exception()  # its caller may have been cancelled

    def stop(self) -> None:
        """Counts the read as stopped: the buffer is not used any more, so bytes that still arrive do no harm."""
        if self._writing:
            self._writing.clear()
            self._on_stopped()


class BufferWorker:
    """One worker that lends its part of the buffer, and its stream of reads."""

    def __init__(self, buffer: DeviceBuffer, rank: int) -> None:
        self.buffer = buffer
        self.rank = rank
        self._reads: asyncio.Queue[pb.BufferRead | None] = asyncio.Queue(MAX_WAITING_READS + 1)

    def put(self, read: pb.BufferRead) -> None:
        """Sends a read to the worker. Raises `Unreachable` if the worker does not take any."""
        if self._reads.qsize() >= MAX_WAITING_READS:
            raise Unreachable(f"worker {self.rank} does not take reads")
        self._reads.put_nowait(read)

    async def take(self) -> pb.BufferRead | None:
        """The next read; None: there are no more."""
        return await self._reads.get()

    async def receive(self, messages: AsyncIterator[pb.LendRequest]) -> None:
        """Takes the worker's results until it ends the stream. Raises `BadMessage` if one is not valid."""
        async for message in messages:
            if message.HasField("part"):
                raise BadMessage("part may come only once")
            for result in message.results:
                self.buffer.report(self.rank, result)

    def end(self) -> None:
        """Ends the stream."""
        self._reads.put_nowait(None)


class DeviceBuffer:
    """The buffer. Its `tier` has the chunks, which only handoffs and the loads after them use.

    They stay in it until room is needed: a prompt that is handed off again is not sent again.
    """

    def __init__(self, worker_count: int, size_bytes: int, *, verify: bool) -> None:
        self.tier = HostTier(size_bytes, region=REGION)
        self.size_bytes = size_bytes
        self.closed = False
        self._worker_count = worker_count
        self._verify = verify
        self._workers: dict[int, BufferWorker] = {}
        self._reads: dict[int, WorkerRead] = {}
        self._last_read_id = 0

    @property
    def is_complete(self) -> bool:
        """Whether every worker has lent its part."""
        return not self.closed and len(self._workers) == self._worker_count

    def lend(self, rank: int, size_bytes: int) -> BufferWorker:
        """Adds one worker's part. Raises `BadMessage` if the engine has no such worker, or the sizes differ."""
        if self.closed or rank in self._workers:
            raise BadMessage(f"rank {rank} has lent its part of the device buffer before", field="rank")
        if not 0 <= rank < self._worker_count:
            raise BadMessage(f"rank {rank} is not one of the engine's {self._worker_count}", field="rank")
        if size_bytes != self.size_bytes:
            raise BadMessage(
                f"the buffer has {self.size_bytes} bytes for the others, {size_bytes} for rank {rank}",
                field="buffer_size_bytes",
            )
        self._workers[rank] = BufferWorker(self, rank)
        return self._workers[rank]

    async def read(self, connection: PeerConnection, writes: PendingWrites, timeout_seconds: float) -> list[int] | None:
        """Has the workers read chunks into the buffer; their checksums, if they are verified.

        Raises `Unreachable` if the buffer is closed or the workers do not answer in time, and the error of a worker.
        """
        stopped = writes.begin()
        if not self.is_complete:
            stopped()
            raise Unreachable("the engine's device buffer is closed")
        self._last_read_id += 1
        request = pb.BufferRead(
            read_id=self._last_read_id,
            peer_name=connection.name,
            channel_metadata=connection.nixl_metadata,
            copies=[
                pb.BufferCopy(
                    remote_address=chunk.remote.address,
                    offset=chunk.reserved.offset,
                    size_bytes=chunk.remote.size_bytes,
                )
                for chunk in writes.chunks
            ],
            timeout=Duration(seconds=int(timeout_seconds), nanos=int(timeout_seconds % 1 * 1e9)),
            summed=self._verify,
        )
        read = WorkerRead(self._workers, len(writes.chunks) if self._verify else 0, stopped)
        self._reads[request.read_id] = read
        try:
            for worker in self._workers.values():
                worker.put(request)
            async with asyncio.timeout(timeout_seconds + ANSWER_SECONDS):
                checksums = await read.outcome
        except TimeoutError:
            raise Unreachable(
                f"the engine did not read from {connection.name} within {timeout_seconds:.3g} s",
                peer=connection.name,
                quarantined=True,
            ) from None
        return checksums if self._verify else None

    def report(self, rank: int, result: pb.BufferReadResult) -> None:
        """Takes a worker's result of a read. Raises `BadMessage` if there is no such read, or the result is invalid."""
        read = self._reads.get(result.read_id)
        if read is None:
            raise BadMessage(f"no read has the id {result.read_id}", field="read_id")
        read.report(rank, result)
        if read.stopped:
            del self._reads[result.read_id]

    def close(self) -> None:
        """Ends every read and every stream: a worker has disconnected, or the engine. Idempotent."""
        if self.closed:
            return
        self.closed = True
        for read in self._reads.values():
            read.fail(Unreachable("the engine's device buffer is closed"))
            read.stop()
        self._reads.clear()
        for worker in self._workers.values():
            worker.end()
