"""One `LookupStream` call of a node: lookups take about half the time of unary calls. Used by `fleet.lookup`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import grpc

from lmkv import rpc
from lmkv.errors import LmkvError, Unreachable
from lmkv.rpc.lookup_batches import take_batch
from lmkv.v1.cache_service_pb2 import LookupRequest, LookupResponse, LookupStreamRequest

IDLE_SECONDS = 30.0
"""A call without lookups ends after this time: at the coordinator it takes memory."""


class LookupCall:
    """One call and its pending lookups. Answers arrive in the order of the lookups."""

    def __init__(self, cache: Any, address: str, idle_seconds: float = IDLE_SECONDS) -> None:
        """`cache` is a stub of the coordinator at `address`."""
        self.has_ended = False
        """Whether the call takes no more lookups."""
        self._cache = cache
        self._address = address
        self._idle_seconds = idle_seconds
        self._requests: deque[tuple[LookupRequest, asyncio.Future[LookupResponse]]] = deque()
        self._has_requests = asyncio.Event()
        self._pending: deque[asyncio.Future[LookupResponse]] = deque()
        self._reader = asyncio.create_task(self._read(), name="lmkv-node-lookups")

    async def lookup(self, request: LookupRequest) -> LookupResponse:
        """Raises the coordinator's error, or `Unreachable`. Cancelling it does not affect other lookups."""
        answer: asyncio.Future[LookupResponse] = asyncio.get_running_loop().create_future()
        self._requests.append((request, answer))
        self._has_requests.set()
        return await answer

    def end(self) -> None:
        """Ends the call; its lookups raise `Unreachable`. Idempotent."""
        self.has_ended = True
        self._reader.cancel()

    async def aclose(self) -> None:
        """As `end`, and waits until the call has ended."""
        self.end()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _messages(self) -> AsyncIterator[LookupStreamRequest]:
        """Yields the lookups that wait. gRPC takes the next message after it has sent the previous one."""
        while True:
            try:
                async with asyncio.timeout(self._idle_seconds):
                    await self._has_requests.wait()
            except TimeoutError:
                if self._requests:  # it has just been added
                    continue
                self.has_ended = True
                return
            message = take_batch(self._requests, self._pending)
            if not self._requests:
                self._has_requests.clear()
            if message.requests:
                yield message

    async def _read(self) -> None:
        end: LmkvError = Unreachable(f"the coordinator at {self._address} ended the lookups", address=self._address)
        call: Any = None
        try:
            call = self._cache.LookupStream(self._messages())
            async for message in call:
                for result in message.results:
                    answer = self._pending.popleft()
                    if answer.done():
                        continue
                    if result.HasField("error"):
                        answer.set_exception(rpc.from_status(result.error))
                    else:
                        answer.set_result(result.response)
        except grpc.RpcError as error:
            end = rpc.from_rpc_error(error)
        except grpc.aio.UsageError:  # the channel was closed before
            pass
        finally:
            self.has_ended = True
            if call is not None:
                call.cancel()
            for answer in (*self._pending, *(answer for _, answer in self._requests)):
                if not answer.done():
                    answer.set_exception(end)
                    answer.exception()  # it may be that nothing awaits it any more
