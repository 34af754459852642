"""One rank's copies while its pages are on a CUDA device: begun in a step, done some time later, never waited for.

The worker side calls it where it would call the host's `gather` and `scatter`. docs/contribute/kernels.md draws
the order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lmkv.errors import ConfigError
from lmkv.pool.pool import LEFT_BYTES, Pool
from lmkv.units import format_bytes
from lmkv_client.connector.vllm_api import init_logger
from lmkv_client.connector.worker.running_copies import CopyHandle, begin_each
from lmkv_kernels import ChunkCopy, Pages
from lmkv_kernels.cuda import (
    CopyPath,
    CopyPaths,
    CudaCopier,
    CudaError,
    Device,
    PendingCopy,
    Program,
    RegisteredMemory,
    driver,
)
from lmkv_kernels.cuda.copier import BLOCKS_PER_PROCESSOR, STAGING_BYTES, fastest_paths

if TYPE_CHECKING:
    from lmkv_client.connector.worker.device_buffer import DeviceBufferPart

logger = init_logger("vllm.lmkv")


POPULATE_BYTES = 1 << 30
"""Size of the steps, some 0.2 s each, between which populating a pool can be cancelled."""


class PoolNotReady(CudaError):
    """The pool is not registered with CUDA: not yet, or it could not be."""


class DevicePageCopier:
    """Copies between pages on a CUDA device and the open pool. Called on the worker's main thread.

    Making one takes some 20 ms, and a second where the kernels must be compiled; it must be before the first forward.
    Raises `CudaError` or `ValueError` if the pages cannot be copied.
    """

    def __init__(
        self,
        pages: Sequence[Pages],
        *,
        model_stream: Callable[[], int] | None = None,
        open_device: Callable[[int], tuple[Device, Program]] | None = None,
        prepare_thread: Callable[[], object] = lambda: None,
    ) -> None:
        """`pages` are those of each KV-cache group."""
        ordinal = int(pages[0].device.partition(":")[2] or 0)
        self._model_stream = model_stream or (lambda: torch_stream(ordinal))
        self._device, self._program = (open_device or open_cuda)(ordinal)
        self._pages = pages
        self._running: list[PendingCopy] = []
        self._reading: list[PendingCopy] = []
        self._opening: Future[_Open] | None = None
        self._buffered: tuple[DeviceBufferPart, CudaCopier] | None = None
        self._closed = False
        # Registering a pool takes seconds: one thread, so that a pool is closed before the next is opened.
        self._thread = ThreadPoolExecutor(1, "lmkv-cuda", initializer=prepare_thread)
        try:
            self._paths = [fastest_paths(self._device, self._program, one) for one in pages]
        except BaseException:
            self.close()
            raise
        for paths in dict.fromkeys(self._paths):
            logger.info(
                "KV cache on %s (%s): stores go %s, loads go %s",
                pages[0].device,
                self._device.name,
                paths.gather,
                paths.scatter,
            )

    @property
    def ready(self) -> bool:
        """Implements `PageCopier`: whether the pool is registered."""
        return self._opening is not None and self._opening.done() and self._opening.exception() is None

    def open(self, pool: Pool) -> None:
        """Takes and registers a pool in the background; until that is done copies raise `PoolNotReady`.

        The pool must not be closed before `let_go` says so.
        """
        assert self._opening is None, "close the old pool first"
        self._abandoned = threading.Event()
        self._opening = self._thread.submit(self._open, pool, self._abandoned)

    def close_pool(self, then: Callable[[], object]) -> None:
        """Waits for running copies, and calls `then` on another thread once the pool may be unmapped.

        Without a pool it calls it at once.
        """
        self.settle()
        self._close_buffer()
        opening, self._opening = self._opening, None
        if opening is None:
            then()
        else:
            self._abandoned.set()
            self._thread.submit(_close, opening, then)

    def settle(self) -> None:
        """Implements `PageCopier`. If the device has failed, its copies have ended as well."""
        for copying in self._running:
            try:
                copying.wait()
            except CudaError as error:
                logger.error("a copy was lost: %s", error)
        self._running.clear()
        self._reading.clear()

    def begin_step(self) -> None:
        """Makes the model's stream wait until running gathers have read their pages, which may change after this.

        Does not wait for gathers that have. Called once a step, before anything else.
        """
        self._reading = [copying for copying in self._reading if not copying.read()]
        if self._reading:
            stream = self._model_stream()
            for copying in self._reading:
                copying.block_stream_until_read(stream)

    def gather(self, copies: Sequence[ChunkCopy], *, beside: bool = True) -> CopyHandle:
        """Begins to copy pages, as the forward that was put on the model's stream last will leave them.

        It always runs beside what follows: `begin_step` waits on the device.

        Raises `ValueError` if a copy does not fit, `CudaError` if it cannot be made now.
        """
        del beside
        copiers, stream = self._copiers(), self._model_stream()

        def begin(group: int, own: Sequence[ChunkCopy]) -> PendingCopy:
            copying = copiers[group].gather(own, after=stream)
            self._running.append(copying)
            self._reading.append(copying)
            return copying

        return begin(0, copies) if len(copiers) == 1 else begin_each(copies, len(copiers), begin)

    def scatter(self, copies: Sequence[ChunkCopy], *, sync: bool, buffer: DeviceBufferPart | None = None) -> CopyHandle:
        """Begins to copy into pages, which those forwards may still read that are on the model's stream by now.

        With `sync` the next forward waits for it, on the device. Out of a device buffer the kernels read as they are:
        nothing leaves the device. Raises as `gather` does.
        """
        stream = self._model_stream()
        copiers = [self._copier_of(buffer)] if buffer else self._copiers()

        def begin(group: int, own: Sequence[ChunkCopy]) -> PendingCopy:
            copying = copiers[group].scatter(own, after=stream)
            if sync:
                copying.block_stream(stream)
            self._running.append(copying)
            return copying

        if buffer:
            copies = buffer.shrunk(copies)
        return begin(0, copies) if len(copiers) == 1 else begin_each(copies, len(copiers), begin)

    def close(self) -> None:
        """Waits for running copies, then for the pool to be unregistered. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.close_pool(lambda: None)
        self._thread.shutdown()
        with self._device.current():
            self._program.close()
        self._device.close()

    def _copiers(self) -> list[CudaCopier]:
        """Returns the copier of each group. Raises `PoolNotReady` before the device is open, and if that has failed."""
        if self._opening is None or not self._opening.done():
            raise PoolNotReady("the pool is not registered with CUDA yet")
        self._running = [copying for copying in self._running if not copying.done()]
        if error := self._opening.exception():
            raise PoolNotReady(f"the pool is not registered with CUDA: {error}")
        return self._opening.result().copiers

    def _copier_of(self, buffer: DeviceBufferPart) -> CudaCopier:
        self._running = [copying for copying in self._running if not copying.done()]
        if self._buffered is None or self._buffered[0] is not buffer:
            self.settle()
            self._close_buffer()
            copier = CudaCopier(
                self._device,
                self._program,
                buffer.pages,
                buffer,
                paths=CopyPaths(
                    gather=CopyPath.DIRECT,
                    scatter=CopyPath.DIRECT,
                    direct_blocks=BLOCKS_PER_PROCESSOR * self._device.processor_count,
                ),
            )
            self._buffered = buffer, copier
        return self._buffered[1]

    def _close_buffer(self) -> None:
        """Closes the copier of the device buffer; none of its copies may run."""
        if self._buffered:
            self._buffered[1].close()
            self._buffered = None

    def _open(self, pool: Pool, abandoned: threading.Event) -> _Open:
        started = time.monotonic()
        logger.info(
            "registering the pool of %s with CUDA; nothing is stored or loaded until then",
            format_bytes(pool.size_bytes),
        )
        with ExitStack() as stack:
            try:
                size_bytes = populate(pool, abandoned)
                with self._device.current() as cuda:
                    registration = RegisteredMemory(cuda, pool.address, size_bytes)
                stack.callback(self._unregister, registration)
                copiers = []
                for pages, paths in zip(self._pages, self._paths, strict=True):
                    copiers.append(self._open_copier(pages, paths, registration))
                    stack.callback(copiers[-1].close)
            except CudaError as error:
                logger.warning("cannot register the node's pool with CUDA, so nothing is loaded or stored: %s", error)
                raise
            logger.info("the pool is registered after %.1f s", time.monotonic() - started)
            return _Open(copiers, stack.pop_all())

    def _open_copier(self, pages: Pages, paths: CopyPaths, registration: RegisteredMemory) -> CudaCopier:
        paths = replace(paths, staging_bytes=STAGING_BYTES // len(self._pages))  # a group has so much less of a chunk
        return CudaCopier(self._device, self._program, pages, registration, paths=paths)

    def _unregister(self, registration: RegisteredMemory) -> None:
        with self._device.current():
            registration.close()


class _Open:
    """A pool that is registered."""

    def __init__(self, copiers: list[CudaCopier], stack: ExitStack) -> None:
        self.copiers = copiers
        self.stack = stack


def populate(pool: Pool, abandoned: threading.Event) -> int:
    """Populates the pool and returns its usable bytes: fewer than its size if memory is exhausted.

    Raises `PoolNotReady` if there are none, or if the pool is closed meanwhile.
    """
    try:
        for start in range(0, pool.size_bytes, POPULATE_BYTES):
            if abandoned.is_set():
                raise PoolNotReady("it was closed before")
            pool.populate(start, start + POPULATE_BYTES, leave_bytes=LEFT_BYTES)
    except ConfigError as error:
        size_bytes = int(error.metadata["populated_bytes"])
        if not size_bytes:
            raise PoolNotReady(str(error)) from None
        logger.warning(
            "the worker uses %s of the pool's %s: %s", format_bytes(size_bytes), format_bytes(pool.size_bytes), error
        )
        return size_bytes
    return pool.size_bytes


def _close(opening: Future[_Open], then: Callable[[], object]) -> None:
    try:
        if opening.exception() is None:
            opening.result().stack.close()
    except CudaError as error:
        logger.error("cannot unregister the old pool: %s", error)
    finally:
        then()


def open_cuda(ordinal: int) -> tuple[Device, Program]:
    """A device by its number, and the kernels on it. Raises `CudaError`."""
    device = Device(driver(), ordinal)
    try:
        return device, Program.load(device)
    except BaseException:
        device.close()
        raise


def torch_stream(ordinal: int) -> int:
    """The stream that torch puts work on now."""
    import torch

    stream: Any = torch.cuda.current_stream(ordinal)
    return int(stream.cuda_stream)
