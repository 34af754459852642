"""gRPC connections to coordinators: calls, failover between coordinators, and the deadline of retries. For the SDK."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc
from google.longrunning import operations_pb2_grpc

from lmkv.auth.credentials import Credentials
from lmkv.errors import LmkvError, OperationNotFound, Unreachable
from lmkv.rpc.endpoints import PLAINTEXT, open_channel
from lmkv.rpc.error_status import from_rpc_error
from lmkv.rpc.failover import Failover
from lmkv.rpc.unary_call import answer_of
from lmkv.v1.cache_service_pb2_grpc import CacheServiceStub
from lmkv.v1.registry_service_pb2_grpc import RegistryServiceStub

Response = TypeVar("Response")
Method = Callable[..., Awaitable[Response]]

RETRY_TIMEOUT_SECONDS = 30.0
"""Much longer than the restart of a coordinator takes."""
RETRY_SECONDS = 0.2
PAGE_SIZE = 1000
MAX_PAGES = 100
"""Bounds a list whose pages never end."""

_NO_ANSWER = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")
"""gRPC codes that mean that the coordinator did not respond; the last one, that it stopped during the call."""


class CoordinatorConnection:
    """A channel to one coordinator. Connects at the first call and reconnects after a failure."""

    def __init__(self, address: str, timeout_seconds: float, credentials: Credentials = PLAINTEXT) -> None:
        self.address = address
        self.timeout_seconds = timeout_seconds
        """Deadline of a call."""
        self.channel = open_channel(address, credentials)
        self.cache = CacheServiceStub(self.channel)
        self.registry = RegistryServiceStub(self.channel)
        self.operations = operations_pb2_grpc.OperationsStub(self.channel)

    async def aclose(self) -> None:
        """Closes the channel and cancels calls in flight. Idempotent."""
        await self.channel.close(None)

    async def call(
        self, method: Callable[..., Awaitable[Response]], request: object, extra_seconds: float = 0.0
    ) -> Response:
        """Makes one call. Raises the coordinator's error, and `Unreachable` if it does not respond.

        `extra_seconds` extends the deadline, for a request that the coordinator holds.
        """
        try:
            answer: Response = await answer_of(method(request, timeout=self.timeout_seconds + extra_seconds))
            return answer
        except grpc.RpcError as error:
            raise self.to_error(error) from None

    async def pages(self, method: Callable[..., Awaitable[Any]], kind: Callable[..., Any], field: str) -> list[Any]:
        """All pages of a List call with requests of type `kind`. Raises as `call`."""
        entries: list[Any] = []
        token = ""
        for _ in range(MAX_PAGES):
            page = await self.call(method, kind(page_size=PAGE_SIZE, page_token=token))
            entries += getattr(page, field)
            token = page.next_page_token
            if not token:
                return entries
        raise LmkvError(
            f"the coordinator at {self.address} returns more than {MAX_PAGES} pages of {field}", address=self.address
        )

    def to_error(self, rpc_error: grpc.RpcError) -> LmkvError:
        """The error of a failed call; `Unreachable` with address and cause if the coordinator did not respond."""
        error = from_rpc_error(rpc_error)
        if error.metadata.get("grpc_code") in _NO_ANSWER:
            return Unreachable(
                f"no coordinator responds at {self.address}: {error}", address=self.address, cause=str(error)
            )
        return error


class CoordinatorConnections:
    """One `CoordinatorConnection` per address, with failover: all coordinators know the same chunks and instances.

    Each operation is known to the coordinator that started it; see `find`.

    A stream keeps the `CoordinatorConnection` on which it was opened.
    """

    def __init__(self, addresses: Sequence[str], timeout_seconds: float, credentials: Credentials) -> None:
        self._all = [CoordinatorConnection(address, timeout_seconds, credentials) for address in addresses]
        self._failover = Failover(self._all)

    async def aclose(self) -> None:
        """Closes all connections and cancels calls in flight. Idempotent."""
        await asyncio.gather(*(connection.aclose() for connection in self._all))

    @property
    def current(self) -> CoordinatorConnection:
        """The connection for the next call."""
        return self._failover.current

    def report_failure(self, connection: CoordinatorConnection) -> None:
        """Selects the next coordinator for later calls, since this one did not respond."""
        self._failover.report_failure(connection)

    async def call(self, method: Callable[[CoordinatorConnection], Method[Response]], request: object) -> Response:
        """Makes a call, with failover. Raises as `CoordinatorConnection.call`."""
        return await self.run(lambda connection: connection.call(method(connection), request))

    async def pages(
        self, method: Callable[[CoordinatorConnection], Method[Any]], kind: Callable[..., Any], field: str
    ) -> list[Any]:
        """All pages of a list, with failover. Raises as `CoordinatorConnection.pages`."""
        return await self.run(lambda connection: connection.pages(method(connection), kind, field))

    async def all_pages(
        self, method: Callable[[CoordinatorConnection], Method[Any]], kind: Callable[..., Any], field: str
    ) -> list[Any]:
        """The entries of a list at all coordinators that respond.

        Raises `Unreachable` if none does, and other errors as `CoordinatorConnection.pages`.
        """
        calls = (connection.pages(method(connection), kind, field) for connection in self._all)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        entries = [answer for answer in answers if not isinstance(answer, BaseException)]
        for answer in answers:
            if isinstance(answer, BaseException) and (not entries or not isinstance(answer, Unreachable)):
                raise answer
        return [entry for found in entries for entry in found]

    async def find(self, operation: Callable[[CoordinatorConnection], Awaitable[Response]]) -> Response:
        """Runs `operation` on the coordinators until one knows what it names.

        Raises `OperationNotFound` if none that responds does, and as `run`.
        """
        failure: LmkvError | None = None
        first = self._all.index(self.current)
        for connection in (*self._all[first:], *self._all[:first]):
            try:
                return await operation(connection)
            except OperationNotFound as error:
                failure = error
            except Unreachable as error:
                if error.metadata.get("address") != connection.address:  # another process is unreachable
                    raise
                self.report_failure(connection)
                failure = failure or error
        assert failure is not None, "there is at least one coordinator"
        raise failure

    async def run(self, operation: Callable[[CoordinatorConnection], Awaitable[Response]]) -> Response:
        """Runs `operation` on the current coordinator; if that is unreachable, once on each of the others."""
        for _ in self._all[1:]:
            connection = self.current
            try:
                return await operation(connection)
            except Unreachable as error:
                if error.metadata.get("address") != connection.address:  # another process is unreachable
                    raise
                self.report_failure(connection)
        return await operation(self.current)


class RetryDeadline:
    """Bounds the time of retries after the last response."""

    def __init__(self, seconds: float = RETRY_TIMEOUT_SECONDS) -> None:
        self._seconds = seconds
        self.extend()

    def extend(self) -> None:
        """Restarts the time, after a response."""
        self._end = time.monotonic() + self._seconds

    async def wait_to_retry(self, error: LmkvError) -> None:
        """Waits before the next attempt. Raises `error` if the time is over."""
        if time.monotonic() > self._end:
            raise error
        await asyncio.sleep(RETRY_SECONDS)
