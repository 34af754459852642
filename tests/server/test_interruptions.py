"""Handlers that are cancelled or fail at any of their awaits hold, count and block as much afterwards as before.

A new RPC fails `test_every_rpc_is_interrupted`; a new counter is compared at once (`tests/support/held.py`).
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import pytest
from google.longrunning import operations_pb2 as operations
from google.longrunning.operations_pb2_grpc import OperationsServicer, OperationsStub
from starlette.types import Receive, Scope, Send

from lmkv import rpc
from lmkv.config import CoordinatorConfig, PickerConfig, ProxyConfig
from lmkv.errors import Unreachable
from lmkv.ext_proc import external_processor_pb2
from lmkv.internal.v1 import lookup_service_pb2, report_service_pb2
from lmkv.internal.v1.lookup_service_pb2_grpc import LookupServiceServicer, LookupServiceStub
from lmkv.keys import join_keys
from lmkv.rpc.lookup_call import LookupCall
from lmkv.rpc.messages import by_tokens
from lmkv.runtime.turns import LARGE_BYTES
from lmkv.tiers import HOST
from lmkv.v1 import cache_service_pb2 as cache_pb
from lmkv.v1 import engine_service_pb2 as engine_pb
from lmkv.v1 import peer_service_pb2 as peer_pb
from lmkv.v1 import registry_service_pb2 as registry_pb
from lmkv.v1.cache_service_pb2_grpc import CacheServiceServicer, CacheServiceStub
from lmkv.v1.chunk_pb2 import HINT_ACTION_PIN, Position
from lmkv.v1.engine_service_pb2_grpc import EngineServiceServicer
from lmkv.v1.peer_service_pb2_grpc import PeerServiceServicer, PeerServiceStub
from lmkv.v1.registry_service_pb2_grpc import RegistryServiceServicer
from lmkv_client.engine import Engine, Written
from lmkv_client.engine.node.connection import AttachConnection
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.coordinator.http.app import CoordinatorApp
from lmkv_server.coordinator.operations.orders import PendingOrders
from lmkv_server.coordinator.services.reports import ReportService
from lmkv_server.http.server import HttpOptions, HttpServer
from lmkv_server.node.fetch.holder_reader import HolderReader
from lmkv_server.node.fetch.pipeline import TransferPipeline
from lmkv_server.node.fetch.tier import PeerFetcher
from lmkv_server.node.handoff.sender import HandoffSender
from lmkv_server.node.node import Node
from lmkv_server.node.stack import TierStack
from lmkv_server.node.tiers.backend_tier import BackendTier
from lmkv_server.proxy.app import ProxyApp
from lmkv_server.proxy.picker.picker import Picker
from lmkv_server.proxy.picker.service import ExternalProcessorService
from lmkv_server.proxy.proxy import Proxy
from lmkv_server.webhook.app import make_app
from tests.client.engine.nodes import connector_config
from tests.server.coordinator.cases import CHUNKS, KEYS, PROMPT
from tests.server.coordinator.scripted_instance import ScriptedInstance
from tests.server.node.cases import chunk_keys
from tests.server.node.engine_client import EngineClient, absent_count
from tests.server.node.node_parts import node_config
from tests.server.node.peer_parts import SMALL, Parts, Taken, no_grants
from tests.server.node.peer_parts import keys_of as peer_keys_of
from tests.server.node.whole_nodes import SPEC, load, store, until_free
from tests.server.proxy.pd.test_prefill_decode import COMPLETIONS, PLAIN, completion
from tests.server.proxy.picker.published import Gateway
from tests.server.proxy.scripted_engine import ScriptedEngine
from tests.support.held import held
from tests.support.interruptions import Cutter, Interrupter, Kind
from tests.support.node_stub import NodeStub, registration
from tests.support.specs import LLAMA
from tests.waiting import WAIT_SECONDS, eventually, until

PATIENCE_SECONDS = 0.5
"""Time after which clients of a call that does not answer give up: less than their own timeouts."""
PEER_KEYS = peer_keys_of(6)
SETTLE_SECONDS = 0.02
LEAK_SECONDS = 20.0
"""Time after which what is left counts as a leak: what ends by itself does so sooner."""
LLAMA_PROMPT = by_tokens(PROMPT)


async def ended(work: Awaitable[Any], patience_seconds: float = PATIENCE_SECONDS) -> None:
    """Waits until the work has ended, however it ends; a client that is less patient cancels it."""
    task = asyncio.ensure_future(work)
    await asyncio.wait([task], timeout=patience_seconds)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class Operators:
    """A coordinator, its clients, and two instances of which one holds a prompt."""

    by_use: Collection[str] = ()

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def start(self, _: Path) -> None:
        self.coordinator = await self._stack.enter_async_context(
            Coordinator(CoordinatorConfig(port=0, http_port=0, lease_ttl=WAIT_SECONDS, cluster_secret="hush"))
        )
        self.channel = await self._stack.enter_async_context(rpc.open_channel(self.coordinator.address))
        self.cache: Any = CacheServiceStub(self.channel)
        self.operations: Any = OperationsStub(self.channel)
        self.node: Any = NodeStub(self.channel)
        self.lookups: Any = LookupServiceStub(self.channel)
        fleet: dict[str, ScriptedInstance] = {}
        self.full, self.empty = (ScriptedInstance(self.channel, fleet, name, LLAMA) for name in ("full", "empty"))
        for one in (self.full, self.empty):
            await self._stack.enter_async_context(one)
        self.core = self.coordinator.tenants.unnamed.core
        self.table = self.coordinator.tenants.unnamed.fleet_operations.table

    def roots(self) -> tuple[object, ...]:
        return (self.coordinator,)

    async def restore(self) -> None:
        """Has everything that calls may leave behind on purpose removed."""
        for instance in list(self.core.instances):
            if instance.info.instance_id not in ("full", "empty"):
                self.core.deregister(instance.info.instance_id, instance.info.epoch)
        for operation in list(self.table.running()):
            operation.cancelled.set()
        await until(lambda: not self.table.running(), "no operation runs")
        for pin in (await self.cache.ListPins(cache_pb.ListPinsRequest(), timeout=WAIT_SECONDS)).pins:
            await self.cache.Unpin(cache_pb.UnpinRequest(pin_id=pin.pin_id), timeout=WAIT_SECONDS)
        await self.empty.evict(list(CHUNKS))
        await self.full.store(CHUNKS)

        await eventually(self._holders, [("full", 3)])

    async def _holders(self) -> list[tuple[str, int]]:
        found = await self.cache.Lookup(cache_pb.LookupRequest(prompt=LLAMA_PROMPT), timeout=WAIT_SECONDS)
        return [(one.instance_id, one.matched_chunk_count) for one in found.holders]

    def tidy(self) -> None:
        """Does nothing: orders have ended with their operations."""

    async def ended(self, operation: Any) -> None:
        wait = operations.WaitOperationRequest(name=operation.name)
        await self.operations.WaitOperation(wait, timeout=WAIT_SECONDS)


async def copy(fleet: Operators) -> Any:
    ends = (Position(instance_id=one, tier=HOST) for one in ("full", "empty"))
    source, target = ends
    request = cache_pb.MoveRequest(prompt=LLAMA_PROMPT, old_position=source, new_position=target, copy=True)
    return await fleet.cache.Move(request, timeout=WAIT_SECONDS)


async def move(fleet: Operators) -> None:
    await fleet.ended(await copy(fleet))


async def lookup(fleet: Operators) -> None:
    await fleet.cache.Lookup(cache_pb.LookupRequest(prompt=LLAMA_PROMPT), timeout=WAIT_SECONDS)


async def lookup_stream(fleet: Operators) -> None:
    lookups = LookupCall[cache_pb.LookupRequest, cache_pb.LookupResponse](
        fleet.cache, cache_pb.LookupStreamRequest, fleet.coordinator.address
    )
    try:
        await asyncio.gather(*(lookups.lookup(cache_pb.LookupRequest(prompt=LLAMA_PROMPT)) for _ in range(2)))
    finally:
        await lookups.aclose()


async def explain(fleet: Operators) -> None:
    await fleet.cache.Explain(cache_pb.ExplainRequest(prompt=LLAMA_PROMPT), timeout=WAIT_SECONDS)


async def pin(fleet: Operators) -> str:
    request = cache_pb.PinRequest(prompt=LLAMA_PROMPT, position=Position(instance_id="full", tier=HOST))
    return str((await fleet.cache.Pin(request, timeout=WAIT_SECONDS)).pin.pin_id)


async def unpin(fleet: Operators) -> None:
    await fleet.cache.Unpin(cache_pb.UnpinRequest(pin_id=await pin(fleet)), timeout=WAIT_SECONDS)


async def list_pins(fleet: Operators) -> None:
    await fleet.cache.ListPins(cache_pb.ListPinsRequest(), timeout=WAIT_SECONDS)


async def hint(fleet: Operators) -> None:
    request = cache_pb.HintRequest(prompt=LLAMA_PROMPT, instance_id="full", action=HINT_ACTION_PIN)
    await fleet.cache.Hint(request, timeout=WAIT_SECONDS)


async def clear(fleet: Operators) -> None:
    request = cache_pb.ClearRequest(prompt=LLAMA_PROMPT, instance_id="full")
    await fleet.ended(await fleet.cache.Clear(request, timeout=WAIT_SECONDS))


async def drain(fleet: Operators) -> None:
    async with ScriptedInstance(fleet.channel, {}, "drained", LLAMA):
        request = cache_pb.DrainRequest(instance_id="drained", destination_instance_ids=["empty"])
        started = await fleet.cache.Drain(request, timeout=WAIT_SECONDS)
        await fleet.operations.CancelOperation(operations.CancelOperationRequest(name=started.name))


async def watch(fleet: Operators) -> None:
    watching = fleet.cache.Watch(cache_pb.WatchRequest(), timeout=WAIT_SECONDS)
    try:
        await watching.read()
        await fleet.full.evict(KEYS[-1:])
        await watching.read()
    finally:
        watching.cancel()


async def register(fleet: Operators) -> None:
    instance = registry_pb.Instance(instance_id="other", epoch=1, specs=[LLAMA.to_proto()])
    await fleet.node.Register(registration(instance), timeout=WAIT_SECONDS)


async def deregister(fleet: Operators) -> None:
    await register(fleet)
    await fleet.node.Deregister(registry_pb.DeregisterRequest(instance_id="other", epoch=1), timeout=WAIT_SECONDS)


async def list_instances(fleet: Operators) -> None:
    await fleet.node.ListInstances(registry_pb.ListInstancesRequest(), timeout=WAIT_SECONDS)


async def locate_instance(fleet: Operators) -> None:
    await fleet.node.LocateInstance(registry_pb.LocateInstanceRequest(instance_id="full"), timeout=WAIT_SECONDS)


async def report(fleet: Operators) -> None:
    async with ScriptedInstance(fleet.channel, {}, "other", LLAMA, CHUNKS) as other:
        await other.evict(KEYS[:1])
        request = cache_pb.PinRequest(prompt=LLAMA_PROMPT, position=Position(instance_id="other", tier=HOST))
        with suppress(grpc.RpcError):
            await fleet.cache.Pin(request, timeout=WAIT_SECONDS)


def by_node() -> Any:
    return lookup_service_pb2.LookupRequest(
        chunk_keys=join_keys(KEYS), fingerprint=LLAMA.fingerprint, excluded_instance_id="empty"
    )


async def node_lookup(fleet: Operators) -> None:
    await fleet.lookups.Lookup(by_node(), timeout=WAIT_SECONDS)


async def node_lookup_stream(fleet: Operators) -> None:
    lookups: Any = LookupCall(fleet.lookups, lookup_service_pb2.LookupStreamRequest, fleet.coordinator.address)
    try:
        await asyncio.gather(*(lookups.lookup(by_node()) for _ in range(2)))
    finally:
        await lookups.aclose()


def operation(name: str, request: Callable[..., Any]) -> Callable[[Operators], Awaitable[None]]:
    async def call(fleet: Operators) -> None:
        started = await copy(fleet)
        await getattr(fleet.operations, name)(request(name=started.name), timeout=WAIT_SECONDS)

    return call


async def list_operations(fleet: Operators) -> None:
    await copy(fleet)
    await fleet.operations.ListOperations(operations.ListOperationsRequest(), timeout=WAIT_SECONDS)


async def delete_operation(fleet: Operators) -> None:
    started = await copy(fleet)
    await fleet.ended(started)
    await fleet.operations.DeleteOperation(operations.DeleteOperationRequest(name=started.name), timeout=WAIT_SECONDS)


class Peers:
    """Two nodes without engines, of which one holds chunks."""

    by_use: Collection[str] = ()

    transfer_channel = "nixl"

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._handoff_count = 0

    def _part(self, instance_id: str) -> Parts:
        return Parts(instance_id, chunk_count=64, transfer_channel=self.transfer_channel)

    async def start(self, _: Path) -> None:
        self.owner = await self._stack.enter_async_context(self._part("owner"))
        self.reader = await self._stack.enter_async_context(self._part("reader"))
        self.channel = await self._stack.enter_async_context(rpc.open_channel(self.owner.address))
        for key in PEER_KEYS:
            self.owner.put(key)

    def roots(self) -> tuple[object, ...]:
        return (vars(self.owner), vars(self.reader))

    async def restore(self) -> None:
        await until(lambda: len(self.owner.senders) == 0, "no handoff is sent")
        self.owner.senders.drop(f"r{self._handoff_count}", self.reader.instance_id)
        await until(lambda: self.reader.tier.reserved_count == 0 == len(self.reader.receiver.handoffs), "none is here")
        await no_grants(self.owner)
        # The reader's place of a grant is free once the owner has answered the release.
        await until(lambda: not any(node.connections._tasks for node in (self.owner, self.reader)), "all is released")
        self.reader.check_nothing_left()
        self.owner.check_nothing_left()
        self.tidy()
        for node, other in ((self.owner, self.reader), (self.reader, self.owner)):
            if connection := node.connections.get(other.holder(1)):
                connection._retry_at = 0.0  # asks again at once, although the other has failed

    def tidy(self) -> None:
        """Drops what transfers have brought, also those that ended late."""
        self.reader.tier.drop(PEER_KEYS)

    async def fetch(self) -> None:
        taken = Taken(self.reader)
        try:
            await self.reader.fetch(SMALL, PEER_KEYS, [self.owner.holder(len(PEER_KEYS))], WAIT_SECONDS, taken)
        finally:
            taken.let_go()

    async def init(self) -> None:
        request = peer_pb.InitRequest(instance_id="x", epoch=1, spec=SMALL.to_proto(), channels=["nixl"])
        await PeerServiceStub(self.channel).Init(request, timeout=WAIT_SECONDS)

    async def hand(self) -> None:
        self._handoff_count += 1
        await self.owner.hand(f"r{self._handoff_count}", self.reader.instance_id, PEER_KEYS)


class Engines:
    """A node with a disk, and engines that attach to it."""

    by_use: Collection[str] = ()

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._engine_count = 0

    async def start(self, folder: Path) -> None:
        config = node_config(folder, "n", local_disk=f"{folder}/disk", max_local_disk_size="64MB", enable_pd=True)
        self.node = await self._stack.enter_async_context(Node(config))
        async with EngineClient(self.node) as engine:
            await store(engine, self.node.pool, 0, 1, 2)
            assert self.node.disk
            assert self.node.service._buffers
            self.buffers = self.node.service._buffers
            disk = self.node.disk
            await until(lambda: disk.chunk_count == 3)
        await self.restore()

    def roots(self) -> tuple[object, ...]:
        return (self.node,)

    async def restore(self) -> None:
        await until(lambda: self.node.engines.attached_count == 0, "no engine is attached")
        self.tidy()
        await until_free(self.node)

    def tidy(self) -> None:
        """Drops what reads have brought, also those that ended late."""
        self.node.tier.drop(chunk_keys(0, 1, 2))

    async def use(self) -> None:
        self._engine_count += 1
        async with EngineClient(self.node, f"engine-{self._engine_count}", wants_tier_changes=True) as engine:
            found = await engine.lookup("request", chunk_keys(0, 1, 2), reserve_count=3)
            assert absent_count(found) == 3
            await load(engine, self.node.pool, "request", 0, 2)
            await engine.release("request")
            self.node.tier.drop(chunk_keys(0))
            await engine.hear("settled")
            await engine.reserve(4)
            await self.load(engine)

    async def load(self, engine: EngineClient) -> None:
        request = engine_pb.LoadRequest(fingerprint=SPEC.fingerprint, chunk_keys=chunk_keys(0, 1, 2))
        await engine.stub.Load(request, timeout=WAIT_SECONDS)

    async def tools(self) -> None:
        async with EngineClient(self.node, "engine") as engine:
            request = engine_pb.EngineServiceLookupRequest(fingerprint=SPEC.fingerprint, chunk_keys=chunk_keys(0, 1))
            await engine.stub.Lookup(request, timeout=WAIT_SECONDS)
            await self.load(engine)
            await engine.lookup("request", chunk_keys(0, 1, 2))
            release = engine_pb.EngineServiceReleaseRequest(engine_id="engine", lookup_id="request")
            await engine.stub.Release(release, timeout=WAIT_SECONDS)

    async def audit(self) -> None:
        async with EngineClient(self.node, "engine") as engine:
            request = engine_pb.AuditRequest(chunk_count=1)
            request.duration.FromSeconds(60)
            auditing = engine.stub.Audit(request)
            try:
                await auditing.read()
                await engine.say(audited=engine_pb.AuditedChunks(chunk_count=1))
                await auditing.read()
            finally:
                auditing.cancel()

    async def lend(self) -> None:
        async with EngineClient(self.node, "engine") as engine:
            lending = engine.stub.Lend()
            size_bytes = engine.welcomed.device_buffer_bytes
            part = engine_pb.BufferPart(engine_id="engine", rank=0, buffer_size_bytes=size_bytes)
            await lending.write(engine_pb.LendRequest(part=part))
            await until(lambda: lending.done() or self.buffers.lent_bytes > 0)
            lending.cancel()


ATTACHED_AGAIN = {
    "AttachConnection._was_polled": "whether the engine has received since a thread last looked",
    "AttachConnection._wakeup": "the number of a new file",
    "NodeClient._attach_count": "numbers attachments",
    "Pool.address": "another mapping of the same memory",
    "Pool.fd": "the same",
    "_Credit()": "one for each message that grants credits",
    "len Counters._values": "counters",
    "len PromptAccounts._reports": "reports for the next message, bounded by their number",
}
"""What a connection that ends changes in an engine."""


class Sessions(Engines):
    """The same node, and an engine whose threads keep a session with it."""

    by_use = ATTACHED_AGAIN

    async def start(self, folder: Path) -> None:
        await super().start(folder)
        address = str(self.node.config.engine_socket)
        config = connector_config(folder, node_address=address, lookup_timeout=WAIT_SECONDS, enable_pd=True)
        self.engine = await asyncio.to_thread(Engine.attach, SPEC, config=config)
        self._stack.push_async_callback(asyncio.to_thread, self.engine.close)

    def roots(self) -> tuple[object, ...]:
        return (self.node, self.engine)

    async def restore(self) -> None:
        if hasattr(self, "engine"):
            await until(lambda: self.engine.is_attached, "the engine is attached again")
            session = self.engine._dispatcher._session
            await until(lambda: not session.lookups and session.credits[0].requested_count == 0)
            await eventually(self._credit_counts, (2, 2))
        self.tidy()
        await until(lambda: not any(chunk.holds for chunk in self.node.tier), "no chunk is held")
        self.node.tier.check()

    async def _credit_counts(self) -> tuple[int, int]:
        """Those of the node and of the engine, which has taken two: it has none while it attaches again, and keeps the
        earlier ones until it has noticed that its connection has ended."""
        extents = await asyncio.to_thread(self.engine.reserve, 2, timeout=WAIT_SECONDS)
        self.engine.put_back(extents)
        return self.node.tier.reserved_count, len(self.engine._dispatcher._session.credits[0])

    async def use(self) -> None:
        using = asyncio.create_task(asyncio.to_thread(self._use))
        try:
            await asyncio.shield(using)
        finally:
            await asyncio.wait([using])  # its thread continues when it is not waited for any more

    def _use(self) -> None:
        keys = chunk_keys(0, 1, 2)
        with self.engine.lookup(keys, timeout=WAIT_SECONDS) as held:
            held.load(1, timeout=WAIT_SECONDS)
            extents = self.engine.reserve(3, timeout=WAIT_SECONDS)
            self.engine.commit(Written.chain(keys, extents[:1]))
            self.engine.put_back(extents[1:])


class OfHttp(Operators):
    """The same coordinator, and a client of its HTTP port."""

    async def start(self, folder: Path) -> None:
        await super().start(folder)
        self.client = await self._stack.enter_async_context(client_of(self.coordinator.url))

    async def lookup(self) -> None:
        tokens = [*PROMPT, *[1] * LARGE_BYTES]
        assert (await self.client.post("/lookup", json={"tokens": tokens})).status_code == 200

    async def unary(self) -> None:
        selector = {"prompt": {"tokens": {"token_ids": PROMPT}}}
        assert (await self.client.post("/lmkv.v1.CacheService/Lookup", json=selector)).status_code == 200

    async def watch(self) -> None:
        async with self.client.stream("GET", "/lmkv.v1.CacheService/Watch") as response:
            assert await anext(response.aiter_lines())


class Proxies:
    """A proxy in front of a prefill engine and a decode engine."""

    by_use: Collection[str] = ()

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def start(self, _: Path) -> None:
        self.prefiller, self.decoder = await self._engine("p-1"), await self._engine("d-1")
        config = ProxyConfig(
            port=0,
            prefiller_port=(self.prefiller.port,),
            decoder_port=(self.decoder.port,),
            health_interval=3600.0,
            health_timeout=WAIT_SECONDS,
            stats_interval=3600.0,
            stop_timeout=0.0,
        )
        self.proxy = await self._stack.enter_async_context(Proxy(config))
        self.client = await self._stack.enter_async_context(client_of(self.proxy.url))
        await until(lambda: all(one.is_healthy for one in self.proxy.pools.engines))

    async def _engine(self, instance_id: str) -> ScriptedEngine:
        engine = ScriptedEngine(instance_id)
        await engine.start()
        self._stack.push_async_callback(engine.stop)
        return engine

    def roots(self) -> tuple[object, ...]:
        return (self.proxy,)

    async def restore(self) -> None:
        await self.client.post("/engines/add", json={"url": self.decoder.url, "role": "decode"})
        await until(lambda: [bool(one.models) for one in self.proxy.pools.engines] == [True, True], "both are known")
        await until(lambda: not any(one.in_flight_count for one in self.proxy.pools.engines), "no request is counted")
        self.tidy()

    def tidy(self) -> None:
        """Has all engines asked again."""
        for engine in self.proxy.pools.engines:
            engine.mark_healthy()

    async def complete(self) -> None:
        await self.client.post(COMPLETIONS, json=completion(PLAIN, max_tokens=3, ignore_eos=True))

    async def stream(self) -> None:
        body = completion(PLAIN, max_tokens=3, ignore_eos=True, stream=True, padding="x" * 4 * LARGE_BYTES)
        await self.client.post(COMPLETIONS, json=body)

    async def pass_on(self) -> None:
        assert (await self.client.get("/v1/models")).status_code == 200

    async def change(self) -> None:
        for name in ("remove", "add"):
            body = {"url": self.decoder.url} | ({"role": "decode"} if name == "add" else {})
            assert (await self.client.post(f"/engines/{name}", json=body)).status_code == 200


class Pickers:
    """A picker in front of an engine."""

    by_use: Collection[str] = ()

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def start(self, _: Path) -> None:
        engine = ScriptedEngine("e-1")
        await engine.start()
        self._stack.push_async_callback(engine.stop)
        config = PickerConfig(
            port=0,
            metrics_port=0,
            health_interval=3600.0,
            health_timeout=WAIT_SECONDS,
            stop_timeout=0.0,
            policy="least_loaded",
            engines=(engine.url,),
        )
        self.picker = await self._stack.enter_async_context(Picker(config))
        channel = await self._stack.enter_async_context(grpc.aio.insecure_channel(self.picker.address))
        self.gateway = Gateway(channel)
        await until(lambda: any(one.is_healthy for one in self.picker.engines))

    def roots(self) -> tuple[object, ...]:
        return (self.picker,)

    async def restore(self) -> None:
        self.tidy()

    def tidy(self) -> None:
        """Has the engine picked again."""
        for engine in self.picker.engines:
            engine.mark_healthy()

    async def pick(self) -> None:
        await self.gateway.pick(b'{"prompt": "x", "model": "scripted"}', parts=2)


class Webhooks:
    """A webhook, which stands for each tenant's."""

    by_use: Collection[str] = ()

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def start(self, _: Path) -> None:
        server = HttpServer(Webhook(), HttpOptions(host="127.0.0.1", port=0))
        await server.start()
        self._stack.push_async_callback(server.aclose)
        self.client = await self._stack.enter_async_context(client_of(f"http://127.0.0.1:{server.port}"))

    def roots(self) -> tuple[object, ...]:
        return ()

    async def restore(self) -> None: ...

    def tidy(self) -> None: ...

    async def mutate(self) -> None:
        await self.client.post("/mutate", json={"padding": "x" * 4 * LARGE_BYTES})


