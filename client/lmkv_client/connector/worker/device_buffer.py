"""One rank's part of the engine's device buffer: memory on the pages' device that handoffs are read into.

The node addresses whole chunks in one buffer. Each rank has that buffer shrunk to its own heads:

    whole chunk   [layer 0: head 0 │ head 1 │ head 2 │ head 3][layer 1: head 0 │ ...
    rank 1 of 2              [layer 0: head 2 │ head 3][layer 1: head 2 │ head 3]...
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import torch
from numpy.typing import NDArray

from lmkv import rpc
from lmkv.errors import LmkvError, Unreachable
from lmkv.transfer.channel import Channel, Copy, Region
from lmkv.transfer.nixl.channel import NixlChannel
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1 import engine_service_pb2_grpc
from lmkv_client.connector.vllm_api import init_logger
from lmkv_client.engine.attachment import Attachment
from lmkv_client.processors import use_processors
from lmkv_kernels import ChunkCopy, Pages

HALF = 0xFFFF_FFFF
LOW_FACTOR, HIGH_FACTOR = 0x9E37_79B1, 0x85EB_CA77
SLICE_WORDS = 1 << 20
"""Words summed at a time; each temporarily takes about 64 bytes of device memory."""


def word_sums(words: torch.Tensor, first_words: torch.Tensor) -> int:
    """The sum over `words`, `[runs, words of a run]` of int64, modulo 2^64.

    `first_words`, `[runs]` on the same device, has the index in the chunk of each run's first word.
    """
    run_count, run_words = words.shape
    rows = max(1, SLICE_WORDS // run_words)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for row in range(0, run_count, rows):
        for start in range(0, run_words, SLICE_WORDS):
            part = words[row : row + rows, start : start + SLICE_WORDS]
            inside = torch.arange(start + 1, start + 1 + part.shape[1], device=words.device)
            total += _sum(part, first_words[row : row + rows, None] + inside)
    return int(total) % 2**64


def _sum(words: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The sum of some words by their positions, counted from 1. Integers wrap around, on every device."""
    positions = positions & HALF
    low = (words + positions * LOW_FACTOR) & HALF  # only the low half of anything counts
    high = ((words >> 32) + positions * HIGH_FACTOR) & HALF
    return (words + low * high).sum()


STEP_BYTES = 4096
"""Offsets in the whole buffer are multiples of this."""
PIECE_BYTES = 16
"""Offsets in a part must be multiples of this, which kernels move at once."""
WORD_BYTES = 8


