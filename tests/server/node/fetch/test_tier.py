"""Peers as a secondary tier: lookups at a scripted coordinator, reads from a real node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import pytest

from lmkv.keys import ChunkKey
from lmkv.prompt import Hit, Items, Prompt
from lmkv.v1.cache_service_pb2 import Holder
from lmkv_server.node.cache.host import Chunk
from lmkv_server.node.fetch.tier import FoundHolders, LookupFields, PeerTier
from lmkv_server.node.tiers.base import Needs, Presence, Progress, SecondaryTier, Selection
from tests.server.node.cases import put
from tests.server.node.hybrid_engine import HYBRID, PROMPT
from tests.server.node.peer_parts import SMALL, Parts, keys_of

KEYS = keys_of(8)


class ScriptedCoordinators:
    """Answers every lookup with the same holders, and records the keys."""

    def __init__(self, *holders: Holder, prefix_token_count: int = 0) -> None:
        self.connected = self.is_configured = self.answers = True
        self.asked: list[list[ChunkKey]] = []
        self.fingerprints: list[bytes] = []
        self._holders = holders
        self._prefix_token_count = prefix_token_count

    def answers_within(self, _seconds: float) -> bool:
        return self.connected

    async def lookup(
        self, keys: Sequence[ChunkKey], deadline_seconds: float, /, **fields: Unpack[LookupFields]
    ) -> FoundHolders:
        assert deadline_seconds == (0.5 if fields.get("any_key") else 1.0)
        self.asked.append(list(keys))
        self.fingerprints.append(fields.get("fingerprint", b""))
        return FoundHolders(
            holders=self._holders,
            is_answered=self.answers,
            prefix_key=KEYS[0] if fields.get("any_key") and fields.get("prefix_digests") else b"",
            prefix_token_count=self._prefix_token_count,
        )


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


@pytest.mark.parametrize("token_count", [0, -1, 3])
async def test_a_beginning_of_no_tokens_is_none(token_count: int) -> None:
    """What another process says of a longer chunk's beginning is checked: nothing is loaded for no tokens."""
    async with Parts("reader") as reader:
        holder = Holder(instance_id="a", matched_token_count=8)
        tier = PeerTier(reader.fetcher, ScriptedCoordinators(holder, prefix_token_count=token_count), 1.0)
        asked = Needs(spec=SMALL, keys=KEYS, indices=[5], any_of=True, prefix_digests=bytes(8 * 5))
        presence = await tier.lookup(asked)
        assert (presence.beginning is not None) == (token_count > 0)
        assert presence.beginning is None or presence.beginning.token_count == token_count


async def test_without_a_coordinator_or_a_need_nothing_is_asked() -> None:
    async with Parts("reader") as reader:
        coordinators = ScriptedCoordinators(Holder(instance_id="a", matched_chunk_count=8))
        tier = PeerTier(reader.fetcher, coordinators, 1.0)
        assert not (await tier.lookup(needs())).indices
        coordinators.connected = False
        assert not tier.usable
        assert tier.is_down
        coordinators.is_configured = False
        assert not tier.is_down, "there is none that could know"
        assert not (await tier.lookup(needs(0))).indices
        assert not coordinators.asked


async def test_a_lookup_that_no_coordinator_answers_says_so() -> None:
    async with Parts("reader") as reader:
        coordinators = ScriptedCoordinators()
        tier = PeerTier(reader.fetcher, coordinators, 1.0)
        assert (await tier.lookup(needs(0))).is_answered
        coordinators.answers = False
        assert not (await tier.lookup(needs(0))).is_answered
        items = Prompt(HYBRID, PROMPT).all_items()
        of_items = Needs(spec=HYBRID, keys=items.keys, indices=[0], in_order=False, items=items)
        assert not (await tier.lookup(of_items)).is_answered


async def test_a_read_fetches_what_the_lookup_found_and_is_counted() -> None:
    async with Parts("owner") as owner, Parts("reader") as reader:
        for key in KEYS[:5]:
            owner.put(key)
        tier = PeerTier(reader.fetcher, ScriptedCoordinators(owner.holder(5)), 1.0)
        delivered: list[Chunk] = []
        progress = Progress(
            reader.tier, needs(*range(len(KEYS))), lambda chunks: delivered.extend(chunk for _, chunk in chunks)
        )
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


# --- Prompts whose chunks have several parts -----------------------------------------------------------------


