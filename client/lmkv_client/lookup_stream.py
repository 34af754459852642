"""Lookups over one standing call, for who asks often: they cost less than calls of their own.

What is asked while a message is on its way goes out together with the next one, so that many in flight cost little more
than a few.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Self, Unpack

import grpc

from lmkv.errors import LmkvError, Unreachable
from lmkv.rpc.endpoints import MAX_MESSAGE_BYTES, from_status
from lmkv.v1.cache_service_pb2 import LookupRequest, LookupResponse, LookupResult, LookupStreamRequest
from lmkv_client.chunks import Chunks, make_request
from lmkv_client.connection import Connection
from lmkv_client.connections import Connections

MAX_IN_FLIGHT = 256
"""Lookups that may wait for their answers; more wait for their turn."""

MERGED_BYTES = MAX_MESSAGE_BYTES // 2
"""Questions are merged into messages of at most this size."""

Answer = asyncio.Future[LookupResponse]


class LookupStream:
    """A standing call to look prompts up with. It opens when first used, and after a loss again where somebody answers.

    `Coordinator.lookup_stream` makes it.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._room = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._line: _Line | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Ends the call; lookups still waiting raise `Unreachable`. Repeating it is safe."""
        line, self._line = self._line, None
        if line is not None:
            await line.aclose()

    async def lookup(self, tokens: Sequence[int] = (), **chunks: Unpack[Chunks]) -> LookupResponse:
        """As `Coordinator.lookup`. Several may wait at a time; cancelling one leaves the others alone.

        A question that is longer than a message may be is refused here, before it is sent: a coordinator would end the
        call, and with it the lookups of all who share the stream.
        """
        request = make_request(LookupRequest, tokens, chunks)
        connection = self._connections.current
        try:
            async with asyncio.timeout(connection.timeout_seconds), self._room:
                connection = self._connections.current
                line = self._line
                if line is None or line.ended or line.connection is not connection:
                    ended, line = line, _Line(connection, self._connections.failed)
                    self._line = line
                    if ended is not None:
                        await ended.aclose()
                return await line.ask(request)
        except TimeoutError:
            self._connections.failed(connection)
            address = connection.address
            raise Unreachable(f"no coordinator answers at {address}: no answer in time", address=address) from None


class _Line:
    """One call, from its opening to its end, and who waits for an answer: they come in the order of the questions."""

    def __init__(self, connection: Connection, on_loss: Callable[[Connection], None]) -> None:
        self.ended = False
        self.connection = connection
        self._on_loss = on_loss
        self._questions: deque[tuple[LookupRequest, Answer]] = deque()  # bounded by the room
        self._asked = asyncio.Event()
        self._waiting: deque[Answer] = deque()
        self._reader = asyncio.create_task(self._read(), name="lmkv-lookup-stream")

    async def ask(self, request: LookupRequest) -> LookupResponse:
        answer: Answer = asyncio.get_running_loop().create_future()
        self._questions.append((request, answer))
        self._asked.set()
        return await answer

    async def aclose(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _messages(self) -> AsyncIterator[LookupStreamRequest]:
        """Each has all that is asked by then: gRPC takes the next one when it has sent the last."""
        while True:
            await self._asked.wait()
            message, size_bytes = LookupStreamRequest(), 0
            while self._questions:
                request, answer = self._questions[0]
                if message.requests and size_bytes + request.ByteSize() > MERGED_BYTES:
                    break
                self._questions.popleft()
                if answer.done():  # nobody waits for it any more
                    continue
                message.requests.append(request)
                size_bytes += request.ByteSize()
                self._waiting.append(answer)
            if not self._questions:
                self._asked.clear()
            if message.requests:
                yield message

    async def _read(self) -> None:
        address = self.connection.address
        end: LmkvError = Unreachable(f"the coordinator at {address} ended the stream of lookups", address=address)
        call = self.connection.cache.LookupStream(self._messages())
        try:
            async for message in call:
                for result in message.results:
                    self._answered(result)
        except grpc.RpcError as error:
            end = self.connection.meaning_of(error)
        finally:
            self.ended = True
            call.cancel()
            if isinstance(end, Unreachable):
                self._on_loss(self.connection)
            for answer in (*self._waiting, *(answer for _, answer in self._questions)):
                if not answer.done():
                    answer.set_exception(end)

    def _answered(self, result: LookupResult) -> None:
        answer = self._waiting.popleft()
        if answer.done():
            return
        if result.HasField("error"):
            answer.set_exception(from_status(result.error))
        else:
            answer.set_result(result.response)
