"""Where tokens of a prompt are, against a list of them; and how people are told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmkv_client.connector.scheduler.hit_sources import HitSource, HitSources, describe

COUNTS = st.integers(0, 4)


@given(own=COUNTS, disk=COUNTS, peer=COUNTS, remote=COUNTS, chunk_size=st.integers(1, 5), ends=st.data())
def test_each_token_is_in_the_place_of_its_chunk(
    own: int, disk: int, peer: int, remote: int, chunk_size: int, ends: st.DataObject
) -> None:
    places = HitSources(own=own, disk=disk, peer=peer, remote=remote)
    chunks = [HitSource.OWN] * own + [HitSource.DISK] * disk + [HitSource.PEER] * peer + [HitSource.REMOTE] * remote
    tokens = [place for place in chunks for _ in range(chunk_size)]
    start, end = sorted(ends.draw(st.tuples(*[st.integers(0, len(tokens) + chunk_size)] * 2)))
    assert places.tokens(start, end, chunk_size) == {place: tokens[start:end].count(place) for place in HitSource}
    assert places.absent_count == len(chunks) - own


@pytest.mark.parametrize(
    ("places", "peer_id", "text"),
    [
        (HitSources(own=1), "n2", "own pool"),
        (HitSources(disk=2), "", "disk"),
        (HitSources(peer=2), "n2", "peer n2"),
        (HitSources(peer=2), "", "a peer"),
        (HitSources(remote=1), "", "the shared store"),
        (HitSources(own=1, disk=1, peer=1, remote=1), "n2", "own pool and disk and peer n2 and the shared store"),
    ],
)
def test_people_are_told_where_it_was(places: HitSources, peer_id: str, text: str) -> None:
    assert describe(places.tokens(0, 100, 4), peer_id) == text
