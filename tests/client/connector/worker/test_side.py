"""The worker side with real tensors in vLLM's CPU layout and a real pool behind a real pool socket."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from lmkv.pool.pool import Pool
from lmkv.pool.socket import PoolSocket
from lmkv.spec import NATIVE_TILES, KvSpec
from lmkv_client.connector.identity import HeadShare
from lmkv_client.connector.messages import Attachment, ExtentChecksum, LoadPlan, StepPlan
from lmkv_client.connector.worker import side as worker_module
from lmkv_client.connector.worker.page_copier import INLINE_BYTES
from lmkv_client.connector.worker.side import WorkerSide
from lmkv_kernels import ChunkCopy, checksum
from tests.waiting import WAIT_SECONDS, wait_until

LAYERS, HEADS, BLOCK, CONTENT, BLOCKS = 3, 4, 32, 2 * 16, 24
TILE_BYTES = BLOCK * CONTENT * 4
CHUNK_BLOCKS = 2
CHUNK_BYTES = LAYERS * HEADS * CHUNK_BLOCKS * TILE_BYTES
POOL_BYTES = 8 * CHUNK_BYTES

Caches = dict[str, torch.Tensor]
SPEC = KvSpec(
    model_name="m",
    model_id="m",
    kv_dtype="float32",
    layer_count=LAYERS,
    kv_head_count=HEADS,
    head_size=CONTENT // 2,
    chunk_size=CHUNK_BLOCKS * BLOCK,
    format=NATIVE_TILES,
    block_size=BLOCK,
)


class ServedPool:
    """The parts of a node that workers use: a pool and its socket, in a thread."""

    def __init__(self, path: Path, epoch: int, size_bytes: int = POOL_BYTES) -> None:
        self.pool = Pool.create(size_bytes)
        self.path = path
        self.epoch = epoch
        self.workers: list[tuple[str, int]] = []
        self.added_count = 0
        self._loop = asyncio.new_event_loop()
        self._socket = PoolSocket(
            path,
            self.pool,
            epoch,
            on_worker=self._add,
            on_worker_gone=lambda engine, rank: self.workers.remove((engine, rank)),
        )
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._run(self._socket.start())

    def attachment(self, engine_id: str = "engine") -> Attachment:
        return Attachment(engine_id=engine_id, pool_socket=str(self.path), epoch=self.epoch)

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """Its event loop does not run."""
        stalled, resume = threading.Event(), threading.Event()

        def stall() -> None:
            stalled.set()
            resume.wait()

        self._loop.call_soon_threadsafe(stall)
        stalled.wait()
        try:
            yield
        finally:
            resume.set()

    def close(self) -> None:
        self._run(self._socket.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self.pool.close()

    def _add(self, engine_id: str, rank: int) -> None:
        self.workers.append((engine_id, rank))
        self.added_count += 1

    def _run(self, work: object) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_SECONDS)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _steps_wait_for_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Synchronous loads and stores of the first step need the pool, however busy the host is."""
    monkeypatch.setattr(worker_module, "MAP_WAIT_SECONDS", WAIT_SECONDS)


@pytest.fixture
def serve(runtime_dir: Path) -> Iterator[Callable[..., ServedPool]]:
    """Starts pools, each of a higher epoch at a socket of its own."""
    served: list[ServedPool] = []

    def start(**options: int) -> ServedPool:
        number = len(served) + 1
        served.append(ServedPool(runtime_dir / f"{number}.sock", number, **options))
        return served[-1]

    yield start
    for one in served:
        one.close()


@pytest.fixture
def make_worker() -> Iterator[Callable[..., WorkerSide]]:
    """Makes worker sides, and closes them."""
    made: list[WorkerSide] = []

    def make(caches: Caches, rank: int = 0, ranks: int = 1, threads: int = 1) -> WorkerSide:
        share = HeadShare.of_rank(rank, ranks, HEADS)
        made.append(WorkerSide(SPEC, share, rank=rank, threads=threads))
        made[-1].register(caches)
        return made[-1]

    yield make
    for one in made:
        one.close()


MakeWorker = Callable[..., WorkerSide]
Serve = Callable[..., ServedPool]


def caches(seed: int | None, heads: int = HEADS, blocks: int = BLOCKS) -> Caches:
    """One allocation for all layers, as vLLM makes it; random bytes, or zeros without a seed."""
    shape = (LAYERS, blocks, heads, BLOCK, CONTENT)
    memory = torch.zeros(shape) if seed is None else torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    return {f"model.layers.{layer}.self_attn.attn": memory[layer] for layer in range(LAYERS)}


