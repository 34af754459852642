"""A node's membership, against a real coordinator over real sockets: what it holds is found, whatever breaks."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from hashlib import sha256

import pytest

from lmkv.config import CoordinatorConfig
from lmkv.config.kinds import OFF
from lmkv.errors import ConfigError
from lmkv.keys import ChunkKey
from lmkv_server.coordinator.coordinator import Coordinator
from tests.server.node.fleet_parts import KEYS, LEASE_SECONDS, Asker, Shelf, Wire
from tests.waiting import WAIT_SECONDS, eventually, until

SECRET = b"of node a, and a copy of it"


@pytest.fixture
def asker(coordinator: Coordinator) -> Asker:
    return Asker(coordinator.address)


# --- What is held is found ---------------------------------------------------------------------------------------


async def test_what_a_node_holds_is_found_and_changes_follow_at_once() -> None:
    shelf = Shelf()
    shelf.put(KEYS[:2])
    async with (
        Coordinator(CoordinatorConfig(port=0, http_port=OFF, lease_ttl=3600)) as coordinator,
        shelf.join(coordinator.address) as fleet,
    ):
        asker = Asker(coordinator.address)
        await fleet.started()
        assert fleet.connected
        await asker.until({"a": 512})
        shelf.put(KEYS[2:5])
        await asker.until({"a": 1280})  # not with a heartbeat: there is none for long
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
    async with shelf.join(coordinator.address):
        await asker.until({"a": 256 * 20_000}, keys[80_000:])
        await asker.until({"a": 256 * 20_000}, keys[:20_000])


async def test_usage_and_engines_follow_with_the_heartbeat(coordinator: Coordinator, asker: Asker) -> None:
    shelf = Shelf()
    async with shelf.join(coordinator.address) as fleet:
        await fleet.started()
        shelf.put(KEYS[:3])

        async def answers() -> list[tuple[bool, int, int]]:
            return [(one.synced, one.tiers[0].chunk_count, one.engine_count) for one in await asker.instances()]

        await eventually(answers, [(True, 3, 1)])


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
        assert not (await fleet.lookup(KEYS, 0.2)).holders
        async with Coordinator(CoordinatorConfig(port=coordinator.port, http_port=OFF, lease_ttl=LEASE_SECONDS)):
            await asker.until({"a": 768})
            shelf.put(KEYS[3:4])
            await asker.until({"a": 1024})
            await until(lambda: fleet.connected)


async def test_a_dead_node_leaves_lookups_within_its_lease(coordinator: Coordinator, asker: Asker) -> None:
    shelf = Shelf()
    shelf.put(KEYS[:2])
    async with Wire(coordinator.port) as wire, shelf.join(wire.address) as fleet:
        await asker.until({"a": 512})
        await wire.cut()
        await asker.until({})
        await until(lambda: not fleet.connected)


async def test_a_frozen_node_leaves_and_comes_back(coordinator: Coordinator, asker: Asker) -> None:
    shelf = Shelf()
    shelf.put(KEYS[:2])
    async with Wire(coordinator.port) as wire, shelf.join(wire.address):
        await asker.until({"a": 512})
        wire.freeze()
        await asker.until({})
        wire.thaw()
        await asker.until({"a": 512})


async def test_leaving_while_the_coordinator_goes_ends_both() -> None:
    for _ in range(5):
        async with AsyncExitStack() as stack:
            coordinator = await stack.enter_async_context(
                Coordinator(CoordinatorConfig(port=0, http_port=OFF, lease_ttl=LEASE_SECONDS))
            )
            fleet = await stack.enter_async_context(Shelf().join(coordinator.address))
            await fleet.started()
            async with asyncio.timeout(WAIT_SECONDS):
                await asyncio.gather(coordinator.aclose(), fleet.aclose())


async def test_a_node_starts_without_a_coordinator_and_joins_when_it_comes() -> None:
    async with Coordinator(CoordinatorConfig(port=0, http_port=OFF)) as gone:
        address, port = gone.address, gone.port
    shelf = Shelf()
    shelf.put(KEYS[:1])
    async with shelf.join(address) as fleet:
        await fleet.started()
        assert not fleet.connected
        async with Coordinator(CoordinatorConfig(port=port, http_port=OFF, lease_ttl=LEASE_SECONDS)):
            await Asker(address).until({"a": 256})


async def test_drift_is_found_and_repaired(coordinator: Coordinator, asker: Asker) -> None:
    shelf = Shelf()
    shelf.put(KEYS[:3])
    async with shelf.join(coordinator.address, digest_interval_seconds=0.1):
        await asker.until({"a": 768})
        del shelf.held[KEYS[1]]  # behind the fleet's back
        shelf.put(KEYS[9:10])
        await asker.until({"a": 256})


async def test_a_flood_of_changes_becomes_a_snapshot(
    coordinator: Coordinator, asker: Asker, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = Shelf()
    async with shelf.join(coordinator.address, max_pending_changes=10) as fleet:
        await fleet.started()
        await until(lambda: fleet.connected and all(session.state.is_synced for session in fleet.sessions))
        shelf.put(KEYS)
        await asker.until({"a": 256 * len(KEYS)})
        assert "10 changes are unreported" in caplog.text


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
            assert time.monotonic() - began >= LEASE_SECONDS, "the living one might have been about to expire"
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


async def test_a_node_whose_id_was_taken_says_so_once_and_takes_it_again(
    coordinator: Coordinator, asker: Asker, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = Shelf(port=7000), Shelf(port=7000)
    old.put(KEYS[:1])
    new.put(KEYS[:2])
    async with old.join(coordinator.address, secret=SECRET) as lost:
        await asker.until({"a": 256})
        async with new.join(coordinator.address, secret=SECRET):
            await asker.until({"a": 512})
            await until(lambda: lost.stats().refused_count == 1)
            assert not lost.connected
        await asker.until({"a": 256})
        assert lost.stats().refused_count == 0
    assert caplog.text.count("lost its registration") == 1
    assert "give each its own instance_id" in caplog.text
