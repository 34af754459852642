"""Copies between KV-cache pages on a CUDA device and chunks in the pool (docs/contribute/kernels.md).

Imported only by processes with a GPU. `driver()` raises `NoCuda` with the reason if there is none. Start with
`copier.CudaCopier`, which does what `lmkv_kernels.gather` and `scatter` do, on streams of its own.
"""

from lmkv_kernels.cuda.copier import CopyPath, CopyPaths, CudaCopier, PendingCopy
from lmkv_kernels.cuda.driver import Busy, CompileError, CudaError, Device, Driver, NoCompiler, NoCuda, driver
from lmkv_kernels.cuda.memory import CudaEvent, CudaStream, DeviceMemory, PinnedMemory, RegisteredMemory
from lmkv_kernels.cuda.program import Program

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
