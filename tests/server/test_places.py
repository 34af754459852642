"""Every pool of places that callers share: one caller takes all that it can get, and another one is served."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from lmkv import rpc
from lmkv.auth.credentials import BearerToken, Credentials
from lmkv.config import CoordinatorConfig, PickerConfig, ProxyConfig
from lmkv.errors import Full
from lmkv.keys import ChunkKey
from lmkv.runtime.places import most_of, requester
from lmkv.transfer import Copy, ucx
from lmkv.transfer.tcp import server as tcp
from lmkv.v1.cache_service_pb2 import WatchRequest
from lmkv.v1.cache_service_pb2_grpc import CacheServiceStub
from lmkv.v1.registry_service_pb2 import Instance
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.coordinator.core.instances import MAX_JOINING
from lmkv_server.coordinator.services.layout_watch import MAX_WATCHERS
from lmkv_server.http.protocol import SPARE_CONNECTIONS
from lmkv_server.http.server import MAX_CONCURRENT_REQUESTS
from lmkv_server.node.handoff.sender import MAX_SENDERS
from lmkv_server.node.handoff.state import Handoff
from lmkv_server.node.handoff.table import MAX_HANDOFFS
from lmkv_server.node.hints.executor import BackgroundTasks
from lmkv_server.node.peers import connection
from lmkv_server.node.peers.connection import MAX_GRANTS
from lmkv_server.node.serving.read_grants import SHARE
from lmkv_server.node.serving.service import MAX_PENDING
from lmkv_server.node.tiers import reader
from lmkv_server.node.tiers.backend import BackendTimes
from lmkv_server.node.tiers.disk.folder import PlainIo
from lmkv_server.node.tiers.disk.tier import DiskTier
from lmkv_server.proxy.picker.picker import Picker
from lmkv_server.proxy.proxy import IDLE_CONNECTIONS, Proxy
from tests.lmkv.transfer.ends import GRANT_ID, MIB, Memory
from tests.server.coordinator.guarded import guarded, token_of
from tests.server.node import handoff_tables
from tests.server.node.cases import chunk_key
from tests.server.node.disk_parts import CHUNK_BYTES, Host, flushed
from tests.server.node.handoff_tables import KEYS, SOURCE, handed
from tests.server.node.peer_parts import SMALL, Parts, Taken, keys_of
from tests.server.proxy.pd.test_prefill_decode import COMPLETIONS, PLAIN, completion
from tests.server.proxy.picker.published import Gateway
from tests.server.proxy.scripted_engine import ScriptedEngine
from tests.support.node_stub import registration
from tests.support.specs import LLAMA
from tests.waiting import WAIT_SECONDS, until

HOG, HONEST = "127.0.0.2", "127.0.0.3"
BODY = completion(PLAIN, max_tokens=1)
SILENT = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
ENGINE_PLACES = 16

Honest = Callable[[], Awaitable[None]]
Scenario = Callable[[Path], AbstractAsyncContextManager[Honest]]
"""A server whose places another caller has taken, and what the honest one does: it raises if it is refused."""


@asynccontextmanager
async def silent(port: int, count: int, sent: bytes = b"") -> AsyncIterator[None]:
    """Connections of the hog over which `sent` was sent, and nothing more is."""
    writers = []
    try:
        for _ in range(count):
            _, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(HOG, 0))
            writers.append(writer)
            writer.write(sent)
            await writer.drain()
        yield
    finally:
        for writer in writers:
            writer.transport.abort()


def client(url: str, address: str) -> httpx.AsyncClient:
    transport = httpx.AsyncHTTPTransport(local_address=address, limits=httpx.Limits(max_connections=None))
    return httpx.AsyncClient(base_url=url, transport=transport, timeout=WAIT_SECONDS)


async def ask(url: str, method: str, path: str, **options: Any) -> None:
    """One request of the honest client, which must be answered."""
    async with client(url, HONEST) as http:
        answer = await http.request(method, path, **options)
        assert answer.status_code == 200, answer.text


@asynccontextmanager
async def proxy_of(**settings: Any) -> AsyncIterator[tuple[Proxy, ScriptedEngine]]:
    engine = ScriptedEngine()
    await engine.start()
    config = ProxyConfig(port=0, mode="route", engines=(engine.url,), stop_timeout=0.0, **settings)
    try:
        async with Proxy(config) as proxy:
            await until(lambda: all(one.is_healthy for one in proxy.pools.engines))
            yield proxy, engine
    finally:
        engine.going.set()
        await engine.stop()


@asynccontextmanager
async def bodies_at_the_coordinator(_: Path) -> AsyncIterator[Honest]:
    async with Coordinator(CoordinatorConfig(port=0, http_port=0)) as coordinator:
        port = int(coordinator.http_address.rpartition(":")[2])
        async with silent(port, MAX_CONCURRENT_REQUESTS + 2 * SPARE_CONNECTIONS, SILENT % b"/lookup"):
            yield lambda: ask(coordinator.url, "GET", "/metrics")


@asynccontextmanager
async def bodies_at_the_proxy(_: Path) -> AsyncIterator[Honest]:
    async with proxy_of() as (proxy, _engine):
        count = ProxyConfig(engines=("http://127.0.0.1:1",), mode="route").max_concurrent_requests
        async with silent(proxy.port, count + SPARE_CONNECTIONS, SILENT % COMPLETIONS.encode()):
            yield lambda: ask(proxy.url, "POST", COMPLETIONS, json=BODY)


@asynccontextmanager
async def bodies_over_all_connections_of_a_proxy(_: Path) -> AsyncIterator[Honest]:
    count = 1 + IDLE_CONNECTIONS + SPARE_CONNECTIONS
    async with (
        proxy_of(max_concurrent_requests=1, max_connections_per_client=1 << 20) as (proxy, _engine),
        silent(proxy.port, count, SILENT % COMPLETIONS.encode()),
    ):
        yield lambda: ask(proxy.url, "POST", COMPLETIONS, json=BODY)


@asynccontextmanager
async def requests_at_the_proxy(_: Path) -> AsyncIterator[Honest]:
    async with proxy_of(max_concurrent_requests=ENGINE_PLACES) as (proxy, engine), client(proxy.url, HOG) as hog:
        engine.going.clear()
        flood = [asyncio.create_task(hog.post(COMPLETIONS, json=BODY)) for _ in range(2 * ENGINE_PLACES)]
        try:
            await until(lambda: sum(one.done() for one in flood) + engine.waiting_count == len(flood))
            assert {one.result().status_code for one in flood if one.done()} == {503}

            async def honest() -> None:
                asking = asyncio.create_task(ask(proxy.url, "POST", COMPLETIONS, json=BODY))
                held = engine.waiting_count
                await until(lambda: asking.done() or engine.waiting_count > held)
                engine.going.set()
                await asking

            yield honest
        finally:
            for one in flood:
                one.cancel()
            await asyncio.gather(*flood, return_exceptions=True)


@asynccontextmanager
async def streams_at_the_picker(_: Path) -> AsyncIterator[Honest]:
    engine = ScriptedEngine()
    await engine.start()
    config = PickerConfig(
        port=0, metrics_port=0, policy="least_loaded", engines=(engine.url,), max_concurrent_requests=ENGINE_PLACES
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(engine.stop)
        picker = await stack.enter_async_context(Picker(config))
        await until(lambda: all(one.is_healthy for one in picker.engines))
        gateway = Gateway(await stack.enter_async_context(grpc.aio.insecure_channel(picker.address)))
        for _number in range(2 * ENGINE_PLACES):
            exchange = await stack.enter_async_context(gateway.exchange())
            await exchange.send_headers()

        async def honest() -> None:
            assert await gateway.pick(json.dumps(BODY).encode()) == f"127.0.0.1:{engine.port}"

        yield honest


async def register(registry: Any, instance_id: str, epoch: int = 1) -> None:
    instance = Instance(instance_id=instance_id, epoch=epoch, peer_address="127.0.0.1:7000", specs=[LLAMA.to_proto()])
    await registry.Register(registration(instance), timeout=WAIT_SECONDS)


async def refused(calls: Sequence[Awaitable[None]]) -> int:
    """How many of these calls were refused for lack of a place."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    errors = [result for result in results if isinstance(result, grpc.RpcError)]
    assert all(rpc.from_rpc_error(error).code == "RESOURCE_EXHAUSTED" for error in errors)
    return len(errors)


