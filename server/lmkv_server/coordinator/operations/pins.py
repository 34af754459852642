"""Pins: instances protect chunks from eviction for a time. The instance owns its pins and reports them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import replace

from lmkv import rpc
from lmkv.errors import BadSelection, ChunkNotFound, PinNotFound
from lmkv.internal.v1 import report_service_pb2 as report_pb
from lmkv.keys import KEY_BYTES, split_keys
from lmkv.prompt import HeldKeys, match
from lmkv.v1 import cache_service_pb2 as pb
from lmkv.v1 import chunk_pb2
from lmkv_server.coordinator.core.match import HeldAt, item_keys
from lmkv_server.coordinator.core.models import ReportedPin
from lmkv_server.coordinator.operations.orders import PendingOrders, resolve_position
from lmkv_server.coordinator.registry.registry import Registry
from lmkv_server.coordinator.registry.selection import Selector

MAX_PINS = 1000
"""Pins of one instance."""
DEFAULT_TTL_SECONDS = 300
MAX_TTL_SECONDS = 86_400
"""Longest lifetime that nodes grant; longer requests are shortened to it."""
TIMEOUT_SECONDS = 3.0
"""Timeout for an instance to pin or unpin, which only needs its memory."""
MAX_PINNED_CHUNKS = 32_768
"""Chunks of one pin: half a message of keys."""
_NAMESPACE = uuid.UUID("6c6d6b76-0000-4000-8000-000000000001")


class FleetPins:
    """Sets and ends pins. A pin's id contains its instance, so that it can be ended before the instance reports it."""

    def __init__(self, registry: Registry, selector: Selector, orders: PendingOrders) -> None:
        self._registry = registry
        self._selector = selector
        self._orders = orders

    async def pin(self, request: pb.PinRequest) -> chunk_pb2.PinnedChunks:
        """Sets a pin, or renews it if the `request_id` was used before. Raises the errors of `CacheService.Pin`."""
        position = resolve_position(self._registry.instances, request.position, "position")
        instance_id, tier = position
        selections = await self._selector.required(request.prompt)
        layout = self._registry.layout
        selections = [one.held_at(layout, instance_id, tier) for one in selections]
        chosen = max(selections, key=lambda one: one.match_at(layout, instance_id, tier))
        keys, parted = chosen.keys, chosen.parted
        if parted:
            keys = item_keys(parted, match(parted, HeldAt(layout, parted, (instance_id, tier))))
            if not keys:
                raise ChunkNotFound(
                    f"instance {instance_id!r} does not hold all parts that a hit of this prompt needs",
                    instance_id=instance_id,
                )
        if len(keys) > MAX_PINNED_CHUNKS * KEY_BYTES:
            raise BadSelection(f"{len(keys) // KEY_BYTES} chunks are named; a pin covers at most {MAX_PINNED_CHUNKS}")
        order = report_pb.PinOrder(
            pin_id=_pin_id(instance_id, request.request_id),
            tier=position.tier_id,
            chunk_keys=keys,
        )
        order.ttl.FromNanoseconds(_ttl_nanoseconds(request))
        outcome = await self._orders.execute(instance_id, report_pb.Order(pin=order), TIMEOUT_SECONDS)
        if outcome.status.code:
            raise rpc.from_status(outcome.status)
        pin = ReportedPin(
            pin_id=order.pin_id,
            tier=order.tier,
            chunk_count=outcome.chunk_count,
            token_count=outcome.token_count,
            expire_time_ns=time.time_ns() + order.ttl.ToNanoseconds(),
        )
        # The instance has reported its pins, with the lifetime that it granted, before the outcome.
        if instance := self._registry.instances.find(instance_id):
            pin = instance.pins.get(pin.pin_id, pin)
        if parted:  # the instance counts the tokens of each part
            pinned = split_keys(keys[: outcome.chunk_count * KEY_BYTES])
            pin = replace(pin, token_count=parted.end(match(parted, HeldKeys(parted, set(pinned)))))
        return _to_proto(instance_id, pin)

    async def unpin(self, pin_id: str) -> None:
        """Ends a pin; is idempotent. Raises `PinNotFound`, `Unreachable`, `Full`."""
        instance_id, _, _ = pin_id.rpartition("/")
        instance = self._registry.instances.find(instance_id)
        if instance is None:
            raise PinNotFound(
                f"there is no pin {pin_id!r}: the id of a pin begins with its instance, and {instance_id!r} is not "
                "registered; the pins of an instance end with it",
                pin_id=pin_id,
            )
        order = report_pb.UnpinOrder(pin_id=pin_id)
        outcome = await self._orders.execute(instance_id, report_pb.Order(unpin=order), TIMEOUT_SECONDS)
        if outcome.status.code:
            raise rpc.from_status(outcome.status)

    def in_force(self, instance_id: str = "") -> Iterator[chunk_pb2.PinnedChunks]:
        """The pins of one instance, or of all, ordered by id."""
        now = time.time_ns()
        pins = {
            pin.pin_id: (instance.info.instance_id, pin)
            for instance in self._registry.instances
            if instance_id in ("", instance.info.instance_id)
            for pin in instance.pins.values()
            if pin.expire_time_ns > now
        }
        return (_to_proto(*pins[pin_id]) for pin_id in sorted(pins))


def _to_proto(instance_id: str, pin: ReportedPin) -> chunk_pb2.PinnedChunks:
    position = chunk_pb2.Position(instance_id=instance_id, tier=pin.tier)
    message = chunk_pb2.PinnedChunks(
        pin_id=pin.pin_id, position=position, chunk_count=pin.chunk_count, token_count=pin.token_count
    )
    message.expire_time.FromNanoseconds(pin.expire_time_ns)
    return message


def _pin_id(instance_id: str, request_id: str) -> str:
    unique = uuid.uuid5(_NAMESPACE, request_id) if request_id else uuid.uuid4()
    return f"{instance_id}/{unique.hex[:16]}"


def _ttl_nanoseconds(request: pb.PinRequest) -> int:
    if not request.HasField("ttl"):
        return DEFAULT_TTL_SECONDS * 1_000_000_000
    nanoseconds = request.ttl.ToNanoseconds()
    if nanoseconds <= 0:
        raise BadSelection(f"ttl {request.ttl.ToJsonString()} is not positive; set the lifetime of the pin")
    return min(nanoseconds, MAX_TTL_SECONDS * 1_000_000_000)
