"""Every way in which a chunk leaves the pool is recorded with its reason."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from lmkv.keys import ChunkKey
from lmkv.misses import Loss, MissReason
from lmkv.tiers import HOST
from lmkv_server.node.cache.allocator import ALIGNMENT
from lmkv_server.node.cache.events import CacheEvents
from lmkv_server.node.cache.host import Chunk, HostTier
from lmkv_server.node.cache.losses import Losses

FINGERPRINT = bytes(16)


def chunk_key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(16, "little"))


@dataclass
class Pool:
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.losses = Losses(clock=lambda: self.now)
        self.tier = HostTier(2 * ALIGNMENT, CacheEvents(self.losses))

    def store(self, number: int, reason: MissReason = MissReason.EVICTED_BY_STORE) -> Chunk:
        reserved = self.tier.reserve(ALIGNMENT, reason=reason)
        assert reserved
        chunk = self.tier.commit(
            reserved.offset,
            key=chunk_key(number),
            fingerprint=FINGERPRINT,
            size_bytes=ALIGNMENT,
            checksum=0,
            token_count=4,
        )
        assert chunk
        return chunk


@pytest.mark.parametrize(
    "reason", [MissReason.EVICTED_BY_STORE, MissReason.EVICTED_BY_FETCH, MissReason.EVICTED_BY_ORDER]
)
def test_an_evicted_chunk_has_the_reason_of_what_took_its_room_until_it_is_stored_again(reason: MissReason) -> None:
    pool = Pool()
    for number in range(2):
        pool.store(number)
    assert pool.losses.get(chunk_key(0)) is None
    pool.now = 1001.5
    pool.store(2, reason)
    (lost,) = (number for number in range(3) if pool.tier.get(chunk_key(number)) is None)
    assert pool.losses.get(chunk_key(lost)) == Loss(tier=HOST, reason=reason, time=1001.5)
    pool.store(lost)
    assert pool.losses.get(chunk_key(lost)) is None


@pytest.mark.parametrize("reason", [MissReason.CLEARED, MissReason.DROPPED, MissReason.DAMAGED])
def test_a_dropped_chunk_has_the_reason_of_the_drop(reason: MissReason) -> None:
    pool = Pool()
    pool.store(0)
    pool.tier.drop([chunk_key(0), chunk_key(7)], reason)
    assert pool.losses.get(chunk_key(0)) == Loss(tier=HOST, reason=reason, time=1000.0)
    assert pool.losses.get(chunk_key(7)) is None


def test_the_last_loss_counts_where_a_chunk_was_in_several_tiers() -> None:
    pool = Pool()
    chunk = pool.store(0)
    pool.tier.drop([chunk.key], MissReason.EVICTED_BY_STORE)
    pool.now = 1002.0
    pool.losses.removed("disk", chunk, MissReason.EVICTED_FROM_TIER)
    assert pool.losses.get(chunk.key) == Loss(tier="disk", reason=MissReason.EVICTED_FROM_TIER, time=1002.0)
