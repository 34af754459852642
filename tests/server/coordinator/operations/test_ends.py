"""Two coordinators that a partition separates end an operation once, in one way: its holders decide which."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

import grpc
import pytest
from google.longrunning import operations_pb2
from google.longrunning.operations_pb2_grpc import OperationsStub

from lmkv import rpc
from lmkv.errors import Unreachable
from lmkv.rpc.error_status import from_status
from lmkv.v1 import registry_service_pb2 as pb
from lmkv.v1.cache_service_pb2 import ClearRequest, ClearResult
from lmkv.v1.cache_service_pb2_grpc import CacheServiceStub
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.coordinator.operations import clears, operations
from lmkv_server.coordinator.operations import replicator as keeping
from lmkv_server.node.commands.operation_log import OperationLog
from tests.server.coordinator.cases import CHUNKS, LLAMA
from tests.server.coordinator.scripted_instance import ScriptedInstance, unpacked
from tests.waiting import POLL_SECONDS, WAIT_SECONDS, eventually, until

SHORT_SECONDS = 0.3
"""Deadline of an operation that is to pass."""
FORWARDED_UNTIL = 60.0
"""By a clock of the test: when a node offers a forwarded record."""
CLEAR = ClearRequest(instance_id="a", all=True, request_id="r")


class Connection(ScriptedInstance):
    """A node towards one of its two coordinators. Its records are those of the node."""

    def __init__(self, channel: grpc.aio.Channel, fleet: dict[str, ScriptedInstance], name: str, log: OperationLog):
        super().__init__(channel, fleet, name, LLAMA, CHUNKS)
        self.log = log
        self.lost: list[pb.OperationRecord] = []
        """Records that did not reach it."""
        self.loses_ends = False
        """Whether ends of operations do not reach it."""
        self.loses_all = False
        """Whether no record reaches it."""
        self.fails_orders = False
        """Whether the coordinator learns of failures only."""

    def keep(self, order: pb.RecordOrder) -> pb.OperationRecord | None:
        """See `ScriptedInstance`; the log is that of a real node."""
        return self.log.put(order.record, self.address, FORWARDED_UNTIL if order.forwarded else None)

    @property
    def address(self) -> str:
        """What the node calls this coordinator."""
        return str(id(self._registry))

    def refuses(self, record: pb.OperationRecord) -> bool:
        """See `ScriptedInstance`."""
        is_end = record.HasField("proposed_end") or record.operation.done
        is_lost = self.loses_all or (self.loses_ends and is_end)
        if is_lost:
            self.lost.append(record)
        return is_lost

    async def _drop(self, order: pb.DropOrder, outcome: pb.OrderOutcome) -> None:
        if self.fails_orders:
            outcome.status.CopyFrom(rpc.to_status(Unreachable("there is a partition")))
        else:
            await super()._drop(order, outcome)

    async def report(self, *, orphaned: bool = False) -> None:
        """Reports the records to this coordinator."""
        for record in self.log.since(0, ""):
            await self.report_record(record, orphaned=orphaned)


class Side:
    """A coordinator, and the nodes as it sees them."""

    def __init__(self, serving: Coordinator, channel: grpc.aio.Channel, epochs: dict[str, int]) -> None:
        self.serving = serving
        self.cache: Any = CacheServiceStub(channel)
        self.nodes: dict[str, Connection] = {}
        self._operations: Any = OperationsStub(channel)
        self._channel = channel
        self._epochs = epochs

    async def join(self, name: str, log: OperationLog, *, coordinator_count: int = 2) -> Connection:
        """Has a node join, in the epoch in which it joined the other coordinator."""
        node = self.nodes[name] = Connection(self._channel, {}, name, log)
        node.epoch = self._epochs.setdefault(name, node.epoch)
        node.coordinator_count = coordinator_count
        await node.join()
        return node

    async def get(self, name: str) -> operations_pb2.Operation:
        """What it says of an operation."""
        found: operations_pb2.Operation = await self._operations.GetOperation(
            operations_pb2.GetOperationRequest(name=name), timeout=5
        )
        return found

    async def is_done(self, name: str) -> bool:
        """Whether it has ended there."""
        return bool((await self.get(name)).done)

    async def ended(self, name: str) -> operations_pb2.Operation:
        """Waits for its end there."""
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                with suppress(grpc.RpcError):  # it may not have been reported yet
                    end: operations_pb2.Operation = await self._operations.WaitOperation(
                        operations_pb2.WaitOperationRequest(name=name), timeout=20
                    )
                    assert end.done
                    return end
                await asyncio.sleep(POLL_SECONDS)


class World:
    """Two coordinators, and nodes that join both."""

    def __init__(self, first: Side, second: Side) -> None:
        self.first = first
        self.second = second
        self.logs: dict[str, OperationLog] = {}

    async def join(self, *names: str) -> None:
        """Has nodes join both."""
        for name in names:
            self.logs[name] = OperationLog()
            for side in (self.first, self.second):
                await side.join(name, self.logs[name])

    async def restart(self, name: str) -> None:
        """Has a node leave, and join both in a new epoch, without its records."""
        self.logs[name] = log = OperationLog()
        sides = (self.first, self.second)
        for side in sides:
            await side.nodes[name].leave()
        await self.first.nodes[name].restart()
        self.second.nodes[name].epoch = self.first.nodes[name].epoch
        await self.second.nodes[name].join()
        for side in sides:
            side.nodes[name].log = log

    async def restart_at_first(self, name: str) -> None:
        """As `restart`, where there is no second coordinator any more."""
        self.logs[name] = self.first.nodes[name].log = OperationLog()
        await self.first.nodes[name].restart()

    def records(self, name: str) -> Sequence[pb.OperationRecord]:
        """The record that each holder keeps of an operation."""
        return [one for log in self.logs.values() for one in log.since(0, "") if one.operation.name == name]


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(keeping, "STORE_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(keeping, "SETTLE_SECONDS", 0.05)
    epochs: dict[str, int] = {}
    async with AsyncExitStack() as stack:
        sides = []
        for _ in range(2):
            serving = await stack.enter_async_context(Coordinator(port=0, lease_ttl=30.0, cluster_secret="hush"))
            sides.append(Side(serving, await stack.enter_async_context(rpc.open_channel(serving.address)), epochs))
        made = World(*sides)
        yield made
        for side in sides:
            for node in side.nodes.values():
                await node.leave()


async def begun(side: Side, *logs: OperationLog) -> str:
    """Starts a clear of `a` that fails for this coordinator; its name once these logs have its record."""
    side.nodes["a"].fails_orders = True
    name: str = (await side.cache.Clear(CLEAR, timeout=5)).name
    await until(lambda: all(any(one.operation.name == name for one in log.since(0, "")) for log in logs))
    return name


async def proposed_in_vain(*nodes: Connection) -> None:
    """Waits until a coordinator has proposed an end to nodes that it did not reach."""
    await until(lambda: all(any(one.HasField("proposed_end") for one in node.lost) for node in nodes))


async def test_a_coordinator_that_does_not_reach_the_only_holder_ends_nothing_and_learns_the_end(world: World) -> None:
    await world.join("a")
    first, second = world.first, world.second
    first.nodes["a"].loses_ends = True
    name = await begun(first, world.logs["a"])
    await proposed_in_vain(first.nodes["a"])
    assert not (await first.get(name)).done
    await second.nodes["a"].report(orphaned=True)
    end = await second.ended(name)
    assert unpacked(end.response, ClearResult).chunk_count == len(CHUNKS)
    assert not (await first.get(name)).done, "it cannot know"
    first.nodes["a"].loses_ends = False
    assert await first.ended(name) == end
    assert [one.operation.done for one in world.records(name)] == [True]


async def test_an_end_that_most_holders_have_accepted_is_the_end_at_the_other_coordinator(world: World) -> None:
    await world.join("a", "b", "c")
    first, second = world.first, world.second
    first.nodes["a"].loses_ends = True
    name = await begun(first, *world.logs.values())
    end = await first.ended(name)
    assert from_status(end.error).reason == "UNREACHABLE", "of the order"
    await second.nodes["a"].report(orphaned=True)
    assert await second.ended(name) == end
    assert not second.nodes["a"].orders, "it does not do the work again"


async def test_an_end_that_one_holder_accepted_before_its_coordinator_was_gone_is_proposed_again(world: World) -> None:
    await world.join("a", "b", "c")
    first, second = world.first, world.second
    first.nodes["b"].loses_ends = first.nodes["c"].loses_ends = True
    name = await begun(first, *world.logs.values())
    await until(lambda: any(one.HasField("proposed_end") for one in world.logs["a"].since(0, "")))
    await proposed_in_vain(first.nodes["b"], first.nodes["c"])
    assert not (await first.get(name)).done, "one of three is not enough"
    (record,) = world.logs["a"].since(0, "")
    await first.serving.__aexit__(None, None, None)
    await second.nodes["a"].report(orphaned=True)
    assert await second.ended(name) == record.proposed_end.operation
    assert not second.nodes["a"].orders
    await until(lambda: [one.operation.done for one in world.records(name)] == [True] * 3)


async def test_a_coordinator_that_reaches_one_of_two_holders_does_not_take_the_operation_over(world: World) -> None:
    await world.join("a", "b")
    first, second = world.first, world.second
    first.nodes["a"].loses_ends = first.nodes["b"].loses_ends = True
    name = await begun(first, *world.logs.values())
    await proposed_in_vain(*first.nodes.values())
    second.nodes["b"].loses_all = True
    await second.nodes["a"].report(orphaned=True)
    await until(lambda: bool(second.nodes["b"].lost))
    first.nodes["b"].loses_ends = False
    end = await first.ended(name)
    assert from_status(end.error).reason == "UNREACHABLE"
    assert not (await second.get(name)).done
    assert not second.nodes["a"].orders, "the other holder may have accepted an end"
    second.nodes["b"].loses_all = False
    assert await second.ended(name) == end
    assert not second.nodes["a"].orders
    assert await first.get(name) == end


async def test_a_coordinator_that_never_learns_the_end_says_so_and_stores_it_nowhere(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.join("a")
    first, second = world.first, world.second
    first.nodes["a"].loses_ends = True
    with monkeypatch.context() as patched:
        patched.setattr(clears, "TIMEOUT_SECONDS", SHORT_SECONDS)
        patched.setattr(operations, "SILENT_SECONDS", SHORT_SECONDS)
        name = await begun(first, world.logs["a"])
        await eventually(lambda: first.is_done(name), True)
    unknown = await first.get(name)
    assert from_status(unknown.error).reason == "UNREACHABLE"
    assert "its end is not known here" in unknown.error.message
    first.nodes["a"].loses_ends = first.nodes["a"].fails_orders = False
    await first.nodes["a"].report()
    later = (await first.cache.Clear(ClearRequest(instance_id="a", all=True), timeout=5)).name
    await first.ended(later)
    assert [one.operation.done for one in world.records(name)] == [False]
    await second.nodes["a"].report(orphaned=True)
    await second.ended(name)
    assert await first.get(name) == unknown


async def test_the_only_coordinator_ends_an_operation_also_without_its_holders(world: World) -> None:
    log = OperationLog()
    node = await world.first.join("a", log, coordinator_count=1)
    node.loses_ends = True
    name = await begun(world.first, log)
    end = await world.first.ended(name)
    assert from_status(end.error).reason == "UNREACHABLE", "of the order"


async def test_an_end_that_no_attempt_can_learn_is_stored_as_unknown_so_that_no_coordinator_waits_for_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.join("a", "b")
    first, second = world.first, world.second
    first.nodes["a"].loses_ends = first.nodes["b"].loses_ends = True
    name = await begun(first, *world.logs.values())
    await proposed_in_vain(*first.nodes.values())
    monkeypatch.setattr(operations, "SILENT_SECONDS", SHORT_SECONDS)
    await world.restart("b")
    await second.nodes["a"].report(orphaned=True)
    end = await second.ended(name)
    assert from_status(end.error).reason == "UNREACHABLE"
    assert "its end is not known here" in end.error.message
    await until(lambda: bool(world.records(name)) and all(one.operation.done for one in world.records(name)))
    assert not second.nodes["a"].orders
    await first.nodes["a"].report()
    assert await first.ended(name) == end


async def test_an_attempt_that_is_gone_before_it_reached_most_holders_is_followed_by_another_one(world: World) -> None:
    await world.join("a", "b", "c")
    first, second = world.first, world.second
    for node in first.nodes.values():
        node.loses_ends = True
    name = await begun(first, *world.logs.values())
    second.nodes["a"].loses_all = second.nodes["c"].loses_all = True
    await second.nodes["b"].report(orphaned=True)
    await until(lambda: [one.attempt for one in world.logs["b"].since(0, "")] == [2])
    await first.nodes["b"].report()  # so that the first attempt is over
    await until(lambda: [one.attempt for one in world.records(name)] == [2, 2, 2])
    await second.serving.__aexit__(None, None, None)
    await world.restart_at_first("b")
    for node in first.nodes.values():
        node.loses_ends = False
    log, node = world.logs["a"], first.nodes["a"]
    assert not any(one.orphaned for one in log.since(0, node.address)), "its coordinator may yet send it"
    due = log.next_due()
    assert due == FORWARDED_UNTIL
    log.reassign(due, due + 1, [node.address])
    (offered,) = log.since(0, node.address)
    await node.report_record(offered, orphaned=offered.orphaned)
    assert "there is a partition" in (await first.ended(name)).error.message, "the end of the work, not an unknown one"
