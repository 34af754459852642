"""What waits to be published: in order for each shard, in batches, and never more than there is room for."""

from __future__ import annotations

from lmkv_server.coordinator.layout_store.backlog import MAX_BATCH_NOTES, Backlog
from lmkv_server.coordinator.layout_store.content import Change
from lmkv_server.coordinator.layout_store.entry import Entry, EntryKind
from lmkv_server.coordinator.layout_store.owner import Owner
from lmkv_server.coordinator.layout_store.publication import Note
from tests.server.coordinator.layout_store.parts import names_in_shard


def note(instance_id: str, term: int, key_count: int = 1) -> Note:
    change = Change(2, b"", 16, bytes(16 * key_count), {}, b"")
    return Note(entry=Entry(EntryKind.CHANGES, "", instance_id, 1, term, [change]))


def test_notes_of_a_shard_come_out_in_order_a_batch_at_a_time() -> None:
    backlog = Backlog()
    (one,), (other,) = names_in_shard(1, 1), names_in_shard(2, 1)
    assert Owner("", one).shard != Owner("", other).shard
    for term in range(MAX_BATCH_NOTES + 1):
        backlog.put(note(one, term))
    backlog.put(note(other, 7))
    first, second = backlog.take(), backlog.take()
    assert [each.entry.term for each in first[1] + second[1]] == list(range(MAX_BATCH_NOTES + 1))
    assert [each.entry.term for each in first[2]] == [7]
    assert list(second) == [1]
    assert backlog.take() == {}
    assert backlog.size_bytes == 0


def test_one_note_too_many_empties_it_for_good() -> None:
    backlog = Backlog(limit_bytes=10_000)
    assert backlog.is_roomy
    backlog.put(note("a", 1, key_count=400))
    assert not backlog.is_roomy
    assert not backlog.overflown
    backlog.put(note("a", 2, key_count=400))
    backlog.put(note("a", 3))
    assert backlog.overflown
    assert backlog.take() == {}
