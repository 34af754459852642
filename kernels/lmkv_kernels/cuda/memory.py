"""Device memory, and host memory that the device can access. Must be closed with the device current."""

from __future__ import annotations

import ctypes

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
