"""Which records a node keeps, what it reports to which coordinator, and which one it asks to continue an operation."""

from __future__ import annotations

import pytest
from google.longrunning.operations_pb2 import Operation

from lmkv.errors import OperationTakenOver
from lmkv.v1.cache_service_pb2 import MoveRequest
from lmkv.v1.registry_service_pb2 import OperationRecord
from lmkv_server.node.commands import operation_log as record_book
from lmkv_server.node.commands.operation_log import KEPT_SECONDS, OperationLog


def record(
    name: str = "move-1", attempt: int = 1, *, done: bool = False, expire: int = 0, by: str = ""
) -> OperationRecord:
    made = OperationRecord(
        operation=Operation(name=name, done=done), move=MoveRequest(copy=True), attempt=attempt, coordinator_id=by
    )
    made.expire_time.FromNanoseconds(expire)
    return made


def proposed(attempt: int, by: str) -> OperationRecord:
    """A record with an end that the attempt proposes."""
    made = record(attempt=attempt, by=by)
    made.proposed_end.attempt, made.proposed_end.coordinator_id = attempt, by
    made.proposed_end.operation.CopyFrom(Operation(name="move-1", done=True))
    return made


def answer(book: OperationLog, record: OperationRecord, coordinator: str) -> OperationRecord:
    """What the book keeps instead of a record, or adds to it."""
    kept = book.put(record, coordinator)
    assert kept is not None
    return kept


def reported(book: OperationLog, reader: str = "B", since: int = 0) -> list[tuple[str, int, bool, bool]]:
    book.check()
    return [(one.operation.name, one.attempt, one.operation.done, one.orphaned) for one in book.since(since, reader)]


def test_changes_are_reported_once_and_in_order() -> None:
    book = OperationLog()
    book.put(record("one"), "A")
    book.put(record("two"), "A")
    assert reported(book) == [("one", 1, False, False), ("two", 1, False, False)]
    heard = book.revision
    assert reported(book, since=heard) == []
    book.put(record("one", done=True), "A")
    assert reported(book, since=heard) == [("one", 1, True, False)]
    assert reported(book) == [("two", 1, False, False), ("one", 1, True, False)]


def test_what_is_over_counts_and_then_the_later_attempt() -> None:
    book = OperationLog()
    book.put(record(attempt=2), "B")
    book.put(record(attempt=1), "A")
    assert reported(book) == [("move-1", 2, False, False)]
    book.put(record(attempt=1, done=True), "A")
    assert reported(book) == [("move-1", 1, True, False)], "most holders had accepted this end before attempt 2 began"
    book.put(record(attempt=3), "C")
    assert reported(book) == [("move-1", 1, True, False)]


def test_a_holder_refuses_what_is_older_and_answers_with_what_it_keeps() -> None:
    book = OperationLog()
    assert book.put(record(), "A") is None
    assert book.put(record(attempt=2, by="b"), "B") is None
    kept = answer(book, proposed(attempt=1, by="a"), "A")
    assert (kept.attempt, kept.HasField("proposed_end")) == (2, False)
    kept = answer(book, record(attempt=2, by="a"), "A")
    assert kept.coordinator_id == "b", "of two attempts with one number the one with the greater id is later"
    assert book.put(record(attempt=2, by="c"), "C") is None
    assert book.put(record(attempt=2, by="c", done=True), "C") is None
    kept = answer(book, record(attempt=3), "A")
    assert (kept.attempt, kept.operation.done) == (2, True)


def test_an_end_that_was_accepted_is_passed_to_later_attempts_until_another_one_is_accepted() -> None:
    book = OperationLog()
    book.put(record(), "A")
    assert book.put(proposed(attempt=1, by="a"), "A") is None
    assert reported(book) == [("move-1", 1, False, False)], "it may not be the operation's end"
    kept = answer(book, record(attempt=2, by="b"), "B")
    assert (kept.attempt, kept.proposed_end.attempt, kept.proposed_end.coordinator_id) == (2, 1, "a")
    kept = answer(book, record(attempt=3, by="c"), "C")
    assert (kept.attempt, kept.proposed_end.attempt) == (3, 1)
    assert book.put(proposed(attempt=3, by="c"), "C") is None
    kept = answer(book, record(attempt=4, by="d"), "D")
    assert kept.proposed_end.attempt == 3
    book.put(record(attempt=4, by="d", done=True), "D")
    assert not book.since(0, "A")[0].HasField("proposed_end")
    book.check()


