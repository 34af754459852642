"""Write credits against a naive count, with a scripted node that grants what it likes."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmkv_client.connector.scheduler.credits import KEPT_WHEN_IDLE, Credits

LIMIT = 12


class CreditsAgainstCounts(RuleBasedStateMachine):
    """Every extent is in exactly one place: free at the node, in hand, or being written."""

    def __init__(self) -> None:
        super().__init__()
        self.credits = Credits(limit=LIMIT)
        self.free = list(range(100, 100 + 2 * LIMIT))
        self.in_hand: set[int] = set()
        self.writing: set[int] = set()
        self.asked_count = 0

    @rule(wanted=st.integers(0, 3 * LIMIT))
    def ask(self, wanted: int) -> None:
        room = LIMIT - len(self.in_hand) - len(self.writing) - self.asked_count
        expected = max(0, min(wanted - len(self.in_hand) - self.asked_count, room))
        assert self.credits.ask(wanted) == expected
        self.asked_count += expected

    @precondition(lambda self: self.asked_count)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.asked_count))
        granted = self.free[: data.draw(st.integers(0, count))]
        self.free = self.free[len(granted) :]
        self.credits.settle(count, granted)
        self.asked_count -= count
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
        self.credits.written()

    @precondition(lambda self: self.writing)
    @rule()
    def put_back(self) -> None:
        offset = self.writing.pop()
        self.in_hand.add(offset)
        self.credits.put_back(offset)

    @rule()
    def surplus(self) -> None:
        given = self.credits.surplus()
        assert len(given) == max(0, len(self.in_hand) - KEPT_WHEN_IDLE)
        assert set(given) <= self.in_hand
        self.in_hand -= set(given)
        self.free += given

    @invariant()
    def adds_up(self) -> None:
        assert len(self.credits) == len(self.in_hand)
        assert self.credits.asked_count == self.asked_count
        assert self.credits.writing_count == len(self.writing)
        assert len(self.in_hand) + len(self.writing) + self.asked_count <= LIMIT
        assert len(self.free) + len(self.in_hand) + len(self.writing) == 2 * LIMIT


TestCreditsAgainstCounts = CreditsAgainstCounts.TestCase
TestCreditsAgainstCounts.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_without_a_node_nothing_is_asked_for_and_nothing_can_be_taken() -> None:
    none = Credits()
    assert none.ask(10) == 0
    assert none.take() is None
    assert none.surplus() == []


def test_asking_twice_does_not_ask_for_the_same_again() -> None:
    few = Credits(limit=10)
    assert few.ask(4) == 4
    assert few.ask(4) == 0
    few.settle(4, [0, 1])
    assert few.ask(4) == 2
