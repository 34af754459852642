"""Tails of hits beyond one pool: from disk, from a pool that outlived its node, and from a peer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lmkv import rpc
from lmkv.config import CoordinatorConfig
from lmkv.config.kinds import OFF
from lmkv.keys import ChunkKey
from lmkv.rpc.messages import by_tokens
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1.cache_service_pb2 import (
    ClearRequest,
    ExplainRequest,
    LookupRequest,
    MoveProgress,
    MoveRequest,
    PinRequest,
    UnpinRequest,
)
from lmkv.v1.cache_service_pb2_grpc import CacheServiceStub
from lmkv.v1.chunk_pb2 import MISS_REASON_NEVER_STORED, Position
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.node.node import Node
from tests.server.node.engine_client import EngineClient
from tests.server.node.node_parts import node_config
from tests.server.node.prompts import SIZE, SPEC, hit_tokens, keys_of, look_up, prompt, store_prompt
from tests.server.node.warm_parts import verified
from tests.waiting import WAIT_SECONDS, eventually, until


@asynccontextmanager
async def a_node(folder: Path, name: str = "n", /, **settings: object) -> AsyncIterator[tuple[Node, EngineClient]]:
    async with Node(node_config(folder, name, **settings)) as node:
        async with EngineClient(node, f"engine-{name}") as engine:
            if node.warm:
                await verified(node.warm)
            yield node, engine
        await until(lambda: not node.engines.mapped_count)
        assert not any(chunk.holds for chunk in node.tier)
        node.tier.check()
        node._partial_chunks.check()


def on_disk(folder: Path) -> dict[str, object]:
    return {"local_disk": f"{folder}/disk", "max_local_disk_size": "64MB", "enable_p2p": False}


async def written(node: Node, count: int) -> None:
    disk = node.disk
    assert disk
    await until(lambda: disk.chunk_count == count)


async def on_the_disk(node: Node, tokens: list[int]) -> None:
    disk = node.disk
    assert disk
    await until(lambda: disk.get(keys_of(tokens)[-1]) is not None)


@pytest.mark.parametrize("before", [0, 1])
async def test_a_tail_on_disk_is_found_before_and_after_a_restart(runtime_dir: Path, before: int) -> None:
    first = prompt(before * SIZE + 21)
    longer = prompt(4 * SIZE, seed=1, after=first)
    async with a_node(runtime_dir, **on_disk(runtime_dir)) as (node, engine):
        await store_prompt(engine, node.pool, first)
        await written(node, before + 1)
        node.tier.drop(keys_of(first)[-1:])
        assert await hit_tokens(engine, node.pool, "1", longer) == len(first)
        assert node.tier.get(keys_of(first)[-1]), "it is in memory now"
        node.tier.drop(keys_of(first))
    async with a_node(runtime_dir, **on_disk(runtime_dir)) as (node, engine):
        found = await look_up(engine, "1", longer)
        assert (len(found.own), found.partial_token_count) == (0, 21)
        assert [(run.tier, run.chunk_count) for run in found.runs] == [("disk", before + 1)]
        await engine.release("1")
        assert await hit_tokens(engine, node.pool, "2", longer) == len(first)
        assert await hit_tokens(engine, node.pool, "3", longer) == len(first)


async def test_a_tail_in_the_pool_is_found_behind_chunks_on_disk(runtime_dir: Path) -> None:
    first = prompt(SIZE + 21)
    async with a_node(runtime_dir, **on_disk(runtime_dir)) as (node, engine):
        await store_prompt(engine, node.pool, first)
        await written(node, 2)
        node.tier.drop(keys_of(first)[:1])
        longer = prompt(4 * SIZE, seed=1, after=first)
        found = await look_up(engine, "1", longer)
        assert [(run.tier, run.chunk_count) for run in found.runs] == [("disk", 1), ("own", 1)]
        assert [chunk.holds for chunk in node.tier] == [1]
        await engine.release("1")
        assert await hit_tokens(engine, node.pool, "2", longer) == len(first)
        await until(lambda: not any(chunk.holds for chunk in node.tier))


async def test_a_superseded_tail_is_evicted_from_disk_first(runtime_dir: Path) -> None:
    small = on_disk(runtime_dir) | {"max_local_disk_size": f"{4 * SPEC.chunk_bytes}B"}
    first, other = prompt(21), prompt(SIZE, seed=5)
    longer = prompt(30, seed=1, after=first)
    async with a_node(runtime_dir, "n", **small) as (node, engine):
        for number, tokens in enumerate((other, first), 1):
            await store_prompt(engine, node.pool, tokens)
            await written(node, number)
        await store_prompt(engine, node.pool, longer, superseded=keys_of(first)[0])
        await written(node, 3)
        for seed in (7, 8):
            await store_prompt(engine, node.pool, prompt(SIZE, seed=seed))
            await on_the_disk(node, prompt(SIZE, seed=seed))
        disk = node.disk
        assert disk
        assert [disk.get(keys_of(tokens)[0]) is not None for tokens in (other, first, longer)] == [True, False, True]


async def test_a_tail_on_disk_is_read_only_if_it_is_worth_it(runtime_dir: Path) -> None:
    first = prompt(30)
    async with a_node(runtime_dir, **on_disk(runtime_dir)) as (node, engine):
        for length in (20, 30):
            await store_prompt(engine, node.pool, first[:length])
        await written(node, 2)
        node.tier.drop(keys_of(first))
        longer = prompt(4 * SIZE, seed=1, after=first)
        found = await look_up(engine, "1", longer)
        assert (len(found.own), found.partial_token_count) == (1, 20), "the pool has nearly as much"
        node.tier.drop(keys_of(first[:20]))
        await engine.release("1")
        assert await hit_tokens(engine, node.pool, "2", longer) == 30


async def test_a_tail_in_a_pool_that_outlived_its_node_is_found(runtime_dir: Path) -> None:
    settings = {"persist_pool": True, "pool_path": f"{runtime_dir}/pool", "enable_p2p": False}
    first = prompt(9)
    async with a_node(runtime_dir, **settings) as (node, engine):
        await store_prompt(engine, node.pool, first)
        await hit_tokens(engine, node.pool, "1", first)
    async with a_node(runtime_dir, **settings) as (node, engine):
        assert await hit_tokens(engine, node.pool, "1", prompt(50, seed=1, after=first)) == 9


# --- Peers -------------------------------------------------------------------------------------------------------


class Fleet:
    """A coordinator and two nodes, each with an engine."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self._folder = folder
        self._settings = settings
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Fleet:
        enter = self._stack.enter_async_context
        self.coordinator = await enter(Coordinator(CoordinatorConfig(port=0, http_port=OFF)))
        addresses = (self.coordinator.address,)
        holder = a_node(self._folder, "holder", coordinator_address=addresses, **self._settings)
        self.holder, self.storing = await enter(holder)
        self.asker, self.asking = await enter(
            a_node(self._folder, "asker", coordinator_address=addresses, coordinator_timeout=WAIT_SECONDS)
        )
        self.cache: Any = CacheServiceStub(await enter(rpc.open_channel(self.coordinator.address)))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def store(self, tokens: list[int], *, with_digests: bool = False) -> None:
        """Stores a prompt at the holder, and waits until the coordinator knows."""
        await store_prompt(self.storing, self.holder.pool, tokens, with_digests=with_digests)
        await eventually(lambda: self.matched(tokens), len(tokens))

    async def matched(self, tokens: list[int], instance_id: str = "holder") -> int:
        """Tokens of the match at an instance, by a lookup by tokens at the coordinator."""
        found = await self.cache.Lookup(LookupRequest(prompt=by_tokens(tokens)), timeout=WAIT_SECONDS)
        return next((one.matched_token_count for one in found.holders if one.instance_id == instance_id), 0)

    def parent(self, key: ChunkKey) -> ChunkKey | None:
        """What the asker knows to be before a chunk."""
        chunk = self.asker.tier.get(key)
        assert chunk
        return chunk.parent


