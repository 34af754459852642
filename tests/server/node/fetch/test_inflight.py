"""The chunks of a fetch, chunks that two fetches need, and the extents of a batch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lmkv.keys import ChunkKey
from lmkv_server.node.cache.host import Chunk, HostTier
from lmkv_server.node.fetch.inflight import InflightFetches
from lmkv_server.node.fetch.pending_writes import PendingWrites
from lmkv_server.node.peers.extents import PeerChunk
from lmkv_server.node.tiers.progress import Progress
from tests.server.node.peer_parts import SMALL, keys_of

KEYS = keys_of(8)


def new_tier(chunk_count: int = 8) -> HostTier:
    return HostTier(chunk_count * SMALL.chunk_bytes)


def peer_chunk(index: int = 0) -> PeerChunk:
    return PeerChunk(index=index, address=0, checksum=0, token_count=SMALL.chunk_size, size_bytes=SMALL.chunk_bytes)


def put(tier: HostTier, key: ChunkKey) -> Chunk:
    writes = PendingWrites(tier)
    reserved = tier.reserve(SMALL.chunk_bytes)
    assert reserved
    chunk = writes.commit(key, None, SMALL.fingerprint, writes.add(peer_chunk(), reserved))
    writes.close()
    assert chunk
    return chunk


@given(st.permutations(range(8)), st.integers(0, 7), st.integers(0, 8))
def test_chunks_are_handed_out_in_order_whatever_order_they_come_in(order: list[int], first: int, count: int) -> None:
    tier = new_tier()
    handed: list[int] = []
    progress = Progress(tier, SMALL, KEYS, first, lambda chunks: handed.extend(index for index, _ in chunks))
    come = [index for index in order[:count] if index >= first]
    for index in come:
        progress.add([(index, put(tier, KEYS[index]))], "peer")
        until = next(i for i in range(first, 9) if i not in come[: come.index(index) + 1])
        assert handed == list(range(first, until))
        assert progress.front == ({until} - {8})
    assert progress.missing == set(range(first, 8)) - set(come)
    assert progress.result().size_bytes == len(come) * SMALL.chunk_bytes
    progress.close()
    for index in come:
        chunk = tier.get(KEYS[index])
        assert chunk
        assert chunk.holds == (1 if index in handed else 0)
        progress.add([(index, chunk)])  # too late
    assert sum(chunk.holds for chunk in tier) == len(handed)


@given(st.permutations(range(8)), st.integers(0, 8))
def test_chunks_that_stand_for_themselves_are_handed_out_as_they_come(order: list[int], count: int) -> None:
    tier = new_tier()
    handed: list[int] = []
    progress = Progress(
        tier, SMALL, KEYS, 0, lambda chunks: handed.extend(index for index, _ in chunks), in_order=False
    )
    for number, index in enumerate(order[:count], 1):
        assert index in progress.front
        progress.add([(index, put(tier, KEYS[index]))], "peer")
        assert handed == order[:number]
        assert progress.front == progress.missing == set(order[number:])
    assert progress.result().chunk_count == count
    progress.close()
    assert sum(chunk.holds for chunk in tier) == count


def test_what_is_in_the_tier_by_now_is_found_if_it_is_of_this_spec() -> None:
    tier = new_tier()
    handed: list[int] = []
    progress = Progress(tier, SMALL, KEYS, 0, lambda chunks: handed.extend(index for index, _ in chunks))
    put(tier, KEYS[0])
    put(tier, KEYS[1]).fingerprint = b"x" * 16
    progress.find_own()
    assert handed == [0]
    assert progress.result().size_bytes == 0


def test_waiters_get_committed_chunks_and_learn_of_failed_ones() -> None:
    tier, inflight = new_tier(), InflightFetches()
    handed: list[int] = []
    progress = Progress(tier, SMALL, KEYS[:3], 0, lambda chunks: handed.extend(index for index, _ in chunks))
    assert not inflight.subscribe(progress)
    inflight.begin(KEYS[:2])
    assert KEYS[0] in inflight
    assert inflight.subscribe(progress)
    assert inflight.subscribe(progress)  # twice is once
    inflight.commit(put(tier, KEYS[0]), "peer")
    assert handed == [0]
    assert progress.result().instance_ids == ("peer",)
    progress.changed.clear()
    inflight.end(KEYS[:2])
    assert progress.changed.is_set()
    assert handed == [0]
    assert len(inflight) == 0


def test_extents_are_freed_only_after_the_last_write() -> None:
    tier = new_tier(2)
    writes = PendingWrites(tier)
    for index in range(2):
        reserved = tier.reserve(SMALL.chunk_bytes)
        assert reserved
        writes.add(peer_chunk(index), reserved)
    stopped = writes.begin()
    writes.close()
    assert writes.is_quarantined
    assert writes.open_bytes == 2 * SMALL.chunk_bytes
    assert tier.reserved_count == 2
    stopped()
    assert not writes.is_quarantined
    assert tier.reserved_count == tier.used_bytes == 0


def test_a_chunk_that_was_committed_first_elsewhere_is_used_and_the_extent_freed() -> None:
    tier = new_tier()
    first = put(tier, KEYS[0])
    assert put(tier, KEYS[0]) is first
    tier.check()
    assert tier.reserved_count == 0


def test_a_chunk_that_arrived_keeps_the_one_before_it() -> None:
    tier = new_tier(2)
    keys = [ChunkKey(bytes([number]) * 16) for number in range(2)]
    for index in (1, 0):
        writes = PendingWrites(tier)
        reserved = tier.reserve(SMALL.chunk_bytes)
        assert reserved
        parent = keys[index - 1] if index else None
        writes.commit(keys[index], parent, SMALL.fingerprint, writes.add(peer_chunk(index), reserved))
        writes.close()
    tier.find(keys[:1])
    tier.find(keys[1:])
    assert tier.reserve(SMALL.chunk_bytes)
    assert [chunk.key for chunk in tier] == keys[:1]
