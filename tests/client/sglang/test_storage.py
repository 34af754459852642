"""The storage backend beside a real node, called as SGLang's cache controller calls it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from lmkv.errors import ConfigError
from lmkv_client.demo.cluster import CoordinatorProcess
from lmkv_client.engine import Extent, Written
from lmkv_client.sglang import LmkvStorage, page_store
from lmkv_client.sglang.sglang_api import ModelSource
from tests.client.sglang.conftest import NodeOfTests
from tests.client.sglang.contract import (
    MLA_SHAPES,
    PAGE_SIZE,
    PAGES,
    SHAPES,
    HostPoolFields,
    StorageConfigFields,
    host_pool,
    page_hashes,
    slots,
)
from tests.waiting import WAIT_SECONDS, wait_until

TOKENS = list(range(1000, 1000 + 6 * PAGE_SIZE + 3))
HASHES = page_hashes(TOKENS)
FIRST = [3, 9, 1, 0, 17, 4]
"""Pages of the pool from which the prompt is stored."""
SECOND = [20, 2, 8, 6, 5, 7]
"""Pages of the pool into which it is read."""

Start = Callable[..., LmkvStorage]


@pytest.fixture
def start(node: NodeOfTests) -> Iterator[Start]:
    """Makes storages that are attached to the node."""
    made: list[LmkvStorage] = []

    def start(pool: HostPoolFields, settings: dict[str, Any] | None = None, **fields: Any) -> LmkvStorage:
        own = {"node_address": str(node.socket), "lookup_timeout": 20, "load_timeout": 60, "model_id": "tiny"}
        extra = {"interface_v1": 1, "lmkv": own | (settings or {})}
        made.append(LmkvStorage(StorageConfigFields(extra_config=extra, **fields), {}))
        made[-1].register_mem_pool_host(pool)
        return made[-1]

    yield start
    for storage in made:
        storage.close()


def page_bytes(pool: HostPoolFields, page: int) -> torch.Tensor:
    """All elements of a page of a pool."""
    rows = slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE)
    is_mla = pool.kv_buffer.dim() == len(MLA_SHAPES[pool.layout]) if pool.layout in MLA_SHAPES else False
    buffer = pool.kv_buffer[None] if is_mla else pool.kv_buffer
    by_slot = {"layer_first": lambda: buffer[:, :, rows], "page_first": lambda: buffer[:, rows].transpose(1, 2)}
    return by_slot.get(pool.layout, lambda: buffer[:, page])().contiguous()


@pytest.mark.parametrize("layout", SHAPES)
def test_pages_that_are_stored_are_read_into_other_pages(start: Start, layout: str) -> None:
    pool = host_pool(layout)
    storage = start(pool)
    assert storage.batch_exists(HASHES) == 0
    assert storage.batch_set_v1(HASHES, slots(FIRST)) == [True] * 6
    assert storage.batch_exists([*HASHES, "00" * 32]) == 6
    assert storage.exists(HASHES[5])
    assert storage.batch_exists_v2(HASHES).kv_hit_pages == 6
    expected = [page_bytes(pool, page).clone() for page in FIRST]
    assert storage.batch_get_v1(HASHES, slots(SECOND)) == [True] * 6
    assert all(torch.equal(page_bytes(pool, page), own) for page, own in zip(SECOND, expected, strict=True))
    assert storage.counts.failed_calls == 0


def test_an_engine_reads_what_another_one_with_another_layout_has_stored(start: Start) -> None:
    first, second = host_pool("layer_first"), host_pool("page_first_direct", seed=-1)
    assert all(start(first).batch_set_v1(HASHES, slots(FIRST)))
    assert start(second).batch_get_v1(HASHES, slots(FIRST)) == [True] * 6
    for page in FIRST:
        own = first.kv_buffer[:, :, page * PAGE_SIZE : (page + 1) * PAGE_SIZE]
        assert torch.equal(own, second.kv_buffer[:, page])


@pytest.mark.parametrize("layout", MLA_SHAPES)
def test_with_mla_one_rank_stores_for_all(start: Start, layout: str) -> None:
    pools = [host_pool(layout, is_mla=True), host_pool(layout, seed=-1, is_mla=True)]
    ranks = [start(pool, tp_rank=rank, tp_size=2, is_mla_model=True) for rank, pool in enumerate(pools)]
    assert ranks[1].batch_set_v1(HASHES, slots(FIRST)) == [True] * 6, "as if it were stored"
    assert ranks[1].batch_exists(HASHES) == 0
    assert all(ranks[0].batch_set_v1(HASHES, slots(FIRST)))
    assert ranks[1].batch_get_v1(HASHES, slots(FIRST)) == [True] * 6
    assert torch.equal(page_bytes(pools[0], FIRST[0]), page_bytes(pools[1], FIRST[0]))


def test_ranks_with_other_heads_have_other_pages(start: Start) -> None:
    ranks = [start(host_pool("page_first", seed=rank), tp_rank=rank, tp_size=2) for rank in range(2)]
    assert all(ranks[0].batch_set_v1(HASHES[:2], slots(FIRST[:2])))
    assert [rank.batch_exists(HASHES) for rank in ranks] == [2, 0]
    assert all(ranks[1].batch_set_v1(HASHES[:1], slots(FIRST[:1])))
    assert [rank.batch_exists(HASHES) for rank in ranks] == [2, 1]


def test_pages_that_are_held_are_not_written_again(start: Start) -> None:
    storage = start(host_pool("page_first"))
    assert all(storage.batch_set_v1(HASHES[:4], slots(FIRST[:4])))
    assert all(storage.batch_set_v1(HASHES, slots(SECOND)))
    assert (storage.counts.written, storage.counts.held_before) == (6, 4)


def test_what_is_missing_ends_a_hit(start: Start) -> None:
    storage = start(host_pool("page_first"))
    assert all(storage.batch_set_v1(HASHES[:2], slots(FIRST[:2])))
    assert all(storage.batch_set_v1(HASHES[3:], slots(FIRST[3:])))
    assert storage.batch_exists(HASHES) == 2
    assert storage.batch_get_v1(HASHES, slots(SECOND)) == [True, True, False, False, False, False]
    assert storage.batch_exists(HASHES[3:]) == 3, "SGLang asks for what follows the pages that it has"
    assert (storage.counts.read, storage.counts.failed_reads) == (2, 4)


def test_a_batch_of_128_pages_is_stored(start: Start) -> None:
    """Twice as many slots as the pool has pages: the same pages are stored under several names."""
    hashes = page_hashes(list(range(128 * PAGE_SIZE)))
    storage = start(host_pool("page_first"))
    assert all(storage.batch_set_v1(hashes, slots([index % 24 for index in range(128)])))
    assert storage.batch_exists(hashes) == 128


def test_tokens_find_the_pages_at_the_coordinator(start: Start, coordinator: CoordinatorProcess) -> None:
    assert all(start(host_pool("page_first")).batch_set_v1(HASHES, slots(FIRST)))
    wait_until(lambda: coordinator.holders(TOKENS) == {"node": 6 * PAGE_SIZE}, "the coordinator knows the pages")


def test_without_its_node_everything_is_a_miss_until_there_is_one(start: Start, node: NodeOfTests) -> None:
    storage = start(host_pool("page_first"))
    assert all(storage.batch_set_v1(HASHES, slots(FIRST)))
    node.kill()
    wait_until(lambda: storage.batch_exists(HASHES) == 0, "the node is lost")
    assert storage.batch_get_v1(HASHES, slots(SECOND)) == [False] * 6
    assert not any(storage.batch_set_v1(HASHES, slots(FIRST)))
    assert storage.counts.failed_writes == 6
    node.start_and_wait()
    wait_until(lambda: all(storage.batch_set_v1(HASHES, slots(FIRST))), "the engine is attached again")
    assert storage.batch_exists(HASHES) == 6


@pytest.mark.parametrize(
    ("keys", "pages"), [(["no digest"], [0]), (["00" * 31], [0]), (HASHES[:1], [0, 1]), (HASHES[:1], [99])], ids=str
)
def test_what_sglang_never_passes_is_a_miss_and_is_counted(start: Start, keys: list[str], pages: list[int]) -> None:
    storage = start(host_pool("page_first"))
    assert storage.batch_set_v1(keys, slots(pages)) == [False]
    assert storage.counts.failed_calls == 1
    assert all(storage.batch_set_v1(HASHES, slots(FIRST))), "the next call is served"


def test_pages_that_are_written_in_several_batches_follow_each_other(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first page of a batch would not hold those before it in the pool."""
    store = start(host_pool("page_first"))._store
    engine = store._attached()
    reserve, commit = engine.reserve, engine.commit
    written: list[Written] = []

    def reserve_few(count: int, *, timeout: float) -> list[Extent]:
        return reserve(min(count, 2), timeout=timeout)

    def note(chunks: Iterable[Written]) -> None:
        written.extend(chunks := list(chunks))
        commit(chunks)

    monkeypatch.setattr(engine, "reserve", reserve_few)
    monkeypatch.setattr(engine, "commit", note)
    assert store.write(HASHES, FIRST) == len(HASHES)
    keys = engine.foreign_keys(HASHES)
    assert [(one.key, one.parent) for one in written] == list(zip(keys, [b"", *keys[:-1]], strict=True))


