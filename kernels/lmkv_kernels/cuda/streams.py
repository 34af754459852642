"""Streams and events: what a device does after what. Whoever makes one closes it, with the device current."""

from __future__ import annotations

from ctypes import c_void_p
from typing import cast

from lmkv_kernels.cuda.driver import Driver

_NON_BLOCKING = 1  # a stream that the default stream does not wait for, nor the other way round
_NO_TIMING = 2


class CudaEvent:
    """A point on a stream; first that at which it was made."""

    def __init__(self, driver: Driver, stream: int, *, timing: bool = False) -> None:
        self._driver = driver
        self._handle: c_void_p | None = driver.handle("cuEventCreate", 0 if timing else _NO_TIMING)
        self.record(stream)

    def record(self, stream: int) -> None:
        """From now on it is the point that the stream has reached."""
        self._driver.call("cuEventRecord", self._handle, stream)

    def block_stream(self, stream: int) -> None:
        """What is put on `stream` from now on waits for the event; the calling thread does not."""
        self._driver.call("cuStreamWaitEvent", stream, self._handle, 0)

    def done(self) -> bool:
        """Whether it has been reached. Raises `CudaError` if something before it failed."""
        return self._handle is None or self._driver.ready(self._handle)

    def wait(self) -> None:
        """Waits on the calling thread. Raises `CudaError` if something before it failed."""
        if self._handle is not None:
            self._driver.call("cuEventSynchronize", self._handle)

    def seconds_since(self, earlier: CudaEvent) -> float:
        """Time between two events that were made with `timing` and are done."""
        from ctypes import byref, c_float

        milliseconds = c_float()
        self._driver.call("cuEventElapsedTime", byref(milliseconds), earlier._handle, self._handle)
        return milliseconds.value / 1e3

    def close(self) -> None:
        """Idempotent; a closed event counts as done."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._driver.call("cuEventDestroy_v2", handle)


class CudaStream:
    """A queue of work on the device, beside those of torch."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.handle = cast(int, driver.handle("cuStreamCreate", _NON_BLOCKING).value)
        self._closed = False

    def event(self) -> CudaEvent:
        """The point that the stream has reached."""
        return CudaEvent(self._driver, self.handle)

    def close(self) -> None:
        """Waits for what is on it. Idempotent."""
        if not self._closed:
            self._closed = True
            self._driver.call("cuStreamSynchronize", self.handle)
            self._driver.call("cuStreamDestroy_v2", self.handle)
