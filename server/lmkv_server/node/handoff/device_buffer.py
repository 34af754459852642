"""The device buffers that engines have lent to this node, and the reads by which the engines' workers fill them.

Each worker lends its part. The node decides what is read where; the workers only transfer bytes
(docs/guides/disaggregated-prefill.md). `DeviceBuffers` selects the one that a handoff may use.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable

from google.protobuf.duration_pb2 import Duration

from lmkv import rpc
from lmkv.errors import BadMessage, LmkvError, Unreachable
from lmkv.spec import KvSpec
from lmkv.units import format_bytes
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.fetch.pipeline import PendingWrites
from lmkv_server.node.peers.connection import PeerConnection
from lmkv_server.node.sessions.sessions import EngineSessions

logger = logging.getLogger(__name__)

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


class DeviceBuffers:
    """The buffers of one node, by engine."""

    def __init__(
        self, engines: EngineSessions, size_bytes: int, *, verify: bool, on_close: Callable[[HostTier], None]
    ) -> None:
        """`size_bytes` is the most that an engine may lend; `on_close` is called with the tier of a closed buffer."""
        self.size_bytes = size_bytes
        self._engines = engines
        self._verify = verify
        self._on_close = on_close
        self._buffers: dict[str, DeviceBuffer] = {}

    @property
    def lent_bytes(self) -> int:
        """Bytes that handoffs may use now."""
        return sum(buffer.size_bytes for buffer in self._buffers.values() if buffer.is_complete)

    @property
    def used_bytes(self) -> int:
        """Bytes of these that are reserved or hold chunks."""
        return sum(buffer.tier.used_bytes for buffer in self._buffers.values() if buffer.is_complete)

    def lend(self, part: pb.BufferPart) -> BufferWorker:
        """Adds a worker's part. Raises `EngineNotFound`, or `BadMessage` if the part is not valid."""
        session = self._engines.session(part.engine_id)
        if not 0 < part.buffer_size_bytes <= self.size_bytes:
            raise BadMessage(
                f"a device buffer of {part.buffer_size_bytes} bytes was offered, and the node uses one of "
                f"{self.size_bytes}; 0: it takes no handoffs, or all into its pool",
                field="buffer_size_bytes",
            )
        if part.engine_id not in self._buffers:
            self._buffers[part.engine_id] = DeviceBuffer(
                session.worker_count, part.buffer_size_bytes, verify=self._verify
            )
        buffer = self._buffers[part.engine_id]
        worker = buffer.lend(part.rank, part.buffer_size_bytes)
        if buffer.is_complete:
            logger.info(
                "engine %s has lent a device buffer of %s for handoffs", part.engine_id, format_bytes(buffer.size_bytes)
            )
        return worker

    def find(self, spec: KvSpec) -> DeviceBuffer | None:
        """The buffer for prompts of this spec.

        None if several engines have the spec: the engine that the prompt's request will be sent to is not known yet.
        """
        sessions = self._engines.attached(spec.fingerprint)
        buffer = self._buffers.get(sessions[0].engine_id) if len(sessions) == 1 else None
        return buffer if buffer and buffer.is_complete else None

    def tier_of(self, engine_id: str) -> HostTier | None:
        """The tier of the engine's buffer, if it has lent one."""
        buffer = self._buffers.get(engine_id)
        return buffer.tier if buffer else None

    def with_tier(self, tier: HostTier) -> DeviceBuffer | None:
        """The buffer that has this tier; None: it is the node's own."""
        return next((buffer for buffer in self._buffers.values() if buffer.tier is tier), None)

    def close(self, buffer: DeviceBuffer) -> None:
        """Closes a buffer: one of its workers has disconnected. Idempotent."""
        if not buffer.closed:
            buffer.close()
            self._on_close(buffer.tier)

    def remove(self, engine_id: str) -> None:
        """Closes and removes the buffer of an engine that has detached. Idempotent."""
        if buffer := self._buffers.get(engine_id):
            self.close(buffer)
            del self._buffers[engine_id]