class Webhook:
    """The application, as a class whose calls can be interrupted."""

    def __init__(self) -> None:
        self._app = make_app({})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def client_of(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, trust_env=False, timeout=WAIT_SECONDS)


class Row(NamedTuple):
    """What is interrupted, and what uses it."""

    fleet: type[Any]
    methods: tuple[tuple[type, str], ...]
    use: Callable[[Any], Awaitable[object]]
    is_handler: bool = True
    kinds: tuple[Kind, ...] = tuple(Kind)

    def __str__(self) -> str:
        names = " ".join(f"{owner.__name__}.{name}" for owner, name in self.methods)
        return f"{names} {self.use.__name__}" if "__call__" in names else names


def of(fleet: type, servicer: type, **uses: Callable[[Any], Awaitable[object]]) -> Iterator[Row]:
    """A row for each RPC of a service."""
    known: list[type] = servicer.__subclasses__()
    (implementation,) = [one for one in known if one.__module__.startswith("lmkv_server.")]
    for name, use in uses.items():
        yield Row(fleet, ((implementation, name),), use)


ROWS = [
    *of(
        Operators,
        CacheServiceServicer,
        Lookup=lookup,
        LookupStream=lookup_stream,
        Explain=explain,
        Move=move,
        Pin=pin,
        Unpin=unpin,
        ListPins=list_pins,
        Hint=hint,
        Clear=clear,
        Drain=drain,
        Watch=watch,
    ),
    *of(
        Operators,
        RegistryServiceServicer,
        Register=register,
        Deregister=deregister,
        ListInstances=list_instances,
        LocateInstance=locate_instance,
    ),
    *of(Operators, LookupServiceServicer, Lookup=node_lookup, LookupStream=node_lookup_stream),
    *of(
        Operators,
        OperationsServicer,
        GetOperation=operation("GetOperation", operations.GetOperationRequest),
        ListOperations=list_operations,
        WaitOperation=operation("WaitOperation", operations.WaitOperationRequest),
        CancelOperation=operation("CancelOperation", operations.CancelOperationRequest),
        DeleteOperation=delete_operation,
    ),
    Row(Operators, ((ReportService, "Report"),), report, kinds=(Kind.CANCEL,)),  # instances wait long for answers
    Row(Operators, ((PendingOrders, "execute"),), move),
    Row(OfHttp, ((CoordinatorApp, "__call__"),), OfHttp.lookup),
    Row(OfHttp, ((CoordinatorApp, "__call__"),), OfHttp.unary),
    Row(OfHttp, ((CoordinatorApp, "__call__"),), OfHttp.watch),
    Row(Proxies, ((ProxyApp, "__call__"),), Proxies.complete),
    Row(Proxies, ((ProxyApp, "__call__"),), Proxies.stream),
    Row(Proxies, ((ProxyApp, "__call__"),), Proxies.pass_on),
    Row(Proxies, ((ProxyApp, "__call__"),), Proxies.change),
    Row(Pickers, ((ExternalProcessorService, "Process"),), Pickers.pick),
    Row(Webhooks, ((Webhook, "__call__"),), Webhooks.mutate),
    *of(
        Peers,
        PeerServiceServicer,
        Init=Peers.init,
        Acquire=Peers.fetch,
        Allocate=Peers.hand,
        Commit=Peers.hand,
        Release=Peers.fetch,
    ),
    Row(Peers, ((PeerFetcher, "fetch"),), Peers.fetch, is_handler=False),
    Row(Peers, ((HolderReader, "run"),), Peers.fetch, is_handler=False),
    Row(Peers, ((TransferPipeline, "_run_batch"),), Peers.fetch, is_handler=False),
    Row(Peers, ((HandoffSender, "run"),), Peers.hand, is_handler=False),
    *of(
        Engines,
        EngineServiceServicer,
        attach=Engines.use,
        Lookup=Engines.tools,
        Load=Engines.tools,
        Release=Engines.tools,
        Lend=Engines.lend,
        Audit=Engines.audit,
    ),
    Row(Engines, ((TierStack, "ask"), (TierStack, "load")), Engines.use, is_handler=False),
    Row(Engines, ((BackendTier, "read"),), Engines.use, is_handler=False),
]


