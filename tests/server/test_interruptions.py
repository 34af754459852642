"""Calls that are cancelled or fail at any of their awaits hold, count and block nothing afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.longrunning import operations_pb2
from google.longrunning.operations_pb2_grpc import OperationsStub

from lmkv import rpc
from lmkv.config import CoordinatorConfig
from lmkv.config.kinds import OFF
from lmkv.rpc.lookup_call import LookupCall
from lmkv.rpc.messages import by_tokens
from lmkv.tiers import HOST
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1.cache_service_pb2 import LookupRequest, LookupResponse, LookupStreamRequest, MoveRequest, WatchRequest
from lmkv.v1.cache_service_pb2_grpc import CacheServiceStub
from lmkv.v1.chunk_pb2 import Position
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.coordinator.operations.orders import PendingOrders
from lmkv_server.coordinator.services.cache import CacheService, OperationsService
from lmkv_server.coordinator.services.reports import ReportService
from lmkv_server.node.engines.service import EngineService
from lmkv_server.node.fetch.holder_reader import HolderReader
from lmkv_server.node.fetch.pipeline import TransferPipeline
from lmkv_server.node.fetch.tier import PeerFetcher
from lmkv_server.node.handoff.sender import HandoffSender
from lmkv_server.node.node import Node
from lmkv_server.node.serving.service import PeerService
from lmkv_server.node.stack import TierStack
from lmkv_server.node.tiers.backend_tier import BackendTier
from tests.server.coordinator.cases import CHUNKS, PROMPT
from tests.server.coordinator.scripted_instance import ScriptedInstance
from tests.server.node.cases import chunk_keys
from tests.server.node.engine_client import EngineClient, absent_count
from tests.server.node.node_parts import node_config
from tests.server.node.peer_parts import SMALL, Parts, Taken, keys_of, no_grants
from tests.server.node.whole_nodes import load, store, until_free
from tests.support.interruptions import Interrupter, Kind
from tests.support.specs import LLAMA
from tests.waiting import WAIT_SECONDS, until

KEYS = keys_of(6)


PATIENCE_SECONDS = 0.5
"""Time after which clients of a call that does not answer give up: less than their own timeouts."""

Methods = tuple[tuple[type, str], ...]


async def ended(work: Awaitable[Any], *, patience_seconds: float = WAIT_SECONDS) -> None:
    """Waits until the work has ended, however it ends. A client that is less patient cancels it."""
    task = asyncio.ensure_future(work)
    await asyncio.wait([task], timeout=patience_seconds)
    assert task.done() or patience_seconds < WAIT_SECONDS, "it hangs"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def forget_failures(reader: Parts, *others: Parts) -> None:
    """Has a node ask others again at once that have failed."""
    for other in others:
        connection = reader.connections.get(other.holder(1))
        assert connection
        connection._retry_at = 0.0


def names(methods: Methods) -> str:
    """The names of methods."""
    return " ".join(f"{owner.__name__}.{name}" for owner, name in methods)


@pytest.mark.parametrize(
    "methods",
    [
        ((PeerFetcher, "fetch"),),
        ((HolderReader, "run"),),
        ((TransferPipeline, "_run_batch"),),
    ],
    ids=names,
)
async def test_a_fetch_leaves_nothing_reserved_held_or_granted(
    monkeypatch: pytest.MonkeyPatch, methods: Methods
) -> None:
    interrupter = Interrupter(monkeypatch, *methods)
    async with Parts("owner", chunk_count=64) as owner, Parts("reader") as reader:
        for key in KEYS:
            owner.put(key)
        for _ in interrupter.every_await():
            taken = Taken(reader)
            await ended(reader.fetch(SMALL, KEYS, [owner.holder(len(KEYS))], WAIT_SECONDS, taken))
            taken.let_go()
            await until(lambda: reader.tier.reserved_count == 0)
            reader.check_nothing_left()
            await no_grants(owner)
            reader.tier.drop(KEYS)
            forget_failures(reader, owner)


@pytest.mark.parametrize(
    "methods", [((HandoffSender, "run"),), ((PeerService, "Allocate"), (PeerService, "Commit"))], ids=names
)
async def test_a_handoff_leaves_nothing_reserved_held_or_granted(
    monkeypatch: pytest.MonkeyPatch, methods: Methods
) -> None:
    interrupter = Interrupter(monkeypatch, *methods, are_handlers=methods[0][0] is PeerService)
    async with Parts("prefill", chunk_count=64) as prefill, Parts("decode", chunk_count=64) as decode:
        for key in KEYS:
            prefill.put(key)
        for number, interruption in enumerate(interrupter.every_await()):
            handed = prefill.hand(f"r{number}", decode.instance_id, KEYS)
            await until(lambda: len(prefill.senders) == 0)
            assert handed.done() or "cancelled" in str(interruption)
            prefill.senders.drop(f"r{number}", decode.instance_id)
            await until(lambda: decode.tier.reserved_count == 0 == len(decode.receiver.handoffs))
            decode.check_nothing_left()
            prefill.check_nothing_left()
            await no_grants(prefill)
            decode.tier.drop(KEYS)
            forget_failures(prefill, decode)
            forget_failures(decode, prefill)


async def use(node: Node, engine_id: str) -> None:
    """What an engine does at a node whose chunks are on disk."""
    async with EngineClient(node, engine_id) as engine:
        found = await engine.lookup("request", chunk_keys(0, 1, 2), reserve_count=3)
        assert absent_count(found) == 3
        await load(engine, node.pool, "request", 0, 2)
        await engine.release("request")
        node.tier.drop(chunk_keys(0))
        request = pb.LoadRequest(fingerprint=engine.spec.fingerprint, chunk_keys=chunk_keys(0, 1, 2))
        await engine.stub.Load(request, timeout=WAIT_SECONDS)
        await engine.reserve(4)


@pytest.mark.parametrize(
    "methods",
    [
        ((EngineService, "attach"),),
        ((EngineService, "Load"),),
        ((TierStack, "ask"), (TierStack, "load")),
        ((BackendTier, "read"),),
    ],
    ids=names,
)
async def test_an_engine_leaves_nothing_reserved_or_held_at_its_node(
    monkeypatch: pytest.MonkeyPatch, runtime_dir: Path, methods: Methods
) -> None:
    interrupter = Interrupter(monkeypatch, *methods, are_handlers=True)
    config = node_config(
        runtime_dir, "n", local_disk=f"{runtime_dir}/disk", max_local_disk_size="64MB", enable_p2p=False
    )
    async with Node(config) as node:
        async with EngineClient(node) as engine:
            await store(engine, node.pool, 0, 1, 2)
            assert node.disk
            disk = node.disk
            await until(lambda: disk.chunk_count == 3)
        for number, _ in enumerate(interrupter.every_await()):
            await until(lambda: node.engines.attached_count == 0)
            node.tier.drop(chunk_keys(0, 1, 2))
            await ended(use(node, f"engine-{number}"), patience_seconds=PATIENCE_SECONDS)
            await until(lambda: node.engines.attached_count == 0)
            await until(lambda: node.tier.reserved_count == 0)
            assert await until_free(node)


async def use_coordinator(coordinator: Coordinator, channel: grpc.aio.Channel, number: int) -> None:
    """What nodes and operators do at a coordinator: they join, look up, watch, move and leave."""
    cache = CacheServiceStub(channel)
    fleet: dict[str, ScriptedInstance] = {}
    a, b = (
        ScriptedInstance(channel, fleet, f"{name}{number}", LLAMA, held) for name, held in (("a", CHUNKS), ("b", ()))
    )
    watch = cache.Watch(WatchRequest(), timeout=WAIT_SECONDS)
    lookups = LookupCall[LookupRequest, LookupResponse](cache, LookupStreamRequest, coordinator.address)
    try:
        async with a, b:
            await cache.Lookup(LookupRequest(prompt=by_tokens(PROMPT)), timeout=WAIT_SECONDS)
            await asyncio.gather(*(lookups.lookup(LookupRequest(prompt=by_tokens(PROMPT))) for _ in range(2)))
            await watch.read()
            source, target = (Position(instance_id=one.instance_id, tier=HOST) for one in (a, b))
            request = MoveRequest(prompt=by_tokens(PROMPT), old_position=source, new_position=target)
            operation = await cache.Move(request, timeout=WAIT_SECONDS)
            wait = operations_pb2.WaitOperationRequest(name=operation.name)
            await OperationsStub(channel).WaitOperation(wait, timeout=WAIT_SECONDS)
            await watch.read()
    finally:
        watch.cancel()
        await lookups.aclose()


@pytest.mark.parametrize(
    "methods",
    [
        ((ReportService, "Report"),),
        ((CacheService, "Lookup"), (CacheService, "LookupStream")),
        ((CacheService, "Watch"),),
        ((CacheService, "Move"), (OperationsService, "WaitOperation")),
        ((PendingOrders, "execute"),),
    ],
    ids=names,
)
async def test_calls_of_a_coordinator_leave_nothing_counted_locked_or_pending(
    monkeypatch: pytest.MonkeyPatch, methods: Methods
) -> None:
    interrupter = Interrupter(monkeypatch, *methods, are_handlers=True)
    kinds = (Kind.CANCEL,) if methods[0][1] == "Report" else Kind  # instances are patient: the others take long
    async with Coordinator(
        CoordinatorConfig(port=0, http_port=OFF, lease_ttl=WAIT_SECONDS, cluster_secret="hush")
    ) as coordinator:
        services = coordinator.tenants.unnamed
        async with rpc.open_channel(
            coordinator.address
        ) as channel:  # without an interruption: the first is the slowest
            await ended(use_coordinator(coordinator, channel, -1))
        for number, _ in enumerate(interrupter.every_await(*kinds)):
            patience_seconds = PATIENCE_SECONDS if number else 4 * PATIENCE_SECONDS  # it must reach an await
            async with rpc.open_channel(coordinator.address) as channel:
                await ended(use_coordinator(coordinator, channel, number), patience_seconds=patience_seconds)
            for instance in list(services.core.instances):  # ends operations that wait for them
                services.core.deregister(instance.info.instance_id, instance.info.epoch)
            await until(lambda: services.watch.watcher_count == 0, "no watch is open")
            await until(lambda: not services.reports._outboxes, "no stream of reports is open")
            await until(lambda: not services.fleet_operations.table.running(), "no operation runs")
            await until(lambda: coordinator._calls.in_flight_count == 0, "no call is in flight")
            assert len(services.reports._orders) == 0
            assert not services.fleet_operations.moves.locks._locked
            assert services.cache._selector._waiting_count == 0
            services.core.check()
