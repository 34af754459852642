"""Which orders a node knows, and which outcomes those who gave them have yet to hear. Pure; used by `Orders`.

begin ──► under way ──end──► untold ──acknowledge──► told ──► forgotten
                                └───────repeat──────────┘
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from lmkv.v1 import registry_service_pb2 as pb

MAX_ENDED = 1024
"""Orders that ended and are still known: the newest, and those whose outcome has been told go first."""


class OrderJournal:
    """Every order is begun once, however often it comes; its outcome is told until it was heard, and on each repeat.

    It is told to who gave the order, and to nobody else: givers are named by the address of their coordinator.
    """

    def __init__(self) -> None:
        self._under_way: dict[str, set[str]] = {}
        """Who gave each."""
        self._ended: OrderedDict[str, pb.OrderOutcome] = OrderedDict()  # oldest first
        self._untold: dict[str, set[str]] = {}
        """Who has yet to hear of each that has ended."""

    def begin(self, order_id: str, giver: str) -> bool:
        """Whether the order is new, and so to be carried out. One that has ended is told of again."""
        if order_id in self._ended:
            self._untold.setdefault(order_id, set()).add(giver)
            return False
        is_new = order_id not in self._under_way
        self._under_way.setdefault(order_id, set()).add(giver)
        return is_new

    def end(self, outcome: pb.OrderOutcome) -> None:
        """An order that was begun is over."""
        self._ended[outcome.order_id] = outcome
        self._untold[outcome.order_id] = self._under_way.pop(outcome.order_id)
        if len(self._ended) > MAX_ENDED:
            self._forget_one()

    def _forget_one(self) -> None:
        oldest = next(iter(self._ended))
        forgotten = next((order_id for order_id in self._ended if order_id not in self._untold), oldest)
        del self._ended[forgotten]
        self._untold.pop(forgotten, None)

    def untold(self, giver: str) -> list[pb.OrderOutcome]:
        """Outcomes of orders that somebody gave and is not known to have heard of, oldest first."""
        if not self._untold:  # as nearly always when there is something else to report
            return []
        return [outcome for order_id, outcome in self._ended.items() if giver in self._untold.get(order_id, ())]

    def acknowledge(self, giver: str, order_ids: Iterable[str]) -> None:
        """Somebody has heard these outcomes."""
        for order_id in order_ids:
            waiting = self._untold.get(order_id, set())
            waiting.discard(giver)
            if not waiting:
                self._untold.pop(order_id, None)

    def check(self) -> None:
        """Asserts that no order is in two states and that the bound is kept."""
        assert not self._under_way.keys() & self._ended.keys()
        assert self._untold.keys() <= self._ended.keys()
        assert all(self._untold.values())
        assert all(self._under_way.values())
        assert len(self._ended) <= MAX_ENDED
        assert all(outcome.order_id == order_id for order_id, outcome in self._ended.items())
