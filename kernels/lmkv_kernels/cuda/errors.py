"""What can be wrong with CUDA. None of it is the caller's fault, and all of it means: copy on the host, or not at all.

CudaError               the driver refused a call
├── NoCuda              there is no driver, or no device
├── NoCompiler          no NVRTC and no nvcc
├── CompileError        the kernels could not be compiled
└── Busy                too many copies are under way
"""

from __future__ import annotations


class CudaError(RuntimeError):
    """The driver refused a call."""


class NoCuda(CudaError):
    """There is no CUDA driver, or no device that it knows."""


class NoCompiler(CudaError):
    """Nothing is here that compiles the kernels."""


class CompileError(CudaError):
    """The kernels could not be compiled; the message holds the compiler's."""


class Busy(CudaError):
    """More copies are under way than may be; these were not begun."""
