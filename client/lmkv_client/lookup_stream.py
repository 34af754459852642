"""Lookups over one standing call, for who asks often: they cost less than calls of their own."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Self, Unpack

import grpc

from lmkv.errors import LmkvError, Unreachable
from lmkv.rpc import from_status
from lmkv.v1.cache_service_pb2 import LookupRequest, LookupResponse, LookupStreamRequest
from lmkv_client.chunks import Chunks, make_request
from lmkv_client.connection import Connection

MAX_IN_FLIGHT = 256
"""Lookups that may wait for their answers; more wait for their turn."""

Answer = asyncio.Future[LookupResponse]


class LookupStream:
    """A standing call to look prompts up with. It opens when first used, and again after a loss.

    `Coordinator.lookup_stream` makes it.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
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
        """As `Coordinator.lookup`. Several may wait at a time; cancelling one leaves the others alone."""
        request = LookupStreamRequest(request=make_request(LookupRequest, tokens, chunks))
        try:
            async with asyncio.timeout(self._connection.timeout_seconds), self._room:
                if self._line is None or self._line.ended:
                    self._line = _Line(self._connection)
                return await self._line.ask(request)
        except TimeoutError:
            address = self._connection.address
            raise Unreachable(f"no coordinator answers at {address}: no answer in time", address=address) from None


class _Line:
    """One call, from its opening to its end, and who waits for an answer: they come in the order of the questions."""

    def __init__(self, connection: Connection) -> None:
        self.ended = False
        self._connection = connection
        self._questions: asyncio.Queue[tuple[LookupStreamRequest, Answer]] = asyncio.Queue()  # bounded by the room
        self._waiting: deque[Answer] = deque()
        self._reader = asyncio.create_task(self._read(), name="lmkv-lookup-stream")

    async def ask(self, request: LookupStreamRequest) -> LookupResponse:
        answer: Answer = asyncio.get_running_loop().create_future()
        self._questions.put_nowait((request, answer))
        return await answer

    async def aclose(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _requests(self) -> AsyncIterator[LookupStreamRequest]:
        while True:
            request, answer = await self._questions.get()
            if not answer.done():
                self._waiting.append(answer)
                yield request

    async def _read(self) -> None:
        address = self._connection.address
        end: LmkvError = Unreachable(f"the coordinator at {address} ended the stream of lookups", address=address)
        call = self._connection.cache.LookupStream(self._requests())
        try:
            async for response in call:
                answer = self._waiting.popleft()
                if answer.done():  # nobody waits for it any more
                    continue
                if response.HasField("error"):
                    answer.set_exception(from_status(response.error))
                else:
                    answer.set_result(response.response)
        except grpc.RpcError as error:
            end = self._connection.meaning_of(error)
        finally:
            self.ended = True
            call.cancel()
            while not self._questions.empty():
                self._waiting.append(self._questions.get_nowait()[1])
            for answer in self._waiting:
                if not answer.done():
                    answer.set_exception(end)
