"""Items of a prompt: the same, however they are listed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmkv.keys import part_key
from lmkv.parts import PartItem
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.cache.prompt_items import PromptItems, parent_of
from tests.server.node.hybrid_engine import FULL, HYBRID, PROMPT, STATE, WINDOW, item_key

COUNT = len(PROMPT)
WHOLE = PromptItems.of_prompt(HYBRID, PROMPT)


def index_of(part: int, chunk: int) -> int:
    return part * COUNT + chunk


def test_the_items_of_a_prompt_are_all_parts_of_all_chunks() -> None:
    assert list(WHOLE.keys) == [part_key(key, part) for part in range(3) for key in PROMPT]
    assert WHOLE.keys[index_of(STATE, 2) : index_of(STATE, 4)] == [item_key(STATE, 2), item_key(STATE, 3)]
    assert WHOLE.sizes[index_of(WINDOW, 7)] == HYBRID.part_bytes(WINDOW)
    assert WHOLE.mean_bytes == HYBRID.chunk_bytes // 3


@pytest.mark.parametrize("count", range(COUNT + 1))
def test_the_items_of_a_hit_are_those_of_its_spec_and_a_subset_of_the_prompts(count: int) -> None:
    hit, expected = PromptItems.of_hit(HYBRID, PROMPT, count), HYBRID.items(count)
    assert [PartItem(int(part), int(chunk)) for part, chunk in zip(hit.parts, hit.chunks, strict=True)] == expected
    assert list(hit.keys) == HYBRID.item_keys(expected, PROMPT)
    assert hit.sizes == [HYBRID.part_bytes(item.part) for item in expected]
    assert [WHOLE.keys[index] for index in WHOLE.in_hit(count).nonzero()[0]] == list(hit.keys)
    assert hit.below(count) == frozenset(range(len(hit)))
    assert hit.below(0) == frozenset()


def test_a_holder_of_fewer_chunks_may_have_the_items_of_these() -> None:
    hit = PromptItems.of_hit(HYBRID, PROMPT, 4)
    assert [(int(hit.parts[index]), int(hit.chunks[index])) for index in sorted(hit.below(3))] == [
        (FULL, 0),
        (FULL, 1),
        (FULL, 2),
        (WINDOW, 2),
    ]


def test_a_lookup_uses_what_it_finds_and_the_chunks_before_it_that_every_hit_needs() -> None:
    asked = [index_of(FULL, 3), index_of(FULL, 4), index_of(WINDOW, 2), index_of(STATE, 4)]
    before = [item_key(FULL, chunk) for chunk in range(3)]
    assert WHOLE.used_with([], asked) == before
    assert WHOLE.used_with([], []) == []
    found = [index_of(FULL, 3), index_of(WINDOW, 3)]
    assert WHOLE.used_with(found, asked) == [*before, item_key(FULL, 3), item_key(WINDOW, 3)]
    assert WHOLE.used_with([index_of(STATE, 1)], [index_of(STATE, 1)]) == [
        *(item_key(FULL, chunk) for chunk in range(COUNT)),
        item_key(STATE, 1),
    ]


def test_a_spec_without_a_part_of_which_every_chunk_is_needed_uses_what_it_finds() -> None:
    windows = replace(HYBRID, rule=HYBRID.more_parts[0].rule, span=40, more_parts=())
    items = PromptItems.of_prompt(windows, PROMPT)
    assert items.used_with([3], [2, 3, 4]) == [PROMPT[3]]
    assert items.used_with([], [2, 3, 4]) == []


def test_a_part_leaves_before_its_chunk_and_a_chunk_before_the_one_in_front_of_it() -> None:
    assert WHOLE.parent(index_of(FULL, 0)) is None
    assert WHOLE.parent(index_of(FULL, 3)) == PROMPT[2]
    assert WHOLE.parent(index_of(WINDOW, 0)) == PROMPT[0]
    assert WHOLE.parent(index_of(STATE, 3)) == PROMPT[3]


def test_of_a_sliding_window_the_oldest_chunks_leave_first() -> None:
    windows = replace(HYBRID, rule=HYBRID.more_parts[0].rule, span=40, more_parts=())
    assert parent_of(windows, 0, PROMPT[1], PROMPT[0]) is None
    assert parent_of(HYBRID, 0, PROMPT[1], PROMPT[0]) == PROMPT[0]


def test_a_chunk_of_the_spec_and_of_the_size_of_an_item_fits_it() -> None:
    tier, size_bytes = HostTier(1 << 20), HYBRID.part_bytes(WINDOW)
    found = []
    for number, fingerprint in enumerate((HYBRID.fingerprint, b"x" * 16)):
        reserved = tier.reserve(size_bytes)
        assert reserved
        chunk = tier.commit(
            reserved.offset,
            key=PROMPT[number],
            fingerprint=fingerprint,
            size_bytes=size_bytes,
            checksum=0,
            token_count=HYBRID.chunk_size,
        )
        assert chunk
        found.append([WHOLE.fits(index_of(part, 1), chunk) for part in (WINDOW, STATE)])
    assert found == [[True, False], [False, False]]


def test_items_can_be_read_from_the_end_and_there_may_be_none() -> None:
    assert WHOLE.keys[-1] == item_key(STATE, COUNT - 1)
    assert WHOLE.keys[-COUNT - 1] == item_key(WINDOW, COUNT - 1)
    nothing = PromptItems.of_hit(HYBRID, PROMPT, 0)
    assert (len(nothing), list(nothing.keys), nothing.mean_bytes) == (0, [], 1)


def test_one_item_is_its_own_average() -> None:
    windows = replace(HYBRID, rule=HYBRID.more_parts[0].rule, span=40, more_parts=())
    assert PromptItems.of_prompt(windows, PROMPT[:1]).mean_bytes == windows.chunk_bytes
