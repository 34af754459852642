"""A hit of chunks with several parts is found where, and only where, each needed item is held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmkv.keys import ChunkKey, join_keys, split_keys
from lmkv.parts import KvPart
from lmkv.spec import KvSpec
from lmkv.v1.chunk_pb2 import PART_RULE_ALL, PART_RULE_END, PART_RULE_LAST, PART_RULE_SINCE_MULTIPLE, PartRule
from lmkv_server.coordinator.core.layout_map import Change, LayoutMap, Match, MatchRun
from lmkv_server.coordinator.core.part_match import (
    MAX_KNOWN_HITS,
    MAX_TAIL_KEYS,
    PromptParts,
    keys_of_part,
    match_tail,
    prefixes,
    tail_keys,
)
from tests.server.coordinator.cases import HYBRID, MISTRAL, PROMPT, keys_of

CHUNK = 16
CHUNK_COUNT = 6
KEYS = keys_of(range(CHUNK * CHUNK_COUNT), HYBRID)
GPU, HOST, DISK, REMOTE = 1, 2, 3, 4

PARTS = st.one_of(
    st.tuples(st.just(PART_RULE_ALL), st.just(0)),
    st.tuples(st.just(PART_RULE_END), st.just(0)),
    st.tuples(st.just(PART_RULE_LAST), st.integers(2, 60)),
    st.tuples(st.just(PART_RULE_SINCE_MULTIPLE), st.integers(2, 60)),
)


def spec_of(rules: Sequence[tuple[PartRule.ValueType, int]]) -> KvSpec:
    common = KvPart(layer_count=1, kv_head_count=1, head_size=8, kv_dtype="float32")
    (rule, span), *more = rules
    more_parts = tuple(replace(common, rule=of_part, span=window) for of_part, window in more)
    return replace(HYBRID, rule=rule, span=span, more_parts=more_parts)


def prompt_parts(spec: KvSpec, keys: Sequence[ChunkKey] = KEYS) -> PromptParts:
    packed = join_keys(keys)
    return PromptParts(spec, tuple(keys_of_part(packed, part) for part in range(len(spec.parts))))


def item_keys(spec: KvSpec, chunk_count: int) -> list[ChunkKey]:
    return spec.item_keys(spec.items(chunk_count), KEYS)


def admit(
    layout: LayoutMap, instance_id: str, keys: Sequence[ChunkKey], spec: KvSpec = HYBRID, tier: int = HOST
) -> None:
    layout.apply(instance_id, Change(tier, spec.fingerprint, CHUNK, join_keys(keys)))


@given(
    st.lists(PARTS, min_size=1, max_size=4),
    st.lists(
        st.dictionaries(st.tuples(st.integers(0, 3), st.integers(0, CHUNK_COUNT - 1)), st.integers(1, 4)),
        min_size=1,
        max_size=3,
    ),
    st.booleans(),
)
def test_each_instance_has_the_longest_hit_of_which_it_holds_every_item(
    rules: list[tuple[PartRule.ValueType, int]], holdings: list[dict[tuple[int, int], int]], mostly: bool
) -> None:
    spec = spec_of(rules)
    parts = prompt_parts(spec)
    layout = LayoutMap()
    tiers: dict[str, dict[ChunkKey, int]] = {}
    for number, holding in enumerate(holdings):
        named = [(part, chunk) for part in range(len(rules)) for chunk in range(CHUNK_COUNT)]
        # Few random items make a hit, so half of the cases lack these few and hold the others.
        held = [(item, HOST) for item in named if item not in holding] if mostly else holding.items()
        own = tiers[f"i{number}"] = {
            split_keys(keys_of_part(KEYS[chunk], part))[0]: tier for (part, chunk), tier in held if part < len(rules)
        }
        for key, tier in own.items():
            admit(layout, f"i{number}", [key], spec, tier)
    found = {prefix.instance_id: prefix for prefix in prefixes(layout, spec, join_keys(KEYS))}
    for instance_id, own in tiers.items():
        hits = [n for n in range(CHUNK_COUNT + 1) if all(key in own for key in item_keys(spec, n))]
        longest = hits[-1] if own else 0  # chunked attention alone needs nothing at its boundaries
        match = parts.match(layout, found[instance_id]) if instance_id in found else None
        assert (match.chunk_count if match else 0) == longest
        if instance_id in found:
            tail = tail_keys(spec, join_keys(KEYS), found[instance_id].chunk_count)
            assert tail is not None
            is_longest = longest == found[instance_id].chunk_count
            assert match_tail(layout, found[instance_id], tail) == (match if is_longest else None)
        if match:
            slowest = max((own[key] for key in item_keys(spec, longest)), default=GPU)
            assert match.runs == (MatchRun(slowest, longest, longest * CHUNK),)
            assert match.token_count == longest * CHUNK


@pytest.mark.parametrize("spec", [HYBRID, MISTRAL])
def test_the_keys_of_a_hit_are_those_of_its_items_in_order(spec: KvSpec) -> None:
    parts = prompt_parts(spec)
    for chunk_count in range(CHUNK_COUNT + 1):
        assert split_keys(parts.item_keys(chunk_count)) == item_keys(spec, chunk_count)


def test_a_hit_at_two_positions_may_be_held_by_each_in_part() -> None:
    layout = LayoutMap()
    items = item_keys(HYBRID, 3)
    admit(layout, "a", items[:2])
    admit(layout, "b", items[2:])
    parts = prompt_parts(HYBRID)
    assert parts.hit_at(layout, "a", 0) == parts.hit_at(layout, "b", HOST) == 0
    assert parts.hit_at_either(layout, ("a", HOST), ("b", HOST)) == 3
    assert parts.hit_at_either(layout, ("a", HOST), ("b", DISK)) == 0


def test_an_item_in_two_tiers_counts_for_the_faster_one() -> None:
    layout = LayoutMap()
    items = item_keys(HYBRID, 2)
    admit(layout, "a", items)
    admit(layout, "a", items[:1], tier=REMOTE)
    (prefix,) = prefixes(layout, HYBRID, join_keys(KEYS))
    match = prompt_parts(HYBRID).match(layout, prefix)
    assert match is not None
    assert match.runs[0].tier == HOST


def test_only_holders_of_the_spec_are_considered() -> None:
    layout = LayoutMap()
    last = keys_of(PROMPT, MISTRAL)[1:2]
    admit(layout, "a", last, MISTRAL)
    admit(layout, "b", KEYS)
    assert prefixes(layout, MISTRAL, join_keys(KEYS)) == [Match("a", CHUNK_COUNT, CHUNK * CHUNK_COUNT, ())]
    assert prefixes(layout, MISTRAL, join_keys(KEYS), "a") == []
    assert [prefix.instance_id for prefix in prefixes(layout, HYBRID, join_keys(KEYS))] == ["b"]


def test_a_long_tail_is_not_computed_at_once() -> None:
    wide = replace(MISTRAL, span=1 << 30)
    many = KEYS * 50
    assert tail_keys(wide, join_keys(many), len(many)) is None
    tail = tail_keys(wide, join_keys(many), MAX_TAIL_KEYS)
    assert tail == join_keys(many[:MAX_TAIL_KEYS])


def test_a_bounded_number_of_hits_of_a_prompt_is_kept() -> None:
    layout, parts = LayoutMap(), prompt_parts(MISTRAL)
    for held in range(MAX_KNOWN_HITS + 2):  # the bits of a number: each instance holds other chunks
        keys = [key for number, key in enumerate(KEYS) if held >> number & 1]
        admit(layout, f"{held}", keys, MISTRAL)
    sizes = []
    for held in range(MAX_KNOWN_HITS + 2):
        parts.hit_at(layout, f"{held}", HOST)
        sizes.append(len(parts._known_hits))
        parts.hit_at(layout, f"{held}", HOST)
        assert len(parts._known_hits) == sizes[-1], "it is known"
    assert max(sizes) <= MAX_KNOWN_HITS
    assert max(sizes) > MAX_KNOWN_HITS // 2
