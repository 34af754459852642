"""A node's membership, against a real coordinator over real sockets: what it holds is found, whatever breaks."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import sha256
from typing import Any, Self

import pytest
from google.protobuf.duration_pb2 import Duration

from lmkv import rpc
from lmkv.errors import ConfigError, Unreachable
from lmkv.keys import ChunkKey, join_keys, split_keys
from lmkv.spec import KvSpec
from lmkv.v1 import cache_service_pb2_grpc, chunk_pb2, registry_service_pb2_grpc
from lmkv.v1.cache_service_pb2 import LookupRequest
from lmkv.v1.registry_service_pb2 import (
    DropOrder,
    FetchOrder,
    Instance,
    ListInstancesRequest,
    PinOrder,
    SpecConflict,
    TierUsage,
    UnpinOrder,
)
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.node.acts import MAX_ORDER_KEYS
from lmkv_server.node.engines import Engines
from lmkv_server.node.fleet import Fleet, Held
from lmkv_server.node.host_tier import Chunk, HostTier
from lmkv_server.node.orders import Orders
from lmkv_server.node.pins import MAX_ID_BYTES, MAX_PINS
from tests.server.node.ordering import Ordering, serving, until

LEASE_SECONDS = 0.4
HOST = chunk_pb2.TIER_HOST
LLAMA = KvSpec(
    model_name="llama",
    model_id="llama@1",
    kv_dtype="bfloat16",
    layer_count=2,
    kv_head_count=2,
    head_size=64,
    chunk_size=256,
)
KEYS = [ChunkKey(sha256(bytes([i])).digest()[:16]) for i in range(40)]
EPOCHS = itertools.count(time.time_ns())


class Shelf:
    """A node's index as the fleet sees it."""

    def __init__(self, instance_id: str = "a", *, port: int = 7000, specs: Sequence[KvSpec] = (LLAMA,)) -> None:
        self.instance_id = instance_id
        self.epoch = next(EPOCHS)
        self.peer_address = f"127.0.0.1:{port}"
        self.specs = list(specs)
        self.held: dict[ChunkKey, Held] = {}
        self.fleet: Fleet | None = None
        self.tier = HostTier(1 << 20, self)
        """For orders, which work on a real one."""
        self.orders = Orders(instance_id=instance_id, tier=self.tier, engines=Engines(self.tier), peers=None)

    def instance(self) -> Instance:
        return Instance(
            instance_id=self.instance_id,
            epoch=self.epoch,
            peer_address=self.peer_address,
            specs=[spec.to_proto() for spec in self.specs],
            tiers=[TierUsage(tier=HOST, capacity_bytes=1 << 30, chunk_count=len(self.held))],
            engine_count=len(self.specs),
        )

    def snapshot(self) -> Iterator[Held]:
        yield from self.held.values()

    @asynccontextmanager
    async def join(self, *addresses: str, **options: Any) -> AsyncIterator[Fleet]:
        async with self.orders:
            self.fleet = Fleet(addresses, instance=self.instance, snapshot=self.snapshot, orders=self.orders, **options)
            async with self.fleet:
                yield self.fleet

    def keep(self, keys: Iterable[ChunkKey]) -> None:
        """Puts chunks into the tier."""
        for key in keys:
            reserved = self.tier.reserve(4096)
            assert reserved
            self.tier.commit(
                reserved.offset,
                key=key,
                fingerprint=LLAMA.fingerprint,
                size_bytes=4096,
                checksum=0,
                token_count=LLAMA.chunk_size,
            )

    def admitted(self, chunk: Chunk) -> None:
        self.put([chunk.key], token_count=chunk.token_count)

    def evicted(self, chunk: Chunk) -> None:
        self.take([chunk.key])

    def put(self, keys: Iterable[ChunkKey], spec: KvSpec = LLAMA, token_count: int = 256) -> None:
        for key in keys:
            self.held[key] = Held(tier=HOST, fingerprint=spec.fingerprint, key=key, token_count=token_count)
            if self.fleet is not None:
                self.fleet.admitted(HOST, spec.fingerprint, key, token_count)

    def take(self, keys: Iterable[ChunkKey]) -> None:
        for key in keys:
            held = self.held.pop(key)
            if self.fleet is not None:
                self.fleet.evicted(HOST, held.fingerprint, key)


