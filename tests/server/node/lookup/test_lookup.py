"""Lookups of prompts in pool and tiers, against the definition of a hit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmkv.errors import LmkvError
from lmkv.keys import ChunkKey, part_key
from lmkv.prompt import Prompt
from lmkv.spec import ALL, KvSpec, PartItem
from lmkv.v1.chunk_pb2 import PART_RULE_LAST, PART_RULE_SINCE_MULTIPLE
from lmkv_server.node.cache.events import PartialChunks
from lmkv_server.node.cache.host import Chunk, HostTier
from lmkv_server.node.lookup.lookup import PromptLookup
from lmkv_server.node.tiers.base import Dropped, Needs, Presence, Progress, Selection, TierStats
from tests.server.node.cases import put
from tests.server.node.hybrid_engine import HYBRID, PROMPT

CHUNK_SIZE = HYBRID.chunk_size
WINDOWS = replace(HYBRID, rule=PART_RULE_LAST, span=70, more_parts=HYBRID.more_parts[:1])
LOCAL = replace(
    HYBRID, more_parts=(replace(HYBRID.more_parts[0], rule=PART_RULE_SINCE_MULTIPLE, span=64), HYBRID.more_parts[1])
)
GROUPS = replace(HYBRID, more_parts=())
"""Full attention in several of vLLM's groups."""
TWICE = replace(HYBRID, more_parts=(replace(HYBRID.more_parts[0], rule=ALL, span=0),))
"""Full attention of two kinds."""
SPECS = [HYBRID, WINDOWS, LOCAL, GROUPS, TWICE]


class ScriptedTier:
    """Has some items, and records what it is asked for."""

    is_local = True
    usable = True
    is_down = False

    def __init__(self, name: str, held: frozenset[PartItem], seconds: float | None = None) -> None:
        self.name = name
        self.held = held
        self.asked: set[PartItem] = set()
        self._seconds = seconds

    async def lookup(self, needs: Needs) -> Presence:
        assert needs.items
        assert needs.in_order == needs.spec.matches_prefixes
        named = {index: PartItem(*needs.items.at(index)) for index in needs.indices}
        self.asked |= set(named.values())
        return Presence(asked=needs.indices, indices=[index for index in named if named[index] in self.held])

    async def read(self, progress: Progress, presence: Presence, timeout_seconds: float, /) -> LmkvError | None:
        raise NotImplementedError

    def expected_seconds(self, presence: Presence, size_bytes: int, /) -> float | None:
        return self._seconds

    async def drop(self, selection: Selection, /) -> Dropped:
        return Dropped()

    def usage(self) -> None:
        return None

    def stats(self) -> TierStats:
        return TierStats()


def begin(pool: HostTier, spec: KvSpec, keys: Sequence[ChunkKey] = PROMPT, most_bytes: int = 1 << 30) -> PromptLookup:
    return PromptLookup(pool, PartialChunks(), Prompt(spec, keys), most_bytes)


def tier_with(spec: KvSpec, items: Sequence[PartItem]) -> HostTier:
    """A pool with these items of the prompt."""
    tier = HostTier(100 * spec.chunk_bytes)
    for item in dict.fromkeys(items):
        size_bytes = spec.part_bytes(item.part)
        put(
            tier,
            part_key(PROMPT[item.chunk], item.part),
            size_bytes,
            fingerprint=spec.fingerprint,
            token_count=spec.chunk_size,
        )
    return tier


def all_items(spec: KvSpec) -> list[PartItem]:
    return [PartItem(part, chunk) for part in range(len(spec.parts)) for chunk in range(len(PROMPT))]


def hits(spec: KvSpec, held: set[PartItem]) -> list[int]:
    """All hits that are possible with these items."""
    return [count for count in range(len(PROMPT) + 1) if set(spec.items(count)) <= held]


@given(spec=st.sampled_from(SPECS), data=st.data(), budget=st.integers(0, 12) | st.just(1000))
async def test_the_longest_hit_that_can_be_held_is_found_and_located(
    spec: KvSpec, data: st.DataObject, budget: int
) -> None:
    subsets = st.lists(st.sampled_from(all_items(spec)), unique=True).map(frozenset)
    own, first, second = (data.draw(subsets | st.just(frozenset(all_items(spec)))) for _ in range(3))
    pool, tiers = tier_with(spec, sorted(own, key=str)), [ScriptedTier("a", first), ScriptedTier("b", second)]
    budget_bytes = budget * spec.part_bytes(0)
    lookup = begin(pool, spec, most_bytes=budget_bytes)
    is_asked = data.draw(st.booleans())
    if is_asked:
        await lookup.ask(tiers)
    else:
        first, second = frozenset(), frozenset()

    def bytes_of(count: int) -> int:
        return sum(spec.part_bytes(item.part) for item in spec.items(count))

    possible = [count for count in hits(spec, {*own, *first, *second}) if bytes_of(count) <= budget_bytes]
    found = lookup.result()
    assert found.chunk_count == max(possible)
    own_hits = [count for count in hits(spec, set(own)) if bytes_of(count) <= budget_bytes]
    assert lookup.is_complete == (own_hits[-1] == len(PROMPT))
    items = spec.items(found.chunk_count)
    names = ["own" if item in own else "a" if item in first else "b" for item in items]
    assert [run.tier for run in found.runs for _ in range(run.chunk_count)] == names[len(found.own) :]
    assert names[: len(found.own)] == ["own"] * len(found.own)
    assert len(names) == len(found.own) or names[len(found.own)] != "own"
    keys = spec.item_keys(items, PROMPT)
    assert [chunk.key for chunk in (*found.own, *found.behind)] == [
        key for key, name in zip(keys, names, strict=True) if name == "own"
    ]
    for name in ("a", "b") if is_asked and found.chunk_count else ():
        presence = found.presence(name) or Presence()
        assert [names[index] for index in presence.indices] == [name] * names.count(name)
        assert set(presence.indices) <= set(presence.asked)
    assert not tiers[1].asked & (own | first), "nothing is asked for twice"


