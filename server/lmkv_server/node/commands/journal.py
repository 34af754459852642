"""Remembers the orders of a node, and the outcomes that coordinators have not acknowledged yet. Used by `OrderRunner`.

begin ──► running ──end──► unacknowledged ──acknowledge──► acknowledged ──► forgotten
                                └────────────repeat──────────────┘
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable
from typing import Generic, TypeVar

from lmkv import rpc
from lmkv.internal.v1 import report_service_pb2 as pb
from lmkv.rpc.messages import ACTIONS_BY_NUMBER, OUTCOMES_BY_NUMBER
from lmkv.units import format_bytes, format_duration

logger = logging.getLogger(__name__)

MAX_ENDED = 1024
"""Ended orders that are kept; beyond it the oldest acknowledged one is forgotten first."""

Outcome = TypeVar("Outcome")


class OrderJournal(Generic[Outcome]):
    """Makes orders idempotent: an order begins once, and its outcome is kept for repeats.

    An outcome is due to the coordinators that sent the order, identified by their addresses.
    """

    def __init__(self) -> None:
        self._running: dict[str, set[str]] = {}
        """The coordinators that sent each order, by its id."""
        self._ended: OrderedDict[str, Outcome] = OrderedDict()  # oldest first
        self._unacknowledged: dict[str, set[str]] = {}
        """The coordinators that have not acknowledged the outcome of each ended order, by its id."""

    def begin(self, order_id: str, coordinator: str) -> bool:
        """Whether the order is new, and must be executed. The outcome of an ended order is due again."""
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


def kind_of(order: pb.Order) -> str:
    """The kind of an order: the name of its action's field in the proto."""
    return order.WhichOneof("action") or "unknown"


def log_outcome(order: pb.Order, outcome: pb.OrderOutcome, seconds: float) -> None:
    """Logs the outcome: as a warning if the order or some of its chunks failed, explanations at debug level."""
    text = f"order {order.order_id}: {_described(order, outcome)}: {outcome.chunk_count} chunks"
    if outcome.transferred_bytes:
        text += f", {format_bytes(outcome.transferred_bytes)} transferred"
    text += f" in {format_duration(seconds)}"
    if outcome.status.code:
        text += f"; {rpc.from_status(outcome.status).reason}: {outcome.status.message}"
    for failure in outcome.failures:
        count, reason = len(failure.chunk_keys), rpc.from_status(failure.status).reason
        text += f"; {count} chunks {reason}: {failure.status.message}"
    usual = logging.DEBUG if kind_of(order) == "explain" else logging.INFO
    logger.log(logging.WARNING if outcome.status.code or outcome.failures else usual, "%s", text)


def _described(order: pb.Order, outcome: pb.OrderOutcome) -> str:
    match kind_of(order):
        case "fetch":
            return f"fetch from {order.fetch.instance_id}"
        case "drop":
            return "drop, as a dry run" if order.drop.dry_run else "drop"
        case "pin":
            return f"pin {order.pin.pin_id} for {format_duration(order.pin.ttl.ToNanoseconds() / 1e9)}"
        case "unpin":
            return f"unpin {order.unpin.pin_id}"
        case "cancel":
            return f"cancel order {order.cancel.order_id}"
        case "hint":
            action = ACTIONS_BY_NUMBER.get(order.hint.action, "unknown action")
            ended = OUTCOMES_BY_NUMBER.get(outcome.hint.outcome, "no outcome")
            return f"hint {order.hint.hint_id} to {action}: {ended} {outcome.hint.reason}".rstrip()
        case "leave":
            return f"expect to be stopped for {format_duration(order.leave.ttl.ToNanoseconds() / 1e9)}"
        case kind:
            return kind
