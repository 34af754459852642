"""The layout map says what a naive model of it says, whatever happens in which order."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from lmkv.keys import EMPTY_DIGEST, ChunkKey, Digest, digest, join_keys, split_keys
from lmkv_server.coordinator.core.layout_map import Change, LayoutMap, Match, MatchRun, Snapshot

GPU, HOST, DISK = 1, 2, 3
CHUNK = 256
KEYS = [ChunkKey(sha256(bytes([i])).digest()[:16]) for i in range(12)]


def admit(layout: LayoutMap, instance_id: str, keys: list[ChunkKey], tier: int = HOST) -> int:
    return layout.apply(instance_id, Change(tier, b"", CHUNK, join_keys(keys)))


def evict(layout: LayoutMap, instance_id: str, keys: list[ChunkKey], tier: int = HOST) -> int:
    return layout.apply(instance_id, Change(tier, b"", CHUNK, b"", {}, join_keys(keys)))


def lookup(layout: LayoutMap, keys: list[ChunkKey], excluded: str = "") -> list[Match]:
    return layout.lookup(join_keys(keys), excluded)


def tokens(layout: LayoutMap, keys: list[ChunkKey], excluded: str = "") -> dict[str, int]:
    return {match.instance_id: match.token_count for match in lookup(layout, keys, excluded)}


def test_every_holder_is_listed_with_its_own_prefix_longest_first() -> None:
    layout = LayoutMap()
    admit(layout, "b", KEYS[:2])
    admit(layout, "a", KEYS[:3])
    assert [(m.instance_id, m.token_count) for m in lookup(layout, KEYS[:3])] == [("a", 768), ("b", 512)]


def test_holders_of_the_same_length_are_ordered_by_id() -> None:
    layout = LayoutMap()
    for instance_id in ("c", "a", "b"):
        admit(layout, instance_id, KEYS[:2])
    assert [m.instance_id for m in lookup(layout, KEYS[:4])] == ["a", "b", "c"]


def test_a_gap_ends_the_credit() -> None:
    layout = LayoutMap()
    admit(layout, "a", [KEYS[0], KEYS[2]])
    assert tokens(layout, KEYS[:3]) == {"a": 256}


def test_a_gap_of_one_holder_does_not_end_the_credit_of_another() -> None:
    layout = LayoutMap()
    admit(layout, "a", [KEYS[0], KEYS[2]])
    admit(layout, "b", KEYS[:3])
    assert tokens(layout, KEYS[:3]) == {"b": 768, "a": 256}


def test_who_holds_only_a_suffix_is_never_credited() -> None:
    layout = LayoutMap()
    admit(layout, "a", KEYS[1:3])
    assert lookup(layout, KEYS[:3]) == []
    admit(layout, "b", KEYS[:1])
    assert tokens(layout, KEYS[:3]) == {"b": 256}


def test_nothing_is_found_of_nothing() -> None:
    layout = LayoutMap()
    assert lookup(layout, KEYS) == []
    assert lookup(layout, []) == []


def test_an_eviction_counts_for_its_instance_and_tier_only() -> None:
    layout = LayoutMap()
    admit(layout, "a", KEYS[:3])
    admit(layout, "b", KEYS[:3])
    admit(layout, "b", KEYS[:3], DISK)
    evict(layout, "a", KEYS[1:3])
    evict(layout, "b", KEYS[:3])
    assert tokens(layout, KEYS[:3]) == {"b": 768, "a": 256}
    assert lookup(layout, KEYS[:3])[0].runs == (MatchRun(tier=DISK, chunk_count=3, token_count=768),)
    layout.check()


def test_evicting_what_is_not_held_changes_nothing() -> None:
    layout = LayoutMap()
    before = admit(layout, "a", KEYS[:1])
    assert evict(layout, "a", KEYS[1:]) == before
    assert evict(layout, "stranger", KEYS) == before
    layout.check()


def test_the_excluded_instance_is_left_out() -> None:
    layout = LayoutMap()
    admit(layout, "a", KEYS[:3])
    admit(layout, "b", KEYS[:2])
    assert tokens(layout, KEYS[:3], excluded="a") == {"b": 512}
    assert tokens(layout, KEYS[:3], excluded="stranger") == {"a": 768, "b": 512}


def test_runs_follow_the_fastest_tier() -> None:
    layout = LayoutMap()
    admit(layout, "a", KEYS[:6], DISK)
    admit(layout, "a", KEYS[1:3], HOST)
    admit(layout, "a", KEYS[2:4], GPU)
    (match,) = lookup(layout, KEYS[:6])
    assert [(run.tier, run.chunk_count) for run in match.runs] == [(DISK, 1), (HOST, 1), (GPU, 2), (DISK, 2)]


def test_a_partial_chunk_counts_its_own_tokens() -> None:
    layout = LayoutMap()
    layout.apply("a", Change(HOST, b"", CHUNK, join_keys(KEYS[:3]), {2: 12}))
    assert tokens(layout, KEYS[:3]) == {"a": 524}
    assert lookup(layout, KEYS[:3])[0].runs == (MatchRun(tier=HOST, chunk_count=3, token_count=524),)
    assert tokens(layout, KEYS[:2]) == {"a": 512}


def test_the_revision_rises_with_each_change_and_only_then() -> None:
    layout = LayoutMap(revision=100)
    assert admit(layout, "a", KEYS[:2]) == 101
    assert admit(layout, "a", KEYS[:2]) == 101
    assert evict(layout, "a", KEYS[:1]) == 102
    layout.drop_instance("stranger")
    assert layout.revision == 102
    layout.drop_instance("a")
    assert layout.revision == 103


def test_a_snapshot_is_invisible_until_it_replaces_everything_at_once() -> None:
    layout = LayoutMap()
    admit(layout, "a", KEYS[:4])
    staged = layout.stage("a")
    layout.apply(staged, Change(HOST, b"", CHUNK, join_keys(KEYS[:1])))
    layout.apply(staged, Change(HOST, b"", CHUNK, join_keys(KEYS[1:2])))
    assert tokens(layout, KEYS) == {"a": 1024}
    layout.install(staged)
    assert tokens(layout, KEYS) == {"a": 512}
    assert layout.digest("a", HOST) == digest(KEYS[:2])
    layout.check()


def test_an_abandoned_snapshot_leaves_nothing() -> None:
    layout = LayoutMap()
    staged = layout.stage("a")
    layout.apply(staged, Change(HOST, b"", CHUNK, join_keys(KEYS)))
    layout.discard(staged)
    layout.discard(staged)
    assert lookup(layout, KEYS) == []
    while layout.sweep(5):
        layout.check()
    assert len(layout) == 0
    layout.check()


def test_a_dropped_instance_is_gone_before_it_is_swept() -> None:
    layout = LayoutMap()
    admit(layout, "a", KEYS)
    admit(layout, "b", KEYS[:3])
    layout.drop_instance("a")
    assert tokens(layout, KEYS) == {"b": 768}
    while layout.sweep(4):
        layout.check()
    assert len(layout) == 3
    assert layout.digest("a", HOST) == EMPTY_DIGEST


def test_swept_slots_are_used_again() -> None:
    layout = LayoutMap()
    for round_ in range(50):
        admit(layout, f"instance-{round_}", KEYS)
        layout.drop_instance(f"instance-{round_}")
        while layout.sweep(100):
            pass
    assert layout.stage("next").slot == 0
    layout.check()


def test_chunks_are_counted_per_spec() -> None:
    layout = LayoutMap()
    layout.apply("a", Change(HOST, b"one", CHUNK, join_keys(KEYS[:3])))
    layout.apply("a", Change(HOST, b"two", CHUNK, join_keys(KEYS[3:5])))
    layout.apply("a", Change(HOST, b"one", CHUNK, b"", {}, join_keys(KEYS[:1])))
    assert layout.chunk_counts("a") == {(HOST, b"one"): 2, (HOST, b"two"): 2}
    assert layout.digest("a", HOST) == digest(KEYS[1:5])


def test_one_instance_is_asked_for_its_prefix_in_one_tier_or_in_any() -> None:
    layout = LayoutMap()
    layout.apply("a", Change(HOST, b"", CHUNK, join_keys(KEYS[:3]), {2: 12}))
    layout.apply("a", Change(DISK, b"", CHUNK, join_keys(KEYS[1:5])))
    asked = join_keys(KEYS[:6])
    assert layout.match_at("a", HOST, asked) == (3, 524)
    assert layout.match_at("a", DISK, asked) == (0, 0)
    assert layout.match_at("a", 0, asked) == (5, 4 * CHUNK + 12)
    assert layout.match_at("stranger", 0, asked) == (0, 0)
    assert layout.held_mask("a", HOST, asked).tolist() == [True] * 3 + [False] * 3
    assert layout.held_mask("a", DISK, asked).tolist() == [False] + [True] * 4 + [False]
    assert layout.held_mask("a", 0, asked).tolist() == [True] * 5 + [False]
    assert layout.held_mask("stranger", 0, asked).tolist() == [False] * 6
    layout.drop_instance("a")
    assert layout.match_at("a", 0, asked) == (0, 0)


def test_a_held_key_determines_its_spec() -> None:
    layout = LayoutMap()
    layout.apply("a", Change(HOST, b"one", CHUNK, join_keys(KEYS[:1])))
    layout.apply("a", Change(HOST, b"two", CHUNK, join_keys(KEYS[1:2])))
    assert [layout.fingerprint_of(key) for key in KEYS[:3]] == [b"one", b"two", None]
    layout.drop_instance("a")
    assert layout.fingerprint_of(KEYS[0]) is None
    layout.apply("b", Change(HOST, b"three", 16, join_keys(KEYS[:1])))
    assert layout.fingerprint_of(KEYS[0]) == b"three"
    assert tokens(layout, KEYS) == {"b": 16}


class Mirror:
    """A listener that keeps what it hears, and so must have what the layout map has."""

    def __init__(self) -> None:
        self.revision = 0
        self.held: dict[str, dict[tuple[int, bytes], set[ChunkKey]]] = {}

    def changed(
        self, revision: int, instance_id: str, tier: int, fingerprint: bytes, gained: bytes, lost: bytes
    ) -> None:
        self._rises(revision)
        assert gained or lost
        held = self.held.setdefault(instance_id, {}).setdefault((tier, fingerprint), set())
        assert held.isdisjoint(split_keys(gained))
        held |= set(split_keys(gained))
        assert held.issuperset(split_keys(lost))
        held -= set(split_keys(lost))

    def replaced(self, revision: int, instance_id: str, content: Sequence[tuple[int, bytes, bytes]]) -> None:
        self._rises(revision)
        self.held[instance_id] = {}
        for tier, fingerprint, keys in content:  # as many parts as the snapshot had frames
            held = self.held[instance_id].setdefault((tier, fingerprint), set())
            assert held.isdisjoint(split_keys(keys))
            held |= set(split_keys(keys))

    def gone(self, revision: int, instance_id: str) -> None:
        self._rises(revision)
        del self.held[instance_id]

    def _rises(self, revision: int) -> None:
        assert revision > self.revision
        self.revision = revision


def test_a_listener_hears_what_really_changed() -> None:
    layout = LayoutMap()
    layout.listener = mirror = Mirror()
    admit(layout, "a", KEYS[:3])
    admit(layout, "a", KEYS[1:4])
    evict(layout, "a", KEYS[2:])
    assert mirror.held == {"a": {(HOST, b""): set(KEYS[:2])}}
    staged = layout.stage("a")
    layout.apply(staged, Change(HOST, b"one", CHUNK, join_keys(KEYS[:5]), {}, join_keys(KEYS[:1])))
    layout.apply(staged, Change(DISK, b"one", CHUNK, join_keys(KEYS[:1])))
    assert mirror.held == {"a": {(HOST, b""): set(KEYS[:2])}}
    assert layout.install(staged) == mirror.revision
    assert mirror.held == {"a": {(HOST, b"one"): set(KEYS[1:5]), (DISK, b"one"): set(KEYS[:1])}}
    layout.drop_instance("a")
    assert mirror.held == {}


def test_a_digest_is_the_sum_of_the_first_eight_bytes() -> None:
    keys = [ChunkKey(b"\xff" * 16), ChunkKey(b"\x02" + b"\0" * 15)]
    assert digest(keys) == Digest(chunk_count=2, key_sum=1)
    assert digest(keys[::-1]) == digest(keys)
    assert digest([]) == EMPTY_DIGEST


def partials(keys: list[ChunkKey]) -> dict[int, int]:
    """Every third key is a partial chunk's: its tokens depend on the key alone, as in life."""
    return {i: 1 + KEYS.index(key) for i, key in enumerate(keys) if KEYS.index(key) % 3 == 2}