BY_USE = {
    "Counts()": "samples of the last hour, one at most in ten seconds",
    "Series()": "the same",
    "len History._last": "the same",
    "len History._series": "the same",
    "len Series.counts": "the same",
    "len Series.used_bytes": "the same",
    "LayoutEvent()": "the last events, bounded by their bytes",
    "len _Queue.events": "the same",
    "Operation()": "ended operations, kept for `operation_ttl` and bounded by their bytes",
    "len OperationTable._ended": "the same",
    "len OperationTable._ended_since": "the same",
    "len OperationTable._sizes": "the same",
    "Budget.used_bytes": "the same",
    "len Operations.ended_counts": "a counter for each kind and end",
    "len Engine.first_token_seconds": "the last latencies, bounded by their number",
    "Channels._serving": "for a second after each read",
    "PeerSession()": "sessions of peers, bounded by their number",
    "PeerReader()": "the same",
    "len ReadAccess._readers": "the same",
    "SenderStats.failed_count": "a counter of what failed",
    "len HandoffTable._ended": "handoffs that have ended, bounded by their number and a time",
    "_Histogram()": "latencies of calls, for each RPC and code",
    "len ServerCalls._histograms": "the same",
    "len _Histogram.buckets": "the same",
    "len PromptExplainer._reports": "the last reports of prompts, bounded by their number",
    "len FreeList._starts": "free extents of the pool, bounded by its size: uses leave them in pieces or merged",
    "len FreeList._sizes": "the same",
    "len FreeList._by_size": "the same",
    "len FreeList._large": "the same",
    "len DaemonThreads._threads": "threads for blocking calls, bounded by their number",
    "len CircuitBreaker._were_wrong": "outcomes of the last audits, bounded by their number",
}
"""What more use makes larger, and why that is no leak. Numbers that each use changes are counters: no entry."""


