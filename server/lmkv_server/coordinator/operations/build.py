"""What runs the operations of one tenant, and the pins."""

from __future__ import annotations

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


class FleetOperations:
    """The operations of one tenant's fleet. Ended ones are kept for `operation_ttl` seconds."""

    def __init__(self, registry: Registry, selector: Selector, orders: PendingOrders, *, operation_ttl: float) -> None:
        self.table = Operations(operation_ttl)
        self.moves = Moves(registry, selector, orders, self.table)
        self.clears = Clears(registry, selector, orders, self.table)
        self.drains = Drains(registry, orders, self.table)
        self.pins = FleetPins(registry, selector, orders)
        self.explanations = Explanations(registry, selector, orders)
        self.hints = FleetHints(registry, selector, orders)

    async def aclose(self) -> None:
        """Stops the operations that run here."""
        await self.table.aclose()
