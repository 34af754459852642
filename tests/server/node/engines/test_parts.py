"""Chunks of several parts at a real node over its real unix socket: what is a hit, and what is loaded for it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from lmkv import rpc
from lmkv.errors import BadMessage, GrantNotFound, InstanceNotFound, Unreachable
from lmkv.keys import join_keys
from lmkv.spec import PartItem
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_server.node.node import Node
from lmkv_server.node.sessions.session import HOLD_SHARE
from lmkv_server.node.sessions.sessions import CREDIT_SHARE
from tests.server.node.disk_parts import until
from tests.server.node.hybrid_engine import (
    CAPACITY,
    FULL,
    HYBRID,
    PROMPT,
    STATE,
    WINDOW,
    engine_at_node,
    item_key,
    places,
)
from tests.server.node.whole_nodes import until_free


def disk(folder: Path) -> dict[str, Any]:
    return {"local_disk": f"{folder}/disk", "max_local_disk_size": "64MB"}


async def on_disk(node: Node, count: int) -> None:
    assert node.disk
    tier = node.disk
    await until(lambda: tier.chunk_count == count)


async def test_a_hit_is_the_longest_whose_items_are_all_there(runtime_dir: Path) -> None:
    async with engine_at_node(runtime_dir) as (node, engine):
        assert (await engine.find("0")).hit_chunk_count == 0
        await engine.store_hits(3, 5)
        found = await engine.find("1")
        assert (found.hit_chunk_count, len(found.own), places(found)) == (5, len(HYBRID.items(5)), [])
        assert sum(chunk.holds for chunk in node.tier) == len(found.own)
        await engine.release("1")
        node.tier.drop([item_key(STATE, 4)])
        found = await engine.find("2")
        assert (found.hit_chunk_count, len(found.own)) == (3, len(HYBRID.items(3))), "no state behind the fourth"
        await engine.release("2")
        node.tier.drop([item_key(WINDOW, 1)])
        assert (await engine.find("3")).hit_chunk_count == 0
        assert await until_free(node)


async def test_a_hit_ends_where_the_prompt_does(runtime_dir: Path) -> None:
    async with engine_at_node(runtime_dir) as (_, engine):
        await engine.store_hits(2, 5)
        found = await engine.find("1", 4)
        assert (found.hit_chunk_count, len(found.own)) == (2, len(HYBRID.items(2)))


async def test_credits_are_counted_settled_and_limited_part_by_part(runtime_dir: Path) -> None:
    async with engine_at_node(runtime_dir) as (node, engine):
        limit = CAPACITY // CREDIT_SHARE
        assert engine.welcomed.credit_limit == limit
        granted = await engine.credits(3, limit + 5, 2)
        assert [len(part) for part in granted] == [3, limit, 2]
        for part, extents in enumerate(granted):
            assert {extent.size_bytes for extent in extents} == {HYBRID.part_bytes(part)}
        assert [len(part) for part in await engine.credits(0, 1, 1)] == [0, 0, 1], "each part has a limit of its own"
        await engine.say(return_credits=[granted[WINDOW][0].offset])
        assert [len(part) for part in await engine.credits(0, 2, 0)] == [0, 1, 0]
        assert node.engines.session("engine").credit_count == 3 + limit + 3


async def test_what_is_found_makes_no_credit_fewer(runtime_dir: Path) -> None:
    async with engine_at_node(runtime_dir) as (_, engine):
        await engine.store_hits(3)
        lookup = pb.LookupChunks(
            lookup_id="1", chunk_keys=join_keys(PROMPT[:4]), reserve_count=4, part_reserve_counts=[2, 1]
        )
        await engine.say(lookup=[lookup])
        (found,) = await engine.hear("found")
        assert found.hit_chunk_count == 3
        assert await engine.hear("settled") == [4, 2, 1]
        assert [credit.part for credit in await engine.hear("credits")] == [0, 0, 0, 0, 1, 1, 2]


async def test_credits_of_an_unknown_part_end_the_stream(runtime_dir: Path) -> None:
    async with engine_at_node(runtime_dir) as (_, engine):
        await engine.say(reserve=[1, 1, 1, 1])
        assert isinstance(await engine.ending(), BadMessage)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"size_bytes": HYBRID.part_bytes(STATE)}, BadMessage),
        ({"token_count": HYBRID.chunk_size - 1}, BadMessage),
        ({"part": 3}, BadMessage),
        ({"part": -1}, BadMessage),
        ({"part": STATE, "size_bytes": HYBRID.part_bytes(STATE)}, GrantNotFound),
    ],
)
async def test_a_commit_of_another_size_or_part_is_refused(
    runtime_dir: Path, change: dict[str, int], reason: type[Exception]
) -> None:
    async with engine_at_node(runtime_dir) as (node, engine):
        _, (credit,), _ = await engine.credits(0, 1, 0)
        commit = engine.commit_item(PartItem(WINDOW, 0), credit)
        for name, value in change.items():
            setattr(commit, name, value)
        await engine.say(commit=[commit])
        (rejected,) = await engine.hear("rejected_commit")
        assert isinstance(rpc.from_status(rejected.status), reason)
        assert not len(node.tier)
        await engine.say(commit=[engine.commit_item(PartItem(WINDOW, 0), credit)])
        await until(lambda: node.tier.get(item_key(WINDOW, 0)))


async def test_a_hit_whose_items_cannot_all_be_held_is_shortened_to_one_that_can(runtime_dir: Path) -> None:
    async with engine_at_node(runtime_dir, capacity=12) as (node, engine):
        await engine.store_hits(3)
        await engine.store_hits(7)
        node.tier.check()
        most = node.tier.size_bytes // HOLD_SHARE
        assert sum(map(HYBRID.part_bytes, (item.part for item in HYBRID.items(7)))) < most
        found = await engine.find("1")
        assert found.hit_chunk_count == 7
        found = await engine.find("2", 7)
        assert found.hit_chunk_count == 3, "the other hit is held"
        await engine.release("1")
        await engine.release("2")
        assert (await engine.find("3")).hit_chunk_count == 7


async def test_superseded_items_leave_first_unless_they_are_used_again(runtime_dir: Path) -> None:
    async with engine_at_node(runtime_dir) as (node, engine):
        await engine.store_hits(2, 4)
        await engine.store_items([PartItem(STATE, 5)], superseded=PROMPT[1])
        await engine.store_items([PartItem(STATE, 6), PartItem(WINDOW, 6)], superseded=PROMPT[3])
        await engine.find("1", 2)  # the state that was superseded first
        await engine.release("1")
        await until(lambda: not node.engines.session("engine").lease_count)
        names = {item_key(part, chunk): (part, chunk) for part in range(3) for chunk in range(8)}
        gone: list[tuple[int, int]] = []
        while len(gone) < 2:
            before = {chunk.key for chunk in node.tier}
            assert node.tier.reserve(4096)
            gone += [names[key] for key in before - {chunk.key for chunk in node.tier}]
        assert gone == [(STATE, 3), (WINDOW, 3)]


async def test_what_disk_has_of_a_hit_is_loaded(runtime_dir: Path) -> None:
    async with engine_at_node(runtime_dir, **disk(runtime_dir)) as (node, engine):
        await engine.store_hits(5)
        await on_disk(node, len(HYBRID.items(5)))
        node.tier.drop([item_key(FULL, 1), item_key(FULL, 2), item_key(STATE, 4)])
        found = await engine.find("1")
        assert found.hit_chunk_count == 5
        assert (len(found.own), places(found)) == (1, [("disk", 2), ("own", 4), ("disk", 1)])
        assert sum(chunk.holds for chunk in node.tier) == 5
        assert await engine.load("1", found) == len(HYBRID.items(5))
        assert [chunk.holds for chunk in node.tier] == [1] * 8
        stats = node.service.lookups.stats()
        assert (stats.found_chunks["own"], stats.found_chunks["disk"]) == (5, 3)
        await engine.release("1")
        assert await until_free(node)


async def test_a_restarted_node_has_what_was_on_disk(runtime_dir: Path) -> None:
    async with engine_at_node(runtime_dir, **disk(runtime_dir)) as (_, engine):
        await engine.store_hits(3, 5)
    async with engine_at_node(runtime_dir, **disk(runtime_dir)) as (_, engine):
        found = await engine.find("1")
        assert (found.hit_chunk_count, places(found)) == (5, [("disk", 8)])
        assert await engine.load("1", found) == 8
        await engine.release("1")
        found = await engine.find("2")
        assert (len(found.own), places(found)) == (8, [])


async def test_a_restarted_node_finds_items_in_its_pool_again(runtime_dir: Path) -> None:
    more: dict[str, Any] = {"persist_pool": True, "pool_path": str(runtime_dir / "pool")}
    async with engine_at_node(runtime_dir, **more) as (node, engine):
        await engine.store_hits(3, 5)
        await until(lambda: node.tier.get(item_key(STATE, 4)))
    async with engine_at_node(runtime_dir, **more) as (node, engine):
        assert node.warm
        warm = node.warm
        await until(lambda: warm.stats().found_chunks == len({*HYBRID.items(3), *HYBRID.items(5)}))
        assert (await engine.find("1")).hit_chunk_count == 5


async def test_an_item_that_is_torn_on_disk_ends_the_load(runtime_dir: Path) -> None:
    async with engine_at_node(runtime_dir, **disk(runtime_dir)) as (node, engine):
        await engine.store_hits(3)
        await on_disk(node, 6)
        node.tier.drop([chunk.key for chunk in node.tier])
        (path,) = (runtime_dir / "disk" / "n").glob(f"{item_key(WINDOW, 1).hex()}*")
        with path.open("r+b") as file:
            file.write(b"torn")
        found = await engine.find("1")
        assert places(found) == [("disk", 6)]
        assert await engine.load("1", found) == 3, "no item behind it is delivered"
        await engine.release("1")
        assert (await engine.find("2")).hit_chunk_count == 0
        assert await until_free(node)


async def test_what_disk_would_take_longer_for_than_computing_is_refused(runtime_dir: Path) -> None:
    async with engine_at_node(runtime_dir, **disk(runtime_dir)) as (node, engine):
        await engine.store_hits(3, 5)
        await on_disk(node, 11)
        node.tier.drop([item_key(FULL, 4), item_key(STATE, 4)])
        assert node.disk
        for _ in range(2):  # a measured disk: 1 MiB took ten seconds
            node.disk.reader._bandwidth.record_read(16 << 20, 160.0, time.monotonic())
        found = await engine.find("1", prefill_tokens_per_second=1_000_000)
        assert (found.hit_chunk_count, places(found), found.refused_chunk_count) == (3, [], 2)
        await engine.release("1")
        found = await engine.find("2", prefill_tokens_per_second=1)
        assert (found.hit_chunk_count, found.refused_chunk_count) == (5, 0)


async def test_tools_look_up_and_load_by_the_keys_of_chunks(runtime_dir: Path) -> None:
    async with engine_at_node(runtime_dir, **disk(runtime_dir)) as (node, engine):
        await engine.store_hits(4)
        await on_disk(node, 7)
        node.tier.drop([item_key(FULL, 2), item_key(WINDOW, 3)])
        request = pb.EngineServiceLookupRequest(fingerprint=HYBRID.fingerprint, chunk_keys=PROMPT)
        answer = await engine.stub.Lookup(request)
        assert (answer.hit_chunk_count, answer.own_chunk_count) == (4, 2)
        assert places(answer) == [("disk", 1), ("own", 2), ("disk", 1), ("own", 1)]
        order = pb.LoadRequest(fingerprint=HYBRID.fingerprint, chunk_keys=PROMPT)
        assert (await engine.stub.Load(order)).chunk_count == 4
        assert len(node.tier) == 7
        assert await until_free(node)


async def test_a_reset_drops_every_part(runtime_dir: Path) -> None:
    async with engine_at_node(runtime_dir) as (node, engine):
        await engine.store_hits(4)
        await engine.say(reset=True)
        assert await engine.hear("reset") == [7]
        assert not len(node.tier)


@pytest.mark.parametrize(("enable_p2p", "reason"), [(False, Unreachable), (True, InstanceNotFound)])
async def test_a_handoff_to_an_unknown_instance_fails(
    runtime_dir: Path, enable_p2p: bool, reason: type[Exception]
) -> None:
    async with engine_at_node(runtime_dir, enable_p2p=enable_p2p) as (_, engine):
        hand = pb.HandChunks(handoff_id="h", chunk_keys=join_keys(PROMPT), token_count=256, decode_instance_id="other")
        await engine.say(hand=[hand])
        (handed,) = await engine.hear("handed")
        assert isinstance(rpc.from_status(handed.status), reason)
        assert handed.chunk_count == 0


async def test_items_are_handed_off_and_loaded(runtime_dir: Path) -> None:
    async with (
        engine_at_node(runtime_dir, "prefill", enable_p2p=True) as (_, prefill),
        engine_at_node(runtime_dir, "decode", enable_p2p=True) as (node, decode),
    ):
        keys = join_keys(PROMPT[:5])
        await decode.store_items([PartItem(FULL, 1)])
        lookup = pb.LookupChunks(lookup_id="1", chunk_keys=keys, handoff_id="h")
        await decode.say(lookup=[lookup])
        (found,) = await decode.hear("found")
        assert (found.hit_chunk_count, places(found)) == (5, [("handoff", 1), ("own", 1), ("handoff", 6)])
        hand = pb.HandChunks(handoff_id="h", chunk_keys=keys, token_count=160, decode_instance_id="decode")
        await prefill.say(hand=[hand])
        await prefill.store_hits(5)
        await prefill.say(end_handoff="h")
        assert await decode.load("1", found) == len(HYBRID.items(5))
        (handed,) = await prefill.hear("handed")
        assert (handed.chunk_count, handed.status.code) == (8, 0)
        assert {chunk.key: chunk.parent for chunk in node.tier}[item_key(STATE, 4)] == PROMPT[4]
        await decode.release("1")
        assert await until_free(node)
