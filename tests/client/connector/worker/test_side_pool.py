"""The worker side and its pool: mapping, replacement and loss of the node."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lmkv_client.connector.messages import ExtentChecksum
from lmkv_client.connector.worker import side as worker_module
from lmkv_client.connector.worker.page_copier import INLINE_BYTES
from lmkv_client.engine.attachment import Attachment
from lmkv_kernels import checksum
from tests.client.connector.worker.parts import (
    CHUNK_BLOCKS,
    CHUNK_BYTES,
    HEADS,
    LAYERS,
    TILE_BYTES,
    MakeWorker,
    Serve,
    ServedPool,
    caches,
    chunk_copy,
    finished,
    is_stored,
    load_of,
    pages_equal,
    plan_of,
    step,
    stored,
)
from tests.waiting import wait_until


@pytest.mark.parametrize("sync", [True, False])
def test_without_a_pool_loads_fail_and_stores_are_skipped(
    runtime_dir: Path, make_worker: MakeWorker, sync: bool
) -> None:
    nowhere = Attachment(engine_id="engine", pool_socket=str(runtime_dir / "none"), epoch=1)
    worker = make_worker(caches(1))
    step(worker, plan_of(nowhere, loads=[load_of([chunk_copy(0, [9, 1])], sync=sync)], stores=[chunk_copy(1, [3, 4])]))
    if not sync:
        finished(worker)
    assert worker.take_failed_blocks() == {9, 1}
    report = worker.take_report()
    assert report
    assert report.engine_id == "engine"
    assert report.skipped == {CHUNK_BYTES}
    assert report.loaded["r"].failed


def test_a_pool_that_could_not_be_mapped_is_mapped_when_its_node_is_there(
    serve: Serve, runtime_dir: Path, make_worker: MakeWorker
) -> None:
    later = Attachment(engine_id="engine", pool_socket=str(runtime_dir / "1.sock"), epoch=1)
    worker = make_worker(caches(1))
    step(worker, plan_of(later, stores=[chunk_copy(0, [3, 4])]))
    report = worker.take_report()
    assert report
    assert report.skipped == {0}
    served = serve()
    wait_until(lambda: is_stored(worker, served, {0: [3, 4]}))


@pytest.mark.parametrize("threads", [0, 1])
def test_a_load_waits_for_a_node_that_is_slow_to_hand_its_pool_over(
    serve: Serve, make_worker: MakeWorker, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "MAP_WAIT_SECONDS", 0.01)
    served, source, target = serve(), caches(1), caches(None)
    filler = make_worker(source)
    wait_until(lambda: is_stored(filler, served, {0: [3, 17]}))
    worker = make_worker(target, threads=threads)
    right = checksum(served.pool.buffer, 0, CHUNK_BYTES)
    checks = [ExtentChecksum(offset=0, size_bytes=CHUNK_BYTES, checksum=right)]
    plan = plan_of(served, loads=[load_of([chunk_copy(0, [9, 1])], checks=checks)], stores=[chunk_copy(1, [5, 6])])
    with served.stalled():
        step(worker, plan)
        assert worker.take_finished() == set(), "neither loaded nor given up"
    finished(worker)
    assert worker.take_failed_blocks() == set()
    assert pages_equal(source, [3, 17], target, [9, 1])
    report = worker.take_report()
    assert report
    assert report.skipped == {CHUNK_BYTES}, "pages of a step are stored in that step or not at all"
    assert is_stored(worker, served, {1: [5, 6]})


def test_a_load_that_waits_for_the_pool_of_a_node_that_is_replaced_fails(
    serve: Serve, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "MAP_WAIT_SECONDS", 0.01)
    old, new = serve(), serve()
    worker = make_worker(caches(None))
    with old.stalled():
        step(worker, plan_of(old, loads=[load_of([chunk_copy(0, [9, 1])])]))
        step(worker, plan_of(new))
    finished(worker)
    assert worker.take_failed_blocks() == {9, 1}, "its extents are not those of the new node"
    wait_until(lambda: new.workers == [("engine", 0)])
    wait_until(lambda: old.added_count == 1 and not old.workers, "the old node has seen it come and go")


def test_a_worker_that_follows_to_a_new_node_lets_go_of_the_old_one(serve: Serve, make_worker: MakeWorker) -> None:
    old, new = serve(), serve()
    source, target = caches(1), caches(None)
    worker = make_worker(source)
    stored(worker, old, {0: [3, 17]})
    assert old.workers == [("engine", 0)]
    stored(worker, new, {0: [5, 6]})
    assert new.workers == [("engine", 0)]
    wait_until(lambda: not old.workers)
    reader = make_worker(target)
    step(reader, plan_of(new, loads=[load_of([chunk_copy(0, [1, 2])], sync=True)]))
    assert pages_equal(source, [5, 6], target, [1, 2])


def test_while_the_node_is_lost_the_worker_keeps_the_pool_for_orders_it_has(
    serve: Serve, make_worker: MakeWorker
) -> None:
    served, source, target = serve(), caches(1), caches(None)
    stored(make_worker(source), served, {0: [3, 17]})
    worker = make_worker(target)
    step(worker, plan_of(served))
    step(worker, plan_of(None, loads=[load_of([chunk_copy(0, [9, 1])], sync=True)]))
    assert pages_equal(source, [3, 17], target, [9, 1])


def test_a_load_that_runs_while_the_node_changes_reads_the_pool_that_it_began_with(
    serve: Serve, make_worker: MakeWorker
) -> None:
    blocks = INLINE_BYTES // (LAYERS * HEADS * TILE_BYTES) + 100
    size_bytes = (blocks // CHUNK_BLOCKS + 1) * CHUNK_BYTES
    old, new = serve(size_bytes=size_bytes), serve(size_bytes=size_bytes)
    source, target = caches(1, blocks=blocks), caches(None, blocks=blocks)
    pages = [[page, page + 1] for page in range(0, blocks - 1, 2)]
    stored(make_worker(source), old, dict(enumerate(pages)))
    worker = make_worker(target)
    copies = [chunk_copy(number, pair) for number, pair in enumerate(pages)]
    step(worker, plan_of(old, loads=[load_of(copies)]))
    step(worker, plan_of(new))
    finished(worker)
    assert worker.take_failed_blocks() == set()
    order = [page for pair in pages for page in pair]
    assert pages_equal(source, order, target, order)


def test_a_load_that_is_checked_while_the_node_changes_keeps_the_pool_until_then(
    serve: Serve, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, source, target = serve(), serve(), caches(1), caches(None)
    stored(make_worker(source), old, {0: [3, 17]})
    worker = make_worker(target)
    step(worker, plan_of(old))
    copies = worker._copies
    assert copies
    close_pool, is_closed = copies.close_pool, threading.Event()

    def close(then: Callable[[], object]) -> None:
        close_pool(then)
        is_closed.set()

    monkeypatch.setattr(copies, "close_pool", close)
    worker._checker.submit(is_closed.wait, 0.3)  # the check comes after it
    right = checksum(old.pool.buffer, 0, CHUNK_BYTES)
    checks = [ExtentChecksum(offset=0, size_bytes=CHUNK_BYTES, checksum=right)]
    step(worker, plan_of(old, loads=[load_of([chunk_copy(0, [9, 1])], checks=checks)]))
    step(worker, plan_of(new))
    finished(worker)
    assert worker.take_failed_blocks() == set()
    assert pages_equal(source, [3, 17], target, [9, 1])


def test_without_steps_the_worker_lets_go_of_the_pool_of_a_node_that_has_exited(
    serve: Serve, make_worker: MakeWorker
) -> None:
    """Else the next node on this pool could store nothing until a request arrives."""
    old, new, source = serve(), serve(), caches(1)
    worker = make_worker(source)
    stored(worker, old, {0: [3, 17]})
    assert maps(old)
    step(worker, plan_of(old, tails={"tail": [chunk_copy(1, [4, 7])]}))
    old.exit()
    wait_until(lambda: not maps(old))
    assert worker.take_stored_requests() == {"tail"}, "its pages are not read any more"
    assert worker.take_report() is None, "no node learns of it"
    step(worker, plan_of(old, loads=[load_of([chunk_copy(0, [9, 1])], sync=True)]))
    assert worker.take_failed_blocks() == {9, 1}, "there is no pool to load from"
    assert is_stored(worker, new, {0: [5, 6]}), "the next node's pool is used"


def test_a_load_that_waits_for_more_chunks_keeps_the_pool_of_a_node_that_has_exited(
    serve: Serve, make_worker: MakeWorker
) -> None:
    served, source, target = serve(), caches(1), caches(None)
    stored(make_worker(source), served, {0: [3, 17], 1: [5, 6]})
    worker = make_worker(target)
    step(worker, plan_of(served, loads=[replace(load_of([chunk_copy(0, [9, 1])]), final=False)]))
    (pool,) = [worker._pool]
    assert pool
    served.exit()
    wait_until(lambda: worker._used_at + worker_module.IDLE_SECONDS < time.monotonic())
    assert worker._release_pool(pool) is not None
    step(worker, plan_of(None, loads=[load_of([chunk_copy(1, [2, 4])])]))
    finished(worker)
    assert worker.take_failed_blocks() == set()
    assert pages_equal(source, [3, 17, 5, 6], target, [9, 1, 2, 4])


def maps(served: ServedPool) -> bool:
    """Whether this process has a pool mapped besides its node."""
    shared = os.fstat(served.pool.fd)
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return sum(int(line.split()[4]) == shared.st_ino for line in lines) > 1
