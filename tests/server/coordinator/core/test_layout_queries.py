"""Queries of the layout map by spec, by instance and over all chunks, and the limits of its tables."""

from __future__ import annotations

import pytest

from lmkv.errors import Full
from lmkv.keys import EMPTY_DIGEST, ChunkKey, Digest, join_keys
from lmkv_kernels import ChunkTable
from lmkv_server.coordinator.core.layout_map import MAX_TOKENS, MIN_FINGERPRINTS, TIER_COUNT, Change, LayoutMap

HOST, DISK = 2, 3
CHUNK = 16
KEYS = [ChunkKey(bytes([number]) * 16) for number in range(1, 13)]


def admit(layout: LayoutMap, instance_id: str, keys: list[ChunkKey], spec: bytes = b"one", tier: int = HOST) -> None:
    layout.apply(instance_id, Change(tier, spec, CHUNK, join_keys(keys)))


def sole(layout: LayoutMap, instance_id: str, *ignored: str, limit: int = 100) -> dict[bytes, list[ChunkKey]]:
    found: dict[bytes, list[ChunkKey]] = {}
    cursor = 0
    while True:
        cursor, parts = layout.scan_sole(instance_id, ignored, cursor, limit)
        for spec, keys in parts.items():
            assert keys
            found.setdefault(spec, []).extend(ChunkKey(keys[at : at + 16]) for at in range(0, len(keys), 16))
        if not cursor:
            return {spec: sorted(keys) for spec, keys in found.items()}


def test_the_chunks_that_only_one_instance_holds_are_listed_once_by_spec() -> None:
    layout = LayoutMap()
    admit(layout, "a", KEYS[:6])
    admit(layout, "a", KEYS[:2], tier=DISK)
    admit(layout, "a", KEYS[6:8], b"two")
    admit(layout, "b", KEYS[1:3], tier=DISK)
    admit(layout, "c", KEYS[7:9], b"two")
    assert sole(layout, "a") == {b"one": [KEYS[0], *KEYS[3:6]], b"two": [KEYS[6]]}
    assert sole(layout, "a", limit=1) == sole(layout, "a")
    assert sole(layout, "a", "b") == {b"one": KEYS[:6], b"two": [KEYS[6]]}
    assert sole(layout, "a", "b", "c") == {b"one": KEYS[:6], b"two": KEYS[6:8]}
    assert sole(layout, "b") == {}
    assert sole(layout, "stranger") == {}


def test_the_holders_of_a_spec_are_those_with_chunks_of_it_or_of_an_unknown_one() -> None:
    layout = LayoutMap()
    admit(layout, "a", KEYS[:2], b"one")
    admit(layout, "a", KEYS[2:3], b"two", DISK)
    admit(layout, "b", KEYS[3:4], b"two")
    assert layout.holders_of_spec(b"one") == ["a"]
    assert layout.holders_of_spec(b"two") == ["a", "b"]
    assert layout.holders_of_spec(b"three") == []
    assert [layout.may_hold(spec) for spec in (b"one", b"two", b"three")] == [True, True, False]
    admit(layout, "c", KEYS[4:5], b"")
    assert layout.holders_of_spec(b"three") == ["c"]
    assert layout.may_hold(b"three")


def test_fingerprints_without_chunks_are_removed_once_there_are_many() -> None:
    layout = LayoutMap()
    admit(layout, "kept", KEYS[:1], b"kept")
    staged = layout.stage("staged")
    layout.apply(staged, Change(HOST, b"staged", CHUNK, KEYS[1]))
    for number in range(MIN_FINGERPRINTS - 2):
        admit(layout, "a", KEYS[2:3], b"%d" % number)
        layout.apply("a", Change(HOST, b"", CHUNK, evicted=KEYS[2]))
    assert layout.may_hold(b"0"), "as many as the limit are kept"
    admit(layout, "a", KEYS[2:3], b"last")
    assert [layout.may_hold(spec) for spec in (b"0", b"kept", b"staged", b"last")] == [False, True, True, True]


def test_the_limit_of_fingerprints_grows_with_those_that_have_chunks() -> None:
    layout = LayoutMap()
    for number in range(MIN_FINGERPRINTS + 1):
        admit(layout, "a", [ChunkKey(number.to_bytes(16, "little"))], b"%d" % number)
    for number in range(2 * MIN_FINGERPRINTS + 2):
        admit(layout, "b", KEYS[-1:], b"other %d" % number)
        layout.apply("b", Change(HOST, b"", CHUNK, evicted=KEYS[-1]))
        assert layout.may_hold(b"0")
    assert not layout.may_hold(b"other 0")
    assert layout.may_hold(b"other %d" % (2 * MIN_FINGERPRINTS + 1))


def test_chunks_of_too_many_specs_are_refused_with_a_delay() -> None:
    layout = LayoutMap()
    for number in range(ChunkTable.MAX_SPECS):
        admit(layout, "a", [ChunkKey(number.to_bytes(16, "little"))], b"%d" % number)
    with pytest.raises(Full, match="there are chunks of too many specs") as caught:
        admit(layout, "a", [ChunkKey(b"x" * 16)], b"one more")
    assert caught.value.retry_seconds == 1.0
    layout.check()


def test_a_chunk_has_a_bounded_number_of_tokens() -> None:
    layout = LayoutMap()
    layout.apply("a", Change(HOST, b"", MAX_TOKENS, KEYS[0]))
    assert layout.match_at("a", HOST, KEYS[0]) == (1, MAX_TOKENS)
    with pytest.raises(ValueError):
        layout.apply("a", Change(HOST, b"", MAX_TOKENS + 1, KEYS[1]))


def test_a_digest_covers_all_specs_of_one_tier() -> None:
    layout = LayoutMap()
    admit(layout, "a", KEYS[:1], b"one")
    admit(layout, "a", KEYS[1:3], b"two")
    admit(layout, "a", KEYS[3:4], b"one", DISK)
    sums = [int.from_bytes(key[:8], "little") for key in KEYS]
    assert layout.digest("a", HOST) == Digest(chunk_count=3, key_sum=sum(sums[:3]))
    assert layout.digest("a", DISK) == Digest(chunk_count=1, key_sum=sums[3])
    assert layout.digest("a", TIER_COUNT) == layout.digest("stranger", HOST) == EMPTY_DIGEST
    assert layout.chunk_counts("a") == {(HOST, b"one"): 1, (HOST, b"two"): 2, (DISK, b"one"): 1}
    assert layout.chunk_counts("stranger") == {}


def test_a_change_without_parents_keeps_the_other_chunks_and_their_tokens() -> None:
    change = Change(
        HOST,
        b"one",
        CHUNK,
        join_keys(KEYS[:4]),
        {0: 5, 1: 6, 3: 7},
        join_keys(KEYS[4:5]),
        {1: KEYS[8]},
    )
    expected = Change(HOST, b"one", CHUNK, join_keys([KEYS[0], *KEYS[2:4]]), {0: 5, 2: 7}, join_keys(KEYS[4:5]))
    assert change.without_parents() == expected


def test_reports_that_add_nothing_open_no_slot() -> None:
    layout = LayoutMap(revision=7)
    assert layout.apply("a", Change(HOST, b"", CHUNK, evicted=KEYS[0])) == 7
    assert layout.stage("b").slot == 0


def test_an_installed_snapshot_changes_the_revision_even_if_it_is_empty() -> None:
    layout = LayoutMap(revision=7)
    admit(layout, "a", KEYS[:1])
    assert layout.revision == 8
    assert layout.install(layout.stage("a")) == 9
    assert layout.lookup(KEYS[0]) == []
    layout.check()
