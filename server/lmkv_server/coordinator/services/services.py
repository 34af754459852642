"""The core and the handlers of one tenant. gRPC and HTTP call the same handlers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from lmkv.auth.callers import NO_QUOTA, TenantQuota
from lmkv_server.coordinator.core.history import History
from lmkv_server.coordinator.core.join_admission import JoinAdmission
from lmkv_server.coordinator.layout_store.layout_store import LayoutStore
from lmkv_server.coordinator.operations.build import FleetOperations, make_operations
from lmkv_server.coordinator.operations.orders import PendingOrders
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


@dataclass(kw_only=True, slots=True, eq=False)
class Services:
    """The state and the handlers of one tenant."""

    core: Registry
    history: History
    """Samples of the last hour, taken by the coordinator's sweeper."""
    fleet_operations: FleetOperations
    watch: LayoutWatch
    cache: CacheService
    registry: RegistryService
    reports: ReportService
    node_lookups: LookupService
    lookups: LookupAnswers
    operations: OperationsService

    def resync(self, reason: str, instance_id: str = "") -> None:
        """Ends the report streams of one instance, or of all: they register again and open new ones."""
        self.reports.resync(reason, instance_id)

    async def aclose(self) -> None:
        """Stops the operations that run here."""
        await self.fleet_operations.aclose()


def make_services(
    *,
    tenant: str = "",
    lease_ttl: float,
    operation_ttl: float = 3600.0,
    cluster_secret: bytes = b"",
    quota: Callable[[], TenantQuota] = lambda: NO_QUOTA,
    admission: JoinAdmission | None = None,
    layout_store: LayoutStore | None = None,
) -> Services:
    """The services of one tenant, to be made in the event loop that serves it."""
    orders = PendingOrders()
    # Starting at the time of day keeps revisions increasing across restarts.
    core = Registry(
        lease_ttl=lease_ttl,
        now=time.monotonic(),
        revision=time.time_ns() // 1_000,
        on_gone=orders.drop_instance,
        admission=admission,
        tenant=tenant,
    )
    selector = Selector(core.instances.models, cluster_secret, core.layout.may_hold, core.layout.fingerprint_of)
    fleet = make_operations(core, selector, orders, operation_ttl=operation_ttl)
    watch = LayoutWatch(core.layout)
    lookups = LookupAnswers(core, selector)
    return Services(
        core=core,
        history=History(),
        fleet_operations=fleet,
        watch=watch,
        cache=CacheService(
            selector,
            lookups,
            fleet.moves,
            fleet.clears,
            fleet.drains,
            fleet.pins,
            fleet.hints,
            fleet.explanations,
            watch,
        ),
        registry=RegistryService(core, quota, layout_store),
        reports=ReportService(core, orders, quota, layout_store),
        node_lookups=LookupService(core, selector, lookups),
        lookups=lookups,
        operations=OperationsService(fleet.table),
    )
