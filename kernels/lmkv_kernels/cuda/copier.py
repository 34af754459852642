"""Copies between one rank's pages on a device and the pool, on streams of their own. docs/cuda.md draws it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from contextlib import closing as _closing
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lmkv_kernels.copies import ChunkCopy, Rows, check, check_written_once
from lmkv_kernels.cuda.driver import Device, Driver, rectangle
from lmkv_kernels.cuda.launch_buffers import LaunchBuffer, LaunchBuffers
from lmkv_kernels.cuda.memory import DeviceMemory
from lmkv_kernels.cuda.program import Arguments, Operation, Program, width_of
from lmkv_kernels.cuda.staging import Batch, launch_words, make_batches, make_dma_copies
from lmkv_kernels.cuda.streams import CudaEvent, CudaStream
from lmkv_kernels.pages import Pages

STAGING_BYTES = 32 << 20
"""Of each of the two halves of a direction's staging buffer."""
DIRECT_BLOCKS = 64
"""Thread blocks of a launch that reads or writes the pool itself: enough to fill the bus, few enough to leave the model
its processors."""
BLOCKS_PER_PROCESSOR = 16
"""Of a launch that stays within the device: as many as a processor can hold."""


class CopyPath(StrEnum):
    """How bytes get between pages and pool."""

    DIRECT = "direct"
    """The kernel reads or writes the pool's pinned memory."""
    STAGED = "staged"
    """The kernel stays on the device, and DMA moves its staging buffer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyPaths:
    """The way of each direction; `lmkv_kernels.cuda.measure` finds the faster ones."""

    gather: CopyPath = CopyPath.STAGED
    scatter: CopyPath = CopyPath.STAGED


class HostMemory(Protocol):
    """Host memory that the device reaches: a `RegisteredMemory`, or `PinnedMemory`."""

    @property
    def host_address(self) -> int: ...
    @property
    def device_address(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...


class PendingCopy:
    """Copies under way. The calling thread never waits for them unless it asks to."""

    def __init__(
        self, copier: Copier, buffer: LaunchBuffer, order: Sequence[int], read: CudaEvent, end: CudaEvent
    ) -> None:
        self._copier = copier
        self._buffer: LaunchBuffer | None = buffer
        self._order = order
        self._read, self._end = read, end
        self._sums: list[int] = []

    def block_stream(self, stream: int) -> None:
        """What is put on `stream` from now on waits until all is copied."""
        with self._copier.device.current():
            if self._buffer is not None:
                self._end.block_stream(stream)

    def block_stream_until_read(self, stream: int) -> None:
        """What is put on `stream` from now on waits until nothing reads the pages any more: they may change then."""
        with self._copier.device.current():
            if self._buffer is not None:
                self._read.block_stream(stream)

    def read(self) -> bool:
        """Whether the pages may change. Raises `CudaError` if the device failed."""
        with self._copier.device.current():
            return self._buffer is None or self._read.done()

    def done(self) -> bool:
        """Whether all is copied. Raises `CudaError` if the device failed."""
        if self._buffer is None:
            return True
        with self._copier.device.current():
            if not self._end.done():
                return False
            self._finish(self._buffer)
        return True

    def wait(self) -> None:
        """Waits on the calling thread. Raises `CudaError` if the device failed."""
        if self._buffer is not None:
            with self._copier.device.current():
                self._end.wait()
                self._finish(self._buffer)

    @property
    def checksums(self) -> list[int]:
        """Of a gather that is done: per copy what its words add to its chunk's checksum, as `lmkv_kernels.gather`."""
        assert self._buffer is None, "not done yet"
        return self._sums

    def _finish(self, buffer: LaunchBuffer) -> None:
        sums = buffer.words[: len(self._order)].view(np.uint64)
        self._sums = [0] * len(self._order)
        for index, value in zip(self._order, sums.tolist(), strict=True):
            self._sums[index] = value
        self._buffer = None
        self._copier.buffers.release(buffer)
        self._read.close()
        self._end.close()


