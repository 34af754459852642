"""Lookups over one stream, which cost less than unary calls. For clients that look up often.

Lookups that arrive while a message is being sent are batched into the next message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Self, Unpack

from lmkv.errors import LmkvError, Unreachable
from lmkv.rpc.lookup_call import LookupCall
from lmkv.v1.cache_service_pb2 import LookupRequest, LookupResponse, LookupStreamRequest
from lmkv_client.chunks import Chunks, make_request
from lmkv_client.connection import CoordinatorConnection, CoordinatorConnections

MAX_IN_FLIGHT = 256
"""Maximum number of lookups in flight; further ones wait."""


class LookupStream:
    """Looks prompts up over a stream. Opens it at the first lookup, and again after a failure, with failover.

    Created by `Coordinator.lookup_stream`.
    """

    def __init__(self, connections: CoordinatorConnections) -> None:
        self._connections = connections
        self._in_flight = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._call: LookupCall[LookupRequest, LookupResponse] | None = None

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
                if call is None or call.has_ended or call.address != connection.address:
                    ended, call = call, self._open(connection)
                    self._call = call
                    if ended is not None:
                        await ended.aclose()
                return await call.lookup(request)
        except TimeoutError:
            self._connections.report_failure(connection)
            address = connection.address
            raise Unreachable(f"no coordinator responds at {address}: deadline exceeded", address=address) from None

    def _open(self, connection: CoordinatorConnection) -> LookupCall[LookupRequest, LookupResponse]:
        def report(error: LmkvError) -> None:
            if isinstance(error, Unreachable):
                self._connections.report_failure(connection)

        return LookupCall(
            connection.cache, LookupStreamRequest, connection.address, to_error=connection.to_error, on_failure=report
        )
