"""Which orders a node knows, and which outcomes coordinators have not acknowledged yet. Pure. Used by `OrderRunner`.

begin ──► running ──end──► unacknowledged ──acknowledge──► acknowledged ──► forgotten
                                └────────────repeat──────────────┘
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Generic, TypeVar

MAX_ENDED = 1024
"""Ended orders that are kept; beyond it the oldest acknowledged one is forgotten first."""

Outcome = TypeVar("Outcome")


class OrderJournal(Generic[Outcome]):
    """Makes orders idempotent: an order begins once, and its outcome is kept for repeats.

    An outcome is due to the coordinators that sent the order, identified by their addresses.
    """

    def __init__(self) -> None:
        self._running: dict[str, set[str]] = {}
        """By order id: the coordinators that sent it."""
        self._ended: OrderedDict[str, Outcome] = OrderedDict()  # oldest first
        self._unacknowledged: dict[str, set[str]] = {}
        """By id of an ended order: the coordinators that have not acknowledged its outcome."""

    def begin(self, order_id: str, coordinator: str) -> bool:
        """Whether the order is new, and must be executed. The outcome of one that has ended is due again."""
        if order_id in self._ended:
            self._unacknowledged.setdefault(order_id, set()).add(coordinator)
            return False
        is_new = order_id not in self._running
        self._running.setdefault(order_id, set()).add(coordinator)
        return is_new

    def end(self, order_id: str, outcome: Outcome) -> None:
        """Ends an order that was begun."""
        self._ended[order_id] = outcome
        self._unacknowledged[order_id] = self._running.pop(order_id)
        if len(self._ended) > MAX_ENDED:
            self._forget_one()

    def _forget_one(self) -> None:
        oldest = next(iter(self._ended))
        forgotten = next((order_id for order_id in self._ended if order_id not in self._unacknowledged), oldest)
        del self._ended[forgotten]
        self._unacknowledged.pop(forgotten, None)

    def unacknowledged(self, coordinator: str) -> list[Outcome]:
        """Outcomes that are due to a coordinator, oldest first."""
        if not self._unacknowledged:  # the usual case when there is something else to report
            return []
        return [
            outcome
            for order_id, outcome in self._ended.items()
            if coordinator in self._unacknowledged.get(order_id, ())
        ]

    def acknowledge(self, coordinator: str, order_ids: Iterable[str]) -> None:
        """A coordinator has received the outcomes of these orders."""
        for order_id in order_ids:
            waiting = self._unacknowledged.get(order_id, set())
            waiting.discard(coordinator)
            if not waiting:
                self._unacknowledged.pop(order_id, None)

    def check(self) -> None:
        """Asserts that no order is in two states and that the bound is kept."""
        assert not self._running.keys() & self._ended.keys()
        assert self._unacknowledged.keys() <= self._ended.keys()
        assert all(self._unacknowledged.values())
        assert all(self._running.values())
        assert len(self._ended) <= MAX_ENDED
