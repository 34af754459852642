"""Copies of parts between pages and extents, against pages and extents whose rows are the numbers of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from lmkv.keys import ChunkKey, KeyChain, as_tokens
from lmkv.spec import NATIVE_TILES, TOKEN_MAJOR, KvPart, PartItem
from lmkv.v1.chunk_pb2 import PART_RULE_ALL, PART_RULE_END, PART_RULE_LAST, PART_RULE_SINCE_MULTIPLE, Extent
from lmkv.v1.engine_service_pb2 import HeldChunk
from lmkv_client.connector.engine_kv import LayerGroup
from lmkv_client.connector.scheduler.block_copies import (
    NULL_BLOCK_ID,
    BlockMap,
    ChunkItems,
    PartExtent,
    PartItems,
    blocks_of,
    has_null_page,
    items_of,
)
from lmkv_client.connector.scheduler.loads import LoadState
from lmkv_client.connector.scheduler.request_state import RequestState
from lmkv_kernels import ChunkCopy
from tests.support.specs import make_spec

CHUNK = 16
UNTOUCHED = -1
Pages = dict[int, list[int]]


def block_map(kinds: list[tuple[int, int, int]], *, native: bool) -> BlockMap:
    """Layers of these kinds, each a rule, a span and a block size; every kind is one group, and a part."""
    parts = [
        KvPart(
            rule=rule,  # type: ignore[arg-type]  # an enum value is an int
            span=span,
            layer_count=1,
            kv_head_count=1,
            head_size=8,
            kv_dtype="int8" if rule == PART_RULE_END else "bfloat16",
            block_size=block if rule != PART_RULE_END and (native or is_short(rule, span)) else 0,
            layers="several",
        )
        for rule, span, block in kinds
    ]
    first = parts[0]
    spec = make_spec(
        model_name="m",
        model_id="m",
        kv_dtype=first.kv_dtype,
        layer_count=1,
        kv_head_count=1,
        chunk_size=CHUNK,
        format=NATIVE_TILES if native else TOKEN_MAJOR,
        block_size=first.block_size,
        rule=first.rule,
        span=first.span,
        layers=first.layers,
        more_parts=tuple(parts[1:]),
    )
    groups = tuple(
        LayerGroup(part=part, block_size=block, layer_names=(str(part),)) for part, (_, _, block) in enumerate(kinds)
    )
    return BlockMap(spec=spec, groups=groups)


def is_short(rule: int, span: int) -> bool:
    return rule == PART_RULE_LAST and span - 1 < CHUNK


@dataclass(frozen=True)
class Memory:
    """The pages of one request in every group."""

    blocks: BlockMap
    block_ids: list[list[int]]
    pages: list[Pages]

    def rows(self, copy: ChunkCopy) -> Iterator[tuple[list[int], int]]:
        group = self.blocks.groups[copy.group]
        is_state = self.blocks.spec.parts[group.part].rule == PART_RULE_END
        size, count = (1, 1) if is_state else (group.block_size, copy.token_count)
        assert len(copy.block_ids) == -(-(copy.first_slot + count) // size)
        for at in range(copy.first_slot, copy.first_slot + count):
            yield self.pages[copy.group][copy.block_ids[at // size]], at % size

    @classmethod
    def of(cls, blocks: BlockMap, token_count: int, *, filled: bool, first: int = 100) -> Memory:
        """Pages for this number of tokens. In filled ones each row is the number of its token."""
        ids, pages = [], []
        for group in blocks.groups:
            is_state = blocks.spec.parts[group.part].rule == PART_RULE_END
            size = group.block_size
            own = list(range(first, first + token_count // size))
            tokens = [
                [(at + 1) * size - 1] if is_state else [*range(at * size, (at + 1) * size)] for at in range(len(own))
            ]
            ids.append(own)
            pages.append(
                {block: rows if filled else [UNTOUCHED] * len(rows) for block, rows in zip(own, tokens, strict=True)}
            )
        return cls(blocks, ids, pages)

    def free_before(self, end: int) -> None:
        """Puts null pages where vLLM has none for a hit that ends here."""
        for group, ids in zip(self.blocks.groups, self.block_ids, strict=True):
            oldest = self.blocks.spec.parts[group.part].first_token(end) // group.block_size
            ids[: min(oldest, len(ids))] = [NULL_BLOCK_ID] * min(oldest, len(ids))


block_sizes = st.sampled_from([2, 4, 8, 16])
kinds = st.lists(
    st.one_of(
        st.tuples(st.just(PART_RULE_ALL), st.just(0), block_sizes),
        st.tuples(st.just(PART_RULE_LAST), st.integers(2, 3 * CHUNK), block_sizes),
        st.tuples(
            st.just(PART_RULE_SINCE_MULTIPLE), st.sampled_from([CHUNK // 2, CHUNK, 2 * CHUNK, 4 * CHUNK]), block_sizes
        ),
        st.tuples(st.just(PART_RULE_END), st.just(0), block_sizes),
    ),
    min_size=1,
    max_size=4,
)


@given(kinds=kinds, native=st.booleans(), chunk_count=st.integers(1, 8), data=st.data())
def test_what_is_stored_of_each_item_fills_whole_pages_of_a_hit_and_nothing_else(
    kinds: list[tuple[int, int, int]], native: bool, chunk_count: int, data: st.DataObject
) -> None:
    blocks = block_map(kinds, native=native)
    spec, end = blocks.spec, chunk_count * CHUNK
    source = Memory.of(blocks, end, filled=True)
    extents: list[dict[tuple[int, int], int]] = []
    for item in spec.items(chunk_count):
        extent: dict[tuple[int, int], int] = {}
        for copy in blocks.stored(PartExtent(item.part, item.chunk, CHUNK, len(extents)), source.block_ids):
            assert copy.first_token == 0
            assert copy.extent_tokens == copy.token_count == spec.parts[item.part].kept_tokens(CHUNK)
            extent |= {(copy.group, at): page[slot] for at, (page, slot) in enumerate(source.rows(copy))}
        extents.append(extent)

    start = data.draw(st.integers(0, chunk_count * CHUNK // 16 - 1)) * 16  # a multiple of every block
    target = Memory.of(blocks, end, filled=False, first=500)
    target.free_before(end)
    items = PartItems(blocks, target.block_ids, start, end)
    assert items.chunk_count == chunk_count
    for index in items.wanted:
        number = items.items[index].part
        copies = items.copies(index, chunk_of(blocks, number, index))
        assert copies is not None
        for copy in copies:
            assert copy.offset == index
            for at, (page, slot) in enumerate(target.rows(copy), copy.first_token):
                page[slot] = extents[index][copy.group, at]

    for index, group in enumerate(blocks.groups):
        part = spec.parts[group.part]
        low = max(start, part.first_token(end) // group.block_size * group.block_size)
        for block_id, right in zip(target.block_ids[index], source.pages[index].values(), strict=True):
            is_loaded = low <= right[-1] and (part.rule != PART_RULE_END or right[-1] == end - 1)
            if block_id != NULL_BLOCK_ID:
                assert target.pages[index][block_id] == (right if is_loaded else [UNTOUCHED] * len(right))


FULL_AND_WINDOW = block_map([(PART_RULE_ALL, 0, 4), (PART_RULE_LAST, 7, 4)], native=True)
FULL_AND_STATE = block_map([(PART_RULE_ALL, 0, 4), (PART_RULE_END, 0, 8)], native=True)


def chunk_of(blocks: BlockMap, part: int, offset: int = 0) -> HeldChunk:
    extent = Extent(offset=offset, size_bytes=blocks.spec.part_bytes(part))
    return HeldChunk(extent=extent, token_count=CHUNK)


def test_blocks_are_those_that_hold_any_of_the_tokens() -> None:
    assert blocks_of([5, 6, 7, 8], 4, 3, 9) == [5, 6, 7]
    assert blocks_of([5, 6, 7, 8], 4, 4, 8) == [6]
    assert blocks_of([5, 6], 4, 4, 4) == []


def test_of_a_window_shorter_than_a_chunk_only_the_last_pages_are_copied() -> None:
    ids = [[*range(10, 18)], [*range(20, 28)]]
    (copy,) = FULL_AND_WINDOW.stored(PartExtent(1, 1, CHUNK, 64), ids)
    assert copy == ChunkCopy(offset=64, extent_tokens=8, token_count=8, block_ids=[26, 27], group=1)


def test_states_are_copied_from_the_page_that_vllm_names() -> None:
    assert FULL_AND_STATE.state_copies(1, [(1, 77)], offset=64) == [
        ChunkCopy(offset=64, extent_tokens=CHUNK, token_count=CHUNK, block_ids=[77], group=1)
    ]


def test_a_state_is_loaded_into_the_page_of_the_last_token() -> None:
    ids = [[*range(10, 18)], [0, 0, 0, 23]]
    items = PartItems(FULL_AND_STATE, ids, 0, 2 * CHUNK)
    assert items.items == [PartItem(0, 0), PartItem(0, 1), PartItem(1, 1)]
    (copy,) = items.copies(2, chunk_of(FULL_AND_STATE, 1)) or []
    assert copy.block_ids == [23]


def test_a_copy_that_names_the_null_page_is_none() -> None:
    ids = [[*range(10, 18)], [0, 0, 0, 0, 0, 0, 0, 27]]
    stored = FULL_AND_WINDOW.stored(PartExtent(1, 1, CHUNK, 0), ids)
    assert has_null_page(stored)
    assert PartItems(FULL_AND_WINDOW, ids, 0, 2 * CHUNK).copies(2, chunk_of(FULL_AND_WINDOW, 1)) is None


def test_items_before_what_vllm_has_are_not_copied() -> None:
    ids = [[*range(10, 18)], [*range(20, 28)]]
    items = PartItems(FULL_AND_WINDOW, ids, CHUNK, 2 * CHUNK)
    assert items.wanted == range(1, 3)
    assert items.copies(0, chunk_of(FULL_AND_WINDOW, 0)) == []
    assert items.blocks(items.wanted) == []
    extent = chunk_of(FULL_AND_WINDOW, 0)
    assert sum(items.token_count(index, extent) for index in items.wanted) == CHUNK


def test_an_extent_of_another_size_or_token_count_is_not_copied() -> None:
    ids = [[*range(10, 18)], [*range(20, 28)]]
    items = PartItems(FULL_AND_WINDOW, ids, 0, 2 * CHUNK)
    right = chunk_of(FULL_AND_WINDOW, 1)
    assert items.copies(2, right)
    assert items.copies(2, chunk_of(FULL_AND_WINDOW, 0)) is None
    assert items.copies(2, HeldChunk(extent=right.extent, token_count=CHUNK - 1)) is None


def test_an_extent_that_does_not_fit_ends_the_whole_load() -> None:
    ids = [[*range(10, 18)], [*range(20, 28)]]
    tokens = list(range(2 * CHUNK))
    chain = KeyChain(ChunkKey(bytes(16)), CHUNK)
    request = RequestState(FULL_AND_WINDOW.spec, "r", chain, as_tokens(tokens), tokens, partial=False)
    load = LoadState(request.lookup, items_of(FULL_AND_WINDOW.spec)(FULL_AND_WINDOW, ids, 0, 2 * CHUNK), 0.0)
    load.add_chunks(0, [chunk_of(FULL_AND_WINDOW, 0)])
    assert load.waits
    load.add_chunks(1, [chunk_of(FULL_AND_WINDOW, 1)])
    assert not load.waits
    load.add_chunks(2, [chunk_of(FULL_AND_WINDOW, 1)])
    plan = load.take()
    assert plan
    assert (len(plan.copies), plan.final, plan.failed, plan.failed_blocks) == (1, True, True, [])
    assert load.take() is None


def test_chunks_of_one_part_are_loaded_one_by_one_and_others_as_items() -> None:
    plain = BlockMap(
        spec=make_spec(model_name="m", model_id="m", kv_dtype="int8", layer_count=1, kv_head_count=1, chunk_size=CHUNK),
        groups=(LayerGroup(part=0, block_size=4, layer_names=("0",)),),
    )
    assert isinstance(items_of(plain.spec)(plain, [[1, 2, 3, 4]], 0, CHUNK), ChunkItems)
    assert isinstance(items_of(FULL_AND_WINDOW.spec)(FULL_AND_WINDOW, [[1, 2, 3, 4]] * 2, 0, CHUNK), PartItems)
