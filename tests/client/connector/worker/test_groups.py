"""The worker side of a model with several KV-cache groups, whose pages are the same memory as in vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from lmkv.spec import NATIVE_TILES, KvPart, KvSpec
from lmkv.v1.chunk_pb2 import PART_RULE_END, PART_RULE_LAST
from lmkv_client.connector.engine_kv import LayerGroup
from lmkv_client.connector.identity import head_shares, worker_rank
from lmkv_client.connector.messages import LoadPlan, WorkerReport
from lmkv_client.connector.worker.page_copier import INLINE_BYTES
from lmkv_client.connector.worker.side import WorkerSide
from lmkv_kernels import ChunkCopy, checksum
from tests.client.connector.worker.parts import (
    CHUNK_BYTES,
    GROUP,
    NAMES,
    Caches,
    Serve,
    caches,
    chunk_copy,
    finished,
    pages_equal,
    plan_of,
    step,
)
from tests.client.connector.worker.parts import SPEC as PLAIN_SPEC
from tests.client.connector.worker.parts import load_of as plain_load
from tests.support.specs import make_spec

BLOCK, CHUNK, WINDOW, BLOCKS = 32, 64, 20, 200
HEADS, HEAD_SIZE, STATE_BYTES = 4, 16, 1000
PAGE_BYTES = HEADS * BLOCK * 2 * HEAD_SIZE * 4 + 64
"""Of one rank: keys and values of a block of attention fill it but for 64 bytes, a state takes less."""
LAYERS = 2
"""Of each group."""

ATTENTION = {"layer_count": LAYERS, "kv_head_count": HEADS, "head_size": HEAD_SIZE, "kv_dtype": "float32"}


def hybrid_spec(ranks: int = 1, heads: int = HEADS) -> KvSpec:
    """Full attention in 2 layers, a sliding window shorter than a chunk in 4, states in 2."""
    attention = ATTENTION | {"kv_head_count": heads, "block_size": BLOCK}
    return make_spec(
        model_name="m",
        model_id="m",
        chunk_size=CHUNK,
        format=NATIVE_TILES,
        **attention,
        more_parts=(
            KvPart(rule=PART_RULE_LAST, span=WINDOW, **(attention | {"layer_count": 2 * LAYERS})),  # type: ignore[arg-type]
            KvPart(rule=PART_RULE_END, layer_count=LAYERS, kv_head_count=ranks, head_size=STATE_BYTES, kv_dtype="int8"),
        ),
    )


SPEC = hybrid_spec()
load_of = partial(plain_load, all_or_none=True)
FULL, WINDOW_A, WINDOW_B, STATES = range(4)
GROUPS = tuple(
    LayerGroup(
        part=part,
        block_size=CHUNK if part == 2 else BLOCK,
        layer_names=tuple(f"group {group} layer {layer}" for layer in range(LAYERS)),
        first_layer=first_layer,
    )
    for group, (part, first_layer) in enumerate([(0, 0), (1, 0), (1, LAYERS), (2, 0)])
)


class Engine:
    """The memory of one rank, and its views: every group has all of it."""

    def __init__(self, seed: int, heads: int = HEADS) -> None:
        self.memory = torch.from_numpy(
            np.random.default_rng(seed).integers(-128, 128, (LAYERS, BLOCKS, PAGE_BYTES), np.int8)
        )
        tile = BLOCK * 2 * HEAD_SIZE
        attention = self.memory.view(torch.float32).as_strided(
            (LAYERS, BLOCKS, heads, BLOCK, 2 * HEAD_SIZE),
            (BLOCKS * PAGE_BYTES // 4, PAGE_BYTES // 4, tile, 2 * HEAD_SIZE, 1),
        )
        states = self.memory.as_strided(
            (LAYERS, BLOCKS, 1, 1, STATE_BYTES), (BLOCKS * PAGE_BYTES, PAGE_BYTES, STATE_BYTES, STATE_BYTES, 1)
        )
        self.caches = {
            name: (states if group.part == 2 else attention)[layer]
            for group in reversed(GROUPS)  # they are found by name
            for layer, name in enumerate(group.layer_names)
        }
        self.content_bytes = [heads * tile * 4] * 3 + [STATE_BYTES]
        """Of a page of each group."""

    def pages(self, group: int, block_ids: list[int]) -> torch.Tensor:
        return self.memory[:, block_ids, : self.content_bytes[group]]


@pytest.fixture
def make() -> Iterator[Callable[..., WorkerSide]]:
    """Makes worker sides, and closes them."""
    made: list[WorkerSide] = []

    def make_worker(engine: Engine, *, rank: int = 0, ranks: int = 1, heads: int = HEADS, **more: object) -> WorkerSide:
        spec = hybrid_spec(ranks, heads)
        options = {"groups": GROUPS, "rank": rank, "threads": 1} | more
        made.append(WorkerSide(spec, head_shares(spec, rank, ranks), **options))  # type: ignore[arg-type]
        made[-1].register(engine.caches)
        return made[-1]

    yield make_worker
    for one in made:
        one.close()


Make = Callable[..., WorkerSide]
Blocks = dict[int, list[int]]


def copies_of(offsets: list[int], blocks: Blocks) -> list[ChunkCopy]:
    """The copies of all parts of a chunk: their extents are at `offsets`, the groups have these `blocks` of it."""
    return [
        ChunkCopy(
            offset=offsets[GROUPS[group].part],
            extent_tokens=SPEC.parts[GROUPS[group].part].kept_tokens(CHUNK),
            token_count=SPEC.parts[GROUPS[group].part].kept_tokens(CHUNK),
            block_ids=block_ids,
            group=group,
        )
        for group, block_ids in blocks.items()
    ]


OFFSETS = [SPEC.chunk_bytes, 64, SPEC.part_bytes(1) + 128]
STORED: Blocks = {FULL: [7, 3], WINDOW_A: [12], WINDOW_B: [1], STATES: [9]}
LOADED: Blocks = {FULL: [2, 5], WINDOW_A: [8], WINDOW_B: [3], STATES: [11]}


def report_of(worker: WorkerSide) -> WorkerReport:
    report = worker.take_report()
    assert report
    return report


def test_the_parts_of_a_chunk_have_the_sizes_of_the_spec() -> None:
    tile = BLOCK * 2 * HEAD_SIZE * 4
    assert [SPEC.part_bytes(part) for part in range(3)] == [
        LAYERS * HEADS * 2 * tile,
        2 * LAYERS * HEADS * tile,  # one block: the window is shorter
        LAYERS * STATE_BYTES,
    ]


def test_what_all_groups_have_stored_is_loaded_into_other_pages_of_another_engine(serve: Serve, make: Make) -> None:
    served, source, target = serve(), Engine(1), Engine(2)
    before, pool = source.memory.clone(), np.frombuffer(served.pool.buffer, np.uint8)
    worker = make(source)
    step(worker, plan_of(served, stores=copies_of(OFFSETS, STORED)))
    report = report_of(worker)
    assert not report.skipped
    assert torch.equal(source.memory, before)
    assert {offset: (one.rank_count, one.checksum) for offset, one in report.stores.items()} == {
        offset: (1, checksum(served.pool.buffer, offset, SPEC.part_bytes(part))) for part, offset in enumerate(OFFSETS)
    }
    inside = sum(pool[offset : offset + SPEC.part_bytes(part)].any() for part, offset in enumerate(OFFSETS))
    assert inside == 3
    outside = pool.copy()
    for part, offset in enumerate(OFFSETS):
        outside[offset : offset + SPEC.part_bytes(part)] = 0
    assert not outside.any()

    worker, expected = make(target), target.memory.clone()
    step(worker, plan_of(served, loads=[load_of(copies_of(OFFSETS, LOADED))]))
    finished(worker)
    for group, block_ids in LOADED.items():
        expected[:, block_ids, : source.content_bytes[group]] = source.pages(group, STORED[group])
    assert torch.equal(target.memory, expected), "nothing else is written: no padding, no other page"
    loaded = report_of(worker).loaded["r"]
    assert (loaded.failed, loaded.size_bytes) == (False, SPEC.chunk_bytes)
    assert not worker.take_failed_requests()
    assert not worker.take_failed_blocks()


def test_a_window_alone_is_loaded(serve: Serve, make: Make) -> None:
    served, source, target = serve(), Engine(1), Engine(2)
    step(make(source), plan_of(served, stores=copies_of(OFFSETS, STORED)))
    worker, expected = make(target), target.memory.clone()
    part = {group: LOADED[group] for group in (WINDOW_B, WINDOW_A)}
    step(worker, plan_of(served, loads=[load_of(copies_of(OFFSETS, part))]))
    finished(worker)
    for group, block_ids in part.items():
        expected[:, block_ids, : source.content_bytes[group]] = source.pages(group, STORED[group])
    assert torch.equal(target.memory, expected)


def test_a_load_of_many_chunks_runs_on_a_thread_and_arrives_whole(serve: Serve, make: Make) -> None:
    count = INLINE_BYTES // SPEC.chunk_bytes + 2
    served = serve(size_bytes=count * SPEC.chunk_bytes)
    source, target = Engine(1), Engine(2)
    starts = [SPEC.part_bytes(0), SPEC.part_bytes(0) + SPEC.part_bytes(1)]
    stores, loads = [], []
    for chunk in range(count):
        offsets = [chunk * SPEC.chunk_bytes + start for start in (0, *starts)]
        first = 5 * chunk
        assert first + 5 <= BLOCKS
        stores += copies_of(offsets, {0: [first, first + 1], 1: [first + 2], 2: [first + 3], 3: [first + 4]})
        loads += copies_of(offsets, {3: [first], 2: [first + 1], 1: [first + 2], 0: [first + 4, first + 3]})
    step(make(source), plan_of(served, stores=stores))
    worker, expected = make(target), target.memory.clone()
    step(worker, plan_of(served, loads=[load_of(loads)]))
    finished(worker)
    by_place = {(copy.offset, copy.group): list(copy.block_ids) for copy in stores}
    for copy in loads:
        pages = source.pages(copy.group, by_place[copy.offset, copy.group])
        expected[:, list(copy.block_ids), : source.content_bytes[copy.group]] = pages
    assert torch.equal(target.memory, expected)


def test_the_checksums_of_ranks_and_groups_add_up(serve: Serve, make: Make) -> None:
    served = serve()
    engines = [Engine(rank, HEADS // 2) for rank in range(2)]
    spec = hybrid_spec(ranks=2)
    offsets = [0, spec.part_bytes(0), spec.part_bytes(0) + spec.part_bytes(1)]
    reports = []
    for rank, engine in enumerate(engines):
        worker = make(engine, rank=rank, ranks=2)
        step(worker, plan_of(served, stores=copies_of(offsets, STORED)))
        reports.append(report_of(worker))
    both = reports[0].aggregate(reports[1])
    for part, offset in enumerate(offsets):
        written = both.stores[offset]
        assert (written.rank_count, written.checksum) == (
            2,
            checksum(served.pool.buffer, offset, spec.part_bytes(part)),
        )
    states = np.frombuffer(served.pool.buffer, np.int8)[offsets[2] :][: spec.part_bytes(2)]
    for rank, engine in enumerate(engines):
        shares = states.reshape(LAYERS, 2, STATE_BYTES)[:, rank]
        assert np.array_equal(shares, engine.pages(STATES, STORED[STATES])[:, 0].numpy())


def test_of_ranks_with_the_same_head_one_stores_it_and_each_its_own_state(serve: Serve, make: Make) -> None:
    served, heads = serve(), 1
    spec = hybrid_spec(ranks=2, heads=heads)
    offsets = [0, spec.part_bytes(0), spec.part_bytes(0) + spec.part_bytes(1)]
    sums = dict.fromkeys(offsets, 0)
    for rank in range(2):
        engine = Engine(3, heads)
        worker = make(engine, rank=rank, ranks=2, heads=heads)
        step(worker, plan_of(served, stores=copies_of(offsets, STORED)))
        written = report_of(worker).stores
        assert [bool(written[offset].checksum) for offset in offsets] == [rank == 0, rank == 0, True]
        assert {one.rank_count for one in written.values()} == {1}
        for offset in offsets:
            sums[offset] += written[offset].checksum
    for part, offset in enumerate(offsets):
        assert sums[offset] % 2**64 == checksum(served.pool.buffer, offset, spec.part_bytes(part))


BAD: dict[str, dict[str, Any]] = {
    "an extent behind the pool": {"offset": 1 << 40},
    "a block that is not there": {"block_ids": [BLOCKS]},
    "a group that is not there": {"group": len(GROUPS)},
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD.keys())
def test_a_load_that_fails_is_reported_by_request(serve: Serve, make: Make, change: dict[str, Any]) -> None:
    worker = make(Engine(1))
    *good, bad = copies_of(OFFSETS, LOADED)
    step(worker, plan_of(serve(), loads=[load_of([*good, replace(bad, **change)])]))
    finished(worker)
    assert worker.take_failed_requests() == {"r"}
    assert not worker.take_failed_requests()
    assert not worker.take_failed_blocks()
    assert report_of(worker).loaded["r"].failed


@pytest.mark.parametrize("change", BAD.values(), ids=BAD.keys())
def test_a_store_that_fails_is_skipped_with_all_of_its_step(serve: Serve, make: Make, change: dict[str, Any]) -> None:
    served, worker = serve(), make(Engine(1))
    *good, bad = copies_of(OFFSETS, STORED)
    bad = replace(bad, **change)
    step(worker, plan_of(served, stores=[*good, bad]))
    report = report_of(worker)
    assert report.skipped == set(report.stores) == {copy.offset for copy in (*good, bad)}
    step(worker, plan_of(served, stores=good))
    report = report_of(worker)
    assert set(report.stores) == {copy.offset for copy in good}
    assert not report.skipped


def lost(copies: list[ChunkCopy]) -> LoadPlan:
    return replace(load_of(copies), failed=True)


def test_a_load_whose_rest_is_lost_fails_with_its_last_piece(serve: Serve, make: Make) -> None:
    worker, served = make(Engine(1)), serve()
    step(worker, plan_of(served, loads=[load_of(copies_of(OFFSETS, LOADED), final=False)]))
    assert worker.take_finished() == worker.take_failed_requests() == set()
    step(worker, plan_of(served, loads=[lost([])]))
    finished(worker)
    assert worker.take_failed_requests() == {"r"}
    assert worker.take_failed_blocks() == set()
    loaded = report_of(worker).loaded["r"]
    assert (loaded.failed, loaded.size_bytes) == (True, 0)


def test_with_one_group_a_lost_load_is_reported_by_page(serve: Serve) -> None:
    worker = WorkerSide(PLAIN_SPEC, head_shares(PLAIN_SPEC, 0, 1), groups=[GROUP], rank=0, threads=1)
    worker.register(caches(None))
    step(worker, plan_of(serve(), loads=[replace(plain_load([chunk_copy(0, [9, 1])]), failed=True)]))
    finished(worker)
    assert worker.take_failed_blocks() == {9, 1}
    assert worker.take_failed_requests() == set()
    worker.close()


def test_no_device_buffer_is_lent_for_several_groups(serve: Serve, make: Make) -> None:
    served = serve()
    worker = make(Engine(1), buffer_backends=("UCX",))
    attachment = replace(served.attachment(), device_buffer_bytes=1 << 20)
    load = replace(load_of([]), buffered=copies_of(OFFSETS, LOADED))
    step(worker, plan_of(attachment, loads=[load]))
    finished(worker)
    assert worker._buffer_agent is None
    assert worker.take_failed_requests() == {"r"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"first_layer": LAYERS}, "are not among a chunk's 2"),
        ({"layer_names": GROUPS[FULL].layer_names[:1]}, None),  # the rest of the part may be on another stage
        ({"part": 1}, None),
        ({"part": 2}, r"not \[blocks, 1, 1, state\]"),
        ({"block_size": 2 * BLOCK}, f"set its --block-size to {BLOCK}"),
    ],
)
def test_groups_must_fit_their_parts(change: dict[str, object], words: str | None) -> None:
    groups = [replace(GROUPS[FULL], **change)]  # type: ignore[arg-type]
    worker = WorkerSide(SPEC, head_shares(SPEC, 0, 1), groups=groups, rank=0, threads=1)
    if words is None:
        worker.register(Engine(1).caches)
    else:
        with pytest.raises(ValueError, match=words):
            worker.register(Engine(1).caches)
    worker.close()


def test_states_of_another_size_than_the_specs_are_refused() -> None:
    spec = replace(SPEC, more_parts=(SPEC.parts[1], replace(SPEC.parts[2], head_size=STATE_BYTES + 8)))
    worker = WorkerSide(spec, head_shares(spec, 0, 1), groups=GROUPS, rank=0, threads=1)
    with pytest.raises(ValueError, match=f"has {LAYERS * STATE_BYTES} bytes, and its KvSpec says"):
        worker.register(Engine(1).caches)
    worker.close()


# ---- stages of a pipeline


def stage(names: tuple[str, ...], first_layer: int) -> LayerGroup:
    return replace(GROUP, layer_names=names, first_layer=first_layer)


@pytest.mark.parametrize("tensor_ranks", [1, 2])
def test_engines_of_other_pipeline_and_tensor_parallel_sizes_share_chunks(serve: Serve, tensor_ranks: int) -> None:
    served, source, target = serve(), caches(1), caches(None)
    stages = [stage(NAMES[:2], 0), stage(NAMES[2:], 2)]
    report: WorkerReport | None = None
    heads = 4 // tensor_ranks

    def workers(memory: Caches) -> Iterator[WorkerSide]:
        """Each has only its own layers and heads."""
        for number, group in enumerate(stages):
            for rank in range(tensor_ranks):
                worker = WorkerSide(
                    PLAIN_SPEC,
                    head_shares(PLAIN_SPEC, rank, tensor_ranks),
                    groups=[group],
                    rank=worker_rank(number, rank, tensor_ranks),
                    threads=1,
                )
                own = {name: memory[name][:, rank * heads : (rank + 1) * heads] for name in group.layer_names}
                worker.register(own)
                yield worker
                worker.close()

    for worker in workers(source):
        step(worker, plan_of(served, stores=[chunk_copy(0, [3, 17])]))
        report = report.aggregate(report_of(worker)) if report else report_of(worker)
    assert report
    assert report.stores[0].rank_count == 2 * tensor_ranks
    assert report.stores[0].checksum == checksum(served.pool.buffer, 0, CHUNK_BYTES)

    whole = WorkerSide(PLAIN_SPEC, head_shares(PLAIN_SPEC, 0, 1), groups=[GROUP], rank=0, threads=1)
    whole.register(target)
    step(whole, plan_of(served, loads=[load_of([chunk_copy(0, [9, 1])], sync=True)]))
    assert pages_equal(source, [3, 17], target, [9, 1])
    whole.close()
    again = caches(None)
    for worker in workers(again):
        step(worker, plan_of(served, loads=[load_of([chunk_copy(0, [4, 6])], sync=True)]))
        assert not report_of(worker).loaded["r"].failed
    assert pages_equal(source, [3, 17], again, [4, 6])
