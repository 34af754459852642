"""The lifetime of orders: cancelled, bounded, repeated over streams, refused, logged."""

from __future__ import annotations

import asyncio
import random
import re
import signal
from functools import partial
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from lmkv.internal.v1 import report_service_pb2 as pb
from lmkv.keys import join_keys, split_keys
from lmkv.tiers import DISK, GPU, HOST, REMOTE
from lmkv_server.node.commands.executor import MAX_ORDER_KEYS, OrderContext
from lmkv_server.node.commands.runner import MAX_FETCHES, MAX_RUNNING, OrderRunner
from lmkv_server.node.fleet.membership import FleetMembership
from lmkv_server.node.fleet.registration import FleetContext
from lmkv_server.node.sessions.sessions import EngineSessions
from tests.server.node import fleet_parts
from tests.server.node.cases import chunk_keys, clear
from tests.server.node.commands.order_parts import (
    GIVER,
    KEYS,
    SPEC,
    AtFirst,
    Coordinating,
    Shelf,
    claimed,
    coordinating,
    failed,
    fetch,
    order,
    pin,
    reason,
)
from tests.server.node.ordering import Ordering, serving, until
from tests.server.node.peer_parts import LARGE, SMALL, Parts, Remote
from tests.waiting import WAIT_SECONDS


async def test_a_fetch_may_be_cancelled_at_any_moment(owner: Parts, reader: Parts, here: Coordinating) -> None:
    reasons = set()
    for step in range(25):
        given = fetch(owner.holder(0))
        here.orders.start(given, GIVER)
        await asyncio.sleep(step * 0.0007)
        cancel = await here.carried_out(order(cancel=pb.CancelOrder(order_id=given.order_id)))
        assert reason(cancel) == ""
        outcome = await here.ended(given)
        reasons.add(reason(outcome))
        assert set(failed(outcome)) <= {"OPERATION_CANCELLED"}
        assert all(reader.tier.get(key) for key in claimed(outcome))
        await until(lambda: reader.tier.reserved_count == 0)
        reader.check_nothing_left()
        reader.tier.drop(KEYS)
    assert "OPERATION_CANCELLED" in reasons


async def test_what_came_before_a_fetch_was_cancelled_is_kept_and_claimed() -> None:
    for _ in range(10):  # on a machine that is busy all may be here before it is frozen
        with Remote("owner") as remote:
            listener = AtFirst(partial(remote.signal, signal.SIGSTOP))
            async with Parts("reader", spec=LARGE, listener=listener) as reader, coordinating(reader) as here:
                given = fetch(remote.holder, spec=LARGE)
                here.orders.start(given, GIVER)
                await until(lambda reader=reader: len(reader.tier) > 0)  # type: ignore[misc]
                here.orders.start(order(cancel=pb.CancelOrder(order_id=given.order_id)), GIVER)
                outcome = await here.ended(given)
                came = len(reader.tier)
                remote.signal(signal.SIGCONT)
                assert 0 < len(claimed(outcome)) == came
                assert outcome.transferred_bytes == came * LARGE.chunk_bytes
                if came < 16:
                    assert (reason(outcome), list(failed(outcome))) == ("OPERATION_CANCELLED", ["OPERATION_CANCELLED"])
                    return
    raise AssertionError("it was never frozen in time")


async def test_cancelling_is_idempotent(owner: Parts, here: Coordinating) -> None:
    given = fetch(owner.holder(0))
    assert reason(await here.carried_out(given)) == ""
    for order_id in (given.order_id, "unknown"):
        assert reason(await here.carried_out(order(cancel=pb.CancelOrder(order_id=order_id)))) == ""
    here.orders.start(given, GIVER)
    assert len([o for o in here.orders.unacknowledged(GIVER) if o.order_id == given.order_id]) == 1


