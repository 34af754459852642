"""The CUDA driver library and its devices, through ctypes: only the functions that copies need."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from typing import NamedTuple


class CudaError(RuntimeError):
    """A call of the CUDA driver failed."""


class NoCuda(CudaError):
    """There is no CUDA driver or no device."""


class NoCompiler(CudaError):
    """Neither NVRTC nor nvcc is installed."""


class CompileError(CudaError):
    """The kernels could not be compiled; the message contains the compiler's."""


class Busy(CudaError):
    """Too many copies are in flight; these were not started."""


LIBRARY = "libcuda.so.1"
NOT_READY = 600
_COMPUTE_MAJOR, _COMPUTE_MINOR, _PROCESSORS = 75, 76, 16
_HOST, _DEVICE = 1, 2


class Rectangle(Structure):
    """`CUDA_MEMCPY2D`: a copy of rows between two memories, each with its own pitch."""

    _fields_ = [
        (f"{side}_{name}", kind)
        for side in ("source", "target")
        for name, kind in (
            ("x", c_size_t),
            ("y", c_size_t),
            ("memory", c_int),
            ("host", c_void_p),
            ("device", c_uint64),
            ("array", c_void_p),
            ("pitch", c_size_t),
        )
    ] + [("width", c_size_t), ("height", c_size_t)]


_FUNCTIONS = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceGetPCIBusId": (c_char_p, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuModuleLoadData": (POINTER(c_void_p), c_char_p),
    "cuModuleUnload": (c_void_p,),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuLaunchKernel": (c_void_p, *[c_uint] * 7, c_void_p, POINTER(c_void_p), c_void_p),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventSynchronize": (c_void_p,),
    "cuEventElapsedTime": (POINTER(c_float), c_void_p, c_void_p),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemHostAlloc": (POINTER(c_void_p), c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemHostGetDevicePointer_v2": (POINTER(c_uint64), c_void_p, c_uint),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemcpy2DAsync_v2": (POINTER(Rectangle), c_void_p),
}


class Driver:
    """The initialized library. Raises `NoCuda` with the reason if there is no driver or no device."""

    def __init__(self, path: str = LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(path)
            for name, types in _FUNCTIONS.items():
                getattr(self._library, name).argtypes = types
        except (OSError, AttributeError) as error:
            raise NoCuda(f"no CUDA driver: {error}") from None
        self._library.cuGetErrorName.argtypes = (c_int, POINTER(c_char_p))
        self._library.cuGetErrorString.argtypes = (c_int, POINTER(c_char_p))
        if status := self._library.cuInit(0):
            raise NoCuda(f"no CUDA device: cuInit: {self._reason(status)}")
        number = self.integer("cuDriverGetVersion")
        self.version = (number // 1000, number % 1000 // 10)
        """Supported version of CUDA, major and minor."""
        self.device_count = self.integer("cuDeviceGetCount")
        if not self.device_count:
            raise NoCuda("no CUDA device: the driver reports none")

    def call(self, function: str, *arguments: object) -> None:
        """Calls a function. Raises `CudaError` with the driver's message if it fails."""
        if status := getattr(self._library, function)(*arguments):
            raise CudaError(f"{function}: {self._reason(status)}")

    def integer(self, function: str, *arguments: object) -> int:
        """The int that a function returns through its first parameter."""
        result = c_int()
        self.call(function, ctypes.byref(result), *arguments)
        return result.value

    def address(self, function: str, *arguments: object) -> int:
        """The device address that a function returns through its first parameter."""
        result = c_uint64()
        self.call(function, ctypes.byref(result), *arguments)
        return result.value

    def handle(self, function: str, *arguments: object) -> c_void_p:
        """The handle or host address that a function returns through its first parameter."""
        result = c_void_p()
        self.call(function, ctypes.byref(result), *arguments)
        return result

    def text(self, function: str, *arguments: object) -> str:
        """The string that a function writes to its first parameter."""
        buffer = ctypes.create_string_buffer(256)
        self.call(function, buffer, len(buffer), *arguments)
        return buffer.value.decode()

    def ready(self, event: c_void_p) -> bool:
        """Whether an event has completed. Raises `CudaError` if work before it failed."""
        status = self._library.cuEventQuery(event)
        if status not in (0, NOT_READY):
            raise CudaError(f"cuEventQuery: {self._reason(status)}")
        return bool(status == 0)

    def _reason(self, status: int) -> str:
        words = []
        for function in (self._library.cuGetErrorName, self._library.cuGetErrorString):
            text = c_char_p()
            function(status, ctypes.byref(text))
            words.append((text.value or b"?").decode())
        return f"{words[0]} ({words[1]})"


@cache
def driver() -> Driver:
    """The driver of this machine. Raises `NoCuda`."""
    return Driver()


class Device:
    """One device and its primary context, which torch uses too, retained on first use.

    Must be closed.
    """

    def __init__(self, driver: Driver, ordinal: int = 0) -> None:
        self.driver = driver
        self.ordinal = driver.integer("cuDeviceGet", ordinal)
        self.name = driver.text("cuDeviceGetName", self.ordinal)
        major, minor = (self._attribute(which) for which in (_COMPUTE_MAJOR, _COMPUTE_MINOR))
        self.architecture = 10 * major + minor
        """Such as 90 for sm_90."""
        self.processor_count = self._attribute(_PROCESSORS)
        """Number of streaming multiprocessors."""
        self.pci_address = driver.text("cuDeviceGetPCIBusId", self.ordinal).lower()
        """The address by which /sys/bus/pci/devices lists it."""
        self._context: c_void_p | None = None
        self._lock = threading.Lock()

    def _attribute(self, which: int) -> int:
        return self.driver.integer("cuDeviceGetAttribute", which, self.ordinal)

    @contextmanager
    def current(self) -> Iterator[Driver]:
        """Makes this device current on the calling thread; yields the driver."""
        with self._lock:
            if self._context is None:
                self._context = self.driver.handle("cuDevicePrimaryCtxRetain", self.ordinal)
        self.driver.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield self.driver
        finally:
            self.driver.handle("cuCtxPopCurrent_v2")

    def close(self) -> None:
        """Releases the context. Idempotent."""
        with self._lock:
            if self._context is not None:
                self._context = None
                self.driver.call("cuDevicePrimaryCtxRelease_v2", self.ordinal)


class Rows2d(NamedTuple):
    """Rows of equal size in one memory."""

    address: int
    """The first row's."""
    pitch: int
    """Bytes from one row to the next."""


def rectangle(host: Rows2d, device: Rows2d, width: int, height: int, *, to_host: bool) -> Rectangle:
    """A copy of `height` rows of `width` bytes between host and device."""
    host_side, device_side = ("target", "source") if to_host else ("source", "target")
    return Rectangle(
        **{
            f"{host_side}_memory": _HOST,
            f"{host_side}_host": host.address,
            f"{host_side}_pitch": host.pitch,
            f"{device_side}_memory": _DEVICE,
            f"{device_side}_device": device.address,
            f"{device_side}_pitch": device.pitch,
        },
        width=width,
        height=height,
    )
