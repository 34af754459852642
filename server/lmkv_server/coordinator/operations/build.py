"""Builds what runs the operations of one tenant, and the pins."""

from __future__ import annotations

from dataclasses import dataclass

from lmkv_server.coordinator.operations.clears import Clears
from lmkv_server.coordinator.operations.drains import Drains
from lmkv_server.coordinator.operations.explanations import Explanations
from lmkv_server.coordinator.operations.hints import FleetHints
from lmkv_server.coordinator.operations.moves import Moves
from lmkv_server.coordinator.operations.operations import Operations
from lmkv_server.coordinator.operations.orders import PendingOrders
from lmkv_server.coordinator.operations.pins import FleetPins
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

    async def aclose(self) -> None:
        """Stops the operations that run here."""
        await self.table.aclose()


def make_operations(
    registry: Registry, selector: Selector, orders: PendingOrders, *, operation_ttl: float
) -> FleetOperations:
    """Ended operations are kept for `operation_ttl` seconds."""
    table = Operations(operation_ttl)
    return FleetOperations(
        table=table,
        moves=Moves(registry, selector, orders, table),
        clears=Clears(registry, selector, orders, table),
        drains=Drains(registry, orders, table),
        pins=FleetPins(registry, selector, orders),
        explanations=Explanations(registry, selector, orders),
        hints=FleetHints(registry, selector, orders),
    )
