"""PendingOrders to instances, from being given until their outcome is known. One event loop owns them.

    given ──outcome──► over
      ├──deadline────► Unreachable
      └──instance gone► InstanceNotFound

An order waits while its instance has no stream, and is told again over each new one: instances ignore repeats.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lmkv import telemetry
from lmkv.errors import Full, InstanceNotFound, Unreachable
from lmkv.telemetry import SpanKind
from lmkv.v1 import registry_service_pb2 as pb

MAX_PENDING = 1024
"""PendingOrders that one instance may have before it."""
MAX_PENDING_BYTES = 32 << 20
"""Size of these."""
NODE_SHARE = 0.9
"""Of the time for an order, what the instance may use."""
CANCEL_SECONDS = 5.0
"""How long the outcome of an order that was cancelled is waited for."""

Tell = Callable[[pb.Order], None]
"""Sends an order over the instance's stream."""


@dataclass(kw_only=True, slots=True)
class _Pending:
    order: pb.Order
    size_bytes: int
    outcome: asyncio.Future[pb.OrderOutcome]


@dataclass(kw_only=True, slots=True)
class _OrderQueue:
    """What one instance has before it, and how to tell it, while it has a stream."""

    pending: dict[str, _Pending] = field(default_factory=dict)
    size_bytes: int = 0
    """Of the pending orders."""
    tell: Tell | None = None


class PendingOrders:
    """All orders that are not over."""

    def __init__(self) -> None:
        self._lines: dict[str, _OrderQueue] = {}

    def __len__(self) -> int:
        return sum(len(line.pending) for line in self._lines.values())

    # --- Who gives orders ----------------------------------------------------------------------------------------

    async def carry_out(
        self, instance_id: str, order: pb.Order, timeout_seconds: float, cancelled: asyncio.Event | None = None
    ) -> pb.OrderOutcome:
        """Gives an order, under its own id if it has one, and returns its outcome, whatever that says.

        Once `cancelled` is set the instance is told to stop, and says how far it came. Raises `Full`,
        `InstanceNotFound` if the instance leaves, `Unreachable` if there is no outcome in time.
        """
        action = order.WhichOneof("action") or ""
        if action == "record":  # is about the work, and no part of it: traces leave it out
            return await self._carried_out(instance_id, order, timeout_seconds, cancelled)
        with telemetry.begin("lmkv.order", kind=SpanKind.CLIENT, instance_id=instance_id, action=action) as span:
            order.traceparent = span.traceparent
            return await self._carried_out(instance_id, order, timeout_seconds, cancelled)

    async def _carried_out(
        self, instance_id: str, order: pb.Order, timeout_seconds: float, cancelled: asyncio.Event | None
    ) -> pb.OrderOutcome:
        pending = self._give(instance_id, order, timeout_seconds)
        try:
            if cancelled and await _comes_first(cancelled, pending.outcome, timeout_seconds):
                stop = pb.Order(cancel=pb.CancelOrder(order_id=order.order_id))
                self._forget(instance_id, self._give(instance_id, stop, CANCEL_SECONDS))  # told, but not waited for
                timeout_seconds = CANCEL_SECONDS
            async with asyncio.timeout(timeout_seconds):
                return await pending.outcome
        except TimeoutError:
            raise Unreachable(
                f"instance {instance_id!r} did not say within {timeout_seconds:.3g} s how its order went",
                instance_id=instance_id,
            ) from None
        finally:
            self._forget(instance_id, pending)

    # --- Whose stream it is --------------------------------------------------------------------------------------

    def connect(self, instance_id: str, tell: Tell) -> None:
        """The instance has a stream: tells it what it has before it, and whatever comes."""
        line = self._lines.setdefault(instance_id, _OrderQueue())
        line.tell = tell
        for pending in line.pending.values():
            tell(pending.order)

    def disconnect(self, instance_id: str, tell: Tell) -> None:
        """The stream broke; nothing if another one has taken its place."""
        line = self._lines.get(instance_id)
        if line and line.tell is tell:
            line.tell = None
            self._tidy(instance_id)

    def end(self, instance_id: str, outcome: pb.OrderOutcome) -> None:
        """The instance says how an order went. Outcomes that nobody waits for, as of a repeat, are no error."""
        line = self._lines.get(instance_id)
        pending = line.pending.get(outcome.order_id) if line else None
        if pending and not pending.outcome.done():
            pending.outcome.set_result(outcome)

    def drop_instance(self, instance_id: str) -> None:
        """The instance left, and will not say how its orders went."""
        line = self._lines.pop(instance_id, _OrderQueue())
        for pending in line.pending.values():
            if not pending.outcome.done():
                error = InstanceNotFound(f"instance {instance_id!r} left the fleet", instance_id=instance_id)
                pending.outcome.set_exception(error)

    # --- Inside --------------------------------------------------------------------------------------------------

    def _give(self, instance_id: str, order: pb.Order, timeout_seconds: float) -> _Pending:
        line = self._lines.setdefault(instance_id, _OrderQueue())
        if len(line.pending) >= MAX_PENDING:
            raise Full(f"instance {instance_id!r} has {MAX_PENDING} orders before it", retry_seconds=1)
        if line.size_bytes + order.ByteSize() > MAX_PENDING_BYTES and line.pending:
            raise Full(f"instance {instance_id!r} has orders of {line.size_bytes} bytes before it", retry_seconds=1)
        order.order_id = order.order_id or secrets.token_hex(8)
        # A little early, so that what was achieved by then is told in time.
        order.expire_time.FromNanoseconds(time.time_ns() + round(NODE_SHARE * timeout_seconds * 1e9))
        pending = _Pending(order=order, size_bytes=order.ByteSize(), outcome=asyncio.get_running_loop().create_future())
        if replaced := line.pending.get(order.order_id):
            line.size_bytes -= replaced.size_bytes
        line.pending[order.order_id] = pending
        line.size_bytes += pending.size_bytes
        if line.tell:
            line.tell(order)
        return pending

    def _forget(self, instance_id: str, pending: _Pending) -> None:
        if not pending.outcome.done():
            pending.outcome.cancel()
        if line := self._lines.get(instance_id):
            if line.pending.get(pending.order.order_id) is pending:
                del line.pending[pending.order.order_id]
                line.size_bytes -= pending.size_bytes
            self._tidy(instance_id)

    def _tidy(self, instance_id: str) -> None:
        line = self._lines[instance_id]
        if not line.tell and not line.pending:
            del self._lines[instance_id]


async def _comes_first(event: asyncio.Event, outcome: asyncio.Future[pb.OrderOutcome], timeout_seconds: float) -> bool:
    """Waits for either, or for the time to be up; whether the event is set and there is no outcome."""
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((waiting, outcome), timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    return event.is_set() and not outcome.done()
