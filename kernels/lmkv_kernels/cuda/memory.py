"""Device memory, host memory that the device can access, streams and events. Close them with the device current."""

from __future__ import annotations

import ctypes
from ctypes import c_void_p
from typing import cast

import numpy as np
from numpy.typing import NDArray

from lmkv_kernels.cuda.driver import Driver

_PORTABLE, _MAPPED = 1, 2  # flags of cuMemHostAlloc and cuMemHostRegister


class DeviceMemory:
    """An allocation of device memory."""

    def __init__(self, driver: Driver, size_bytes: int) -> None:
        self._driver = driver
        self.size_bytes = size_bytes
        self.address = driver.address("cuMemAlloc_v2", size_bytes)

    def close(self) -> None:
        """Frees the memory, which no stream may use any more. Idempotent."""
        if self.address:
            address, self.address = self.address, 0
            self._driver.call("cuMemFree_v2", address)


class PinnedMemory:
    """An allocation of pinned host memory, which kernels and DMA can access."""

    def __init__(self, driver: Driver, size_bytes: int) -> None:
        self._driver = driver
        self.size_bytes = size_bytes
        self.address = driver.handle("cuMemHostAlloc", size_bytes, _PORTABLE | _MAPPED).value or 0
        self.host_address = self.address
        self.device_address = driver.address("cuMemHostGetDevicePointer_v2", self.address, 0)
        """Address of the memory for the device."""
        self.bytes: NDArray[np.uint8] = np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(self.address))
        """The memory. Must not be used after `close`."""

    def close(self) -> None:
        """Frees the memory, which no stream may use any more. Idempotent."""
        if self.address:
            address, self.address = self.address, 0
            self._driver.call("cuMemFreeHost", address)


class RegisteredMemory:
    """Host memory registered with the device: pinned, and accessible to kernels and DMA.

    Registration populates and pins all pages, in about a second per 10 GB. Each process must register its
    own mapping.
    """

    def __init__(self, driver: Driver, address: int, size_bytes: int) -> None:
        self._driver = driver
        self.host_address = address
        driver.call("cuMemHostRegister_v2", address, size_bytes, _PORTABLE | _MAPPED)
        self.size_bytes = size_bytes
        self.device_address = driver.address("cuMemHostGetDevicePointer_v2", address, 0)
        """Address of the memory for the device."""

    def close(self) -> None:
        """Unregisters the memory, before it is unmapped; no stream may use it any more. Idempotent."""
        if self.host_address:
            address, self.host_address = self.host_address, 0
            self._driver.call("cuMemHostUnregister", address)


_NON_BLOCKING = 1  # not synchronized with the default stream
_NO_TIMING = 2


class CudaEvent:
    """A point on a stream, initially the current end of it."""

    def __init__(self, driver: Driver, stream: int, *, timing: bool = False) -> None:
        self._driver = driver
        self._handle: c_void_p | None = driver.handle("cuEventCreate", 0 if timing else _NO_TIMING)
        self.record(stream)

    def record(self, stream: int) -> None:
        """Records the event at the current end of the stream."""
        self._driver.call("cuEventRecord", self._handle, stream)

    def block_stream(self, stream: int) -> None:
        """Work submitted to `stream` from now on waits for the event. Does not block the calling thread."""
        self._driver.call("cuStreamWaitEvent", stream, self._handle, 0)

    def done(self) -> bool:
        """Whether the event has completed. Raises `CudaError` if work before it failed."""
        return self._handle is None or self._driver.ready(self._handle)

    def wait(self) -> None:
        """Blocks the calling thread until the event completes. Raises `CudaError` if work before it failed."""
        if self._handle is not None:
            self._driver.call("cuEventSynchronize", self._handle)

    def seconds_since(self, earlier: CudaEvent) -> float:
        """Time between two completed events that were created with `timing`."""
        from ctypes import byref, c_float

        milliseconds = c_float()
        self._driver.call("cuEventElapsedTime", byref(milliseconds), earlier._handle, self._handle)
        return milliseconds.value / 1e3

    def close(self) -> None:
        """Destroys the event, which then counts as completed. Idempotent."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._driver.call("cuEventDestroy_v2", handle)


class CudaStream:
    """A stream, independent of those of torch."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.handle = cast(int, driver.handle("cuStreamCreate", _NON_BLOCKING).value)
        self._closed = False

    def event(self, *, timing: bool = False) -> CudaEvent:
        """An event at the current end of the stream."""
        return CudaEvent(self._driver, self.handle, timing=timing)

    def close(self) -> None:
        """Waits for all submitted work, and destroys the stream. Idempotent."""
        if not self._closed:
            self._closed = True
            self._driver.call("cuStreamSynchronize", self.handle)
            self._driver.call("cuStreamDestroy_v2", self.handle)
