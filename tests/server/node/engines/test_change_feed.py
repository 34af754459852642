"""What an engine learns of the chunks that its node gains and loses."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from lmkv import rpc
from lmkv.config import NodeConfig
from lmkv.keys import ChunkKey
from lmkv.tiers import DISK, HOST
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_server.node.engines.outbox import MAX_CHANGES, MAX_KEYS, ChangeFeed, TierKey
from lmkv_server.node.node import Node
from tests.attach import events
from tests.server.node.cases import chunk_key, chunk_keys
from tests.server.node.engine_client import EngineClient
from tests.server.node.engines.pool_checks import CAPACITY, LIMIT
from tests.support.specs import small_spec
from tests.waiting import eventually


class Mirror:
    """What an engine knows from the changes that it has received."""

    def __init__(self) -> None:
        self.held: set[TierKey] = set()
        self.restarts = 0

    def apply(self, changes: Iterable[pb.TierChange]) -> None:
        """Applies changes in order, as the proto says."""
        for change in changes:
            assert not set(change.stored_keys) & set(change.removed_keys)
            if change.restarted:
                self.held.clear()
                self.restarts += 1
            self.held |= {(change.tier, ChunkKey(key)) for key in change.stored_keys}
            self.held -= {(change.tier, ChunkKey(key)) for key in change.removed_keys}


@pytest.mark.parametrize("limit", [5, 1000])
def test_the_mirror_of_a_feed_equals_what_is_held_whatever_is_taken_when(limit: int) -> None:
    draw = random.Random(limit)
    held: set[TierKey] = {(HOST, chunk_key(number)) for number in range(20)}
    feed, mirror = ChangeFeed(lambda: list(held), limit), Mirror()
    for _ in range(3000):
        if draw.random() < 0.2:
            mirror.apply(feed.take())
        one: TierKey = (draw.choice((HOST, DISK)), chunk_key(draw.randrange(40)))
        if one in held:
            held.discard(one)
        else:
            held.add(one)
        feed.add(*one, held=one in held)
    while feed:
        mirror.apply(feed.take())
    assert mirror.held == held
    assert (mirror.restarts > 0) == (limit == 5)


def test_messages_and_memory_are_bounded() -> None:
    held = [(HOST, chunk_key(number)) for number in range(3 * MAX_KEYS)]
    feed = ChangeFeed(lambda: held)
    for number in range(MAX_CHANGES + 1):
        feed.add(DISK, chunk_key(number), held=True)
    messages = []
    while feed:
        messages.append(pb.AttachResponse(events=[pb.Event(tier_change=change) for change in feed.take()]))
    changes = [change for message in messages for change in events(message, "tier_change")]
    assert [len(change.stored_keys) for change in changes] == [0] + [MAX_KEYS] * 3
    assert all(message.ByteSize() < rpc.MAX_MESSAGE_BYTES // 8 for message in messages)


async def test_engines_that_want_changes_learn_of_stores_and_evictions_of_their_spec(node: Node) -> None:
    mirror = Mirror()
    async with EngineClient(node, "storing") as storing:
        await storing.store(chunk_keys(1, 2))
        await storing.lookup("stored", chunk_keys(1, 2))
        await storing.release("stored")
        other_spec = small_spec(model_name="other")
        async with (
            EngineClient(node, "other", other_spec) as other,
            EngineClient(node, "listening", wants_tier_changes=True) as listening,
        ):
            await other.store(chunk_keys(1000))
            numbers = list(range(3, 3 + 2 * CAPACITY))
            for start in range(0, len(numbers), LIMIT):
                await storing.store([chunk_key(number) for number in numbers[start : start + LIMIT]])

            async def known() -> set[ChunkKey]:
                mirror.apply(await listening.hear("tier_change"))
                return {key for tier, key in mirror.held if tier == HOST}

            while chunk_key(numbers[-1]) not in await known():
                pass
            assert {key for _, key in mirror.held} == {
                chunk.key for chunk in node.tier if chunk.fingerprint == storing.spec.fingerprint
            }
            assert node.tier.get(chunk_key(1)) is None, "nothing was evicted"
            await storing.say(reset=True)
            await storing.hear("reset")
            while mirror.held:
                await known()
            assert not storing.heard["tier_change"]
            assert not other.heard["tier_change"]


async def test_a_node_with_chunks_sends_them_first(config: NodeConfig) -> None:
    async with Node(config) as node, EngineClient(node, "storing") as storing:
        await storing.store(chunk_keys(1, 2, 3))

        async def count() -> int:
            return len(node.tier)

        await eventually(count, 3)
        async with EngineClient(node, "late", wants_tier_changes=True) as late:
            (change,) = await late.hear("tier_change")
            assert set(change.stored_keys) == set(chunk_keys(1, 2, 3))
            assert (change.tier, change.restarted) == (HOST, False)
