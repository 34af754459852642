"""Orders about operations: a node keeps their records, reports changes, and rejects attempts that are over."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import pytest
from google.longrunning.operations_pb2 import Operation

from lmkv.rpc.error_status import from_status
from lmkv.v1 import registry_service_pb2 as pb
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.commands import runner as module
from lmkv_server.node.commands.runner import OrderRunner
from lmkv_server.node.sessions.sessions import EngineSessions
from tests.server.node.ordering import until

FIRST, SECOND = "10.0.0.1:9000", "10.0.0.2:9000"
NUMBERS = count()


class Node:
    """Takes orders of two coordinators, and counts how often it has something to report to the second."""

    def __init__(self, orders: OrderRunner) -> None:
        self.orders = orders
        self.woken = 0
        orders.add_listener(FIRST, lambda: None)
        orders.add_listener(SECOND, self._wake)

    def _wake(self) -> None:
        self.woken += 1

    async def reason(self, giver: str, **fields: Any) -> str:
        """Carries an order out; why it was refused."""
        order = pb.Order(order_id=f"o{next(NUMBERS)}", **fields)
        order.expire_time.FromNanoseconds(time.time_ns() + 10_000_000_000)
        self.orders.start(order, giver)
        await until(lambda: bool(self.orders.unacknowledged(giver)))
        (outcome,) = self.orders.unacknowledged(giver)
        self.orders.acknowledge(giver, [outcome.order_id])
        return from_status(outcome.status).reason if outcome.status.code else ""

    def reported(self, reader: str) -> list[tuple[int, bool, bool]]:
        """Attempt, cancelled and orphaned of each record, as reported to a coordinator."""
        return [(one.attempt, one.cancelled, one.orphaned) for one in self.orders.records.since(0, reader)]


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    tier = HostTier(1 << 16)
    async with OrderRunner(instance_id="n", tier=tier, engines=EngineSessions(tier), fetcher=None) as orders:
        yield Node(orders)
        orders.check()


def keep(attempt: int) -> pb.RecordOrder:
    return pb.RecordOrder(record=pb.OperationRecord(operation=Operation(name="move-1"), attempt=attempt))


async def test_a_record_and_its_cancellation_reach_every_coordinator(node: Node) -> None:
    assert await node.reason(FIRST, record=keep(1)) == ""
    assert node.woken
    assert node.reported(FIRST) == node.reported(SECOND) == [(1, False, False)]
    assert await node.reason(SECOND, cancel=pb.CancelOrder(operation_name="move-1")) == ""
    assert node.reported(FIRST) == [(1, True, False)]


async def test_what_an_earlier_attempt_orders_is_refused(node: Node) -> None:
    drop = pb.DropOrder(all=True)
    assert await node.reason(FIRST, record=keep(1)) == ""
    assert await node.reason(FIRST, drop=drop, operation_name="move-1", attempt=1) == ""
    assert await node.reason(SECOND, record=keep(2)) == ""
    assert await node.reason(FIRST, drop=drop, operation_name="move-1", attempt=1) == "OPERATION_TAKEN_OVER"
    assert await node.reason(SECOND, drop=drop, operation_name="move-1", attempt=2) == ""
    assert await node.reason(FIRST, drop=drop) == ""


async def test_another_coordinator_is_asked_once_the_first_is_gone_for_too_long(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "OFFER_SECONDS", 3600.0)
    await node.reason(FIRST, record=keep(1))
    node.orders.disconnected(FIRST, 3600.0)
    assert node.reported(SECOND) == [(1, False, False)]
    assert node.reported(FIRST) == [(1, False, True)], "if it is back in time"
    node.orders.records.put(keep(1).record, FIRST)
    node.orders.disconnected(FIRST, 0.0)
    await until(lambda: node.reported(SECOND) == [(1, False, True)])
    assert await node.reason(SECOND, record=keep(2)) == ""
    assert node.reported(FIRST) == node.reported(SECOND) == [(2, False, False)]


async def test_a_forwarded_record_is_offered_to_the_next_coordinator_unless_its_own_one_sends_it(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FORWARDED_SECONDS", 3600.0)
    monkeypatch.setattr(module, "OFFER_SECONDS", 3600.0)
    forwarded = keep(1)
    forwarded.forwarded = True
    for _ in range(2):
        assert await node.reason(FIRST, record=forwarded) == ""
        assert node.reported(FIRST) == node.reported(SECOND) == [(1, False, False)]
        assert node.orders.records.next_due() is not None
    assert await node.reason(SECOND, record=keep(1)) == ""
    assert await node.reason(FIRST, record=forwarded) == ""
    assert node.orders.records.next_due() is None, "its coordinator sends it"
    monkeypatch.setattr(module, "FORWARDED_SECONDS", 0.0)
    forwarded.record.attempt = 2
    assert await node.reason(SECOND, record=forwarded) == ""
    await until(lambda: node.reported(FIRST) == [(2, False, True)])


async def test_an_order_to_store_a_record_does_not_expire(node: Node) -> None:
    order = pb.Order(order_id="late", record=keep(1))
    node.orders.start(order, FIRST)
    await until(lambda: bool(node.orders.unacknowledged(FIRST)))
    (outcome,) = node.orders.unacknowledged(FIRST)
    assert not outcome.status.code
    assert node.reported(FIRST) == [(1, False, False)]


async def test_the_outcome_of_a_refused_record_has_the_record_that_is_kept(node: Node) -> None:
    await node.reason(SECOND, record=keep(2))
    node.orders.start(pb.Order(order_id="older", record=keep(1)), FIRST)
    await until(lambda: bool(node.orders.unacknowledged(FIRST)))
    (outcome,) = node.orders.unacknowledged(FIRST)
    assert (outcome.record.operation.name, outcome.record.attempt) == ("move-1", 2)


async def test_the_end_of_an_operation_is_reported_though_its_record_has_expired_by_the_clock_here(node: Node) -> None:
    record = pb.OperationRecord(operation=Operation(name="move-1", done=True), attempt=1)
    record.expire_time.FromSeconds(1)
    assert await node.reason(FIRST, record=keep(1)) == ""
    assert await node.reason(FIRST, record=pb.RecordOrder(record=record)) == ""
    assert [one.operation.done for one in node.orders.records.since(0, SECOND)] == [True]
