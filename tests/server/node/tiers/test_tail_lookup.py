"""The lookup of a tail: which tier it is taken from, and when computing it is better."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from lmkv.keys import ChunkKey, as_tokens
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.cache.partial_chunks import PartialChunks, PromptTokens
from lmkv_server.node.tiers.base import Needs, Presence, SecondaryTier
from lmkv_server.node.tiers.hit import Hit
from lmkv_server.node.tiers.tail_lookup import TailLookup
from tests.server.node.prompts import ROOT, SIZE, SPEC, keys_of, prompt

TOKENS = prompt(2 * SIZE)


class ScriptedTier:
    """Has partial chunks of the prompt of these lengths."""

    def __init__(self, name: str, *lengths: int, is_local: bool = False, seconds: float | None = None) -> None:
        self.name = name
        self.is_local = is_local
        self.usable = True
        self.asked: list[int] = []
        self._keys = {keys_of(TOKENS[:length])[0]: length for length in lengths}
        self._seconds = seconds

    async def lookup(self, needs: Needs) -> Presence:
        assert needs.any_of
        assert not needs.in_order
        self.asked.append(len(needs.keys))
        found = [index for index in needs.indices if needs.keys[index] in self._keys]
        return Presence(asked=needs.indices, indices=found[:1], source=self.name)

    def expected_seconds(self, _: Presence, size_bytes: int) -> float | None:
        assert size_bytes in {SPEC.size_bytes(length) for length in self._keys.values()}
        return self._seconds


def begin(pool: Sequence[int] = (), indexed: Sequence[int] = ()) -> TailLookup:
    """A lookup at the prompt's beginning: lengths in the pool, and lengths that are elsewhere on this node."""
    index = PartialChunks()
    tier = HostTier(64 * SPEC.chunk_bytes, index)
    index.add_spec(SPEC)
    for length in pool:
        reserved = tier.reserve(SPEC.chunk_bytes)
        assert reserved
        tier.commit(
            reserved.offset,
            key=keys_of(TOKENS[:length])[0],
            fingerprint=SPEC.fingerprint,
            size_bytes=SPEC.size_bytes(length),
            checksum=0,
            token_count=length,
            parent=ROOT,
        )
    for length in indexed:
        index._index.add(("disk", ChunkKey(bytes([length]) * 16)), ROOT, length)
    tokens = PromptTokens(root=ROOT, chunk_size=SIZE, tokens=as_tokens(TOKENS))
    return TailLookup(tier, index, SPEC, tokens, keys_of(TOKENS), 0)


async def ask(lookup: TailLookup, *tiers: ScriptedTier, rate: float = 0, **presences: Presence) -> tuple[str, int]:
    """Tier and tokens of the tail."""
    await lookup.ask(cast(Sequence[SecondaryTier], tiers), Hit(presences=presences), rate)
    return (lookup.tail.tier, lookup.tail.token_count) if lookup.tail else ("", 0)


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
