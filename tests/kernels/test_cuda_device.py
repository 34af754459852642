"""`CudaCopier` on a CUDA device, against the plain twin: bit for bit. Skipped where there is no device.

It needs the driver and NVRTC or nvcc, and no CUDA build of torch. test_cuda_emulated.py asks the same of the source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from lmkv.pool.pool import Pool
from lmkv_kernels import Pages, checksum
from lmkv_kernels.cuda import (
    CopyPath,
    CopyPaths,
    CudaCopier,
    CudaStream,
    Device,
    DeviceMemory,
    NoCuda,
    Program,
    RegisteredMemory,
    driver,
)
from lmkv_kernels.cuda.copier import fastest_paths
from tests.kernels.layouts import LAYOUTS, Bytes, Case, cases, large_case, random_bytes
from tests.kernels.test_cuda_emulated import WAYS, whole_chunks

SETTINGS = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@dataclasses.dataclass(frozen=True)
class Gpu:
    device: Device
    program: Program


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    """The first device, with the kernels compiled for it; current while the tests run."""
    try:
        cuda = driver()
    except NoCuda as error:
        pytest.skip(f"no CUDA device: {error}")
    device = Device(cuda)
    program = Program.load(device)
    with device.current():
        yield Gpu(device, program)
        program.close()
    device.close()


class OnDevice:
    """A case whose pages are a copy in device memory, and whose pool is a registered `Pool`."""

    def __init__(self, gpu: Gpu, case: Case, ways: CopyPaths, staging_bytes: int = 1 << 20) -> None:
        self.case, self.device = case, gpu.device
        cuda = gpu.device.driver
        with ExitStack() as stack:
            self.memory = DeviceMemory(cuda, case.memory.size)
            stack.callback(self.memory.close)
            self.model = CudaStream(cuda)
            stack.callback(self.model.close)
            pool = stack.enter_context(Pool.create(max(1, case.pool.size)))
            self.pool: Bytes = np.frombuffer(pool.buffer, np.uint8)[: case.pool.size]
            registration = RegisteredMemory(cuda, pool.address, pool.size_bytes)
            stack.callback(registration.close)
            ways = dataclasses.replace(ways, staging_bytes=staging_bytes)
            self.copier = CudaCopier(gpu.device, gpu.program, self._pages(), registration, paths=ways)
            stack.callback(self.copier.close)
            self._stack = stack.pop_all()
        self.write_pages(case.memory)
        self.pool[:] = case.pool

    def _pages(self) -> Pages:
        shift = self.memory.address - self.case.memory.ctypes.data
        addresses = tuple(address + shift for address in self.case.pages.layer_addresses)
        return dataclasses.replace(self.case.pages, layer_addresses=addresses, device="cuda:0")

    def write_pages(self, source: Bytes) -> None:
        """Puts a forward that writes all pages on the model's stream. It ends before this does, or not."""
        self._copy(self.memory.address, source.ctypes.data, source.size)

    def read_pages(self) -> Bytes:
        """The pages as they are once the model's stream has come here."""
        target = np.empty_like(self.case.memory)
        self._copy(target.ctypes.data, self.memory.address, target.size)
        self.model.event().wait()
        return target

    def _copy(self, target: int, source: int, size_bytes: int) -> None:
        self.device.driver.call("cuMemcpyAsync", target, source, size_bytes, self.model.handle)

    def __enter__(self) -> OnDevice:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


@SETTINGS
@given(case=cases(), way=st.sampled_from(CopyPath), staging_bytes=st.sampled_from([512, 4096, 1 << 20]))
def test_gather_writes_the_twins_bytes_and_no_others(gpu: Gpu, case: Case, way: CopyPath, staging_bytes: int) -> None:
    assume(case.twin.inside != "packed")
    with OnDevice(gpu, case, WAYS[way], staging_bytes) as there:
        copying = there.copier.gather(case.copies, after=there.model.handle)
        copying.wait()
        pool, pages = there.pool.copy(), there.read_pages()
    assert np.array_equal(pages, case.memory)
    case.twin.gather(case.pool_tensor, case.copies)
    assert np.array_equal(pool, case.pool)
    assert copying.checksums == case.expected_sums()


@SETTINGS
@given(case=cases(), way=st.sampled_from(CopyPath), staging_bytes=st.sampled_from([512, 4096, 1 << 20]))
def test_scatter_writes_the_twins_bytes_and_no_others(gpu: Gpu, case: Case, way: CopyPath, staging_bytes: int) -> None:
    assume(case.twin.inside != "packed")
    with OnDevice(gpu, case, WAYS[way], staging_bytes) as there:
        there.copier.scatter(case.copies, after=there.model.handle).wait()
        pool, pages = there.pool.copy(), there.read_pages()
    assert np.array_equal(pool, case.pool)
    case.twin.scatter(case.pool_tensor, case.copies)
    assert np.array_equal(pages, case.memory)


@pytest.mark.parametrize("way", CopyPath)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_chunks(gpu: Gpu, layout: str, way: CopyPath) -> None:
    case = whole_chunks(40, layout=layout)
    with OnDevice(gpu, case, WAYS[way], 64 << 10) as there:
        there.copier.gather(case.copies, after=there.model.handle).wait()
        pool = there.pool.copy()
    case.twin.gather(case.pool_tensor, case.copies)
    assert np.array_equal(pool, case.pool)


@pytest.mark.parametrize("way", CopyPath)
def test_large_chunks_go_out_and_come_back(gpu: Gpu, way: CopyPath) -> None:
    case = large_case(layer_count=16, chunk_count=16, inside="tokens")
    with OnDevice(gpu, case, WAYS[way], 8 << 20) as there:
        storing = there.copier.gather(case.copies, after=there.model.handle)
        storing.wait()
        extent = case.pages.extent_bytes(256)
        assert storing.checksums == [checksum(there.pool, copy.offset, extent) for copy in case.copies]
        there.write_pages(np.zeros_like(case.memory))
        there.copier.scatter(case.copies, after=there.model.handle).block_stream(there.model.handle)
        assert np.array_equal(there.read_pages(), case.memory)


@pytest.mark.parametrize("way", CopyPath)
def test_forwards_and_copies_are_ordered_without_waiting(gpu: Gpu, way: CopyPath) -> None:
    case = large_case(layer_count=8, chunk_count=8, inside="tokens")
    contents = [random_bytes(seed, case.memory.size) for seed in range(8)]
    with OnDevice(gpu, case, WAYS[way], 4 << 20) as there:
        for content in contents:
            there.write_pages(content)
            copying = there.copier.gather(case.copies, after=there.model.handle)
            copying.block_stream_until_read(there.model.handle)
            there.write_pages(np.zeros_like(content))  # the next forward
            copying.wait()
            case.memory[:] = content
            case.twin.gather(case.pool_tensor, case.copies)
            assert np.array_equal(there.pool, case.pool)


def test_measuring_the_ways_changes_no_page(gpu: Gpu) -> None:
    case = large_case(layer_count=8, chunk_count=8, inside="tokens")
    with OnDevice(gpu, case, CopyPaths()) as there:
        there.model.event().wait()
        ways = fastest_paths(gpu.device, gpu.program, there.copier.pages)
        assert isinstance(ways.gather, CopyPath)
        assert isinstance(ways.scatter, CopyPath)
        assert np.array_equal(there.read_pages(), case.memory)
