"""The index of partial chunks in the layout map: which lengths there are, and that what is gone leaves it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from lmkv.keys import ChunkKey, as_tokens, chunk_keys, join_keys, part_key, prefix_digests, root_key, split_keys
from lmkv.prompt import Prompt
from lmkv.spec import KvPart
from lmkv.v1.chunk_pb2 import PART_RULE_LAST
from lmkv_server.coordinator.core.layout_map import MAX_LOST, Change, LayoutMap, MatchRun
from lmkv_server.coordinator.core.match import keys_with_tail, match_of, prefixes, with_tails
from lmkv_server.coordinator.registry.selection import SelectedChunks
from tests.support.specs import LLAMA

HOST, DISK = 2, 3
SIZE = 4
SPEC = replace(LLAMA, chunk_size=SIZE)
FINGERPRINT = SPEC.fingerprint
ROOT = root_key(FINGERPRINT)


def prompt_of(tokens: Sequence[int]) -> Prompt:
    packed = join_keys(keys_of(tokens))
    return Prompt(SPEC, packed, token_count=len(tokens), root=ROOT, tokens=as_tokens(tokens))


def keys_of(tokens: Sequence[int]) -> list[ChunkKey]:
    return chunk_keys(as_tokens(tokens), ROOT, SIZE, partial=True)


def change(tokens: Sequence[int], tier: int = HOST) -> Change:
    """The chunks of a prompt, which an instance gains."""
    keys = keys_of(tokens)
    partial = len(tokens) % SIZE
    last = len(keys) - 1
    return Change(
        tier,
        FINGERPRINT,
        SIZE,
        join_keys(keys),
        {last: partial} if partial else {},
        partial_parents={last: keys[-2] if last else ROOT} if partial else {},
    )


def evicted(*keys: ChunkKey, tier: int = HOST) -> Change:
    return Change(tier, FINGERPRINT, SIZE, evicted=join_keys(keys))


def tails(layout: LayoutMap, tokens: Sequence[int], excluded: str = "") -> dict[str, tuple[int, int]]:
    """Chunks and tokens of the match of each instance."""
    prompt = prompt_of(tokens)
    found = layout.lookup(prompt.packed, excluded)
    matches = with_tails(layout, prompt, found, found, excluded)
    for match in matches:
        assert match.chunk_count == sum(run.chunk_count for run in match.runs)
        assert match.token_count == sum(run.token_count for run in match.runs)
    return {match.instance_id: (match.chunk_count, match.token_count) for match in matches}


def test_the_keys_of_a_prompt_end_with_the_longest_partial_chunk_that_is_held_at_its_end() -> None:
    layout, prompt = LayoutMap(), list(range(11))
    layout.apply("one", change(prompt[:9]))
    layout.apply("two", change(prompt[:10]))
    layout.apply("other", change([*prompt[:8], 99]))

    def chosen(tokens: Sequence[int], instance_id: str = "") -> list[ChunkKey]:
        return split_keys(keys_with_tail(layout, prompt_of(tokens), instance_id))

    assert chosen(prompt) == keys_of(prompt[:10])
    assert chosen(prompt[:10]) == keys_of(prompt[:10])
    assert chosen(prompt, "one") == keys_of(prompt[:9])
    assert chosen(prompt, "three") == keys_of(prompt)
    assert chosen(prompt[:8]) == keys_of(prompt[:8])
    assert chosen([1, 2]) == keys_of([1, 2])


def test_each_instance_has_the_longest_partial_chunk_behind_its_own_match() -> None:
    layout, prompt = LayoutMap(), list(range(12))
    layout.apply("whole", change(prompt[:11]))
    layout.apply("whole", change(prompt[:9]))
    layout.apply("short", change(prompt[:6]))
    layout.apply("other", change([*prompt[:5], 99, 98]))
    layout.apply("start", change(prompt[:3]))
    layout.apply("disk", change(prompt[:4]))
    layout.apply("disk", change(prompt[:5], DISK))
    expected = {"whole": (3, 11), "short": (2, 6), "other": (1, 4), "start": (1, 3), "disk": (2, 5)}
    assert tails(layout, prompt) == expected
    assert tails(layout, prompt, "whole") == {name: one for name, one in expected.items() if name != "whole"}
    assert tails(layout, prompt[:2]) == {}
    assert [run.tier for run in layout.lookup(join_keys(keys_of(prompt[:5])))[-1].runs]
    layout.check()


def beginning(tokens: Sequence[int]) -> Change:
    """The chunks of a prompt, the last one with prefix digests."""
    keys = keys_of(tokens)
    last, parent = len(keys) - 1, keys[-2] if len(keys) > 1 else ROOT
    digests = prefix_digests(parent, as_tokens(tokens[last * SIZE :]))
    counts = {last: len(tokens) - last * SIZE} if len(tokens) % SIZE else {}
    return Change(
        HOST,
        FINGERPRINT,
        SIZE,
        join_keys(keys),
        counts,
        partial_parents={last: parent},
        prefix_digests={last: digests},
    )


@pytest.mark.parametrize("stored", [7, 8])
def test_an_instance_with_a_longer_chunk_holds_the_shorter_prompts_that_begin_as_it_does(stored: int) -> None:
    layout, longer = LayoutMap(), list(range(stored))
    layout.apply("a", beginning(longer))
    layout.apply("b", change(longer[:4]))
    assert tails(layout, longer[:6]) == {"a": (2, 6), "b": (1, 4)}
    assert tails(layout, [*longer[:5], 99, 98]) == {"a": (2, 5), "b": (1, 4)}
    assert tails(layout, [99, *longer[1:]]) == {}
    prompt = longer[:6]
    chosen = SelectedChunks(keys=join_keys(keys_of(prompt)), prompt=prompt_of(prompt))
    assert chosen.held_at(layout, "a", HOST).keys == join_keys(keys_of(longer))
    assert [chosen.held_at(layout, *place) for place in (("b", HOST), ("a", DISK), ("c", 0))] == [chosen] * 3
    assert chosen.columns(layout) == [chosen.keys + keys_of(longer)[-1]]
    layout.apply("a", change(prompt))
    assert chosen.held_at(layout, "a", HOST) == chosen, "its own chunk is the better one"
    layout.apply("a", evicted(*keys_of(prompt)[1:], *keys_of(longer)[1:]))
    assert tails(layout, prompt) == {"a": (1, 4), "b": (1, 4)}
    layout.check()


def test_lengths_leave_with_the_last_holder() -> None:
    layout = LayoutMap()
    for instance_id in ("a", "b"):
        layout.apply(instance_id, change([1, 2]))
    layout.apply("a", change([1, 2, 3]))
    assert list(layout.ends.lengths(ROOT)) == [2, 3]
    layout.apply("a", evicted(*keys_of([1, 2]), *keys_of([1, 2, 3])))
    assert list(layout.ends.lengths(ROOT)) == [2]
    layout.apply("b", evicted(*keys_of([1, 2])))
    assert not layout.ends.lengths(ROOT)
    layout.check()


def test_chunks_of_instances_that_left_are_removed_as_others_are_added() -> None:
    layout = LayoutMap()
    for number in range(100):
        layout.apply("gone", change([number, 1, 2]))
    layout.drop_instance("gone")
    for number in range(100, 160):
        layout.apply("here", change([number, 1, 2]))
        layout.check()
    assert len(layout._partials) == 60
    assert tails(layout, [7, 1, 2]) == {}
    assert tails(layout, [107, 1, 2, 9]) == {"here": (1, 3)}


def test_a_snapshot_brings_its_partial_chunks_and_changes_meanwhile_cost_none() -> None:
    layout = LayoutMap()
    staged = layout.stage("a")
    layout.apply(staged, change([1, 2, 3]))
    for number in range(10):
        layout.apply("b", change([number, 5]))
        layout.apply("b", evicted(*keys_of([number, 5])))
    assert tails(layout, [1, 2, 3, 4]) == {}
    layout.install(staged)
    assert tails(layout, [1, 2, 3, 4]) == {"a": (1, 3)}
    for number in range(10, 30):
        layout.apply("b", change([number, 5]))
    assert tails(layout, [1, 2, 3, 4]) == {"a": (1, 3)}
    assert len(layout._partials) == 21
    layout.check()


def test_the_memory_for_partial_chunks_that_only_snapshots_bring_is_bounded() -> None:
    layout = LayoutMap()
    for number in range(50):
        staged = layout.stage("a")
        layout.apply(staged, change([number, 5]))
        layout.install(staged)
        layout.apply("a", evicted(*keys_of([number, 5])))
        layout.check()
    assert len(layout._partials._queue) == 0


def test_of_alternatives_the_first_that_is_held_is_found() -> None:
    layout = LayoutMap()
    layout.apply("a", change([1, 2]))
    layout.apply("b", change([1, 2, 3]))
    keys = [*keys_of([9]), *keys_of([1, 2, 3]), *keys_of([1, 2])]
    index, matches = layout.lookup_any(keys)
    assert (index, [match.instance_id for match in matches]) == (1, ["b"])
    index, matches = layout.lookup_any(keys, excluded="b")
    assert (index, [match.instance_id for match in matches]) == (2, ["a"])
    assert layout.lookup_any(keys[:1]) == (0, [])


def test_a_tail_belongs_to_the_last_run_if_it_is_in_the_same_tier() -> None:
    layout, tokens = LayoutMap(), list(range(10))
    keys = join_keys(keys_of(tokens[:8]))
    for instance_id, tier in (("disk", DISK), ("host", HOST)):
        layout.apply(instance_id, change(tokens[:4]))
        layout.apply(instance_id, Change(DISK, FINGERPRINT, SIZE, keys[16:]))
        layout.apply(instance_id, change(tokens[:9], tier))
        layout.apply(instance_id, Change(HOST, FINGERPRINT, SIZE, evicted=keys[16:]))
    prompt = Prompt(SPEC, keys, root=ROOT, tokens=as_tokens(tokens))
    found = layout.lookup(keys)
    matches = with_tails(layout, prompt, found, found, "")
    runs = {match.instance_id: match.runs for match in matches}
    assert runs["disk"] == (MatchRun(HOST, 1, 4), MatchRun(DISK, 2, 5))
    assert runs["host"] == (MatchRun(HOST, 1, 4), MatchRun(DISK, 1, 4), MatchRun(HOST, 1, 1))


@pytest.mark.parametrize(("count", "left"), [(MAX_LOST, []), (MAX_LOST + 1, [2])])
def test_chunks_of_a_large_loss_are_removed_later(count: int, left: list[int]) -> None:
    layout = LayoutMap()
    layout.apply("a", change([1, 2]))
    others = [ChunkKey(number.to_bytes(16, "big")) for number in range(count - 1)]
    layout.apply("a", Change(HOST, FINGERPRINT, SIZE, join_keys(others)))
    layout.apply("a", evicted(*keys_of([1, 2]), *others))
    assert list(layout.ends.lengths(ROOT)) == left


def test_removed_chunks_leave_the_queue_as_well() -> None:
    layout = LayoutMap()
    for number in range(3):
        layout.apply("a", change([number, 1]))
    for number in range(3):
        layout.apply("a", evicted(*keys_of([number, 1])))
        layout.check()


def test_a_partial_chunk_may_come_before_others() -> None:
    layout = LayoutMap()
    (key,), (other,) = keys_of([1, 2]), keys_of([5, 6, 7, 8])
    layout.apply("a", Change(HOST, FINGERPRINT, SIZE, key + other, {0: 2}, partial_parents={0: ROOT}))
    assert list(layout.ends.lengths(ROOT)) == [2]
    assert tails(layout, [1, 2, 3]) == {"a": (1, 2)}
    layout.apply("a", evicted(key))
    assert list(layout.ends.lengths(ROOT)) == []
    layout.check()


WINDOWS = replace(
    SPEC,
    more_parts=(KvPart(rule=PART_RULE_LAST, span=6, layer_count=1, kv_head_count=1, head_size=8, kv_dtype="float32"),),
)


def stored(layout: LayoutMap, instance_id: str, tokens: Sequence[int], *missing: tuple[int, int]) -> None:
    """The items of a hit of all tokens, but for some: parts and chunks."""
    keys, rest = keys_of(tokens), len(tokens) % SIZE
    for item in WINDOWS.items(len(tokens) // SIZE, rest):
        if (item.part, item.chunk) not in missing:
            is_last = rest > 0 and item.chunk == len(keys) - 1
            ends: dict[int, bytes] = (
                {0: keys[item.chunk - 1] if item.chunk else ROOT} if is_last and not item.part else {}
            )
            counts = {0: rest} if is_last else {}
            key = part_key(keys[item.chunk], item.part)
            layout.apply(instance_id, Change(HOST, FINGERPRINT, SIZE, key, counts, partial_parents=ends))


def test_a_hit_with_windows_ends_inside_a_chunk_where_all_parts_of_it_are_held() -> None:
    layout, prompt = LayoutMap(), list(range(15))
    stored(layout, "all", prompt[:10])
    stored(layout, "no part", prompt[:10], (1, 2))
    stored(layout, "no window", prompt[:10], (1, 1))
    stored(layout, "start", prompt[:3])
    stored(layout, "both", prompt[:8])
    stored(layout, "both", prompt[:9])

    def found(tokens: Sequence[int]) -> dict[str, tuple[int, int]]:
        keys = join_keys(keys_of(tokens))
        whole = Prompt(WINDOWS, keys, token_count=len(tokens), root=ROOT, tokens=as_tokens(tokens))
        before = prefixes(layout, whole)
        matches = [one for prefix in before if (one := match_of(layout, whole, prefix))]
        return {
            one.instance_id: (one.chunk_count, one.token_count)
            for one in with_tails(layout, whole, matches, before, "")
        }

    assert found(prompt) == {"all": (3, 10), "start": (1, 3), "both": (3, 9)}
    assert found(prompt[:10]) == {"all": (3, 10), "start": (1, 3), "both": (3, 9)}
    assert found([*prompt[:9], 99]) == {"both": (3, 9), "start": (1, 3)}
    stored(layout, "no window", prompt[:8])
    assert found(prompt)["no window"] == (3, 10)
    assert found(prompt[:9])["no window"] == (2, 8)