@pytest.mark.parametrize("before", [0, 2])
async def test_the_tail_comes_from_the_peer(runtime_dir: Path, before: int) -> None:
    first = prompt(before * SIZE + 21)
    longer = prompt((before + 3) * SIZE, seed=1, after=first)
    async with Fleet(runtime_dir) as fleet:
        await fleet.store(first)
        assert await fleet.matched(longer) == len(first)
        found = await look_up(fleet.asking, "1", longer)
        assert [(run.tier, run.chunk_count) for run in found.runs] == [("peers", before + 1)]
        assert (found.peer_instance_id, found.partial_token_count) == ("holder", 21)
        await fleet.asking.release("1")
        assert await hit_tokens(fleet.asking, fleet.asker.pool, "2", longer) == len(first)
        assert fleet.parent(keys_of(first)[-1]) == fleet.holder.tier.get(keys_of(first)[-1]).parent  # type: ignore[union-attr]
        other = prompt((before + 3) * SIZE, seed=2, after=first)
        assert len((await look_up(fleet.asking, "3", other)).own) == before + 1, "it is its own now"


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("stored", [30, SIZE])
async def test_a_longer_chunk_of_a_peer_serves_the_shorter_prompts_that_begin_as_it_does(
    runtime_dir: Path, before: int, stored: int
) -> None:
    longer = prompt(before * SIZE + stored)
    short = longer[: before * SIZE + 21]
    async with Fleet(runtime_dir) as fleet:
        await fleet.store(longer, with_digests=True)
        assert [await fleet.matched(longer[: before * SIZE + length]) for length in (1, 21)] == [
            before * SIZE + 1,
            len(short),
        ]
        found = await look_up(fleet.asking, "1", short)
        assert [(run.tier, run.chunk_count) for run in found.runs] == [("peers", before + 1)]
        assert (found.partial_key, found.partial_token_count) == (keys_of(longer)[-1], 21)
        await fleet.asking.release("1")
        assert await hit_tokens(fleet.asking, fleet.asker.pool, "2", short) == len(short)
        fork = prompt((before + 3) * SIZE, seed=2, after=short)
        own = await look_up(fleet.asking, "3", fork)
        assert (len(own.own), own.partial_token_count) == (before + 1, 21), "it is its own now, and serves as there"
        await eventually(lambda: fleet.matched(short, "asker"), len(short))


