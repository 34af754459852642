"""Copies between one rank's pages on a device and the pool, on streams of its own (docs/contribute/kernels.md)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from contextlib import closing as _closing
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lmkv_kernels.copies import ChunkCopy, Rows, check, check_written_once
from lmkv_kernels.cuda.driver import Busy, Device, Driver, Rows2d, rectangle
from lmkv_kernels.cuda.memory import CudaEvent, CudaStream, DeviceMemory, PinnedMemory
from lmkv_kernels.cuda.program import Arguments, Operation, Program, width_of
from lmkv_kernels.pages import Pages

ALIGNMENT = 256
"""Alignment of copies in the staging buffer, in bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DmaCopy:
    """One DMA copy: `height` rows of `width` bytes, contiguous in the staging buffer, `pitch` apart in the pool."""

    pool_offset: int
    staging_offset: int
    width: int
    height: int
    pitch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Copies of one launch, through one fill of the staging buffer or without it."""

    indices: list[int]
    """Indices of the call's copies."""
    staging_offsets: list[int] | None
    """Offset of each copy in the staging buffer; None: the launch accesses the pool itself."""


def staged_bytes(pages: Pages, row_count: int) -> int:
    """Bytes of a copy of `row_count` rows, for the heads of this rank."""
    return len(pages.layer_addresses) * pages.head_count * len(pages.parts) * row_count * pages.row_bytes


def make_batches(pages: Pages, rows: Rows, capacity_bytes: int) -> list[Batch]:
    """Splits copies into batches that fit the staging buffer. The first batch has the copies that cannot be staged.

    Only copies of whole chunks are staged: each layer is one contiguous range in the pool. Other copies would need a
    DMA copy per head and part, and short DMA copies are slower than the kernel.
    """
    direct: list[int] = []
    staged: list[Batch] = []
    end = capacity_bytes
    for index, (_, extent_rows, _, row_count, _, _) in enumerate(rows.tolist()):
        size = staged_bytes(pages, row_count)
        if row_count != extent_rows or size > capacity_bytes:
            direct.append(index)
            continue
        if end + size > capacity_bytes:
            staged.append(Batch(indices=[], staging_offsets=[]))
            end = 0
        batch = staged[-1]
        assert batch.staging_offsets is not None
        batch.indices.append(index)
        batch.staging_offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return ([Batch(indices=direct, staging_offsets=None)] if direct else []) + staged


def make_dma_copies(pages: Pages, rows: Rows, batch: Batch) -> list[DmaCopy]:
    """The DMA copies of a staged batch. Copies that are adjacent on both sides are merged."""
    assert batch.staging_offsets is not None
    dma_copies: list[DmaCopy] = []
    for index, staging_offset in zip(batch.indices, batch.staging_offsets, strict=True):
        dma_copy = _dma_copy(pages, int(rows[index, 0]), int(rows[index, 1]), staging_offset)
        last = dma_copies[-1] if dma_copies else None
        if last and last.height == dma_copy.height == 1 and _follows(last, dma_copy):
            dma_copies[-1] = DmaCopy(
                pool_offset=last.pool_offset,
                staging_offset=last.staging_offset,
                width=last.width + dma_copy.width,
                height=1,
                pitch=last.pitch + dma_copy.pitch,
            )
        else:
            dma_copies.append(dma_copy)
    return dma_copies


def _dma_copy(pages: Pages, offset: int, extent_rows: int, staging_offset: int) -> DmaCopy:
    per_head = len(pages.parts) * extent_rows * pages.row_bytes
    layers, width, pitch = len(pages.layer_addresses), pages.head_count * per_head, pages.kv_head_count * per_head
    if width == pitch:  # the layers are contiguous
        layers, width, pitch = 1, layers * width, layers * pitch
    return DmaCopy(
        pool_offset=offset + pages.first_chunk_head * per_head,
        staging_offset=staging_offset,
        width=width,
        height=layers,
        pitch=pitch,
    )


def _follows(last: DmaCopy, dma_copy: DmaCopy) -> bool:
    return (
        dma_copy.pool_offset == last.pool_offset + last.width
        and dma_copy.staging_offset == last.staging_offset + last.width
    )


