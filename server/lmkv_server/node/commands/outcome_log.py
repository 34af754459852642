"""One log line per order. Used by `OrderRunner`."""

from __future__ import annotations

import logging

from lmkv import rpc
from lmkv.internal.v1 import report_service_pb2 as pb
from lmkv.rpc.messages import ACTIONS_BY_NUMBER, OUTCOMES_BY_NUMBER
from lmkv.units import format_bytes, format_duration

logger = logging.getLogger(__name__)


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
