"""`gather` and `scatter` against their plain twin, bit for bit."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lmkv_kernels
from lmkv_kernels import ChunkCopy, _host, host, reference, token_rows, whole_states, whole_tiles
from lmkv_kernels.copies import check
from tests.kernels.layouts import DTYPES, LAYOUTS, Case, cases, kv_cache, large_case, random_bytes
from tests.waiting import wait_until

COPY_WAYS = ["wrapper", "portable"]


def gather(case: Case, way: str, threads: int = 1) -> list[int]:
    if way == "wrapper":
        return lmkv_kernels.gather(case.pages, case.pool, case.copies, threads=threads)
    rows, block_ids = check(case.pages, case.pool.size, case.copies)
    sums = np.zeros(len(case.copies), np.uint64)
    pages = host._addresses(case.pages), host._geometry(case.pages)
    _host.gather(*pages, case.pool, rows, block_ids, sums, threads, portable=True)
    return list(map(int, sums))


def scatter(case: Case, way: str, threads: int = 1) -> None:
    if way == "wrapper":
        return lmkv_kernels.scatter(case.pages, case.pool, case.copies, threads=threads)
    rows, block_ids = check(case.pages, case.pool.size, case.copies)
    pages = host._addresses(case.pages), host._geometry(case.pages)
    return _host.scatter(*pages, case.pool, rows, block_ids, threads, portable=True)


@pytest.mark.parametrize("way", COPY_WAYS)
@settings(max_examples=300, deadline=None)
@given(case=cases())
def test_gather_writes_the_twins_bytes_and_no_others(way: str, case: Case) -> None:
    memory, before = case.memory.copy(), case.pool.copy()
    case.twin.gather(case.pool_tensor, case.copies)
    expected, sums = case.pool.copy(), case.expected_sums()
    case.pool[:] = before
    assert gather(case, way) == sums
    assert np.array_equal(case.pool, expected)
    assert np.array_equal(case.memory, memory)


@pytest.mark.parametrize("way", COPY_WAYS)
@settings(max_examples=300, deadline=None)
@given(case=cases())
def test_scatter_writes_the_twins_bytes_and_no_others(way: str, case: Case) -> None:
    before, pool = case.memory.copy(), case.pool.copy()
    case.twin.scatter(case.pool_tensor, case.copies)
    expected = case.memory.copy()
    case.memory[:] = before
    scatter(case, way)
    assert np.array_equal(case.memory, expected)
    assert np.array_equal(case.pool, pool)


@settings(max_examples=60, deadline=None)
@given(
    layouts=st.tuples(*[st.sampled_from(sorted(LAYOUTS))] * 2),
    block_sizes=st.tuples(*[st.integers(1, 40)] * 2),
    ranks=st.tuples(*[st.sampled_from([1, 2, 4])] * 2),
    dtype=st.sampled_from(DTYPES),
    tokens=st.integers(1, 70),
    latent=st.booleans(),
    data=st.data(),
)
def test_token_rows_go_between_any_two_engines(
    layouts: tuple[str, str],
    block_sizes: tuple[int, int],
    ranks: tuple[int, int],
    dtype: torch.dtype,
    tokens: int,
    latent: bool,
    data: st.DataObject,
) -> None:
    """Of other layouts, block sizes and numbers of ranks: what one has gathered, the other scatters."""
    layers, kv_heads, parts = 2, 1 if latent else 4, 1 if latent else 2
    content = 16 * parts
    truth = torch.from_numpy(random_bytes(1, layers * kv_heads * tokens * content * dtype.itemsize)).view(dtype)
    truth = truth.view(layers, kv_heads, tokens, content)
    pool = random_bytes(2, layers * kv_heads * tokens * content * dtype.itemsize)
    total = 0
    for writing, layout, block_size, rank_count in zip((True, False), layouts, block_sizes, ranks, strict=True):
        blocks = -(-tokens // block_size)
        ids = data.draw(st.permutations(range(blocks + 1)))[:blocks]
        per_rank = max(1, kv_heads // rank_count)
        for first_head in range(0, kv_heads, per_rank):
            shape = (layers, blocks + 1, per_rank, block_size, content)
            _, tensors = kv_cache(3, shape, layout, dtype)
            pages = token_rows(tensors, first_head, kv_heads, part_count=parts)
            own = slice(first_head, first_head + per_rank)
            slots = [(ids[token // block_size], token % block_size) for token in range(tokens)]
            copy = ChunkCopy(offset=0, extent_tokens=tokens, token_count=tokens, block_ids=ids)
            if writing:
                for layer in range(layers):
                    for token, (block, slot) in enumerate(slots):
                        tensors[layer][block, :, slot] = truth[layer, own, token]
                total += sum(lmkv_kernels.gather(pages, pool, [copy]))
                continue
            lmkv_kernels.scatter(pages, pool, [copy])
            for layer in range(layers):
                for token, (block, slot) in enumerate(slots):
                    arrived = tensors[layer][block, :, slot].view(torch.uint8)
                    assert torch.equal(arrived, truth[layer, own, token].view(torch.uint8)), (layer, token)
    assert total % 2**64 == lmkv_kernels.checksum(pool) == reference.checksum(pool)


def test_a_chunk_holds_layer_head_part_token_and_element_in_this_order() -> None:
    truth = torch.arange(2 * 3 * 2 * 5 * 4, dtype=torch.int32).view(2, 3, 2, 5, 4)
    pages_of = truth.permute(0, 3, 1, 2, 4).reshape(2, 5, 3, 1, 8).contiguous()  # blocks of one token
    pages = token_rows(list(pages_of), 0, 3)
    pool = np.zeros(pages.extent_bytes(5), np.uint8)
    copy = ChunkCopy(offset=0, extent_tokens=5, token_count=5, block_ids=range(5))
    lmkv_kernels.gather(pages, pool, [copy])
    assert pool.tobytes() == truth.numpy().tobytes()


@pytest.mark.parametrize("way", COPY_WAYS)
@pytest.mark.parametrize("inside", ["whole", "tokens", "packed"])
def test_any_number_of_threads_gives_the_same_bytes_and_checksums(inside: str, way: str) -> None:
    case = large_case(inside=inside)
    case.twin.gather(case.pool_tensor, case.copies)
    expected_pool, expected = case.pool.copy(), case.expected_sums()
    for threads in (1, 2, 3, 7, 0):
        case.pool[:] = 0
        assert gather(case, way, threads) == expected
        assert np.array_equal(case.pool, expected_pool)
        memory = case.memory.copy()
        case.memory[:] = 0
        scatter(case, way, threads)
        assert np.array_equal(case.memory, memory)


@pytest.mark.parametrize("inside", ["whole", "tokens", "packed"])
def test_what_is_not_summed_is_copied_all_the_same(inside: str) -> None:
    case = large_case(inside=inside)
    case.twin.gather(case.pool_tensor, case.copies)
    expected = case.pool.copy()
    case.pool[:] = 0
    assert lmkv_kernels.gather(case.pages, case.pool, case.copies, summed=False) == [0] * len(case.copies)
    assert np.array_equal(case.pool, expected)


@pytest.mark.parametrize("inside", ["whole", "tokens", "packed"])
def test_targets_off_a_vector_boundary_are_written_right(inside: str) -> None:
    case = large_case(layer_count=1, head_count=1, chunk_count=1, inside=inside)
    for shift in (8, 16, 24, 32, 40):
        moved = dataclasses.replace(
            case,
            pool=random_bytes(9, case.pool.size + 64),
            copies=[dataclasses.replace(case.copies[0], offset=shift)],
        )
        expected = moved.pool.copy()
        case.twin.gather(torch.from_numpy(expected), moved.copies)
        gather(moved, "wrapper")
        assert np.array_equal(moved.pool, expected)


def test_no_copies_copy_nothing() -> None:
    case = large_case(chunk_count=1)
    assert lmkv_kernels.gather(case.pages, case.pool, []) == []
    empty = [dataclasses.replace(case.copies[0], block_ids=(), token_count=0)]
    assert lmkv_kernels.gather(case.pages, case.pool, empty) == [0]
    lmkv_kernels.scatter(case.pages, case.pool, [])


def test_other_threads_run_while_a_kernel_copies() -> None:
    case = large_case()
    turns, stop = [0], threading.Event()

    def turn() -> None:
        while not stop.is_set():
            turns[0] += 1

    def turned() -> bool:
        """Whether the other thread has run during one call, which takes some 100 ms."""
        before = turns[0]
        lmkv_kernels.gather(case.pages, case.pool, case.copies * 100)
        return turns[0] - before > 1000  # far more than between two bytecodes

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        wait_until(turned, "another thread runs meanwhile")
    finally:
        stop.set()
        thread.join()


Kernel = Callable[..., object]
BOTH: list[Kernel] = [lmkv_kernels.gather, lmkv_kernels.scatter]


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_ids": (0, 8)}, "block 8 is not among the pages' 8"),
        ({"block_ids": (-1, 0)}, "block -1"),
        ({"block_ids": (1, 2, 3)}, "3 block_ids do not hold 256 tokens"),
        ({"first_token": 128}, "do not fit into 256"),
        ({"first_token": -128}, "do not fit into 256"),
        ({"first_token": 64, "token_count": 100, "block_ids": (0,)}, "not where a block begins"),
        ({"first_slot": 64, "token_count": 100, "block_ids": (0,)}, "not where a block begins"),
        ({"first_slot": 128}, "first_slot 128 is not in a block of 128"),
        ({"first_slot": -128}, "first_slot -128"),
        ({"token_count": -1}, "do not fit"),
        ({"extent_tokens": 0}, "extent_tokens must be positive"),
        ({"extent_tokens": 2**62}, "ends behind the pool"),
        ({"offset": 3 * 2 * 2 * 2 * 32768 + 8}, "ends behind the pool"),
        ({"offset": 2**70}, "ends behind the pool"),
        ({"offset": -8}, "offset -8"),
        ({"offset": 4}, "offset 4 is not a multiple of 8"),
    ],
)
def test_a_copy_that_does_not_fit_is_refused_before_a_byte_moves(
    kernel: Kernel, change: dict[str, object], words: str
) -> None:
    case = large_case(layer_count=2, head_count=2)
    bad = dataclasses.replace(case.copies[-1], **change)  # type: ignore[arg-type]
    memory, pool = case.memory.copy(), case.pool.copy()
    with pytest.raises(ValueError, match=words):
        kernel(case.pages, case.pool, [*case.copies[:-1], bad])
    assert np.array_equal(case.memory, memory)
    assert np.array_equal(case.pool, pool)


def test_scatter_refuses_to_write_a_token_twice() -> None:
    case = large_case(layer_count=1, head_count=1)
    twice = [case.copies[0], dataclasses.replace(case.copies[1], block_ids=case.copies[0].block_ids)]
    with pytest.raises(ValueError, match="block 7 would be written twice"):
        lmkv_kernels.scatter(case.pages, case.pool, twice)


def test_two_chunks_may_share_a_block_that_they_meet_in() -> None:
    case = large_case(layer_count=1, head_count=1, inside="tokens")
    first = dataclasses.replace(case.copies[0], token_count=100, block_ids=(3,))
    second = dataclasses.replace(case.copies[1], token_count=60, block_ids=(3, 4), first_slot=100)
    lmkv_kernels.scatter(case.pages, case.pool, [first, second])
    with pytest.raises(ValueError, match="block 3 would be written twice"):
        lmkv_kernels.scatter(case.pages, case.pool, [first, dataclasses.replace(second, first_slot=99)])


def test_chunks_that_share_a_block_may_come_in_any_order() -> None:
    case = large_case(layer_count=1, head_count=1, inside="tokens")
    first = dataclasses.replace(case.copies[0], token_count=40, block_ids=(3,))
    middle = dataclasses.replace(case.copies[1], token_count=20, block_ids=(3,), first_slot=40)
    last = dataclasses.replace(case.copies[2], token_count=30, block_ids=(3,), first_slot=60)
    twice = dataclasses.replace(middle, token_count=21)
    for copies in itertools.permutations([first, middle, last]):
        lmkv_kernels.scatter(case.pages, case.pool, copies)
    for copies in itertools.permutations([first, twice, last]):
        with pytest.raises(ValueError, match="block 3 would be written twice"):
            lmkv_kernels.scatter(case.pages, case.pool, copies)


def test_gather_refuses_memory_that_it_may_not_write() -> None:
    case = large_case(layer_count=1, head_count=1)
    with pytest.raises(ValueError, match="pool is read-only"):
        lmkv_kernels.gather(case.pages, bytes(case.pool), case.copies)
    lmkv_kernels.scatter(case.pages, bytes(case.pool), case.copies)


def test_threads_below_zero_and_pages_elsewhere_are_refused() -> None:
    case = large_case(layer_count=1, head_count=1)
    with pytest.raises(ValueError, match="threads"):
        lmkv_kernels.gather(case.pages, case.pool, case.copies, threads=-1)
    elsewhere = dataclasses.replace(case.pages, device="cuda:0")
    with pytest.raises(ValueError, match="on cuda:0, not in CPU memory"):
        lmkv_kernels.gather(elsewhere, case.pool, case.copies)


def test_parts_of_a_chunk_add_up_to_its_checksum() -> None:
    case = large_case(layer_count=2, head_count=2, chunk_count=1)
    whole = lmkv_kernels.gather(case.pages, case.pool, case.copies)
    (copy,) = case.copies
    halves = [
        dataclasses.replace(copy, token_count=128, first_token=128 * at, block_ids=[block_id])
        for at, block_id in enumerate(copy.block_ids)
    ]
    assert sum(lmkv_kernels.gather(case.pages, case.pool, halves)) % 2**64 == whole[0] == reference.checksum(case.pool)
    tensors = case.twin.tensors
    ranks = [whole_tiles([tensor[:, head : head + 1] for tensor in tensors], head, 2) for head in range(2)]
    parts = [lmkv_kernels.gather(rank, case.pool, case.copies)[0] for rank in ranks]
    assert sum(parts) % 2**64 == whole[0]


@settings(max_examples=60, deadline=None)
@given(case=cases(), count=st.integers(1, 3), threads=st.integers(0, 3), data=st.data())
def test_groups_of_layers_make_the_extent_that_all_layers_make_at_once(
    case: Case, count: int, threads: int, data: st.DataObject
) -> None:
    """Whichever blocks each group has: groups share neither block ids nor the order of their blocks."""
    layers = len(case.pages.layer_addresses)
    marks = [0, *sorted(data.draw(st.sets(st.integers(1, layers - 1), max_size=count)) if layers > 1 else []), layers]
    groups = [
        dataclasses.replace(
            case.pages,
            layer_addresses=case.pages.layer_addresses[start:stop],
            first_layer=case.pages.first_layer + start,
        )
        for start, stop in itertools.pairwise(marks)
    ]
    pool, memory = case.pool.copy(), case.memory.copy()
    sums = lmkv_kernels.gather(case.pages, case.pool, case.copies)
    expected = case.pool.copy()
    case.pool[:] = pool
    parts = [lmkv_kernels.gather(group, case.pool, case.copies, threads=threads) for group in groups]
    assert np.array_equal(case.pool, expected)
    assert [sum(own) % 2**64 for own in zip(*parts, strict=True)] == sums

    case.pool[:] = random_bytes(5, case.pool.size)
    lmkv_kernels.scatter(case.pages, case.pool, case.copies)
    expected = case.memory.copy()
    case.memory[:] = memory
    for group in groups:
        lmkv_kernels.scatter(group, case.pool, case.copies, threads=threads)
    assert np.array_equal(case.memory, expected)


@pytest.mark.parametrize(("first", "state_bytes"), [(0, 64), (1, 1000), (2, 70000)])
def test_states_are_copied_without_the_padding_of_their_pages(first: int, state_bytes: int) -> None:
    """Three groups of one layer each, on one of two ranks, over the same memory: each has its own block ids."""
    page = state_bytes + 24
    memory = torch.from_numpy(random_bytes(1, 8 * page)).view(torch.int8)
    tensor = memory.as_strided((8, 1, 1, state_bytes), (page, state_bytes, state_bytes, 1))
    pages = [
        whole_states([tensor], 1, 2, chunk_tokens=256, first_layer=layer, layer_count=3)
        for layer in (first, (first + 1) % 3)
    ]
    size_bytes = pages[0].extent_bytes(256)
    assert size_bytes == 3 * 2 * state_bytes
    pool = random_bytes(2, size_bytes + 16)
    expected, before = pool.copy(), pool.copy()
    chunk = expected[8 : 8 + size_bytes].reshape(3, 2, state_bytes)
    total = 0
    for group, block in zip(pages, (5, 2), strict=True):
        copy = ChunkCopy(offset=8, extent_tokens=256, token_count=256, block_ids=[block])
        chunk[group.first_layer, 1] = tensor[block].flatten().numpy().view(np.uint8)
        total += lmkv_kernels.gather(group, pool, [copy])[0]
    assert np.array_equal(pool, expected)
    for layer in range(3):
        for rank in range(2):
            if rank == 0 or layer == (first + 2) % 3:  # what others have, as it was
                start = 8 + (layer * 2 + rank) * state_bytes
                assert np.array_equal(pool[start : start + state_bytes], before[start : start + state_bytes])
                total += reference.checksum(pool[start : start + state_bytes].copy(), (start - 8) // 8)
    assert total % 2**64 == lmkv_kernels.checksum(pool, 8, size_bytes)

    kept = memory.clone()
    copy = ChunkCopy(offset=8, extent_tokens=256, token_count=256, block_ids=[7])
    lmkv_kernels.scatter(pages[1], pool, [copy])
    kept[7 * page : 7 * page + state_bytes] = tensor[2].flatten()
    assert torch.equal(memory, kept)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_ids": [1, 2]}, "2 block_ids do not hold"),
        ({"first_token": 1}, "not where a block begins"),
        ({"extent_tokens": 512, "token_count": 512, "block_ids": [1, 2]}, "ends behind the pool"),
    ],
)
def test_a_state_is_never_cut(change: dict[str, object], words: str) -> None:
    pages = whole_states([torch.zeros(4, 1, 1, 64, dtype=torch.int8)], 0, 1, chunk_tokens=256)
    copy = ChunkCopy(offset=0, extent_tokens=256, token_count=256, block_ids=[1])
    with pytest.raises(ValueError, match=words):
        lmkv_kernels.gather(pages, bytearray(64), [dataclasses.replace(copy, **change)])  # type: ignore[arg-type]
