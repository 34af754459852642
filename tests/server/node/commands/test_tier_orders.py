"""Drop, pin and unpin orders on the node's tiers."""

from __future__ import annotations

import time

from lmkv.internal.v1 import report_service_pb2 as pb
from lmkv.keys import join_keys
from lmkv.tiers import HOST
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.commands.executor import DROP_BATCH_CHUNKS, OrderContext
from lmkv_server.node.commands.runner import OrderRunner
from lmkv_server.node.sessions.sessions import EngineSessions
from tests.server.node.cases import admit, chunk_keys
from tests.server.node.commands.order_parts import (
    GIVER,
    OTHER_SPEC,
    SPEC,
    Coordinating,
    Shelf,
    failed,
    order,
    pin,
    reason,
)
from tests.server.node.ordering import until
from tests.waiting import WAIT_SECONDS


async def test_chunks_are_dropped_by_key_and_what_is_not_held_is_not_counted(shelf: Shelf) -> None:
    outcome = await shelf.drop(chunk_keys=join_keys(chunk_keys(1, 3, 77, 3, 11)))
    assert (reason(outcome), outcome.chunk_count, outcome.token_count) == ("", 3, 3 * 32)
    assert shelf.numbers() == [0, 2, 4, 5, 10, 12, 13]
    outcome = await shelf.drop(chunk_keys=join_keys(chunk_keys(0, 10)), fingerprint=SPEC.fingerprint)
    assert outcome.chunk_count == 1
    assert shelf.numbers() == [2, 4, 5, 10, 12, 13]


async def test_chunks_are_dropped_by_spec_or_all(shelf: Shelf) -> None:
    assert (await shelf.drop(fingerprint=OTHER_SPEC.fingerprint, tier=HOST)).chunk_count == 4
    assert shelf.numbers() == [0, 1, 2, 3, 4, 5]
    assert (await shelf.drop(all=True)).chunk_count == 6
    assert shelf.numbers() == []
    assert (await shelf.drop(all=True)).chunk_count == 0


async def test_a_dry_run_counts_what_it_would_drop_and_drops_nothing(shelf: Shelf) -> None:
    await shelf.here.carried_out(pin(chunk_keys(0)))
    dry = await shelf.drop(all=True, dry_run=True)
    assert shelf.numbers() == [0, 1, 2, 3, 4, 5, 10, 11, 12, 13]
    real = await shelf.drop(all=True)
    assert (dry.chunk_count, dry.token_count) == (real.chunk_count, real.token_count) == (9, 9 * 32)


async def test_pinned_chunks_stay_and_are_failures_if_they_were_named(shelf: Shelf) -> None:
    await shelf.here.carried_out(pin(chunk_keys(0, 1)))
    named = await shelf.drop(chunk_keys=join_keys(chunk_keys(0, 1, 2)))
    assert (reason(named), named.chunk_count) == ("", 1)
    assert failed(named) == {"CHUNK_PINNED": chunk_keys(0, 1)}
    would = await shelf.drop(all=True, dry_run=True)
    everything = await shelf.drop(all=True)
    assert (everything.chunk_count, list(everything.failures)) == (7, [])
    assert named.pinned_chunk_count == would.pinned_chunk_count == everything.pinned_chunk_count == 2
    assert shelf.numbers() == [0, 1]


async def test_bytes_that_a_peer_reads_stay_until_it_is_done(shelf: Shelf) -> None:
    chunks = shelf.tier.find(chunk_keys(0))
    shelf.tier.hold(chunks)
    used = shelf.tier.used_bytes
    assert (await shelf.drop(chunk_keys=join_keys(chunk_keys(0)))).chunk_count == 1
    assert shelf.tier.used_bytes == used
    shelf.tier.unhold(chunks)
    assert shelf.tier.used_bytes < used