async def test_a_short_prompt_moves_as_the_longer_chunk_that_begins_with_it(runtime_dir: Path) -> None:
    longer = prompt(30)
    async with Fleet(runtime_dir) as fleet:
        await fleet.store(longer, with_digests=True)
        request = MoveRequest(
            prompt=by_tokens(longer[:12]),
            old_position=Position(instance_id="holder"),
            new_position=Position(instance_id="asker"),
        )
        moved = await fleet.cache.Move(request, timeout=WAIT_SECONDS)
        progress = MoveProgress()
        moved.metadata.Unpack(progress)
        assert (progress.chunk_count, progress.token_count) == (1, 12)
        await eventually(lambda: fleet.matched(longer[:12], "asker"), 12)
        await eventually(lambda: fleet.matched(longer[:12], "holder"), 0)
        pin = PinRequest(prompt=by_tokens(longer[:12]), position=request.new_position)
        pinned = (await fleet.cache.Pin(pin, timeout=WAIT_SECONDS)).pin
        assert pinned.chunk_count == 1
        await fleet.cache.Unpin(UnpinRequest(pin_id=pinned.pin_id), timeout=WAIT_SECONDS)
        explained = await fleet.cache.Explain(ExplainRequest(prompt=by_tokens(longer[:12])), timeout=WAIT_SECONDS)
        spans = {one.instance_id: list(one.explanation.spans) for one in explained.explanations}
        assert [(span.tier, span.token_count) for span in spans["asker"]] == [("host", 12)]
        assert [(span.token_count, span.reason) for span in spans["holder"]] == [(12, MISS_REASON_NEVER_STORED)]
        cleared = await fleet.cache.Clear(ClearRequest(prompt=by_tokens(longer[:12])), timeout=WAIT_SECONDS)
        assert not cleared.HasField("error")
        await eventually(lambda: fleet.matched(longer[:12], "asker"), 0)


