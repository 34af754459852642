"""Tenants: each has a coordinator's services of its own, and so a layout map, operations and pins of its own.

Nothing has to be filtered: another tenant's chunks are not there, however they are asked for, and a lookup of them
takes the same steps as one of chunks that nobody has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.longrunning import operations_pb2_grpc

from lmkv.auth.caller import current_caller
from lmkv.v1 import cache_service_pb2_grpc, registry_service_pb2_grpc
from lmkv_server.coordinator.services.services import Services

UNNAMED = ""
"""The tenant of a fleet without tenants."""


class Tenants:
    """The services of all tenants. `make` makes those of one, by its name."""

    def __init__(self, make: Callable[[str], Services]) -> None:
        self._make = make
        self._services = {UNNAMED: make(UNNAMED)}

    def __iter__(self) -> Iterator[Services]:
        return iter(list(self._services.values()))

    def by_name(self) -> list[tuple[str, Services]]:
        """The name of each tenant, and what serves it."""
        return list(self._services.items())

    def find(self, tenant: str) -> Services | None:
        """What serves a tenant; None if nobody has called for it."""
        return self._services.get(tenant)

    def of(self, tenant: str) -> Services:
        """What serves a tenant, made when it is first called for. The gate lets in none that nobody has named."""
        if tenant not in self._services:
            self._services[tenant] = self._make(tenant)
        return self._services[tenant]

    @property
    def unnamed(self) -> Services:
        """What serves the tenant without a name."""
        return self._services[UNNAMED]

    @property
    def current(self) -> Services:
        """What serves the tenant of the call that is being answered."""
        return self.of(current_caller().tenant)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serves them over gRPC."""
        cache_service_pb2_grpc.add_CacheServiceServicer_to_server(self._servicer("cache"), server)
        registry_service_pb2_grpc.add_RegistryServiceServicer_to_server(self._servicer("registry"), server)
        operations_pb2_grpc.add_OperationsServicer_to_server(self._servicer("operations"), server)

    def _servicer(self, service: str) -> Any:
        return _Servicer(lambda: getattr(self.current, service))

    async def aclose(self) -> None:
        """Ends what runs behind the handlers."""
        for services in self:
            await services.aclose()


class _Servicer:
    """Has each handler of the current tenant's called by its name."""

    def __init__(self, servicer: Callable[[], Any]) -> None:
        self._servicer = servicer

    def __getattr__(self, method: str) -> Callable[[Any, Any], Any]:
        return lambda request, context: getattr(self._servicer(), method)(request, context)
