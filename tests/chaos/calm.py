"""The state after all faults end: within a minute nothing is left behind and all processes agree."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import grpc

from lmkv.keys import ChunkKey
from lmkv.tiers import DISK, HOST
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_kernels import checksum
from tests.chaos.actor import TROUBLE
from tests.chaos.asker import holders
from tests.chaos.engine import PROMPTS, SPEC, Engine, words_of
from tests.chaos.fleet import Fleet
from tests.chaos.operators import Line
from tests.chaos.victim import Coordinator, Node, Victim
from tests.chaos.watchers import LayoutWatcher

READY_SECONDS = 120.0
CALM_SECONDS = 180.0
"""So long it may take until nothing is left: a grant expires after four seconds, a full disk is tried after sixty."""
LOOKUPS = 50
"""Maximum lookups in flight to a node."""
MAX_ERROR = 5000
"""Characters that are shown of an error in a log."""
DIFFERENCE = "the layout map has"
"""What a coordinator logs when digests differ: it mends that, but must never have to."""
NOTHING_LEFT = (
    "engines",
    "read_grants",
    "quarantined_batches",
    "quarantined_bytes",
    "pool_reserved_bytes",
    "orders_running",
    "handoffs_sending",
    "handoffs_receiving",
    "tier_down_backends/disk",
    "tier_waiting_chunks/disk",
)


async def calm(fleet: Fleet, watchers: Sequence[LayoutWatcher]) -> int:
    """Waits until all is calm. Raises `AssertionError` if something stays. Answers how many chunks it compared."""
    for victim in fleet.victims.values():
        victim.thaw()
        if not victim.is_wanted:
            victim.start()
    for node in fleet.nodes:
        await ready(node)
    for coordinator in fleet.coordinators:
        await asyncio.to_thread(coordinator.server.wait_ready)
        await until(partial(over, coordinator), coordinator)
    for node in fleet.nodes:
        await until(partial(left, node), node)
    for node in fleet.nodes:
        await until(partial(unshared, node, fleet), node)
        await until(partial(disagreement, node, fleet.coordinators, watchers), node)
    for coordinator in fleet.coordinators:
        await until(partial(found, coordinator, fleet.nodes, watchers[0]), coordinator)
    held = []
    for node in fleet.nodes:
        await until(partial(unlisted, node, watchers[0]), node)  # a busy host: leases expire, and nodes join again
        held.append(await contents(node, set(watchers[0].held(node.name, HOST))))
    for coordinator in fleet.coordinators:  # again: one that had just started knew no operation that nodes report
        await until(partial(over, coordinator), coordinator)
    for victim in fleet.victims.values():
        log = victim.process.log()
        error = log.partition("Traceback")[2][:MAX_ERROR]
        assert not error, f"{victim.name}: {victim.process.log_file} contains an error:{error}"
        assert DIFFERENCE not in log, f"{victim.name}: its layout map was wrong, as {victim.process.log_file} reporting"
    return sum(held)


async def ready(node: Node) -> None:
    """Waits until engines can attach."""
    deadline = time.monotonic() + READY_SECONDS
    while True:
        try:
            async with node.engine():
                return
        except TROUBLE:
            assert time.monotonic() < deadline, node.process.log()[-2000:]
            await asyncio.sleep(0.1)


async def until(what_is_wrong: Callable[[], Awaitable[str]], victim: Victim) -> None:
    """Waits until nothing is."""
    deadline = time.monotonic() + CALM_SECONDS
    while wrong := await what_is_wrong():
        assert time.monotonic() < deadline, (
            f"{victim.name}: {wrong}; the end of its log:\n{victim.process.log()[-3000:]}"
        )
        await asyncio.sleep(0.2)


async def over(coordinator: Coordinator) -> str:
    async with Line(coordinator) as line:
        try:
            running, pins = await line.running(), await line.pins()
        except grpc.RpcError as error:
            return f"does not answer: {error}"
    return f"operations run: {running}; pins are in force: {pins}" if running or pins else ""


async def left(node: Node) -> str:
    """What is not a chunk's and not free, or who has leave to touch it."""
    metrics = await node.metrics()
    kept = {name: metrics[name] for name in NOTHING_LEFT if metrics.get(name)}
    if metrics["pool_used_bytes"] != metrics["pool_chunk_bytes"]:
        kept["pool_used_bytes"] = metrics["pool_used_bytes"]
    return f"keeps {kept}: {metrics}" if kept else ""


