"""The coordinator that receives the chunks, of those that share a layout map."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmkv_server.node.fleet.shard import SessionState, StreamRole, current_primaries, outdated, primaries

ADDRESSES = [f"10.0.0.{number}:9000" for number in range(5)]
INSTANCES = [f"node-{number}" for number in range(2000)]

map_ids = st.dictionaries(st.text(min_size=1, max_size=8), st.sampled_from(["", "one", "other"]), max_size=6)


@given(st.text(min_size=1), map_ids)
def test_each_map_has_one_home_among_those_that_share_it(instance_id: str, ids: dict[str, str]) -> None:
    chosen = primaries(instance_id, ids)
    assert chosen.keys() == ids.keys()
    for address, home in chosen.items():
        assert ids[home] == ids[address]
        assert chosen[home] == home
    for map_id in set(ids.values()) - {""}:
        assert len({chosen[address] for address in ids if ids[address] == map_id}) == 1


@given(st.text(min_size=1), map_ids)
def test_a_coordinator_with_its_own_map_gets_its_own_reports(instance_id: str, ids: dict[str, str]) -> None:
    chosen = primaries(instance_id, ids)
    assert all(chosen[address] == address for address, map_id in ids.items() if not map_id)


@given(st.text(min_size=1), map_ids, st.randoms())
def test_the_order_in_which_they_came_does_not_matter(instance_id: str, ids: dict[str, str], random: object) -> None:
    shuffled = sorted(ids.items(), key=lambda _: random.random())  # type: ignore[attr-defined]
    assert primaries(instance_id, dict(shuffled)) == primaries(instance_id, ids)


@given(st.text(min_size=1), map_ids, st.data())
def test_only_the_instances_of_a_coordinator_that_is_lost_move(
    instance_id: str, ids: dict[str, str], data: st.DataObject
) -> None:
    if not ids:
        return
    lost = data.draw(st.sampled_from(sorted(ids)))
    before = primaries(instance_id, ids)
    after = primaries(instance_id, {address: map_id for address, map_id in ids.items() if address != lost})
    assert all(after[address] == before[address] for address in after if before[address] != lost)


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_homes_are_spread_evenly(count: int) -> None:
    ids = dict.fromkeys(ADDRESSES[:count], "one")
    spread = Counter(primaries(instance_id, ids)[ADDRESSES[0]] for instance_id in INSTANCES)
    fair = len(INSTANCES) / count
    assert set(spread) == set(ids)
    assert all(0.85 * fair < mine < 1.15 * fair for mine in spread.values()), "the hashes are the same on every run"


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_the_instances_of_one_that_is_lost_are_spread_evenly_too(count: int) -> None:
    ids = dict.fromkeys(ADDRESSES[:count], "one")
    lost, *left = ADDRESSES[:count]
    orphans = [one for one in INSTANCES if primaries(one, ids)[lost] == lost]
    spread = Counter(primaries(one, dict.fromkeys(left, "one"))[left[0]] for one in orphans)
    fair = len(orphans) / len(left)
    assert all(0.75 * fair < spread[address] < 1.25 * fair for address in left)


def state(map_id: str | None, role: StreamRole | None = None, *, is_synced: bool = True) -> SessionState:
    return SessionState(map_id=map_id, role=role, is_synced=is_synced)


CARRIES, LISTENS = (StreamRole(map_id="one", reports_chunks=reports) for reports in (True, False))
HOME = primaries("node-0", dict.fromkeys(ADDRESSES[:2], "one"))[ADDRESSES[0]]
OTHER = next(address for address in ADDRESSES[:2] if address != HOME)


def test_a_coordinator_that_cannot_be_reported_to_is_no_primary() -> None:
    states = {HOME: state(None), OTHER: state("one")}
    assert current_primaries("node-0", states) == {OTHER: OTHER}


def test_streams_with_the_right_roles_stay() -> None:
    assert outdated("node-0", {HOME: state("one", CARRIES), OTHER: state("one", LISTENS)}) == []
    assert outdated("node-0", {HOME: state("one"), OTHER: state("one")}) == [], "no stream is open"
    own = StreamRole(map_id="", reports_chunks=True)
    assert outdated("node-0", {HOME: state("", own), OTHER: state("", own)}) == []


def test_the_primary_receives_chunks_at_once_and_the_other_until_it_has_them() -> None:
    listening = state("one", LISTENS)
    assert outdated("node-0", {HOME: listening, OTHER: state("one", LISTENS)}) == [HOME]
    carrying = state("one", CARRIES)
    not_yet = {HOME: state("one", CARRIES, is_synced=False), OTHER: carrying}
    assert outdated("node-0", not_yet) == []
    assert outdated("node-0", {HOME: carrying, OTHER: carrying}) == [OTHER]


def test_a_stream_to_a_coordinator_whose_map_has_changed_is_replaced() -> None:
    changed = state("two", CARRIES)
    assert outdated("node-0", {HOME: changed}) == [HOME]
    assert outdated("node-0", {HOME: state(None, CARRIES)}) == [HOME]
    waiting = {HOME: state("two", is_synced=False), OTHER: state("two", LISTENS)}
    assert outdated("node-0", waiting) == [OTHER], "also one without chunks, before the primary has them"
