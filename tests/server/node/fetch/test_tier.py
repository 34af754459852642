"""Peers as a secondary tier: lookups at a scripted coordinator, reads from a real node."""

from __future__ import annotations

from collections.abc import Sequence

from lmkv.keys import ChunkKey
from lmkv.v1.cache_service_pb2 import Holder
from lmkv_server.node.cache.host import Chunk
from lmkv_server.node.fetch.tier import PeerTier
from lmkv_server.node.tiers.base import Needs, Presence, SecondaryTier, Selection
from lmkv_server.node.tiers.progress import Progress
from tests.server.node.peer_parts import SMALL, Parts, keys_of

KEYS = keys_of(8)


class ScriptedCoordinators:
    """Answers every lookup with the same holders, and records the keys."""

    def __init__(self, *holders: Holder) -> None:
        self.connected = True
        self.asked: list[list[ChunkKey]] = []
        self.fingerprints: list[bytes] = []
        self._holders = holders

    async def lookup(
        self, keys: Sequence[ChunkKey], deadline_seconds: float, /, *, fingerprint: bytes = b""
    ) -> Sequence[Holder]:
        assert deadline_seconds == 1.0
        self.asked.append(list(keys))
        self.fingerprints.append(fingerprint)
        return self._holders


def needs(*indices: int) -> Needs:
    return Needs(spec=SMALL, keys=KEYS, indices=indices)


async def test_a_lookup_asks_for_the_needed_keys_and_counts_holders_from_the_first_key() -> None:
    async with Parts("reader") as reader:
        coordinators = ScriptedCoordinators(
            Holder(instance_id="long", matched_chunk_count=4), Holder(instance_id="short", matched_chunk_count=1)
        )
        tier: SecondaryTier = PeerTier(reader.fetcher, coordinators, 1.0)
        presence = await tier.lookup(needs(2, 3, 5, 7))
        assert coordinators.asked == [KEYS[2:]]
        assert (presence.asked, presence.indices, presence.source) == ((2, 3, 5, 7), [2, 3, 5], "long")
        assert [holder.matched_chunk_count for holder in getattr(presence, "holders", ())] == [6, 3]
        assert tier.expected_seconds(presence, 1 << 20) is None, "nothing was measured"


async def test_without_a_coordinator_or_a_need_nothing_is_asked() -> None:
    async with Parts("reader") as reader:
        coordinators = ScriptedCoordinators(Holder(instance_id="a", matched_chunk_count=8))
        tier = PeerTier(reader.fetcher, coordinators, 1.0)
        assert not (await tier.lookup(needs())).indices
        coordinators.connected = False
        assert not tier.usable
        assert not (await tier.lookup(needs(0))).indices
        assert not coordinators.asked


async def test_a_read_fetches_what_the_lookup_found_and_is_counted() -> None:
    async with Parts("owner") as owner, Parts("reader") as reader:
        for key in KEYS[:5]:
            owner.put(key)
        tier = PeerTier(reader.fetcher, ScriptedCoordinators(owner.holder(5)), 1.0)
        delivered: list[Chunk] = []
        progress = Progress(reader.tier, SMALL, KEYS, 0, lambda chunks: delivered.extend(chunk for _, chunk in chunks))
        presence = await tier.lookup(needs(*range(8)))
        assert await tier.read(progress, presence, 10.0) is None
        progress.close()
        assert [chunk.key for chunk in delivered] == KEYS[:5]
        assert progress.result().instance_ids == ("owner",)
        stats = tier.stats()
        assert (stats.read_chunks, stats.read_bytes, stats.failures) == (5, 5 * SMALL.chunk_bytes, 0)
        assert tier.usage() is None
        assert (await tier.drop(Selection())).chunk_count == 0
        assert await tier.read(progress, Presence(), 0.1) is None, "another tier's presence names no peers"
        reader.tier.unhold(delivered)
        reader.check_nothing_left()