async def unshared(node: Node, fleet: Fleet) -> str:
    """Differences between coordinators that share a layout map, or between the map and the chunks of the node."""
    maps = {name: relay.map_ids.get(node.name, "") for name, relay in fleet.relays.items()}
    reporting = [relay.reports_chunks(node.name) for relay in fleet.relays.values()]
    if fleet.shares_map:
        is_well = len(set(maps.values())) == 1 and all(maps.values()) and sorted(reporting) == [[False], [True]]
    else:
        is_well = not any(maps.values()) and reporting == [[True], [True]]
    return "" if is_well else f"reports its chunks over streams {reporting} to coordinators with the maps {maps}"


async def disagreement(node: Node, coordinators: Sequence[Coordinator], watchers: Sequence[LayoutWatcher]) -> str:
    """Differences between what coordinators report, in answers and to watchers, and what the node holds."""
    metrics = await node.metrics()
    there = {HOST: metrics["chunks"]} | ({DISK: metrics["tier_chunks/disk"]} if node.has_disk else {})
    wrong = []
    for coordinator, watcher in zip(coordinators, watchers, strict=True):
        instance = (await asyncio.to_thread(coordinator.server.instances)).get(node.name)
        usage = {tier.tier: tier.chunk_count for tier in instance.tiers} if instance else {}
        known = {tier: len(watcher.held(node.name, tier)) for tier in there}
        if not usage == known == there:
            wrong.append(f"{coordinator.name} says {usage}, and {known} to its watcher, where {there} are")
    for tier in there:
        one, other = (watcher.held(node.name, tier) for watcher in watchers)
        if one != other:
            wrong.append(f"coordinators know of {len(one - other)} and {len(other - one)} that the other does not")
    return "; ".join(wrong)


async def found(coordinator: Coordinator, nodes: Sequence[Node], watcher: LayoutWatcher) -> str:
    """Differences between the answers of a coordinator and the events that a watcher received."""
    keys = [key for prompt in PROMPTS for key in prompt]
    held = {node.name: watcher.held(node.name, HOST) | watcher.held(node.name, DISK) for node in nodes}
    wrong = 0
    async with Line(coordinator) as line:
        for some in batched(keys):
            said, is_partial = await holders(line, some)
            if is_partial:
                return "answers are partial"
            wrong += sum(
                {name for name in held if key in held[name]} != names for key, names in zip(some, said, strict=True)
            )
    return f"names others than who holds them for {wrong} of {len(keys)} chunks" if wrong else ""


async def unlisted(node: Node, watcher: LayoutWatcher) -> str:
    """Differences between the number of chunks in the memory of the node and of those that a watcher knows there."""
    there = (await node.metrics())["chunks"]
    known = len(watcher.held(node.name, HOST))
    return "" if known == there else f"has {there:g} chunks in memory, the watcher knows {known}"


async def contents(node: Node, keys: set[ChunkKey]) -> int:
    """Asserts that the node has these chunks in memory, that each is what it should be, and that there are no others.

    Answers how many these are.
    """
    count = 0
    async with node.engine() as engine:
        for some in batched(sorted(keys)):
            for key, chunk in await looked_up(engine, some):
                engine.check(key, chunk)
                assert chunk.checksum == checksum(words_of(key).data, 0, SPEC.chunk_bytes)
                count += 1
            await engine.client.say(release=[pb.ReleaseChunks(lookup_id=key.hex()) for key in some])
    assert count == len(keys) == (await node.metrics())["chunks"], f"of {len(keys)} chunks {node.name} has {count}"
    return count


def batched(keys: Sequence[ChunkKey]) -> list[Sequence[ChunkKey]]:
    """The keys, some at a time."""
    return [keys[start : start + LOOKUPS] for start in range(0, len(keys), LOOKUPS)]


async def looked_up(engine: Engine, keys: Sequence[ChunkKey]) -> list[tuple[ChunkKey, pb.HeldChunk]]:
    """Those of the keys that the node has in memory, each looked up by itself, all at once."""
    await engine.client.say(lookup=[pb.LookupChunks(lookup_id=key.hex(), chunk_keys=key) for key in keys])
    found: list[pb.FoundChunks] = []
    while len(found) < len(keys):
        found += await engine.client.hear("found")
    return [(ChunkKey(bytes.fromhex(one.lookup_id)), chunk) for one in found for chunk in one.own]
