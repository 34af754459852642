"""Which orders a node knows, and which outcomes the coordinator has yet to hear. Pure; used by `Orders`.

begin ──► under way ──end──► untold ──acknowledge──► told ──► forgotten
                                └───────repeat──────────┘
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from lmkv.v1 import registry_service_pb2 as pb

MAX_ENDED = 1024
"""Orders that ended and are still known: the newest, and those whose outcome has been told go first."""


class OrderBook:
    """Every order is begun once, however often it comes; its outcome is told until it was heard, and on each repeat."""

    def __init__(self) -> None:
        self._under_way: set[str] = set()
        self._ended: OrderedDict[str, pb.OrderOutcome] = OrderedDict()  # oldest first
        self._untold: set[str] = set()

    def begin(self, order_id: str) -> bool:
        """Whether the order is new, and so to be carried out. One that has ended is told of again."""
        if order_id in self._ended:
            self._untold.add(order_id)
            return False
        if order_id in self._under_way:
            return False
        self._under_way.add(order_id)
        return True

    def end(self, outcome: pb.OrderOutcome) -> None:
        """An order that was begun is over."""
        self._under_way.remove(outcome.order_id)
        self._ended[outcome.order_id] = outcome
        self._untold.add(outcome.order_id)
        if len(self._ended) > MAX_ENDED:
            self._forget_one()

    def _forget_one(self) -> None:
        oldest = next(iter(self._ended))
        forgotten = next((order_id for order_id in self._ended if order_id not in self._untold), oldest)
        del self._ended[forgotten]
        self._untold.discard(forgotten)

    @property
    def untold(self) -> list[pb.OrderOutcome]:
        """Outcomes that the coordinator is not known to have heard, oldest first."""
        if not self._untold:  # as nearly always when there is something else to report
            return []
        return [outcome for order_id, outcome in self._ended.items() if order_id in self._untold]

    def acknowledge(self, order_ids: Iterable[str]) -> None:
        """The coordinator has heard these outcomes."""
        self._untold.difference_update(order_ids)

    def check(self) -> None:
        """Asserts that no order is in two states and that the bound is kept."""
        assert not self._under_way & self._ended.keys()
        assert self._untold <= self._ended.keys()
        assert len(self._ended) <= MAX_ENDED
        assert all(outcome.order_id == order_id for order_id, outcome in self._ended.items())
