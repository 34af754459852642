"""The core and the handlers of each tenant. gRPC and HTTP call the same handlers.

Each tenant has its own layout map, operations and pins, so no request needs filtering: the chunks of other tenants are
not in its map, and a lookup of them takes the same steps as a lookup of unknown chunks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.longrunning import operations_pb2_grpc

from lmkv.auth.authenticator import OPEN_AUTHENTICATOR, Authenticator
from lmkv.auth.caller import current_caller
from lmkv.config import CoordinatorConfig
from lmkv.internal.v1 import lookup_service_pb2_grpc, report_service_pb2_grpc
from lmkv.v1 import cache_service_pb2_grpc, registry_service_pb2_grpc
from lmkv_server.coordinator.core.history import History
from lmkv_server.coordinator.core.instances import JoinAdmission
from lmkv_server.coordinator.layout_store.layout_store import LayoutStore, NoSharedStore
from lmkv_server.coordinator.operations.orders import PendingOrders
from lmkv_server.coordinator.operations.shared import RecordSeal, SharedOperations
from lmkv_server.coordinator.registry.registry import Registry
from lmkv_server.coordinator.registry.selection import Selector
from lmkv_server.coordinator.services.cache import CacheService, FleetOperations, OperationsService
from lmkv_server.coordinator.services.layout_watch import LayoutWatch
from lmkv_server.coordinator.services.lookups import LookupAnswers, LookupService
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
            departures=orders,
            admission=(admission or JoinAdmission()).of(tenant),
        )
        self.history = History()
        """Samples of the last hour, taken by the coordinator's sweeper."""
        selector = Selector(self.core.instances.models, self.core.layout, config.cluster_secret.encode())
        self.fleet_operations = FleetOperations(self.core, selector, orders, operation_ttl=config.operation_ttl)
        self.watch = LayoutWatch(self.core.layout)
        self.lookups = LookupAnswers(self.core, selector)
        self.cache = CacheService(selector, self.lookups, self.fleet_operations, self.watch)
        self.registry = RegistryService(self.core, authenticator, layout_store)
        self.reports = ReportService(self.core, orders, authenticator, layout_store, self.fleet_operations.clears)
        self.node_lookups = LookupService(self.core, selector, self.lookups)
        self._shared_operations = SharedOperations(
            self.fleet_operations.table,
            layout_store or NoSharedStore(),
            RecordSeal(config.cluster_secret.encode(), tenant),
        )
        self.operations = OperationsService(self.fleet_operations.table, self._shared_operations)

    def resync(self, reason: str, instance_id: str = "") -> None:
        """Ends the report streams of one instance, or of all: they register again and open new streams."""
        self.reports.resync(reason, instance_id)

    async def aclose(self) -> None:
        """Stops the operations that run here."""
        await self.fleet_operations.aclose()
        await self._shared_operations.aclose()


UNNAMED = ""
"""The tenant of a fleet without tenants."""


class Tenants:
    """The services of all tenants. `make` creates those of one tenant."""

    def __init__(self, make: Callable[[str], Services]) -> None:
        self._make = make
        self._services = {UNNAMED: make(UNNAMED)}

    def __iter__(self) -> Iterator[Services]:
        return iter(list(self._services.values()))

    def by_name(self) -> list[tuple[str, Services]]:
        return list(self._services.items())

    def find(self, tenant: str) -> Services | None:
        """The services of a tenant; None if no call has named it."""
        return self._services.get(tenant)

    def of(self, tenant: str) -> Services:
        """The services of a tenant, created at its first call. The authenticator admits configured tenants only."""
        if tenant not in self._services:
            self._services[tenant] = self._make(tenant)
        return self._services[tenant]

    @property
    def unnamed(self) -> Services:
        """The services of the tenant without a name."""
        return self._services[UNNAMED]

    @property
    def current(self) -> Services:
        """The services of the current call's tenant."""
        return self.of(current_caller().tenant)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds the services to a gRPC server."""
        cache_service_pb2_grpc.add_CacheServiceServicer_to_server(self._servicer("cache"), server)
        registry_service_pb2_grpc.add_RegistryServiceServicer_to_server(self._servicer("registry"), server)
        report_service_pb2_grpc.add_ReportServiceServicer_to_server(self._servicer("reports"), server)
        lookup_service_pb2_grpc.add_LookupServiceServicer_to_server(self._servicer("node_lookups"), server)
        operations_pb2_grpc.add_OperationsServicer_to_server(self._servicer("operations"), server)

    def _servicer(self, service: str) -> Any:
        return _Servicer(lambda: getattr(self.current, service))

    async def aclose(self) -> None:
        """Stops the operations of all tenants."""
        for services in self:
            await services.aclose()


class _Servicer:
    """Dispatches each call to the handler of the current tenant."""

    def __init__(self, servicer: Callable[[], Any]) -> None:
        self._servicer = servicer

    def __getattr__(self, method: str) -> Callable[[Any, Any], Any]:
        return lambda request, context: getattr(self._servicer(), method)(request, context)
