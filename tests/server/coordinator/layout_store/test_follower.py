"""A follower ends in its owner's state, however loads, the log and a direct stream interleave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmkv.keys import ChunkKey, digest, join_keys
from lmkv_server.coordinator.core.instances import Instance, Instances
from lmkv_server.coordinator.core.layout_map import Change, LayoutMap
from lmkv_server.coordinator.core.models import InstanceInfo
from lmkv_server.coordinator.layout_store.follower import InstanceFollower, SnapshotLoad
from lmkv_server.coordinator.layout_store.layout_store import NoSharedStore
from lmkv_server.coordinator.layout_store.records import MARKER, EntryKind, LogEntry, LogPosition

TIER, EPOCH, CHUNK_SIZE = 2, 7, 16
FINGERPRINT = b"f" * 16
KEYS = [ChunkKey(bytes([number]) * 16) for number in range(1, 10)]
BUCKETS = [KEYS[:3], KEYS[3:6], KEYS[6:]]
"""What one step of a walk looks at."""

chunks = st.dictionaries(st.sampled_from(KEYS), st.sampled_from([CHUNK_SIZE, 5]), max_size=4)
some_keys = st.sets(st.sampled_from(KEYS), max_size=4)


def change(admitted: Mapping[ChunkKey, int], evicted: set[ChunkKey]) -> Change:
    partial = {at: tokens for at, tokens in enumerate(admitted.values()) if tokens != CHUNK_SIZE}
    return Change(TIER, FINGERPRINT, CHUNK_SIZE, join_keys(admitted), partial, join_keys(sorted(evicted)))


class Following(RuleBasedStateMachine):
    """A store, a home that publishes there, and a follower whose reader and loader take any steps in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, dict[ChunkKey, int]] = {}
        """The hashes of the store, by term."""
        self.current: int | None = None
        self.log: list[LogEntry] = []
        self.term = 0
        self.is_complete = False
        self.read = 0
        self.load: SnapshotLoad | None = None
        self.scanned = -1
        self.answer: Callable[[], None] | None = None
        """What the store has answered, and has not arrived yet."""
        self.layout = LayoutMap()
        said = InstanceInfo(instance_id="a", epoch=EPOCH, peer_address="host:1")
        self.instance = Instance(said, 0.0, 1.0)
        self.follower = InstanceFollower(Instances(1.0), self.layout, self.instance, NoSharedStore())

    @initialize()
    def begin(self) -> None:
        self.follower.request_load()

    # --- The home ------------------------------------------------------------------------------------------------

    @rule(snapshot=chunks)
    def another_home(self, snapshot: dict[ChunkKey, int]) -> None:
        """A stream with a snapshot begins somewhere."""
        self.term += 1
        self.is_complete = False
        self.held[self.term] = dict(snapshot)

    @precondition(lambda self: self.term and not self.is_complete)
    @rule()
    def snapshot_ends(self) -> None:
        self.is_complete = True
        if self.current is not None:
            self.held.pop(self.current, None)
        self.current = self.term
        self._log(EntryKind.COMPLETE)

    @precondition(lambda self: self.is_complete)
    @rule(admitted=chunks, evicted=some_keys, how=st.sampled_from(["plain", "digests", "long"]))
    def chunks_come_and_go(self, admitted: dict[ChunkKey, int], evicted: set[ChunkKey], how: str) -> None:
        held = self.held[self.term]
        admitted = {key: tokens for key, tokens in admitted.items() if key not in held}  # a key is its tokens
        held.update(admitted)
        for key in evicted:
            held.pop(key, None)
        if how == "long":
            self._log(EntryKind.RELOAD)
            return
        part = digest(list(held))
        digests = [(TIER, part.chunk_count, part.key_sum)] if how == "digests" else []
        self._log(EntryKind.CHANGES, [change(admitted, evicted)], digests)

    @precondition(lambda self: self.is_complete)
    @rule()
    def lease_ends_at_the_home(self) -> None:
        self.is_complete = False
        del self.held[self.term]
        self.current = None
        self._log(EntryKind.GONE)
        self.term += 1  # whatever comes next is a new one
        self.held[self.term] = {}

    def _log(
        self, kind: EntryKind, changes: Sequence[Change] = (), digests: Sequence[tuple[int, int, int]] = ()
    ) -> None:
        self.log.append(LogEntry(kind, "", "a", EPOCH, self.term, list(changes), list(digests)))

    # --- The follower --------------------------------------------------------------------------------------------

    @precondition(lambda self: self.read < len(self.log))
    @rule()
    def reads_on(self) -> None:
        self.read += 1
        self.follower.handle_entry(self.log[self.read - 1])
        self.follower.advance(self._position(self.read))

    @precondition(lambda self: self.read < len(self.log))
    @rule(count=st.integers(1, 5))
    def falls_behind(self, count: int) -> None:
        """Entries are trimmed that it has not read."""
        self.read = min(self.read + count, len(self.log))
        self.follower.request_load()

    @rule()
    def loads_on(self) -> None:
        """A step of a load, or the start of one that is wanted: the store is asked, or its answer comes."""
        load = self.load
        if load is None or not self.follower.is_loading(load):
            self.load, self.scanned = (self.follower.begin_load(), -1) if self.follower.needs_load else (None, -1)
            self.answer = None
        elif self.answer is not None:
            answer, self.answer = self.answer, None
            answer()
        elif self.scanned < 0:
            current = None if self.current is None else (self.current, EPOCH)
            self.answer = lambda: self._found(load, current)
        elif self.scanned < len(BUCKETS):
            records = self._records(load.term, self.scanned)
            self.answer = lambda: self._loaded(load, records)
        elif not self.follower.is_catching_up:
            until = self._position(len(self.log))
            self.answer = lambda: self._ended(load, until)

    def _found(self, load: SnapshotLoad, current: tuple[int, int] | None) -> None:
        if self.follower.set_term(load, current):
            self.scanned = 0

    def _loaded(self, load: SnapshotLoad, records: bytes) -> None:
        self.follower.add_records(load, records)
        self.scanned += 1

    def _ended(self, load: SnapshotLoad, until: LogPosition) -> None:
        self.follower.finish_scan(load, until)
        self.follower.advance(self._position(self.read))

    def _records(self, term: int, bucket: int) -> bytes:
        if term not in self.held:
            return b""
        place = bytes([TIER]) + FINGERPRINT
        held = [(key, tokens) for key, tokens in self.held[term].items() if key in BUCKETS[bucket]]
        records = b"".join(place + key + tokens.to_bytes(4, "little") for key, tokens in held)
        return MARKER + records if bucket == 0 else records

    def _position(self, count: int) -> LogPosition:
        return count, 0

    # --- What holds ----------------------------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        self.layout.check()
        assert not self.follower.difference, "digests that are right never differ"
        assert self.instance.synced == self.follower.is_current

    def teardown(self) -> None:
        for _ in range(100):
            if self.read < len(self.log):
                self.reads_on()
            self.loads_on()
        self.agrees()
        assert self.follower.is_current == (self.current is not None)
        if self.current is not None:
            tokens = {key: self.layout.match_at("a", TIER, key)[1] for key in KEYS}
            assert {key: count for key, count in tokens.items() if count} == self.held[self.current]


