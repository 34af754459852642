"""The reasons of misses in the answers to lookups, over the node's real unix socket."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from pathlib import Path

from lmkv.config import CoordinatorConfig
from lmkv.config.kinds import OFF
from lmkv.misses import MissReason, reason_from_proto
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client.demo.process import free_port
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.node.node import Node
from tests.server.node.cases import hashed_keys
from tests.server.node.engine_client import EngineClient
from tests.server.node.engines.pool_checks import CAPACITY, SPEC
from tests.server.node.fleet_parts import Wire
from tests.server.node.node_parts import node_config
from tests.server.node.prompts import SIZE, look_up, prompt, store_prompt
from tests.waiting import until


def missed(found: pb.FoundChunks) -> list[tuple[MissReason | None, int]]:
    return [(reason_from_proto(span.reason), span.chunk_count) for span in found.missed]


async def lookup_once(engine: EngineClient, number: int) -> pb.FoundChunks:
    """Looks one chunk up, and releases it at once."""
    found = await engine.lookup(str(number), hashed_keys(number))
    await engine.release(str(number))
    return found


async def test_a_prompt_that_is_new_was_never_stored_and_a_whole_hit_misses_nothing(engine: EngineClient) -> None:
    found = await engine.lookup("1", hashed_keys(0, 1, 2))
    assert missed(found) == [(MissReason.NEVER_STORED, 3)]
    assert not found.missed[0].HasField("remove_time")
    await engine.store(hashed_keys(0, 1, 2))
    assert missed(await engine.lookup("2", hashed_keys(0, 1, 2))) == []
    assert missed(await engine.lookup("3", hashed_keys(0, 1, 2, 3))) == [(MissReason.NEVER_STORED, 1)]


async def test_what_was_evicted_says_for_what_and_when(node: Node, engine: EngineClient) -> None:
    began = time.time()
    await engine.store(hashed_keys(0))
    await until(lambda: len(node.tier) == 1)
    granted = [node.tier.reserve(SPEC.chunk_bytes) for _ in range(CAPACITY)]
    assert all(granted)
    found = await engine.lookup("1", hashed_keys(0, 1))
    assert missed(found) == [(MissReason.EVICTED_BY_STORE, 2)]
    assert found.missed[0].tier == "own"
    assert began - 1 <= found.missed[0].remove_time.ToMilliseconds() / 1000 <= time.time() + 1


async def test_what_was_reset_or_damaged_says_so_until_it_is_stored_again(engine: EngineClient) -> None:
    await engine.store(hashed_keys(0, 1))
    await engine.say(drop_damaged=hashed_keys(1))
    assert missed(await engine.lookup("1", hashed_keys(0, 1))) == [(MissReason.DAMAGED, 1)]
    await engine.release("1")
    await engine.say(reset=True)
    assert await engine.hear("reset") == [1]
    assert missed(await engine.lookup("2", hashed_keys(0, 1))) == [(MissReason.CLEARED, 2)]
    await engine.store(hashed_keys(0))
    assert missed(await engine.lookup("3", hashed_keys(0, 1))) == [(MissReason.DAMAGED, 1)]


async def test_chunks_behind_a_dropped_one_are_behind_a_gap(engine: EngineClient) -> None:
    await engine.store(hashed_keys(0, 1, 2, 3))
    await engine.say(drop_damaged=hashed_keys(1))
    found = await engine.lookup("1", hashed_keys(0, 1, 2, 3))
    assert missed(found) == [(MissReason.DAMAGED, 1), (MissReason.BEHIND_GAP, 2)]


async def test_peers_may_hold_what_is_missed_while_no_coordinator_answers(runtime_dir: Path) -> None:
    alone = node_config(runtime_dir, "alone", coordinator_address=(f"127.0.0.1:{free_port()}",))
    async with Node(alone) as node, EngineClient(node) as engine:
        found = await engine.lookup("1", hashed_keys(0, 1))
        assert missed(found) == [(MissReason.TIER_DOWN, 2)]
        assert found.missed[0].tier == "peers"


async def test_peers_may_hold_what_is_missed_if_one_coordinator_of_two_did_not_answer(runtime_dir: Path) -> None:
    async with AsyncExitStack() as stack:
        silent, other = [
            await stack.enter_async_context(Coordinator(CoordinatorConfig(port=0, http_port=OFF, lease_ttl=30.0)))
            for _ in range(2)
        ]
        wire = await stack.enter_async_context(Wire(silent.port))
        config = node_config(runtime_dir, "alone", coordinator_address=(wire.address, other.address))
        node = await stack.enter_async_context(Node(config))
        engine = await stack.enter_async_context(EngineClient(node))
        await until(lambda: node.fleet.stats().connected_count == 2)
        wire.freeze()
        found = [
            await lookup_once(engine, number) for number in range(2)
        ]  # at least one of them is sent to the silent one
        assert [(MissReason.TIER_DOWN, 1)] in [missed(one) for one in found]
        assert {span.tier for one in found for span in one.missed} <= {"peers", ""}


async def test_what_the_disk_has_evicted_says_so(runtime_dir: Path) -> None:
    """Pool and disk have room for four chunks each: what has left both is missed because of the disk."""
    size = f"{4 * SPEC.chunk_bytes}B"
    settings = {"local_disk": f"{runtime_dir}/disk", "max_local_disk_size": size, "max_local_cpu_size": size}
    config = node_config(runtime_dir, "small", enable_p2p=False, **settings)
    async with Node(config) as node, EngineClient(node) as engine:
        for number in range(12):
            await engine.store(hashed_keys(number))
            await until(lambda: node.disk and node.disk.get(hashed_keys(number)[0]))  # noqa: B023
        found = [await lookup_once(engine, number) for number in range(12)]
        reasons = {(missed(one)[0][0], one.missed[0].tier) for one in found if one.missed}
        assert reasons == {(MissReason.EVICTED_FROM_TIER, "disk")}


async def test_behind_a_tail_the_chunk_that_it_begins_is_missed(node: Node, engine: EngineClient) -> None:
    first = prompt(SIZE + 21)
    await store_prompt(engine, node.pool, first)
    found = await look_up(engine, "1", prompt(3 * SIZE, seed=1, after=first))
    assert found.partial_token_count == 21
    assert missed(found) == [(MissReason.NEVER_STORED, 2)]
