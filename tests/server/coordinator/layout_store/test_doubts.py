"""What a follower does when what it knows is wrong, or is less than there is."""

from __future__ import annotations

from lmkv.digests import Digest
from lmkv_server.coordinator.core.instances import Instance
from lmkv_server.coordinator.core.layout_map import LayoutMap
from lmkv_server.coordinator.core.registration import Registration
from lmkv_server.coordinator.layout_store.content import OPENING, Change
from lmkv_server.coordinator.layout_store.entry import Entry, EntryKind
from lmkv_server.coordinator.layout_store.follower import Follower

KEY, OTHER = b"a" * 16, b"b" * 16
EPOCH, TERM, TIER = 7, 3, 1


class Parts:
    """A follower that has loaded an instance which held nothing."""

    def __init__(self) -> None:
        self.layout = LayoutMap()
        self.instance = Instance(Registration(instance_id="a", epoch=EPOCH, peer_address="h:1"), 0.0, 1.0)
        self.wanted = 0
        self.follower = Follower(self.layout, self.instance, wants=self._want, unsettles=lambda _: None)
        self.follower.want()
        self.load()

    def _want(self, _: Follower) -> None:
        self.wanted += 1

    def load(self, term: int = TERM) -> None:
        """Loads what it holds: nothing."""
        load = self.follower.begin()
        assert self.follower.found(load, (term, EPOCH))
        self.follower.loaded(load, OPENING)
        self.follower.ended(load, (1, 0))
        self.follower.reach((1, 0))
        assert self.follower.is_settled

    def hear(self, digest: Digest) -> None:
        """A chunk came, and then the digest was this."""
        change = Change(TIER, b"", 16, KEY, {}, b"")
        digests = [(TIER, digest.chunk_count, digest.key_sum)]
        self.follower.hear(Entry(EntryKind.CHANGES, "", "a", EPOCH, TERM, [change], digests))


def test_digests_that_are_right_are_no_news() -> None:
    parts = Parts()
    parts.layout.apply("b", TIER, KEY, chunk_size=16)
    parts.hear(parts.layout.digest("b", TIER))
    assert parts.follower.is_settled
    assert not parts.follower.difference


def test_digests_that_differ_are_told_of_and_the_instance_is_loaded_anew_until_it_has_to_tell_all() -> None:
    parts = Parts()
    parts.layout.apply("b", TIER, KEY + OTHER, chunk_size=16)
    wrong = parts.layout.digest("b", TIER)
    parts.hear(wrong)
    assert parts.follower.difference == ("instance a holds 2 chunks in tier 1, the layout map has 1 or other ones")
    assert (parts.wanted, parts.follower.is_hopeless, parts.instance.synced) == (2, False, False)
    parts.load()
    parts.hear(wrong)
    assert (parts.wanted, parts.follower.is_hopeless, parts.instance.synced) == (3, True, False)


def test_who_missed_something_and_finds_nothing_to_load_is_behind_until_there_is_something() -> None:
    parts = Parts()
    parts.follower.want()  # entries of the log are gone
    assert not parts.follower.found(parts.follower.begin(), None)
    assert not parts.follower.is_settled
    parts.follower.hear(Entry(EntryKind.COMPLETE, "", "a", EPOCH, TERM + 1))
    assert parts.wanted == 3
    parts.load(TERM + 1)
