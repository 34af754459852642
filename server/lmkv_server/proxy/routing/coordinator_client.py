"""The picker's client of the coordinators: it calls one while that answers, and the next one after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from lmkv import rpc
from lmkv.auth.credentials import Credentials
from lmkv.errors import Unreachable
from lmkv.keys import split_keys
from lmkv.rpc.failover import Failover
from lmkv.rpc.lookup_call import LookupCall
from lmkv.rpc.prompts import by_keys
from lmkv.v1.cache_service_pb2 import LookupRequest, LookupResponse, LookupStreamRequest
from lmkv.v1.cache_service_pb2_grpc import CacheServiceStub
from lmkv.v1.registry_service_pb2 import Instance, ListInstancesRequest, ListInstancesResponse
from lmkv.v1.registry_service_pb2_grpc import RegistryServiceStub
from lmkv_server.proxy.routing.growing_chains import PromptKeys

LIST_TIMEOUT_SECONDS = 5.0
_LIST = "lmkv.v1.RegistryService/ListInstances"


class CoordinatorClient:
    """Lists instances, and looks up keys over one stream."""

    def __init__(self, addresses: Sequence[str], credentials: Credentials, timeout_seconds: float) -> None:
        """A lookup takes at most `timeout_seconds`."""
        self._channels = {address: rpc.open_channel(address, credentials) for address in addresses}
        self._coordinators = Failover(addresses)
        self._timeout_seconds = timeout_seconds
        self._call: LookupCall[LookupRequest, LookupResponse] | None = None

    async def aclose(self) -> None:
        """Closes the connections."""
        if self._call is not None:
            await self._call.aclose()
        await asyncio.gather(*(channel.close(None) for channel in self._channels.values()))

    async def instances(self) -> list[Instance]:
        """The instances of the fleet. Raises the coordinator's error, or `Unreachable`."""
        address = self._coordinators.current
        registry: Any = RegistryServiceStub(self._channels[address])
        instances: list[Instance] = []
        request = ListInstancesRequest()
        try:
            while True:
                response = cast(
                    ListInstancesResponse,
                    await rpc.call(registry.ListInstances, _LIST, address, request, LIST_TIMEOUT_SECONDS),
                )
                instances += response.instances
                if not response.next_page_token:
                    return instances
                request = ListInstancesRequest(page_token=response.next_page_token)
        except Unreachable:
            self._coordinators.report_failure(address)
            raise

    async def look_up(self, chains: Sequence[PromptKeys]) -> list[LookupResponse]:
        """What instances hold of each chain. Raises the coordinator's error, `Unreachable` or `TimeoutError`."""
        address = self._coordinators.current
        requests = [LookupRequest(prompt=by_keys(split_keys(one.keys), fingerprint=one.fingerprint)) for one in chains]
        try:
            async with asyncio.timeout(self._timeout_seconds):
                call = self._open(address)
                return await asyncio.gather(*(call.lookup(request) for request in requests))
        except (TimeoutError, Unreachable):
            self._coordinators.report_failure(address)
            raise

    def _open(self, address: str) -> LookupCall[LookupRequest, LookupResponse]:
        """The stream to a coordinator, which is opened if there is none."""
        if self._call is None or self._call.has_ended or self._call.address != address:
            if self._call is not None:
                self._call.end()
            self._call = LookupCall(CacheServiceStub(self._channels[address]), LookupStreamRequest, address)
        return self._call
