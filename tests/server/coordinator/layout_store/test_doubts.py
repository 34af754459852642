"""What a follower does when what it knows is wrong, or is less than there is."""

from __future__ import annotations

from lmkv.keys import Digest
from lmkv_server.coordinator.core.instances import Instance, Instances
from lmkv_server.coordinator.core.layout_map import Change, LayoutMap
from lmkv_server.coordinator.core.models import InstanceInfo
from lmkv_server.coordinator.layout_store.follower import InstanceFollower
from lmkv_server.coordinator.layout_store.records import MARKER, EntryKind, LogEntry

KEY, OTHER = b"a" * 16, b"b" * 16
EPOCH, TERM, TIER = 7, 3, 1


class CountedLoads:
    """Counts the requested loads."""

    def __init__(self) -> None:
        self.count = 0

    def load(self, _follower: InstanceFollower) -> None:
        self.count += 1


class Parts:
    """A follower that has loaded an instance which held nothing."""

    def __init__(self) -> None:
        self.layout = LayoutMap()
        self.instance = Instance(InstanceInfo(instance_id="a", epoch=EPOCH, peer_address="h:1"), 0.0, 1.0)
        self.loads = CountedLoads()
        self.follower = InstanceFollower(Instances(1.0), self.layout, self.instance, loader=self.loads)
        self.follower.request_load()
        self.load()

    def load(self, term: int = TERM) -> None:
        """Loads what it holds: nothing."""
        load = self.follower.begin_load()
        assert self.follower.set_term(load, (term, EPOCH))
        self.follower.add_records(load, MARKER)
        self.follower.finish_scan(load, (1, 0))
        self.follower.advance((1, 0))
        assert self.follower.is_current

    def handle_entry(self, digest: Digest) -> None:
        """A chunk came, and then the digest was this."""
        change = Change(TIER, b"", 16, KEY, {}, b"")
        digests = [(TIER, digest.chunk_count, digest.key_sum)]
        self.follower.handle_entry(LogEntry(EntryKind.CHANGES, "", "a", EPOCH, TERM, [change], digests))


def test_digests_that_are_right_are_no_news() -> None:
    parts = Parts()
    parts.layout.apply("b", Change(TIER, b"", 16, KEY))
    parts.handle_entry(parts.layout.digest("b", TIER))
    assert parts.follower.is_current
    assert not parts.follower.difference


def test_a_wrong_digest_is_described_and_the_instance_is_loaded_again_until_it_has_to_resync() -> None:
    parts = Parts()
    parts.layout.apply("b", Change(TIER, b"", 16, KEY + OTHER))
    wrong = parts.layout.digest("b", TIER)
    parts.handle_entry(wrong)
    assert parts.follower.difference == ("instance a holds 2 chunks in tier 1, the layout map has 1, or other keys")
    assert (parts.loads.count, parts.follower.needs_resync, parts.instance.synced) == (2, False, False)
    parts.load()
    parts.handle_entry(wrong)
    assert (parts.loads.count, parts.follower.needs_resync, parts.instance.synced) == (3, True, False)


def test_who_missed_something_and_finds_nothing_to_load_is_behind_until_there_is_something() -> None:
    parts = Parts()
    parts.follower.request_load()  # entries of the log are gone
    assert not parts.follower.set_term(parts.follower.begin_load(), None)
    assert not parts.follower.is_current
    parts.follower.handle_entry(LogEntry(EntryKind.COMPLETE, "", "a", EPOCH, TERM + 1))
    assert parts.loads.count == 3
    parts.load(TERM + 1)