def chunk_copy(number: int, block_ids: list[int], first_block: int = 0, blocks: int = CHUNK_BLOCKS) -> ChunkCopy:
    return ChunkCopy(
        offset=number * CHUNK_BYTES,
        extent_tokens=blocks * BLOCK,
        token_count=len(block_ids) * BLOCK,
        first_token=first_block * BLOCK,
        block_ids=block_ids,
    )


def load_of(
    copies: list[ChunkCopy],
    *,
    sync: bool = False,
    final: bool = True,
    failed_blocks: list[int] | None = None,
    checks: list[ExtentChecksum] | None = None,
    request_id: str = "r",
) -> LoadPlan:
    return LoadPlan(
        request_id=request_id,
        copies=copies,
        sync=sync,
        final=final,
        checks=checks or [],
        failed_blocks=failed_blocks or [],
    )


def plan_of(
    served: ServedPool | Attachment | None,
    *,
    loads: list[LoadPlan] | None = None,
    stores: list[ChunkCopy] | None = None,
) -> StepPlan:
    attachment = served.attachment() if isinstance(served, ServedPool) else served
    return StepPlan(attachment=attachment, loads=loads or [], stores=stores or [])


def step(worker: WorkerSide, plan: StepPlan) -> None:
    worker.load(plan)
    worker.store(plan)


def finished(worker: WorkerSide, request_id: str = "r") -> None:
    """Waits, as steps do, until an asynchronous load has ended."""
    wait_until(lambda: request_id in worker.take_finished())


def is_stored(worker: WorkerSide, served: ServedPool, chunks: dict[int, list[int]]) -> bool:
    """Stores pages as chunks in one step; whether all of them were."""
    stores = [chunk_copy(number, pages, blocks=len(pages)) for number, pages in chunks.items()]
    step(worker, plan_of(served, stores=stores))
    report = worker.take_report()
    return report is not None and set(report.written) == {copy.offset for copy in stores} and not report.skipped


def stored(worker: WorkerSide, served: ServedPool, chunks: dict[int, list[int]]) -> None:
    """As `is_stored`, and it must be."""
    assert is_stored(worker, served, chunks)


def pages_equal(left: Caches, left_pages: list[int], right: Caches, right_pages: list[int]) -> bool:
    return all(torch.equal(left[name][left_pages], right[name][right_pages]) for name in left)


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
    assert both.written[0].rank_count == 2
    assert both.written[0].checksum == checksum(served.pool.buffer, 0, CHUNK_BYTES)

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
    assert report.skipped == {100 * CHUNK_BYTES}
    assert not report.written


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
    assert set(report.written) == {CHUNK_BYTES}


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


def test_tensors_that_cannot_be_moved_by_whole_tiles_are_refused() -> None:
    worker = WorkerSide(SPEC, HeadShare.of_rank(0, 1, HEADS), rank=0, threads=1)
    with pytest.raises(ValueError, match="not contiguous"):
        worker.register({"layer": torch.zeros(BLOCKS, HEADS, CONTENT, BLOCK).transpose(2, 3)})
    worker.close()


def test_pages_of_another_size_than_the_specs_are_refused() -> None:
    worker = WorkerSide(SPEC, HeadShare.of_rank(0, 1, HEADS), rank=0, threads=1)
    with pytest.raises(ValueError, match="its KvSpec says"):
        worker.register({"layer": torch.zeros(BLOCKS, HEADS, BLOCK, CONTENT)})  # one layer of three
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
        assert report.written[0].rank_count == 1
        assert bool(report.written[0].checksum) == (rank % 2 == 0)
        sums += report.written[0].checksum
    assert sums % 2**64 == checksum(served.pool.buffer, 0, CHUNK_BYTES)
    target = caches(None)
    worker = make_worker({name: tensor[:, 1:2] for name, tensor in target.items()}, rank=3, ranks=2 * HEADS)
    step(worker, plan_of(served, loads=[load_of([chunk_copy(0, [7, 8])])]))
    finished(worker)
    for name, tensor in target.items():
        assert torch.equal(tensor[7:9, 1], source[name][[3, 5], 1])


def test_closing_notifies_the_node(serve: Serve, make_worker: MakeWorker) -> None:
    served = serve()
    worker = make_worker(caches(1))
    stored(worker, served, {0: [3, 17]})
    worker.close()
    wait_until(lambda: not served.workers)
    worker.close()
