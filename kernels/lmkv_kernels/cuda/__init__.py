"""Copies between KV-cache pages on a CUDA device and chunks in the pool. GPU.

Nothing here is imported where there is no device to copy from; `driver()` says why there is none. `Copier` does what
`lmkv_kernels.gather` and `scatter` do, on streams of its own. docs/cuda.md tells how.
"""

from lmkv_kernels.cuda.copier import Copier, CopyPath, CopyPaths, PendingCopy
from lmkv_kernels.cuda.driver import Device, Driver, driver
from lmkv_kernels.cuda.errors import Busy, CompileError, CudaError, NoCompiler, NoCuda
from lmkv_kernels.cuda.memory import DeviceMemory, PinnedMemory, RegisteredMemory
from lmkv_kernels.cuda.program import Program
from lmkv_kernels.cuda.streams import CudaEvent, CudaStream

__all__ = [
    "Busy",
    "CompileError",
    "Copier",
    "CopyPath",
    "CopyPaths",
    "CudaError",
    "CudaEvent",
    "CudaStream",
    "Device",
    "DeviceMemory",
    "Driver",
    "NoCompiler",
    "NoCuda",
    "PendingCopy",
    "PinnedMemory",
    "Program",
    "RegisteredMemory",
    "driver",
]
