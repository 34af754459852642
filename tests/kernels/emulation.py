"""The emulated device: the CUDA kernels' own source, compiled for the processor behind the driver's interface.

It proves the kernels' arithmetic and the order that events give to work, on any machine. It proves nothing about speed,
nor about what only a device does: test_cuda_device.py is for that.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from lmkv_kernels.cuda import Device, Driver, Program

FOLDER = Path(__file__).parent
KERNELS = FOLDER.parent.parent / "kernels" / "csrc"
IMAGE = b"emulated"


def compile_driver(target: Path) -> None:
    """Compiles the emulated driver's library, with the kernels in it."""
    command = ["c++", "-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    folders = [f"-I{KERNELS}", f"-I{FOLDER}"]
    subprocess.run([*command, *folders, "-o", target, FOLDER / "emulated_driver.cpp"], check=True, timeout=60)


@cache
def emulated_driver() -> Driver:
    """The driver. Its file is gone once it is loaded."""
    with TemporaryDirectory(prefix="lmkv-") as folder:
        library = Path(folder, "libcuda.so")
        compile_driver(library)
        return Driver(str(library))


@contextmanager
def emulated_device() -> Iterator[tuple[Device, Program]]:
    """A device, and the kernels on it."""
    device = Device(emulated_driver())
    with device.current() as driver:
        program = Program(driver, IMAGE)
    try:
        yield device, program
    finally:
        with device.current():
            program.close()
        device.close()
