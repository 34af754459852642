"""Buffers for the arguments of kernel launches and the checksums that they return, in pinned and device memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lmkv_kernels.cuda.driver import Driver
from lmkv_kernels.cuda.errors import Busy
from lmkv_kernels.cuda.memory import DeviceMemory, PinnedMemory

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
