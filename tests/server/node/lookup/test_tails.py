"""The lookup of a tail: which tier it is taken from, and when computing it is better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import pytest

from lmkv.errors import BadMessage
from lmkv.keys import ChunkKey, as_tokens, part_key, prefix_digests
from lmkv.prompt import Prompt
from lmkv.spec import KvPart, KvSpec
from lmkv.tiers import OWN
from lmkv.v1.chunk_pb2 import PART_RULE_LAST
from lmkv_server.node.cache.events import PartialChunks
from lmkv_server.node.cache.host import Chunk, HostTier
from lmkv_server.node.lookup.found import Found
from lmkv_server.node.lookup.lookup import PromptLookup
from lmkv_server.node.sessions.sessions import EngineSessions
from lmkv_server.node.tiers.base import Needs, Presence, SecondaryTier
from tests.server.node.cases import put
from tests.server.node.hybrid_engine import HYBRID
from tests.server.node.prompts import ROOT, SIZE, SPEC, keys_of, prompt

TOKENS = prompt(2 * SIZE)


class ScriptedTier:
    """Has partial chunks of the prompt of these lengths."""

    def __init__(self, name: str, *lengths: int, is_local: bool = False, seconds: float | None = None) -> None:
        self.name = name
        self.is_local = is_local
        self.usable = True
        self.asked: list[int] = []
        self.presence = Presence()
        """Its answer about full chunks."""
        self._keys = {keys_of(TOKENS[:length])[0]: length for length in lengths}
        self._seconds = seconds

    async def lookup(self, needs: Needs) -> Presence:
        if not needs.any_of:
            return self.presence
        assert not needs.in_order
        self.asked.append(len(needs.keys))
        found = [index for index in needs.indices if needs.keys[index] in self._keys]
        return Presence(asked=needs.indices, indices=found[:1], source=self.name)

    def expected_seconds(self, _: Presence, size_bytes: int) -> float | None:
        assert size_bytes in {SPEC.size_bytes(length) for length in self._keys.values()}
        return self._seconds


def begin(pool: Sequence[int] = (), indexed: Sequence[int] = ()) -> PromptLookup:
    """A lookup at the prompt's beginning: lengths in the pool, and lengths that are elsewhere on this node."""
    index = PartialChunks()
    tier = HostTier(64 * SPEC.chunk_bytes, index)
    index.add_spec(SPEC)
    for length in pool:
        put(
            tier,
            keys_of(TOKENS[:length])[0],
            SPEC.size_bytes(length),
            fingerprint=SPEC.fingerprint,
            token_count=length,
            parent=ROOT,
        )
    for length in indexed:
        index.index.add(("disk", ChunkKey(bytes([length]) * 16)), ROOT, length)
    prompt = Prompt(SPEC, keys_of(TOKENS), root=ROOT, tokens=as_tokens(TOKENS))
    return PromptLookup(tier, index, prompt, tier.size_bytes)


async def ask(lookup: PromptLookup, *tiers: ScriptedTier, rate: float = 0, **presences: Presence) -> tuple[str, int]:
    """Tier and tokens of the tail."""
    for tier in tiers:
        tier.presence = presences.get(tier.name, Presence())
    await lookup.ask(cast(Sequence[SecondaryTier], tiers), rate)
    found = lookup.result()
    if not found.hit.tail:
        return "", 0
    assert found.chunk_count == 1
    return found.runs[0].tier if found.runs else OWN, found.hit.tail.token_count


def lengths(*token_counts: int, end: int = 0) -> Presence:
    return Presence(end=end, partial_lengths=token_counts)


async def test_the_nearest_tier_counts_unless_another_gains_enough() -> None:
    assert await ask(begin([5])) == ("own", 5)
    disk, peers = ScriptedTier("disk", 25, is_local=True), ScriptedTier("peers", 30)
    assert await ask(begin([5], [25]), disk, peers, peers=lengths(30)) == ("disk", 25)
    assert await ask(begin([15], [25]), disk, peers, peers=lengths(30)) == ("own", 15)
    assert await ask(begin([10], [25]), disk, peers, peers=lengths(30)) == ("peers", 30)


