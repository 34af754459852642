"""Lookups over `LookupStream` calls, for `coordinator_client` and nodes: they take half the time of unary calls.

`lmkv.v1.CacheService` has one, and `lmkv.internal.v1.LookupService` one for nodes, whose messages have the same form.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from itertools import filterfalse
from operator import attrgetter
from typing import Any, Generic, TypeVar

import grpc

from lmkv.errors import LmkvError, Unreachable
from lmkv.internal.v1 import lookup_service_pb2 as internal_pb
from lmkv.rpc.endpoints import MAX_MESSAGE_BYTES
from lmkv.rpc.error_status import from_rpc_error, from_status
from lmkv.runtime.places import requester
from lmkv.runtime.turns import Slots
from lmkv.v1 import cache_service_pb2 as pb

BATCH_BYTES = MAX_MESSAGE_BYTES // 2
"""Maximum size of a message of several lookups."""
MAX_IN_FLIGHT = 256
"""Maximum number of lookups in flight at one coordinator; further lookups wait, and requesters take turns."""

Request = TypeVar("Request", pb.LookupRequest, internal_pb.LookupRequest)
Response = TypeVar("Response", pb.LookupResponse, internal_pb.LookupResponse)

NO_ANSWER = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")
"""gRPC codes that mean that the coordinator did not respond; the last one, that it stopped during the call."""


def unanswered(address: str, error: LmkvError) -> LmkvError:
    """The error of a call, with address and cause in it if the coordinator at `address` did not respond."""
    if error.metadata.get("grpc_code") in NO_ANSWER:
        return Unreachable(f"no coordinator responds at {address}: {error}", address=address, cause=str(error))
    return error


class Lookups(Generic[Request, Response]):
    """Lookups at one coordinator, over a call that is opened at the first one, and again after a failure."""

    def __init__(
        self,
        stub: Any,
        message: type[pb.LookupStreamRequest] | type[internal_pb.LookupStreamRequest],
        address: str,
        *,
        idle_seconds: float | None = None,
    ) -> None:
        """As `LookupCall`."""
        self.address = address
        self._stub = stub
        self._message = message
        self._idle_seconds = idle_seconds
        self._call: LookupCall[Request, Response] | None = None
        self._retired: list[LookupCall[Request, Response]] = []
        """Calls that take no more lookups and may still answer some."""
        self._in_flight = Slots(MAX_IN_FLIGHT)

    @property
    def is_open(self) -> bool:
        """Whether a call takes lookups."""
        return self._call is not None and not self._call.has_ended

    async def lookup(self, request: Request, timeout_seconds: float) -> Response:
        """Raises the coordinator's error, or `Unreachable`. Cancelling it does not affect other lookups."""
        call = None
        try:
            async with asyncio.timeout(timeout_seconds), self._in_flight.take(requester.get()):
                if self._call is None or self._call.has_ended:
                    if self._call is not None:
                        self._retired.append(self._call)
                    self._retired = list(filterfalse(attrgetter("is_over"), self._retired))
                    self._call = LookupCall(self._stub, self._message, self.address, idle_seconds=self._idle_seconds)
                call = self._call
                return await call.lookup(request)
        except TimeoutError:
            if call is not None:
                call.retire()  # its next answers may be late, too: for lookups that have no more time
            raise Unreachable(
                f"no coordinator responds at {self.address}: deadline exceeded", address=self.address
            ) from None

    async def aclose(self) -> None:
        """Ends the calls; lookups in flight raise `Unreachable`. Idempotent."""
        calls = [*self._retired, *([self._call] if self._call else [])]
        await asyncio.gather(*(call.aclose() for call in calls))