def is_brief(name: str) -> bool:
    """Whether it counts tasks, which come and go with connections: fewer are no loss."""
    return name.startswith("task ") or name.endswith("._tasks")


async def settled(fleet: Any) -> Counter[str]:
    """What it holds once that changes no more."""
    before, now = Counter[str](), held(*fleet.roots())
    while now != before:
        await asyncio.sleep(SETTLE_SECONDS)
        before, now = now, held(*fleet.roots())
    return now


def _has_at_most(fleet: Any, name: str, number: int) -> bool:
    return held(*fleet.roots())[name] <= number


async def check(fleet: Any, interrupter: Interrupter | Cutter, row: Row) -> None:
    """Uses a fleet, with each await interrupted: afterwards it must hold what it held before."""
    gc.collect()  # what earlier tests have left to it
    await fleet.restore()
    counted: list[Counter[str]] = []
    for _ in range(4):
        await asyncio.wait_for(row.use(fleet), WAIT_SECONDS)
        await fleet.restore()
        counted.append(await settled(fleet))
    before = counted[-1]
    by_use = {*BY_USE, *fleet.by_use}
    for name in set().union(*counted[1:]):
        numbers = {one[name] for one in counted[1:]}
        if is_brief(name):
            before[name] = max(numbers)
        elif len(numbers) > 1:
            if name in BY_USE or not (name.startswith("len ") or name.endswith("()")):  # the latter are counters
                by_use.add(name)
            else:
                before[name] = min(numbers)  # what was still on its way at one of these moments ends
                added = f"each use adds to {name}; if that is no leak, say why in BY_USE"
                await until(partial(_has_at_most, fleet, name, before[name]), added, LEAK_SECONDS)

    def changed() -> str:
        fleet.tidy()
        now = held(*fleet.roots())
        names = sorted(
            name
            for name in now | before
            if name not in by_use and (now[name] > before[name] or (now[name] < before[name] and not is_brief(name)))
        )
        return ", ".join(f"{name}: {before[name]} -> {now[name]}" for name in names)

    for interruption in interrupter.every_await(*row.kinds, may_be_none=True):
        await ended(row.use(fleet))
        interruption.end()
        await fleet.restore()
        deadline = time.monotonic() + LEAK_SECONDS
        while changed() and time.monotonic() < deadline:
            await asyncio.sleep(SETTLE_SECONDS)
            if changed():  # an order may have been carried out since
                await fleet.restore()
        assert not changed(), str(interruption)


