"""What waits to be published: in order for each shard, in batches, and never more than there is room for."""

from __future__ import annotations

from lmkv_server.coordinator.core.layout_map import Change
from lmkv_server.coordinator.layout_store.publication import MAX_BATCH_ENTRIES, Backlog, PendingEntry
from lmkv_server.coordinator.layout_store.records import ChunkOwner, EntryKind, LogEntry
from tests.server.coordinator.layout_store.parts import names_in_shard


def note(instance_id: str, term: int, key_count: int = 1) -> PendingEntry:
    change = Change(2, b"", 16, bytes(16 * key_count), {}, b"")
    return PendingEntry(entry=LogEntry(EntryKind.CHANGES, "", instance_id, 1, term, [change]))


def test_notes_of_a_shard_come_out_in_order_a_batch_at_a_time() -> None:
    backlog = Backlog()
    (one,), (other,) = names_in_shard(1, 1), names_in_shard(2, 1)
    assert ChunkOwner("", one).shard != ChunkOwner("", other).shard
    for term in range(MAX_BATCH_ENTRIES + 1):
        backlog.put(note(one, term))
    backlog.put(note(other, 7))
    first, second = backlog.take(), backlog.take()
    assert [each.entry.term for each in first[1] + second[1]] == list(range(MAX_BATCH_ENTRIES + 1))
    assert [each.entry.term for each in first[2]] == [7]
    assert list(second) == [1]
    assert backlog.take() == {}
    assert backlog.size_bytes == 0


def test_one_note_too_many_empties_it_for_good() -> None:
    backlog = Backlog(limit_bytes=10_000)
    assert backlog.is_below_half
    backlog.put(note("a", 1, key_count=400))
    assert not backlog.is_below_half
    assert not backlog.has_overflowed
    backlog.put(note("a", 2, key_count=400))
    backlog.put(note("a", 3))
    assert backlog.has_overflowed
    assert backlog.take() == {}
