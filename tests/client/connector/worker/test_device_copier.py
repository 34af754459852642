"""The connector's device side: stores and loads of a rank whose pages are on a (here emulated) CUDA device."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from lmkv.pool.pool import LEFT_BYTES, Pool
from lmkv_client.connector.worker.device_copier import DevicePageCopier, PoolNotReady
from lmkv_client.connector.worker.running_copies import CopyHandle
from lmkv_kernels import ChunkCopy, Pages
from lmkv_kernels.cuda import CudaError, CudaStream, Device, Program, RegisteredMemory
from tests.kernels.emulation import IMAGE, emulated_driver
from tests.kernels.layouts import Bytes, Case, random_bytes
from tests.kernels.test_cuda_emulated import copy_now, on_device, whole_chunks


class Model:
    """The engine's device, and the stream that its forwards are on."""

    def __init__(self, case: Case, *buffers: Bytes) -> None:
        self.case = case
        self.device = Device(emulated_driver())
        with self.device.current() as driver:
            self._known = [RegisteredMemory(driver, one.ctypes.data, one.size) for one in (case.memory, *buffers)]
            self.stream = CudaStream(driver)

    def forward(self, target: Bytes, source: Bytes) -> None:
        """Puts work on the stream: `target` is what `source` is then."""
        with self.device.current():
            copy_now(self.device, self.stream, target, source)

    def run(self) -> None:
        """Lets the forwards run as early as they may."""
        with self.device.current():
            self.stream.event().wait()

    def close(self) -> None:
        with self.device.current():
            self.stream.close()
            for one in self._known:
                one.close()
        self.device.close()


def open_emulated(_ordinal: int) -> tuple[Device, Program]:
    device = Device(emulated_driver())
    with device.current() as driver:
        return device, Program(driver, IMAGE)


GROUPS = {"one group": (0, 3), "two groups": (0, 1, 3)}
"""Boundaries of groups of the three layers."""
ONE, TWO = GROUPS.values()


def in_groups(case: Case, marks: Sequence[int]) -> tuple[list[Pages], list[ChunkCopy]]:
    """The pages of each group of layers, and the copies of all of them."""
    pages = [
        dataclasses.replace(
            case.pages, layer_addresses=case.pages.layer_addresses[first:stop], first_layer=first, layer_count=3
        )
        for first, stop in itertools.pairwise(marks)
    ]
    copies = [dataclasses.replace(copy, group=group) for copy in case.copies for group in range(len(pages))]
    return pages, copies


def sums_of(handle: CopyHandle, copies: Sequence[ChunkCopy], case: Case) -> list[int]:
    """Checksums of the extents: the groups' parts added up."""
    sums = {copy.offset: 0 for copy in case.copies}
    for copy, part in zip(copies, handle.checksums, strict=True):
        sums[copy.offset] += part
    return [total % 2**64 for total in sums.values()]


@contextmanager
def running(case: Case, *buffers: Bytes, marks: Sequence[int] = ONE) -> Iterator[tuple[Model, DevicePageCopier]]:
    model = Model(case, *buffers)
    copies = DevicePageCopier(
        [on_device(pages) for pages in in_groups(case, marks)[0]],
        model_stream=lambda: model.stream.handle,
        open_device=open_emulated,
    )
    try:
        yield model, copies
    finally:
        copies.close()
        model.close()


def opened(copies: DevicePageCopier, pool: Pool) -> None:
    """Opens a pool and waits until it is registered."""
    copies.open(pool)
    assert copies._opening is not None
    copies._opening.result(10.0)


def close_pool(copies: DevicePageCopier) -> None:
    """Lets go of the pool and waits until it may be unmapped."""
    gone = threading.Event()
    copies.close_pool(gone.set)
    assert gone.wait(10.0)


@pytest.mark.parametrize("marks", GROUPS.values(), ids=GROUPS.keys())
def test_a_store_reads_what_the_forward_wrote_and_the_next_forward_does_not_disturb_it(marks: Sequence[int]) -> None:
    case = whole_chunks(6)
    _, plan = in_groups(case, marks)
    now, later = random_bytes(1, case.memory.size), random_bytes(2, case.memory.size)
    with Pool.create(case.pool.size) as pool, running(case, now, later, marks=marks) as (model, copies):
        opened(copies, pool)
        model.forward(case.memory, now)
        storing = copies.gather(plan)
        assert not storing.done()
        copies.begin_step()
        model.forward(case.memory, later)
        model.run()
        storing.wait()
        stored = np.frombuffer(pool.buffer, np.uint8).copy()
        close_pool(copies)
    assert np.array_equal(case.memory, later)
    case.memory[:] = now
    case.twin.gather(case.pool_tensor, case.copies)
    assert np.array_equal(stored, case.pool)
    assert sums_of(storing, plan, case) == case.expected_sums()


@pytest.mark.parametrize("marks", GROUPS.values(), ids=GROUPS.keys())
@pytest.mark.parametrize("sync", [True, False])
def test_a_load_waits_for_the_forward_before_it_and_a_forward_that_needs_it_waits_for_the_load(
    sync: bool, marks: Sequence[int]
) -> None:
    case = whole_chunks(6)
    _, plan = in_groups(case, marks)
    read, seen = np.zeros_like(case.memory), np.zeros_like(case.memory)
    before = case.memory.copy()
    with Pool.create(case.pool.size) as pool, running(case, read, seen, marks=marks) as (model, copies):
        pool.buffer[:] = case.pool.tobytes()
        opened(copies, pool)
        model.forward(read, case.memory)
        loading = copies.scatter(plan, sync=sync)
        copies.begin_step()
        model.forward(seen, case.memory)
        model.run()
        assert loading.done() == sync  # else the forward has not waited
        loading.wait()
        close_pool(copies)
    case.memory[:] = before
    case.twin.scatter(case.pool_tensor, case.copies)
    assert np.array_equal(read, before)
    assert np.array_equal(seen, case.memory if sync else before)