async def test_a_tier_is_asked_only_for_lengths_that_it_may_have() -> None:
    disk, peers = ScriptedTier("disk", 25, is_local=True), ScriptedTier("peers", 30)
    assert await ask(begin(), disk, peers) == ("", 0)
    assert await ask(begin(), disk, peers, peers=lengths(30, end=1)) == ("", 0)
    assert (disk.asked, peers.asked) == ([], [])
    assert await ask(begin(indexed=[3, 17, 25, 31]), disk, peers, peers=lengths(2, 20, 29)) == ("disk", 25)
    assert (disk.asked, peers.asked) == ([3], []), "short ones are not worth it"
    disk.usable = False
    assert await ask(begin(indexed=[25]), disk) == ("", 0)


@pytest.mark.parametrize(("seconds", "rate", "found"), [(2.0, 10, 25), (3.0, 10, 5), (3.0, 0, 25), (None, 10, 25)])
async def test_a_tail_that_takes_longer_to_load_than_to_compute_is_left_out(
    seconds: float | None, rate: float, found: int
) -> None:
    disk = ScriptedTier("disk", 25, is_local=True, seconds=seconds)
    assert (await ask(begin([5], [25]), disk, rate=rate))[1] == found


_WINDOW = KvPart(
    rule=PART_RULE_LAST, span=40, layer_count=1, kv_head_count=1, head_size=8, kv_dtype="float32", block_size=4
)
WINDOWS = replace(SPEC, more_parts=(_WINDOW,))
"""Beside full attention a window of 40 tokens, of which chunks of 32 tokens keep all."""
SHORT = replace(WINDOWS, more_parts=(replace(WINDOWS.more_parts[0], span=10),))
"""A window that is shorter than a chunk."""


