"""The fleet as a node sees it, over real sockets: spec conflicts, and the same holders from every coordinator."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import AsyncExitStack

import pytest

from lmkv.config import CoordinatorConfig
from lmkv.config.kinds import OFF
from lmkv.errors import Unreachable
from lmkv_server.coordinator.coordinator import Coordinator
from tests.server.node.fleet_parts import KEYS, LEASE_SECONDS, LLAMA, Asker, Shelf, Wire
from tests.waiting import WAIT_SECONDS, until


@pytest.fixture
def asker(coordinator: Coordinator) -> Asker:
    return Asker(coordinator.address)


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
    here = Shelf("b", port=8000, specs=[dataclasses.replace(LLAMA, kv_dtype="float32")])
    async with Shelf("a").join(coordinator.address) as other:
        await other.started()
        async with here.join(coordinator.address) as fleet:
            await fleet.started()
            registrar = fleet.sessions[0]._registrar
            first = registrar.lease
            fleet.refresh()
            await until(lambda: registrar.lease is not first, "it has registered again")
            (conflict,) = fleet.conflicts
            assert (conflict.instance_id, conflict.field) == ("a", "kv_dtype")
            assert here.conflict_lists == [[conflict]]
    text = "shares nothing of model llama with instance a: kv_dtype float32 here, bfloat16 there"
    assert caplog.text.count(text) == 1


async def test_the_first_node_learns_of_later_conflicts(coordinator: Coordinator) -> None:
    async with Shelf("a").join(coordinator.address, register_interval_seconds=0.05) as first:
        await first.started()
        assert first.conflicts == []
        other = Shelf("b", port=8000, specs=[dataclasses.replace(LLAMA, kv_dtype="float32")])
        async with other.join(coordinator.address):
            await until(lambda: [conflict.instance_id for conflict in first.conflicts] == ["b"])
        await until(lambda: first.conflicts == [])


async def test_an_instance_is_located_or_known_to_be_nowhere(coordinator: Coordinator) -> None:
    async with Shelf("a").join(coordinator.address) as fleet:
        await fleet.started()
        found = await fleet.locate("a")
        assert found
        assert found.instance_id == "a"
        assert await fleet.locate("unknown") is None


# --- Lookups -----------------------------------------------------------------------------------------------------


async def test_a_lookup_finds_the_others_longest_first(coordinator: Coordinator, asker: Asker) -> None:
    shelves = [Shelf(name, port=7000 + i) for i, name in enumerate("abc")]
    for count, shelf in zip((3, 1, 2), shelves, strict=True):
        shelf.put(KEYS[:count])
    async with AsyncExitStack() as stack:
        fleets = [await stack.enter_async_context(shelf.join(coordinator.address)) for shelf in shelves]
        await asker.until({"a": 768, "b": 256, "c": 512})
        holders = (await fleets[0].lookup(KEYS, WAIT_SECONDS)).holders
        assert [(h.instance_id, h.matched_chunk_count) for h in holders] == [("c", 2), ("b", 1)]
        assert holders[0].peer_address == "127.0.0.1:7002"
        assert holders[0].epoch == shelves[2].epoch
        assert not (await fleets[0].lookup(KEYS[5:], WAIT_SECONDS)).holders
        assert not (await fleets[0].lookup([], WAIT_SECONDS)).holders
        assert fleets[0].stats().lookup_failures == 0


async def test_without_a_coordinator_nothing_is_found_and_nothing_fails() -> None:
    shelf = Shelf()
    async with shelf.join() as fleet:
        await fleet.started()
        shelf.put(KEYS[:2])
        shelf.take(KEYS[:1])
        fleet.refresh()
        assert not (await fleet.lookup(KEYS, WAIT_SECONDS)).holders
        assert not fleet.connected
        assert fleet.stats().lookup_failures == 0


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
        assert len((await fleet.lookup(KEYS, WAIT_SECONDS)).holders) == 1

        wire.freeze()
        assert not (await fleet.lookup(KEYS, 0.05)).holders
        assert fleet.stats().lookup_failures == 1
        assert not fleet.connected
        async with asyncio.timeout(WAIT_SECONDS):
            for _ in range(100):
                assert not (await fleet.lookup(KEYS, 0.05)).holders
        assert fleet.stats().lookup_failures == 1, "it was not asked again"
        patient = asyncio.create_task(fleet.lookup(KEYS, WAIT_SECONDS))
        await asyncio.sleep(0)
        assert not patient.done(), "a lookup that has more time than the coordinator was silent is sent"

        wire.thaw()
        await patient
        await until(lambda: fleet.connected)
        await asker.until({"a": 512})
        assert len((await fleet.lookup(KEYS, WAIT_SECONDS)).holders) == 1


async def test_each_of_several_coordinators_knows_everything_and_any_can_be_asked(coordinator: Coordinator) -> None:
    async with AsyncExitStack() as stack:
        second = await stack.enter_async_context(
            Coordinator(CoordinatorConfig(port=0, http_port=OFF, lease_ttl=LEASE_SECONDS))
        )
        addresses = coordinator.address, second.address
        other, shelf = Shelf("a"), Shelf("b", port=8000)
        other.put(KEYS[:2])
        await stack.enter_async_context(other.join(*addresses))
        fleet = await stack.enter_async_context(shelf.join(*addresses))
        await fleet.started()
        assert fleet.stats().connected_count == 2
        for address in addresses:
            await Asker(address).until({"a": 512})
        other.put(KEYS[2:3])
        other.take(KEYS[1:2])
        for address in addresses:
            await Asker(address).until({"a": 256})
        for _ in range(4):
            assert [holder.instance_id for holder in (await fleet.lookup(KEYS, WAIT_SECONDS)).holders] == ["a"]
    assert fleet.stats().lookup_failures == 0


async def test_a_coordinator_that_falls_silent_costs_one_lookup_and_one_that_is_killed_none(
    coordinator: Coordinator,
) -> None:
    async with AsyncExitStack() as stack:
        second = await stack.enter_async_context(
            Coordinator(CoordinatorConfig(port=0, http_port=OFF, lease_ttl=LEASE_SECONDS))
        )
        wires = [await stack.enter_async_context(Wire(one.port)) for one in (coordinator, second)]
        other, shelf = Shelf("a"), Shelf("b", port=8000)
        other.put(KEYS[:2])
        await stack.enter_async_context(other.join(coordinator.address, second.address))
        fleet = await stack.enter_async_context(shelf.join(*(wire.address for wire in wires)))
        await fleet.started()
        for one in (coordinator, second):
            await Asker(one.address).until({"a": 512})
            await Asker(one.address).until_complete()

        wires[0].freeze()
        found = [await fleet.lookup(KEYS, 4 * LEASE_SECONDS) for _ in range(10)]
        assert sorted(len(one.holders) for one in found) == [0, *[1] * 9]
        assert [one.is_answered for one in found] == [bool(one.holders) for one in found]
        wires[0].thaw()
        await until(lambda: fleet.stats().connected_count == 2)

        await wires[1].cut()
        await until(lambda: fleet.stats().connected_count == 1)
        assert [len((await fleet.lookup(KEYS, WAIT_SECONDS)).holders) for _ in range(10)] == [1] * 10
        assert fleet.stats().lookup_failures == 1


async def test_an_incomplete_coordinator_is_used_only_if_there_is_no_other(
    coordinator: Coordinator,
) -> None:
    async with AsyncExitStack() as stack:
        fresh = await stack.enter_async_context(
            Coordinator(CoordinatorConfig(port=0, http_port=OFF, lease_ttl=60))
        )  # partial for that long
        other, shelf = Shelf("a"), Shelf("b", port=8000)
        other.put(KEYS[:2])
        await stack.enter_async_context(other.join(coordinator.address))
        fleet = await stack.enter_async_context(shelf.join(fresh.address, coordinator.address))
        await fleet.started()
        await Asker(coordinator.address).until({"a": 512})
        await Asker(coordinator.address).until_complete()
        for _ in range(4):
            assert [holder.instance_id for holder in (await fleet.lookup(KEYS, WAIT_SECONDS)).holders] == ["a"]


async def test_coordinators_behind_one_name_come_and_go(coordinator: Coordinator) -> None:
    behind: list[str] = []
    resolved: list[str] = []

    async def resolve(name: str) -> list[str]:
        assert name == "coordinators:9000"
        resolved.append(name)
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
        second = await stack.enter_async_context(
            Coordinator(CoordinatorConfig(port=0, http_port=OFF, lease_ttl=LEASE_SECONDS))
        )
        behind.append(second.address)
        await Asker(second.address).until({"a": 512})
        await coordinator.aclose()
        await until(lambda: fleet.stats().connected_count == 1)
        behind.remove(coordinator.address)
        await until(lambda: [session.coordinator_address for session in fleet.sessions] == [second.address])
        behind.clear()  # for the moment the name resolves to nothing: existing members stay
        asked = len(resolved)
        await until(lambda: len(resolved) > asked + 1)
        assert fleet.stats().connected_count == 1


async def test_a_lookup_can_be_cancelled(coordinator: Coordinator) -> None:
    async with Wire(coordinator.port) as wire, Shelf().join(wire.address) as fleet:
        await fleet.started()
        wire.freeze()
        asking = asyncio.create_task(fleet.lookup(KEYS, 600))
        await asyncio.sleep(0.02)  # wherever that is
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking


async def test_a_lookup_ends_as_a_miss_when_the_fleet_is_left_under_it(coordinator: Coordinator) -> None:
    async with Wire(coordinator.port) as wire:
        async with Shelf().join(wire.address) as fleet:
            await fleet.started()
            wire.freeze()
            asking = asyncio.create_task(fleet.lookup(KEYS, 600))
            await asyncio.sleep(0.02)  # wherever that is
        assert not (await asyncio.wait_for(asking, WAIT_SECONDS)).holders
