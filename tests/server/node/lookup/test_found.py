"""Why chunks behind a hit are missed, by what pool, tiers and the memory of losses know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest

from lmkv.keys import ChunkKey, part_key
from lmkv.misses import MissReason
from lmkv.prompt import Prompt
from lmkv.tiers import Run
from lmkv_server.node.cache.allocator import ALIGNMENT
from lmkv_server.node.cache.events import CacheEvents, Losses
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.lookup.found import Diagnosis, MissedRun
from lmkv_server.node.tiers.base import SecondaryTier
from tests.server.node.cases import hashed_keys, put
from tests.server.node.hybrid_engine import HYBRID, PROMPT
from tests.support.specs import small_spec

KEYS = hashed_keys(*range(8))
NOW = 1_000.0
PLAIN, PARTED = Prompt(small_spec(), KEYS), Prompt(HYBRID, PROMPT)


@dataclass
class TierState:
    name: str = "remote"
    is_down: bool = False


@dataclass
class Cache:
    """A pool that holds some chunks, the tiers behind it, and what was lost."""

    tiers: list[TierState] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.losses = Losses(clock=lambda: NOW)
        self.pool = HostTier(64 * ALIGNMENT, CacheEvents(self.losses))
        self.diagnosis = Diagnosis(self.pool, cast(Sequence[SecondaryTier], self.tiers), self.losses)

    def store(self, *keys: ChunkKey) -> None:
        for key in keys:
            put(self.pool, key, ALIGNMENT, fingerprint=b"", token_count=4)

    def lose(self, reason: MissReason, *keys: ChunkKey) -> None:
        self.store(*keys)
        self.pool.drop(keys, reason)


def never(chunk_count: int) -> MissedRun:
    return MissedRun(chunk_count=chunk_count, reason=MissReason.NEVER_STORED)


def gap(chunk_count: int) -> MissedRun:
    return MissedRun(chunk_count=chunk_count, reason=MissReason.BEHIND_GAP, tier="own")


def test_what_was_never_stored_is_missed_up_to_the_end_and_a_whole_hit_misses_nothing() -> None:
    cache = Cache()
    assert cache.diagnosis.behind(PLAIN, 0) == [never(8)]
    cache.store(*KEYS[:3])
    assert cache.diagnosis.behind(PLAIN, 3) == [never(5)]
    assert cache.diagnosis.behind(PLAIN, 8) == []


def test_the_first_lost_chunk_gives_its_reason_and_time_to_those_behind_it() -> None:
    cache = Cache()
    cache.lose(MissReason.EVICTED_BY_FETCH, *KEYS[2:4])
    lost = MissedRun(chunk_count=6, reason=MissReason.EVICTED_BY_FETCH, tier="own", time=NOW)
    assert cache.diagnosis.behind(PLAIN, 2) == [lost]


def test_chunks_in_the_pool_behind_a_missing_one_are_behind_a_gap() -> None:
    cache = Cache()
    cache.store(KEYS[0], KEYS[4], KEYS[7])
    assert cache.diagnosis.behind(PLAIN, 1) == [never(3), gap(4)]
    cache.store(KEYS[2])
    assert cache.diagnosis.behind(PLAIN, 1) == [never(1), gap(6)]


@pytest.mark.parametrize(
    ("reason", "is_blamed"),
    [
        (None, True),
        (MissReason.EVICTED_BY_STORE, True),
        (MissReason.DAMAGED, True),
        (MissReason.CLEARED, False),
        (MissReason.DROPPED, False),
    ],
)
def test_a_tier_that_is_down_is_blamed_for_what_it_may_hold(reason: MissReason | None, is_blamed: bool) -> None:
    cache = Cache([TierState("disk"), TierState("remote", is_down=True)])
    if reason:
        cache.lose(reason, KEYS[0])
    (missed,) = cache.diagnosis.behind(PLAIN, 0)
    assert missed.reason is (MissReason.TIER_DOWN if is_blamed else reason)
    assert missed.tier == ("remote" if is_blamed else "own")


def test_a_tier_that_did_not_answer_a_lookup_is_blamed_for_what_this_one_misses() -> None:
    cache = Cache([TierState("disk"), TierState("peers")])
    down = MissedRun(chunk_count=8, reason=MissReason.TIER_DOWN, tier="peers")
    assert cache.diagnosis.behind(PLAIN, 0, unanswered=["peers"]) == [down]
    assert cache.diagnosis.behind(PLAIN, 0, unanswered=[]) == [never(8)]
    (missed,) = cache.diagnosis.behind(PARTED, 0, unanswered=["peers"])
    assert (missed.reason, missed.tier) == (MissReason.TIER_DOWN, "peers")


def test_runs_that_are_slower_than_computing_come_first() -> None:
    cache = Cache()
    refused = (Run(tier="disk", chunk_count=2), Run(tier="peers", chunk_count=1))
    assert cache.diagnosis.behind(PLAIN, 1, refused=refused) == [
        MissedRun(chunk_count=2, reason=MissReason.SLOWER, tier="disk"),
        MissedRun(chunk_count=1, reason=MissReason.SLOWER, tier="peers"),
        never(4),
    ]


def test_what_is_held_beyond_the_limit_is_too_large() -> None:
    cache = Cache()
    cache.store(*KEYS[:5])
    too_large = MissedRun(chunk_count=3, reason=MissReason.TOO_LARGE)
    assert cache.diagnosis.behind(PLAIN, 2, limited_count=3) == [too_large, never(3)]
    assert cache.diagnosis.behind(PLAIN, 5, limited_count=3) == [too_large]
    assert cache.diagnosis.behind(PLAIN, 5) == [never(3)]


def test_of_chunks_with_parts_the_first_missing_item_counts() -> None:
    cache = Cache()
    cache.store(*(part_key(key, part) for key in PROMPT for part in range(len(HYBRID.parts))))
    last = len(HYBRID.parts) - 1
    cache.pool.drop([part_key(PROMPT[2], last)], MissReason.EVICTED_BY_STORE)
    rest = len(PROMPT) - 2
    lost = MissedRun(chunk_count=rest, reason=MissReason.EVICTED_BY_STORE, tier="own", time=NOW)
    assert cache.diagnosis.behind(PARTED, 2) == [lost]
    assert cache.diagnosis.behind(PARTED, len(PROMPT)) == []
    refused, other = cache.diagnosis.behind(PARTED, 1, refused=[Run(tier="", chunk_count=1)])
    assert (refused.reason, refused.chunk_count, other) == (MissReason.SLOWER, 1, lost)


def test_a_hit_whose_items_are_all_in_the_pool_is_too_large() -> None:
    cache = Cache()
    cache.store(*(part_key(key, part) for key in PROMPT for part in range(len(HYBRID.parts))))
    (missed,) = cache.diagnosis.behind(PARTED, 3)
    assert (missed.reason, missed.chunk_count) == (MissReason.TOO_LARGE, len(PROMPT) - 3)
