"""The memory of orders against a tiny model: each is begun once, and its outcome told until it was heard."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmkv.v1.registry_service_pb2 import OrderOutcome
from lmkv_server.node.order_book import MAX_ENDED, OrderBook

ORDER_IDS = st.sampled_from("abcdef")


class AgainstModel(RuleBasedStateMachine):
    """The model knows three sets."""

    def __init__(self) -> None:
        super().__init__()
        self.book = OrderBook()
        self.under_way: set[str] = set()
        self.ended: list[str] = []
        self.untold: set[str] = set()

    @rule(order_id=ORDER_IDS)
    def begin(self, order_id: str) -> None:
        known = order_id in self.under_way or order_id in self.ended
        assert self.book.begin(order_id) is not known
        if order_id in self.ended:
            self.untold.add(order_id)
        else:
            self.under_way.add(order_id)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        order_id = data.draw(st.sampled_from(sorted(self.under_way)))
        self.book.end(OrderOutcome(order_id=order_id))
        self.under_way.remove(order_id)
        self.ended.append(order_id)
        self.untold.add(order_id)

    @rule(order_ids=st.sets(ORDER_IDS))
    def acknowledge(self, order_ids: set[str]) -> None:
        self.book.acknowledge(order_ids)
        self.untold -= order_ids

    @invariant()
    def agree(self) -> None:
        self.book.check()
        told = [outcome.order_id for outcome in self.book.untold]
        assert told == [order_id for order_id in self.ended if order_id in self.untold]


TestAgainstModel = AgainstModel.TestCase


def ended(book: OrderBook, order_id: str) -> None:
    assert book.begin(order_id)
    book.end(OrderOutcome(order_id=order_id))


def test_only_the_newest_are_known_and_those_that_were_not_heard_stay_longest() -> None:
    book = OrderBook()
    ended(book, "unheard")
    for number in range(2 * MAX_ENDED):
        ended(book, f"{number}")
        book.acknowledge([f"{number}"])
        book.check()
    assert [outcome.order_id for outcome in book.untold] == ["unheard"]
    assert not book.begin(f"{2 * MAX_ENDED - 1}")
    assert book.begin("0")


def test_even_what_was_never_heard_is_forgotten_in_the_end() -> None:
    book = OrderBook()
    for number in range(MAX_ENDED + 3):
        ended(book, f"{number}")
    book.check()
    told = [outcome.order_id for outcome in book.untold]
    assert told == [f"{number}" for number in range(3, MAX_ENDED + 3)]
