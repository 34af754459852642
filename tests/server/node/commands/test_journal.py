"""The journal of orders against a small model: each begins once, and its outcome is due until acknowledged."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmkv_server.node.commands.journal import MAX_ENDED, OrderJournal

ORDER_IDS = st.sampled_from("abcdef")
COORDINATORS = st.sampled_from("XY")


class AgainstModel(RuleBasedStateMachine):
    """The model knows who sent each running order, what has ended, and who has not acknowledged it."""

    def __init__(self) -> None:
        super().__init__()
        self.journal: OrderJournal[str] = OrderJournal()
        self.running: dict[str, set[str]] = {}
        self.ended: list[str] = []
        self.unacknowledged: set[tuple[str, str]] = set()

    @rule(order_id=ORDER_IDS, coordinator=COORDINATORS)
    def begin(self, order_id: str, coordinator: str) -> None:
        known = order_id in self.running or order_id in self.ended
        assert self.journal.begin(order_id, coordinator) is not known
        if order_id in self.ended:
            self.unacknowledged.add((order_id, coordinator))
        else:
            self.running.setdefault(order_id, set()).add(coordinator)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        order_id = data.draw(st.sampled_from(sorted(self.running)))
        self.journal.end(order_id, order_id)
        self.ended.append(order_id)
        self.unacknowledged |= {(order_id, coordinator) for coordinator in self.running.pop(order_id)}

    @rule(order_ids=st.sets(ORDER_IDS), coordinator=COORDINATORS)
    def acknowledge(self, order_ids: set[str], coordinator: str) -> None:
        self.journal.acknowledge(coordinator, order_ids)
        self.unacknowledged -= {(order_id, coordinator) for order_id in order_ids}

    @invariant()
    def agree(self) -> None:
        self.journal.check()
        for coordinator in "XY":
            due = self.journal.unacknowledged(coordinator)
            assert due == [order_id for order_id in self.ended if (order_id, coordinator) in self.unacknowledged]


TestAgainstModel = AgainstModel.TestCase


def ended(journal: OrderJournal[str], order_id: str) -> None:
    assert journal.begin(order_id, "X")
    journal.end(order_id, order_id)


def test_only_the_newest_are_known_and_unacknowledged_ones_stay_longest() -> None:
    journal: OrderJournal[str] = OrderJournal()
    ended(journal, "unacknowledged")
    for number in range(2 * MAX_ENDED):
        ended(journal, f"{number}")
        journal.acknowledge("X", [f"{number}"])
        journal.check()
    assert journal.unacknowledged("X") == ["unacknowledged"]
    assert not journal.begin(f"{2 * MAX_ENDED - 1}", "X")
    assert journal.begin("0", "X")


def test_even_what_was_never_acknowledged_is_forgotten_in_the_end() -> None:
    journal: OrderJournal[str] = OrderJournal()
    for number in range(MAX_ENDED + 3):
        ended(journal, f"{number}")
    journal.check()
    due = journal.unacknowledged("X")
    assert due == [f"{number}" for number in range(3, MAX_ENDED + 3)]
