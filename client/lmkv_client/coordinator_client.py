"""The coordinator's services as plain Python: what the commands, and tools of your own, ask it with.

    async with CoordinatorClient("127.0.0.1:9000") as coordinator:
        response = await coordinator.lookup(tokens=[128000, 849, 21435])

Answers are the messages of `lmkv.v1` themselves; `protos/lmkv/v1` says what they hold.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import Self, TypeVar

import grpc

from lmkv.errors import BadTokens, LmkvError, Unreachable
from lmkv.keys import ChunkKey, join_keys
from lmkv.rpc import from_rpc_error, open_channel
from lmkv.v1.cache_service_pb2 import LookupRequest, LookupResponse
from lmkv.v1.cache_service_pb2_grpc import CacheServiceStub
from lmkv.v1.registry_service_pb2 import Instance, ListInstancesRequest
from lmkv.v1.registry_service_pb2_grpc import RegistryServiceStub

Response = TypeVar("Response")

PAGE_SIZE = 1000
MAX_PAGES = 100
"""A coordinator that never ends its list is broken."""


class CoordinatorClient:
    """A connection to one coordinator. It connects when first used, and again after a loss.

    Every call ends within `timeout_seconds`. Calls raise the coordinator's own errors (`lmkv.errors`), and
    `Unreachable` if it does not answer. Closing is final and may be repeated.
    """

    def __init__(self, address: str, *, timeout_seconds: float = 5.0) -> None:
        self.address = address
        self.timeout_seconds = timeout_seconds
        self._channel = open_channel(address)
        self._cache = CacheServiceStub(self._channel)
        self._registry = RegistryServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes the connection; calls still running are cancelled."""
        await self._channel.close(None)

    async def lookup(
        self,
        *,
        tokens: Sequence[int] = (),
        keys: Iterable[ChunkKey] = (),
        model_name: str = "",
        cache_salt: str = "",
        lora_name: str = "",
    ) -> LookupResponse:
        """Who holds how much of a prompt, named by its tokens or by its chunks' keys; nobody is an empty answer.

        The model's name is needed only if the fleet serves several. Raises `BadTokens`, `BadChunkKey`,
        `ModelAmbiguous`, `ModelNotFound`, `Unreachable`.
        """
        try:
            request = LookupRequest(
                tokens=tokens,
                chunk_keys=join_keys(keys),
                model_name=model_name,
                cache_salt=cache_salt,
                lora_name=lora_name,
            )
        except (ValueError, TypeError) as error:  # they do not fit into int32
            raise BadTokens(f"tokens must be integers from 0 to 2^31-1: {error}") from None
        return await self._call(self._cache.Lookup, request)

    async def list_instances(self) -> list[Instance]:
        """Every registered instance, ordered by id; all pages of the list. Raises `Unreachable`."""
        instances: list[Instance] = []
        token = ""
        for _ in range(MAX_PAGES):
            page = await self._call(
                self._registry.ListInstances, ListInstancesRequest(page_size=PAGE_SIZE, page_token=token)
            )
            instances += page.instances
            token = page.next_page_token
            if not token:
                return instances
        raise LmkvError(f"the coordinator at {self.address} lists instances without end", address=self.address)

    async def _call(self, method: Callable[..., Awaitable[Response]], request: object) -> Response:
        try:
            return await method(request, timeout=self.timeout_seconds)
        except grpc.RpcError as rpc_error:
            error = from_rpc_error(rpc_error)
            if isinstance(error, Unreachable):
                error = Unreachable(f"no coordinator answers at {self.address}: {error}", address=self.address)
            raise error from None
