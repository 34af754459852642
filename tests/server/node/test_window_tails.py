"""Hits of prompts with sliding windows that end inside a chunk: from the pool, the disk, a peer, a store and a handoff,
and after a move."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmkv import rpc
from lmkv.config import CoordinatorConfig
from lmkv.config.kinds import OFF
from lmkv.keys import ChunkKey, as_tokens, chunk_keys, join_keys, part_key, prefix_digests, root_key
from lmkv.pool.pool import Pool
from lmkv.prompt import Hit, Prompt, Tail
from lmkv.rpc.messages import by_tokens
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1.cache_service_pb2 import LookupRequest, MoveRequest
from lmkv.v1.cache_service_pb2_grpc import CacheServiceStub
from lmkv.v1.chunk_pb2 import Position
from lmkv_kernels import checksum
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.node.node import Node
from lmkv_server.node.tiers.base import Selection
from tests.server.node.engine_client import EngineClient
from tests.server.node.lookup.test_tails import WINDOWS
from tests.server.node.node_parts import node_config
from tests.server.node.prompts import SIZE, prompt
from tests.server.node.remote_parts import AWS, S3Server
from tests.support.redis_server import RedisServer
from tests.waiting import WAIT_SECONDS, eventually, until

ROOT = root_key(WINDOWS.fingerprint)
FIRST = prompt(3 * SIZE + 21)
LONGER = prompt(5 * SIZE, seed=1, after=FIRST)


def keys_of(tokens: Sequence[int], *, partial: bool = False) -> list[ChunkKey]:
    return chunk_keys(as_tokens(tokens), ROOT, SIZE, partial=partial)


@asynccontextmanager
async def a_node(folder: Path, name: str = "n", **settings: Any) -> AsyncIterator[tuple[Node, EngineClient]]:
    async with Node(node_config(folder, name, **settings)) as node:
        async with EngineClient(node, f"engine-{name}", WINDOWS) as engine:
            yield node, engine
        await until(lambda: not node.engines.mapped_count)
        assert not any(chunk.holds for chunk in node.tier)
        node.tier.check()


async def store(engine: EngineClient, pool: Pool, tokens: Sequence[int]) -> None:
    """Stores both parts of all chunks of a prompt, the last one with prefix digests."""
    keys, commits = keys_of(tokens, partial=True), []
    await engine.say(reserve=[len(keys)] * 2)
    assert await engine.hear("settled") == [len(keys)] * 2
    granted = engine.heard.take("credits")
    for part in range(2):
        extents = [one.extent for one in granted if one.part == part]
        for index, (key, extent) in enumerate(zip(keys, extents, strict=True)):
            token_count = min(SIZE, len(tokens) - index * SIZE)
            size_bytes, parent = WINDOWS.part_bytes(part, token_count), keys[index - 1] if index else ROOT
            np.frombuffer(pool.buffer, np.uint64, size_bytes // 8, extent.offset)[:] = _word(key, part)
            is_last = token_count < SIZE
            commits.append(
                pb.CommitChunk(
                    chunk_key=key,
                    part=part,
                    offset=extent.offset,
                    size_bytes=size_bytes,
                    checksum=checksum(pool.buffer, extent.offset, size_bytes),
                    token_count=token_count,
                    parent_key=parent,
                    prefix_digests=prefix_digests(parent, as_tokens(tokens[index * SIZE :])) if is_last else b"",
                )
            )
    await engine.say(commit=commits)


async def hit_tokens(
    engine: EngineClient,
    pool: Pool,
    ticket: str,
    tokens: Sequence[int],
    *places: str,
    partial: bool = False,
    handoff_id: str = "",
) -> int:
    """The tokens that a node finds of a prompt, in these tiers, once all of its items have been loaded and checked.

    `partial`: the engine names the chunk of the last tokens, too.
    """
    keys = keys_of(tokens, partial=partial)
    lookup = pb.LookupChunks(
        lookup_id=ticket,
        chunk_keys=join_keys(keys),
        tokens=as_tokens(tokens).tobytes(),
        root_key=ROOT,
        handoff_id=handoff_id,
    )
    await engine.say(lookup=[lookup])
    (found,) = await engine.hear("found")
    assert {run.tier for run in found.runs} <= {*places, "own"}, found
    chunks = list(found.own)
    if wanted := sum(run.chunk_count for run in found.runs):
        order = pb.LoadChunks(lookup_id=ticket, first_chunk=len(found.own), chunk_count=wanted)
        order.timeout.FromSeconds(10)
        await engine.say(load=[order])
        done = False
        while not done:
            for loaded in await engine.hear("loaded"):
                chunks += loaded.chunks
                done = done or loaded.done
    tail = None
    if found.partial_key:
        stored = chunks[-1].token_count
        tail = Tail(key=ChunkKey(found.partial_key), token_count=found.partial_token_count, stored_token_count=stored)
    token_count = min(len(keys) * SIZE, len(tokens))
    whole = Prompt(WINDOWS, keys, token_count=token_count, root=ROOT, tokens=as_tokens(tokens))
    hit = Hit(found.hit_chunk_count - (tail is not None), tail)
    items = whole.items(hit)
    assert len(chunks) == len(items), "all that was found has arrived"
    for at, chunk in enumerate(chunks):
        part, index = items.at(at)
        key = tail.key if tail and index == hit.chunk_count else whole.keys[index]
        words = np.frombuffer(pool.buffer, np.uint64, chunk.extent.size_bytes // 8, chunk.extent.offset)
        assert (words == _word(key, part)).all()
        assert chunk.extent.size_bytes == items.sizes[at]
    await engine.say(release=[pb.ReleaseChunks(lookup_id=ticket)])
    return whole.end(hit)


def _word(key: ChunkKey, part: int) -> int:
    return int.from_bytes(key[:8], "little") ^ part


@pytest.mark.parametrize("has_disk", [False, True])
async def test_an_answer_says_where_a_hit_would_end_if_no_window_were_missing(
    runtime_dir: Path, has_disk: bool
) -> None:
    """Engines store the window there."""
    disk = {"local_disk": f"{runtime_dir}/disk", "max_local_disk_size": "64MB"} if has_disk else {}
    async with a_node(runtime_dir, enable_p2p=False, **disk) as (node, engine):
        tokens = FIRST[: 3 * SIZE]
        keys = keys_of(tokens)
        await store(engine, node.pool, tokens)
        assert (await engine.lookup("whole", keys)).prefix_chunk_count == 0
        await engine.say(release=[pb.ReleaseChunks(lookup_id="whole")])
        await until(lambda: not any(chunk.holds for chunk in node.tier))
        if node.disk:
            stored = node.disk
            await until(lambda: stored.chunk_count == 2 * len(keys))
            await stored.drop(Selection(keys=[part_key(keys[1], 1)]))
        node.tier.drop([part_key(keys[1], 1)])
        found = await engine.lookup("less", [*keys, *keys_of(LONGER)[3:]])
        assert (found.hit_chunk_count, found.prefix_chunk_count) == (1, 3)
        await engine.say(release=[pb.ReleaseChunks(lookup_id="less")])


async def test_the_end_of_a_prompt_is_found_in_the_pool_and_on_disk_before_and_after_a_restart(
    runtime_dir: Path,
) -> None:
    settings: dict[str, Any] = {"local_disk": f"{runtime_dir}/disk", "max_local_disk_size": "64MB", "enable_p2p": False}
    async with a_node(runtime_dir, **settings) as (node, engine):
        await store(engine, node.pool, FIRST)
        assert await hit_tokens(engine, node.pool, "1", LONGER) == len(FIRST)
        assert await hit_tokens(engine, node.pool, "2", [*FIRST[:-3], 1, 2]) == len(FIRST) - 3
        disk = node.disk
        assert disk
        await until(lambda: disk.chunk_count == 8)
        node.tier.drop([chunk.key for chunk in node.tier])
        assert await hit_tokens(engine, node.pool, "3", LONGER, "disk") == len(FIRST)
    async with a_node(runtime_dir, **settings) as (node, engine):
        assert await hit_tokens(engine, node.pool, "1", LONGER, "disk") == len(FIRST)


async def test_the_end_of_a_prompt_comes_from_a_peer_and_moves_with_all_of_its_parts(runtime_dir: Path) -> None:
    async with (
        Coordinator(CoordinatorConfig(port=0, http_port=OFF)) as coordinator,
        rpc.open_channel(coordinator.address) as channel,
    ):
        cache: Any = CacheServiceStub(channel)
        addresses = (coordinator.address,)

        async def matched(tokens: Sequence[int], instance_id: str) -> int:
            found = await cache.Lookup(LookupRequest(prompt=by_tokens(tokens)), timeout=WAIT_SECONDS)
            return next((one.matched_token_count for one in found.holders if one.instance_id == instance_id), 0)

        async with (
            a_node(runtime_dir, "holder", coordinator_address=addresses) as (holder, storing),
            a_node(runtime_dir, "asker", coordinator_address=addresses, coordinator_timeout=WAIT_SECONDS) as (
                asker,
                asking,
            ),
        ):
            await store(storing, holder.pool, FIRST)
            await eventually(lambda: matched(LONGER, "holder"), len(FIRST))
            assert await hit_tokens(asking, asker.pool, "1", LONGER, "peers") == len(FIRST)
            await eventually(lambda: matched(FIRST, "asker"), len(FIRST))
            asker.tier.drop([chunk.key for chunk in asker.tier])
            await eventually(lambda: matched(FIRST, "asker"), 0)
            move = MoveRequest(
                prompt=by_tokens(FIRST),
                old_position=Position(instance_id="holder"),
                new_position=Position(instance_id="asker"),
            )
            await cache.Move(move, timeout=WAIT_SECONDS)
            await eventually(lambda: matched(FIRST, "asker"), len(FIRST))
            assert await hit_tokens(asking, asker.pool, "2", LONGER) == len(FIRST)


@pytest.mark.parametrize("token_count", [21, 2 * SIZE, 3 * SIZE + 1, len(FIRST)])
async def test_the_end_of_a_prompt_is_handed_off_with_all_of_its_parts(runtime_dir: Path, token_count: int) -> None:
    tokens = FIRST[:token_count]
    keys = keys_of(tokens, partial=True)
    item_count = len(WINDOWS.items(token_count // SIZE, token_count % SIZE))
    hand = pb.HandChunks(
        handoff_id="h", chunk_keys=join_keys(keys), token_count=token_count, decode_instance_id="decode"
    )
    async with (
        a_node(runtime_dir, "prefill", enable_p2p=True) as (prefill, storing),
        a_node(runtime_dir, "decode", enable_p2p=True) as (decode, asking),
    ):
        finding = asyncio.create_task(
            hit_tokens(asking, decode.pool, "1", tokens, "handoff", partial=True, handoff_id="h")
        )
        await storing.say(hand=[hand])
        await store(storing, prefill.pool, tokens)
        await storing.say(end_handoff="h")
        assert await finding == token_count
        (handed,) = await storing.hear("handed")
        assert (handed.chunk_count, handed.status.code) == (item_count, 0)
        longer = [*tokens, *range(1, 50)]
        assert await hit_tokens(asking, decode.pool, "2", longer) == token_count, "the end is known to other prompts"


@pytest.mark.parametrize("kind", ["redis", "s3"])
async def test_the_end_of_a_prompt_comes_from_a_shared_store_to_prompts_that_name_it(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A node asks a store by key: prompts that continue find only whole chunks there."""
    for name, value in AWS.items():
        monkeypatch.setenv(name, value)
    with RedisServer() if kind == "redis" else S3Server() as server:
        settings: dict[str, Any] = {"remote_url": server.url, "remote_lookup_timeout": 20.0, "enable_p2p": False}
        if isinstance(server, S3Server):
            settings["remote_endpoint_url"] = server.endpoint_url
        async with a_node(runtime_dir, "first", **settings) as (node, engine):
            await store(engine, node.pool, FIRST)
            await until(lambda: len(server.names()) == 8)
        async with a_node(runtime_dir, "other", **settings) as (node, engine):
            (remote,) = node.stores
            await until(lambda: remote.usable)
            assert await hit_tokens(engine, node.pool, "1", LONGER, "remote") == 3 * SIZE
            assert await hit_tokens(engine, node.pool, "2", FIRST, "remote", partial=True) == len(FIRST)
            assert await hit_tokens(engine, node.pool, "3", LONGER) == len(FIRST), "it is in the pool now"