Contents = dict[int, set[ChunkKey]]


class AgainstModel(RuleBasedStateMachine):
    """Any sequence of reports, snapshots, departures and sweeps, against plain sets."""

    snapshots = Bundle("snapshots")

    instance_ids = st.sampled_from(["a", "b", "c"])
    tiers = st.integers(1, 4)
    key_lists = st.lists(st.sampled_from(KEYS), max_size=8)

    def __init__(self) -> None:
        super().__init__()
        self.layout = LayoutMap()
        self.layout.listener = self.mirror = Mirror()
        self.model: dict[str, Contents] = {}
        self.revision = 0

    @rule(instance_id=instance_ids, tier=tiers, admitted=key_lists, evicted=key_lists)
    def report(self, instance_id: str, tier: int, admitted: list[ChunkKey], evicted: list[ChunkKey]) -> None:
        self.layout.apply(
            instance_id, Change(tier, b"", CHUNK, join_keys(admitted), partials(admitted), join_keys(evicted))
        )
        held = self.model.setdefault(instance_id, {}).setdefault(tier, set())
        held |= set(admitted)
        held -= set(evicted)

    @rule(instance_id=instance_ids, target=snapshots)
    def open_snapshot(self, instance_id: str) -> tuple[Snapshot, str, Contents]:
        return self.layout.stage(instance_id), instance_id, {}

    @rule(snapshot=snapshots, tier=tiers, admitted=key_lists, evicted=key_lists)
    def add(
        self, snapshot: tuple[Snapshot, str, Contents], tier: int, admitted: list[ChunkKey], evicted: list[ChunkKey]
    ) -> None:
        slot, _, contents = snapshot
        self.layout.apply(slot, Change(tier, b"", CHUNK, join_keys(admitted), partials(admitted), join_keys(evicted)))
        held = contents.setdefault(tier, set())
        held |= set(admitted)
        held -= set(evicted)

    @rule(snapshot=consumes(snapshots))
    def install(self, snapshot: tuple[Snapshot, str, Contents]) -> None:
        slot, instance_id, contents = snapshot
        self.layout.install(slot)
        self.model[instance_id] = contents

    @rule(snapshot=consumes(snapshots))
    def abandon(self, snapshot: tuple[Snapshot, str, Contents]) -> None:
        self.layout.discard(snapshot[0])

    @rule(instance_id=instance_ids)
    def drop(self, instance_id: str) -> None:
        self.layout.drop_instance(instance_id)
        self.model.pop(instance_id, None)

    @rule(limit=st.integers(1, 6))
    def sweep(self, limit: int) -> None:
        self.layout.sweep(limit)

    @rule(keys=key_lists, excluded=st.sampled_from(["", "a", "d"]))
    def lookup(self, keys: list[ChunkKey], excluded: str) -> None:
        assert lookup(self.layout, keys, excluded) == self.expected(keys, excluded)

    @invariant()
    def holds(self) -> None:
        self.layout.check()
        assert lookup(self.layout, KEYS) == self.expected(KEYS, "")
        for instance_id in ("a", "b", "c"):
            for tier in range(1, 5):
                held = self.model.get(instance_id, {}).get(tier, set())
                assert self.layout.digest(instance_id, tier) == digest(sorted(held))
                assert self.mirror.held.get(instance_id, {}).get((tier, b""), set()) == held
        assert self.layout.revision >= self.revision
        self.revision = self.layout.revision

    @rule(limit=st.integers(1, 8))
    def walk(self, limit: int) -> None:
        found: list[tuple[str, int, ChunkKey]] = []
        cursor = 0
        while True:
            cursor, parts = self.layout.scan(cursor, limit)
            found += [(instance_id, tier, key) for instance_id, tier, _, keys in parts for key in split_keys(keys)]
            if not cursor:
                break
        assert sorted(found) == sorted(
            (instance_id, tier, key)
            for instance_id, contents in self.model.items()
            for tier, held in contents.items()
            for key in held
        )

    def expected(self, keys: list[ChunkKey], excluded: str) -> list[Match]:
        matches = []
        for instance_id, contents in self.model.items():
            runs: list[MatchRun] = []
            for key in keys:
                tier = next((tier for tier in range(1, 5) if key in contents.get(tier, ())), None)
                if tier is None:
                    break
                count = partials([key]).get(0, CHUNK)
                if runs and runs[-1].tier == tier:
                    last = runs.pop()
                    runs.append(
                        MatchRun(tier=tier, chunk_count=last.chunk_count + 1, token_count=last.token_count + count)
                    )
                else:
                    runs.append(MatchRun(tier=tier, chunk_count=1, token_count=count))
            if runs and instance_id != excluded:
                matches.append(
                    Match(
                        instance_id=instance_id,
                        chunk_count=sum(run.chunk_count for run in runs),
                        token_count=sum(run.token_count for run in runs),
                        runs=tuple(runs),
                    )
                )
        return sorted(matches, key=lambda match: (-match.chunk_count, match.instance_id))