class Copier:
    """One rank's copies. Whoever makes one closes it, before its pool and its pages.

    For one thread at a time. Raises `CudaError`, from every call, if the device refuses; `ValueError`, before anything
    is begun, if a copy does not fit.
    """

    def __init__(
        self,
        device: Device,
        program: Program,
        pages: Pages,
        pool: HostMemory,
        *,
        paths: CopyPaths = CopyPaths(),  # a value
        staging_bytes: int = STAGING_BYTES,
        direct_blocks: int = DIRECT_BLOCKS,
    ) -> None:
        if not pages.device.startswith("cuda"):
            raise ValueError(f"the pages are on {pages.device}, not on a CUDA device")
        if not all(pages.is_contiguous(part) for part in pages.parts):
            raise ValueError("the pages' rows are not runs of bytes: that packing is the CPU's")
        self.device = device
        self.pages = pages
        self.paths = paths
        self._direct_blocks = direct_blocks
        self._program = program
        self._pool = pool
        with ExitStack() as stack, device.current() as driver:
            self.buffers = LaunchBuffers(driver)
            stack.callback(self.buffers.close)
            self._layers = DeviceMemory(driver, 8 * len(pages.layer_addresses))
            stack.callback(self._layers.close)
            self._gathers = _DirectionStreams(driver, stack, staging_bytes if paths.gather is CopyPath.STAGED else 0)
            self._scatters = _DirectionStreams(driver, stack, staging_bytes if paths.scatter is CopyPath.STAGED else 0)
            self._upload_layer_addresses()
            self._stack = stack.pop_all()

    def gather(self, copies: Sequence[ChunkCopy], *, after: int, summed: bool = True) -> PendingCopy:
        """Begins to copy tokens of the pages, as the stream `after` will leave them, into extents of the pool.

        In all else as `lmkv_kernels.gather`. The pages must not change before the copying has read them. Raises `Busy`
        if too much is under way.
        """
        rows, block_ids = check(self.pages, self._pool.size_bytes, copies)
        streams = self._gathers
        with self.device.current() as driver:
            plan = self._begin(streams, rows, block_ids, after)
            for batch, arguments in plan.launches:
                if batch.staging_offsets is None:
                    self._launch("gather_sum" if summed else "gather", arguments, batch, streams, rows)
                    continue
                half = streams.next()
                half.free.block_stream(streams.kernels.handle)
                staged = plan.through(arguments, half)
                self._launch("gather_sum" if summed else "gather", staged, batch, streams, rows)
                half.filled.record(streams.kernels.handle)
                half.filled.block_stream(streams.dma.handle)
                self._move(driver, rows, batch, half, streams.dma, to_host=True)
                half.free.record(streams.dma.handle)
            read = streams.kernels.event()
            plan.buffer.download(len(rows), streams.kernels.handle)
            with _closing(streams.kernels.event()) as added_up:
                added_up.block_stream(streams.dma.handle)
            return PendingCopy(self, plan.buffer, plan.order, read, streams.dma.event())

    def scatter(self, copies: Sequence[ChunkCopy], *, after: int) -> PendingCopy:
        """Begins to copy tokens out of extents of the pool into the pages; the other way of `gather`.

        The pages are written once what is on the stream `after` by now is over. The extents must stay until it is done.
        """
        rows, block_ids = check(self.pages, self._pool.size_bytes, copies)
        check_written_once(self.pages, rows, block_ids)
        streams = self._scatters
        with self.device.current() as driver:
            plan = self._begin(streams, rows, block_ids, after)
            for batch, arguments in plan.launches:
                if batch.staging_offsets is None:
                    self._launch("scatter", arguments, batch, streams, rows)
                    continue
                half = streams.next()
                half.free.block_stream(streams.dma.handle)
                self._move(driver, rows, batch, half, streams.dma, to_host=False)
                half.filled.record(streams.dma.handle)
                half.filled.block_stream(streams.kernels.handle)
                self._launch("scatter", plan.through(arguments, half), batch, streams, rows)
                half.free.record(streams.kernels.handle)
            return PendingCopy(self, plan.buffer, plan.order, streams.kernels.event(), streams.kernels.event())

    def close(self) -> None:
        """Waits for what is under way. Idempotent."""
        with self.device.current():
            self._stack.close()

    def _upload_layer_addresses(self) -> None:
        """Tells the device where the layers are, once."""
        addresses = self.pages.layer_addresses
        buffer = self.buffers.acquire(len(addresses))
        buffer.words[: len(addresses)] = np.array(addresses, np.uint64).view(np.int64)
        stream = self._gathers.kernels
        self.device.driver.call(
            "cuMemcpyAsync", self._layers.address, buffer.pinned.address, 8 * len(addresses), stream.handle
        )
        with _closing(stream.event()) as uploaded:
            uploaded.wait()
        self.buffers.release(buffer)

    def _begin(self, streams: _DirectionStreams, rows: Rows, block_ids: NDArray[np.int64], after: int) -> _LaunchPlan:
        """Has the streams wait for a stream, and tells the device of all copies."""
        batches = make_batches(self.pages, rows, streams.half_bytes)
        parts = [np.zeros(len(rows), np.int64)]  # the sums come first
        position, places = len(rows), []
        for batch in batches:
            copies, ids, copy_of_id = launch_words(rows, block_ids, batch)
            offsets = np.array(batch.staging_offsets or [], np.int64)
            places.append((position, len(copies), len(ids)))
            parts += [copies.ravel(), ids, copy_of_id, offsets]
            position += sum(part.size for part in parts[-4:])
        buffer = self.buffers.acquire(position)
        np.concatenate(parts, out=buffer.words[:position])
        with _closing(CudaEvent(self.device.driver, after)) as point:
            point.block_stream(streams.kernels.handle)
        buffer.upload(position, streams.kernels.handle)
        launches, sums = [], buffer.device.address
        for batch, (start, copy_count, id_count) in zip(batches, places, strict=True):
            copies_at = buffer.device.address + 8 * start
            ids_at = copies_at + 8 * 6 * copy_count
            arguments = Arguments(
                layer_addresses=self._layers.address,
                copies=copies_at,
                block_ids=ids_at,
                copy_of_id=ids_at + 8 * id_count,
                staging_offsets=0 if batch.staging_offsets is None else ids_at + 16 * id_count,
                chunks=self._pool.device_address,
                sums=sums,
                id_count=id_count,
            )
            launches.append((batch, arguments))
            sums += 8 * copy_count
        return _LaunchPlan(
            buffer=buffer, launches=launches, order=[index for batch in batches for index in batch.indices]
        )

    def _launch(
        self, operation: Operation, arguments: Arguments, batch: Batch, streams: _DirectionStreams, rows: Rows
    ) -> None:
        if arguments.id_count == 0:
            return
        direct = batch.staging_offsets is None
        offsets = rows[batch.indices, 0].tolist() if direct else []
        self._program.launch(
            operation,
            self.pages,
            width_of(self.pages, arguments.chunks, *offsets),
            arguments,
            blocks=self._direct_blocks if direct else BLOCKS_PER_PROCESSOR * self.device.processor_count,
            stream=streams.kernels.handle,
        )

    def _move(
        self, driver: Driver, rows: Rows, batch: Batch, half: _StagingHalf, stream: CudaStream, *, to_host: bool
    ) -> None:
        """DMA between a half of the staging buffer and the pool."""
        for dma_copy in make_dma_copies(self.pages, rows, batch):
            host, device = self._pool.host_address + dma_copy.pool_offset, half.memory.address + dma_copy.staging_offset
            source, target = (device, host) if to_host else (host, device)
            if dma_copy.height == 1:
                driver.call("cuMemcpyAsync", target, source, dma_copy.width, stream.handle)
                continue
            pitches = (dma_copy.width, dma_copy.pitch) if to_host else (dma_copy.pitch, dma_copy.width)
            copy = rectangle(
                source=source,
                source_pitch=pitches[0],
                target=target,
                target_pitch=pitches[1],
                width=dma_copy.width,
                height=dma_copy.height,
                to_host=to_host,
            )
            driver.call("cuMemcpy2DAsync_v2", copy, stream.handle)