async def test_running_and_queued_orders_are_limited_and_queued_ones_can_be_cancelled() -> None:
    with Remote("owner") as remote:
        async with Parts("reader", spec=LARGE) as reader, coordinating(reader) as here:
            remote.signal(signal.SIGSTOP)
            running = [fetch(remote.holder, [key], LARGE) for key in KEYS[:MAX_FETCHES]]
            waiting = [fetch(remote.holder, KEYS[:2], LARGE) for _ in range(MAX_RUNNING - MAX_FETCHES)]
            for given in running + waiting:
                here.orders.start(given, GIVER)
            await until(lambda: here.orders.stats().fetching_count > 0)
            assert (here.orders.stats().fetching_count, here.orders.stats().running_count) == (MAX_FETCHES, MAX_RUNNING)
            refused = await here.carried_out(fetch(remote.holder, KEYS[:2], LARGE))
            assert reason(refused) == "FULL"
            assert claimed(refused, KEYS[:2]) == []
            for given in waiting[:1]:
                here.orders.start(order(cancel=pb.CancelOrder(order_id=given.order_id)), GIVER)
                await here.ended(given)
            late = await here.carried_out(fetch(remote.holder, KEYS[:2], LARGE, seconds=0.2))
            assert (reason(late), failed(late)) == ("UNREACHABLE", {"UNREACHABLE": KEYS[:2]})
            for given in waiting:
                here.orders.start(order(cancel=pb.CancelOrder(order_id=given.order_id)), GIVER)
            await until(lambda: here.orders.stats().failed_counts["fetch"] == 2 + len(waiting))
            assert here.orders.stats().failed_chunks == {
                "FULL": 2,
                "UNREACHABLE": 2,
                "OPERATION_CANCELLED": 2 * len(waiting),
            }
            remote.signal(signal.SIGCONT)
            for given in running:
                assert reason(await here.ended(given)) == ""
            assert len(reader.tier) == 16
            assert (here.orders.stats().fetching_count, here.orders.stats().running_count) == (0, 0)


async def test_an_order_continues_while_the_stream_is_broken_and_is_reported_on_the_next() -> None:
    with Remote("owner") as remote:
        listener = AtFirst(lambda: remote.signal(signal.SIGSTOP))
        async with Parts("reader", spec=LARGE, listener=listener) as reader, coordinating(reader) as here:
            ordering, given = Ordering(), fetch(remote.holder, spec=LARGE)
            context = FleetContext(node=fleet_parts.Shelf("reader", specs=[LARGE]), orders=here.orders)
            async with (
                serving(ordering) as address,
                FleetMembership([address], context),
            ):
                ordering.give_again(given)
                await until(lambda: len(reader.tier) > 0)
                ordering.break_stream()
                await until(lambda: ordering.stream_count == 2)
                ordering.give_again(given)
                remote.signal(signal.SIGCONT)
                outcome = await ordering.ended(given.order_id)
                assert claimed(outcome) == KEYS
                assert reader.pipeline.stats().chunk_count == 16
                await until(lambda: here.orders.unacknowledged(address) == [])


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_happens_meanwhile_no_outcome_claims_what_is_not_here(owner: Parts, seed: int) -> None:
    dice = random.Random(seed)
    async with Parts("reader", chunk_count=12) as reader, coordinating(reader) as here:
        given: dict[str, pb.Order] = {}
        checked: set[str] = set()

        def check_claims() -> None:  # within the step that makes the outcome
            for outcome in here.orders.unacknowledged(GIVER):
                made = given[outcome.order_id]
                if outcome.order_id not in checked and made.HasField("fetch"):
                    assert all(reader.tier.get(key) for key in claimed(outcome, split_keys(made.fetch.chunk_keys)))
                checked.add(outcome.order_id)

        def give(made: pb.Order) -> None:
            given[made.order_id] = made
            here.orders.start(made, GIVER)

        here.orders.add_listener(GIVER, check_claims)
        for _ in range(120):
            some = dice.sample(KEYS, dice.randint(1, 10))
            match dice.choice(["fetch", "fetch", "fetch", "cancel", "drop", "pin", "unpin", "store", "reset", "lose"]):
                case "fetch":
                    give(fetch(owner.holder(0), some, seconds=dice.choice([0.002, 10.0])))
                case "cancel" if given:
                    give(order(cancel=pb.CancelOrder(order_id=dice.choice(list(given)))))
                case "drop":
                    give(order(drop=pb.DropOrder(chunk_keys=join_keys(some))))
                case "pin":
                    give(pin(some, pin_id=dice.choice("abc"), seconds=dice.choice([0.001, 60])))
                case "unpin":
                    give(order(unpin=pb.UnpinOrder(pin_id=dice.choice("abc"))))
                case "store":
                    if reserved := reader.tier.reserve(SMALL.chunk_bytes):
                        reader.tier.give_back(reserved.offset)
                case "reset":
                    clear(reader.tier, SMALL.fingerprint)
                case "lose":
                    lost = owner.tier.get(some[0])
                    owner.tier.drop([some[0]]) if lost else owner.put(some[0])
            here.orders.check()
            await asyncio.sleep(dice.choice([0, 0, 0.001, 0.004]))
        await until(lambda: checked == set(given))


