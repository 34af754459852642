"""The linker beside real nodes, called as SGLang's scheduler calls it."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lmkv.errors import ConfigError
from lmkv_client.demo.cluster import CoordinatorProcess
from lmkv_client.sglang import LmkvLinker, LmkvStorage
from lmkv_client.sglang.linker import MAX_WAITING_OFFLOADS
from tests.client.sglang.conftest import NodeOfTests
from tests.client.sglang.contract import PAGE_SIZE, HostPoolFields, StorageConfigFields, host_pool, page_hashes, slots
from tests.client.sglang.device import (
    Allocator,
    Component,
    LinkerParamsFields,
    MHATokenToKVPool,
    MLATokenToKVPool,
    ServerArgsFields,
    copy_of,
    lookup_of,
)
from tests.waiting import wait_until

NAMES = page_hashes(list(range(2000, 2000 + 6 * PAGE_SIZE)))
OTHERS = page_hashes(list(range(5000, 5000 + 6 * PAGE_SIZE)))
FIRST = [3, 9, 1, 2, 17, 4]
"""Pages from which a prompt is stored."""
SECOND = [20, 12, 8, 6, 5, 24]
"""Pages into which it is loaded."""

Start = Callable[..., LmkvLinker]


def make_linker(
    address: Path | str, pool: Any, *, components: Sequence[Any] = (Component.FULL,), **fields: Any
) -> LmkvLinker:
    """A linker of a node, whose deadlines no busy host misses."""
    settings = {"node_address": str(address), "lookup_timeout": 20, "load_timeout": 20, "model_id": "tiny"}
    settings |= fields.pop("settings", {})
    params = LinkerParamsFields(token_to_kv_pool_allocator=Allocator(pool=pool), **fields)
    return LmkvLinker(ServerArgsFields(), params, components=set(components), extra_config=settings)


@pytest.fixture
def start(node: NodeOfTests) -> Iterator[Start]:
    """Makes linkers that are attached to the node."""
    made: list[LmkvLinker] = []

    def start(pool: Any, *, address: Path | None = None, **options: Any) -> LmkvLinker:
        made.append(make_linker(address or node.socket, pool, **options))
        return made[-1]

    yield start
    for linker in made:
        linker.close()


def result_of(linker: LmkvLinker) -> bool:
    """The result of the oldest offload, once there is one."""
    wait_until(lambda: linker.num_completed_offloads() >= 1, "an offload is complete")
    return linker.pop_completed_offload()


def store(linker: LmkvLinker, names: Sequence[str], pages: Sequence[int]) -> bool:
    assert linker.offload(copy_of(names, pages))
    return result_of(linker)


def lookup_in_next_pass(linker: LmkvLinker, rid: str, names: Sequence[str]) -> int:
    """Number of pages that are found in another pass of the scheduler."""
    linker.num_completed_offloads()
    return len(linker.lookup(rid, lookup_of(names)))


def page(pool: Any, number: int) -> torch.Tensor:
    """All elements of a page."""
    buffers = pool.kv_buffer if isinstance(pool, MLATokenToKVPool) else [*pool.k_buffer, *pool.v_buffer]
    return torch.stack([layer[number * PAGE_SIZE : (number + 1) * PAGE_SIZE] for layer in buffers])


def check_pages(pool: Any, numbers: Sequence[int], source: Any, own: Sequence[int]) -> None:
    assert all(torch.equal(page(pool, number), page(source, other)) for number, other in zip(numbers, own, strict=True))


@pytest.mark.parametrize("kind", [MHATokenToKVPool, MLATokenToKVPool])
def test_pages_that_are_stored_are_loaded_into_other_pages(start: Start, kind: Callable[..., Any]) -> None:
    source, target = kind(1), kind(-1)
    first, second = start(source), start(target)
    assert first.lookup("a", lookup_of(NAMES)) == []
    assert store(first, NAMES[:2], FIRST[:2])
    assert store(first, NAMES[2:], FIRST[2:])
    assert second.lookup("b", lookup_of([*NAMES, "00" * 32])) == [1, 2, 3, 4, 5, 6]
    assert second.load("b", copy_of(NAMES, SECOND))
    assert second.start_layer_wise_loading() == -1
    assert second.finish_layer_wise_loading(-1)
    check_pages(target, SECOND, source, FIRST)
    assert not page(target, FIRST[0]).any(), "other pages are as they were"
    counts = second.counts
    assert (counts.looked_up, counts.found, counts.read, counts.failed_calls) == (7, 6, 6, 0)


def test_fewer_pages_than_were_found_can_be_loaded_but_no_others(start: Start) -> None:
    source, target = MHATokenToKVPool(1), MHATokenToKVPool(-1)
    first, second = start(source), start(target)
    assert store(first, NAMES[:4], FIRST[:4])
    assert not second.load("a", copy_of(NAMES[:4], SECOND[:4])), "nothing was looked up"
    assert second.lookup("a", lookup_of(NAMES)) == [1, 2, 3, 4]
    assert not second.load("a", copy_of(NAMES, SECOND)), "more than was found"
    assert not second.load("a", copy_of(OTHERS[:2], SECOND[:2]))
    assert second.load("a", copy_of(NAMES[:3], SECOND[:3])), "another rank has found less"
    check_pages(target, SECOND[:3], source, FIRST[:3])
    assert not page(target, SECOND[3]).any()
    assert not second.load("a", copy_of(NAMES[:3], SECOND[:3])), "it was released"


def test_pages_that_the_node_has_are_not_written_again(start: Start) -> None:
    linker = start(MHATokenToKVPool(1))
    assert store(linker, NAMES[:4], FIRST[:4])
    assert store(linker, NAMES, SECOND)
    assert (linker.counts.written, linker.counts.held_before) == (6, 4)


def test_the_linker_and_the_storage_backend_share_pages(start: Start, node: NodeOfTests) -> None:
    """As long as engines have the same model, type of elements and page size."""
    source = MHATokenToKVPool(1)
    linker = start(source)
    settings = {"node_address": str(node.socket), "lookup_timeout": 20, "load_timeout": 60, "model_id": "tiny"}
    extra = {"interface_v1": 1, "lmkv": settings}
    storage = LmkvStorage(StorageConfigFields(extra_config=extra), {})
    target: HostPoolFields = host_pool("layer_first", seed=-1)
    storage.register_mem_pool_host(target)
    try:
        assert store(linker, NAMES, FIRST)
        assert storage.batch_get_v1(NAMES, slots([0, 1, 2, 3, 4, 5])) == [True] * 6
        own = target.kv_buffer[:, :, PAGE_SIZE : 2 * PAGE_SIZE]
        assert torch.equal(own.flatten(0, 1), page(source, FIRST[1]))
        assert all(storage.batch_set_v1(OTHERS, slots([0, 1, 2, 3, 4, 5])))
        assert linker.lookup("a", lookup_of(OTHERS)) == [1, 2, 3, 4, 5, 6]
    finally:
        storage.close()


def test_what_was_found_stays_until_it_is_loaded_or_the_next_pass_begins(
    start: Start, tmp_path: Path, short_folder: Path, coordinator: CoordinatorProcess
) -> None:
    """In a pool that is full of pages in use, nothing else can be stored."""
    with NodeOfTests(short_folder, tmp_path, coordinator, name="small", memory="256KiB") as small:
        small.start_and_wait()
        source, target = MHATokenToKVPool(1), MHATokenToKVPool(-1)
        settings = {"load_timeout": 0.05}
        writer = start(source, address=small.socket, settings=settings)
        reader = start(target, address=small.socket)
        prompts = [page_hashes(list(range(9000 + 1000 * i, 9000 + 1000 * i + 6 * PAGE_SIZE))) for i in range(30)]

        def locked_pages(index: int) -> int:
            return len(reader.lookup(f"{index}", lookup_of(prompts[index])))

        stored = 0
        while store(writer, prompts[stored], FIRST) and locked_pages(stored) == 6:
            stored += 1
        assert stored >= 2, "there was no room for more"
        assert reader.load("0", copy_of(prompts[0], SECOND))
        check_pages(target, SECOND, source, FIRST)
        wait_until(lambda: store(writer, OTHERS, FIRST), "what was loaded can be evicted")
        assert reader.num_completed_offloads() == 0  # the next pass
        assert not reader.load("1", copy_of(prompts[1], SECOND)), "its lock has ended"
        wait_until(lambda: store(writer, NAMES, FIRST), "all of it can be evicted")


def test_a_load_survives_the_death_of_the_node_since_the_lookup(start: Start, node: NodeOfTests) -> None:
    source, target = MHATokenToKVPool(1), MHATokenToKVPool(-1)
    first, second = start(source), start(target)
    assert store(first, NAMES, FIRST)
    assert second.lookup("a", lookup_of(NAMES)) == [1, 2, 3, 4, 5, 6]
    node.kill()
    assert second.lookup("b", lookup_of(NAMES)) == []
    assert second.load("a", copy_of(NAMES, SECOND))
    check_pages(target, SECOND, source, FIRST)
    assert not store(second, NAMES, SECOND), "SGLang offers the pages again"
    node.start_and_wait()
    wait_until(lambda: store(first, NAMES, FIRST), "the engine is attached again")
    wait_until(lambda: lookup_in_next_pass(second, "c", NAMES) == 6, "the other one is, too")
    assert (first.counts.failed_calls, second.counts.failed_calls) == (0, 0)


def test_a_node_that_hangs_is_a_miss(start: Start, node: NodeOfTests) -> None:
    linker = start(MHATokenToKVPool(1), settings={"lookup_timeout": 0.1, "load_timeout": 0.1})
    wait_until(lambda: store(linker, NAMES, FIRST), "the pages are stored")
    os.kill(node.pid, signal.SIGSTOP)
    try:
        assert linker.lookup("a", lookup_of(NAMES)) == []
        for _ in range(2 * MAX_WAITING_OFFLOADS):
            assert linker.offload(copy_of(OTHERS, SECOND))
        assert not any(result_of(linker) for _ in range(2 * MAX_WAITING_OFFLOADS - 1))
    finally:
        os.kill(node.pid, signal.SIGCONT)
    wait_until(lambda: lookup_in_next_pass(linker, "b", NAMES) == 6, "it answers again")
    assert linker.counts.failed_calls == 0


def test_pages_at_a_peer_are_a_miss_and_fetched_for_a_later_request(
    start: Start, tmp_path: Path, short_folder: Path, coordinator: CoordinatorProcess
) -> None:
    with NodeOfTests(short_folder, tmp_path, coordinator, name="peer") as peer:
        peer.start_and_wait()
        source, target = MHATokenToKVPool(1), MHATokenToKVPool(-1)
        assert store(start(source, address=peer.socket), NAMES, FIRST)
        linker = start(target)
        assert store(linker, NAMES[:2], SECOND[:2])
        assert len(linker.lookup("first", lookup_of(NAMES))) == 2
        wait_until(lambda: lookup_in_next_pass(linker, "later", NAMES) == 6, "the pages are fetched")
        assert linker.load("later", copy_of(NAMES, FIRST))
        check_pages(target, FIRST[2:], source, FIRST[2:])
        linker.num_completed_offloads()  # the next pass
        session = linker._store._attached()._dispatcher._session
        assert session.attachment
        wait_until(lambda: not session.lookups, "the node holds nothing for a request")


def test_names_that_are_malformed_and_pages_that_are_none_are_misses_and_are_counted(start: Start) -> None:
    linker = start(MHATokenToKVPool(1))
    assert linker.lookup("a", lookup_of(["no digest"])) == []
    assert store(linker, NAMES[:1], FIRST[:1])
    assert not store(linker, NAMES[:1], [99])
    assert not store(linker, NAMES[:2], FIRST[:1])
    assert linker.lookup("a", lookup_of(NAMES[:1])) == [1]
    assert not linker.load("a", copy_of(NAMES[:1], [99]))
    assert linker.counts.failed_calls == 4
    assert not linker.offload([])
    assert store(linker, NAMES, FIRST), "the next call is served"


@pytest.mark.parametrize(
    ("pool", "options", "message"),
    [
        (MHATokenToKVPool(), {"components": (Component.FULL, Component.SWA)}, "a pool SWA"),
        (MHATokenToKVPool(), {"mtp_draft_device_pools": (object(),)}, "a pool mtp_draft_device_pools"),
        (object(), {}, "a KV cache object"),
        (type("MHATokenToKVPoolFP4", (MHATokenToKVPool,), {})(), {}, "a KV cache MHATokenToKVPoolFP4"),
        (type("MHATokenToKVPool", (), {})(), {}, "of other tensors"),
    ],
    ids=["window", "draft", "unknown", "subclass", "version"],
)
def test_models_that_lmkv_does_not_know_are_served_without_it(
    start: Start, caplog: pytest.LogCaptureFixture, pool: Any, options: dict[str, Any], message: str
) -> None:
    with caplog.at_level(logging.WARNING, "sglang.lmkv"):
        linker = start(pool, **options)
        assert linker.lookup("a", lookup_of(NAMES)) == []
        assert not linker.load("a", copy_of(NAMES, SECOND))
        assert store(linker, NAMES, FIRST), "SGLang need not try again"
        assert linker.lookup("b", lookup_of(NAMES)) == []
    assert [message in record.getMessage() for record in caplog.records] == [True]
    assert (linker.counts.looked_up, linker.counts.found, linker.counts.failed_calls) == (12, 0, 0)


def test_pages_with_scales_are_not_stored(start: Start) -> None:
    pool = MHATokenToKVPool(1)
    pool.k_scale_buffer = torch.zeros(1)
    linker = start(pool)
    assert store(linker, NAMES, FIRST)
    assert linker.counts.written == 0


def test_once_weights_change_nothing_is_loaded_or_stored(start: Start) -> None:
    linker, other = start(MHATokenToKVPool(1)), start(MHATokenToKVPool(1))
    assert store(linker, NAMES[:3], FIRST[:3])
    linker._store.weights_change()
    assert linker.lookup("a", lookup_of(NAMES)) == []
    assert store(linker, NAMES[3:], FIRST[3:])
    assert other.lookup("a", lookup_of(NAMES)) == [1, 2, 3], "of the old weights"


def test_a_reset_releases_what_was_found_and_waits_for_offloads(start: Start) -> None:
    linker = start(MHATokenToKVPool(1))
    assert store(linker, NAMES, FIRST)
    assert linker.lookup("a", lookup_of(NAMES)) == [1, 2, 3, 4, 5, 6]
    assert linker.offload(copy_of(OTHERS, SECOND))
    linker.reset()
    assert linker.counts.written == 12
    assert linker.num_completed_offloads() == 0
    assert not linker.load("a", copy_of(NAMES, SECOND))
    assert linker.cancel_queued_load("a")


def test_a_linker_that_is_closed_finds_nothing(start: Start) -> None:
    linker = start(MHATokenToKVPool(1))
    linker.close()
    linker.close()
    assert linker.lookup("a", lookup_of(NAMES)) == []


def test_a_request_that_is_considered_twice_in_a_pass_is_looked_up_once(start: Start) -> None:
    linker = start(MHATokenToKVPool(1))
    assert store(linker, NAMES, FIRST)
    for _ in range(2):
        assert linker.lookup("a", lookup_of(NAMES)) == [1, 2, 3, 4, 5, 6]
    assert linker.counts.looked_up == 6
    assert linker.lookup("a", lookup_of(NAMES[2:])) == [1, 2, 3, 4], "SGLang has the first pages by now"
    assert linker.counts.looked_up == 10


def test_the_last_slots_of_a_kv_cache_that_fill_no_page_are_left_out(start: Start) -> None:
    source, target = MHATokenToKVPool(1, slot_count=20 * PAGE_SIZE + 3), MHATokenToKVPool(-1)
    assert store(start(source), NAMES[:1], [19])
    linker = start(target)
    assert linker.lookup("a", lookup_of(NAMES)) == [1]
    assert linker.load("a", copy_of(NAMES[:1], [1]))
    check_pages(target, [1], source, [19])


@pytest.mark.parametrize(
    ("settings", "message"), [({"chunk_sise": 3}, "chunk_sise"), ({"load_timeout": "soon"}, "load_timeout")], ids=str
)
def test_a_mistake_in_the_configuration_is_refused_by_its_key(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_linker("/nowhere", MHATokenToKVPool(), settings=settings)


def test_a_kv_cache_that_is_not_in_host_memory_is_refused(start: Start) -> None:
    pool = MHATokenToKVPool()
    pool.k_buffer, pool.v_buffer = ([layer.to("meta") for layer in part] for part in (pool.k_buffer, pool.v_buffer))
    with pytest.raises(ConfigError, match="host memory"):
        start(pool)
