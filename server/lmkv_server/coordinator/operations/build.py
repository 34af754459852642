"""Builds what runs the operations of one tenant, and the pins."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import chain

from lmkv.operation_records import MAX_HOLDERS
from lmkv_server.coordinator.core.instances import Instances
from lmkv_server.coordinator.operations.clears import Clears
from lmkv_server.coordinator.operations.drains import Drains
from lmkv_server.coordinator.operations.explanations import Explanations
from lmkv_server.coordinator.operations.hints import FleetHints
from lmkv_server.coordinator.operations.moves import Moves
from lmkv_server.coordinator.operations.operations import Operations
from lmkv_server.coordinator.operations.orders import PendingOrders
from lmkv_server.coordinator.operations.pins import FleetPins
from lmkv_server.coordinator.operations.replicator import OperationReplicator
from lmkv_server.coordinator.registry.registry import Registry
from lmkv_server.coordinator.registry.selection import Selector


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetOperations:
    """The operations of one tenant's fleet."""

    table: Operations
    moves: Moves
    clears: Clears
    drains: Drains
    pins: FleetPins
    explanations: Explanations
    hints: FleetHints
    replicator: OperationReplicator

    async def aclose(self) -> None:
        """Stops the operations that run here."""
        await self.table.aclose()
        await self.replicator.aclose()


def make_operations(
    registry: Registry, selector: Selector, orders: PendingOrders, *, operation_ttl: float
) -> FleetOperations:
    """Ended operations are kept for `operation_ttl` seconds."""

    def is_partial() -> bool:
        return registry.is_partial(time.monotonic())

    def restarted_seconds(instance_id: str, epoch: int, known_since: float) -> float:
        return registry.instances.restarted_seconds(instance_id, epoch, time.monotonic(), known_since)

    def epoch_of(instance_id: str) -> int:
        instance = registry.instances.find(instance_id)
        return instance.info.epoch if instance else 0

    table = Operations(
        operation_ttl,
        is_partial=is_partial,
        restarted_seconds=restarted_seconds,
        report_delay=registry.instances.lease_ttl,
        choose_holders=partial(choose_holders, registry.instances),
        is_sole=partial(is_sole, registry.instances),
    )
    moves = Moves(registry, selector, orders, table)
    clears = Clears(registry, selector, orders, table)
    drains = Drains(registry, orders, table)
    resume = {"move": moves.resume, "copy": moves.resume, "clear": clears.resume, "drain": drains.resume}
    return FleetOperations(
        table=table,
        moves=moves,
        clears=clears,
        drains=drains,
        pins=FleetPins(registry, selector, orders),
        explanations=Explanations(registry, selector, orders),
        hints=FleetHints(registry, selector, orders),
        replicator=OperationReplicator(table, orders, is_partial, resume, epoch_of),
    )


def choose_holders(instances: Instances, preferred: Iterable[str]) -> dict[str, int]:
    """Ids of up to `MAX_HOLDERS` registered instances, with their epochs: `preferred` ones first, then any."""
    chosen: dict[str, int] = {}
    for instance in chain(map(instances.find, preferred), instances):
        if instance is not None:
            chosen.setdefault(instance.info.instance_id, instance.info.epoch)
        if len(chosen) == MAX_HOLDERS:
            break
    return chosen


def is_sole(instances: Instances, holder_ids: Collection[str]) -> bool:
    """Whether no registered one of them reports to another coordinator, so that no other one knows the operation."""
    found = filter(None, map(instances.find, holder_ids))
    return all(instance.info.coordinator_count <= 1 for instance in found)