async def test_a_node_that_stops_leaves_its_orders() -> None:
    with Remote("owner") as remote:
        listener = AtFirst(lambda: remote.signal(signal.SIGSTOP))
        async with Parts("reader", spec=LARGE, listener=listener) as reader, coordinating(reader) as here:
            here.orders.start(pin(KEYS[:1]), GIVER)
            for _ in range(MAX_FETCHES + 3):
                here.orders.start(fetch(remote.holder, spec=LARGE), GIVER)
            await until(lambda: len(reader.tier) > 0)
            async with asyncio.timeout(WAIT_SECONDS):
                await here.orders.aclose()
                await here.orders.aclose()
            assert len(here.orders.pins) == 0
            here.orders.check()
            remote.signal(signal.SIGCONT)


async def test_a_coordinator_whose_reports_have_ended_is_not_notified(shelf: Shelf) -> None:
    orders = shelf.here.orders
    notified: list[str] = []
    for name in ("gone", "here"):
        orders.add_listener(name, partial(notified.append, name))
    for _ in range(2):
        orders.remove_listener("gone")
    orders.start(pin(KEYS[:1]), "here")
    await until(lambda: bool(notified))
    assert set(notified) == {"here"}


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ({"fetch": pb.FetchOrder(chunk_keys=b"x" * 17)}, "BAD_CHUNK_KEY"),
        ({"fetch": pb.FetchOrder(chunk_keys=bytes(16 * (MAX_ORDER_KEYS + 1)))}, "BAD_CHUNK_KEY"),
        ({"fetch": pb.FetchOrder(chunk_keys=KEYS[0], tier=DISK)}, "TIER_UNSUPPORTED"),
        ({"fetch": pb.FetchOrder(chunk_keys=KEYS[0], tier="cellar")}, "TIER_UNSUPPORTED"),
        ({"fetch": pb.FetchOrder(chunk_keys=KEYS[0])}, "KV_SPEC_MISMATCH"),
        ({"drop": pb.DropOrder(chunk_keys=b"x")}, "BAD_CHUNK_KEY"),
        ({"drop": pb.DropOrder()}, "BAD_MESSAGE"),
        ({"drop": pb.DropOrder(tier=HOST)}, "BAD_MESSAGE"),
        ({"drop": pb.DropOrder(all=True, tier=REMOTE)}, "TIER_UNSUPPORTED"),
        ({"pin": pb.PinOrder(pin_id="p", chunk_keys=b"x", ttl=Duration(seconds=1))}, "BAD_CHUNK_KEY"),
        ({"pin": pb.PinOrder(pin_id="p", chunk_keys=bytes(16))}, "BAD_SELECTION"),
        ({"pin": pb.PinOrder(chunk_keys=bytes(16), ttl=Duration(seconds=1))}, "BAD_MESSAGE"),
        ({"pin": pb.PinOrder(pin_id="p", tier=GPU)}, "TIER_UNSUPPORTED"),
        ({"explain": pb.ExplainOrder(chunk_keys=KEYS[0])}, "BAD_MESSAGE"),
        ({}, "BAD_MESSAGE"),
    ],
)
async def test_an_order_that_makes_no_sense_is_refused(shelf: Shelf, action: dict[str, Any], expected: str) -> None:
    before = shelf.numbers()
    outcome = await shelf.here.carried_out(order(**action))
    assert reason(outcome) == expected
    assert (outcome.chunk_count, shelf.numbers()) == (0, before)
    assert sum(shelf.here.orders.stats().failed_counts.values()) == 1


async def test_without_peers_a_fetch_says_so(shelf: Shelf) -> None:
    engines = EngineSessions(shelf.tier)
    engines.attach("engine", SPEC)
    async with OrderRunner(OrderContext(instance_id="n", tier=shelf.tier, engines=engines)) as orders:
        given = order(fetch=pb.FetchOrder(chunk_keys=KEYS[0], fingerprint=SPEC.fingerprint))
        outcome = await Coordinating(orders).carried_out(given)
        assert reason(outcome) == "UNREACHABLE"
        assert "enable_p2p" in outcome.status.message


async def test_operators_read_one_line_per_order(shelf: Shelf, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    fine = order(drop=pb.DropOrder(chunk_keys=join_keys(chunk_keys(1, 2))))
    await shelf.here.carried_out(fine)
    bad = order(fetch=pb.FetchOrder(instance_id="b", chunk_keys=join_keys(KEYS[:2])))
    await shelf.here.carried_out(bad)
    (first,) = [record for record in caplog.records if fine.order_id + ":" in record.message]
    (second,) = [record for record in caplog.records if bad.order_id + ":" in record.message]
    assert (first.levelname, second.levelname) == ("INFO", "WARNING")
    assert re.search(r"drop: 2 chunks in \d+", first.message)
    assert "fetch from b: 0 chunks" in second.message
    assert "2 chunks KV_SPEC_MISMATCH" in second.message
