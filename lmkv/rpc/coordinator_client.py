"""The client of the coordinators: connections, calls, lists, lookups over a stream, and failover between coordinators.

The SDK, nodes, the proxy and the picker build on it. A node has one `CoordinatorConnection` per coordinator, since it
registers at each; the others have one `CoordinatorClient`, which calls one coordinator while that responds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import grpc
from google.longrunning import operations_pb2_grpc

from lmkv.auth.credentials import Credentials
from lmkv.errors import LmkvError, OperationNotFound, Unreachable
from lmkv.rpc.endpoints import PLAINTEXT, call, open_channel
from lmkv.rpc.error_status import from_rpc_error
from lmkv.rpc.lookup_call import Lookups, unanswered
from lmkv.v1.cache_service_pb2 import LookupRequest, LookupResponse, LookupStreamRequest
from lmkv.v1.cache_service_pb2_grpc import CacheServiceStub
from lmkv.v1.registry_service_pb2 import Instance, ListInstancesRequest
from lmkv.v1.registry_service_pb2_grpc import RegistryServiceStub

Response = TypeVar("Response")
Target = TypeVar("Target")
Method = Callable[..., Awaitable[Response]]

PAGE_SIZE = 1000
MAX_PAGES = 100
"""Bounds a list whose pages never end."""
MIN_REPEAT_SECONDS = 0.01
"""A call that has a deadline is not repeated at another coordinator if less time than this is left."""


class CoordinatorConnection:
    """A channel to one coordinator, with stubs. Connects at the first call, and again after a failure."""

    def __init__(self, address: str, timeout_seconds: float, credentials: Credentials = PLAINTEXT) -> None:
        self.address = address
        self.timeout_seconds = timeout_seconds
        """Deadline of a call that has no other."""
        self.channel = open_channel(address, credentials)
        self.cache = CacheServiceStub(self.channel)
        self.registry = RegistryServiceStub(self.channel)
        self.operations = operations_pb2_grpc.OperationsStub(self.channel)

    async def aclose(self) -> None:
        """Closes the channel and cancels calls in flight. Idempotent."""
        await self.channel.close(None)

    async def call(
        self,
        method: Method[Response],
        request: object,
        *,
        timeout_seconds: float | None = None,
        wait_for_ready: bool = False,
        span_name: str = "",
    ) -> Response:
        """Makes one call. Raises the coordinator's error, and `Unreachable` if it does not respond.

        A call with a `span_name`, `SERVICE/METHOD`, is a span of the current trace. With `wait_for_ready` it waits
        until there is a connection.
        """
        timeout_seconds = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        try:
            method = partial(method, wait_for_ready=True) if wait_for_ready else method
            return await call(method, span_name, self.address, request, timeout_seconds)
        except LmkvError as error:
            raise unanswered(self.address, error) from None

    async def pages(
        self, method: Method[Any], kind: Callable[..., Any], field: str, *, timeout_seconds: float | None = None
    ) -> list[Any]:
        """All pages of a List call with requests of type `kind`. Raises as `call`."""
        entries: list[Any] = []
        token = ""
        for _ in range(MAX_PAGES):
            request = kind(page_size=PAGE_SIZE, page_token=token)
            page = await self.call(method, request, timeout_seconds=timeout_seconds)
            entries += getattr(page, field)
            token = page.next_page_token
            if not token:
                return entries
        raise LmkvError(
            f"the coordinator at {self.address} returns more than {MAX_PAGES} pages of {field}", address=self.address
        )

    def to_error(self, error: grpc.RpcError) -> LmkvError:
        """The error of a failed stream; `Unreachable` with address and cause if the coordinator did not respond."""
        return unanswered(self.address, from_rpc_error(error))


class Failover(Generic[Target]):
    """Selects one of at least one equal targets: the same one while it responds, the next one after a failure. Pure."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = tuple(targets)
        self._index = 0

    @property
    def current(self) -> Target:
        """The target to use now."""
        return self._targets[self._index]

    def in_order(self) -> tuple[Target, ...]:
        return (*self._targets[self._index :], *self._targets[: self._index])

    def report_failure(self, target: Target) -> None:
        """Switches to the next target; does nothing if `target` is no longer the current one."""
        if target is self.current:
            self._index = (self._index + 1) % len(self._targets)


