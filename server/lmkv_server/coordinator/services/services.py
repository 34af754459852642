"""The core and the handlers of one tenant. gRPC and HTTP call the same handlers."""

from __future__ import annotations

import time
from collections.abc import Callable

from lmkv.auth.callers import NO_QUOTA, TenantQuota
from lmkv_server.coordinator.core.history import History
from lmkv_server.coordinator.core.join_admission import JoinAdmission
from lmkv_server.coordinator.layout_store.layout_store import LayoutStore
from lmkv_server.coordinator.operations.clears import Clears
from lmkv_server.coordinator.operations.moves import Moves
from lmkv_server.coordinator.operations.operations import Operations
from lmkv_server.coordinator.operations.orders import PendingOrders
from lmkv_server.coordinator.operations.pins import FleetPins
from lmkv_server.coordinator.operations.replicator import OperationReplicator
from lmkv_server.coordinator.registry.registry import Registry
from lmkv_server.coordinator.registry.selection import Selector
from lmkv_server.coordinator.services.cache import CacheService
from lmkv_server.coordinator.services.layout_watch import LayoutWatch
from lmkv_server.coordinator.services.operations import OperationsService
from lmkv_server.coordinator.services.registry import RegistryService

SERVICE_NAMES = ("lmkv.v1.CacheService", "lmkv.v1.RegistryService", "google.longrunning.Operations")


class Services:
    """The state and the handlers of one tenant. Create it in the event loop that serves it."""

    def __init__(
        self,
        *,
        lease_ttl: float,
        operation_ttl: float = 3600.0,
        cluster_secret: bytes = b"",
        quota: Callable[[], TenantQuota] = lambda: NO_QUOTA,
        admission: JoinAdmission | None = None,
        layout_store: LayoutStore | None = None,
    ) -> None:
        orders = PendingOrders()
        # Starting at the time of day keeps revisions increasing across restarts.
        self.core = Registry(
            lease_ttl=lease_ttl,
            now=time.monotonic(),
            revision=time.time_ns() // 1_000,
            on_gone=orders.drop_instance,
            admission=admission,
        )
        self.history = History()
        """Samples of the last hour, taken by the coordinator's sweeper."""
        self.orders = orders
        self.operations_core = Operations(
            operation_ttl,
            is_partial=self._is_partial,
            restarted_seconds=self._restarted_seconds,
            report_delay=lease_ttl,
        )
        self._replicator = OperationReplicator(self.operations_core, orders, self._is_partial)
        self.watch = LayoutWatch(self.core.layout)
        selector = Selector(self.core.instances.models, cluster_secret, self.core.layout.may_hold)
        moves = Moves(self.core, selector, orders, self.operations_core)
        self.pins = FleetPins(self.core, selector, orders)
        clears = Clears(self.core, selector, orders, self.operations_core)
        self._replicator.resume = {"move": moves.resume, "copy": moves.resume, "clear": clears.resume}
        self.cache = CacheService(self.core, selector, moves, clears, self._replicator, self.pins, self.watch)
        self.registry = RegistryService(self.core, orders, self._replicator, quota, layout_store)
        self.operations = OperationsService(self.operations_core, self._replicator)

    def resync(self, reason: str, instance_id: str = "") -> None:
        """Ends the report streams of one instance, or of all: they register again and open new ones."""
        self.registry.resync(reason, instance_id)

    async def aclose(self) -> None:
        """Stops the operations that run here."""
        await self.operations_core.aclose()
        await self._replicator.aclose()

    def _restarted_seconds(self, instance_id: str, epoch: int) -> float:
        return self.core.instances.restarted_seconds(instance_id, epoch, time.monotonic())

    def _is_partial(self) -> bool:
        return self.core.is_partial(time.monotonic())
