"""Memory of the device, and host memory that it reaches. Whoever makes one closes it, with the device current."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from lmkv_kernels.cuda.driver import Driver

_PORTABLE, _MAPPED = 1, 2  # the flags of alloc and register mean the same


class DeviceMemory:
    """A run of device memory."""

    def __init__(self, driver: Driver, size_bytes: int) -> None:
        self._driver = driver
        self.size_bytes = size_bytes
        self.address = driver.address("cuMemAlloc_v2", size_bytes)

    def close(self) -> None:
        """Idempotent. Nothing on any stream may still use it."""
        if self.address:
            address, self.address = self.address, 0
            self._driver.call("cuMemFree_v2", address)


class PinnedMemory:
    """A run of host memory that the device copies from and to by itself."""

    def __init__(self, driver: Driver, size_bytes: int) -> None:
        self._driver = driver
        self.size_bytes = size_bytes
        self.address = driver.handle("cuMemHostAlloc", size_bytes, _PORTABLE | _MAPPED).value or 0
        self.host_address = self.address
        self.device_address = driver.address("cuMemHostGetDevicePointer_v2", self.address, 0)
        """The same memory by the device's address."""
        self.bytes: NDArray[np.uint8] = np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(self.address))
        """The memory. Must not be used once this is closed."""

    def close(self) -> None:
        """Idempotent. Nothing on any stream may still use it."""
        if self.address:
            address, self.address = self.address, 0
            self._driver.call("cuMemFreeHost", address)


class RegisteredMemory:
    """Host memory made known to the device: pinned, and within reach of kernels and DMA.

    It takes every page that was not taken yet, and holds all in memory; a second for 10 GB or so. A process registers
    its own mapping: what another process has registered does not help it.
    """

    def __init__(self, driver: Driver, address: int, size_bytes: int) -> None:
        self._driver = driver
        self.host_address = address
        driver.call("cuMemHostRegister_v2", address, size_bytes, _PORTABLE | _MAPPED)
        self.size_bytes = size_bytes
        self.device_address = driver.address("cuMemHostGetDevicePointer_v2", address, 0)
        """The same memory by the device's address."""

    def close(self) -> None:
        """Idempotent. Nothing on any stream may still use it; do it before the memory is unmapped."""
        if self.host_address:
            address, self.host_address = self.host_address, 0
            self._driver.call("cuMemHostUnregister", address)
