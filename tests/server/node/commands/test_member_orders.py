"""Orders of coordinators over real sockets: executed once, and their outcome reported."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from hashlib import sha256

from google.protobuf.duration_pb2 import Duration

from lmkv.internal.v1.report_service_pb2 import DropOrder, FetchOrder, PinOrder, UnpinOrder
from lmkv.keys import ChunkKey, join_keys
from lmkv.tiers import HOST
from lmkv_server.node.cache.pins import MAX_ID_BYTES, MAX_PINS
from lmkv_server.node.commands.executor import MAX_ORDER_KEYS
from tests.server.node.fleet_parts import KEYS, LEASE_SECONDS, Shelf
from tests.server.node.ordering import Ordering, serving
from tests.waiting import WAIT_SECONDS, until

# --- Orders ------------------------------------------------------------------------------------------------------


async def pinned(shelf: Shelf, ordering: Ordering, count: int, seconds: int = 60) -> str:
    """Has the first chunks pinned; the pin's id."""
    pin_id = f"pin-{ordering.report_count}"
    pin = PinOrder(pin_id=pin_id, tier=HOST, chunk_keys=join_keys(KEYS[:count]), ttl=Duration(seconds=seconds))
    outcome = await ordering.ended(ordering.give(pin=pin))
    assert (outcome.status.code, outcome.chunk_count) == (0, count)
    return pin_id


async def test_an_order_is_executed_once_and_each_repeat_gets_its_outcome() -> None:
    ordering, shelf = Ordering(), Shelf()
    shelf.keep(KEYS[:3])
    async with serving(ordering) as address, shelf.join(address):
        order_id = ordering.give(drop=DropOrder(chunk_keys=join_keys(KEYS[:2])))
        outcome = await ordering.ended(order_id)
        assert (outcome.status.code, outcome.chunk_count) == (0, 2)
        shelf.keep(KEYS[:1])
        ordering.give(order_id=order_id, drop=DropOrder(chunk_keys=join_keys(KEYS[:2])))
        await until(lambda: len(ordering.outcomes) == 2)
        assert ordering.outcomes == [outcome, outcome]
        assert shelf.tier.get(KEYS[0]) is not None
        heard = ordering.report_count
        await until(lambda: ordering.report_count > heard + 2)
        assert len(ordering.outcomes) == 2  # acknowledged outcomes are not repeated


async def test_an_outcome_comes_behind_the_changes_that_its_order_made() -> None:
    ordering, shelf = Ordering(), Shelf()
    shelf.keep(KEYS)
    async with serving(ordering) as address, shelf.join(address):
        await until(lambda: len(ordering.held) == len(KEYS))
        for count in range(0, len(KEYS), 4):
            gone = KEYS[count : count + 4]
            order_id = ordering.give(drop=DropOrder(chunk_keys=join_keys(gone)))
            await ordering.ended(order_id)
            assert ordering.held_at_outcome[order_id] == set(KEYS[count + 4 :])


async def test_outcomes_are_reported_to_the_ordering_coordinator_and_pins_to_all() -> None:
    first, second, shelf = Ordering(), Ordering(), Shelf()
    shelf.keep(KEYS[:3])
    async with serving(first) as one, serving(second) as other, shelf.join(one, other):
        pin_id = await pinned(shelf, first, 3)
        await until(lambda: [pin.pin_id for pin in second.pin_lists[-1].pins] == [pin_id])
        heard = second.report_count
        await until(lambda: second.report_count > heard + 2)
        assert second.outcomes == []
        again = second.give(order_id=first.outcomes[0].order_id, unpin=UnpinOrder(pin_id="none"))
        assert await second.ended(again) == first.outcomes[0]


async def test_unacknowledged_outcomes_are_reported_again_on_the_next_stream() -> None:
    ordering, shelf = Ordering(), Shelf()
    ordering.acking = False
    async with serving(ordering) as address, shelf.join(address):
        order_ids = [ordering.give(unpin=UnpinOrder(pin_id="none")) for _ in range(3)]
        for order_id in order_ids:
            await ordering.ended(order_id)
        assert len(ordering.outcomes) == 3
        ordering.acking = True
        ordering.break_stream()
        await until(lambda: len(ordering.outcomes) == 6)
        assert [outcome.order_id for outcome in ordering.outcomes] == order_ids * 2
        ordering.break_stream()
        await until(lambda: ordering.stream_count == 3 and len(ordering.pin_lists) == 3)
        assert len(ordering.outcomes) == 6
        shelf.orders.check()