class DeviceBufferPart:
    """The part: memory of the device that the pages are on, or of the host where they are there.

    Raises `ValueError` if the buffer cannot be shrunk so, and `RuntimeError` if there is no memory for it.
    """

    def __init__(self, pages: Pages, buffer_size_bytes: int) -> None:
        """`buffer_size_bytes` is the size of the whole buffer."""
        self.pages = replace(pages, first_head=0, kv_head_count=pages.head_count)
        """The rank's pages, as if the model had no other heads."""
        self._heads, self._all_heads, self._first_head = pages.head_count, pages.kv_head_count, pages.first_head
        self._layer_count = len(pages.layer_addresses)
        if STEP_BYTES * self._heads % (self._all_heads * PIECE_BYTES):
            raise ValueError(f"a buffer cannot be shrunk evenly to {self._heads} of {self._all_heads} heads")
        self.buffer_size_bytes = buffer_size_bytes // STEP_BYTES * STEP_BYTES
        self.size_bytes = self._shrunk(self.buffer_size_bytes)
        self.tensor = torch.empty(self.size_bytes, dtype=torch.uint8, device=pages.device)
        make_stream: Any = torch.cuda.Stream  # has no types
        self._stream = make_stream(self.tensor.device) if self.tensor.is_cuda else None

    @property
    def device_address(self) -> int:
        """Returns the device's address of the first byte."""
        return self.tensor.data_ptr()

    @property
    def host_address(self) -> int:
        """As `device_address`: the buffer is not copied to the host."""
        return self.device_address

    @property
    def region(self) -> Region:
        """Its memory, as channels see it."""
        device = self.tensor.device.index if self.tensor.is_cuda else None
        return Region(address=self.device_address, size_bytes=self.size_bytes, device=device)

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """Its memory, where that is host memory."""
        return self.tensor.numpy()

    def prepare_thread(self) -> None:
        """Makes its device the calling thread's."""
        if self.tensor.is_cuda:
            torch.cuda.set_device(self.tensor.device)

    def shrunk(self, copies: Sequence[ChunkCopy]) -> list[ChunkCopy]:
        """Copies out of the whole buffer, as copies out of this part."""
        return [replace(copy, offset=self._shrunk(copy.offset)) for copy in copies]

    def reads(self, chunks: Sequence[pb.BufferCopy]) -> list[Copy]:
        """Returns the spans of whole chunks that are to be read: the rank's heads of each layer."""
        copies = []
        for chunk in chunks:
            layer_bytes = chunk.size_bytes // self._layer_count
            skipped, run = layer_bytes * self._first_head // self._all_heads, self._shrunk(layer_bytes)
            target = self.device_address + self._shrunk(chunk.offset)
            copies += [
                Copy(
                    remote_address=chunk.remote_address + layer * layer_bytes + skipped,
                    local_address=target + layer * run,
                    size_bytes=run,
                )
                for layer in range(self._layer_count)
            ]
        return copies

    def checksums(self, chunks: Sequence[pb.BufferCopy]) -> list[int]:
        """Returns the sums that the rank's words, as they are now, add to chunks' checksums. Waits for the device."""
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            return [self._checksum(chunk) for chunk in chunks]

    def _checksum(self, chunk: pb.BufferCopy) -> int:
        start, size_bytes = self._shrunk(chunk.offset), self._shrunk(chunk.size_bytes)
        words = self.tensor[start : start + size_bytes].view(torch.int64).view(self._layer_count, -1)
        layer_words = chunk.size_bytes // self._layer_count // WORD_BYTES
        first_words = torch.arange(self._layer_count, device=words.device) * layer_words
        return word_sums(words, first_words + layer_words * self._first_head // self._all_heads)

    def _shrunk(self, size_bytes: int) -> int:
        return size_bytes * self._heads // self._all_heads


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
        """`sums` is false for a rank whose heads another rank sums."""
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


logger = init_logger("vllm.lmkv")

CLOSE_SECONDS = 5.0


class BufferAgent:
    """A thread with an event loop, from an attachment until `close` or the end of the node.

    The node decides what is read. A failure fails a read at the node and nothing else; without the buffer, handoffs go
    through the node's pool.
    """

    def __init__(
        self,
        attachment: Attachment,
        rank: int,
        pages: Pages,
        *,
        sums: bool = True,
        nixl_backends: tuple[str, ...] = ("UCX",),
    ) -> None:
        """`sums` is false for a rank whose heads another rank sums."""
        self.buffer: DeviceBufferPart | None = None
        """The part, once it can be read into. Its memory stays valid after the end, for planned loads."""
        self._attachment = attachment
        self._rank = rank
        self._pages = pages
        self._sums = sums
        self._nixl_backends = nixl_backends
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="lmkv-lend", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the stream: nothing is read into the part any more. Idempotent."""
        with suppress(RuntimeError):  # its loop has ended
            self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(CLOSE_SECONDS)

    def _stop(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()

    def _run(self) -> None:
        use_processors()
        asyncio.set_event_loop(self._loop)
        try:
            with suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._lend())
        except (LmkvError, ValueError, RuntimeError) as error:
            logger.warning("handoffs go through the node's pool, not to the device: %s", error)
        except Exception:
            logger.exception("lending the device buffer failed unexpectedly")
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    async def _lend(self) -> None:
        """Runs until the stream ends, and raises why."""
        buffer = DeviceBufferPart(self._pages, self._attachment.device_buffer_bytes)
        name = f"{self._attachment.engine_id}/{self._rank}"
        nixl = await asyncio.to_thread(NixlChannel, name, buffer.region, self._nixl_backends, buffer.prepare_thread)
        self.buffer = buffer
        try:
            async with rpc.open_channel(self._attachment.node_address) as channel:
                await self._serve(channel, nixl, buffer)
        finally:
            await nixl.aclose()

    async def _serve(self, channel: grpc.aio.Channel, nixl: NixlChannel, buffer: DeviceBufferPart) -> None:
        results: asyncio.Queue[pb.BufferReadResult] = asyncio.Queue()  # bounded by the node's reads
        reads = BufferReads(nixl, buffer, results.put_nowait, sums=self._sums)
        call: Any = engine_service_pb2_grpc.EngineServiceStub(channel).Lend()  # type: ignore[call-arg]
        part = pb.BufferPart(
            engine_id=self._attachment.engine_id, rank=self._rank, buffer_size_bytes=buffer.buffer_size_bytes
        )
        tasks = {asyncio.create_task(send_results(call, results))}
        try:
            await call.write(pb.LendRequest(part=part))
            while isinstance(message := await call.read(), pb.LendResponse):
                for order in message.reads:
                    task = asyncio.create_task(reads.execute(order))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
            raise Unreachable(f"the node does not accept the device buffer any more: {(await call.code()).name}")
        except grpc.RpcError as error:
            raise rpc.from_rpc_error(error) from None
        except asyncio.InvalidStateError:
            raise Unreachable("the node has ended the stream") from None
        finally:
            call.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            reads.close()


async def send_results(call: Any, results: asyncio.Queue[pb.BufferReadResult]) -> None:
    """Sends the results of reads to the node, in order."""
    while True:
        await call.write(pb.LendRequest(results=[await results.get()]))
