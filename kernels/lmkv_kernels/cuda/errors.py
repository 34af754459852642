"""Errors of CUDA. The caller falls back to copies on the host, or to none.

CudaError               a call of the driver failed
├── NoCuda              there is no driver, or no device
├── NoCompiler          no NVRTC and no nvcc
├── CompileError        the kernels could not be compiled
└── Busy                too many copies are in flight
"""

from __future__ import annotations


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