class WindowPool:
    """A pool with the items of prompts under a spec of two parts, and its index."""

    def __init__(self, spec: KvSpec = WINDOWS) -> None:
        self.spec = spec
        self.index = PartialChunks()
        self.tier = HostTier(64 * spec.chunk_bytes, self.index)
        self.index.add_spec(spec)

    def store(self, tokens: Sequence[int], *missing: tuple[int, int], part: int | None = None) -> None:
        """Stores the items of a hit of all tokens, or of one part, but for some."""
        keys, rest = keys_of(tokens), len(tokens) % SIZE
        session = EngineSessions(self.tier).attach("e", self.spec)
        for item in self.spec.items(len(tokens) // SIZE, rest):
            if (item.part, item.chunk) in missing or part not in (None, item.part):
                continue
            is_last = rest > 0 and item.chunk == len(keys) - 1
            granted = session.reserve_partial(rest) if is_last else session.reserve(1, item.part)
            credit = granted[item.part if is_last else 0]
            parent, chunk_tokens = keys[item.chunk - 1] if item.chunk else ROOT, tokens[item.chunk * SIZE :]
            token_count = rest if is_last else SIZE
            written = Chunk(
                key=keys[item.chunk],
                fingerprint=self.spec.fingerprint,
                offset=credit.offset,
                size_bytes=self.spec.part_bytes(item.part, token_count),
                checksum=0,
                token_count=token_count,
                parent=parent,
                prefix_digests=prefix_digests(parent, as_tokens(chunk_tokens)) if is_last else b"",
            )
            session.commit(written, part=item.part)
        session.revoke()

    def store_each(self, tokens: Sequence[int], *missing: tuple[int, int]) -> None:
        """Stores the items of all hits of a prompt, as an engine does while it computes it, but for some."""
        for end in (*range(SIZE, len(tokens), SIZE), len(tokens)):
            self.store(tokens[:end], *missing)

    def found(self, tokens: Sequence[int], most_bytes: int = 1 << 30) -> Found:
        """The longest hit of a prompt."""
        full = keys_of(tokens)[: len(tokens) // SIZE]
        asked = Prompt(self.spec, full, root=ROOT, tokens=as_tokens(tokens))
        return PromptLookup(self.tier, self.index, asked, most_bytes).result()

    def hit_tokens(self, tokens: Sequence[int], most_bytes: int = 1 << 30) -> int:
        found = self.found(tokens, most_bytes)
        assert len(found.own) == len(found.items)
        for at, chunk in enumerate(found.own):
            assert chunk.key == found.items.keys[at]
            assert chunk.size_bytes == found.items.sizes[at]
        return found.prompt.end(found.hit)


LONG = prompt(3 * SIZE + 20)


@pytest.mark.parametrize(
    ("spec", "length", "cut"),
    [(WINDOWS, 20, 15), (WINDOWS, 73, 68), (WINDOWS, 116, 111), (SHORT, 20, 0), (SHORT, 73, 68), (SHORT, 116, 96)],
)
def test_a_hit_with_a_window_ends_where_another_prompt_has_ended(spec: KvSpec, length: int, cut: int) -> None:
    """`cut`: where it ends for prompts that leave the other one five tokens earlier. A window that is shorter than a
    chunk may not have what these read."""
    pool, first = WindowPool(spec), LONG[:length]
    pool.store_each(first)
    assert pool.hit_tokens([*first, 1, 2, 3]) == length
    assert pool.hit_tokens([*first[:-5], 1, 2, 3]) == cut
    assert pool.hit_tokens(first[:-5]) == cut


def test_a_tail_of_which_a_part_is_missing_is_none() -> None:
    pool = WindowPool()
    pool.store_each(LONG, (1, 3))
    assert pool.hit_tokens([*LONG, 1]) == 3 * SIZE
    pool.store(LONG, part=1)
    assert pool.hit_tokens([*LONG, 1]) == len(LONG)
    pool.tier.drop([part_key(keys_of(LONG)[2], 1)])
    assert pool.hit_tokens([*LONG, 1]) == 2 * SIZE, "the window reaches into the chunk before it"


def test_the_chunks_before_a_window_may_have_left_that_only_shorter_hits_need() -> None:
    pool = WindowPool(replace(WINDOWS, more_parts=(replace(WINDOWS.more_parts[0], span=16),)))
    pool.store(LONG)
    pool.tier.drop([part_key(keys_of(LONG)[2], 1)])
    assert pool.hit_tokens([*LONG, 1]) == len(LONG)


def test_a_tail_fits_into_what_may_be_held() -> None:
    pool = WindowPool()
    pool.store_each(LONG)
    whole = sum(pool.found([*LONG, 1]).items.sizes)
    assert pool.hit_tokens([*LONG, 1], whole) == len(LONG)
    assert pool.hit_tokens([*LONG, 1], whole - 1) == 3 * SIZE


def test_a_spec_with_states_has_no_tails() -> None:
    assert not HYBRID.ends_anywhere
    with pytest.raises(BadMessage):
        EngineSessions(HostTier(1 << 30)).attach("e", HYBRID).reserve_partial(5)


class TierOfItems:
    """Has items by key, and answers as the disk does."""

    name = "disk"
    is_local = True
    usable = True

    def __init__(self, pool: WindowPool) -> None:
        self._pool = pool

    async def lookup(self, needs: Needs) -> Presence:
        held = self._pool.tier
        found = [index for index in needs.indices if all(held.get(key) for key in needs.parts_of(index))]
        return Presence(asked=needs.indices, indices=found)

    def expected_seconds(self, _: Presence, __: int) -> float | None:
        return None


@pytest.mark.parametrize("own_count", [0, 1, 3])
@pytest.mark.parametrize("with_each", [True, False])
async def test_a_tail_with_a_window_comes_from_a_tier_with_all_of_its_parts(own_count: int, with_each: bool) -> None:
    pool, disk = WindowPool(), WindowPool()
    pool.store_each(LONG[: own_count * SIZE])
    (disk.store_each if with_each else disk.store)(LONG)
    for chunk in disk.tier:
        pool.index.stored("disk", chunk)
    tokens = [*LONG, 1, 2]
    asked = Prompt(WINDOWS, keys_of(tokens)[:3], root=ROOT, tokens=as_tokens(tokens))

    async def found() -> Found:
        lookup = PromptLookup(pool.tier, pool.index, asked, 1 << 30)
        await lookup.ask(cast(Sequence[SecondaryTier], [TierOfItems(disk)]))
        return lookup.result()

    whole = await found()
    assert whole.prompt.end(whole.hit) == len(LONG)
    assert len(whole.own) + whole.absent_count == len(whole.items)
    assert whole.runs[-1].tier == "disk"
    presence = whole.presence("disk")
    assert presence
    assert presence.indices[-1] == len(whole.items) - 1
    disk.tier.drop([part_key(keys_of(LONG)[3], 1)])
    shorter = await found()
    assert shorter.prompt.end(shorter.hit) == (3 if with_each or own_count == 3 else own_count) * SIZE
