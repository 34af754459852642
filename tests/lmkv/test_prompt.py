"""Hits against their definition, and items however they are listed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmkv.keys import ChunkKey, as_tokens, part_key
from lmkv.prompt import MAX_JUMPS, Hit, Prompt, Tail, match, parent_of
from lmkv.spec import ALL, TOKEN_MAJOR, KvPart, KvSpec, PartItem
from tests.lmkv.test_spec import HYBRID as TILED
from tests.lmkv.test_spec import PARTS, STATE, window

COUNT = 9
SIZE = 4
TOKENS = as_tokens(list(range(COUNT * SIZE + 3)))
ROOT = ChunkKey(b"r" * 16)
KEYS = [ChunkKey(bytes([index] * 16)) for index in range(COUNT)]


def spec_of(*parts: KvPart) -> KvSpec:
    """A spec with these parts."""
    first, *more = parts
    return replace(
        TILED,
        format=TOKEN_MAJOR,
        block_size=0,
        chunk_size=SIZE,
        rule=first.rule,
        span=first.span,
        kv_head_count=first.kv_head_count,
        head_size=first.head_size,
        kv_dtype=first.kv_dtype,
        more_parts=tuple(more),
    )


SPECS = st.lists(PARTS, min_size=1, max_size=4).map(lambda parts: spec_of(*parts))
HYBRID = spec_of(replace(window(2), rule=ALL, span=0), window(6), STATE)
FULL, WINDOW, STATES = range(3)


def key_of(part: int, chunk: int) -> ChunkKey:
    return part_key(KEYS[chunk], part)


@dataclass
class Set:
    """The parts of chunks that are held, and the tails."""

    prompt: Prompt
    items: set[tuple[int, int]]
    ends: dict[int, list[Tail]]

    def prefix(self, part: int, count: int) -> int:
        return next((chunk for chunk in range(count) if (part, chunk) not in self.items), count)

    def flags(self, part: int, start: int, stop: int) -> bytes:
        return bytes((part, chunk) in self.items for chunk in range(start, stop))

    def tails(self, chunk_count: int) -> Iterable[Tail]:
        return sorted(self.ends.get(chunk_count, []), key=lambda tail: -tail.token_count)


def longest(held: Set, most_bytes: int | None) -> Hit:
    """The longest hit, by its definition."""
    prompt, best = held.prompt, Hit()
    for count in range(COUNT + 1):
        for tail in (None, *(held.ends.get(count, []) if prompt.may_end_behind(count) else [])):
            hit = Hit(count, tail)
            items = prompt.spec.items(count, tail.token_count if tail else 0)
            has_all = all((item.part, item.chunk) in held.items for item in items if item.chunk < count)
            fits = most_bytes is None or sum(prompt.items(hit).sizes) <= most_bytes
            if has_all and fits and prompt.end(hit) > prompt.end(best):
                best = hit
    return best


@given(
    spec=SPECS,
    absent=st.sets(st.tuples(st.integers(0, 3), st.integers(0, COUNT - 1))),
    ends=st.dictionaries(st.integers(0, COUNT), st.sets(st.integers(1, SIZE - 1))),
    budget=st.none() | st.integers(0, 40),
    jumps=st.sampled_from([0, 1, MAX_JUMPS]),
)
def test_a_match_is_the_longest_hit_of_what_is_held(
    spec: KvSpec,
    absent: set[tuple[int, int]],
    ends: dict[int, set[int]],
    budget: int | None,
    jumps: int,
) -> None:
    prompt = Prompt(spec, KEYS, root=ROOT, tokens=TOKENS)
    tails = {
        count: [Tail(key=KEYS[0], token_count=tokens, stored_token_count=tokens) for tokens in lengths]
        for count, lengths in ends.items()
    }
    items = {(part, chunk) for part in range(4) for chunk in range(COUNT)} - absent
    held = Set(prompt, items, tails)
    most_bytes = None if budget is None else budget * max(spec.part_bytes(0), 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmkv.prompt.MAX_JUMPS", jumps)
        found = match(prompt, held, most_bytes)
    assert prompt.end(found) == prompt.end(longest(held, most_bytes))
    assert prompt.size_bytes(found) == sum(prompt.items(found).sizes)
    assert len(prompt.items(found)) == len(spec.items(found.chunk_count, found.tail.token_count if found.tail else 0))


@pytest.mark.parametrize("jumps", [0, MAX_JUMPS])
def test_a_tail_is_found_behind_chunks_that_make_no_hit_themselves(jumps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkv.prompt.MAX_JUMPS", jumps)
    spec = spec_of(replace(window(2), rule=ALL, span=0), window(6))
    prompt = Prompt(spec, KEYS, root=ROOT, tokens=TOKENS)
    tail = Tail(key=KEYS[0], token_count=3, stored_token_count=3)
    items = {(part, chunk) for part in range(2) for chunk in range(COUNT)} - {(1, COUNT - 2)}
    assert match(prompt, Set(prompt, items, {COUNT: [tail]})) == Hit(COUNT, tail)
    assert match(prompt, Set(prompt, items, {})) == Hit(COUNT - 2)


@given(spec=SPECS, count=st.integers(0, COUNT), last_tokens=st.integers(1, SIZE))
def test_the_chunks_beyond_a_hit_are_those_of_all_longer_hits(spec: KvSpec, count: int, last_tokens: int) -> None:
    prompt = Prompt(spec, KEYS, token_count=(COUNT - 1) * SIZE + last_tokens)
    for part in range(len(spec.parts)):
        longer = [set(prompt.chunks_in(Hit(end), part)) for end in range(count + 1, COUNT + 1)]
        assert list(prompt.chunks_beyond(count, part)) == sorted(set[int]().union(*longer))


# --- Items

WHOLE = Prompt(HYBRID, KEYS).all_items()


def index_of(part: int, chunk: int) -> int:
    return part * COUNT + chunk


def test_the_items_of_a_prompt_are_all_parts_of_all_chunks() -> None:
    assert list(WHOLE.keys) == [part_key(key, part) for part in range(3) for key in KEYS]
    assert WHOLE.keys[index_of(STATES, 2) : index_of(STATES, 4)] == [key_of(STATES, 2), key_of(STATES, 3)]
    assert WHOLE.sizes[index_of(WINDOW, 7)] == HYBRID.part_bytes(WINDOW)
    assert WHOLE.mean_bytes == HYBRID.chunk_bytes // 3


@pytest.mark.parametrize("count", range(COUNT + 1))
def test_the_items_of_a_hit_are_those_of_its_spec_and_a_subset_of_the_prompts(count: int) -> None:
    hit, expected = Prompt(HYBRID, KEYS).items(Hit(count)), HYBRID.items(count)
    assert [PartItem(int(part), int(chunk)) for part, chunk in zip(hit.parts, hit.chunks, strict=True)] == expected
    assert list(hit.keys) == HYBRID.item_keys(expected, KEYS)
    assert hit.sizes == [HYBRID.part_bytes(item.part) for item in expected]
    assert [WHOLE.keys[index] for index in WHOLE.in_hit(Hit(count))] == list(hit.keys)
    assert hit.below(count) == frozenset(range(len(hit)))
    assert hit.below(0) == frozenset()


def test_a_holder_of_fewer_chunks_may_have_the_items_of_these() -> None:
    hit = Prompt(HYBRID, KEYS).items(Hit(4))
    assert [(int(hit.parts[index]), int(hit.chunks[index])) for index in sorted(hit.below(3))] == [
        (FULL, 0),
        (FULL, 1),
        (FULL, 2),
        (WINDOW, 2),
    ]


def test_a_lookup_uses_what_it_finds_and_the_chunks_before_it_that_every_hit_needs() -> None:
    asked = [index_of(FULL, 3), index_of(FULL, 4), index_of(WINDOW, 2), index_of(STATES, 4)]
    before = [key_of(FULL, chunk) for chunk in range(3)]
    assert WHOLE.used_with([], asked) == before
    assert WHOLE.used_with([], []) == []
    found = [index_of(FULL, 3), index_of(WINDOW, 3)]
    assert WHOLE.used_with(found, asked) == [*before, key_of(FULL, 3), key_of(WINDOW, 3)]
    assert WHOLE.used_with([index_of(STATES, 1)], [index_of(STATES, 1)]) == [
        *(key_of(FULL, chunk) for chunk in range(COUNT)),
        key_of(STATES, 1),
    ]


def test_a_spec_without_a_part_of_which_every_chunk_is_needed_uses_what_it_finds() -> None:
    windows = replace(HYBRID, rule=HYBRID.more_parts[0].rule, span=40, more_parts=())
    items = Prompt(windows, KEYS).all_items()
    assert items.used_with([3], [2, 3, 4]) == [KEYS[3]]
    assert items.used_with([], [2, 3, 4]) == []


def test_a_part_leaves_before_its_chunk_and_a_chunk_before_the_one_in_front_of_it() -> None:
    assert WHOLE.parent(index_of(FULL, 0)) is None
    assert WHOLE.parent(index_of(FULL, 3)) == KEYS[2]
    assert WHOLE.parent(index_of(WINDOW, 0)) == KEYS[0]
    assert WHOLE.parent(index_of(STATES, 3)) == KEYS[3]


def test_of_a_sliding_window_the_oldest_chunks_leave_first() -> None:
    windows = replace(HYBRID, rule=HYBRID.more_parts[0].rule, span=40, more_parts=())
    assert parent_of(windows, 0, KEYS[1], KEYS[0]) is None
    assert parent_of(HYBRID, 0, KEYS[1], KEYS[0]) == KEYS[0]


def test_items_can_be_read_from_the_end_and_there_may_be_none() -> None:
    assert WHOLE.keys[-1] == key_of(STATES, COUNT - 1)
    assert WHOLE.keys[-COUNT - 1] == key_of(WINDOW, COUNT - 1)
    nothing = Prompt(HYBRID, KEYS).items(Hit(0))
    assert (len(nothing), list(nothing.keys), nothing.mean_bytes) == (0, [], 1)


def test_one_item_is_its_own_average() -> None:
    windows = replace(HYBRID, rule=HYBRID.more_parts[0].rule, span=40, more_parts=())
    assert Prompt(windows, KEYS[:1]).all_items().mean_bytes == windows.chunk_bytes