async def test_a_large_drop_lets_others_have_a_turn_and_may_be_cancelled() -> None:
    tier = HostTier(3 * DROP_BATCH_CHUNKS * SPEC.chunk_bytes)
    for number in range(3 * DROP_BATCH_CHUNKS):
        admit(tier, SPEC, number)
    async with OrderRunner(OrderContext(instance_id="n", tier=tier, engines=EngineSessions(tier))) as orders:
        here, given = Coordinating(orders), order(drop=pb.DropOrder(all=True))
        orders.start(given, GIVER)
        orders.start(order(cancel=pb.CancelOrder(order_id=given.order_id)), GIVER)
        outcome = await here.ended(given)
        assert reason(outcome) == "OPERATION_CANCELLED"
        assert outcome.chunk_count == DROP_BATCH_CHUNKS
        assert len(tier) == 2 * DROP_BATCH_CHUNKS
        rest = await here.carried_out(order(drop=pb.DropOrder(all=True)))
        assert (rest.chunk_count, len(tier)) == (2 * DROP_BATCH_CHUNKS, 0)
        tier.check()


# --- Pin and unpin -----------------------------------------------------------------------------------------------


async def test_the_head_that_is_held_is_pinned_until_it_is_unpinned(shelf: Shelf) -> None:
    outcome = await shelf.here.carried_out(pin(chunk_keys(3, 4, 77, 5)))
    assert (reason(outcome), outcome.chunk_count, outcome.token_count) == ("", 2, 64)
    room = [reserved for _ in range(64) if (reserved := shelf.tier.reserve(SPEC.chunk_bytes))]
    assert shelf.numbers() == [3, 4]
    assert shelf.tier.reserve(SPEC.chunk_bytes) is None
    unpinned = await shelf.here.carried_out(order(unpin=pb.UnpinOrder(pin_id="p")))
    assert (reason(unpinned), unpinned.chunk_count) == ("", 2)
    room += [reserved for _ in range(64) if (reserved := shelf.tier.reserve(SPEC.chunk_bytes))]
    assert shelf.numbers() == []
    again = await shelf.here.carried_out(order(unpin=pb.UnpinOrder(pin_id="p")))
    assert (reason(again), again.chunk_count) == ("", 0)
    never = await shelf.here.carried_out(order(unpin=pb.UnpinOrder(pin_id="q")))
    assert (reason(never), never.chunk_count) == ("PIN_NOT_FOUND", 0)
    assert not len(shelf.here.orders.pins)
    for reserved in room:
        shelf.tier.give_back(reserved.offset)


async def test_nothing_held_is_nothing_pinned(shelf: Shelf) -> None:
    outcome = await shelf.here.carried_out(pin(chunk_keys(77, 0)))
    assert (reason(outcome), outcome.status.code, outcome.chunk_count) == ("CHUNK_NOT_FOUND", 5, 0)


async def test_a_pin_that_is_repeated_lasts_longer(shelf: Shelf) -> None:
    await shelf.here.carried_out(pin(chunk_keys(0), seconds=50))
    await shelf.here.carried_out(pin(chunk_keys(0, 1), seconds=500))
    (listed,) = shelf.here.orders.pin_list().pins
    assert (listed.pin_id, listed.chunk_count) == ("p", 2)
    assert 500 - WAIT_SECONDS < listed.expire_time.seconds - time.time() < 501


async def test_a_pin_ends_by_itself(shelf: Shelf) -> None:
    news = 0

    def heard() -> None:
        nonlocal news
        news += 1

    await shelf.here.carried_out(pin(chunk_keys(0), seconds=3600, pin_id="long"))
    await shelf.here.carried_out(pin(chunk_keys(0, 1), seconds=2.0, pin_id="short"))
    shelf.here.orders.add_listener(GIVER, heard)
    pins = shelf.here.orders.pins
    await until(lambda: len(pins) == 1)
    await until(lambda: news > 0)
    assert [listed.pin_id for listed in shelf.here.orders.pin_list().pins] == ["long"]
    assert (await shelf.drop(all=True)).chunk_count == 9
