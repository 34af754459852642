"""Write credits against a naive count, with a scripted node that grants what it likes."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmkv_client.connector.scheduler.write_credits import KEPT_WHEN_IDLE, WriteCredits

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