@asynccontextmanager
async def registrations_of_a_tenant(folder: Path) -> AsyncIterator[Honest]:
    async with guarded(folder) as fleet:
        hog, other = await fleet.registry(token_of("engine", "a")), await fleet.registry(token_of("engine", "b"))
        assert await refused([register(hog, f"hog-{number}") for number in range(2 * MAX_JOINING)])
        yield lambda: register(other, "honest")


@asynccontextmanager
async def registrations_of_rising_epochs(folder: Path) -> AsyncIterator[Honest]:
    async with guarded(folder) as fleet:
        hog = other = await fleet.registry(token_of("engine", "a"))
        for epoch in range(1, 2 * MAX_JOINING):
            await register(hog, "hog", epoch)
        yield lambda: register(other, "honest")


@asynccontextmanager
async def watches_of_a_token(folder: Path) -> AsyncIterator[Honest]:
    async with guarded(folder) as fleet, AsyncExitStack() as stack:

        async def watch(token: str) -> None:
            options = Credentials(token=BearerToken(text=token))
            channel = await stack.enter_async_context(rpc.open_channel(fleet.coordinator.address, options))
            stream = CacheServiceStub(channel).Watch(WatchRequest())
            stack.callback(stream.cancel)
            await stream.read()

        assert await refused([watch(token_of("reader")) for _ in range(MAX_WATCHERS)])
        yield lambda: watch(token_of("operator"))