@pytest.mark.parametrize("row", ROWS, ids=str)
async def test_nothing_is_left(monkeypatch: pytest.MonkeyPatch, runtime_dir: Path, row: Row) -> None:
    interrupter = Interrupter(monkeypatch, *row.methods, are_handlers=row.is_handler)
    async with AsyncExitStack() as stack:
        fleet = row.fleet(stack)
        await fleet.start(runtime_dir)
        await check(fleet, interrupter, row)


async def test_nothing_is_left_of_a_session_whose_connection_ends(
    monkeypatch: pytest.MonkeyPatch, runtime_dir: Path
) -> None:
    def cut(connection: AttachConnection) -> None:
        connection.end(Unreachable("as the test demands"))

    cutter = Cutter(monkeypatch, (AttachConnection, "send"), (AttachConnection, "_take"), cut=cut)
    async with AsyncExitStack() as stack:
        fleet = Sessions(stack)
        await fleet.start(runtime_dir)
        await check(fleet, cutter, Row(Sessions, (), Sessions.use))


SERVICES = (
    external_processor_pb2,
    cache_pb,
    registry_pb,
    engine_pb,
    peer_pb,
    lookup_service_pb2,
    report_service_pb2,
    operations,
)


def test_every_rpc_is_interrupted() -> None:
    named = {
        f"{service.full_name}/{method.name}"
        for module in SERVICES
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    tested = {
        f"{base.__name__.removesuffix('Servicer')}/{name[0].upper()}{name[1:]}"
        for row in ROWS
        for owner, name in row.methods
        for base in owner.__bases__
        if base.__name__.endswith("Servicer")
    }
    assert {name.rpartition(".")[2] for name in named} == tested
