"""Reads from peers into one rank's part of the device buffer. Used by `BufferAgent`."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from lmkv import rpc
from lmkv.errors import LmkvError
from lmkv.transfer.channel import Channel
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client.connector.worker.device_buffer_part import DeviceBufferPart

MAX_PEERS = 64
"""Most connected peers; beyond these the least recently used one is disconnected."""


class BufferReads:
    """Each read ends with one result, or with two if bytes may still arrive after it has failed."""

    def __init__(
        self,
        channel: Channel,
        buffer: DeviceBufferPart,
        report: Callable[[pb.BufferReadResult], None],
        *,
        sums: bool,
    ) -> None:
        """`sums` is false for a rank whose heads another one sums."""
        self._channel = channel
        self._buffer = buffer
        self._report = report
        self._sums = sums
        self._peers: OrderedDict[str, None] = OrderedDict()  # least recently used first
        self._summer = ThreadPoolExecutor(1, "lmkv-sums", initializer=buffer.prepare_thread)

    def close(self) -> None:
        """Ends its thread. Idempotent."""
        self._summer.shutdown()

    async def execute(self, order: pb.BufferRead) -> None:
        """Reads, computes checksums, and reports the result. Raises nothing."""
        stopped = asyncio.Event()
        try:
            checksums = await self._read(order, stopped)
        except (LmkvError, RuntimeError) as error:
            refusal = error if isinstance(error, LmkvError) else LmkvError(f"the device failed: {error}")
            failed = pb.BufferReadResult(read_id=order.read_id, status=rpc.to_status(refusal))
            failed.stopped = stopped.is_set()
            self._report(failed)
            if not failed.stopped:
                await stopped.wait()  # however long; the end of the lending ends it too
                self._report(pb.BufferReadResult(read_id=order.read_id, stopped=True))
        else:
            self._report(pb.BufferReadResult(read_id=order.read_id, checksums=checksums, stopped=True))

    async def _read(self, order: pb.BufferRead, stopped: asyncio.Event) -> list[int]:
        try:
            await self._connect(order.peer_name, order.channel_metadata)
        except LmkvError:
            stopped.set()  # it has not begun
            raise
        copies = self._buffer.reads(order.copies)
        await self._channel.read(order.peer_name, copies, order.timeout.ToNanoseconds() / 1e9, stopped.set)
        if not order.summed:
            return []
        if not self._sums:
            return [0] * len(order.copies)
        return await asyncio.get_running_loop().run_in_executor(self._summer, self._buffer.checksums, order.copies)

    async def _connect(self, peer_name: str, metadata: bytes) -> None:
        await self._channel.add_peer(peer_name, metadata)
        self._peers[peer_name] = None
        self._peers.move_to_end(peer_name)
        if len(self._peers) > MAX_PEERS:
            await self._channel.remove_peer(self._peers.popitem(last=False)[0])