def launch_words(
    rows: Rows, block_ids: NDArray[np.int64], batch: Batch
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """A batch for the kernels: copies `[copy, 6]` as `lmkv::ChunkCopy`, block ids, and the copy of each id."""
    counts = rows[batch.indices, 5]
    firsts = np.concatenate([[0], np.cumsum(rows[:, 5])])[batch.indices]
    ids = np.concatenate([block_ids[first : first + count] for first, count in zip(firsts, counts, strict=True)])
    copies = rows[batch.indices].copy()
    copies[:, 5] = np.cumsum(counts) - counts
    return copies, ids, np.repeat(np.arange(len(batch.indices)), counts)


BUFFER_COUNT = 8
"""Allocated at the start, because allocation may synchronize the device."""
BUFFER_WORDS = 32 << 10
"""Words of 8 bytes in a buffer: enough for about 15,000 blocks."""
MAX_BUFFERS = 64


class LaunchBuffer:
    """A buffer of 8-byte words in pinned host memory and one of the same size on the device."""

    def __init__(self, driver: Driver, word_count: int) -> None:
        self._driver = driver
        self.pinned = PinnedMemory(driver, 8 * word_count)
        self.device = DeviceMemory(driver, 8 * word_count)
        self.words: NDArray[np.int64] = self.pinned.bytes.view(np.int64)
        """The words in host memory."""

    def upload(self, word_count: int, stream: int) -> None:
        """Copies the first words to the device."""
        self._driver.call("cuMemcpyAsync", self.device.address, self.pinned.address, 8 * word_count, stream)

    def download(self, word_count: int, stream: int) -> None:
        """Copies the first words to the host."""
        self._driver.call("cuMemcpyAsync", self.pinned.address, self.device.address, 8 * word_count, stream)

    def close(self) -> None:
        """Frees the memory, which no stream may use any more. Idempotent."""
        self.pinned.close()
        self.device.close()


class LaunchBuffers:
    """The buffers of one copier. Must be closed with the device current."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._all = [LaunchBuffer(driver, BUFFER_WORDS) for _ in range(BUFFER_COUNT)]
        self._free = list(self._all)

    def acquire(self, word_count: int) -> LaunchBuffer:
        """A free buffer of at least `word_count` words. Raises `Busy` if too many are in use."""
        for buffer in self._free:
            if buffer.words.size >= word_count:
                self._free.remove(buffer)
                return buffer
        if len(self._all) >= MAX_BUFFERS:
            raise Busy(f"{len(self._all) - len(self._free)} copies are in flight already")
        buffer = LaunchBuffer(self._driver, max(BUFFER_WORDS, 1 << (word_count - 1).bit_length()))
        self._all.append(buffer)
        return buffer

    def release(self, buffer: LaunchBuffer) -> None:
        """Returns a buffer, which the device no longer uses."""
        self._free.append(buffer)

    def close(self) -> None:
        """Frees all buffers, which no stream may use any more. Idempotent."""
        for buffer in self._all:
            buffer.close()
        self._all.clear()
        self._free.clear()


STAGING_BYTES = 32 << 20
"""Size of each half of the staging buffer of a direction."""
DIRECT_BLOCKS = 64
"""Thread blocks of a launch that accesses the pool itself: enough to saturate the bus, and few enough to leave
multiprocessors to the model."""
BLOCKS_PER_PROCESSOR = 16
"""Thread blocks per multiprocessor of a launch that accesses device memory only."""


class CopyPath(StrEnum):
    """The way by which bytes are copied between pages and pool."""

    DIRECT = "direct"
    """The kernel accesses the pinned memory of the pool."""
    STAGED = "staged"
    """The kernel uses a staging buffer on the device, and DMA copies it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyPaths:
    """The path of each direction, and its size; `fastest_paths` finds the fastest ones."""

    gather: CopyPath = CopyPath.STAGED
    scatter: CopyPath = CopyPath.STAGED
    staging_bytes: int = STAGING_BYTES
    direct_blocks: int = DIRECT_BLOCKS

    def staging_bytes_of(self, path: CopyPath) -> int:
        """The size of the staging buffer of one direction."""
        return self.staging_bytes if path is CopyPath.STAGED else 0


class HostMemory(Protocol):
    """Host memory that the device can access: `RegisteredMemory` or `PinnedMemory`."""

    @property
    def host_address(self) -> int: ...
    @property
    def device_address(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...


class PendingCopy:
    """Copies in flight. Only `wait` blocks the calling thread."""

    def __init__(self, copier: CudaCopier, plan: _LaunchPlan, read: CudaEvent, end: CudaEvent) -> None:
        """`end`, as `plan.begin`, was made with `timing`."""
        self._copier = copier
        self._buffer: LaunchBuffer | None = plan.buffer
        self._order = plan.order
        self._begin, self._read, self._end = plan.begin, read, end
        self._sums: list[int] = []
        self._seconds = 0.0

    def block_stream(self, stream: int) -> None:
        """Work submitted to `stream` from now on waits until the copies are done."""
        with self._copier.device.current():
            if self._buffer is not None:
                self._end.block_stream(stream)

    def block_stream_until_read(self, stream: int) -> None:
        """Work submitted to `stream` from now on waits until the copies have read the pages, and so may change them."""
        with self._copier.device.current():
            if self._buffer is not None:
                self._read.block_stream(stream)

    def read(self) -> bool:
        """Whether the copies have read the pages, which may then change. Raises `CudaError` if the device failed."""
        with self._copier.device.current():
            return self._buffer is None or self._read.done()

    def done(self) -> bool:
        """Whether the copies are done. Raises `CudaError` if the device failed."""
        if self._buffer is None:
            return True
        with self._copier.device.current():
            if not self._end.done():
                return False
            self._finish(self._buffer)
        return True

    def wait(self) -> None:
        """Blocks the calling thread until the copies are done. Raises `CudaError` if the device failed."""
        if self._buffer is not None:
            with self._copier.device.current():
                self._end.wait()
                self._finish(self._buffer)

    @property
    def checksums(self) -> list[int]:
        """Per copy of a finished gather, what its words add to its chunk's checksum, as of `lmkv_kernels.gather`."""
        assert self._buffer is None, "the copies are not done"
        return self._sums

    @property
    def seconds(self) -> float:
        """The duration of finished copies by the device's clock, from when the pages could be accessed."""
        assert self._buffer is None, "the copies are not done"
        return self._seconds

    def _finish(self, buffer: LaunchBuffer) -> None:
        self._seconds = self._end.seconds_since(self._begin)
        sums = buffer.words[: len(self._order)].view(np.uint64)
        self._sums = [0] * len(self._order)
        for index, value in zip(self._order, sums.tolist(), strict=True):
            self._sums[index] = value
        self._buffer = None
        self._copier.buffers.release(buffer)
        for event in (self._begin, self._read, self._end):
            event.close()


class CudaCopier:
    """Starts the copies of one rank. Must be closed before its pool and pages.

    One thread at a time may use it. All calls raise `CudaError` if the device fails, and `ValueError`, before anything
    is submitted, if a copy does not fit.
    """

    def __init__(
        self,
        device: Device,
        program: Program,
        pages: Pages,
        pool: HostMemory,
        *,
        paths: CopyPaths = CopyPaths(),  # immutable
    ) -> None:
        if not pages.device.startswith("cuda"):
            raise ValueError(f"the pages are on {pages.device}, not on a CUDA device")
        if not all(pages.is_contiguous(part) for part in pages.parts):
            raise ValueError("the rows of the pages are not contiguous, as on CPUs only")
        self.device = device
        self.pages = pages
        self.paths = paths
        self._program = program
        self._pool = pool
        with ExitStack() as stack, device.current() as driver:
            self.buffers = LaunchBuffers(driver)
            stack.callback(self.buffers.close)
            self._layers = DeviceMemory(driver, 8 * len(pages.layer_addresses))
            stack.callback(self._layers.close)
            self._gathers = _DirectionStreams(driver, stack, paths.staging_bytes_of(paths.gather))
            self._scatters = _DirectionStreams(driver, stack, paths.staging_bytes_of(paths.scatter))
            self._upload_layer_addresses()
            self._stack = stack.pop_all()

    def gather(self, copies: Sequence[ChunkCopy], *, after: int, summed: bool = True) -> PendingCopy:
        """Starts to copy tokens from pages into extents of the pool, after the work submitted to the stream `after`.

        Otherwise as `lmkv_kernels.gather`. The pages must not change before `PendingCopy.read`. Raises `Busy` if too
        many copies are in flight.
        """
        rows, block_ids = check(self.pages, self._pool.size_bytes, copies)
        streams = self._gathers
        with self.device.current():
            plan = self._begin(streams, rows, block_ids, after)
            for batch, arguments in plan.launches:
                if batch.staging_offsets is None:
                    self._launch("gather_sum" if summed else "gather", arguments, batch, streams, rows)
                    continue
                half = streams.next_half()
                half.free.block_stream(streams.kernels.handle)
                staged = plan.with_staging(arguments, half)
                self._launch("gather_sum" if summed else "gather", staged, batch, streams, rows)
                half.filled.record(streams.kernels.handle)
                half.filled.block_stream(streams.dma.handle)
                self._move(rows, batch, half, streams.dma, to_host=True)
                half.free.record(streams.dma.handle)
            read = streams.kernels.event()
            plan.buffer.download(len(rows), streams.kernels.handle)
            with _closing(streams.kernels.event()) as summed_event:
                summed_event.block_stream(streams.dma.handle)
            return PendingCopy(self, plan, read, streams.dma.event(timing=True))

    def scatter(self, copies: Sequence[ChunkCopy], *, after: int) -> PendingCopy:
        """Starts to copy tokens from extents of the pool into pages; the inverse of `gather`.

        The pages are written after the work submitted to the stream `after`. The extents must stay until it is done.
        """
        rows, block_ids = check(self.pages, self._pool.size_bytes, copies)
        check_written_once(self.pages, rows, block_ids)
        streams = self._scatters
        with self.device.current():
            plan = self._begin(streams, rows, block_ids, after)
            for batch, arguments in plan.launches:
                if batch.staging_offsets is None:
                    self._launch("scatter", arguments, batch, streams, rows)
                    continue
                half = streams.next_half()
                half.free.block_stream(streams.dma.handle)
                self._move(rows, batch, half, streams.dma, to_host=False)
                half.filled.record(streams.dma.handle)
                half.filled.block_stream(streams.kernels.handle)
                self._launch("scatter", plan.with_staging(arguments, half), batch, streams, rows)
                half.free.record(streams.kernels.handle)
            return PendingCopy(self, plan, streams.kernels.event(), streams.kernels.event(timing=True))

    def close(self) -> None:
        """Waits for the copies in flight and releases all resources. Idempotent."""
        with self.device.current():
            self._stack.close()

    def _upload_layer_addresses(self) -> None:
        """Copies the addresses of the layers to the device, once."""
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
        """Makes the streams wait for the stream `after`, and uploads the arguments of all launches."""
        batches = make_batches(self.pages, rows, streams.half_bytes)
        parts = [np.zeros(len(rows), np.int64)]  # the sums come first
        position, sections = len(rows), []
        for batch in batches:
            copies, ids, copy_of_id = launch_words(rows, block_ids, batch)
            offsets = np.array(batch.staging_offsets or [], np.int64)
            sections.append((position, len(copies), len(ids)))
            parts += [copies.ravel(), ids, copy_of_id, offsets]
            position += sum(part.size for part in parts[-4:])
        buffer = self.buffers.acquire(position)
        np.concatenate(parts, out=buffer.words[:position])
        with _closing(CudaEvent(self.device.driver, after)) as point:
            point.block_stream(streams.kernels.handle)
        begin = streams.kernels.event(timing=True)
        buffer.upload(position, streams.kernels.handle)
        launches, sums = [], buffer.device.address
        for batch, (start, copy_count, id_count) in zip(batches, sections, strict=True):
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
        order = [index for batch in batches for index in batch.indices]
        return _LaunchPlan(buffer=buffer, begin=begin, launches=launches, order=order)

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
            blocks=self.paths.direct_blocks if direct else BLOCKS_PER_PROCESSOR * self.device.processor_count,
            stream=streams.kernels.handle,
        )

    def _move(self, rows: Rows, batch: Batch, half: _StagingHalf, stream: CudaStream, *, to_host: bool) -> None:
        """Submits the DMA between one half of the staging buffer and the pool. The device must be current."""
        driver = self.device.driver
        for dma_copy in make_dma_copies(self.pages, rows, batch):
            host, device = self._pool.host_address + dma_copy.pool_offset, half.memory.address + dma_copy.staging_offset
            if dma_copy.height == 1:
                source, target = (device, host) if to_host else (host, device)
                driver.call("cuMemcpyAsync", target, source, dma_copy.width, stream.handle)
                continue
            in_pool, staged = Rows2d(host, dma_copy.pitch), Rows2d(device, dma_copy.width)
            copy = rectangle(in_pool, staged, dma_copy.width, dma_copy.height, to_host=to_host)
            driver.call("cuMemcpy2DAsync_v2", copy, stream.handle)


@dataclass(frozen=True, kw_only=True, slots=True)
class _LaunchPlan:
    """The launches of one call; each batch is one launch."""

    buffer: LaunchBuffer
    begin: CudaEvent
    """When the pages may be accessed."""
    launches: list[tuple[Batch, Arguments]]
    order: list[int]
    """Indices of the copies in the order of their sums."""

    def with_staging(self, arguments: Arguments, half: _StagingHalf) -> Arguments:
        """The arguments of a launch whose chunks are in one half of the staging buffer."""
        return replace(arguments, chunks=half.memory.address)


class _StagingHalf:
    """One half of a staging buffer: one is filled while the other is drained."""

    def __init__(self, driver: Driver, stack: ExitStack, size_bytes: int, stream: int) -> None:
        self.memory = DeviceMemory(driver, size_bytes)
        stack.callback(self.memory.close)
        self.filled = CudaEvent(driver, stream)
        stack.callback(self.filled.close)
        self.free = CudaEvent(driver, stream)
        stack.callback(self.free.close)


class _DirectionStreams:
    """The streams of one direction, one for kernels and one for DMA, and its staging buffer."""

    def __init__(self, driver: Driver, stack: ExitStack, half_bytes: int) -> None:
        self.half_bytes = half_bytes
        """Size of a half of the staging buffer; 0: there is none."""
        self.kernels, self.dma = CudaStream(driver), CudaStream(driver)
        self._halves = [_StagingHalf(driver, stack, half_bytes, self.dma.handle) for _ in range(2) if half_bytes]
        self._next = 0
        for stream in (self.kernels, self.dma):  # closed before the memory that they use
            stack.callback(stream.close)

    def next_half(self) -> _StagingHalf:
        """The half to use next."""
        self._next = 1 - self._next
        return self._halves[self._next]


SAMPLE_BYTES = 16 << 20
CHUNK_TOKENS = 256
ROUNDS = 3


def fastest_paths(
    device: Device, program: Program, pages: Pages, clock: Callable[[], float] = time.perf_counter
) -> CopyPaths:
    """Copies some blocks to the pool and back by each path, in about 20 ms.

    Leaves the pages unchanged. Nothing else may write to them meanwhile, so it must run before the first forward pass.
    Raises `CudaError` if the device fails.
    """
    copies = sample(pages)
    extent = copies[-1].offset + pages.extent_bytes(copies[-1].extent_tokens)
    seconds: dict[tuple[str, CopyPath], float] = {}
    with device.current() as driver, closing(PinnedMemory(driver, extent)) as memory:
        for path in CopyPath:
            with closing(
                CudaCopier(device, program, pages, memory, paths=CopyPaths(gather=path, scatter=path))
            ) as copier:
                for _ in range(1 + ROUNDS):  # the first round is a warm-up
                    started = clock()
                    copier.gather(copies, after=0).wait()
                    between = clock()
                    copier.scatter(copies, after=0).wait()
                    ended = clock()
                    for direction, took in (("gather", between - started), ("scatter", ended - between)):
                        seconds[direction, path] = min(took, seconds.get((direction, path), took))
    gather, scatter = (
        min(CopyPath, key=lambda path, direction=direction: seconds[direction, path])  # type: ignore[misc]
        for direction in ("gather", "scatter")
    )
    return CopyPaths(gather=gather, scatter=scatter)


def sample(pages: Pages) -> list[ChunkCopy]:
    """Copies of whole chunks of the first blocks, up to `SAMPLE_BYTES`."""
    blocks = min(pages.block_count, max(1, CHUNK_TOKENS // pages.block_tokens))
    tokens = blocks * pages.block_tokens
    extent = pages.extent_bytes(tokens)
    count = max(1, min(pages.block_count // blocks, SAMPLE_BYTES // extent))
    return [
        ChunkCopy(
            offset=index * extent,
            extent_tokens=tokens,
            token_count=tokens,
            block_ids=range(index * blocks, (index + 1) * blocks),
        )
        for index in range(count)
    ]