class Wire:
    """A TCP connection to the coordinator that can be cut, frozen and mended."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._running = asyncio.Event()
        self._running.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cut()

    async def cut(self) -> None:
        """Breaks every connection and lets none in."""
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()
        await self._server.wait_closed()

    def freeze(self) -> None:
        """Nothing gets through, and nobody is told."""
        self._running.clear()

    def thaw(self) -> None:
        """What waited gets through."""
        self._running.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()
            return
        self._writers.add(there_writer)
        for ways in ((reader, there_writer), (there_reader, writer)):
            task = asyncio.create_task(self._pump(*ways))
            self._tasks.add(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self._running.wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.transport.abort()


class Asker:
    """Asks the coordinator what a client would."""

    def __init__(self, address: str) -> None:
        self.address = address

    async def tokens(self, keys: Sequence[ChunkKey] = KEYS) -> dict[str, int]:
        async with rpc.open_channel(self.address) as channel:
            cache: Any = cache_service_pb2_grpc.CacheServiceStub(channel)
            request = LookupRequest(chunk_keys=join_keys(keys))
            response = await cache.Lookup(request, timeout=5, wait_for_ready=True)
        return {holder.instance_id: holder.matched_token_count for holder in response.holders}

    async def instances(self) -> list[Instance]:
        async with rpc.open_channel(self.address) as channel:
            registry: Any = registry_service_pb2_grpc.RegistryServiceStub(channel)
            response = await registry.ListInstances(ListInstancesRequest(), timeout=5)
        return list(response.instances)

    async def until(self, expected: dict[str, int], keys: Sequence[ChunkKey] = KEYS, within: float = 5) -> float:
        """Waits until a lookup gives just this; returns the seconds it took."""
        began = time.monotonic()
        while (found := await self.tokens(keys)) != expected:
            assert time.monotonic() - began < within, f"{found} is not {expected}"
            await asyncio.sleep(0.01)
        return time.monotonic() - began


@pytest.fixture
async def coordinator() -> AsyncIterator[Coordinator]:
    async with Coordinator(port=0, lease_ttl=LEASE_SECONDS) as serving:
        yield serving


@pytest.fixture
def asker(coordinator: Coordinator) -> Asker:
    return Asker(coordinator.address)


# --- What is held is found ---------------------------------------------------------------------------------------


async def test_what_a_node_holds_is_found_and_changes_follow(coordinator: Coordinator, asker: Asker) -> None:
    shelf = Shelf()
    shelf.put(KEYS[:2])
    async with shelf.join(coordinator.address) as fleet:
        await fleet.started()
        assert fleet.connected
        await asker.until({"a": 512})
        shelf.put(KEYS[2:5])
        assert await asker.until({"a": 1280}) < 0.5
        shelf.take(KEYS[1:2])
        await asker.until({"a": 256})


async def test_a_chunk_that_comes_and_goes_in_one_step_ends_as_it_is(coordinator: Coordinator, asker: Asker) -> None:
    shelf = Shelf()
    async with shelf.join(coordinator.address) as fleet:
        await fleet.started()
        shelf.put(KEYS[:3])
        shelf.take(KEYS[:3])
        shelf.put(KEYS[:1])
        await asker.until({"a": 256})
        shelf.take(KEYS[:1])
        shelf.put(KEYS[:2])
        shelf.take(KEYS[1:2])
        await asyncio.sleep(0.05)
        await asker.until({"a": 256})


async def test_partial_chunks_count_their_own_tokens(coordinator: Coordinator, asker: Asker) -> None:
    shelf = Shelf()
    shelf.put(KEYS[:1])
    shelf.put(KEYS[1:2], token_count=12)
    async with shelf.join(coordinator.address):
        await asker.until({"a": 268})
        shelf.put(KEYS[20:21], token_count=7)
        await asker.until({"a": 7}, KEYS[20:])


async def test_a_hundred_thousand_chunks_come_in_several_reports(coordinator: Coordinator, asker: Asker) -> None:
    keys = [ChunkKey(sha256(i.to_bytes(4, "little")).digest()[:16]) for i in range(100_000)]
    shelf = Shelf()
    shelf.put(keys)
    began = time.monotonic()
    async with shelf.join(coordinator.address):
        await asker.until({"a": 256 * 20_000}, keys[80_000:])
        await asker.until({"a": 256 * 20_000}, keys[:20_000])
    assert time.monotonic() - began < 5


async def test_usage_and_engines_follow_with_the_heartbeat(coordinator: Coordinator, asker: Asker) -> None:
    shelf = Shelf()
    async with shelf.join(coordinator.address) as fleet:
        await fleet.started()
        shelf.put(KEYS[:3])
        async with asyncio.timeout(5):
            while True:
                (instance,) = await asker.instances()
                if instance.synced and instance.tiers[0].chunk_count == 3:
                    break
                await asyncio.sleep(0.02)
        assert instance.engine_count == 1


async def test_leaving_takes_effect_at_once(coordinator: Coordinator, asker: Asker) -> None:
    shelf = Shelf()
    shelf.put(KEYS[:1])
    async with shelf.join(coordinator.address) as fleet:
        await asker.until({"a": 256})
    assert await asker.tokens() == {}
    assert await asker.instances() == []
    await fleet.aclose()
    assert not fleet.connected


# --- What breaks heals -------------------------------------------------------------------------------------------


async def test_a_restarted_coordinator_learns_everything_again(asker: Asker, coordinator: Coordinator) -> None:
    shelf = Shelf()
    shelf.put(KEYS[:2])
    async with shelf.join(coordinator.address) as fleet:
        await asker.until({"a": 512})
        await coordinator.aclose()
        await until(lambda: not fleet.connected)
        shelf.put(KEYS[2:3])
        assert await fleet.lookup(KEYS, 0.2) == []
        async with Coordinator(port=coordinator.port, lease_ttl=LEASE_SECONDS):
            assert await asker.until({"a": 768}) < 3
            shelf.put(KEYS[3:4])
            await asker.until({"a": 1024})
            assert fleet.connected


async def test_a_dead_node_leaves_lookups_within_its_lease(coordinator: Coordinator, asker: Asker) -> None:
    shelf = Shelf()
    shelf.put(KEYS[:2])
    async with Wire(coordinator.port) as wire, shelf.join(wire.address) as fleet:
        await asker.until({"a": 512})
        await wire.cut()
        assert await asker.until({}) < LEASE_SECONDS + 0.2
        await until(lambda: not fleet.connected)


async def test_a_frozen_node_leaves_and_comes_back(coordinator: Coordinator, asker: Asker) -> None:
    shelf = Shelf()
    shelf.put(KEYS[:2])
    async with Wire(coordinator.port) as wire, shelf.join(wire.address):
        await asker.until({"a": 512})
        wire.freeze()
        assert await asker.until({}) < LEASE_SECONDS + 0.2
        wire.thaw()
        await asker.until({"a": 512})


async def test_leaving_while_the_coordinator_goes_ends_both() -> None:
    for _ in range(5):
        async with AsyncExitStack() as stack:
            coordinator = await stack.enter_async_context(Coordinator(port=0, lease_ttl=LEASE_SECONDS))
            fleet = await stack.enter_async_context(Shelf().join(coordinator.address))
            await fleet.started()
            async with asyncio.timeout(5):
                await asyncio.gather(coordinator.aclose(), fleet.aclose())


async def test_a_node_starts_without_a_coordinator_and_joins_when_it_comes() -> None:
    async with Coordinator(port=0) as gone:
        address, port = gone.address, gone.port
    shelf = Shelf()
    shelf.put(KEYS[:1])
    async with shelf.join(address) as fleet:
        began = time.monotonic()
        await fleet.started()
        assert time.monotonic() - began < 1.5
        assert not fleet.connected
        async with Coordinator(port=port, lease_ttl=LEASE_SECONDS):
            assert await Asker(address).until({"a": 256}) < 3


async def test_drift_is_found_and_repaired(coordinator: Coordinator, asker: Asker) -> None:
    shelf = Shelf()
    shelf.put(KEYS[:3])
    async with shelf.join(coordinator.address, digest_interval_seconds=0.1):
        await asker.until({"a": 768})
        del shelf.held[KEYS[1]]  # behind the fleet's back
        shelf.put(KEYS[9:10])
        assert await asker.until({"a": 256}) < 2


async def test_a_flood_of_changes_becomes_a_snapshot(
    coordinator: Coordinator, asker: Asker, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = Shelf()
    async with shelf.join(coordinator.address, max_pending_changes=10) as fleet:
        await fleet.started()
        await until(lambda: fleet.connected)
        await asyncio.sleep(0.1)
        shelf.put(KEYS)
        await asker.until({"a": 256 * len(KEYS)})
        assert "10 changes piled up" in caplog.text


# --- One id, one node --------------------------------------------------------------------------------------------


async def test_a_second_node_of_one_id_is_refused_with_a_clear_message(coordinator: Coordinator, asker: Asker) -> None:
    first, second = Shelf(port=7000), Shelf(port=8000)
    first.put(KEYS[:1])
    async with first.join(coordinator.address):
        await asker.until({"a": 256})
        async with second.join(coordinator.address) as fleet:
            began = time.monotonic()
            with pytest.raises(ConfigError, match=r"instance_id 'a' is in use by a living node at 127\.0\.0\.1:7000"):
                await fleet.started()
            assert LEASE_SECONDS <= time.monotonic() - began < LEASE_SECONDS + 2
            with pytest.raises(ConfigError):
                await fleet.wait()
        assert await asker.tokens() == {"a": 256}


@pytest.mark.parametrize("clock_was_set_back", [False, True])
async def test_a_restarted_node_waits_for_the_lease_of_its_frozen_predecessor(
    coordinator: Coordinator, asker: Asker, clock_was_set_back: bool
) -> None:
    first, second = Shelf(port=7000), Shelf(port=8000)
    if clock_was_set_back:
        first.epoch, second.epoch = second.epoch, first.epoch
    first.put(KEYS[:1])
    second.put(KEYS[:3])
    async with AsyncExitStack() as stack:
        wire = await stack.enter_async_context(Wire(coordinator.port))
        await stack.enter_async_context(first.join(wire.address))
        await asker.until({"a": 256})
        wire.freeze()
        fleet = await stack.enter_async_context(second.join(coordinator.address))
        await fleet.started()
        await asker.until({"a": 768})


async def test_a_node_whose_id_was_taken_stops_reporting_and_says_so(coordinator: Coordinator, asker: Asker) -> None:
    old, new = Shelf(port=7000), Shelf(port=7000)
    old.put(KEYS[:1])
    new.put(KEYS[:2])
    async with old.join(coordinator.address) as lost:
        await asker.until({"a": 256})
        async with new.join(coordinator.address):
            with pytest.raises(ConfigError, match="give each its own instance_id"):
                await asyncio.wait_for(lost.wait(), 5)
            assert not lost.connected
            await asker.until({"a": 512})
            await lost.aclose()
            assert await asker.tokens() == {"a": 512}


# --- Specs -------------------------------------------------------------------------------------------------------


async def test_an_engine_that_attaches_later_brings_its_spec(coordinator: Coordinator, asker: Asker) -> None:
    shelf = Shelf(specs=[])
    async with shelf.join(coordinator.address) as fleet:
        await fleet.started()
        assert [list(instance.specs) for instance in await asker.instances()] == [[]]
        small = dataclasses.replace(LLAMA, chunk_size=64)
        shelf.specs.append(small)
        fleet.refresh()
        shelf.put(KEYS[:2], small, 64)
        await asker.until({"a": 128})
        (instance,) = await asker.instances()
        assert [spec.fingerprint for spec in instance.specs] == [small.fingerprint]


async def test_an_instance_that_shares_nothing_is_named_once_with_the_reason(
    coordinator: Coordinator, asker: Asker, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[list[SpecConflict]] = []
    here = Shelf("b", port=8000, specs=[dataclasses.replace(LLAMA, kv_dtype="float32")])
    async with Shelf("a").join(coordinator.address) as other:
        await other.started()
        async with here.join(coordinator.address, on_conflicts=told.append) as fleet:
            await fleet.started()
            fleet.refresh()
            await asyncio.sleep(0.1)
            (conflict,) = fleet.conflicts
            assert (conflict.instance_id, conflict.field) == ("a", "kv_dtype")
            assert told == [[conflict]]
    text = "shares nothing of model llama with instance a: kv_dtype float32 here, bfloat16 there"
    assert caplog.text.count(text) == 1


async def test_a_node_that_was_first_hears_of_those_that_share_nothing(coordinator: Coordinator) -> None:
    async with Shelf("a").join(coordinator.address, register_interval_seconds=0.05) as first:
        await first.started()
        assert first.conflicts == []
        other = Shelf("b", port=8000, specs=[dataclasses.replace(LLAMA, kv_dtype="float32")])
        async with other.join(coordinator.address):
            await until(lambda: [conflict.instance_id for conflict in first.conflicts] == ["b"])
        await until(lambda: first.conflicts == [])


# --- Lookups -----------------------------------------------------------------------------------------------------


async def test_a_lookup_finds_the_others_longest_first(coordinator: Coordinator, asker: Asker) -> None:
    shelves = [Shelf(name, port=7000 + i) for i, name in enumerate("abc")]
    for count, shelf in zip((3, 1, 2), shelves, strict=True):
        shelf.put(KEYS[:count])
    async with AsyncExitStack() as stack:
        fleets = [await stack.enter_async_context(shelf.join(coordinator.address)) for shelf in shelves]
        await asker.until({"a": 768, "b": 256, "c": 512})
        holders = await fleets[0].lookup(KEYS, 0.5)
        assert [(h.instance_id, h.matched_chunk_count) for h in holders] == [("c", 2), ("b", 1)]
        assert holders[0].peer_address == "127.0.0.1:7002"
        assert holders[0].epoch == shelves[2].epoch
        assert await fleets[0].lookup(KEYS[5:], 0.5) == []
        assert await fleets[0].lookup([], 0.5) == []
        assert fleets[0].lookup_failures == 0


async def test_without_a_coordinator_nothing_is_found_and_nothing_fails() -> None:
    shelf = Shelf()
    async with shelf.join() as fleet:
        await fleet.started()
        shelf.put(KEYS[:2])
        shelf.take(KEYS[:1])
        fleet.refresh()
        assert await fleet.lookup(KEYS, 0.5) == []
        assert not fleet.connected
        assert fleet.lookup_failures == 0


async def test_a_silent_coordinator_costs_one_deadline_and_then_nothing(coordinator: Coordinator, asker: Asker) -> None:
    shelf = Shelf("b", port=8000)
    async with AsyncExitStack() as stack:
        other = Shelf("a")
        other.put(KEYS[:2])
        await stack.enter_async_context(other.join(coordinator.address))
        wire = await stack.enter_async_context(Wire(coordinator.port))
        fleet = await stack.enter_async_context(shelf.join(wire.address))
        await fleet.started()
        await asker.until({"a": 512})
        assert len(await fleet.lookup(KEYS, 0.5)) == 1

        wire.freeze()
        began = time.monotonic()
        assert await fleet.lookup(KEYS, 0.05) == []
        assert 0.04 < time.monotonic() - began < 0.3
        assert fleet.lookup_failures == 1
        assert not fleet.connected
        began = time.monotonic()
        for _ in range(100):
            assert await fleet.lookup(KEYS, 0.05) == []
        assert time.monotonic() - began < 0.05

        wire.thaw()
        await until(lambda: fleet.connected)
        await asker.until({"a": 512})
        assert len(await fleet.lookup(KEYS, 0.5)) == 1


async def test_each_of_several_coordinators_knows_everything_and_any_can_be_asked(coordinator: Coordinator) -> None:
    async with AsyncExitStack() as stack:
        second = await stack.enter_async_context(Coordinator(port=0, lease_ttl=LEASE_SECONDS))
        addresses = coordinator.address, second.address
        other, shelf = Shelf("a"), Shelf("b", port=8000)
        other.put(KEYS[:2])
        await stack.enter_async_context(other.join(*addresses))
        fleet = await stack.enter_async_context(shelf.join(*addresses))
        await fleet.started()
        assert fleet.connected_count == 2
        for address in addresses:
            await Asker(address).until({"a": 512})
        other.put(KEYS[2:3])
        other.take(KEYS[1:2])
        for address in addresses:
            await Asker(address).until({"a": 256})
        for _ in range(4):
            assert [holder.instance_id for holder in await fleet.lookup(KEYS, 0.5)] == ["a"]
    assert fleet.lookup_failures == 0


async def test_a_coordinator_that_falls_silent_costs_one_lookup_and_one_that_is_killed_none(
    coordinator: Coordinator,
) -> None:
    async with AsyncExitStack() as stack:
        second = await stack.enter_async_context(Coordinator(port=0, lease_ttl=LEASE_SECONDS))
        wires = [await stack.enter_async_context(Wire(one.port)) for one in (coordinator, second)]
        other, shelf = Shelf("a"), Shelf("b", port=8000)
        other.put(KEYS[:2])
        await stack.enter_async_context(other.join(coordinator.address, second.address))
        fleet = await stack.enter_async_context(shelf.join(*(wire.address for wire in wires)))
        await fleet.started()
        for one in (coordinator, second):
            await Asker(one.address).until({"a": 512})
        await asyncio.sleep(LEASE_SECONDS)  # since their start: neither is partial any more

        wires[0].freeze()
        found = [len(await fleet.lookup(KEYS, 0.2)) for _ in range(10)]
        assert sorted(found) == [0, *[1] * 9]
        wires[0].thaw()
        await until(lambda: fleet.connected_count == 2)

        await wires[1].cut()
        await until(lambda: fleet.connected_count == 1)
        assert [len(await fleet.lookup(KEYS, 0.5)) for _ in range(10)] == [1] * 10
        assert fleet.lookup_failures == 1


async def test_a_coordinator_that_has_yet_to_hear_of_everything_is_asked_only_if_there_is_no_other(
    coordinator: Coordinator,
) -> None:
    async with AsyncExitStack() as stack:
        fresh = await stack.enter_async_context(Coordinator(port=0, lease_ttl=60))  # partial for that long
        other, shelf = Shelf("a"), Shelf("b", port=8000)
        other.put(KEYS[:2])
        await stack.enter_async_context(other.join(coordinator.address))
        fleet = await stack.enter_async_context(shelf.join(fresh.address, coordinator.address))
        await fleet.started()
        await Asker(coordinator.address).until({"a": 512})
        await asyncio.sleep(LEASE_SECONDS)  # since its start, the first is no longer partial
        for _ in range(4):
            assert [holder.instance_id for holder in await fleet.lookup(KEYS, 0.5)] == ["a"]


async def test_coordinators_behind_one_name_come_and_go(coordinator: Coordinator) -> None:
    behind: list[str] = []

    async def resolve(name: str) -> list[str]:
        assert name == "coordinators:9000"
        if not behind:
            raise Unreachable("the name coordinators is unknown")
        return list(behind)

    shelf = Shelf()
    shelf.put(KEYS[:2])
    async with AsyncExitStack() as stack:
        joining = shelf.join("coordinators:9000", resolve=resolve, resolve_interval_seconds=0.02)
        fleet = await stack.enter_async_context(joining)
        await fleet.started()
        assert not fleet.connected
        behind.append(coordinator.address)
        await Asker(coordinator.address).until({"a": 512})
        second = await stack.enter_async_context(Coordinator(port=0, lease_ttl=LEASE_SECONDS))
        behind.append(second.address)
        await Asker(second.address).until({"a": 512})
        await coordinator.aclose()
        await until(lambda: fleet.connected_count == 1)
        behind.remove(coordinator.address)
        await until(lambda: [member.coordinator_address for member in fleet.members] == [second.address])
        behind.clear()  # for the moment nobody knows the name: who is there stays
        await asyncio.sleep(0.1)
        assert fleet.connected_count == 1


async def test_a_lookup_can_be_cancelled(coordinator: Coordinator) -> None:
    async with Wire(coordinator.port) as wire, Shelf().join(wire.address) as fleet:
        await fleet.started()
        wire.freeze()
        asking = asyncio.create_task(fleet.lookup(KEYS, 5))
        await asyncio.sleep(0.02)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking


async def test_a_lookup_ends_as_a_miss_when_the_fleet_is_left_under_it(coordinator: Coordinator) -> None:
    async with Wire(coordinator.port) as wire:
        async with Shelf().join(wire.address) as fleet:
            await fleet.started()
            wire.freeze()
            asking = asyncio.create_task(fleet.lookup(KEYS, 5))
            await asyncio.sleep(0.02)
            began = time.monotonic()
        assert time.monotonic() - began < 1
        assert await asyncio.wait_for(asking, 1) == []


# --- Orders ------------------------------------------------------------------------------------------------------


async def pinned(shelf: Shelf, ordering: Ordering, count: int, seconds: int = 60) -> str:
    """Has the first chunks pinned; the pin's id."""
    pin_id = f"pin-{ordering.report_count}"
    pin = PinOrder(pin_id=pin_id, tier=HOST, chunk_keys=join_keys(KEYS[:count]), ttl=Duration(seconds=seconds))
    outcome = await ordering.ended(ordering.give(pin=pin))
    assert (outcome.status.code, outcome.chunk_count) == (0, count)
    return pin_id