# A gap mends whatever went wrong before, and so does a newer term: what happens with few of them is tried by itself.
came_and_went = st.tuples(chunks, some_keys, st.sampled_from(["plain", "digests"]))
Step = str | tuple[dict[ChunkKey, int], set[ChunkKey], str]


def take(following: Following, steps: Sequence[Step]) -> None:
    """Takes those of the steps that can be taken."""
    for step in steps:
        if step == "load":
            following.loads_on()
        elif step == "read":
            if following.read < len(following.log):
                following.reads_on()
        elif step == "home":
            following.another_home(dict.fromkeys(KEYS[:4], CHUNK_SIZE))
            following.snapshot_ends()
        elif following.is_complete and not isinstance(step, str):
            following.chunks_come_and_go(*step)
        following.agrees()
    following.teardown()


@settings(max_examples=300, deadline=None)
@given(chunks, st.lists(st.one_of(st.just("read"), st.just("load"), came_and_went), max_size=25))
def test_what_changes_during_a_load_is_neither_lost_nor_undone(
    snapshot: dict[ChunkKey, int], steps: list[Step]
) -> None:
    following = Following()
    following.begin()
    following.another_home(snapshot)
    following.snapshot_ends()
    take(following, ["load", "load", "load", *steps])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(["load", "load", "read", "home"]), came_and_went), min_size=5, max_size=25))