def item_needs(items: Items) -> Needs:
    return Needs(spec=HYBRID, keys=items.keys, indices=range(len(items)), in_order=False, items=items)


async def test_a_lookup_of_items_asks_for_the_whole_prompt_and_finds_the_items_of_hits() -> None:
    async with Parts("reader", spec=HYBRID) as reader:
        coordinators = ScriptedCoordinators(
            Holder(instance_id="long", matched_chunk_count=6), Holder(instance_id="short", matched_chunk_count=3)
        )
        items = Prompt(HYBRID, PROMPT).all_items()
        presence = await PeerTier(reader.fetcher, coordinators, 1.0).lookup(item_needs(items))
        assert (coordinators.asked, coordinators.fingerprints) == ([PROMPT], [HYBRID.fingerprint])
        found = {items.keys[index] for index in presence.indices}
        assert found == {key for count in (6, 3) for key in HYBRID.item_keys(HYBRID.items(count), PROMPT)}
        assert presence.source == "long"
        assert [holder.matched_chunk_count for holder in getattr(presence, "holders", ())] == [6, 3]


async def test_items_come_from_all_peers_that_may_have_them_and_in_order() -> None:
    async with (
        Parts("one", spec=HYBRID) as one,
        Parts("two", spec=HYBRID) as two,
        Parts("reader", spec=HYBRID) as reader,
    ):
        hit = HYBRID.items(6)
        for number, item in enumerate(hit):
            (one if number % 3 else two).put_item(item, PROMPT)
        items = Prompt(HYBRID, PROMPT).items(Hit(6))
        tier = PeerTier(reader.fetcher, ScriptedCoordinators(one.holder(6), two.holder(6)), 1.0)
        delivered: list[tuple[int, Chunk]] = []
        progress = Progress(reader.tier, item_needs(items), delivered.extend)
        presence = await tier.lookup(item_needs(items))
        assert await tier.read(progress, presence, 10.0) is None
        progress.close()
        assert [index for index, _ in delivered] == list(range(len(hit)))
        assert [chunk.key for _, chunk in delivered] == list(items.keys)
        assert [chunk.parent for _, chunk in delivered] == [items.parent(index) for index in range(len(hit))]
        assert set(progress.result().instance_ids) == {"one", "two"}
        reader.tier.unhold(chunk for _, chunk in delivered)
        reader.check_nothing_left()


async def test_an_item_that_no_peer_has_keeps_none_behind_it_from_coming() -> None:
    async with Parts("owner", spec=HYBRID) as owner, Parts("reader", spec=HYBRID) as reader:
        hit = HYBRID.items(4)
        for item in hit[:1] + hit[2:]:
            owner.put_item(item, PROMPT)
        items = Prompt(HYBRID, PROMPT).items(Hit(4))
        delivered: list[tuple[int, Chunk]] = []
        progress = Progress(reader.tier, item_needs(items), delivered.extend)
        tier = PeerTier(reader.fetcher, ScriptedCoordinators(owner.holder(4)), 1.0)
        await tier.read(progress, await tier.lookup(item_needs(items)), 10.0)
        assert progress.missing == {1}, "another tier may have it"
        assert [index for index, _ in delivered] == [0]
        progress.add([(1, reader.put_item(hit[1], PROMPT))])
        progress.close()
        assert [index for index, _ in delivered] == list(range(len(hit)))
        reader.tier.unhold(chunk for _, chunk in delivered)
        reader.check_nothing_left()


async def test_a_peer_that_has_an_item_in_another_size_delivers_nothing() -> None:
    async with Parts("owner", spec=HYBRID) as owner, Parts("reader", spec=HYBRID) as reader:
        first, *_, state = HYBRID.items(1)
        wrong = owner.put_item(first, PROMPT)
        owner.tier.drop([wrong.key])
        put(
            owner.tier,
            PROMPT[0],
            HYBRID.part_bytes(state.part),
            fingerprint=HYBRID.fingerprint,
            token_count=HYBRID.chunk_size,
        )
        items = Prompt(HYBRID, PROMPT).items(Hit(1))
        progress = Progress(reader.tier, item_needs(items), lambda _: None)
        tier = PeerTier(reader.fetcher, ScriptedCoordinators(owner.holder(1)), 1.0)
        error = await tier.read(progress, await tier.lookup(item_needs(items)), 10.0)
        progress.close()
        assert error is not None
        assert "invalid extent" in str(error)
        assert not len(reader.tier)
        reader.check_nothing_left()