class CoordinatorClient:
    """One `CoordinatorConnection` per address, with failover: all coordinators know the same chunks and instances.

    Each operation is known to the coordinator that started it; see `find`. A stream keeps the connection on which it
    was opened.
    """

    def __init__(
        self, addresses: Sequence[str], credentials: Credentials = PLAINTEXT, timeout_seconds: float = 5.0
    ) -> None:
        self.timeout_seconds = timeout_seconds
        """Deadline of a call."""
        self._connections = Failover(
            [CoordinatorConnection(address, timeout_seconds, credentials) for address in addresses]
        )

    async def aclose(self) -> None:
        """Closes all connections and cancels calls in flight. Idempotent."""
        await asyncio.gather(*(connection.aclose() for connection in self._connections.in_order()))

    @property
    def current(self) -> CoordinatorConnection:
        """The connection for the next call."""
        return self._connections.current

    def report_failure(self, connection: CoordinatorConnection) -> None:
        """Selects the next coordinator for later calls, since this one did not respond."""
        self._connections.report_failure(connection)

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
        calls = (connection.pages(method(connection), kind, field) for connection in self._connections.in_order())
        answers = await asyncio.gather(*calls, return_exceptions=True)
        entries = [answer for answer in answers if not isinstance(answer, BaseException)]
        for answer in answers:
            if isinstance(answer, BaseException) and (not entries or not isinstance(answer, Unreachable)):
                raise answer
        return [entry for found in entries for entry in found]

    async def instances(self, timeout_seconds: float | None = None) -> list[Instance]:
        """All registered instances, ordered by id. Raises as `CoordinatorConnection.pages`."""
        return await self.run(
            lambda to: to.pages(
                to.registry.ListInstances, ListInstancesRequest, "instances", timeout_seconds=timeout_seconds
            )
        )

    async def find(self, operation: Callable[[CoordinatorConnection], Awaitable[Response]]) -> Response:
        """Runs `operation` on the coordinators until one knows what it names.

        Raises `OperationNotFound` if none that responds does, and as `run`.
        """
        failure: LmkvError | None = None
        for connection in self._connections.in_order():
            try:
                return await operation(connection)
            except OperationNotFound as error:
                failure = error
            except Unreachable as error:
                self._leave(connection, error)
                failure = failure or error
        assert failure is not None, "there is at least one coordinator"
        raise failure

    async def run(
        self, operation: Callable[[CoordinatorConnection], Awaitable[Response]], deadline: float = float("inf")
    ) -> Response:
        """Runs `operation` on the current coordinator; if that is unreachable, once on each of the others.

        `deadline` is a time of `time.monotonic()` after which it is not repeated.
        """
        remaining_count = len(self._connections.in_order())
        while True:
            connection = self.current
            remaining_count -= 1
            try:
                return await operation(connection)
            except Unreachable as error:
                self._leave(connection, error)
                if not remaining_count or time.monotonic() > deadline - MIN_REPEAT_SECONDS:
                    raise

    def _leave(self, connection: CoordinatorConnection, error: Unreachable) -> None:
        """Selects the next coordinator. Raises the error if another process than the coordinator is unreachable."""
        if error.metadata.get("address") != connection.address:
            raise error
        self.report_failure(connection)

    def lookup_stream(self) -> LookupStream:
        """A stream for many lookups, which cost less than unary calls. The caller closes it, before this."""
        return LookupStream(self)


class LookupStream:
    """Lookups over one stream, which is opened at the first one, and again after a failure, with failover.

    Lookups that arrive while a message is being sent are batched into the next message.
    """

    def __init__(self, client: CoordinatorClient) -> None:
        self._client = client
        self._lookups: Lookups[LookupRequest, LookupResponse] | None = None
        self._is_closed = False

    @property
    def is_open(self) -> bool:
        """Whether a stream takes lookups."""
        return self._lookups is not None and self._lookups.is_open

    async def aclose(self) -> None:
        """Ends the stream; lookups in flight raise `Unreachable`. Idempotent."""
        self._is_closed = True
        lookups, self._lookups = self._lookups, None
        if lookups is not None:
            await lookups.aclose()

    async def lookup(self, request: LookupRequest) -> LookupResponse:
        """Raises the coordinator's error, or `Unreachable`, within the client's timeout.

        Several may be in flight; cancelling one does not affect the others. The caller rejects a request that is larger
        than a message may be: the coordinator would end the stream, and with it all other lookups.
        """
        deadline = time.monotonic() + self._client.timeout_seconds

        async def ask(connection: CoordinatorConnection) -> LookupResponse:
            if self._is_closed:
                raise Unreachable("the stream of lookups was closed")
            lookups, ended = self._lookups, None
            if lookups is None or lookups.address != connection.address:
                ended, lookups = lookups, Lookups(connection.cache, LookupStreamRequest, connection.address)
                self._lookups = lookups
            if ended is not None:
                await ended.aclose()
            return await lookups.lookup(request, deadline - time.monotonic())

        return await self._client.run(ask, deadline)