class LookupCall(Generic[Request, Response]):
    """One call and its pending lookups. Answers arrive in the order of the lookups.

    Lookups that wait while a message is being sent go into the next one. The caller bounds their number.
    """

    def __init__(
        self,
        stub: Any,
        message: type[pb.LookupStreamRequest] | type[internal_pb.LookupStreamRequest],
        address: str,
        *,
        idle_seconds: float | None = None,
    ) -> None:
        """`stub` is one of the coordinator at `address`, and `message` what its stream takes.

        Without lookups the call ends after `idle_seconds`: at the coordinator it takes memory.
        """
        self.address = address
        self.has_ended = False
        """Whether the call takes no more lookups."""
        self._stub = stub
        self._message = message
        self._idle_seconds = idle_seconds
        self._requests: deque[tuple[Request, asyncio.Future[Response]]] = deque()
        self._has_requests = asyncio.Event()
        self._pending: deque[asyncio.Future[Response]] = deque()
        self._waiting_count = 0
        self._is_retired = False
        self._reader = asyncio.create_task(self._read(), name="lmkv-lookups")
        # A callback, because a task that is cancelled before it runs would not end the lookups.
        self._reader.add_done_callback(self._end_lookups)

    async def lookup(self, request: Request) -> Response:
        """Raises the coordinator's error, or `Unreachable`. Cancelling it does not affect other lookups."""
        answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._requests.append((request, answer))
        self._has_requests.set()
        self._waiting_count += 1
        try:
            return await answer
        finally:
            self._waiting_count -= 1
            self._end_if_idle()

    @property
    def is_over(self) -> bool:
        """Whether the call has ended, and every lookup with it."""
        return self._reader.done()

    def retire(self) -> None:
        """Takes no more lookups, and ends once no lookup waits any more. Idempotent."""
        self.has_ended = self._is_retired = True
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self._is_retired and not self._waiting_count:
            self.end()

    def end(self) -> None:
        """Ends the call; its lookups raise `Unreachable`. Idempotent."""
        self.has_ended = True
        self._reader.cancel()

    async def aclose(self) -> None:
        """As `end`, and waits until the call has ended."""
        self.end()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _messages(self) -> AsyncIterator[Any]:
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
            if self._reader.done():
                return
            message = self._message()
            take_batch(self._requests, self._pending, message)
            if not self._requests:
                self._has_requests.clear()
            if message.requests:
                yield message

    async def _read(self) -> LmkvError | None:
        """Passes the answers on. Returns the error that has ended the call, if there is one."""
        call: Any = None
        try:
            call = self._stub.LookupStream(self._messages())
            async for message in call:
                for result in message.results:
                    if not self._pending:
                        return Unreachable(
                            f"the coordinator at {self.address} sent more answers than it received lookups",
                            address=self.address,
                        )
                    answer = self._pending.popleft()
                    if answer.done():
                        continue
                    if result.HasField("error"):
                        answer.set_exception(from_status(result.error))
                    else:
                        answer.set_result(result.response)
        except grpc.RpcError as error:
            return unanswered(self.address, from_rpc_error(error))
        except grpc.aio.UsageError:  # the channel was closed before
            pass
        finally:
            if call is not None:
                call.cancel()
        return None

    def _end_lookups(self, reader: asyncio.Task[LmkvError | None]) -> None:
        end = None if reader.cancelled() or reader.exception() else reader.result()
        end = end or Unreachable(f"the coordinator at {self.address} ended the lookups", address=self.address)
        self.has_ended = True
        self._has_requests.set()  # gRPC ends the sender of a call that is cancelled, but not of one that has failed
        for answer in (*self._pending, *(answer for _, answer in self._requests)):
            if not answer.done():
                answer.set_exception(end)
                answer.exception()  # it may be that nothing awaits it any more


def take_batch(
    waiting: deque[tuple[Request, asyncio.Future[Response]]], pending: deque[asyncio.Future[Response]], message: Any
) -> None:
    """Moves lookups from `waiting` into an empty message of a stream, and their answers to `pending`, in order.

    Lookups whose answer is done are dropped: their caller was cancelled. The message may be empty.
    """
    size_bytes = 0
    while waiting:
        request, answer = waiting[0]
        if message.requests and size_bytes + request.ByteSize() > BATCH_BYTES:
            break
        waiting.popleft()
        if not answer.done():
            message.requests.append(request)
            size_bytes += request.ByteSize()
            pending.append(answer)
