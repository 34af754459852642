"""Orders to instances, until their outcome is known, and the positions that they name. One event loop owns them.

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
from typing import NamedTuple

from lmkv import telemetry
from lmkv.errors import BadSelection, Full, InstanceNotFound, TierUnsupported, Unreachable
from lmkv.internal.v1 import report_service_pb2 as pb
from lmkv.telemetry import SpanKind
from lmkv.tiers import HOST, INSTANCE_TIERS, LAYOUT_TIERS
from lmkv.v1 import chunk_pb2
from lmkv_server.coordinator.core.instances import Instance, Instances
from lmkv_server.coordinator.core.layout_map import tier_id, tier_number

MAX_PENDING = 1024
"""Pending orders of one instance."""
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
        """The instance opened a stream: sends its pending orders, and all later orders."""
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


MAX_SHOWN = 100
"""Characters of a tier's id in an error."""
MAX_LISTED = 32
"""Tiers that an error lists."""


class Position(NamedTuple):
    """A tier of a registered instance, as layout maps are asked for it: by the tier's number."""

    instance_id: str
    tier: int

    @property
    def tier_id(self) -> str:
        """The id of the tier, as messages have it."""
        return tier_id(self.tier)

    def to_proto(self) -> chunk_pb2.Position:
        """The position as a message."""
        return chunk_pb2.Position(instance_id=self.instance_id, tier=self.tier_id)


def resolve_position(instances: Instances, position: chunk_pb2.Position, field: str) -> Position:
    """The position that a request's field names; host memory if it names no tier.

    Raises `InstanceNotFound`, `BadSelection` for a tier that no instance has, `TierUnsupported`.
    """
    instance = instances.named(position.instance_id, field)
    tier = position.tier or HOST
    check_tier(instances, tier, field)
    tiers = _tiers(instance)
    if tier not in tiers:
        raise TierUnsupported(
            f"{field}: instance {position.instance_id!r} has no chunks of its own in {tier[:MAX_SHOWN]!r}; use "
            f"{' or '.join(tiers)}",
            instance_id=position.instance_id,
            tier=tier[:MAX_SHOWN],
        )
    return Position(position.instance_id, tier_number(tier))


def check_tier(instances: Instances, tier: str, field: str) -> None:
    """Raises `BadSelection` for a tier that layout maps do not have, and no registered instance."""
    if tier in LAYOUT_TIERS:
        return
    reported = sorted({usage.tier for instance in instances for usage in instance.tiers} - {*LAYOUT_TIERS})
    if tier not in reported:
        known = ", ".join(one[:MAX_SHOWN] for one in (*LAYOUT_TIERS, *reported)[:MAX_LISTED])
        raise BadSelection(f"{field}: {tier[:MAX_SHOWN]!r} is no tier; known tiers are {known}", tier=tier[:MAX_SHOWN])


def _tiers(instance: Instance) -> list[str]:
    """The tiers that belong to the instance alone, fastest first."""
    reported = {HOST, *(usage.tier for usage in instance.tiers)}
    return [tier for tier in INSTANCE_TIERS if tier in reported]
