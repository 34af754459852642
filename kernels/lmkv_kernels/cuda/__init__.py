"""Copies between KV-cache pages on a CUDA device and chunks in the pool. GPU.

Nothing here is imported where there is no device to copy from; `driver()` says why there is none. `Copier` does what
`lmkv_kernels.gather` and `scatter` do, on streams of its own. docs/cuda.md tells how.
"""

from lmkv_kernels.cuda.copier import Copier, Copying, CopyPath, CopyPaths
from lmkv_kernels.cuda.driver import Device, Driver, driver
from lmkv_kernels.cuda.errors import Busy, CompileError, CudaError, NoCompiler, NoCuda
from lmkv_kernels.cuda.memory import DeviceMemory, PinnedMemory, Registration
from lmkv_kernels.cuda.program import Program
from lmkv_kernels.cuda.streams import Event, Stream

__all__ = [
    "Busy",
    "CompileError",
    "Copier",
    "CopyPath",
    "CopyPaths",
    "Copying",
    "CudaError",
    "Device",
    "DeviceMemory",
    "Driver",
    "Event",
    "NoCompiler",
    "NoCuda",
    "PinnedMemory",
    "Program",
    "Registration",
    "Stream",
    "driver",
]