def test_groups_that_have_begun_have_ended_when_a_later_one_is_refused() -> None:
    """Their extents may then be given to others."""
    case = whole_chunks(2)
    _, (first, second, *_) = in_groups(case, TWO)
    with Pool.create(case.pool.size) as pool, running(case, marks=TWO) as (_, copies):
        opened(copies, pool)
        with pytest.raises(ValueError, match="ends behind the pool"):
            copies.gather([first, dataclasses.replace(second, offset=case.pool.size)])
        stored = np.frombuffer(pool.buffer, np.uint8).copy()
        layer_bytes = case.pages.extent_bytes(8) // 3
        case.twin.gather(case.pool_tensor, case.copies)
        assert np.array_equal(stored[:layer_bytes], case.pool[:layer_bytes])
        assert not stored[layer_bytes:].any()
        close_pool(copies)


def test_without_a_registered_pool_copies_are_refused() -> None:
    case = whole_chunks(1)
    with running(case) as (_, copies):
        assert not copies.ready
        with pytest.raises(PoolNotReady, match="not registered with CUDA yet"):
            copies.gather(case.copies)
        with Pool.create(case.pool.size) as pool:
            opened(copies, pool)
            assert copies.ready
            copies.gather(case.copies).wait()
            close_pool(copies)
            assert not copies.ready
            with pytest.raises(PoolNotReady):
                copies.scatter(case.copies, sync=False)


def test_a_pool_that_cannot_be_registered_is_said_and_let_go_of() -> None:
    case = whole_chunks(1)
    with running(case) as (model, copies), Pool.create(case.pool.size) as pool:
        with model.device.current() as driver:
            taken = RegisteredMemory(driver, pool.address, pool.size_bytes)  # the driver knows it already
        copies.open(pool)
        assert copies._opening is not None
        assert isinstance(copies._opening.exception(10.0), CudaError)
        assert not copies.ready
        with pytest.raises(PoolNotReady, match=r"cuMemHostRegister_v2: INVALID_VALUE"):
            copies.gather(case.copies)
        close_pool(copies)
        with model.device.current():
            taken.close()


class ShortPool(Pool):
    """Memory ends after this number of bytes."""

    there_bytes = 0

    def populate(self, start: int = 0, stop: int | None = None, *, leave_bytes: int = 0) -> None:
        assert leave_bytes == LEFT_BYTES
        raise self._ended(self.there_bytes, "no more memory")


def test_of_a_pool_whose_memory_ended_only_the_rest_is_used() -> None:
    case = whole_chunks(4)
    with running(case) as (_, copies), ShortPool.create(case.pool.size) as pool:
        pool.there_bytes = case.pool.size // 2
        opened(copies, pool)
        copies.gather(case.copies[:2]).wait()
        with pytest.raises(ValueError, match="ends behind the pool"):
            copies.gather(case.copies[2:])
        close_pool(copies)
        pool.there_bytes = 0
        copies.open(pool)
        assert copies._opening is not None
        assert isinstance(copies._opening.exception(10.0), PoolNotReady)
        close_pool(copies)


def test_a_pool_can_be_let_go_of_before_it_is_registered() -> None:
    case = whole_chunks(1)
    with running(case) as (_, copies), Pool.create(case.pool.size) as pool:
        busy = threading.Event()
        copies._thread.submit(busy.wait, 10.0)
        copies.open(pool)
        opening = copies._opening
        gone = threading.Event()
        copies.close_pool(gone.set)
        busy.set()
        assert gone.wait(10.0)
        assert opening is not None
        assert isinstance(opening.exception(), PoolNotReady)


@pytest.mark.parametrize("is_load", [False, True])
def test_copies_that_run_have_ended_when_they_are_settled(is_load: bool) -> None:
    case = whole_chunks(4)
    with running(case) as (model, copies), Pool.create(case.pool.size) as pool:
        opened(copies, pool)
        model.forward(case.memory, case.memory)
        copying = copies.scatter(case.copies, sync=False) if is_load else copies.gather(case.copies)
        assert not copying.done(), "the forward before it has not run"
        copies.settle()
        assert copying.done()


def test_another_pool_can_be_opened_while_copies_from_the_old_one_run() -> None:
    case = whole_chunks(4)
    with running(case) as (_, copies), Pool.create(case.pool.size) as old, Pool.create(case.pool.size) as new:
        opened(copies, old)
        storing = copies.gather(case.copies)
        close_pool(copies)
        assert storing.done()
        opened(copies, new)
        copies.gather(case.copies).wait()
        stored = [bytes(pool.buffer) for pool in (old, new)]
        close_pool(copies)
    case.twin.gather(case.pool_tensor, case.copies)
    assert stored == [case.pool.tobytes()] * 2


def test_the_pages_must_be_on_a_device_and_as_they_are_there() -> None:
    case = whole_chunks(1)
    with pytest.raises(ValueError, match="on cpu"):
        DevicePageCopier([case.pages], model_stream=lambda: 0, open_device=open_emulated)
    packed = dataclasses.replace(
        on_device(case.pages),
        parts=tuple(dataclasses.replace(part, row_stride=2, element_stride=8) for part in case.pages.parts[:1]),
    )
    with pytest.raises(ValueError, match="as on CPUs only"):
        DevicePageCopier([packed], model_stream=lambda: 0, open_device=open_emulated)


def test_closing_twice_is_fine() -> None:
    case = whole_chunks(1)
    with running(case) as (_, copies):
        copies.close()
