"""The CUDA kernels compile for every architecture that they are meant for, within stated resources. Needs no GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import pytest

from lmkv_kernels.cuda import CompileError, compilers, images
from lmkv_kernels.cuda.program import OPERATIONS, THREADS, WIDTHS

ARCHITECTURES = (80, 90, 100)
MAX_REGISTERS = 64
"""So that eight thread blocks, half of what a processor holds, fit its 65536 registers."""
COMPILERS: dict[str, Callable[[], images.Compiler]] = {"nvrtc": compilers.find_nvrtc, "nvcc": compilers.find_nvcc}


class Resources(NamedTuple):
    registers: int
    stack_bytes: int
    spilled_bytes: int


def resources(log: str) -> dict[str, Resources]:
    """Per kernel, what ptxas says that it takes."""
    pattern = (
        r"entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers"
    )
    return {
        name: Resources(int(registers), int(stack), int(stores) + int(loads))
        for name, stack, stores, loads, registers in re.findall(pattern, log, re.DOTALL)
    }


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", COMPILERS)
def test_every_kernel_keeps_to_its_registers_and_spills_nothing(name: str, architecture: int) -> None:
    compiled = images.compile_kernels(COMPILERS[name](), architecture)
    assert compiled.image.startswith(b"\x7fELF")
    taken = resources(compiled.log)
    assert set(taken) == {f"{operation}_{width}" for operation in OPERATIONS for width in WIDTHS}
    for kernel, resource in taken.items():
        assert 8 <= resource.registers <= MAX_REGISTERS, kernel
        assert resource.stack_bytes == resource.spilled_bytes == 0, kernel
    assert 8 * THREADS * MAX_REGISTERS <= 65536


def test_pieces_of_16_bytes_are_moved_by_single_instructions() -> None:
    found = compilers.find_nvrtc()
    ptx = images.compile_kernels(found, found.architectures()[-1] + 1).image.decode()
    body = ptx[ptx.index(".entry scatter_16(") :]
    body = body[: body.index("\n}")]
    stores = re.findall(r"^\s*(?:@\S+ )?(st\.\S+)", body, re.MULTILINE)
    assert stores
    assert all(re.fullmatch(r"st(\.global)?\.(v2\.[bu]64|v4\.[bu]32)", store) for store in stores)
    assert re.search(r"ld(\.global)?\.(v2\.[bu]64|v4\.[bu]32)", body)


def test_an_architecture_that_nvrtc_does_not_know_yet_gets_ptx_and_one_it_has_forgotten_an_error() -> None:
    found = compilers.find_nvrtc()
    image = images.compile_kernels(found, found.architectures()[-1] + 1).image
    assert f".target sm_{found.architectures()[-1]}".encode() in image
    assert image.endswith(b"\0")
    with pytest.raises(CompileError, match="sm_20, only from sm_"):
        images.compile_kernels(found, 20)


def test_compile_errors_contain_the_compilers_output() -> None:
    with pytest.raises(CompileError, match=r"broken\.cu.*undefined"):
        compilers.find_nvrtc().compile("broken.cu", "__global__ void kernel() { missing(); }", {}, 90)
