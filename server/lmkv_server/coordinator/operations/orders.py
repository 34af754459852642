"""Orders to instances, until their outcome is known. One event loop owns them.

    pending ──outcome──► done
      ├──deadline──────► Unreachable
      └──instance gone─► InstanceNotFound

An order waits while its instance has no stream, and is sent again over each new stream: instances ignore repeats.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lmkv import telemetry
from lmkv.errors import Full, InstanceNotFound, Unreachable
from lmkv.internal.v1 import report_service_pb2 as pb
from lmkv.telemetry import SpanKind

MAX_PENDING = 1024
"""PendingPending orders of one instance."""
MAX_PENDING_BYTES = 32 << 20
"""Size of the pending orders of one instance."""
NODE_TIME_FRACTION = 0.9
"""Fraction of an order's timeout that the instance may use."""
CANCEL_SECONDS = 5.0
"""Timeout for the outcome of a cancelled order."""

SendOrder = Callable[[pb.Order], None]
"""Sends an order over the instance's stream."""


@dataclass(kw_only=True, slots=True)
class _Pending:
    order: pb.Order
    size_bytes: int
    outcome: asyncio.Future[pb.OrderOutcome]


@dataclass(kw_only=True, slots=True)
class _OrderQueue:
    """The pending orders of one instance, and how to send to it while it has a stream."""

    pending: dict[str, _Pending] = field(default_factory=dict)
    size_bytes: int = 0
    """Size of the pending orders."""
    send: SendOrder | None = None


class PendingOrders:
    """All pending orders."""

    def __init__(self) -> None:
        self._queues: dict[str, _OrderQueue] = {}

    def __len__(self) -> int:
        return sum(len(queue.pending) for queue in self._queues.values())

    # --- Callers -------------------------------------------------------------------------------------------------

    async def execute(
        self, instance_id: str, order: pb.Order, timeout_seconds: float, cancelled: asyncio.Event | None = None
    ) -> pb.OrderOutcome:
        """Sends an order, under its own id if it has one, and returns its outcome, whether it succeeded or not.

        When `cancelled` is set the instance stops, and the outcome says what it did. Raises `Full`, `InstanceNotFound`
        if the instance leaves, `Unreachable` if there is no outcome in time.
        """
        action = order.WhichOneof("action") or ""
        with telemetry.begin("lmkv.order", kind=SpanKind.CLIENT, instance_id=instance_id, action=action) as span:
            order.traceparent = span.traceparent
            return await self._execute(instance_id, order, timeout_seconds, cancelled)

    async def _execute(
        self, instance_id: str, order: pb.Order, timeout_seconds: float, cancelled: asyncio.Event | None
    ) -> pb.OrderOutcome:
        pending = self._enqueue(instance_id, order, timeout_seconds)
        try:
            if cancelled and await _is_set_first(cancelled, pending.outcome, timeout_seconds):
                stop = pb.Order(cancel=pb.CancelOrder(order_id=order.order_id))
                self._forget(instance_id, self._enqueue(instance_id, stop, CANCEL_SECONDS))  # sent, but not waited for
                timeout_seconds = CANCEL_SECONDS
            async with asyncio.timeout(timeout_seconds):
                return await pending.outcome
        except TimeoutError:
            raise Unreachable(
                f"instance {instance_id!r} did not report the outcome of an order within {timeout_seconds:.3g} s",
                instance_id=instance_id,
            ) from None
        finally:
            self._forget(instance_id, pending)

    # --- Streams -------------------------------------------------------------------------------------------------

    def connect(self, instance_id: str, send: SendOrder) -> None:
        """The instance opened a stream: sends its pending orders, and all later ones."""
        queue = self._queues.setdefault(instance_id, _OrderQueue())
        queue.send = send
        for pending in queue.pending.values():
            send(pending.order)

    def disconnect(self, instance_id: str, send: SendOrder) -> None:
        """The stream ended. Does nothing if another one replaced it."""
        queue = self._queues.get(instance_id)
        if queue and queue.send == send:  # a bound method is another object each time
            queue.send = None
            self._tidy(instance_id)

    def complete(self, instance_id: str, outcome: pb.OrderOutcome) -> None:
        """The instance reported an outcome. Ignores outcomes of orders that are not pending."""
        queue = self._queues.get(instance_id)
        pending = queue.pending.get(outcome.order_id) if queue else None
        if pending and not pending.outcome.done():
            pending.outcome.set_result(outcome)

    def drop_instance(self, instance_id: str) -> None:
        """The instance left: fails its pending orders."""
        queue = self._queues.pop(instance_id, _OrderQueue())
        for pending in queue.pending.values():
            if not pending.outcome.done():
                error = InstanceNotFound(f"instance {instance_id!r} left the fleet", instance_id=instance_id)
                pending.outcome.set_exception(error)

    # --- Inside --------------------------------------------------------------------------------------------------

    def _enqueue(self, instance_id: str, order: pb.Order, timeout_seconds: float) -> _Pending:
        queue = self._queues.setdefault(instance_id, _OrderQueue())
        if len(queue.pending) >= MAX_PENDING:
            raise Full(f"instance {instance_id!r} has {MAX_PENDING} pending orders", retry_seconds=1)
        if queue.size_bytes + order.ByteSize() > MAX_PENDING_BYTES and queue.pending:
            raise Full(f"instance {instance_id!r} has pending orders of {queue.size_bytes} bytes", retry_seconds=1)
        order.order_id = order.order_id or secrets.token_hex(8)
        # Earlier than the timeout, so that the outcome arrives before it.
        order.expire_time.FromNanoseconds(time.time_ns() + round(NODE_TIME_FRACTION * timeout_seconds * 1e9))
        pending = _Pending(order=order, size_bytes=order.ByteSize(), outcome=asyncio.get_running_loop().create_future())
        if replaced := queue.pending.get(order.order_id):
            queue.size_bytes -= replaced.size_bytes
        queue.pending[order.order_id] = pending
        queue.size_bytes += pending.size_bytes
        if queue.send:
            queue.send(order)
        return pending

    def _forget(self, instance_id: str, pending: _Pending) -> None:
        if not pending.outcome.done():
            pending.outcome.cancel()
        if queue := self._queues.get(instance_id):
            if queue.pending.get(pending.order.order_id) is pending:
                del queue.pending[pending.order.order_id]
                queue.size_bytes -= pending.size_bytes
            self._tidy(instance_id)

    def _tidy(self, instance_id: str) -> None:
        queue = self._queues[instance_id]
        if not queue.send and not queue.pending:
            del self._queues[instance_id]


async def _is_set_first(event: asyncio.Event, outcome: asyncio.Future[pb.OrderOutcome], timeout_seconds: float) -> bool:
    """Waits for the event, the outcome or the timeout; returns whether the event is set and there is no outcome."""
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((waiting, outcome), timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    return event.is_set() and not outcome.done()
