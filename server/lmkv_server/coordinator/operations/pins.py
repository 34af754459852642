"""Pins: instances keep chunks from eviction for a while. The instance owns its pins; here is what it told of them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

from lmkv import rpc
from lmkv.errors import BadSelection
from lmkv.v1 import cache_service_pb2 as pb
from lmkv.v1 import chunk_pb2
from lmkv.v1 import registry_service_pb2 as registry_pb
from lmkv_server.coordinator.operations.orders import PendingOrders
from lmkv_server.coordinator.operations.positions import place_of
from lmkv_server.coordinator.registry.registry import Registry
from lmkv_server.coordinator.registry.selection import Selector

MAX_PINS = 1000
"""FleetPins of one instance."""
DEFAULT_TTL_SECONDS = 300
MAX_TTL_SECONDS = 86_400
"""Longest time that nodes grant; a longer wish gets this."""
TIMEOUT_SECONDS = 3.0
"""How long an instance may take to pin or unpin: a matter of its memory alone."""
MAX_PINNED_CHUNKS = 32_768
"""Chunks that one pin may be about: half a message of keys."""
_NAMESPACE = uuid.UUID("6c6d6b76-0000-4000-8000-000000000001")


class FleetPins:
    """Sets and ends pins. A pin's name says whose it is, so that it can be ended before anybody has told of it."""

    def __init__(self, registry: Registry, selector: Selector, orders: PendingOrders) -> None:
        self._registry = registry
        self._selector = selector
        self._orders = orders

    async def pin(self, request: pb.PinRequest) -> chunk_pb2.PinnedChunks:
        """Sets a pin, or sets it anew if the `request_id` was used before. Raises what `CacheService.Pin` answers."""
        instance_id, tier = place_of(self._registry.instances, request.position, "position")
        selections = await self._selector.required(request)
        chosen = max(selections, key=lambda one: self._registry.layout.match_at(instance_id, tier, one.keys)[0])
        if len(chosen) > MAX_PINNED_CHUNKS:
            raise BadSelection(f"{len(chosen)} chunks are named; a pin keeps at most {MAX_PINNED_CHUNKS}")
        order = registry_pb.PinOrder(
            pin_id=_pin_id(instance_id, request.request_id),
            tier=chunk_pb2.Tier.ValueType(tier),
            chunk_keys=chosen.keys,
        )
        order.ttl.FromNanoseconds(_ttl_nanoseconds(request))
        outcome = await self._orders.carry_out(instance_id, registry_pb.Order(pin=order), TIMEOUT_SECONDS)
        if outcome.status.code:
            raise rpc.from_status(outcome.status)
        pin = chunk_pb2.PinnedChunks(
            pin_id=order.pin_id,
            position=chunk_pb2.Position(instance_id=instance_id, tier=order.tier),
            chunk_count=outcome.chunk_count,
            token_count=outcome.token_count,
        )
        pin.expire_time.FromNanoseconds(time.time_ns() + order.ttl.ToNanoseconds())
        # The instance tells of its pins itself, in the same report or a later one, with the time that it granted.
        instance = self._registry.instances.find(instance_id)
        if instance and (pin.pin_id in instance.pins or len(instance.pins) < MAX_PINS):
            pin = instance.pins.setdefault(pin.pin_id, pin)
        return pin

    async def unpin(self, pin_id: str) -> None:
        """Ends a pin; one that is gone, with or without its instance, is no error. Raises `Unreachable`, `Full`."""
        instance_id, slash, _ = pin_id.rpartition("/")
        instance = self._registry.instances.find(instance_id)
        if not slash or instance is None:
            return
        order = registry_pb.UnpinOrder(pin_id=pin_id)
        outcome = await self._orders.carry_out(instance_id, registry_pb.Order(unpin=order), TIMEOUT_SECONDS)
        if outcome.status.code:
            raise rpc.from_status(outcome.status)
        instance.pins.pop(pin_id, None)

    def in_force(self, instance_id: str = "") -> Iterator[chunk_pb2.PinnedChunks]:
        """The pins of one instance, or of all, ordered by id."""
        now = time.time_ns()
        pins = {
            pin.pin_id: pin
            for instance in self._registry.instances
            if instance_id in ("", instance.info.instance_id)
            for pin in instance.pins.values()
            if pin.expire_time.ToNanoseconds() > now
        }
        return (pins[pin_id] for pin_id in sorted(pins))


def _pin_id(instance_id: str, request_id: str) -> str:
    unique = uuid.uuid5(_NAMESPACE, request_id) if request_id else uuid.uuid4()
    return f"{instance_id}/{unique.hex[:16]}"


def _ttl_nanoseconds(request: pb.PinRequest) -> int:
    if not request.HasField("ttl"):
        return DEFAULT_TTL_SECONDS * 1_000_000_000
    nanoseconds = request.ttl.ToNanoseconds()
    if nanoseconds <= 0:
        raise BadSelection(f"ttl {request.ttl.ToJsonString()} is not positive; set how long the chunks shall be kept")
    return min(nanoseconds, MAX_TTL_SECONDS * 1_000_000_000)
