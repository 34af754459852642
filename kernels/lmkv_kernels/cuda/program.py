"""Loads the compiled kernels on a device and launches them."""

from __future__ import annotations

from ctypes import c_void_p
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lmkv_kernels.cuda import images
from lmkv_kernels.cuda.driver import CudaError, Device, Driver
from lmkv_kernels.pages import Pages

Operation = Literal["gather", "gather_sum", "scatter"]
OPERATIONS: tuple[Operation, ...] = ("gather", "gather_sum", "scatter")
THREADS = 128
"""Threads per block; the kernels are compiled for at most this."""
WIDTHS = (16, 8)
"""Bytes that a thread copies at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """The arguments of one launch, as device addresses."""

    layer_addresses: int
    copies: int
    block_ids: int
    copy_of_id: int
    staging_offsets: int
    """0: the launch is not staged, and `chunks` is the pool."""
    chunks: int
    sums: int
    id_count: int


class Program:
    """The kernels, loaded on a device. Must be closed with the device current."""

    def __init__(self, driver: Driver, image: bytes) -> None:
        self._driver = driver
        self._module: c_void_p | None = driver.handle("cuModuleLoadData", image)
        self._functions = {
            (operation, width): driver.handle("cuModuleGetFunction", self._module, f"{operation}_{width}".encode())
            for operation in OPERATIONS
            for width in WIDTHS
        }

    @classmethod
    def load(cls, device: Device) -> Program:
        """Loads the kernels for a device, and compiles them if necessary. Raises `CudaError`."""
        with device.current() as driver:
            try:
                return cls(driver, images.load(device.architecture, driver.version[0]))
            except CudaError:
                if not images.forget(device.architecture):
                    raise
                return cls(driver, images.load(device.architecture, driver.version[0]))

    def launch(
        self, operation: Operation, pages: Pages, width: int, arguments: Arguments, *, blocks: int, stream: int
    ) -> None:
        """Submits one launch of at most `blocks` thread blocks to a stream."""
        tiles = arguments.id_count * len(pages.layer_addresses) * pages.head_count
        if tiles >= 1 << 31:
            raise ValueError(f"{tiles} tiles are too many for one launch: copy less at a time")
        words = np.array(  # `lmkv::Launch`, field by field
            [
                len(pages.layer_addresses),
                *pages.geometry(),
                arguments.layer_addresses,
                arguments.copies,
                arguments.block_ids,
                arguments.copy_of_id,
                arguments.staging_offsets,
                arguments.chunks,
                arguments.sums,
                arguments.id_count,
            ],
            np.int64,
        )
        parameters = (c_void_p * 1)(words.ctypes.data)
        function = self._functions[operation, width]
        self._driver.call(
            "cuLaunchKernel", function, min(blocks, tiles), 1, 1, THREADS, 1, 1, 0, stream, parameters, None
        )

    def close(self) -> None:
        """Unloads the kernels, which no stream may run any more. Idempotent."""
        if self._module is not None:
            module, self._module = self._module, None
            self._driver.call("cuModuleUnload", module)


def width_of(pages: Pages, *addresses: int) -> int:
    """Bytes per access that the alignment of pages and addresses allows: 16 or 8."""
    numbers = [*pages.layer_addresses, pages.block_stride_bytes, pages.head_stride_bytes, pages.row_bytes, *addresses]
    for part in pages.parts:
        numbers += [part.offset, part.row_stride]
    return WIDTHS[0] if all(number % WIDTHS[0] == 0 for number in numbers) else WIDTHS[1]
