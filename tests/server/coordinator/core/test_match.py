"""A hit of chunks with several parts is found where, and only where, each needed item is held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmkv.keys import ChunkKey, join_keys, part_key, split_keys
from lmkv.prompt import HeldKeys, Hit, Prompt, match
from lmkv.spec import KvPart, KvSpec
from lmkv.v1.chunk_pb2 import PART_RULE_ALL, PART_RULE_END, PART_RULE_LAST, PART_RULE_SINCE_MULTIPLE, PartRule
from lmkv_server.coordinator.core.layout_map import Change, LayoutMap, Match, MatchRun
from lmkv_server.coordinator.core.match import (
    MAX_UNPREPARED_KEYS,
    HeldAt,
    UnpreparedError,
    item_keys,
    match_of,
    prefixes,
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


def prompt_of(spec: KvSpec, keys: Sequence[ChunkKey] = KEYS) -> Prompt:
    return Prompt(spec, join_keys(keys))


def items_of(spec: KvSpec, chunk_count: int) -> list[ChunkKey]:
    return spec.item_keys(spec.items(chunk_count), KEYS)


def hit_at(layout: LayoutMap, spec: KvSpec, *positions: tuple[str, int]) -> int:
    prompt = prompt_of(spec)
    return match(prompt, HeldAt(layout, prompt, *positions)).chunk_count


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
    prompt = prompt_of(spec)
    layout = LayoutMap()
    tiers: dict[str, dict[ChunkKey, int]] = {}
    for number, holding in enumerate(holdings):
        named = [(part, chunk) for part in range(len(rules)) for chunk in range(CHUNK_COUNT)]
        # Few random items make a hit, so half of the cases lack these few and hold the others.
        held = [(item, HOST) for item in named if item not in holding] if mostly else holding.items()
        own = tiers[f"i{number}"] = {
            part_key(KEYS[chunk], part): tier for (part, chunk), tier in held if part < len(rules)
        }
        for key, tier in own.items():
            admit(layout, f"i{number}", [key], spec, tier)
    found = {prefix.instance_id: prefix for prefix in prefixes(layout, prompt)}
    for instance_id, own in tiers.items():
        hits = [n for n in range(CHUNK_COUNT + 1) if all(key in own for key in items_of(spec, n))]
        longest = hits[-1] if own else 0  # chunked attention alone needs nothing at its boundaries
        found_match = match_of(layout, prompt, found[instance_id]) if instance_id in found else None
        assert (found_match.chunk_count if found_match else 0) == longest
        if found_match:
            slowest = max((own[key] for key in items_of(spec, longest)), default=GPU)
            assert found_match.runs == (MatchRun(slowest, longest, longest * CHUNK),)
            assert found_match.token_count == longest * CHUNK


@pytest.mark.parametrize("spec", [HYBRID, MISTRAL])
def test_the_keys_of_a_hit_are_those_of_its_items_in_order(spec: KvSpec) -> None:
    prompt = prompt_of(spec)
    for chunk_count in range(CHUNK_COUNT + 1):
        assert split_keys(item_keys(prompt, Hit(chunk_count))) == items_of(spec, chunk_count)


@pytest.mark.parametrize("spec", [HYBRID, MISTRAL])
def test_a_set_of_keys_has_the_hit_whose_items_are_among_them(spec: KvSpec) -> None:
    prompt = prompt_of(spec)
    for chunk_count in range(CHUNK_COUNT + 1):
        assert match(prompt, HeldKeys(prompt, items_of(spec, chunk_count))).chunk_count == chunk_count


def test_a_hit_at_two_positions_may_be_held_by_each_in_part() -> None:
    layout = LayoutMap()
    items = items_of(HYBRID, 3)
    admit(layout, "a", items[:2])
    admit(layout, "b", items[2:])
    assert hit_at(layout, HYBRID, ("a", 0)) == hit_at(layout, HYBRID, ("b", HOST)) == 0
    assert hit_at(layout, HYBRID, ("a", HOST), ("b", HOST)) == 3
    assert hit_at(layout, HYBRID, ("a", HOST), ("b", DISK)) == 0


def test_an_item_in_two_tiers_counts_for_the_faster_one() -> None:
    layout = LayoutMap()
    items = items_of(HYBRID, 2)
    admit(layout, "a", items)
    admit(layout, "a", items[:1], tier=REMOTE)
    prompt = prompt_of(HYBRID)
    (prefix,) = prefixes(layout, prompt)
    found = match_of(layout, prompt, prefix)
    assert found is not None
    assert found.runs[0].tier == HOST


def test_only_holders_of_the_spec_are_considered() -> None:
    layout = LayoutMap()
    last = keys_of(PROMPT, MISTRAL)[1:2]
    admit(layout, "a", last, MISTRAL)
    admit(layout, "b", KEYS)
    assert prefixes(layout, prompt_of(MISTRAL)) == [Match("a", CHUNK_COUNT, CHUNK * CHUNK_COUNT, ())]
    assert prefixes(layout, prompt_of(MISTRAL), "a") == []
    assert [prefix.instance_id for prefix in prefixes(layout, prompt_of(HYBRID))] == ["b"]


def test_many_keys_of_parts_are_not_computed_at_once() -> None:
    layout = LayoutMap()
    wide = replace(HYBRID, more_parts=(replace(HYBRID.more_parts[0], span=1 << 30),))
    many = [ChunkKey(number.to_bytes(16, "big")) for number in range(MAX_UNPREPARED_KEYS + 1)]
    admit(layout, "a", many, wide)
    admit(layout, "a", [part_key(key, 1) for key in many], wide)
    prompt = prompt_of(wide, many)
    (prefix,) = prefixes(layout, prompt)
    with pytest.raises(UnpreparedError):
        match_of(layout, prompt, prefix)
    prompt.packed_keys(1, 0, len(many))
    found = match_of(layout, prompt, prefix)
    assert found
    assert found.chunk_count == len(many)
    short = prompt_of(wide, many[:MAX_UNPREPARED_KEYS])
    assert match_of(layout, short, prefixes(layout, short)[0])