def test_an_operation_whose_end_is_only_proposed_is_offered_when_its_coordinator_is_gone() -> None:
    book = OperationLog()
    book.put(proposed(attempt=1, by="a"), "A")
    book.disconnected("A", until=5.0)
    book.reassign(now=5.0, until=8.0, coordinators=["B"])
    assert reported(book, "B") == [("move-1", 1, False, True)]


def test_orders_of_an_attempt_are_current_until_it_is_over_or_a_later_one_is_kept() -> None:
    book = OperationLog()
    book.check_current("", 0)
    book.check_current("move-1", 1)
    book.put(record(), "A")
    book.check_current("move-1", 1)
    book.check_current("move-1", 2)
    book.put(record(attempt=2), "B")
    with pytest.raises(OperationTakenOver, match="attempt 1 at move-1"):
        book.check_current("move-1", 1)
    book.put(record(attempt=2, done=True), "B")
    with pytest.raises(OperationTakenOver):
        book.check_current("move-1", 2)


def test_what_was_cancelled_stays_so() -> None:
    book = OperationLog()
    book.put(record(), "A")
    book.cancel("another")
    heard = book.revision
    book.cancel("move-1")
    assert [one.cancelled for one in book.since(heard, "A")] == [True]
    book.put(record(attempt=2), "B")
    assert [one.cancelled for one in book.since(0, "A")] == [True]
    book.check()


def test_who_is_back_in_time_is_asked_first_and_then_one_after_the_other() -> None:
    book = OperationLog()
    book.put(record(), "B")
    book.put(record("move-2", done=True), "B")
    assert book.next_due() is None
    book.disconnected("A", until=5.0)
    assert book.next_due() is None
    book.disconnected("B", until=5.0)
    assert book.next_due() == 5.0
    assert reported(book, "B")[0] == ("move-1", 1, False, True)
    assert reported(book, "C")[0] == ("move-1", 1, False, False)
    book.reassign(now=4.0, until=7.0, coordinators=["A", "C"])
    assert reported(book, "C")[0][3] is False
    heard = book.revision
    book.reassign(now=5.0, until=8.0, coordinators=["A", "C"])
    assert reported(book, "C", heard) == [("move-1", 1, False, True)]
    assert reported(book, "A", heard) == [("move-1", 1, False, False)]
    book.reassign(now=8.0, until=11.0, coordinators=["A", "C"])
    assert reported(book, "A")[-1][3] is True
    book.reassign(now=11.0, until=14.0, coordinators=[])
    assert book.next_due() == 14.0
    assert reported(book, "A")[-1][3] is True


def test_who_puts_a_record_again_sees_it_through() -> None:
    book = OperationLog()
    book.put(record(), "A")
    book.disconnected("A", until=5.0)
    book.put(record(), "A")
    assert book.next_due() is None
    book.disconnected("A", until=5.0)
    book.put(record(attempt=2), "B")
    assert book.next_due() is None
    book.disconnected("A", until=9.0)
    assert book.next_due() is None
    book.disconnected("B", until=9.0)
    assert book.next_due() == 9.0


def test_what_is_over_expires_and_what_runs_does_not() -> None:
    book = OperationLog()
    book.put(record("running", expire=10), "A")
    book.put(record("over", done=True, expire=10), "A")
    book.expire(9, 100.0)
    book.expire(10, 200.0)
    book.expire(11, 199.0 + KEPT_SECONDS)
    assert len(book) == 2
    book.expire(12, 200.0 + KEPT_SECONDS)
    assert [name for name, *_ in reported(book)] == ["running"]


def test_the_end_from_a_coordinator_whose_clock_was_set_back_is_reported_to_the_others() -> None:
    book = OperationLog()
    book.put(record("move-1"), "A")
    heard = book.revision
    book.put(record("move-1", done=True, expire=10), "A")
    book.expire(3_600_000_000_000, 0.0)  # another order arrives before the next report
    book.put(record("move-2"), "B")
    assert reported(book, since=heard) == [("move-1", 1, True, False), ("move-2", 1, False, False)]


def test_there_is_only_so_much_room_and_what_is_over_gives_way_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_book, "MAX_RECORDS", 3)
    book = OperationLog()
    for name in ("one", "two", "three"):
        book.put(record(name, done=name == "two"), "A")
    book.put(record("four"), "A")
    assert [name for name, *_ in reported(book)] == ["one", "three", "four"]
    book.put(record("five"), "A")
    assert [name for name, *_ in reported(book)] == ["three", "four", "five"]
    monkeypatch.setattr(record_book, "MAX_RECORD_BYTES", 1)
    book.put(record("six"), "A")
    assert [name for name, *_ in reported(book)] == ["six"]