def test_homes_that_come_during_a_load_are_noticed(steps: list[Step]) -> None:
    following = Following()
    following.begin()
    take(following, steps)


TestFollowing = Following.TestCase
TestFollowing.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_what_another_epoch_of_the_instance_held_is_not_loaded() -> None:
    layout = LayoutMap()
    instance = Instance(InstanceInfo(instance_id="a", epoch=EPOCH, peer_address="host:1"), 0.0, 1.0)
    follower = InstanceFollower(Instances(1.0), layout, instance, NoSharedStore())
    follower.request_load()
    for epoch in (EPOCH - 1, EPOCH + 1):
        load = follower.begin_load()
        assert not follower.set_term(load, (3, epoch))
        assert not follower.is_loading(load)
    load = follower.begin_load()
    assert follower.set_term(load, (3, EPOCH))
    assert follower.is_loading(load)


def following(chunks: Mapping[ChunkKey, int]) -> InstanceFollower:
    """A follower that has loaded a snapshot."""
    instance = Instance(InstanceInfo(instance_id="a", epoch=EPOCH, peer_address="host:1"), 0.0, 1.0)
    follower = InstanceFollower(Instances(1.0), LayoutMap(), instance, NoSharedStore())
    follower.request_load()
    load = follower.begin_load()
    assert follower.set_term(load, (3, EPOCH))
    place = bytes([TIER]) + FINGERPRINT
    records = b"".join(place + key + tokens.to_bytes(4, "little") for key, tokens in chunks.items())
    follower.add_records(load, MARKER + records)
    follower.finish_scan(load, (1, 0))
    follower.advance((1, 0))
    assert follower.is_current
    return follower


def test_an_entry_reports_whether_it_changed_installed_chunks() -> None:
    follower = following(dict.fromkeys(KEYS[:2], CHUNK_SIZE))
    changes = [change(dict.fromkeys(KEYS[2:3], CHUNK_SIZE), set())]
    assert follower.handle_entry(LogEntry(EntryKind.CHANGES, "", "a", EPOCH, 3, changes, []))
    assert not follower.handle_entry(LogEntry(EntryKind.CHANGES, "", "a", EPOCH, 4, changes, []))
    assert not follower.handle_entry(LogEntry(EntryKind.CHANGES, "", "a", EPOCH + 1, 3, changes, []))
    assert not follower.handle_entry(LogEntry(EntryKind.COMPLETE, "", "a", EPOCH, 3, [], []))


def test_a_closed_follower_changes_nothing_and_loads_nothing() -> None:
    follower = following(dict.fromkeys(KEYS[:2], CHUNK_SIZE))
    follower.close()
    changes = [change(dict.fromkeys(KEYS[2:3], CHUNK_SIZE), set())]
    assert not follower.handle_entry(LogEntry(EntryKind.CHANGES, "", "a", EPOCH, 3, changes, []))
    assert follower._layout.match_at("a", TIER, KEYS[2]) == (0, 0)
    follower.request_load()
    assert not follower.needs_load