def connections_of(kind: str, count: int) -> Scenario:
    """Connections to a transfer channel that send nothing."""

    @asynccontextmanager
    async def scenario(folder: Path) -> AsyncIterator[Honest]:
        if kind == "ucx":
            pytest.importorskip("ucxx", reason="pip install '.[ucx]'")
        memory, mine = Memory(MIB), Memory(MIB)
        async with AsyncExitStack() as stack:
            owner, reader = await memory.open(kind, "owner:1", folder), await mine.open(kind, "reader:1", folder)
            stack.push_async_callback(owner.aclose)
            stack.push_async_callback(reader.aclose)
            metadata = owner.metadata_for(memory.admit())
            port = owner._port if kind == "ucx" else owner._server.port  # type: ignore[attr-defined]
            await stack.enter_async_context(silent(port, count))
            memory.words[:] = 7

            async def honest() -> None:
                await reader.add_peer("owner:1", metadata)
                for _ in range(32):
                    copy = Copy(remote_address=memory.address, local_address=mine.address, size_bytes=MIB)
                    await reader.read("owner:1", [copy], WAIT_SECONDS, lambda: None, GRANT_ID)
                    assert (mine.words == 7).all()
                    mine.words[:] = 0

            yield honest

    return scenario


@asynccontextmanager
async def handoffs_of_a_peer(_: Path) -> AsyncIterator[Honest]:
    """A caller announces handoffs until it is refused."""
    tier, table = handoff_tables.table(2 * MAX_HANDOFFS, 2 * MAX_HANDOFFS)

    def begin(caller: str, index: int) -> Handoff:
        return table.allocate(handed(f"{caller}-{index}", KEYS[:1]), SOURCE, 0.0, caller=caller)

    def flood() -> None:
        for index in range(MAX_HANDOFFS + 1):
            begin("hog", index)

    with pytest.raises(Full):
        flood()

    async def honest() -> None:
        assert begin("honest", 0).is_open

    yield honest
    table.clear()
    handoff_tables.assert_nothing_is_left(tier, table)


