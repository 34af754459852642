"""Which tier tokens of a prompt are in, compared with a list of them; and how the log names the tiers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmkv.tiers import DISK, HANDOFF, OWN, PEERS, REMOTE, Run
from lmkv_client.engine.hit_sources import HitSources, describe

COUNTS = st.integers(0, 4)
RUNS = st.lists(st.tuples(st.sampled_from([DISK, PEERS, REMOTE, HANDOFF, "tape"]), COUNTS), max_size=5)


def sources(own: int, *runs: tuple[str, int]) -> HitSources:
    return HitSources(own=own, runs=tuple(Run(tier=tier, chunk_count=count) for tier, count in runs))


@given(own=COUNTS, runs=RUNS, chunk_size=st.integers(1, 5), ends=st.data())
def test_each_token_is_in_the_tier_of_its_chunk(
    own: int, runs: list[tuple[str, int]], chunk_size: int, ends: st.DataObject
) -> None:
    found = sources(own, *runs)
    chunks = [OWN] * own + [tier for tier, count in runs for _ in range(count)]
    tokens = [tier for tier in chunks for _ in range(chunk_size)]
    start, end = sorted(ends.draw(st.tuples(*[st.integers(0, len(tokens) + chunk_size)] * 2)))
    tiers = {OWN, *(tier for tier, _ in runs)}
    assert found.tokens(start, end, chunk_size) == {tier: tokens[start:end].count(tier) for tier in tiers}
    assert found.absent_count == len(chunks) - own


@pytest.mark.parametrize(
    ("found", "peer_id", "text"),
    [
        (sources(1), "n2", "own pool"),
        (sources(0, (DISK, 2)), "", "disk"),
        (sources(0, (PEERS, 2)), "n2", "peer n2"),
        (sources(0, (PEERS, 2)), "", "a peer"),
        (sources(0, (REMOTE, 1)), "", "the shared store"),
        (sources(0, (HANDOFF, 1)), "n2", "a handoff by n2"),
        (sources(0, ("tape", 1)), "", "tier tape"),
        (sources(1, (DISK, 1), (PEERS, 1), (REMOTE, 1)), "n2", "own pool and disk and peer n2 and the shared store"),
    ],
)
def test_the_log_names_the_tiers(found: HitSources, peer_id: str, text: str) -> None:
    assert describe(found.tokens(0, 100, 4), peer_id) == text


def test_items_of_a_hit_divide_its_tokens_and_the_rest_is_in_the_tier_with_the_most() -> None:
    found = HitSources(own=3, runs=(Run(tier=DISK, chunk_count=1), Run(tier=PEERS, chunk_count=1)), hit_chunk_count=2)
    assert (found.chunk_count, found.absent_count) == (2, 2)
    assert found.tokens(0, 8, 4) == {OWN: 6, DISK: 1, PEERS: 1}
    assert found.tokens(2, 100, 4) == {OWN: 4, DISK: 1, PEERS: 1}, "a hit has no tokens behind its last chunk"
    assert found.tokens(9, 100, 4) == {OWN: 0, DISK: 0, PEERS: 0}
    even = HitSources(own=2, runs=(Run(tier=DISK, chunk_count=2),), hit_chunk_count=3)
    assert even.tokens(0, 12, 4) == {OWN: 6, DISK: 6}
    runs = tuple(Run(tier=DISK, chunk_count=2) for _ in range(2))
    assert HitSources(own=1, runs=runs, hit_chunk_count=3).tokens(0, 12, 4) == {OWN: 2, DISK: 10}


def test_each_position_has_the_tier_of_its_chunk() -> None:
    found = sources(1, (DISK, 1), (PEERS, 1))
    assert [found.tier_at(position, 2) for position in range(7)] == [OWN, OWN, DISK, DISK, PEERS, PEERS, ""]
    assert found.chunk_count == 3
    assert sources(0).tier_at(0, 2) == ""
    reversed_tiers = sources(0, (DISK, 1), (DISK, 0), (PEERS, 1))
    assert [reversed_tiers.tier_at(position, 2) for position in range(4)] == [DISK, DISK, PEERS, PEERS]
    assert HitSources() == sources(0)
    late = sources(1, (PEERS, 1), (OWN, 1))
    assert [late.tier_at(position, 1) for position in range(3)] == [OWN, PEERS, OWN]