AgainstModel.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestAgainstModel = AgainstModel.TestCase


class Heard:
    """A listener that keeps what each instance holds, by tier."""

    def __init__(self) -> None:
        self.held: dict[str, dict[int, list[ChunkKey]]] = {}

    def changed(
        self, revision: int, instance_id: str, tier: int, fingerprint: bytes, gained: bytes, lost: bytes
    ) -> None: ...

    def replaced(self, revision: int, instance_id: str, content: Sequence[tuple[int, bytes, bytes]]) -> None:
        held: dict[int, list[ChunkKey]] = {}
        for tier, _, keys in content:
            held.setdefault(tier, []).extend(split_keys(keys))
        self.held[instance_id] = held

    def gone(self, revision: int, instance_id: str) -> None: ...


def test_a_loss_while_a_snapshot_is_staged_is_a_loss_in_that_tier_only() -> None:
    layout, heard = LayoutMap(), Heard()
    layout.listener = heard
    staged = layout.stage("a")
    for tier in (HOST, DISK):
        layout.apply(staged, Change(tier, b"", CHUNK, join_keys(KEYS[:3])))
    layout.apply(staged, Change(HOST, b"", CHUNK, b"", {}, join_keys(KEYS[1:2])))
    layout.install(staged)
    assert heard.held == {"a": {HOST: [KEYS[0], KEYS[2]], DISK: KEYS[:3]}}
    (match,) = lookup(layout, KEYS[:3])
    assert [(run.tier, run.chunk_count) for run in match.runs] == [(HOST, 1), (DISK, 1), (HOST, 1)]