async def test_a_longer_tail_of_a_peer_is_taken_only_if_it_gains_enough(runtime_dir: Path) -> None:
    first = prompt(SIZE + 30)
    longer = prompt(4 * SIZE, seed=1, after=first)
    async with Fleet(runtime_dir) as fleet:
        await store_prompt(fleet.asking, fleet.asker.pool, first[: SIZE + 5])
        await fleet.store(first[: SIZE + 15])
        found = await look_up(fleet.asking, "1", longer)
        assert (len(found.own), found.partial_token_count, len(found.runs)) == (2, 5, 0)
        await fleet.asking.release("1")
        await fleet.store(first)
        assert await hit_tokens(fleet.asking, fleet.asker.pool, "2", longer) == len(first)


async def test_siblings_of_other_prompts_are_no_hit_and_lengths_leave_with_their_chunks(runtime_dir: Path) -> None:
    system = prompt(6)
    async with Fleet(runtime_dir) as fleet:
        for number in range(3):
            await fleet.store(prompt(20 + number, seed=number, after=system))
        mine = prompt(60, seed=99, after=system)
        assert not (await look_up(fleet.asking, "1", mine)).runs
        assert await fleet.matched(mine) == 0
        await fleet.store(system)
        found = await look_up(fleet.asking, "2", mine)
        assert not found.runs, "six tokens are not worth a transfer"
        fleet.holder.tier.drop(keys_of(prompt(22, seed=2, after=system)))
        await eventually(lambda: fleet.matched(prompt(60, seed=3, after=prompt(22, seed=2, after=system))), 6)


async def test_a_tail_on_the_disk_of_a_warm_peer_is_found_once_an_engine_has_attached(runtime_dir: Path) -> None:
    first = prompt(SIZE + 21)
    longer = prompt(4 * SIZE, seed=1, after=first)
    disk = on_disk(runtime_dir) | {"enable_p2p": True}
    async with a_node(runtime_dir, "holder", **disk) as (node, engine):
        await store_prompt(engine, node.pool, first)
        await written(node, 2)
    async with Fleet(runtime_dir, **disk) as fleet:
        await eventually(lambda: fleet.matched(longer), len(first))
        assert await hit_tokens(fleet.asking, fleet.asker.pool, "1", longer) == len(first)


async def test_a_tail_that_is_gone_at_the_peer_ends_the_load_before_it(runtime_dir: Path) -> None:
    first = prompt(SIZE + 21)
    async with Fleet(runtime_dir) as fleet:
        await fleet.store(first)
        found = await look_up(fleet.asking, "1", prompt(4 * SIZE, seed=1, after=first))
        assert found.partial_token_count == 21
        fleet.holder.tier.drop(keys_of(first)[-1:])
        order = pb.LoadChunks(lookup_id="1", first_chunk=0, chunk_count=2)
        order.timeout.FromSeconds(60)
        await fleet.asking.say(load=[order])
        loaded: list[pb.LoadedChunks] = []
        while not loaded or not loaded[-1].done:
            loaded += await fleet.asking.hear("loaded")
        assert [chunk.token_count for one in loaded for chunk in one.chunks] == [SIZE]
        assert loaded[-1].status.code