async def test_only_what_a_longer_hit_needs_is_asked_for() -> None:
    own = [*HYBRID.items(6), PartItem(0, 6)]
    tier = ScriptedTier("a", frozenset())
    lookup = begin(tier_with(HYBRID, own), HYBRID)
    await lookup.ask([tier])
    assert tier.asked == {PartItem(0, 7), PartItem(1, 6), PartItem(1, 7), PartItem(2, 6), PartItem(2, 7)}
    local = ScriptedTier("a", frozenset())
    await begin(tier_with(LOCAL, []), LOCAL).ask([local])
    assert {item.chunk for item in local.asked if item.part == 1} == {0, 2, 4, 6}, "no hit needs the others"


@pytest.mark.parametrize(
    ("seconds", "chunks", "refused"), [(None, 8, 0), (0.5, 8, 0), (2.5, 5, 3)], ids=["unknown", "quick", "slow"]
)
async def test_a_hit_that_takes_longer_than_computing_what_it_adds_is_not_offered(
    seconds: float | None, chunks: int, refused: int
) -> None:
    pool = tier_with(HYBRID, [*HYBRID.items(3)])
    quick = ScriptedTier("quick", frozenset(HYBRID.items(5)), seconds=0.1)
    other = ScriptedTier("other", frozenset(HYBRID.items(8)), seconds=seconds)
    lookup = begin(pool, HYBRID)
    await lookup.ask([quick, other], 100.0)  # 1.6 s for the five chunks
    found = lookup.result()
    assert (found.chunk_count, sum(run.chunk_count for run in found.refused)) == (chunks, refused)
    unbounded = begin(pool, HYBRID)
    await unbounded.ask([quick, other])
    assert unbounded.result().chunk_count == 8


async def test_an_item_that_leaves_the_pool_during_the_lookup_is_not_offered() -> None:
    pool = tier_with(HYBRID, [*HYBRID.items(3), *HYBRID.items(2)])

    class Evicting(ScriptedTier):
        async def lookup(self, needs: Needs) -> Presence:
            pool.drop([part_key(PROMPT[2], 2)])
            return await super().lookup(needs)

    lookup = begin(pool, HYBRID)
    await lookup.ask([Evicting("a", frozenset())])
    assert lookup.result().chunk_count == 2


async def test_each_item_of_the_hit_in_the_pool_is_used_once() -> None:
    pool = tier_with(GROUPS, GROUPS.items(3))
    used: list[ChunkKey] = []

    class Storing(ScriptedTier):
        async def lookup(self, needs: Needs) -> Presence:
            put(pool, PROMPT[3], GROUPS.chunk_bytes, fingerprint=GROUPS.fingerprint, token_count=GROUPS.chunk_size)
            return await super().lookup(needs)

    def use(chunks: Iterable[Chunk], absent: Sequence[ChunkKey] = ()) -> None:
        used.extend(chunk.key for chunk in chunks)

    pool.use = use  # type: ignore[method-assign]
    lookup = begin(pool, GROUPS)
    assert lookup.result(is_use=False).chunk_count == 3
    assert used == []
    assert lookup.result().chunk_count == 3
    assert used == PROMPT[:3]
    await lookup.ask([Storing("a", frozenset())])
    for _ in range(2):
        assert len(lookup.result().own) == 4
        assert used == PROMPT[:4]


async def test_a_chunk_of_another_spec_or_size_is_no_item() -> None:
    pool = tier_with(HYBRID, HYBRID.items(1))
    assert begin(pool, replace(HYBRID, model_id="other")).result().chunk_count == 0
    longer = replace(HYBRID, chunk_size=64)
    assert begin(pool, longer).result().chunk_count == 0


async def test_a_long_prompt_is_found_by_its_head() -> None:
    pool = tier_with(HYBRID, [*HYBRID.items(5), *HYBRID.items(3)])
    assert begin(pool, HYBRID, PROMPT[:3]).result().chunk_count == 3


async def test_an_empty_prompt_is_a_miss() -> None:
    lookup = begin(tier_with(HYBRID, []), HYBRID, [])
    await lookup.ask([ScriptedTier("a", frozenset())])
    assert lookup.is_complete
    assert lookup.result().chunk_count == 0
