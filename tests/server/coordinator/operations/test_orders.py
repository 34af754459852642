"""Orders wait for a stream of their instance, and operations that have ended are remembered for a time."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from lmkv.errors import ResyncRequired, Unreachable
from lmkv.internal.v1 import report_service_pb2 as pb
from lmkv.v1.cache_service_pb2 import ClearProgress
from lmkv_server.coordinator.operations import operations as operations_module
from lmkv_server.coordinator.operations import orders as orders_module
from lmkv_server.coordinator.operations.operations import Operation, OperationTable
from lmkv_server.coordinator.operations.orders import PendingOrders
from lmkv_server.coordinator.services import reports as outbox_module
from lmkv_server.coordinator.services.reports import ReportOutbox
from tests.waiting import WAIT_SECONDS


def sent(outbox: ReportOutbox) -> list[str]:
    """Ids of the orders that wait to be read from the outbox of a stream."""
    found = []
    while (response := outbox.take(0)) is not None:
        found += [order.order_id for order in response.orders]
    return found


async def test_an_order_waits_while_its_instance_has_no_stream_and_is_sent_over_the_next_one() -> None:
    orders, ended, following = PendingOrders(), ReportOutbox(), ReportOutbox()
    orders.connect("a", ended.send)
    orders.disconnect("a", ended.send)
    order = pb.Order(order_id="o", unpin=pb.UnpinOrder(pin_id="p"))
    executing = asyncio.create_task(orders.execute("a", order, WAIT_SECONDS))
    await asyncio.sleep(0)
    assert len(orders) == 1
    orders.connect("a", following.send)
    assert (sent(ended), sent(following)) == ([], ["o"])
    orders.complete("a", pb.OrderOutcome(order_id="o", chunk_count=3))
    assert (await executing).chunk_count == 3


async def test_the_end_of_an_earlier_stream_does_not_disconnect_a_later_one() -> None:
    orders, earlier, later = PendingOrders(), ReportOutbox(), ReportOutbox()
    orders.connect("a", earlier.send)
    orders.connect("a", later.send)
    orders.disconnect("a", earlier.send)
    with pytest.raises(Unreachable):
        await orders.execute("a", pb.Order(order_id="o", unpin=pb.UnpinOrder(pin_id="p")), 0.01)
    assert sent(later) == ["o"]


def test_orders_that_an_instance_has_read_take_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    order = pb.Order(order_id="o", unpin=pb.UnpinOrder(pin_id="p"))
    monkeypatch.setattr(outbox_module, "MAX_WAITING_BYTES", 2 * order.ByteSize())
    outbox = ReportOutbox()
    for _ in range(10):
        outbox.send(order)
        outbox.send(order)
        assert sent(outbox) == ["o", "o"]
    assert outbox.error is None
    for _ in range(3):
        outbox.send(order)
    assert isinstance(outbox.error, ResyncRequired)


async def test_ended_orders_take_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders_module, "MAX_PENDING_BYTES", 100)
    monkeypatch.setattr(orders_module, "MAX_PENDING", 2)
    orders = PendingOrders()
    orders.connect("a", lambda _: None)
    for number in range(10):
        first, second = (pb.Order(order_id=f"{number}-{name}", drop=pb.DropOrder()) for name in "ab")
        waiting = asyncio.create_task(orders.execute("a", first, WAIT_SECONDS))
        await asyncio.sleep(0)
        with pytest.raises(Unreachable):
            await orders.execute("a", second, 0.01)
        if number % 2:
            waiting.cancel()
        else:
            orders.complete("a", pb.OrderOutcome(order_id=first.order_id))
        await asyncio.gather(waiting, return_exceptions=True)
        assert len(orders) == 0


TTL_SECONDS = 60.0


def ended(number: int) -> Operation:
    now = time.time()
    return Operation(
        name=f"clear-{number:016x}",
        kind="clear",
        progress=ClearProgress(),
        request=None,
        create_time=now,
        expire_time=now,
        end_time=now,
    )


def test_a_jump_of_the_wall_clock_loses_no_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(wall=time.time(), monotonic=0.0)
    clock = SimpleNamespace(time=lambda: now.wall, monotonic=lambda: now.monotonic)
    monkeypatch.setattr(operations_module, "time", clock)
    table = OperationTable(TTL_SECONDS)
    table.store(operation := ended(1))
    now.wall += 3600.0
    now.monotonic += TTL_SECONDS - 1.0
    table.store(operation)  # filed again: it is not kept for longer
    table.expire()
    assert table.find(operation.name) is operation
    now.wall -= 7200.0
    now.monotonic += 2.0
    table.expire()
    assert table.find(operation.name) is None