@dataclass(frozen=True, kw_only=True, slots=True)
class _LaunchPlan:
    """What `gather` and `scatter` have in common: a batch is one launch."""

    buffer: LaunchBuffer
    launches: list[tuple[Batch, Arguments]]
    order: list[int]
    """The call's copies in the order of the sums."""

    def through(self, arguments: Arguments, half: _StagingHalf) -> Arguments:
        """The arguments of a launch whose chunks are in a half of the staging buffer."""
        return replace(arguments, chunks=half.memory.address)


class _StagingHalf:
    """Half of a staging buffer: one is filled while the other is emptied."""

    def __init__(self, driver: Driver, stack: ExitStack, size_bytes: int, stream: int) -> None:
        self.memory = DeviceMemory(driver, size_bytes)
        stack.callback(self.memory.close)
        self.filled = CudaEvent(driver, stream)
        stack.callback(self.filled.close)
        self.free = CudaEvent(driver, stream)
        stack.callback(self.free.close)


class _DirectionStreams:
    """One direction's streams, one for kernels and one for DMA, and its staging buffer."""

    def __init__(self, driver: Driver, stack: ExitStack, half_bytes: int) -> None:
        self.half_bytes = half_bytes
        """0: nothing is staged."""
        self.kernels, self.dma = CudaStream(driver), CudaStream(driver)
        self._halves = [_StagingHalf(driver, stack, half_bytes, self.dma.handle) for _ in range(2) if half_bytes]
        self._turn = 0
        for stream in (self.kernels, self.dma):  # closed before what they use
            stack.callback(stream.close)

    def next(self) -> _StagingHalf:
        """The half whose turn it is."""
        self._turn = 1 - self._turn
        return self._halves[self._turn]