@asynccontextmanager
async def reports_of_a_peer(_: Path) -> AsyncIterator[Honest]:
    """A caller reports chunks as damaged that are not."""
    spec = replace(SMALL, layer_count=1, kv_head_count=1, chunk_size=32)
    async with Parts("owner", spec=spec, chunk_count=MAX_PENDING + 1) as owner:
        *intact, damaged = (owner.put(key) for key in keys_of(MAX_PENDING + 1))
        owner.damage(damaged.key)
        assert len(owner.tier) == MAX_PENDING + 1
        owner.inspector.inspect(intact, "hog", "hog")
        owner.inspector.inspect([damaged], "honest", "honest")

        async def honest() -> None:
            await until(lambda: owner.inspector.damaged_count == 1)

        yield honest


@asynccontextmanager
async def handoffs_of_an_engine(_: Path) -> AsyncIterator[Honest]:
    """An engine begins handoffs until it is refused. All of it is in one iteration: none of them ends meanwhile."""
    async with Parts("prefill") as prefill:
        requester.set("engine:hog")
        flood = [prefill.hand(f"hog-{index}", "decode", keys_of(1)) for index in range(MAX_SENDERS)]
        assert any(each.done() for each in flood), "it was refused"
        requester.set("engine:honest")
        mine = prefill.hand("honest", "decode", keys_of(1))

        async def honest() -> None:
            assert not isinstance((await mine).error, Full)

        yield honest


@asynccontextmanager
async def hints_of_an_engine(_: Path) -> AsyncIterator[Honest]:
    """The hints of an engine work until no more may."""
    background, going = BackgroundTasks(), asyncio.Event()

    async def work() -> None:
        await going.wait()

    requester.set("engine:hog")
    while not background.is_full:
        background.start(work())

    async def honest() -> None:
        requester.set("engine:honest")
        assert not background.is_full

    yield honest
    going.set()
    await background.settle()


@asynccontextmanager
async def fetches_of_an_engine(_: Path) -> AsyncIterator[Honest]:
    """The fetches of an engine have all grants that a peer gives to their node."""
    async with Parts("owner") as owner, Parts("reader") as reading:
        for key in keys_of(2):
            owner.put(key)
        peer = reading.connections.get(owner.holder(2))
        assert peer
        await peer.connect(SMALL, WAIT_SECONDS)
        requester.set("engine:hog")
        acquiring = (peer.acquire(SMALL, keys_of(1), WAIT_SECONDS, WAIT_SECONDS) for _number in range(MAX_GRANTS))
        answers = await asyncio.gather(*acquiring, return_exceptions=True)
        assert any(isinstance(answer, Full) for answer in answers)

        async def honest() -> None:
            requester.set("engine:honest")
            taken = Taken(reading)
            await reading.fetch(SMALL, keys_of(2), [owner.holder(2)], WAIT_SECONDS, taken)
            assert taken.keys() == keys_of(2)
            taken.let_go()

        yield honest
        for answer in answers:
            if not isinstance(answer, BaseException):
                await peer.release(answer.grant.grant_id, WAIT_SECONDS)


