"""A node among coordinators that share a layout map: it reports its chunks to exactly one of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise

import pytest

from lmkv.internal.v1.report_service_pb2 import DropOrder
from lmkv.keys import join_keys
from lmkv_server.node.fleet.membership import FleetMembership
from lmkv_server.node.fleet.shard import primaries
from tests.server.node.fleet_parts import KEYS, Shelf, Wire
from tests.server.node.ordering import Ordering, serving, until
from tests.server.node.sharing import Sharing
from tests.waiting import WAIT_SECONDS

SHORT_LEASE_SECONDS = 1.5


@asynccontextmanager
async def coordinators(*map_ids: str, lease_seconds: float = 2.0) -> AsyncIterator[list[Sharing]]:
    """Scripted ones, the best home of instance `a` first."""
    async with AsyncExitStack() as stack:
        made = [await stack.enter_async_context(Sharing(lease_seconds=lease_seconds)) for _ in map_ids]
        left = {one.address: one for one in made}
        ranked = []
        while left:
            best = next(iter(primaries("a", dict.fromkeys(left, "m")).values()))
            ranked.append(left.pop(best))
        for one, map_id in zip(ranked, map_ids, strict=True):
            one.map_id = map_id
        yield ranked


@asynccontextmanager
async def joined(shelf: Shelf, sharing: Sequence[Sharing], **options: float) -> AsyncIterator[FleetMembership]:
    async with shelf.join(*(one.address for one in sharing), **options) as fleet:
        await fleet.started()
        yield fleet


def receiving(sharing: Sequence[Sharing]) -> list[bool | None]:
    """Whether each receives chunks; None without a stream so far."""
    return [one.reports_chunks for one in sharing]


# --- Which coordinator receives the chunks --------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3])
async def test_each_chunk_is_reported_once_in_the_fleet(count: int) -> None:
    shelf = Shelf()
    shelf.put(KEYS[:10])
    async with coordinators(*["m"] * count) as all_, joined(shelf, all_, digest_interval_seconds=0.01):
        await until(lambda: receiving(all_) == [True] + [False] * (count - 1))
        shelf.put(KEYS[10:20])
        shelf.take(KEYS[:5])
        await until(lambda: all_[0].held == set(KEYS[5:20]))
        await until(lambda: all_[0].counts["digest"] > 0)
        assert [set(one.report_counts.values()) for one in all_] == [{1}] + [set()] * (count - 1)
        assert [one.counts["stream"] for one in all_] == [1] * count
        assert all(one.counts["bad"] == one.counts["digest"] == 0 for one in all_[1:])
    assert [one.counts["farewell"] for one in all_] == [1] * count


async def test_all_but_chunks_goes_to_each() -> None:
    first, second, shelf = Ordering(), Ordering(), Shelf()
    first.map_id = second.map_id = "m"
    shelf.keep(KEYS[:4])
    async with serving(first) as one, serving(second) as other, shelf.join(one, other) as fleet:
        await fleet.started()
        home, elsewhere = (first, second) if primaries("a", {one: "m", other: "m"})[one] == one else (second, first)
        await until(lambda: home.held == set(KEYS[:4]))
        outcome = await elsewhere.ended(elsewhere.give(drop=DropOrder(chunk_keys=join_keys(KEYS[:2]))))
        assert (outcome.status.code, outcome.chunk_count) == (0, 2)
        await until(lambda: home.held == set(KEYS[2:4]))
        assert elsewhere.held == set()
        assert [len(each.pin_lists) for each in (home, elsewhere)] == [1, 1]
        assert [each.stream_count for each in (home, elsewhere)] == [1, 1]


async def test_both_are_asked_and_both_hear_how_full_it_is() -> None:
    async with coordinators("m", "m", lease_seconds=SHORT_LEASE_SECONDS) as all_, joined(Shelf(), all_) as fleet:
        await until(lambda: receiving(all_) == [True, False])
        await until(lambda: all(one.counts["usage"] > 3 for one in all_))
        for _ in range(4):
            await fleet.lookup(KEYS, WAIT_SECONDS)
        assert [one.counts["lookup"] for one in all_] == [2, 2]
        assert fleet.stats().connected_count == 2


async def test_a_coordinator_with_its_own_map_gets_all_reports_in_addition() -> None:
    shelf = Shelf()
    shelf.put(KEYS[:3])
    async with coordinators("", "m", "m", "other") as all_, joined(shelf, all_):
        await until(lambda: receiving(all_) == [True, True, False, True])
        shelf.put(KEYS[3:5])
        await until(lambda: [one.held for one in all_] == [set(KEYS[:5]), set(KEYS[:5]), set(), set(KEYS[:5])])
        assert [one.counts["stream"] for one in all_] == [1, 1, 1, 1]


async def test_a_coordinator_that_is_not_there_at_the_start_is_not_waited_for() -> None:
    shelf = Shelf()
    shelf.put(KEYS[:3])
    async with coordinators("m", "m") as all_:
        await all_[0].stop()
        async with joined(shelf, all_):
            await until(lambda: all_[1].held == set(KEYS[:3]))
            await all_[0].start()
            await until(lambda: receiving(all_) == [True, False])
            assert all_[0].held == set(KEYS[:3])


# --- Homes that are lost -------------------------------------------------------------------------------------------


async def test_if_the_receiving_coordinator_dies_the_next_one_receives_chunks_until_it_is_back() -> None:
    shelf = Shelf()
    shelf.put(KEYS[:3])
    async with coordinators("m", "m", "m") as all_, joined(shelf, all_) as fleet:
        await until(lambda: receiving(all_) == [True, False, False])
        await all_[0].stop()
        shelf.put(KEYS[3:6])  # while no coordinator receives chunks
        shelf.take(KEYS[:1])
        await until(lambda: all_[1].held == set(KEYS[1:6]))
        assert all_[2].counts["stream"] == 1
        await all_[0].start()
        shelf.put(KEYS[6:8])
        await until(lambda: receiving(all_) == [True, False, False])
        await until(lambda: all_[0].held == set(KEYS[1:8]))
        assert [one.counts["snapshot"] for one in all_] == [2, 1, 0]
        assert fleet.stats().connected_count == 3


async def test_if_another_coordinator_dies_nothing_is_reported_again() -> None:
    shelf = Shelf()
    shelf.put(KEYS[:3])
    async with coordinators("m", "m") as all_, joined(shelf, all_) as fleet:
        await until(lambda: receiving(all_) == [True, False])
        await all_[1].stop()
        await until(lambda: fleet.stats().connected_count == 1)
        await all_[1].start()
        await until(lambda: receiving(all_) == [True, False])
        assert all_[0].counts["stream"] == 1
        assert all_[1].counts["snapshot"] == 0


async def test_a_home_that_freezes_is_given_up_after_its_lease() -> None:
    shelf = Shelf()
    shelf.put(KEYS[:3])
    async with AsyncExitStack() as stack:
        all_ = await stack.enter_async_context(coordinators("m", "m", lease_seconds=SHORT_LEASE_SECONDS))
        wires = [await stack.enter_async_context(Wire(one.port)) for one in all_]
        chosen = primaries("a", {wire.address: "m" for wire in wires})[wires[0].address]
        home = [wire.address for wire in wires].index(chosen)
        other = 1 - home
        fleet = await stack.enter_async_context(shelf.join(*(wire.address for wire in wires)))
        await fleet.started()
        await until(lambda: (all_[home].reports_chunks, all_[other].reports_chunks) == (True, False))
        wires[home].freeze()
        shelf.put(KEYS[3:5])
        await until(lambda: all_[other].held == set(KEYS[:5]))
        wires[home].thaw()
        await until(lambda: (all_[home].reports_chunks, all_[other].reports_chunks) == (True, False))
        await until(lambda: all_[home].held == set(KEYS[:5]))


async def test_a_receiver_stays_until_the_next_one_has_a_snapshot() -> None:
    shelf = Shelf()
    shelf.put(KEYS[:3])
    async with coordinators("m", "m", lease_seconds=SHORT_LEASE_SECONDS) as all_:
        await all_[0].stop()
        async with joined(shelf, all_):
            await until(lambda: receiving(all_)[1] is True)
            all_[0].acking = False
            await all_[0].start()
            await until(lambda: all_[0].counts["snapshot"] >= 2)  # it was given up once already, and is tried again
            shelf.put(KEYS[3:5])
            await until(lambda: all_[1].held == set(KEYS[:5]))
            assert all_[1].counts["stream"] == 1
            all_[0].acking = True
            await until(lambda: receiving(all_) == [True, False])
            assert all_[0].held == set(KEYS[:5])


async def test_a_home_that_comes_and_goes_costs_the_other_nothing() -> None:
    shelf = Shelf()
    shelf.put(KEYS[:3])
    async with coordinators("m", "m") as all_:
        all_[0].breaks_streams = True
        async with joined(shelf, all_):
            await until(lambda: all_[0].counts["stream"] > 5)
            shelf.put(KEYS[3:5])
            await until(lambda: all_[1].held == set(KEYS[:5]))
            assert all_[1].counts["snapshot"] == 1
            assert all_[1].counts["stream"] <= 2  # the first one perhaps without chunks
            all_[0].breaks_streams = False
            await until(lambda: receiving(all_) == [True, False])
            assert all_[0].held == set(KEYS[:5])


async def test_a_crash_looping_receiver_restarts_the_other_at_most_once_a_second() -> None:
    shelf = Shelf()
    shelf.put(KEYS[:3])
    async with coordinators("m", "m") as all_, joined(shelf, all_):
        loop = asyncio.get_running_loop()
        began = loop.time()
        for _ in range(3):
            await until(lambda: receiving(all_) == [True, False])
            await all_[0].stop()
            await until(lambda: receiving(all_)[1] is True)
            await all_[0].start()
        changes = all_[1].counts["stream"] - 1
        assert changes <= 1 + (loop.time() - began)
        assert all_[1].held == set(KEYS[:3])


async def test_one_that_is_put_off_is_no_home_but_is_asked() -> None:
    shelf = Shelf()
    shelf.put(KEYS[:3])
    async with coordinators("m", "m") as all_, joined(shelf, all_) as fleet:
        await until(lambda: receiving(all_) == [True, False])
        all_[0].put_off_seconds = 0.1
        all_[0].resync()
        await until(lambda: all_[1].held == set(KEYS[:3]))
        registered = all_[0].counts["register"]
        await until(lambda: all_[0].counts["register"] > registered + 2)
        asked = all_[0].counts["lookup"]
        assert fleet.stats().connected_count == 2
        for _ in range(2):
            await fleet.lookup(KEYS, WAIT_SECONDS)
        assert all_[0].counts["lookup"] == asked + 1
        assert all_[1].counts["snapshot"] == 1
        all_[0].put_off_seconds = 0.0
        await until(lambda: receiving(all_) == [True, False])
        assert all_[0].held == set(KEYS[:3])


async def test_a_node_that_is_put_off_comes_back_when_it_was_asked_to_and_not_before() -> None:
    wait_seconds = 0.7
    async with Sharing() as coordinator:
        coordinator.put_off_seconds = wait_seconds
        async with Shelf().join(coordinator.address):
            await until(lambda: coordinator.counts["register"] >= 4)
    gaps = [after - before for before, after in pairwise(coordinator.register_times)]
    assert min(gaps) >= 0.95 * wait_seconds


async def test_a_home_that_asks_for_a_new_snapshot_stays_the_home() -> None:
    shelf = Shelf()
    shelf.put(KEYS[:3])
    async with coordinators("m", "m") as all_, joined(shelf, all_) as fleet:
        await until(lambda: receiving(all_) == [True, False])
        all_[0].resync()
        shelf.put(KEYS[3:5])
        await until(lambda: all_[0].counts["snapshot"] == 2)
        assert all_[0].held == set(KEYS[:5])
        assert all_[1].counts["stream"] == 1
        assert fleet.stats().connected_count == 2


# --- Maps that come, change and go ---------------------------------------------------------------------------------


async def test_when_sharing_begins_one_coordinator_receives_chunks_and_when_it_ends_both() -> None:
    shelf = Shelf()
    shelf.put(KEYS[:3])
    async with coordinators("", "") as all_, joined(shelf, all_) as fleet:
        await until(lambda: receiving(all_) == [True, True])
        for one in all_:
            one.share("m")
        await until(lambda: receiving(all_) == [True, False])
        shelf.put(KEYS[3:5])
        await until(lambda: all_[0].held == set(KEYS[:5]))
        for one in all_:
            one.share("")
        await until(lambda: [one.held for one in all_] == [set(KEYS[:5])] * 2)
        assert fleet.stats().connected_count == 2


async def test_if_only_the_receiver_stops_sharing_both_receive_chunks() -> None:
    shelf = Shelf()
    shelf.put(KEYS[:3])
    async with coordinators("m", "m") as all_, joined(shelf, all_):
        await until(lambda: receiving(all_) == [True, False])
        all_[0].share("")
        await until(lambda: [one.held for one in all_] == [set(KEYS[:3])] * 2)
        all_[0].share("m")
        await until(lambda: receiving(all_) == [True, False])


async def test_with_another_map_the_node_reports_to_its_coordinator_again() -> None:
    shelf = Shelf()
    shelf.put(KEYS[:3])
    async with coordinators("m", "m", "m") as all_, joined(shelf, all_):
        await until(lambda: receiving(all_) == [True, False, False])
        snapshots = all_[0].counts["snapshot"]
        for one in all_:
            one.share("new")
        await until(lambda: all_[0].counts["snapshot"] > snapshots and receiving(all_) == [True, False, False])
        assert all_[0].held == set(KEYS[:3])


async def test_another_map_at_the_next_registration_restarts_streams() -> None:
    shelf = Shelf()
    shelf.put(KEYS[:3])
    async with coordinators("m", "m") as all_, joined(shelf, all_, register_interval_seconds=0.05):
        await until(lambda: receiving(all_) == [True, False])
        all_[1].map_id = "other"  # without a word over the stream
        await until(lambda: [one.held for one in all_] == [set(KEYS[:3])] * 2)
        assert all_[0].counts["stream"] == 1
        all_[1].map_id = "m"
        await until(lambda: receiving(all_) == [True, False])


async def test_where_sharing_ends_between_registration_and_report_the_node_registers_again() -> None:
    shelf = Shelf()
    shelf.put(KEYS[:3])
    async with coordinators("m", "m") as all_:
        all_[1].turns_off = True
        async with joined(shelf, all_):
            await until(lambda: [one.held for one in all_] == [set(KEYS[:3])] * 2)
            assert (all_[1].counts["refused"], all_[1].counts["register"]) == (1, 2)
            assert all_[0].counts["stream"] == 1


async def test_one_that_refuses_for_good_is_not_asked_too_often() -> None:
    shelf = Shelf()
    shelf.put(KEYS[:3])
    async with coordinators("m", "m", lease_seconds=SHORT_LEASE_SECONDS) as all_:
        all_[1].refuses_elsewhere = True
        loop = asyncio.get_running_loop()
        async with joined(shelf, all_):
            began = loop.time()
            await until(lambda: all_[0].counts["usage"] > 4)  # two seconds or more
            await until(lambda: all_[1].counts["refused"] > 3)
            assert all_[1].counts["refused"] < 10 + 10 * (loop.time() - began)
            assert all_[0].held == set(KEYS[:3])
            all_[1].refuses_elsewhere = False
            await until(lambda: receiving(all_) == [True, False])
