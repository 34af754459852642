"""A coordinator that asks for tokens, and those who have some."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
from google.longrunning import operations_pb2_grpc

from lmkv import rpc
from lmkv.auth.credentials import BearerToken, Credentials
from lmkv.config import CoordinatorConfig
from lmkv.keys import ChunkKey
from lmkv.v1.cache_service_pb2_grpc import CacheServiceStub
from lmkv_server.coordinator.coordinator import Coordinator
from tests.server.coordinator.scripted_instance import ScriptedInstance
from tests.support.node_stub import NodeStub
from tests.support.specs import LLAMA
from tests.support.tokens import Entry, entry, write

ROLES = ("engine", "operator", "reader", "admin", "client")
TENANTS = ("", "a", "b")
ENTRIES = [entry(role, tenant) for role in ROLES for tenant in TENANTS]


class Guarded:
    """The coordinator, and lines to it by token."""

    def __init__(self, coordinator: Coordinator, tokens: Path, stack: AsyncExitStack) -> None:
        self.coordinator = coordinator
        self.tokens = tokens
        """The token file, to be overwritten."""
        self._stack = stack
        self._fleets: dict[str, dict[str, ScriptedInstance]] = {}

    async def channel(self, token: str) -> grpc.aio.Channel:
        """A channel that shows a token; none if it is empty."""
        opened = rpc.open_channel(self.coordinator.address, Credentials(token=BearerToken(text=token)))
        return await self._stack.enter_async_context(opened)

    async def cache(self, token: str) -> Any:
        return CacheServiceStub(await self.channel(token))

    async def registry(self, token: str) -> Any:
        return NodeStub(await self.channel(token))

    async def operations(self, token: str) -> Any:
        return operations_pb2_grpc.OperationsStub(await self.channel(token))

    async def instance(self, tenant: str, name: str, chunks: Iterable[ChunkKey] = ()) -> ScriptedInstance:
        """An instance of a tenant, which has joined."""
        channel = await self.channel(token_of("engine", tenant))
        instance = ScriptedInstance(channel, self._fleets.setdefault(tenant, {}), name, LLAMA, chunks)
        return await self._stack.enter_async_context(instance)

    def http(self, token: str, **headers: str) -> httpx.AsyncClient:
        """A client that shows a token; none if it is empty."""
        shown = {"Authorization": f"Bearer {token}"} if token else {}
        return httpx.AsyncClient(base_url=self.coordinator.url, headers=shown | headers, trust_env=False, timeout=60)


def token_of(role: str, tenant: str = "") -> str:
    return f"{role}-of-{tenant}-token" if tenant else f"{role}-token"


@asynccontextmanager
async def guarded(
    folder: Path, entries: Iterable[Entry] = ENTRIES, quotas: dict[str, dict[str, int]] | None = None
) -> AsyncIterator[Guarded]:
    """A coordinator that requires tokens of a file."""
    path = folder / "tokens.yaml"
    write(path, *entries, **(quotas or {}))
    async with (
        Coordinator(
            CoordinatorConfig(port=0, http_port=0, lease_ttl=30.0, cluster_secret="hush", auth_tokens=str(path))
        ) as serving,
        AsyncExitStack() as stack,
    ):
        yield Guarded(serving, path, stack)