def test_a_page_behind_the_last_one_of_the_pool_is_refused(start: Start) -> None:
    store = start(host_pool("page_first"))._store
    assert store.page_numbers(slots([PAGES - 1]).tolist(), 1) == [PAGES - 1]
    with pytest.raises(ValueError, match="beyond the end"):
        store.page_numbers(slots([PAGES]).tolist(), 1)


@pytest.mark.parametrize(
    "pages", [[*FIRST[:-1], 24], FIRST[:-1], [*FIRST[:-1], 1 << 70]], ids=["beyond", "few", "huge"]
)
def test_pages_that_cannot_be_copied_keep_no_memory_of_the_pool(start: Start, pages: list[int]) -> None:
    store = start(host_pool("page_first"))._store
    engine = store._attached()
    extents = engine.reserve(1 << 20, timeout=WAIT_SECONDS)
    engine.put_back(extents)
    for _ in range(len(extents) // len(HASHES) + 1):
        assert store.attempt(store.write, HASHES, pages, default=-1) == -1
    assert engine.counters.short_reserves == 1
    assert store.write(HASHES, FIRST) == len(HASHES)


def test_of_models_with_further_pools_nothing_is_stored(start: Start) -> None:
    storage = start(host_pool("page_first"))
    storage.register_mem_host_pool_v2(object(), "kv")
    assert all(storage.batch_set_v1(HASHES, slots(FIRST)))
    assert storage.batch_exists(HASHES) == 6
    storage.register_mem_host_pool_v2(object(), "mamba")
    assert storage.batch_exists(HASHES) == 0
    assert storage.batch_exists_v2(HASHES, [object()]).kv_hit_pages == 0


def test_a_model_whose_tensors_are_all_in_further_pools_is_served_and_not_stored(start: Start) -> None:
    storage = start(HostPoolFields(layout="layer_first", kv_buffer=None))  # type: ignore[arg-type]
    storage.register_mem_host_pool_v2(object(), "deepseek_v4_c4")
    assert storage.batch_exists(HASHES) == 0
    assert storage.batch_set_v1(HASHES, slots(FIRST)) == [True] * 6


def test_once_weights_change_nothing_is_loaded_or_stored(start: Start) -> None:
    storage, other = start(host_pool("page_first")), start(host_pool("page_first"))
    assert all(storage.batch_set_v1(HASHES[:3], slots(FIRST[:3])))
    storage.weights_change()
    assert storage.batch_exists(HASHES) == 0
    assert storage.batch_get_v1(HASHES[:3], slots(SECOND[:3])) == [False] * 3
    assert storage.batch_set_v1(HASHES[3:], slots(FIRST[3:])) == [True] * 3, "SGLang need not try again"
    assert other.batch_exists(HASHES) == 3, "of the old weights"
    assert storage.counts.failed_calls == 0


def test_a_host_pool_that_cannot_be_copied_is_refused(start: Start) -> None:
    pool = host_pool("page_first_direct")
    pool.kv_buffer = pool.kv_buffer[..., :3].contiguous()  # rows of 6 bytes
    with pytest.raises(ConfigError, match="cannot copy the pages of SGLang"):
        start(pool)


def test_a_storage_that_is_closed_finds_nothing(start: Start) -> None:
    storage = start(host_pool("page_first"))
    storage.close()
    storage.close()
    assert storage.batch_exists(HASHES) == 0
    assert storage.batch_get_v1(HASHES, slots(FIRST)) == [False] * 6


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "interface_v1"),
        ({"interface_v1": 1, "lmkv": {"chunk_sise": 3}}, "chunk_sise"),
        ({"interface_v1": 1, "lmkv": {"load_timeout": "soon"}}, "load_timeout"),
    ],
    ids=str,
)
def test_a_mistake_in_the_configuration_is_refused_by_its_key(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LmkvStorage(StorageConfigFields(extra_config=extra))


def test_until_the_digest_of_the_weights_is_known_the_engine_runs_without_its_pages(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    known = threading.Event()

    def identify(model: ModelSource) -> str:
        assert known.wait(WAIT_SECONDS)
        return "tiny"

    monkeypatch.setattr(page_store, "identity_of", identify)
    monkeypatch.setattr(page_store, "served_model", lambda path: ModelSource(path=path, loaded_after=time.time()))
    with caplog.at_level(logging.WARNING, "sglang.lmkv"):
        storage = start(host_pool("page_first"), settings={"model_id": ""})
    assert "the digest of the weights is not known yet" in caplog.text
    assert storage.batch_exists(HASHES) == 0
    storage.batch_set_v1(HASHES, slots(FIRST))
    assert storage.counts.failed_calls == 0
    assert storage.counts.written == 0
    known.set()
    wait_until(lambda: storage._store.is_of_use, "the storage is attached")
    assert all(storage.batch_set_v1(HASHES, slots(FIRST)))
    assert storage.batch_exists(HASHES) == len(HASHES)


def test_weights_that_turn_out_later_not_to_be_known_are_logged(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    known = threading.Event()

    def identify(model: ModelSource) -> str:
        assert known.wait(WAIT_SECONDS)
        raise ConfigError("the weights have changed")

    monkeypatch.setattr(page_store, "identity_of", identify)
    monkeypatch.setattr(page_store, "served_model", lambda path: ModelSource(path=path, loaded_after=time.time()))
    storage = start(host_pool("page_first"), settings={"model_id": ""})
    known.set()
    wait_until(lambda: "nothing is loaded or stored: the weights have changed" in caplog.text, "it is in the log")
    assert storage.batch_exists(HASHES) == 0


def test_a_storage_that_is_closed_before_the_digest_is_known_attaches_to_no_node(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = threading.Event()

    def identify(_: ModelSource) -> str:
        assert known.wait(WAIT_SECONDS)
        return "tiny"

    monkeypatch.setattr(page_store, "identity_of", identify)
    monkeypatch.setattr(page_store, "served_model", lambda path: ModelSource(path=path, loaded_after=time.time()))
    before = set(threading.enumerate())
    storage = start(host_pool("page_first"), settings={"model_id": ""})
    storage.close()
    known.set()
    wait_until(lambda: set(threading.enumerate()) <= before, "no thread of an engine is left")
    assert not storage._store.is_of_use