async def test_pins_are_reported_at_each_change_and_to_a_restarted_coordinator() -> None:
    first, second, shelf = Ordering(), Ordering(), Shelf()
    shelf.keep(KEYS[:4])
    async with AsyncExitStack() as stack:
        async with serving(first) as address:
            await stack.enter_async_context(shelf.join(address))
            await until(lambda: len(first.pin_lists) == 1)
            assert list(first.pin_lists[0].pins) == []
            pin_id = await pinned(shelf, first, 3)
            (pin,) = first.pin_lists[-1].pins
            assert (pin.pin_id, pin.chunk_count, pin.token_count) == (pin_id, 3, 3 * 256)
            assert (pin.position.instance_id, pin.position.tier) == ("a", HOST)
            assert 60 - WAIT_SECONDS < pin.expire_time.seconds - time.time() < 61
            other = await pinned(shelf, first, 2)
            assert {pin.pin_id for pin in first.pin_lists[-1].pins} == {pin_id, other}
        async with serving(second, int(address.rpartition(":")[2])):
            await until(lambda: len(second.pin_lists) == 1)
            assert {pin.pin_id for pin in second.pin_lists[0].pins} == {pin_id, other}
            await second.ended(second.give(unpin=UnpinOrder(pin_id=pin_id)))
            assert [pin.pin_id for pin in second.pin_lists[-1].pins] == [other]
            await second.ended(second.give(unpin=UnpinOrder(pin_id=other)))
            assert list(second.pin_lists[-1].pins) == []
            assert len(second.pin_lists) == 3
    shelf.orders.check()


async def test_an_expired_pin_is_no_longer_reported() -> None:
    ordering, shelf = Ordering(), Shelf()
    shelf.keep(KEYS[:1])
    async with serving(ordering) as address, shelf.join(address):
        pin = PinOrder(pin_id="short", chunk_keys=join_keys(KEYS[:1]), ttl=Duration(seconds=2))
        ordering.give(pin=pin)
        await until(lambda: [len(report.pins) for report in ordering.pin_lists] == [0, 1, 0])
        assert not len(shelf.orders.pins)


async def test_as_many_pins_as_there_may_be_travel_beside_a_full_report() -> None:
    ordering, shelf = Ordering(), Shelf("x" * 256)
    shelf.keep(KEYS[:1])
    for number in range(MAX_PINS):
        shelf.orders.pins.pin(f"{number:0{MAX_ID_BYTES}}", KEYS[:1], time.monotonic(), 3600)
    async with serving(ordering) as address, shelf.join(address):
        await until(lambda: [len(report.pins) for report in ordering.pin_lists] == [MAX_PINS])
        assert ordering.stream_count == 1


async def test_many_large_outcomes_travel_in_several_reports() -> None:
    ordering, shelf = Ordering(), Shelf()
    ordering.lease_seconds = 5.0  # each outcome takes the loop a while, on a busy machine longer than a short lease
    keys = [ChunkKey(sha256(i.to_bytes(4, "little")).digest()[:16]) for i in range(MAX_ORDER_KEYS)]
    async with serving(ordering) as address, shelf.join(address):
        fetch = FetchOrder(instance_id="b", peer_address="127.0.0.1:9", chunk_keys=join_keys(keys))
        order_ids = [ordering.give(fetch=fetch) for _ in range(6)]
        for order_id in order_ids:
            outcome = await ordering.ended(order_id)
            assert outcome.failures[0].chunk_keys == keys
        assert ordering.stream_count == 1


async def test_an_idle_node_says_no_more_than_three_things_a_lease() -> None:
    ordering = Ordering()
    async with serving(ordering) as address, Shelf().join(address):
        await until(lambda: ordering.report_count >= 3)  # the snapshot, its end, the first heartbeat
        before, started = ordering.report_count, time.monotonic()
        await until(lambda: ordering.report_count >= before + 4)
        seconds = time.monotonic() - started
    assert seconds > 2 * LEASE_SECONDS / 3, "four reports are at least three intervals, but for what was under way"
