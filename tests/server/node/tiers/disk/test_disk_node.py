"""Whole nodes with a disk: what engines store outlives the node, is found by all, and is dropped when it shall."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from google.longrunning import operations_pb2_grpc
from prometheus_client import generate_latest

from lmkv import rpc
from lmkv.config import CoordinatorConfig, NodeConfig
from lmkv.config.kinds import OFF
from lmkv.errors import ChunkNotFound
from lmkv.keys import ChunkKey, join_keys, split_keys
from lmkv.rpc.messages import by_keys
from lmkv.tiers import DISK, HOST
from lmkv.v1 import cache_service_pb2, cache_service_pb2_grpc, engine_service_pb2
from lmkv.v1.cache_service_pb2 import MoveRequest, MoveResult
from lmkv.v1.chunk_pb2 import Position
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.node.cache.host import Chunk
from lmkv_server.node.node import Node
from tests.server.node.cases import chunk_key, chunk_keys
from tests.server.node.disk_parts import files, until
from tests.server.node.engine_client import EngineClient, absent_count, runs
from tests.server.node.node_parts import NodeProcess
from tests.server.node.whole_nodes import SPEC, load, mapped, store, until_free
from tests.support.operations import wait_for_operation
from tests.waiting import WAIT_SECONDS, eventually, is_listening

START_SECONDS = 30.0


def settings(folder: Path, instance_id: str, **more: object) -> dict[str, Any]:
    return {
        "instance_id": instance_id,
        "runtime_dir": str(folder),
        "max_local_cpu_size": "16MB",
        "local_disk": f"{folder}/disk",
        "max_local_disk_size": "64MB",
        "enable_p2p": False,
        "coordinator_timeout": 20.0,
    } | more


AtNode = tuple[Node, EngineClient]


@asynccontextmanager
async def engine_at_node(folder: Path, instance_id: str = "n", **more: object) -> AsyncIterator[AtNode]:
    async with Node(NodeConfig(**settings(folder, instance_id, **more))) as node, EngineClient(node) as engine:
        yield node, engine


async def written(node: Node, count: int) -> None:
    assert node.disk
    disk = node.disk
    await until(lambda: disk.chunk_count == count)


async def test_what_was_stored_before_a_restart_is_found_and_loaded(runtime_dir: Path) -> None:
    async with engine_at_node(runtime_dir) as (node, engine):
        await store(engine, node.pool, 0, 1, 2)
        assert len((await engine.lookup("1", chunk_keys(0, 1, 2))).own) == 3
    async with engine_at_node(runtime_dir) as (node, engine):
        found = await engine.lookup("1", chunk_keys(0, 1, 2, 3), reserve_count=4)
        assert (len(found.own), runs(found)) == (0, {"disk": 3})
        assert len(await engine.hear("credits")) == 1, "each chunk that is found makes it one fewer"
        assert await load(engine, node.pool, "1", 0, 3) == [0, 1, 2]
        assert [chunk.holds for chunk in node.tier] == [1, 1, 1]
        await engine.release("1")
        found = await engine.lookup("2", chunk_keys(0, 1, 2))
        assert (len(found.own), absent_count(found)) == (3, 0), "they are in memory now"
        counts = node.service.lookups.stats().found_chunks
        assert (counts["own"], counts["disk"], counts["peers"]) == (3, 3, 0)


async def test_a_prompt_may_be_partly_in_memory_and_partly_on_disk(runtime_dir: Path) -> None:
    async with engine_at_node(runtime_dir) as (node, engine):
        await store(engine, node.pool, 0, 1, 2, 3)
        await written(node, 4)
        node.tier.drop(chunk_keys(1, 2, 3))
        found = await engine.lookup("1", chunk_keys(0, 1, 2, 3))
        assert (len(found.own), runs(found)) == (1, {"disk": 3})
        assert await load(engine, node.pool, "1", 2, 2) == [2, 3]


async def test_a_load_of_what_turns_out_to_be_torn_says_how_far_it_came(runtime_dir: Path) -> None:
    async with engine_at_node(runtime_dir) as (node, engine):
        await store(engine, node.pool, 0, 1, 2)
        await written(node, 3)
        node.tier.drop(chunk_keys(0, 1, 2))
        tear(runtime_dir, chunk_key(1))
        assert absent_count(await engine.lookup("1", chunk_keys(0, 1, 2))) == 3
        assert await load(engine, node.pool, "1", 0, 3) == [0]
        await engine.release("1")
        assert absent_count(await engine.lookup("2", chunk_keys(0, 1, 2))) == 0
        await engine.release("2")
        assert await until_free(node)


async def test_a_load_without_a_timeout_ends_at_once(runtime_dir: Path) -> None:
    """As docs/reference/engine-protocol.md says."""
    async with engine_at_node(runtime_dir) as (node, engine):
        await store(engine, node.pool, 0)
        await written(node, 1)
        node.tier.drop(chunk_keys(0))
        assert runs(await engine.lookup("1", chunk_keys(0))) == {"disk": 1}
        await engine.say(load=[engine_service_pb2.LoadChunks(lookup_id="1", first_chunk=0, chunk_count=1)])
        (loaded,) = await engine.hear("loaded")
        assert (loaded.done, len(loaded.chunks)) == (True, 0)
        assert isinstance(rpc.from_status(loaded.status), ChunkNotFound)


def tear(runtime_dir: Path, key: ChunkKey) -> None:
    (path,) = (path for path in files(runtime_dir / "disk" / "n") if path.name.startswith(key.hex()))
    with path.open("r+b") as file:
        file.write(b"torn")


async def test_a_reset_forgets_what_is_on_disk_too(runtime_dir: Path) -> None:
    async with engine_at_node(runtime_dir) as (node, engine):
        await store(engine, node.pool, 0, 1)
        await written(node, 2)
        node.tier.drop(chunk_keys(1))
        await engine.say(reset=True)
        assert await engine.hear("reset") == [2]
        assert node.disk
        await node.disk.settle()
        assert not files(runtime_dir / "disk" / "n")


async def test_what_disk_would_take_longer_for_than_computing_is_refused(runtime_dir: Path) -> None:
    async with engine_at_node(runtime_dir) as (node, engine):
        await store(engine, node.pool, 0, 1)
        await written(node, 2)
        node.tier.drop(chunk_keys(0, 1))
        assert node.disk
        for _ in range(2):  # a measured disk: a MiB takes ten seconds
            node.disk.reader._bandwidth.record_read(16 << 20, 160.0, time.monotonic())
        found = await engine.lookup("1", chunk_keys(0, 1), prefill_tokens_per_second=10**9)
        assert (absent_count(found), found.refused_chunk_count) == (0, 2)
        found = await engine.lookup("2", chunk_keys(0, 1), prefill_tokens_per_second=1)
        assert (absent_count(found), found.refused_chunk_count) == (2, 0)


async def test_a_read_is_expected_to_wait_for_those_that_run(runtime_dir: Path) -> None:
    async with engine_at_node(runtime_dir) as (node, engine):
        await store(engine, node.pool, 0, 1)
        await written(node, 2)
        node.tier.drop(chunk_keys(0, 1))
        assert node.disk
        reader = node.disk.reader
        for _ in range(2):  # a measured disk: 1 MiB takes a second
            reader._bandwidth.record_read(16 << 20, 16.0, time.monotonic())
        alone = reader.expected_seconds(1 << 20)
        during: list[float | None] = []
        keys, sizes = chunk_keys(0, 1), [0, 0]

        def came(index: int, chunk: Chunk) -> None:
            sizes[index] = chunk.size_bytes
            during.append(reader.expected_seconds(1 << 20))

        await reader.read(engine.spec.fingerprint, keys, 10.0, came)
        assert alone == pytest.approx(1.0)
        assert during[0] == pytest.approx(1.0 + min(sizes) / (1 << 20)), "the other chunk is still to come"
        assert during[1] == alone
        assert reader.expected_seconds(1 << 20) == alone


async def test_metrics_describe_the_disk(runtime_dir: Path) -> None:
    async with engine_at_node(runtime_dir) as (node, engine):
        await store(engine, node.pool, 0, 1)
        await written(node, 2)
        shown = generate_latest(node.metrics.registry).decode()
    assert 'lmkv_node_tier_chunks{tier="disk"} 2.0' in shown
    assert 'lmkv_node_tier_written_chunks_total{tier="disk"} 2.0' in shown
    assert 'lmkv_node_tier_down_backends{tier="disk"} 0.0' in shown
    assert 'lmkv_node_tier_capacity_bytes{tier="disk"} 6.7108864e+07' in shown


# ---- with others


@asynccontextmanager
async def fleet(folder: Path) -> AsyncIterator[tuple[Coordinator, AtNode, AtNode]]:
    """A coordinator, a node with a disk and one without."""
    async with Coordinator(CoordinatorConfig(port=0, http_port=OFF)) as coordinator:
        more = {"coordinator_address": coordinator.address, "enable_p2p": True}
        async with (
            engine_at_node(folder, "holder", **more) as holder,
            engine_at_node(folder, "asker", local_disk="", **more) as asker,
        ):
            yield coordinator, holder, asker


async def test_peers_get_what_is_only_on_disk(runtime_dir: Path) -> None:
    async with fleet(runtime_dir) as (_, (holder, storing), (asker, asking)):
        await store(storing, holder.pool, 0, 1, 2)
        await written(holder, 3)
        holder.tier.drop(chunk_keys(0, 1, 2))
        numbers = itertools.count()

        async def found() -> tuple[str, int]:
            one = await asking.lookup(str(next(numbers)), chunk_keys(0, 1, 2))
            return one.peer_instance_id, absent_count(one)

        await eventually(found, ("holder", 3))  # once the coordinator knows
        last = await asking.lookup("last", chunk_keys(0, 1, 2))
        assert await load(asking, asker.pool, last.lookup_id, 0, 3) == [0, 1, 2]
        assert await until_free(holder)


@pytest.mark.parametrize(("tier", "left"), [(DISK, (0, 3)), (HOST, (3, 0)), ("", (0, 0))])
async def test_a_clear_drops_from_the_tier_that_it_names_or_from_all(
    runtime_dir: Path, tier: str, left: tuple[int, int]
) -> None:
    async with fleet(runtime_dir) as (coordinator, (holder, storing), _):
        await store(storing, holder.pool, 0, 1, 2)
        await written(holder, 3)
        async with rpc.open_channel(coordinator.address) as channel:
            cache: Any = cache_service_pb2_grpc.CacheServiceStub(channel)
            operations: Any = operations_pb2_grpc.OperationsStub(channel)
            await until_listed(cache, HOST, 3)
            clear = await cache.Clear(
                cache_service_pb2.ClearRequest(instance_id="holder", tier=tier, all=True), timeout=WAIT_SECONDS
            )
            clear = await wait_for_operation(operations, clear.name)
        result = cache_service_pb2.ClearResult()
        assert clear.response.Unpack(result)
        assert (result.chunk_count, result.token_count) == (3, 3 * SPEC.chunk_size)
        assert holder.disk
        assert (holder.disk.chunk_count, len(holder.tier)) == left
        assert len(files(runtime_dir / "disk" / "holder")) == left[0], "the files are gone when the clear is over"


async def test_a_move_from_disk_leaves_nothing_there_and_one_to_disk_is_refused(runtime_dir: Path) -> None:
    async with fleet(runtime_dir) as (coordinator, (holder, storing), (asker, _)):
        await store(storing, holder.pool, 0, 1, 2)
        await written(holder, 3)
        holder.tier.drop(chunk_keys(0, 1, 2))
        here, there = Position(instance_id="asker"), Position(instance_id="holder", tier=DISK)
        keys = join_keys(chunk_keys(0, 1, 2))
        async with rpc.open_channel(coordinator.address) as channel:
            cache: Any = cache_service_pb2_grpc.CacheServiceStub(channel)
            operations: Any = operations_pb2_grpc.OperationsStub(channel)
            await until_listed(cache, DISK, 3)
            ends = []
            for old, new in ((there, here), (here, there)):
                move = await cache.Move(
                    MoveRequest(prompt=by_keys(split_keys(keys)), old_position=old, new_position=new),
                    timeout=WAIT_SECONDS,
                )
                ends.append(await wait_for_operation(operations, move.name))
        result = MoveResult()
        assert ends[0].response.Unpack(result)
        assert (result.chunk_count, result.dropped_chunk_count) == (3, 3)
        assert holder.disk
        assert (holder.disk.chunk_count, len(asker.tier)) == (0, 3)
        assert rpc.from_status(ends[1].error).reason == "TIER_UNSUPPORTED"


async def until_listed(cache: Any, tier: str, count: int) -> None:
    """Waits until the coordinator knows of this number of chunks, with this tier as their fastest."""
    request = cache_service_pb2.LookupRequest(prompt=by_keys(chunk_keys(*range(count))))

    async def runs() -> list[tuple[str, int]]:
        holders = (await cache.Lookup(request, timeout=WAIT_SECONDS)).holders
        return [(run.tier, run.chunk_count) for holder in holders for run in holder.runs]

    await eventually(runs, [(tier, count)])


# ---- a real process, killed


async def test_after_kill_9_a_node_serves_what_it_had_written(runtime_dir: Path) -> None:
    node = NodeProcess(runtime_dir, (), settings(runtime_dir, "n"))
    try:
        await until(lambda: is_listening(node.socket))
        async with EngineClient(node.socket) as engine:
            with mapped(engine) as attached:
                await store(engine, attached.pool, 0, 1, 2, 3)
            await until(lambda: len(files(runtime_dir / "disk" / "n")) == 4)
        node.stop(signal.SIGKILL)
        node.socket.unlink()  # so that clients wait for the socket of the next process
        node = NodeProcess(runtime_dir, (), settings(runtime_dir, "n"))
        await until(lambda: is_listening(node.socket))
        async with EngineClient(node.socket) as engine:
            assert absent_count(await engine.lookup("1", chunk_keys(0, 1, 2, 3))) == 4
            with mapped(engine) as attached:
                assert await load(engine, attached.pool, "1", 0, 4) == [0, 1, 2, 3]
    finally:
        node.stop(signal.SIGKILL)
