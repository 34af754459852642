"""A picker's client of a real coordinator, whose lookups a test sees, delays and fails."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from lmkv.auth.credentials import Credentials
from lmkv.rpc.coordinator_client import CoordinatorClient, LookupStream
from lmkv.v1.cache_service_pb2 import LookupRequest, LookupResponse
from lmkv.v1.registry_service_pb2 import Instance


class WatchedClient(CoordinatorClient):
    """Lookups wait while `answers` is not set, and raise `error` if there is one."""

    def __init__(self, addresses: Sequence[str], credentials: Credentials, timeout_seconds: float) -> None:
        super().__init__(addresses, credentials, timeout_seconds)
        self.listed: list[Instance] = []
        """The instances that the picker knows."""
        self.key_counts: list[int] = []
        """The number of keys of each lookup."""
        self.in_flight_count = 0
        self.answers = asyncio.Event()
        self.answers.set()
        self.error: Exception | None = None

    async def instances(self, timeout_seconds: float | None = None) -> list[Instance]:
        self.listed = await super().instances(timeout_seconds)
        return self.listed

    def lookup_stream(self) -> LookupStream:
        return _WatchedStream(self)


class _WatchedStream(LookupStream):
    def __init__(self, client: WatchedClient) -> None:
        super().__init__(client)
        self._watched = client

    async def lookup(self, request: LookupRequest) -> LookupResponse:
        watched = self._watched
        watched.key_counts.append(len(request.prompt.keys.chunk_keys))
        watched.in_flight_count += 1
        try:
            await watched.answers.wait()
            if watched.error is not None:
                raise watched.error
            return await super().lookup(request)
        finally:
            watched.in_flight_count -= 1
