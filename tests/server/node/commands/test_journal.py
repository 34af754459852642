"""The memory of orders against a tiny model: each is begun once, and its outcome told until it was heard."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmkv.v1.registry_service_pb2 import OrderOutcome
from lmkv_server.node.commands.journal import MAX_ENDED, OrderJournal

ORDER_IDS = st.sampled_from("abcdef")
GIVERS = st.sampled_from("XY")


class AgainstModel(RuleBasedStateMachine):
    """The model knows who gave what is under way, what has ended, and who has yet to hear of it."""

    def __init__(self) -> None:
        super().__init__()
        self.book = OrderJournal()
        self.under_way: dict[str, set[str]] = {}
        self.ended: list[str] = []
        self.untold: set[tuple[str, str]] = set()

    @rule(order_id=ORDER_IDS, giver=GIVERS)
    def begin(self, order_id: str, giver: str) -> None:
        known = order_id in self.under_way or order_id in self.ended
        assert self.book.begin(order_id, giver) is not known
        if order_id in self.ended:
            self.untold.add((order_id, giver))
        else:
            self.under_way.setdefault(order_id, set()).add(giver)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        order_id = data.draw(st.sampled_from(sorted(self.under_way)))
        self.book.end(OrderOutcome(order_id=order_id))
        self.ended.append(order_id)
        self.untold |= {(order_id, giver) for giver in self.under_way.pop(order_id)}

    @rule(order_ids=st.sets(ORDER_IDS), giver=GIVERS)
    def acknowledge(self, order_ids: set[str], giver: str) -> None:
        self.book.acknowledge(giver, order_ids)
        self.untold -= {(order_id, giver) for order_id in order_ids}

    @invariant()
    def agree(self) -> None:
        self.book.check()
        for giver in "XY":
            told = [outcome.order_id for outcome in self.book.untold(giver)]
            assert told == [order_id for order_id in self.ended if (order_id, giver) in self.untold]


TestAgainstModel = AgainstModel.TestCase


def ended(book: OrderJournal, order_id: str) -> None:
    assert book.begin(order_id, "X")
    book.end(OrderOutcome(order_id=order_id))


def test_only_the_newest_are_known_and_those_that_were_not_heard_stay_longest() -> None:
    book = OrderJournal()
    ended(book, "unheard")
    for number in range(2 * MAX_ENDED):
        ended(book, f"{number}")
        book.acknowledge("X", [f"{number}"])
        book.check()
    assert [outcome.order_id for outcome in book.untold("X")] == ["unheard"]
    assert not book.begin(f"{2 * MAX_ENDED - 1}", "X")
    assert book.begin("0", "X")


def test_even_what_was_never_heard_is_forgotten_in_the_end() -> None:
    book = OrderJournal()
    for number in range(MAX_ENDED + 3):
        ended(book, f"{number}")
    book.check()
    told = [outcome.order_id for outcome in book.untold("X")]
    assert told == [f"{number}" for number in range(3, MAX_ENDED + 3)]
