"""The worker side of a rank whose pages are on a (here emulated) CUDA device: copies that outlast their step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from lmkv_client.connector.engine_kv import LayerGroup
from lmkv_client.connector.identity import head_shares
from lmkv_client.connector.messages import LoadPlan, StepPlan, WorkerReport
from lmkv_client.connector.worker import side as worker_module
from lmkv_client.connector.worker.device_copier import DevicePageCopier
from lmkv_client.connector.worker.side import WorkerSide
from lmkv_client.engine.attachment import Attachment
from lmkv_kernels import checksum
from tests.client.connector.worker.parts import SPEC, ServedPool
from tests.client.connector.worker.test_device_copier import Model, open_emulated
from tests.kernels.layouts import Case, random_bytes
from tests.kernels.test_cuda_emulated import on_device, whole_chunks
from tests.waiting import WAIT_SECONDS, wait_until

Serve = Callable[..., ServedPool]

DEVICE_SECONDS = 1e-3
"""Between any two events of the emulated device."""


class OnDevice:
    """A worker, the engine's device, and the forwards on it."""

    def __init__(self, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        self.case = case
        self.later = random_bytes(1, case.memory.size)
        self.model = Model(case, self.later)
        copies = DevicePageCopier(
            [on_device(case.pages)], model_stream=lambda: self.model.stream.handle, open_device=open_emulated
        )
        monkeypatch.setattr(worker_module, "make_pages", lambda *_, **__: on_device(case.pages))
        monkeypatch.setattr(worker_module, "make_copies", lambda *_: copies)
        group = LayerGroup(part=0, block_size=SPEC.block_size, layer_names=("layer",))
        self.worker = WorkerSide(SPEC, head_shares(SPEC, 0, 1), groups=[group], rank=0, threads=1)
        self.worker.register({"layer": torch.zeros(1)})

    def attach(self, served: ServedPool) -> Attachment:
        """Maps and registers a pool."""
        attachment = served.attachment()
        self.worker.load(StepPlan(attachment=attachment))
        copies = self.worker._copies
        assert isinstance(copies, DevicePageCopier)
        assert copies._opening is not None
        copies._opening.result(WAIT_SECONDS)
        return attachment

    def report(self) -> WorkerReport:
        """The next report of the worker; steps continue meanwhile."""
        deadline = time.monotonic() + WAIT_SECONDS
        while (report := self.worker.take_report()) is None:
            assert time.monotonic() < deadline
            self.worker.take_finished()
            self.model.run()
        return report

    def close(self) -> None:
        self.worker.close()
        self.model.close()


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Iterator[OnDevice]:
    made = OnDevice(whole_chunks(4), monkeypatch)
    yield made
    made.close()


def load_of(case: Case, *, sync: bool) -> LoadPlan:
    return LoadPlan(request_id="r", copies=case.copies, sync=sync, final=True, checks=[], failed_blocks=[])


def test_a_store_is_reported_when_the_device_is_done_with_it(on: OnDevice, serve: Serve) -> None:
    served = serve(size_bytes=on.case.pool.size)
    attachment = on.attach(served)
    before = on.case.memory.copy()
    on.worker.store(StepPlan(attachment=attachment, stores=on.case.copies))
    assert on.worker.take_report() is None
    on.worker.load(StepPlan(attachment=attachment))  # the next step; its forward changes the pages
    on.model.forward(on.case.memory, on.later)
    report = on.report()
    assert report.store_seconds == DEVICE_SECONDS
    on.model.run()
    assert np.array_equal(on.case.memory, on.later)
    pool = np.frombuffer(served.pool.buffer, np.uint8)
    size = on.case.pages.extent_bytes(8)
    assert {offset: written.checksum for offset, written in report.stores.items()} == {
        copy.offset: checksum(pool, copy.offset, size) for copy in on.case.copies
    }
    on.case.memory[:] = before
    on.case.twin.gather(on.case.pool_tensor, on.case.copies)
    assert np.array_equal(pool, on.case.pool)


@pytest.mark.parametrize("sync", [True, False])
def test_a_load_is_reported_when_its_pages_are_filled(on: OnDevice, serve: Serve, sync: bool) -> None:
    served = serve(size_bytes=on.case.pool.size)
    attachment = on.attach(served)
    served.pool.buffer[:] = on.case.pool.tobytes()
    on.worker.load(StepPlan(attachment=attachment, loads=[load_of(on.case, sync=sync)]))
    finished = set[str]()
    deadline = time.monotonic() + WAIT_SECONDS
    while (report := on.worker.take_report()) is None:
        assert time.monotonic() < deadline
        finished |= on.worker.take_finished()
        on.model.run()
    assert finished == (set() if sync else {"r"})
    assert not report.loaded["r"].failed
    # The forward pass of a synchronous load is over before its end is seen; the device's clock leaves it out.
    assert (report.loaded["r"].seconds == DEVICE_SECONDS) == sync
    assert on.worker.take_failed_blocks() == set()
    filled = on.case.memory.copy()
    on.case.twin.scatter(on.case.pool_tensor, on.case.copies)
    assert np.array_equal(filled, on.case.memory)


def test_before_the_pool_is_registered_nothing_is_stored_and_loads_are_computed(
    on: OnDevice, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    on.worker.store(StepPlan(attachment=None, stores=on.case.copies))
    assert on.report().skipped == {copy.offset for copy in on.case.copies}
    assert not caplog.records, "it was said when registering began"
    on.worker.load(StepPlan(attachment=None, loads=[load_of(on.case, sync=True)]))
    assert on.report().loaded["r"].failed
    assert on.worker.take_failed_blocks() == {block for copy in on.case.copies for block in copy.block_ids}
    served = serve(size_bytes=on.case.pool.size)
    attachment = on.attach(served)
    on.worker.store(StepPlan(attachment=attachment, stores=on.case.copies))
    assert len(on.report().stores) == len(on.case.copies), "a failed load of an earlier step poisons only that step"


def test_another_pool_is_taken_while_the_device_still_stores_into_the_old_one(on: OnDevice, serve: Serve) -> None:
    old, new = serve(size_bytes=on.case.pool.size), serve(size_bytes=on.case.pool.size)
    on.worker.store(StepPlan(attachment=on.attach(old), stores=on.case.copies))
    attachment = on.attach(new)
    assert on.worker.take_report() is None, "what went into the old one is void"
    on.worker.store(StepPlan(attachment=attachment, stores=on.case.copies))
    assert len(on.report().stores) == len(on.case.copies)
    assert bytes(old.pool.buffer) == bytes(new.pool.buffer)


def test_without_steps_a_device_lets_go_of_the_pool_of_a_node_that_has_exited(on: OnDevice, serve: Serve) -> None:
    old, new = serve(size_bytes=on.case.pool.size), serve(size_bytes=on.case.pool.size)
    attachment = on.attach(old)
    on.worker.store(StepPlan(attachment=attachment, stores=on.case.copies))
    on.report()
    old.exit()
    wait_until(lambda: on.worker._pool is None)
    copies = on.worker._copies
    assert isinstance(copies, DevicePageCopier)
    assert copies._opening is None, "it is not registered any more"
    attachment = on.attach(new)
    on.worker.store(StepPlan(attachment=attachment, stores=on.case.copies))
    assert not on.report().skipped
