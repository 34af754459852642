"""The worker side with real tensors in vLLM's CPU layout: loads and stores."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lmkv_client.connector.identity import head_shares
from lmkv_client.connector.messages import AuditedExtent, Comparison, ExtentChecksum, StoreResult
from lmkv_client.connector.worker import page_copier
from lmkv_client.connector.worker import side as worker_module
from lmkv_client.connector.worker.comparison import compare
from lmkv_client.connector.worker.page_copier import INLINE_BYTES
from lmkv_client.connector.worker.running_copies import GatherTask
from lmkv_client.connector.worker.side import WorkerSide
from lmkv_kernels import ChunkCopy, checksum, gather
from tests.client.connector.worker.parts import (
    BLOCK,
    BLOCKS,
    CHUNK_BLOCKS,
    CHUNK_BYTES,
    CONTENT,
    GROUP,
    HEADS,
    LAYERS,
    NAMES,
    SPEC,
    TILE_BYTES,
    MakeWorker,
    Serve,
    caches,
    chunk_copy,
    finished,
    load_of,
    pages_equal,
    plan_of,
    step,
    stored,
)
from tests.waiting import WAIT_SECONDS, wait_until


@pytest.mark.parametrize("sync", [True, False])
def test_what_was_stored_is_loaded_into_other_pages_of_another_engine_bit_for_bit(
    serve: Serve, make_worker: MakeWorker, sync: bool
) -> None:
    served, source, target = serve(), caches(1), caches(None)
    stored(make_worker(source), served, {0: [3, 17], 1: [5, 4]})
    worker = make_worker(target)
    step(worker, plan_of(served, loads=[load_of([chunk_copy(0, [9, 1]), chunk_copy(1, [20, 2])], sync=sync)]))
    if not sync:
        finished(worker)
    assert pages_equal(source, [3, 17, 5, 4], target, [9, 1, 20, 2])
    untouched = [page for page in range(BLOCKS) if page not in (9, 1, 20, 2)]
    assert not any(bool(cache[untouched].any()) for cache in target.values())
    assert worker.take_failed_blocks() == set()
    report = worker.take_report()
    assert report
    loaded = report.loaded["r"]
    assert (loaded.rank_count, loaded.failed, loaded.size_bytes) == (1, False, 2 * CHUNK_BYTES)


def test_a_load_too_large_for_one_go_arrives_whole(serve: Serve, make_worker: MakeWorker) -> None:
    blocks = INLINE_BYTES // (LAYERS * HEADS * TILE_BYTES) + 100
    served = serve(size_bytes=(blocks // CHUNK_BLOCKS + 1) * CHUNK_BYTES)
    source, target = caches(1, blocks=blocks), caches(None, blocks=blocks)
    pages = [list(pair) for pair in itertools.pairwise(range(blocks))][::2]
    stored(make_worker(source, threads=0), served, dict(enumerate(pages)))
    worker = make_worker(target, threads=0)
    copies = [chunk_copy(number, pair[::-1]) for number, pair in enumerate(pages)]
    step(worker, plan_of(served, loads=[load_of(copies)]))
    finished(worker)
    order = [page for pair in pages for page in pair]
    mirrored = [page for pair in pages for page in pair[::-1]]
    assert pages_equal(source, order, target, mirrored)


def test_a_store_runs_beside_what_follows_and_ends_before_pages_change(
    serve: Serve, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_copier, "INLINE_GATHER_BYTES", 0)
    waited_for = threading.Event()
    wait = GatherTask.wait

    def wait_for_it(task: GatherTask) -> None:
        waited_for.set()
        wait(task)

    def gather_late(*args: Any, **options: Any) -> list[int]:
        assert waited_for.wait(WAIT_SECONDS)
        return gather(*args, **options)

    monkeypatch.setattr(GatherTask, "wait", wait_for_it)
    monkeypatch.setattr(page_copier, "gather", gather_late)
    served, source, target = serve(), caches(1), caches(None)
    worker = make_worker(source)
    worker.begin_step()
    step(worker, plan_of(served, stores=[chunk_copy(0, [3, 17])], tails={"r": [chunk_copy(1, [5, 4])]}))
    assert worker.take_report() is None
    assert worker.take_stored_requests() == set()
    worker.begin_step()
    before = {name: cache.clone() for name, cache in source.items()}
    for cache in source.values():
        cache.zero_()
    assert worker.take_stored_requests() == {"r"}
    report = worker.take_report()
    assert report
    assert {at: one.checksum for at, one in report.stores.items()} == {
        at: checksum(served.pool.buffer, at, CHUNK_BYTES) for at in (0, CHUNK_BYTES)
    }
    step(worker := make_worker(target), plan_of(served, loads=[load_of([chunk_copy(0, [1, 2])], sync=True)]))
    assert pages_equal(before, [3, 17], target, [1, 2])


def test_where_no_one_says_that_a_step_begins_a_store_ends_in_its_own(
    serve: Serve, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_copier, "INLINE_GATHER_BYTES", 0)
    worker = make_worker(caches(1))
    step(worker, plan_of(serve(), stores=[chunk_copy(0, [3, 17])]))
    report = worker.take_report()
    assert report
    assert list(report.stores) == [0]


def test_a_store_that_fails_beside_what_follows_is_skipped(
    serve: Serve, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_copier, "INLINE_GATHER_BYTES", 0)
    worker = make_worker(caches(1))
    worker.begin_step()
    step(worker, plan_of(serve(), stores=[chunk_copy(0, [3, BLOCKS])]))
    worker.begin_step()
    report = worker.take_report()
    assert report
    assert report.stores == {0: StoreResult(rank_count=1, failed=True)}


def test_pages_are_released_after_the_copies_that_read_them(
    serve: Serve, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_copier, "INLINE_GATHER_BYTES", 0)
    reads, may_end, source, served = threading.Event(), threading.Event(), caches(1), serve()

    def gather_late(*args: Any, **options: Any) -> list[int]:
        reads.set()
        assert may_end.wait(WAIT_SECONDS)
        return gather(*args, **options)

    monkeypatch.setattr(page_copier, "gather", gather_late)
    worker = make_worker(source)
    worker.begin_step()
    step(worker, plan_of(served, stores=[chunk_copy(0, [3, 17])]))
    assert reads.wait(WAIT_SECONDS)
    releasing = threading.Thread(target=worker.release_pages)
    releasing.start()
    releasing.join(0.2)
    assert releasing.is_alive(), "a store still reads the pages"
    may_end.set()
    releasing.join(WAIT_SECONDS)
    for cache in source.values():
        cache.zero_()
    report = worker.take_report()
    assert report
    assert report.stores[0].checksum == checksum(served.pool.buffer, 0, CHUNK_BYTES) != 0


def test_pages_are_released_after_the_comparisons_that_read_them(
    serve: Serve, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, may_end, source, served = threading.Event(), threading.Event(), caches(1), serve()

    def compare_late(*args: Any) -> Any:
        reads.set()
        assert may_end.wait(WAIT_SECONDS)
        return compare(*args)

    monkeypatch.setattr(worker_module, "compare", compare_late)
    worker = make_worker(source)
    stored(worker, served, {0: [3, 17]})
    held = ExtentChecksum(offset=0, size_bytes=CHUNK_BYTES, checksum=checksum(served.pool.buffer, 0, CHUNK_BYTES))
    copy = chunk_copy(1, [3, 17])
    audited = AuditedExtent(held=held, token_count=copy.extent_tokens, computed_count=copy.extent_tokens)
    plan = replace(plan_of(served, stores=[copy]), audits={CHUNK_BYTES: audited})

    def compared() -> Comparison | None:
        report = worker.take_report()
        return report.stores[CHUNK_BYTES].comparison if report and CHUNK_BYTES in report.stores else None

    step(worker, plan)
    assert compared() is None
    assert reads.wait(WAIT_SECONDS)
    releasing = threading.Thread(target=worker.release_pages)
    releasing.start()
    releasing.join(0.2)
    assert releasing.is_alive(), "a comparison still reads the pages"
    may_end.set()
    releasing.join(WAIT_SECONDS)
    found = compared()
    assert found
    assert not found.is_void
    worker.restore_pages()
    step(worker, plan)
    worker.release_pages()
    wait_until(lambda: (found := compared()) is not None and found.is_void)


def test_between_release_and_restoration_of_the_pages_nothing_is_copied(serve: Serve, make_worker: MakeWorker) -> None:
    served, source, target = serve(), caches(1), caches(None)
    stored(make_worker(source), served, {0: [3, 17]})
    worker = make_worker(target)
    step(worker, plan_of(served))
    worker.release_pages()
    worker.release_pages()
    step(worker, plan_of(served, stores=[chunk_copy(1, [5, 4])], loads=[load_of([chunk_copy(0, [9, 1])])]))
    finished(worker)
    report = worker.take_report()
    assert report
    assert report.stores == {CHUNK_BYTES: StoreResult(rank_count=1, failed=True)}
    assert report.loaded["r"].failed
    assert worker.take_failed_blocks() == {9, 1}
    assert not any(bool(cache.any()) for cache in target.values())
    worker.restore_pages()
    worker.restore_pages()
    step(worker, plan_of(served, loads=[load_of([chunk_copy(0, [9, 1])], sync=True)]))
    assert pages_equal(source, [3, 17], target, [9, 1])


def test_a_large_load_of_a_step_is_done_when_the_forward_starts(
    serve: Serve, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_copier, "INLINE_BYTES", 0)
    served, source, target = serve(), caches(1), caches(None)
    stored(make_worker(source), served, {0: [3, 17]})
    step(make_worker(target), plan_of(served, loads=[load_of([chunk_copy(0, [9, 1])], sync=True)]))
    assert pages_equal(source, [3, 17], target, [9, 1])


def test_the_tail_of_a_chunk_is_loaded_alone(serve: Serve, make_worker: MakeWorker) -> None:
    served, source, target = serve(), caches(1), caches(None)
    stored(make_worker(source), served, {0: [3, 17]})
    worker = make_worker(target)
    step(worker, plan_of(served, loads=[load_of([chunk_copy(0, [8], first_block=1)], sync=True)]))
    assert pages_equal(source, [17], target, [8])


def test_a_partial_chunk_takes_only_its_own_blocks(serve: Serve, make_worker: MakeWorker) -> None:
    served, source, target = serve(), caches(1), caches(None)
    stored(make_worker(source), served, {2: [6]})
    worker = make_worker(target)
    step(worker, plan_of(served, loads=[load_of([chunk_copy(2, [7], blocks=1)], sync=True)]))
    assert pages_equal(source, [6], target, [7])


def test_ranks_write_their_heads_and_their_checksums_add_up(serve: Serve, make_worker: MakeWorker) -> None:
    served, whole = serve(), caches(1)
    halves = [{name: cache[:, 2 * rank : 2 * rank + 2].clone() for name, cache in whole.items()} for rank in range(2)]
    reports = []
    for rank, half in enumerate(halves):
        worker = make_worker(half, rank=rank, ranks=2)
        step(worker, plan_of(served, stores=[chunk_copy(0, [3, 17])]))
        reports.append(worker.take_report())
    first, second = reports
    assert first
    assert second
    both = first.aggregate(second)
    assert both.stores[0].rank_count == 2
    assert both.stores[0].checksum == checksum(served.pool.buffer, 0, CHUNK_BYTES)

    target = caches(None)
    step(make_worker(target), plan_of(served, loads=[load_of([chunk_copy(0, [1, 2])], sync=True)]))
    assert pages_equal(whole, [3, 17], target, [1, 2]), "an engine of one rank reads what two have written"


def test_a_load_that_comes_in_pieces_is_over_with_its_last(serve: Serve, make_worker: MakeWorker) -> None:
    served, source, target = serve(), caches(1), caches(None)
    stored(make_worker(source), served, {0: [3, 17], 1: [5, 4]})
    worker = make_worker(target)
    step(worker, plan_of(served, loads=[load_of([chunk_copy(0, [9, 1])], final=False)]))
    for _ in range(3):
        assert worker.take_finished() == set()
        step(worker, plan_of(served))
    step(worker, plan_of(served, loads=[load_of([chunk_copy(1, [20, 2])])]))
    finished(worker)
    assert pages_equal(source, [3, 17, 5, 4], target, [9, 1, 20, 2])
    report = worker.take_report()
    assert report
    assert report.loaded["r"].size_bytes == 2 * CHUNK_BYTES


def test_pages_that_never_come_are_reported_with_the_end_of_the_load(serve: Serve, make_worker: MakeWorker) -> None:
    served, source, target = serve(), caches(1), caches(None)
    stored(make_worker(source), served, {0: [3, 17]})
    worker = make_worker(target)
    step(worker, plan_of(served, loads=[load_of([chunk_copy(0, [9, 1])], failed_blocks=[11, 12])]))
    finished(worker)
    assert worker.take_failed_blocks() == {11, 12}
    assert worker.take_failed_blocks() == set()
    report = worker.take_report()
    assert report
    assert not report.loaded["r"].failed
    assert pages_equal(source, [3, 17], target, [9, 1])


def test_a_load_without_anything_to_copy_ends_too(serve: Serve, make_worker: MakeWorker) -> None:
    worker = make_worker(caches(None))
    step(worker, plan_of(serve(), loads=[load_of([], failed_blocks=[4])]))
    finished(worker)
    assert worker.take_failed_blocks() == {4}


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize(
    "bad", [chunk_copy(100, [1, 2]), chunk_copy(0, [1, BLOCKS]), chunk_copy(0, [1, 2], first_block=1)]
)
def test_a_copy_that_does_not_fit_is_reported_page_by_page(
    serve: Serve, make_worker: MakeWorker, sync: bool, bad: ChunkCopy
) -> None:
    worker = make_worker(caches(None))
    step(worker, plan_of(serve(), loads=[load_of([bad], sync=sync)]))
    if not sync:
        finished(worker)
    assert worker.take_failed_blocks() == set(bad.block_ids)
    report = worker.take_report()
    assert report
    assert (report.loaded["r"].failed, report.loaded["r"].size_bytes) == (True, 0)


def test_a_store_that_does_not_fit_is_skipped(serve: Serve, make_worker: MakeWorker) -> None:
    worker = make_worker(caches(1))
    step(worker, plan_of(serve(), stores=[chunk_copy(100, [1, 2])]))
    report = worker.take_report()
    assert report
    assert report.stores == {100 * CHUNK_BYTES: StoreResult(rank_count=1, failed=True)}


def test_tails_are_stored_with_the_chunks_of_the_step_and_their_requests_reported_once(
    serve: Serve, make_worker: MakeWorker
) -> None:
    served, source, target = serve(), caches(1), caches(None)
    worker = make_worker(source)
    tails = {"a": [chunk_copy(1, [5], blocks=1)], "b": [chunk_copy(2, [6, 7])], "c": []}
    step(worker, plan_of(served, stores=[chunk_copy(0, [3, 4])], tails=tails))
    assert worker.take_stored_requests() == {"a", "b", "c"}
    assert worker.take_stored_requests() == set()
    report = worker.take_report()
    assert report
    assert set(report.stores) == {0, CHUNK_BYTES, 2 * CHUNK_BYTES}
    assert not report.skipped
    other = make_worker(target)
    copies = [chunk_copy(1, [1], blocks=1), chunk_copy(2, [8, 9])]
    step(other, plan_of(served, loads=[load_of(copies, sync=True)]))
    assert pages_equal(source, [5, 6, 7], target, [1, 8, 9])


def test_requests_whose_tails_cannot_be_stored_are_reported_too(serve: Serve, make_worker: MakeWorker) -> None:
    worker = make_worker(caches(1))
    step(worker, plan_of(None, tails={"no pool": [chunk_copy(0, [3, 4])]}))
    assert worker.take_stored_requests() == {"no pool"}
    step(worker, plan_of(serve(), tails={"does not fit": [chunk_copy(99, [3, 4])]}))
    assert worker.take_stored_requests() == {"does not fit"}
    report = worker.take_report()
    assert report
    assert report.stores == {99 * CHUNK_BYTES: StoreResult(rank_count=1, failed=True)}


def test_after_a_failed_synchronous_load_the_step_stores_nothing_and_the_next_does(
    serve: Serve, make_worker: MakeWorker
) -> None:
    served = serve()
    worker = make_worker(caches(1))
    store = [chunk_copy(1, [3, 4])]
    step(worker, plan_of(served, loads=[load_of([], sync=True, failed_blocks=[3])], stores=store))
    report = worker.take_report()
    assert report
    assert report.skipped == {CHUNK_BYTES}
    assert not np.frombuffer(served.pool.buffer, np.uint8).any()
    stored(worker, served, {1: [3, 4]})


def test_a_failed_asynchronous_load_does_not_keep_others_from_being_stored(
    serve: Serve, make_worker: MakeWorker
) -> None:
    worker = make_worker(caches(1))
    step(worker, plan_of(serve(), loads=[load_of([], failed_blocks=[3])], stores=[chunk_copy(1, [5, 6])]))
    report = worker.take_report()
    assert report
    assert set(report.stores) == {CHUNK_BYTES}
    assert not report.skipped


@pytest.mark.parametrize("sync", [True, False])
def test_a_chunk_whose_bytes_have_changed_is_not_used_where_loads_are_verified(
    serve: Serve, make_worker: MakeWorker, sync: bool
) -> None:
    served, source, target = serve(), caches(1), caches(None)
    stored(make_worker(source), served, {0: [3, 17]})
    right = checksum(served.pool.buffer, 0, CHUNK_BYTES)
    checks = [ExtentChecksum(offset=0, size_bytes=CHUNK_BYTES, checksum=right)]
    worker = make_worker(target)
    load = load_of([chunk_copy(0, [9, 1])], sync=sync, checks=checks)
    for poisoned in (False, True):
        if poisoned:
            served.pool.buffer[100] ^= 1
        step(worker, plan_of(served, loads=[load]))
        if not sync:
            finished(worker)
        assert worker.take_failed_blocks() == ({9, 1} if poisoned else set())


def test_an_idle_step_leaves_nothing_to_report(serve: Serve, make_worker: MakeWorker) -> None:
    worker = make_worker(caches(1))
    for served in (None, serve()):
        step(worker, plan_of(served))
        assert worker.take_finished() == set()
        assert worker.take_failed_blocks() == set()
        assert worker.take_report() is None


# ---- pools that are not there, and pools that change


def test_tensors_that_cannot_be_moved_by_whole_tiles_are_refused() -> None:
    worker = WorkerSide(SPEC, head_shares(SPEC, 0, 1), groups=[GROUP], rank=0, threads=1)
    with pytest.raises(ValueError, match="not contiguous"):
        worker.register({name: torch.zeros(BLOCKS, HEADS, CONTENT, BLOCK).transpose(2, 3) for name in NAMES})
    worker.close()


def test_pages_of_another_size_than_the_specs_are_refused() -> None:
    worker = WorkerSide(SPEC, head_shares(SPEC, 0, 1), groups=[GROUP], rank=0, threads=1)
    with pytest.raises(ValueError, match="its KvSpec says"):
        worker.register({name: torch.zeros(BLOCKS, HEADS, BLOCK, CONTENT // 2) for name in NAMES})
    worker.close()


def test_blocks_of_another_size_than_the_engines_are_refused() -> None:
    worker = WorkerSide(SPEC, head_shares(SPEC, 0, 1), groups=[replace(GROUP, block_size=2 * BLOCK)], rank=0, threads=1)
    with pytest.raises(ValueError, match=f"set its --block-size to {BLOCK}"):
        worker.register(caches(None))
    worker.close()


def test_a_layer_without_pages_is_refused() -> None:
    worker = WorkerSide(SPEC, head_shares(SPEC, 0, 1), groups=[GROUP], rank=0, threads=1)
    with pytest.raises(ValueError, match=f"layer {NAMES[1]} has no KV cache"):
        worker.register({name: tensor for name, tensor in caches(None).items() if name != NAMES[1]})
    worker.close()


def test_of_the_ranks_that_have_one_head_one_stores_it(serve: Serve, make_worker: MakeWorker) -> None:
    served = serve()
    source = caches(1)
    sums = 0
    for rank in range(2 * HEADS):
        head = {name: tensor[:, rank // 2 : rank // 2 + 1] for name, tensor in source.items()}
        worker = make_worker(head, rank=rank, ranks=2 * HEADS)
        step(worker, plan_of(served, stores=[chunk_copy(0, [3, 5])]))
        report = worker.take_report()
        assert report
        assert report.stores[0].rank_count == 1
        assert bool(report.stores[0].checksum) == (rank % 2 == 0)
        sums += report.stores[0].checksum
    assert sums % 2**64 == checksum(served.pool.buffer, 0, CHUNK_BYTES)
    target = caches(None)
    worker = make_worker({name: tensor[:, 1:2] for name, tensor in target.items()}, rank=3, ranks=2 * HEADS)
    step(worker, plan_of(served, loads=[load_of([chunk_copy(0, [7, 8])])]))
    finished(worker)
    for name, tensor in target.items():
        assert torch.equal(tensor[7:9, 1], source[name][[3, 5], 1])


def test_a_rank_that_writes_nothing_reports_the_requests_of_tails(serve: Serve, make_worker: MakeWorker) -> None:
    served = serve()
    worker = make_worker(caches(1, heads=1), rank=1, ranks=2 * HEADS)
    step(worker, plan_of(served, tails={"a": [chunk_copy(0, [3, 4])]}))
    assert worker.take_stored_requests() == {"a"}


def test_closing_notifies_the_node(serve: Serve, make_worker: MakeWorker) -> None:
    served = serve()
    worker = make_worker(caches(1))
    stored(worker, served, {0: [3, 17]})
    worker.close()
    wait_until(lambda: not served.workers)
    worker.close()
