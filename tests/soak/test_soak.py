"""The soak test: engines store, fetch and give up, chunks are moved, nodes are killed and frozen; then nothing is left.

`make soak` runs it for ten minutes, every run of the tests for some seconds. LMKV_SOAK_SECONDS says for how long,
LMKV_SOAK_SEED by which schedule; the seed is printed.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from lmkv_client.demo.cluster import Coordinator
from lmkv_kernels import checksum
from tests.soak.actors import TROUBLE, Actor, EngineActor, MoveActor, Reaper, Watcher
from tests.soak.fleet import PROMPTS, SPEC, SoakNode, words_of

SECONDS = float(os.environ.get("LMKV_SOAK_SECONDS", "20"))
SEED = int(os.environ.get("LMKV_SOAK_SEED", random.SystemRandom().randrange(1 << 32)))
CHANNELS = {"node-1": "auto", "node-2": "auto", "node-3": "tcp", "node-4": "nixl"}
"""Bytes go by shared memory, sockets and NIXL; between the last two not at all."""
ENGINES = 2
"""At each node."""
READY_SECONDS = 30.0
CALM_SECONDS = 60.0
"""So long it may take until nothing is left: grants expire after four seconds."""
NOTHING_LEFT = ("engines", "read_grants", "quarantined_batches", "quarantined_bytes", "pool_reserved_bytes")


@pytest.mark.timeout(SECONDS + 180)
async def test_whoever_dies_or_freezes_no_byte_is_wrong_and_nothing_is_left(
    tmp_path: Path, short_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        print(f"\nLMKV_SOAK_SEED={SEED} LMKV_SOAK_SECONDS={SECONDS:g}")
    counts: Counter[str] = Counter()
    with Coordinator(tmp_path) as coordinator:
        nodes = [
            SoakNode(name, short_folder, tmp_path, coordinator.address, channel) for name, channel in CHANNELS.items()
        ]
        try:
            for node in nodes:
                node.start()
            for node in nodes:
                await ready(node)
            engines = [EngineActor(node, number, SEED, counts) for node in nodes for number in range(ENGINES)]
            others = [MoveActor(nodes, coordinator.address, SEED, counts), Reaper(nodes, SEED, counts)]
            await act([*engines, *others, Watcher(nodes, SEED, counts)])
            for node in nodes:
                node.thaw()
                if not node.process.alive:
                    node.start()
                await ready(node)
            for node in nodes:
                counts["chunks compared"] += await check_contents(node)
            for node in nodes:
                await nothing_left(node)
            await told(coordinator, nodes)
        finally:
            for node in nodes:
                node.thaw()
                node.process.request_stop()
            for node in nodes:
                await asyncio.to_thread(node.process.stop)
    with capsys.disabled():
        print(", ".join(f"{count} {what}" for what, count in sorted(counts.items())))
    assert counts["chunks fetched"] > 0
    assert counts["chunks compared"] > 0


async def act(actors: Iterable[Actor]) -> None:
    """Has everybody act for the time of the test. Raises `WrongBytes` if one of them sees any."""
    tasks = [asyncio.create_task(actor.run(), name=actor.name) for actor in actors]
    try:
        done, _ = await asyncio.wait(tasks, timeout=SECONDS, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def ready(node: SoakNode) -> None:
    """Waits until engines can attach."""
    deadline = time.monotonic() + READY_SECONDS
    while True:
        try:
            async with node.engine():
                return
        except TROUBLE:
            assert time.monotonic() < deadline, node.process.log()
            await asyncio.sleep(0.1)


async def check_contents(node: SoakNode) -> int:
    """Asserts that every chunk that the node holds is what it should be; how many these are."""
    count = 0
    async with node.engine() as engine:
        for key in (key for prompt in PROMPTS for key in prompt):
            found = await engine.client.lookup("look", [key])
            for extent in found.own:
                engine.check(key, extent)
                words = words_of(key)
                assert extent.checksum == checksum(words.data, 0, SPEC.chunk_bytes)
                count += 1
            await engine.client.release("look")
        metrics = await node.metrics()
    assert count == metrics["chunks"], "the node holds chunks that nobody stored"
    return count


async def nothing_left(node: SoakNode) -> None:
    """Waits until every byte of the pool is free or a chunk's, and nobody has leave to touch it."""
    deadline = time.monotonic() + CALM_SECONDS
    while True:
        metrics = await node.metrics()
        left = {name: metrics[name] for name in NOTHING_LEFT if metrics[name]}
        if not left and metrics["pool_used_bytes"] == metrics["pool_chunk_bytes"] and not metrics["orders_running"]:
            return
        assert time.monotonic() < deadline, f"{node.name} keeps {left}: {metrics}"
        await asyncio.sleep(0.1)


async def told(coordinator: Coordinator, nodes: Sequence[SoakNode]) -> None:
    """Waits until the coordinator knows of as many chunks as each node has."""
    deadline = time.monotonic() + CALM_SECONDS
    while True:
        instances = await asyncio.to_thread(coordinator.instances)
        known = {name: sum(tier.chunk_count for tier in instance.tiers) for name, instance in instances.items()}
        held = {node.name: (await node.metrics())["chunks"] for node in nodes}
        if known == held:
            return
        assert time.monotonic() < deadline, f"the coordinator knows of {known}, the nodes hold {held}"
        await asyncio.sleep(0.1)
