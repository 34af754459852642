"""The index of partial chunks finds what a search of all chunks finds, and forgets what is gone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkv.keys import ChunkKey, KeyChain, as_tokens, root_key
from lmkv.misses import Loss, MissReason
from lmkv.prompt import Prompt
from lmkv.tiers import HOST
from lmkv_server.node.cache.allocator import ALIGNMENT
from lmkv_server.node.cache.events import CacheEvents, Losses, PartialChunks
from lmkv_server.node.cache.host import Chunk, HostTier
from tests.server.node.cases import put
from tests.server.node.hybrid_engine import HYBRID
from tests.support.specs import small_spec

SPEC = small_spec(chunk_size=4, block_size=4)
OTHER = small_spec(chunk_size=4, block_size=4, model_id="other")
ROOT = root_key(SPEC.fingerprint)


@dataclass(frozen=True)
class Stored:
    key: ChunkKey
    parent: ChunkKey | None
    token_count: int
    fingerprint: bytes = SPEC.fingerprint
    prefix_digests: bytes = b""


def last_chunk(tokens: list[int], extras: dict[int, bytes] | None = None) -> Stored:
    """The last chunk of a prompt, full or partial."""
    chain = KeyChain(ROOT, SPEC.chunk_size, extras or {})
    chain.extend(as_tokens(tokens))
    if (key := chain.partial(as_tokens(tokens))) is None:
        keys = [ROOT, *chain.keys]
        return Stored(keys[-1], keys[-2], SPEC.chunk_size)
    return Stored(key, chain.keys[-1] if chain.keys else ROOT, len(tokens) % SPEC.chunk_size)


def prompt_of(tokens: list[int], keys: list[ChunkKey], extras: dict[int, bytes] | None = None) -> Prompt:
    return Prompt(SPEC, keys, root=ROOT, tokens=as_tokens(tokens), extras=extras or {})


def longest(index: PartialChunks, held: set[ChunkKey], tokens: list[int], end: int) -> int:
    """Tokens of the longest partial chunk behind the first `end` chunks of a prompt."""
    chain = KeyChain(ROOT, SPEC.chunk_size)
    chain.extend(as_tokens(tokens))
    found = prompt_of(tokens, chain.keys[:end]).tails(end, index.index)
    return next((tail.token_count for tail in found if tail.key in held), 0)


few_tokens = st.lists(st.integers(0, 1), min_size=1, max_size=11)
actions = st.lists(st.tuples(st.sampled_from(["host", "disk"]), st.booleans(), few_tokens), max_size=60)


@settings(deadline=None)
@given(actions, few_tokens)
def test_the_longest_match_is_that_of_a_search_of_all_chunks(
    story: list[tuple[str, bool, list[int]]], asked: list[int]
) -> None:
    index, held = PartialChunks(), dict[tuple[str, ChunkKey], tuple[Stored, list[int]]]()
    index.add_spec(SPEC)
    for tier, is_stored, tokens in story:
        chunk = last_chunk(tokens)
        if is_stored:
            index.stored(tier, chunk)
            held[tier, chunk.key] = chunk, tokens
        else:
            index.removed(tier, chunk, MissReason.DROPPED)
            held.pop((tier, chunk.key), None)
        index.check()
    partial = [tokens for chunk, tokens in held.values() if chunk.token_count < SPEC.chunk_size]
    assert index.chunk_count == len(partial)
    for end in range(len(asked) // SPEC.chunk_size + 1):
        begin = end * SPEC.chunk_size
        if begin == len(asked):
            continue
        matching = [
            len(tokens) - begin
            for tokens in partial
            if begin < len(tokens) < begin + SPEC.chunk_size and tokens == asked[: len(tokens)]
        ]
        assert longest(index, {key for _, key in held}, asked, end) == max(matching, default=0)


def test_only_partial_chunks_of_known_specs_with_a_parent_are_indexed() -> None:
    index = PartialChunks()
    partial, full = last_chunk([1, 2]), last_chunk([1, 2, 3, 4])
    for chunk in (partial, full, Stored(ChunkKey(b"k" * 16), None, 2), Stored(ChunkKey(b"o" * 16), ROOT, 2, b"other")):
        index.stored("host", chunk)
    assert index.chunk_count == 0
    index.add_spec(SPEC)
    index.add_spec(HYBRID)
    assert not HYBRID.ends_anywhere
    for chunk in (partial, full, Stored(ChunkKey(b"k" * 16), None, 2), Stored(ChunkKey(b"o" * 16), ROOT, 2, b"other")):
        index.stored("host", chunk)
    index.stored("host", Stored(ChunkKey(b"h" * 16), ROOT, 2, HYBRID.fingerprint))
    assert (index.chunk_count, index.index.lengths(ROOT)) == (1, [2])


def test_a_spec_that_comes_later_finds_what_the_tiers_hold() -> None:
    index = PartialChunks({"host": [last_chunk([1]), last_chunk([1, 2, 3, 4])]})
    index.add_tier("disk", [last_chunk([1, 2, 3]), Stored(ChunkKey(b"o" * 16), ROOT, 2, OTHER.fingerprint)])
    found: list[tuple[str, int]] = []
    index.on_found = lambda tier, chunk: found.append((tier, chunk.token_count))
    index.add_spec(SPEC)
    assert list(index.index.lengths(ROOT)) == [1, 3]
    assert found == [("host", 1), ("disk", 3)], "coordinators receive them now"
    index.add_spec(OTHER)
    assert list(index.index.lengths(ROOT)) == [1, 2, 3]
    index.remove_spec(SPEC.fingerprint)
    index.stored("host", last_chunk([7, 8]))
    assert list(index.index.lengths(ROOT)) == [1, 2, 3]
    index.removed("disk", last_chunk([1, 2, 3]), MissReason.DROPPED)
    assert list(index.index.lengths(ROOT)) == [1, 2]


def test_a_chunk_in_two_tiers_stays_until_both_have_removed_it() -> None:
    index, chunk = PartialChunks(), last_chunk([1, 2])
    index.add_spec(SPEC)
    for tier in ("host", "disk", "disk"):
        index.stored(tier, chunk)
    index.removed("host", chunk, MissReason.DROPPED)
    assert list(index.index.lengths(ROOT)) == [2]
    index.removed("disk", chunk, MissReason.DROPPED)
    index.removed("disk", chunk, MissReason.DROPPED)
    assert not index.index.lengths(ROOT)
    index.check()


def test_the_key_of_the_prompt_itself_and_lengths_that_it_lacks_are_no_candidates() -> None:
    tokens, key = [5, 6, 7], last_chunk([5, 6, 7]).key
    assert [tail.token_count for tail in prompt_of(tokens, [key]).partials(0, range(1, 9))] == [2, 1]
    assert [tail.token_count for tail in prompt_of(tokens, []).partials(0, range(9))] == [3, 2, 1]
    assert prompt_of(tokens, [key]).partials(1, range(1, 9)) == []


def test_extras_are_part_of_the_keys() -> None:
    extras = {1: b"image"}
    stored, plain = last_chunk([1, 2, 3, 4, 5, 6], extras), last_chunk([1, 2, 3, 4, 5, 6])
    assert stored.parent
    for known, chunk in (({1: b"image", 99: b"no chunk"}, stored), ({}, plain)):
        (tail,) = prompt_of([1, 2, 3, 4, 5, 6, 7], [stored.parent], known).partials(1, [2])
        assert (tail.token_count, tail.key) == (2, chunk.key)


def test_a_prompt_costs_as_many_keys_as_there_are_lengths_however_many_siblings_there_are() -> None:
    index, random = PartialChunks(), np.random.default_rng(1)
    index.add_spec(SPEC)
    for number in range(5_000):
        key = ChunkKey(number.to_bytes(16, "big"))
        index.stored("host", Stored(key, ROOT, int(random.integers(1, SPEC.chunk_size))))
    assert list(index.index.lengths(ROOT)) == [1, 2, 3]


FINGERPRINT = bytes(16)


def chunk_key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(16, "little"))


@dataclass
class Pool:
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.losses = Losses(clock=lambda: self.now)
        self.tier = HostTier(2 * ALIGNMENT, CacheEvents(self.losses))

    def store(self, number: int, reason: MissReason = MissReason.EVICTED_BY_STORE) -> Chunk:
        return put(self.tier, chunk_key(number), ALIGNMENT, fingerprint=FINGERPRINT, token_count=4, reason=reason)


@pytest.mark.parametrize(
    "reason", [MissReason.EVICTED_BY_STORE, MissReason.EVICTED_BY_FETCH, MissReason.EVICTED_BY_ORDER]
)
def test_an_evicted_chunk_has_the_reason_of_what_took_its_room_until_it_is_stored_again(reason: MissReason) -> None:
    pool = Pool()
    for number in range(2):
        pool.store(number)
    assert pool.losses.get(chunk_key(0)) is None
    pool.now = 1001.5
    pool.store(2, reason)
    (lost,) = (number for number in range(3) if pool.tier.get(chunk_key(number)) is None)
    assert pool.losses.get(chunk_key(lost)) == Loss(tier=HOST, reason=reason, time=1001.5)
    pool.store(lost)
    assert pool.losses.get(chunk_key(lost)) is None


@pytest.mark.parametrize("reason", [MissReason.CLEARED, MissReason.DROPPED, MissReason.DAMAGED])
def test_a_dropped_chunk_has_the_reason_of_the_drop(reason: MissReason) -> None:
    pool = Pool()
    pool.store(0)
    pool.tier.drop([chunk_key(0), chunk_key(7)], reason)
    assert pool.losses.get(chunk_key(0)) == Loss(tier=HOST, reason=reason, time=1000.0)
    assert pool.losses.get(chunk_key(7)) is None


def test_the_last_loss_counts_where_a_chunk_was_in_several_tiers() -> None:
    pool = Pool()
    chunk = pool.store(0)
    pool.tier.drop([chunk.key], MissReason.EVICTED_BY_STORE)
    pool.now = 1002.0
    pool.losses.removed("disk", chunk, MissReason.EVICTED_FROM_TIER)
    assert pool.losses.get(chunk.key) == Loss(tier="disk", reason=MissReason.EVICTED_FROM_TIER, time=1002.0)
