"""The core and the handlers of one tenant. gRPC and HTTP call the same handlers."""

from __future__ import annotations

import time

from lmkv.auth.authenticator import OPEN_AUTHENTICATOR, Authenticator
from lmkv.config import CoordinatorConfig
from lmkv_server.coordinator.core.history import History
from lmkv_server.coordinator.core.join_admission import JoinAdmission
from lmkv_server.coordinator.layout_store.layout_store import LayoutStore, NoSharedStore
from lmkv_server.coordinator.operations.build import FleetOperations
from lmkv_server.coordinator.operations.orders import PendingOrders
from lmkv_server.coordinator.operations.shared import RecordSeal, SharedOperations
from lmkv_server.coordinator.registry.registry import Registry
from lmkv_server.coordinator.registry.selection import Selector
from lmkv_server.coordinator.services.cache import CacheService
from lmkv_server.coordinator.services.layout_watch import LayoutWatch
from lmkv_server.coordinator.services.lookups import LookupAnswers, LookupService
from lmkv_server.coordinator.services.operations import OperationsService
from lmkv_server.coordinator.services.registry import RegistryService
from lmkv_server.coordinator.services.reports import ReportService

SERVICE_NAMES = (
    "lmkv.v1.CacheService",
    "lmkv.v1.RegistryService",
    "lmkv.internal.v1.ReportService",
    "lmkv.internal.v1.LookupService",
    "google.longrunning.Operations",
)


class Services:
    """The state and the handlers of one tenant, to be made in the event loop that serves it."""

    def __init__(
        self,
        config: CoordinatorConfig,
        tenant: str = "",
        *,
        authenticator: Authenticator = OPEN_AUTHENTICATOR,
        admission: JoinAdmission | None = None,
        layout_store: LayoutStore | None = None,
    ) -> None:
        orders = PendingOrders()
        # Starting at the time of day keeps revisions increasing across restarts.
        self.core = Registry(
            lease_ttl=config.lease_ttl,
            now=time.monotonic(),
            revision=time.time_ns() // 1_000,
            on_gone=orders.drop_instance,
            admission=admission,
            tenant=tenant,
        )
        self.history = History()
        """Samples of the last hour, taken by the coordinator's sweeper."""
        selector = Selector(self.core.instances.models, self.core.layout, config.cluster_secret.encode())
        self.fleet_operations = FleetOperations(self.core, selector, orders, operation_ttl=config.operation_ttl)
        self.watch = LayoutWatch(self.core.layout)
        self.lookups = LookupAnswers(self.core, selector)
        self.cache = CacheService(selector, self.lookups, self.fleet_operations, self.watch)
        self.registry = RegistryService(self.core, authenticator, layout_store)
        self.reports = ReportService(self.core, orders, authenticator, layout_store)
        self.node_lookups = LookupService(self.core, selector, self.lookups)
        self._shared_operations = SharedOperations(
            self.fleet_operations.table,
            layout_store or NoSharedStore(),
            RecordSeal(config.cluster_secret.encode(), tenant),
        )
        self.operations = OperationsService(self.fleet_operations.table, self._shared_operations)

    def resync(self, reason: str, instance_id: str = "") -> None:
        """Ends the report streams of one instance, or of all: they register again and open new ones."""
        self.reports.resync(reason, instance_id)

    async def aclose(self) -> None:
        """Stops the operations that run here."""
        await self.fleet_operations.aclose()
        await self._shared_operations.aclose()
