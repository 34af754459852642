"""Copies between KV-cache pages on a CUDA device and chunks in the pool (docs/contribute/cuda.md).

Imported only by processes with a GPU. `driver()` raises `NoCuda` with the reason if there is none. Start with
`copier.CudaCopier`, which does what `lmkv_kernels.gather` and `scatter` do, on streams of its own.
"""

from lmkv_kernels.cuda.copier import CopyPath, CopyPaths, CudaCopier, PendingCopy
from lmkv_kernels.cuda.driver import Device, Driver, driver
from lmkv_kernels.cuda.errors import Busy, CompileError, CudaError, NoCompiler, NoCuda
from lmkv_kernels.cuda.memory import DeviceMemory, PinnedMemory, RegisteredMemory
from lmkv_kernels.cuda.program import Program
from lmkv_kernels.cuda.streams import CudaEvent, CudaStream

__all__ = [
    "Busy",
    "CompileError",
    "CopyPath",
    "CopyPaths",
    "CudaCopier",
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