@asynccontextmanager
async def fetches_of_memory(_: Path) -> AsyncIterator[Honest]:
    """The fetches of an engine hold all memory that a peer grants to their node, and ask as they release some."""
    async with AsyncExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(connection, "TURN_SECONDS", WAIT_SECONDS)
        owner = await stack.enter_async_context(Parts("owner", chunk_count=2 * SHARE))
        reading = await stack.enter_async_context(Parts("reader"))
        for key in keys_of(3):
            owner.put(key)
        peer = reading.connections.get(owner.holder(3))
        assert peer
        await peer.connect(SMALL, WAIT_SECONDS)

        async def acquire(engine: str, key: ChunkKey) -> str:
            """The id of the grant; empty if it is refused."""
            requester.set(engine)
            try:
                return (await peer.acquire(SMALL, [key], WAIT_SECONDS, WAIT_SECONDS)).grant.grant_id
            except Full:
                return ""

        first, second, third = keys_of(3)
        granted = [await acquire("engine:hog", key) for key in (first, second)]
        assert all(granted)
        assert not await acquire("engine:honest", third)
        await peer.release(granted.pop(), WAIT_SECONDS)
        granted.append(await acquire("engine:hog", second))

        async def honest() -> None:
            requester.set("engine:honest")
            taken = Taken(reading)
            await reading.fetch(SMALL, [third], [owner.holder(1)], WAIT_SECONDS, taken)
            assert taken.keys() == [third]
            taken.let_go()

        yield honest
        for grant_id in filter(None, granted):
            await peer.release(grant_id, WAIT_SECONDS)


class StuckIo(PlainIo):
    """A disk that reads nothing until it may."""

    def __init__(self) -> None:
        self.going = threading.Event()

    def read(self, fd: int, memory: memoryview) -> int:
        self.going.wait(WAIT_SECONDS)
        return super().read(fd, memory)


@asynccontextmanager
async def loads_of_an_engine(folder: Path) -> AsyncIterator[Honest]:
    """An engine loads as many chunks of the disk at a time as it is given."""
    disk_io, host, limit = StuckIo(), Host(80), 32
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "MAX_WAITING", limit)
        times = BackendTimes(stall_seconds=WAIT_SECONDS)
        disk = DiskTier([folder], 100 * CHUNK_BYTES, host.cache, io=disk_io, times=times)
    async with disk:
        host.disk = disk
        for number in range(72):
            host.store(number)
        await flushed(host)
        host.drop(*range(72))
        requester.set("engine:hog")
        flood = [asyncio.create_task(host.read(*range(start, start + 8))) for start in range(0, 64, 8)]
        await until(lambda: len(disk.reader._reading) == most_of(limit))

        async def honest() -> None:
            requester.set("engine:honest")
            reading = asyncio.create_task(host.read(70))
            await until(lambda: chunk_key(70) in disk.reader._reading)
            disk_io.going.set()
            assert list(await reading) == [70]

        yield honest
        await asyncio.gather(*flood)
    host.pool.close()


SCENARIOS: dict[str, Scenario] = {
    "bodies at a coordinator": bodies_at_the_coordinator,
    "bodies at a proxy": bodies_at_the_proxy,
    "all connections of a proxy": bodies_over_all_connections_of_a_proxy,
    "requests at a proxy": requests_at_the_proxy,
    "streams at a picker": streams_at_the_picker,
    "registrations of a tenant": registrations_of_a_tenant,
    "registrations of one instance": registrations_of_rising_epochs,
    "watches of a token": watches_of_a_token,
    "handoffs of a peer": handoffs_of_a_peer,
    "reports of a peer": reports_of_a_peer,
    "handoffs of an engine": handoffs_of_an_engine,
    "hints of an engine": hints_of_an_engine,
    "loads of an engine": loads_of_an_engine,
    "fetches of an engine": fetches_of_an_engine,
    "memory that fetches of an engine hold": fetches_of_memory,
    "connections of the TCP channel": connections_of("tcp", tcp.MAX_READERS + 2 * tcp.MAX_STRANGERS),
    "connections of the UCX channel": connections_of("ucx", ucx.MAX_READERS + 2 * ucx.MAX_STRANGERS),
}


@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_one_caller_leaves_places_to_another(scenario: str, short_folder: Path) -> None:
    async with SCENARIOS[scenario](short_folder) as honest, asyncio.timeout(WAIT_SECONDS):
        await honest()