async def test_an_order_is_carried_out_once_and_its_outcome_told_with_each_repeat() -> None:
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
        assert len(ordering.outcomes) == 2  # nobody tells what was heard


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


async def test_an_outcome_is_told_to_the_coordinator_that_gave_the_order_and_pins_to_all() -> None:
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


async def test_outcomes_that_were_not_acknowledged_are_told_again_over_the_next_stream() -> None:
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


async def test_pins_are_told_with_each_change_and_again_to_a_restarted_coordinator() -> None:
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
            assert 55 < pin.expire_time.seconds - time.time() < 61
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


async def test_an_expired_pin_is_no_longer_told() -> None:
    ordering, shelf = Ordering(), Shelf()
    shelf.keep(KEYS[:1])
    async with serving(ordering) as address, shelf.join(address):
        pin = PinOrder(pin_id="short", chunk_keys=join_keys(KEYS[:1]), ttl=Duration(nanos=200_000_000))
        ordering.give(pin=pin)
        await until(lambda: [len(told.pins) for told in ordering.pin_lists] == [0, 1, 0])
        assert shelf.orders.pins.expired_count == 1


async def test_as_many_pins_as_there_may_be_travel_beside_a_full_report() -> None:
    ordering, shelf = Ordering(), Shelf("x" * 256)
    shelf.keep(KEYS[:1])
    for number in range(MAX_PINS):
        shelf.orders.pins.pin(f"{number:0{MAX_ID_BYTES}}", KEYS[:1], time.monotonic(), 3600)
    async with serving(ordering) as address, shelf.join(address):
        await until(lambda: [len(told.pins) for told in ordering.pin_lists] == [MAX_PINS])
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
            assert split_keys(outcome.failures[0].chunk_keys) == keys
        assert ordering.stream_count == 1


async def test_an_idle_node_says_no_more_than_three_things_a_lease() -> None:
    ordering = Ordering()
    async with serving(ordering) as address, Shelf().join(address):
        await until(lambda: ordering.report_count >= 3)  # the snapshot, its end, the first heartbeat
        before, started = ordering.report_count, time.monotonic()
        await until(lambda: ordering.report_count >= before + 4)
        seconds = time.monotonic() - started
    assert seconds > 2 * LEASE_SECONDS / 3, "four reports are at least three intervals, but for what was under way"
