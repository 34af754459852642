"""A node counts the chunks that orders bring: a move does not drop what has arrived since it began."""

from __future__ import annotations

import pytest

from lmkv.internal.v1 import report_service_pb2 as pb
from lmkv.keys import ChunkKey, join_keys
from lmkv_server.node.commands import arrivals as module
from lmkv_server.node.commands.arrivals import Arrivals
from tests.server.node.commands.order_parts import KEYS, Coordinating, Shelf, claimed, failed, fetch, order
from tests.server.node.peer_parts import Parts


def test_the_last_arrival_of_each_chunk_counts() -> None:
    here = Arrivals(10)
    here.add(KEYS[:2])
    here.add(KEYS[1:3])
    assert here.serial == 12
    assert here.since(10, KEYS[:4]) == set(KEYS[:3])
    assert here.since(11, KEYS[:4]) == set(KEYS[1:3])
    assert here.since(12, KEYS[:4]) == set()
    here.add([])
    assert here.serial == 12
    here.check()


def test_of_chunks_that_are_forgotten_the_latest_time_is_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ARRIVALS", 2)
    here = Arrivals(0)
    for key in KEYS[:3]:
        here.add([key])
    assert here.since(0, KEYS[:5]) == set(KEYS[:5]), "the first one arrived at 1, and is forgotten"
    assert here.since(1, KEYS[:5]) == set(KEYS[1:3])
    here.check()


async def test_a_drop_spares_what_a_fetch_has_brought_or_found_since(owner: Parts, here: Coordinating) -> None:
    before = here.orders.arrivals.serial
    assert claimed(await here.carried_out(fetch(owner.holder(3), KEYS[:3])), KEYS[:3]) == KEYS[:3]
    between = here.orders.arrivals.serial
    assert between == before + 1
    again = await here.carried_out(fetch(owner.holder(1), KEYS[2:3]))
    assert claimed(again, KEYS[2:3]) == KEYS[2:3], "it is here already"
    drop = pb.DropOrder(chunk_keys=join_keys(KEYS[:3]), fetch_serial=before)
    assert failed(await here.carried_out(order(drop=drop))) == {"CHUNK_ARRIVED": KEYS[:3]}
    drop.fetch_serial = between
    outcome = await here.carried_out(order(drop=drop))
    assert (outcome.chunk_count, failed(outcome)) == (2, {"CHUNK_ARRIVED": KEYS[2:3]})
    drop.fetch_serial = here.orders.arrivals.serial
    assert (await here.carried_out(order(drop=drop))).chunk_count == 1


async def test_a_drop_without_a_serial_drops_all(shelf: Shelf) -> None:
    shelf.here.orders.arrivals.add([ChunkKey(number.to_bytes(16, "big")) for number in range(6)])
    keys = join_keys(ChunkKey(number.to_bytes(16, "big")) for number in range(6))
    assert (await shelf.drop(chunk_keys=keys)).chunk_count == 6


async def test_a_node_that_is_going_to_stop_says_so_until_it_stays(shelf: Shelf) -> None:
    orders = shelf.here.orders
    assert orders.leaving_seconds == 0
    leave = pb.LeaveOrder()
    leave.ttl.FromSeconds(600)
    await shelf.here.carried_out(order(leave=leave))
    assert 0 < orders.leaving_seconds <= 600
    leave.ttl.FromSeconds(0)
    await shelf.here.carried_out(order(leave=leave))
    assert orders.leaving_seconds == 0
