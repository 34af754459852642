"""Page arithmetic of loads against a model that goes token by token."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from lmkv.keys import ChunkKey, KeyChain, as_tokens
from lmkv.v1.chunk_pb2 import Extent
from lmkv.v1.engine_service_pb2 import HeldChunk
from lmkv_client.connector.engine_kv import LayerGroup
from lmkv_client.connector.messages import ExtentChecksum, LoadPlan
from lmkv_client.connector.scheduler.block_copies import BlockMap, ChunkItems
from lmkv_client.connector.scheduler.loads import LoadState
from lmkv_client.connector.scheduler.request_state import RequestState
from tests.support.specs import make_spec

EXTENT_BYTES = 1 << 20
SPEC = make_spec(model_name="m", model_id="i", kv_dtype="bfloat16", layer_count=1, kv_head_count=1, chunk_size=1)
Place = tuple[int, int]
"""Chunk of the prompt, block in that chunk."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A load, and the chunks that arrive in the order that they do."""

    start: int
    end: int
    prompt_tokens: int
    chunk_size: int
    block_size: int
    block_ids: list[int]
    arrivals: list[list[int]]

    @property
    def blocks(self) -> BlockMap:
        group = LayerGroup(part=0, block_size=self.block_size, layer_names=("layer",))
        return BlockMap(spec=replace(SPEC, chunk_size=self.chunk_size), groups=(group,))

    def loading(self, *, sync: bool = False, verify: bool = False) -> LoadState:
        spec, tokens = self.blocks.spec, list(range(self.prompt_tokens))
        chain = KeyChain(ChunkKey(bytes(16)), self.chunk_size)
        request = RequestState(spec, "r", chain, as_tokens(tokens), tokens, partial=True)
        request.lookup.loads_in_step = sync
        items = ChunkItems(self.blocks, [self.block_ids], self.start, self.end)
        return LoadState(request.lookup, items, 0.0, verify=verify)

    def held(self, chunk: int) -> HeldChunk:
        token_count = min(self.chunk_size, self.prompt_tokens - chunk * self.chunk_size)
        return HeldChunk(extent=Extent(offset=chunk * EXTENT_BYTES), token_count=token_count)

    def pages(self, chunks: set[int]) -> dict[int, Place]:
        """For each page that must be filled from these chunks: where its bytes are."""
        found = {}
        for token in range(self.start, self.end):
            chunk, inside = divmod(token, self.chunk_size)
            if chunk in chunks:
                found[self.block_ids[token // self.block_size]] = (chunk, inside // self.block_size)
        return found

    def tokens(self, chunks: set[int]) -> int:
        return sum(token // self.chunk_size in chunks for token in range(self.start, self.end))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    block_size = draw(st.sampled_from([1, 4, 16]))
    chunk_size = block_size * draw(st.integers(1, 4))
    prompt_tokens = draw(st.integers(1, 6 * chunk_size))
    # vLLM has whole blocks; the load ends at a block, or with the prompt
    end = draw(st.one_of(st.just(prompt_tokens), st.integers(1, prompt_tokens).map(lambda n: n - n % block_size)))
    start = draw(st.integers(0, max(0, end - 1))) // block_size * block_size
    block_count = -(-prompt_tokens // block_size) + 2
    chunks = list(range(-(-prompt_tokens // chunk_size)))
    order = draw(st.permutations(chunks))
    arrivals = draw(st.lists(st.sampled_from(order), max_size=len(order) + 2)) if chunks else []
    lengths = draw(st.lists(st.integers(1, 3), min_size=len(arrivals), max_size=len(arrivals)))
    return Case(
        start=start,
        end=max(end, start + 1),
        prompt_tokens=prompt_tokens,
        chunk_size=chunk_size,
        block_size=block_size,
        block_ids=draw(st.permutations(range(100, 100 + block_count))),
        arrivals=[
            [chunk for chunk in range(first, first + length) if chunk in chunks]
            for first, length in zip(arrivals, lengths, strict=True)
        ],
    )


def filled(loads: list[LoadPlan], block_size: int) -> dict[int, Place]:
    """For each page that the loads fill: from where. Asserts that none is filled twice."""
    found: dict[int, Place] = {}
    for load in loads:
        for copy in load.copies:
            assert copy.block_ids
            assert copy.first_slot == 0
            assert copy.first_token + copy.token_count <= copy.extent_tokens
            assert copy.first_token % block_size == 0
            for index, page in enumerate(copy.block_ids, copy.first_token // block_size):
                assert page not in found, "a page is filled twice"
                found[page] = (copy.offset // EXTENT_BYTES, index)
    return found


@settings(max_examples=300, deadline=None)
@given(case=cases())
def test_every_page_is_filled_from_its_place_or_reported_as_lost(case: Case) -> None:
    loading = case.loading()
    loads: list[LoadPlan] = []
    arrived: set[int] = set()
    for chunks in case.arrivals:
        loading.add_chunks(chunks[0], [case.held(chunk) for chunk in chunks])
        arrived |= set(chunks)
        assert loading.arrived_tokens == case.tokens(arrived)
        if load := loading.take():
            loads.append(load)
    wanted = set(loading.items.wanted)
    assert loading.complete == (wanted <= arrived)
    loading.close()
    if load := loading.take():
        loads.append(load)

    assert loading.take() is None
    assert [load.final for load in loads] == [False] * (len(loads) - 1) + [True]
    assert filled(loads, case.block_size) == case.pages(arrived)
    assert loading.arrived_tokens == case.tokens(arrived)
    lost = [page for load in loads for page in load.failed_blocks]
    assert len(lost) == len(set(lost))
    assert set(lost) == set(case.pages(wanted - arrived))


@settings(max_examples=200, deadline=None)
@given(case=cases(), data=st.data())
def test_if_the_node_is_lost_only_orders_that_workers_have_count(case: Case, data: st.DataObject) -> None:
    loading = case.loading()
    loads: list[LoadPlan] = []
    reported: set[int] = set()
    since: set[int] = set()
    for chunks in case.arrivals:
        loading.add_chunks(chunks[0], [case.held(chunk) for chunk in chunks])
        since |= set(chunks)
        if data.draw(st.booleans()):
            if load := loading.take():
                loads.append(load)
            reported |= since
    loading.node_lost()
    if load := loading.take():
        loads.append(load)
    assert loads
    assert [load.final for load in loads] == [False] * (len(loads) - 1) + [True]
    assert filled(loads, case.block_size) == case.pages(reported)
    assert loading.arrived_tokens == case.tokens(reported)
    wanted = set(loading.items.wanted)
    assert {page for load in loads for page in load.failed_blocks} == set(case.pages(wanted - reported))


SMALL = Case(
    start=16,
    end=56,
    prompt_tokens=60,
    chunk_size=32,
    block_size=8,
    block_ids=list(range(10, 18)),
    arrivals=[],
)


def test_a_load_that_is_complete_at_once_says_so_at_once() -> None:
    loading = SMALL.loading(sync=True)
    loading.add_chunks(0, [SMALL.held(0), SMALL.held(1)])
    load = loading.take()
    assert load
    assert (load.sync, load.final, load.failed_blocks) == (True, True, [])
    assert [copy.block_ids for copy in load.copies] == [[12, 13], [14, 15, 16]]
    assert [(copy.first_token, copy.token_count) for copy in load.copies] == [(16, 16), (0, 24)]
    assert [copy.extent_tokens for copy in load.copies] == [32, 28]
    assert loading.take() is None


def test_extents_are_to_be_verified_only_where_that_was_asked_for() -> None:
    for verify in (False, True):
        loading = SMALL.loading(verify=verify)
        loading.add_chunks(0, [HeldChunk(extent=Extent(offset=4096, size_bytes=512), checksum=7, token_count=32)])
        load = loading.take()
        assert load
        assert load.checks == [ExtentChecksum(offset=4096, size_bytes=512, checksum=7)] * verify


def test_nothing_is_planned_while_nothing_arrives() -> None:
    loading = SMALL.loading()
    assert loading.take() is None
    assert loading.take() is None


def test_what_arrives_after_the_end_is_ignored() -> None:
    loading = SMALL.loading()
    loading.close()
    loading.add_chunks(0, [SMALL.held(0)])
    load = loading.take()
    assert load
    assert (load.copies, load.final) == ([], True)
    assert load.failed_blocks == [12, 13, 14, 15, 16]
    loading.add_chunks(0, [SMALL.held(0)])
    assert loading.take() is None
    assert loading.arrived_tokens == 0


def test_chunks_outside_of_the_load_are_ignored() -> None:
    loading = SMALL.loading()
    loading.add_chunks(2, [HeldChunk(token_count=32)])
    assert loading.arrived_tokens == 0
    assert loading.take() is None


def test_extents_in_the_device_buffer_are_copied_apart_and_need_no_check() -> None:
    loading = SMALL.loading(verify=True)
    pooled, buffered = Extent(offset=4096), Extent(region=1, offset=8192)
    loading.add_chunks(0, [HeldChunk(extent=pooled, token_count=32), HeldChunk(extent=buffered, token_count=28)])
    load = loading.take()
    assert load
    assert ([copy.offset for copy in load.copies], [copy.offset for copy in load.buffered]) == ([4096], [8192])
    assert [check.offset for check in load.checks] == [4096]
    assert load.final
