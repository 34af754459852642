"""A picker's client of a real coordinator, whose lookups a test sees, delays and fails."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from lmkv.auth.credentials import Credentials
from lmkv.v1.cache_service_pb2 import LookupResponse
from lmkv.v1.registry_service_pb2 import Instance
from lmkv_server.proxy.routing.coordinator_client import CoordinatorClient
from lmkv_server.proxy.routing.growing_chains import PromptKeys


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

    async def instances(self) -> list[Instance]:
        self.listed = await super().instances()
        return self.listed

    async def look_up(self, chains: Sequence[PromptKeys]) -> list[LookupResponse]:
        self.key_counts += [len(one.keys) // 16 for one in chains]
        self.in_flight_count += 1
        try:
            await self.answers.wait()
            if self.error is not None:
                raise self.error
            return await super().look_up(chains)
        finally:
            self.in_flight_count -= 1
