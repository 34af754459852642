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


def test_a_partial_chunk_takes_the_smallest_credit_that_it_fits_into() -> None:
    parts = PartCredits(1, limit=40)
    assert parts.request_partial(4) == [1, 1, 2, 2, 3, 3]
    parts.settle_partial([1, 1, 2, 2, 3, 3], [(1, 10), (3, 30), (7, 70)])
    assert parts.request([1]) == [1]
    parts.settle([1], [(0, 40)])
    taken = [parts.for_partial(quarters).take() for quarters in (1, 1, 2, 3)]
    assert taken == [10, 30, 40, None], "what no small credit fits takes one for a full chunk"


def test_credits_for_partial_chunks_are_bounded_and_few_stay_with_an_idle_engine() -> None:
    assert PartCredits(1).request_partial(5) == []
    parts = PartCredits(1, limit=8)
    assert parts.request_partial(100) == [1, 1, 2, 2, 3, 3], "a quarter of the limit for each size"
    parts.settle_partial([1, 1, 2, 2, 3, 3], [(1, 1), (1, 2), (2, 3), (2, 4), (3, 5)])
    assert parts.request_partial(100) == [3], "what the node has not granted is requested again"
    assert sorted(parts.take_surplus()) == [2, 4]


@pytest.mark.parametrize(("limit", "count"), [(1, 1), (3, 1), (4, 1), (7, 1), (8, 2), (40, 10)])
def test_partial_chunks_have_a_quarter_of_the_limit_and_at_least_one_credit(limit: int, count: int) -> None:
    assert PartCredits(1, limit=limit).request_partial(1000) == [size for size in (1, 2, 3) for _ in range(count)]


def test_credits_for_partial_chunks_follow_the_number_of_requests() -> None:
    assert PartCredits(1, limit=40).request_partial(0) == []
    assert PartCredits(1, limit=40).request_partial(1) == [1, 2, 3]
    assert PartCredits(1, limit=40).request_partial(3) == [1, 2, 3]
