"""Lookups over one stream, which cost less than unary calls. For clients that look up often.

Lookups that arrive while a message is being sent are batched into the next message.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Self, Unpack

import grpc

from lmkv.errors import LmkvError, Unreachable
from lmkv.rpc.error_status import from_status
from lmkv.rpc.lookup_batches import take_batch
from lmkv.v1.cache_service_pb2 import LookupRequest, LookupResponse, LookupResult, LookupStreamRequest
from lmkv_client.chunks import Chunks, make_request
from lmkv_client.connection import CoordinatorConnection, CoordinatorConnections

MAX_IN_FLIGHT = 256
"""Maximum number of lookups in flight; further ones wait."""

Pending = asyncio.Future[LookupResponse]


class LookupStream:
    """Looks prompts up over a stream. Opens it at the first lookup, and again after a failure, with failover.

    Created by `Coordinator.lookup_stream`.
    """

    def __init__(self, connections: CoordinatorConnections) -> None:
        self._connections = connections
        self._in_flight = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._call: _LookupCall | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Ends the stream; lookups in flight raise `Unreachable`. Idempotent."""
        call, self._call = self._call, None
        if call is not None:
            await call.aclose()

    async def lookup(self, tokens: Sequence[int] = (), **chunks: Unpack[Chunks]) -> LookupResponse:
        """As `Coordinator.lookup`. Several may be in flight; cancelling one does not affect the others.

        Rejects a request that is larger than a message may be: the coordinator would end the stream, and with it all
        other lookups.
        """
        request = make_request(LookupRequest, tokens, chunks)
        connection = self._connections.current
        try:
            async with asyncio.timeout(connection.timeout_seconds), self._in_flight:
                connection = self._connections.current
                call = self._call
                if call is None or call.ended or call.connection is not connection:
                    ended, call = call, _LookupCall(connection, self._connections.report_failure)
                    self._call = call
                    if ended is not None:
                        await ended.aclose()
                return await call.lookup(request)
        except TimeoutError:
            self._connections.report_failure(connection)
            address = connection.address
            raise Unreachable(f"no coordinator responds at {address}: deadline exceeded", address=address) from None


class _LookupCall:
    """One stream and its pending lookups. Responses arrive in the order of requests."""

    def __init__(self, connection: CoordinatorConnection, on_failure: Callable[[CoordinatorConnection], None]) -> None:
        self.ended = False
        self.connection = connection
        self._on_failure = on_failure
        self._requests: deque[tuple[LookupRequest, Pending]] = deque()  # bounded by MAX_IN_FLIGHT
        self._has_requests = asyncio.Event()
        self._pending: deque[Pending] = deque()
        self._reader = asyncio.create_task(self._read(), name="lmkv-lookup-stream")

    async def lookup(self, request: LookupRequest) -> LookupResponse:
        answer: Pending = asyncio.get_running_loop().create_future()
        self._requests.append((request, answer))
        self._has_requests.set()
        return await answer

    async def aclose(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _messages(self) -> AsyncIterator[LookupStreamRequest]:
        """Yields batches. gRPC takes the next one after it has sent the previous one."""
        while True:
            await self._has_requests.wait()
            message = take_batch(self._requests, self._pending)
            if not self._requests:
                self._has_requests.clear()
            if message.requests:
                yield message

    async def _read(self) -> None:
        address = self.connection.address
        end: LmkvError = Unreachable(f"the coordinator at {address} ended the lookup stream", address=address)
        call = self.connection.cache.LookupStream(self._messages())
        try:
            async for message in call:
                for result in message.results:
                    self._complete(result)
        except grpc.RpcError as error:
            end = self.connection.to_error(error)
        finally:
            self.ended = True
            call.cancel()
            if isinstance(end, Unreachable):
                self._on_failure(self.connection)
            for answer in (*self._pending, *(answer for _, answer in self._requests)):
                if not answer.done():
                    answer.set_exception(end)

    def _complete(self, result: LookupResult) -> None:
        answer = self._pending.popleft()
        if answer.done():
            return
        if result.HasField("error"):
            answer.set_exception(from_status(result.error))
        else:
            answer.set_result(result.response)
