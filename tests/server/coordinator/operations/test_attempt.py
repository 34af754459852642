"""When an attempt may begin, has ended the operation, or is over, by what the holders of its record answer."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from google.longrunning.operations_pb2 import Operation

from lmkv.v1.registry_service_pb2 import OperationRecord, ProposedEnd
from lmkv_server.coordinator.operations.operation import Attempt

HOLDERS = "abcdefg"


def record(attempt: int, *, end: int = 0, done: bool = False) -> OperationRecord:
    made = OperationRecord(operation=Operation(name="clear-1", done=done), attempt=attempt)
    if end:
        made.proposed_end.CopyFrom(ProposedEnd(attempt=end))
    return made


def stored(attempt: Attempt, sent: OperationRecord, holders: Iterable[str]) -> None:
    for holder in holders:
        attempt.answered(holder, sent, None)


@pytest.mark.parametrize(("count", "begin", "end"), [(1, 1, 1), (2, 2, 1), (3, 2, 2)])
def test_a_later_attempt_begins_with_most_holders_and_ends_with_half_of_them(count: int, begin: int, end: int) -> None:
    attempt = Attempt(2, HOLDERS[:count])
    stored(attempt, record(2), HOLDERS[: begin - 1])
    stored(attempt, record(2), ["stranger"])
    assert not attempt.may_begin
    stored(attempt, record(2), HOLDERS[:begin])
    assert attempt.may_begin
    stored(attempt, record(2, end=2), HOLDERS[: end - 1])
    stored(attempt, record(2, end=2), ["stranger"])
    assert not attempt.has_ended
    stored(attempt, record(2, end=2), HOLDERS[:end])
    assert attempt.has_ended


def test_the_first_attempt_begins_at_once_and_without_holders_it_ends_at_once() -> None:
    assert Attempt(1, "abc").may_begin
    assert not Attempt(1, "abc").has_ended
    assert Attempt(1, "").has_ended
    assert Attempt(2, "").may_begin, "a coordinator of an earlier version started it"


def test_of_several_accepted_ends_the_one_of_the_latest_attempt_is_proposed_again() -> None:
    attempt = Attempt(4, "abc")
    for holder, end in (("a", 1), ("b", 3), ("c", 2)):
        attempt.answered(holder, record(4), record(4, end=end))
    assert attempt.accepted_end is not None
    assert attempt.accepted_end.attempt == 3


def test_a_record_of_a_later_attempt_or_an_end_supersedes_it() -> None:
    attempt = Attempt(2, "abc")
    attempt.answered("a", record(2), record(3))
    assert attempt.newer == record(3)
    attempt.answered("b", record(2), record(1, done=True))
    assert attempt.newer == record(1, done=True)
    assert not attempt.may_begin


def test_holders_that_have_restarted_do_not_count_and_too_many_of_them_end_all_hope() -> None:
    attempt = Attempt(2, "abc")
    attempt.is_gone("a")
    stored(attempt, record(2), "ab")
    assert not attempt.may_begin
    assert not attempt.is_hopeless
    attempt.is_gone("c")
    assert attempt.is_hopeless


def test_only_the_one_coordinator_there_is_ends_an_operation_without_its_holders() -> None:
    for is_sole in (True, False):
        attempt = Attempt(2, "abc", is_sole=is_sole)
        stored(attempt, record(2), "a")
        attempt.is_gone("b")
        assert not attempt.may_begin, "it has not asked the third one yet"
        attempt.unanswered("c", record(2))
        assert attempt.may_begin is is_sole
        attempt.unanswered("a", record(2, end=2))
        attempt.unanswered("c", record(2, end=2))
        assert attempt.has_ended is is_sole


def test_a_coordinator_that_another_one_superseded_is_not_the_only_one() -> None:
    attempt = Attempt(1, "ab", is_sole=True)
    attempt.answered("a", record(1, end=1), record(2))
    attempt.unanswered("b", record(1, end=1))
    assert not attempt.has_ended
