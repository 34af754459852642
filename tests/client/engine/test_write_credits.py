"""Write credits against a naive count, with a scripted node that grants what it likes."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmkv_client.engine.write_credits import KEPT_WHEN_IDLE, PartCredits, WriteCredits

LIMIT = 12


class CreditsAgainstCounts(RuleBasedStateMachine):
    """Every extent is in exactly one place: free at the node, in hand, or being written."""

    def __init__(self) -> None:
        super().__init__()
        self.credits = WriteCredits(limit=LIMIT)
        self.free = list(range(100, 100 + 2 * LIMIT))
        self.in_hand: set[int] = set()
        self.writing: set[int] = set()
        self.requested_count = 0

    @rule(wanted=st.integers(0, 3 * LIMIT))
    def ask(self, wanted: int) -> None:
        room = LIMIT - len(self.in_hand) - len(self.writing) - self.requested_count
        expected = max(0, min(wanted - len(self.in_hand) - self.requested_count, room))
        assert self.credits.request(wanted) == expected
        self.requested_count += expected

    @precondition(lambda self: self.requested_count)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.requested_count))
        granted = self.free[: data.draw(st.integers(0, count))]
        self.free = self.free[len(granted) :]
        self.credits.settle(count, granted)
        self.requested_count -= count
        self.in_hand |= set(granted)

    @rule()
    def take(self) -> None:
        offset = self.credits.take()
        if offset is None:
            assert not self.in_hand
            return
        self.in_hand.remove(offset)
        self.writing.add(offset)

    @precondition(lambda self: self.writing)
    @rule()
    def written(self) -> None:
        self.free.append(self.writing.pop())
        self.credits.commit()

    @precondition(lambda self: self.writing)
    @rule()
    def return_unwritten(self) -> None:
        offset = self.writing.pop()
        self.in_hand.add(offset)
        self.credits.return_unwritten(offset)

    @rule()
    def take_surplus(self) -> None:
        given = self.credits.take_surplus()
        assert len(given) == max(0, len(self.in_hand) - KEPT_WHEN_IDLE)
        assert set(given) <= self.in_hand
        self.in_hand -= set(given)
        self.free += given

    @invariant()
    def adds_up(self) -> None:
        assert len(self.credits) == len(self.in_hand)
        assert self.credits.requested_count == self.requested_count
        assert self.credits.writing_count == len(self.writing)
        assert len(self.in_hand) + len(self.writing) + self.requested_count <= LIMIT
        assert len(self.free) + len(self.in_hand) + len(self.writing) == 2 * LIMIT


TestCreditsAgainstCounts = CreditsAgainstCounts.TestCase
TestCreditsAgainstCounts.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_without_a_node_nothing_is_asked_for_and_nothing_can_be_taken() -> None:
    none = WriteCredits()
    assert none.request(10) == 0
    assert none.take() is None
    assert none.take_surplus() == []


def test_asking_twice_does_not_ask_for_the_same_again() -> None:
    few = WriteCredits(limit=10)
    assert few.request(4) == 4
    assert few.request(4) == 0
    few.settle(4, [0, 1])
    assert few.request(4) == 2


def test_the_credits_of_parts_are_requested_and_granted_apart() -> None:
    parts = PartCredits(3, limit=10)
    assert parts.request([4, 20, 0]) == [4, 10, 0]
    parts.settle([4, 10, 0], [(0, 1), (1, 2), (1, 3)])
    assert [len(parts[part]) for part in range(3)] == [1, 2, 0]
    assert parts[2].take() is None
    assert parts[1].take() == 3
    assert parts.request([1, 20, 1]) == [0, 8, 1], "the limit holds for each part, with what is being written"


def test_a_node_that_settles_fewer_or_more_parts_changes_only_those_that_there_are() -> None:
    parts = PartCredits(2, limit=10)
    assert parts.request([2, 2]) == [2, 2]
    parts.settle([2], [(0, 1), (7, 2)])
    assert [len(parts[part]) for part in range(2)] == [1, 0]
    assert parts.request([1, 2]) == [0, 0], "those of the second part are still on their way"
    parts.settle([0, 2, 5], [])
    assert parts.request([1, 2]) == [0, 2]


def test_each_part_keeps_a_few_credits_when_its_engine_is_idle() -> None:
    parts = PartCredits(2, limit=100)
    parts.request([10, 2])
    parts.settle([10, 2], [*((0, offset) for offset in range(10)), (1, 20), (1, 21)])
    assert sorted(parts.take_surplus()) == list(range(KEPT_WHEN_IDLE, 10))
    assert [len(parts[part]) for part in range(2)] == [KEPT_WHEN_IDLE, 2]


@pytest.mark.parametrize(("limit", "kept"), [(1, 1), (15, 1), (16, 2), (32, 4), (1000, KEPT_WHEN_IDLE)])
def test_an_idle_engine_keeps_few_credits_of_a_small_pool(limit: int, kept: int) -> None:
    parts = PartCredits(1, limit=limit)
    parts.settle(parts.request([10]), [(0, offset) for offset in range(10)])
    parts.take_surplus()
    assert len(parts[0]) == kept


def test_where_no_credits_are_kept_an_idle_engine_returns_all_but_those_that_it_will_need() -> None:
    parts = PartCredits(1, limit=40, kept_when_idle=0)
    parts.settle(parts.request([5]), [(0, offset) for offset in range(5)])
    assert parts.take_surplus(2) == [2, 3, 4]
    assert parts.take_surplus() == [0, 1]


def test_credits_for_partial_chunks_are_of_one_length_each() -> None:
    parts = PartCredits(1, limit=40)
    assert all(parts.request_partial(token_count) for token_count in (7, 7, 9))
    parts.settle_partial([7, 7, 9], [(7, 0, 10), (9, 0, 30)])
    assert [parts.partial(token_count).take() for token_count in (7, 7, 8, 9)] == [10, None, None, 30]
    assert parts[0].take() is None


def test_credits_for_partial_chunks_that_nothing_waits_for_are_returned() -> None:
    parts = PartCredits(1, limit=40)
    for token_count in (7, 7, 9):
        parts.request_partial(token_count)
    parts.settle_partial([7, 7, 9], [(7, 0, 10), (7, 0, 11), (9, 0, 30)])
    assert parts.take_unused({7: 1, 5: 3}) == [11, 30]
    assert parts.has_partial
    assert parts.partial(7).take() == 10
    assert not parts.has_partial
    assert parts.take_unused({}) == []


def test_without_a_node_no_credit_for_a_partial_chunk_is_requested() -> None:
    assert not PartCredits(1).request_partial(5)


def test_credits_for_partial_chunks_are_bounded() -> None:
    parts = PartCredits(1, limit=2)
    assert [parts.request_partial(5) for _ in range(3)] == [True, True, False]


def test_credits_of_parts_that_do_not_exist_are_ignored() -> None:
    parts = PartCredits(2, limit=10)
    parts.settle(parts.request([1, 1]), [(-1, 5), (2, 6)])
    assert [len(parts[part]) for part in range(2)] == [0, 0]


def test_granted_credits_for_partial_chunks_leave_room_for_as_many_requests() -> None:
    parts = PartCredits(1, limit=2)
    assert [parts.partial(5).request(9) for _ in range(2)] == [2, 0]
    parts.settle_partial([5, 5], [(5, 0, 100)])
    assert parts.partial(5).requested_count == 0
    assert parts.partial(5).request(9) == 1


def test_an_idle_engine_that_keeps_no_credits_returns_those_of_all_parts() -> None:
    parts = PartCredits(2, limit=10, kept_when_idle=0)
    parts.settle(parts.request([2, 2]), [(0, 1), (0, 2), (1, 3), (1, 4)])
    assert sorted(parts.take_surplus()) == [1, 2, 3, 4]
    parts.settle_partial([], [(5, 0, 7), (5, 0, 8)])
    assert sorted(parts.take_unused({})) == [7, 8]


def test_a_partial_chunk_has_a_credit_for_each_part() -> None:
    parts = PartCredits(2, limit=2)
    assert [parts.request_partial(5) for _ in range(3)] == [True, True, False]
    parts.settle_partial([5, 5], [(5, 0, 100), (5, 1, 200), (5, 2, 300)])
    assert [parts.partial(5, part).take() for part in (0, 1, 1)] == [100, 200, None]
    assert [parts.partial(5, part).requested_count for part in range(2)] == [0, 0]


def test_a_partial_chunk_is_requested_for_all_parts_or_for_none() -> None:
    parts = PartCredits(2, limit=1)
    assert parts.request_partial(5)
    parts.settle_partial([5], [(5, 0, 100), (5, 1, 200)])
    assert parts.partial(5, 0).take() == 100
    parts.partial(5, 0).commit()  # the write of part 1 is not done
    assert parts.partial(5, 1).take() == 200
    assert not parts.request_partial(5)
    assert [parts.partial(5, part).requested_count for part in range(2)] == [0, 0]
