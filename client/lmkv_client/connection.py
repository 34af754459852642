"""The line to one coordinator: its services, how to call them, and how long to put up with silence. For the SDK."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
from google.longrunning import operations_pb2_grpc

from lmkv.auth.credentials import Credentials
from lmkv.errors import LmkvError, Unreachable
from lmkv.rpc.endpoints import PLAINTEXT, from_rpc_error, open_channel
from lmkv.v1.cache_service_pb2_grpc import CacheServiceStub
from lmkv.v1.registry_service_pb2_grpc import RegistryServiceStub

Response = TypeVar("Response")

PATIENCE_SECONDS = 30.0
"""A coordinator that restarts is back long before."""
RETRY_SECONDS = 0.2
PAGE_SIZE = 1000
MAX_PAGES = 100
"""A coordinator that never ends its list is broken."""

_NO_ANSWER = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")
"""What gRPC says where the coordinator itself says nothing; the last, when it stops in the middle of a call."""


class Connection:
    """A channel to one coordinator, which connects when first used and again after a loss."""

    def __init__(self, address: str, timeout_seconds: float, credentials: Credentials = PLAINTEXT) -> None:
        self.address = address
        self.timeout_seconds = timeout_seconds
        """Most time that an answer may take."""
        self.channel = open_channel(address, credentials)
        self.cache = CacheServiceStub(self.channel)
        self.registry = RegistryServiceStub(self.channel)
        self.operations = operations_pb2_grpc.OperationsStub(self.channel)

    async def aclose(self) -> None:
        """Closes it; calls still running are cancelled. Repeating it is safe."""
        await self.channel.close(None)

    async def call(
        self, method: Callable[..., Awaitable[Response]], request: object, extra_seconds: float = 0.0
    ) -> Response:
        """The answer to one call. Raises the coordinator's own errors, and `Unreachable` if there is no answer.

        `extra_seconds` is how long the coordinator was asked to hold the answer back.
        """
        try:
            return await method(request, timeout=self.timeout_seconds + extra_seconds)
        except grpc.RpcError as error:
            raise self.meaning_of(error) from None

    async def pages(self, method: Callable[..., Awaitable[Any]], kind: Callable[..., Any], field: str) -> list[Any]:
        """What a List call answers, all pages of it, for requests of a `kind`. Raises as `call` does."""
        entries: list[Any] = []
        token = ""
        for _ in range(MAX_PAGES):
            page = await self.call(method, kind(page_size=PAGE_SIZE, page_token=token))
            entries += getattr(page, field)
            token = page.next_page_token
            if not token:
                return entries
        raise LmkvError(f"the coordinator at {self.address} lists {field} without end", address=self.address)

    def meaning_of(self, rpc_error: grpc.RpcError) -> LmkvError:
        """The error in a failed call, which says where the coordinator was looked for if it did not answer."""
        error = from_rpc_error(rpc_error)
        if error.metadata.get("grpc_code") in _NO_ANSWER:
            return Unreachable(f"no coordinator answers at {self.address}: {error}", address=self.address)
        return error


class Patience:
    """How long something that goes on by itself may be without an answer before it gives up."""

    def __init__(self, seconds: float = PATIENCE_SECONDS) -> None:
        self._seconds = seconds
        self.renew()

    def renew(self) -> None:
        """Begins anew: there was an answer."""
        self._end = time.monotonic() + self._seconds

    async def endure(self, error: Unreachable) -> None:
        """Waits a moment before another try. Raises the error once patience is over."""
        if time.monotonic() > self._end:
            raise error
        await asyncio.sleep(RETRY_SECONDS)
