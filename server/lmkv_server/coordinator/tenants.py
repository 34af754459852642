"""Tenants: each has its own services, and so its own layout map, operations and pins.

No request needs filtering: the chunks of other tenants are not in the tenant's map, and a lookup of them takes the same
steps as a lookup of unknown chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.longrunning import operations_pb2_grpc

from lmkv.auth.caller import current_caller
from lmkv.internal.v1 import lookup_service_pb2_grpc, report_service_pb2_grpc
from lmkv.v1 import cache_service_pb2_grpc, registry_service_pb2_grpc
from lmkv_server.coordinator.services.services import Services

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
        """The name and the services of each tenant."""
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
