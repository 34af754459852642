"""One engine's device buffer, lent by its workers: which chunks lie in it, and the reads that bring them.

For `Receiver`. The node keeps its book; the workers only move bytes (docs/prefill-decode.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from google.protobuf.duration_pb2 import Duration

from lmkv.errors import BadMessage, Unreachable
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.fetch.inflight import Incoming, PendingWrites
from lmkv_server.node.handoff.buffer_read import BufferRead
from lmkv_server.node.peers.connection import PeerConnection

REGION = 1
"""What extents in it have as their region."""
MAX_ORDERS = 1024
"""Reads that may wait for a worker's stream; more of them mean that the worker is stuck."""
ANSWER_SECONDS = 1.0
"""A worker says so much later, at the latest, that the time for a read was up."""


class Part:
    """One worker's part, and the stream that lends it."""

    def __init__(self, buffer: DeviceBuffer, rank: int) -> None:
        self.buffer = buffer
        self.rank = rank
        self._orders: asyncio.Queue[pb.BufferRead | None] = asyncio.Queue(MAX_ORDERS + 1)

    def put(self, order: pb.BufferRead) -> None:
        """Has the worker read. Raises `Unreachable` if it has stopped to listen."""
        if self._orders.qsize() >= MAX_ORDERS:
            raise Unreachable(f"worker {self.rank} takes no orders")
        self._orders.put_nowait(order)

    async def take(self) -> pb.BufferRead | None:
        """The next order; None at the end."""
        return await self._orders.get()

    async def listen(self, rest: AsyncIterator[pb.LendRequest]) -> None:
        """Takes in what the worker says until it ends the stream. Raises `BadMessage` if that makes no sense."""
        async for message in rest:
            if message.HasField("part"):
                raise BadMessage("part may come only once")
            for result in message.results:
                self.buffer.told(self.rank, result)

    def end(self) -> None:
        """No order comes any more."""
        self._orders.put_nowait(None)


class DeviceBuffer:
    """The buffer. `tier` is its book: only handoffs and the loads that follow them look into it.

    What was handed over stays in it until room is needed: a prompt that is handed over again is not sent again.
    """

    def __init__(self, worker_count: int, size_bytes: int, *, verify: bool) -> None:
        self.tier = HostTier(size_bytes, region=REGION)
        self.size_bytes = size_bytes
        self.closed = False
        self._worker_count = worker_count
        self._verify = verify
        self._parts: dict[int, Part] = {}
        self._reads: dict[int, BufferRead] = {}
        self._serial = 0

    @property
    def is_whole(self) -> bool:
        """Whether every worker has lent its part."""
        return not self.closed and len(self._parts) == self._worker_count

    def lend(self, rank: int, size_bytes: int) -> Part:
        """Takes one worker's part. Raises `BadMessage` if the engine has no such worker, or workers disagree."""
        if self.closed or rank in self._parts:
            raise BadMessage(f"rank {rank} has lent its part of the device buffer before", field="rank")
        if not 0 <= rank < self._worker_count:
            raise BadMessage(f"rank {rank} is none of the engine's {self._worker_count}", field="rank")
        if size_bytes != self.size_bytes:
            raise BadMessage(
                f"the buffer has {self.size_bytes} bytes for the others, {size_bytes} for rank {rank}",
                field="buffer_size_bytes",
            )
        self._parts[rank] = Part(self, rank)
        return self._parts[rank]

    async def read(
        self, connection: PeerConnection, incoming: Sequence[Incoming], landing: PendingWrites, timeout_seconds: float
    ) -> list[int] | None:
        """As `Peers.read`: has the workers read chunks into what was reserved for them here."""
        stopped = landing.write()
        if not self.is_whole:
            stopped()
            raise Unreachable("the engine has taken its device buffer back")
        self._serial += 1
        order = pb.BufferRead(
            read_id=self._serial,
            peer_name=connection.name,
            channel_metadata=connection.nixl_metadata,
            copies=[
                pb.BufferCopy(
                    remote_address=chunk.remote_address, offset=chunk.reserved.offset, size_bytes=chunk.size_bytes
                )
                for chunk in incoming
            ],
            timeout=Duration(seconds=int(timeout_seconds), nanos=int(timeout_seconds % 1 * 1e9)),
            summed=self._verify,
        )
        read = BufferRead(self._parts, len(incoming) if self._verify else 0, stopped)
        self._reads[order.read_id] = read
        try:
            for part in self._parts.values():
                part.put(order)
            async with asyncio.timeout(timeout_seconds + ANSWER_SECONDS):
                sums = await read.outcome
        except TimeoutError:
            raise Unreachable(
                f"the engine did not read from {connection.name} within {timeout_seconds:.3g} s",
                peer=connection.name,
                quarantined=True,
            ) from None
        return sums if self._verify else None

    def told(self, rank: int, result: pb.BufferReadResult) -> None:
        """A worker says how a read went. Raises `BadMessage` if there is no such read, or that makes no sense."""
        read = self._reads.get(result.read_id)
        if read is None:
            raise BadMessage(f"no read has the id {result.read_id}", field="read_id")
        read.told(rank, result)
        if read.stopped:
            del self._reads[result.read_id]

    def close(self) -> None:
        """A worker is gone, or the engine: ends every read and every stream. Idempotent."""
        if self.closed:
            return
        self.closed = True
        for read in self._reads.values():
            read.fail(Unreachable("the engine has taken its device buffer back"))
            read.stop()
        self._reads.clear()
        for part in self._parts.values():
            part.end()
