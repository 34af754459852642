"""Lookups of a node over one stream to a coordinator."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeAlias

import grpc
import pytest

from lmkv import rpc
from lmkv.errors import BadChunkKey, Unreachable
from lmkv.internal.v1 import lookup_service_pb2 as pb
from lmkv.internal.v1 import lookup_service_pb2_grpc as pb_grpc
from lmkv.keys import ChunkKey
from lmkv.rpc import lookup_call as calls
from lmkv.rpc.coordinator_client import CoordinatorConnection
from lmkv.rpc.lookup_call import MAX_IN_FLIGHT, LookupCall
from lmkv.runtime.places import requester
from lmkv_server.node.fleet.session import CoordinatorLookup
from tests.waiting import WAIT_SECONDS, until

NodeLookups: TypeAlias = calls.Lookups[pb.LookupRequest, pb.LookupResponse]
NodeLookupCall: TypeAlias = LookupCall[pb.LookupRequest, pb.LookupResponse]

KEY = ChunkKey(bytes(16))
BAD = b"bad"
LATE = b"late"


class Lookups(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # not generic at run time
    """A coordinator that answers lookups in order with their number, an error for `BAD`, and for `LATE` only once
    `released` is set."""

    def __init__(self) -> None:
        self.stream_count = self.open_count = self.unary_count = self.request_count = 0
        self.extra_answer_count = 0
        """Answers on streams to lookups that there were not."""
        self.is_refusing = False
        """Whether lookups on streams are refused."""
        self.ends = asyncio.Event()
        self.released = asyncio.Event()

    def service(self, details: Any) -> Any:
        """See `grpc.GenericRpcHandler`."""
        if details.method.endswith("/LookupStream"):
            return grpc.stream_stream_rpc_method_handler(
                self._stream,
                request_deserializer=pb.LookupStreamRequest.FromString,
                response_serializer=pb.LookupStreamResponse.SerializeToString,
            )
        return grpc.unary_unary_rpc_method_handler(
            self._unary,
            request_deserializer=pb.LookupRequest.FromString,
            response_serializer=pb.LookupResponse.SerializeToString,
        )

    async def _unary(self, request: pb.LookupRequest, context: Any) -> pb.LookupResponse:
        self.unary_count += 1
        return pb.LookupResponse(key_index=self.request_count)

    async def _stream(self, messages: AsyncIterator[pb.LookupStreamRequest], context: Any) -> AsyncIterator[Any]:
        self.stream_count += 1
        self.open_count += 1
        try:
            async for message in messages:
                answer = pb.LookupStreamResponse()
                for request in message.requests:
                    if self.ends.is_set():
                        await context.abort(grpc.StatusCode.UNAVAILABLE, "it ends")
                    if request.chunk_keys == LATE:
                        await self.released.wait()
                    self.request_count += 1
                    result = answer.results.add()
                    if request.chunk_keys == BAD or self.is_refusing:
                        result.error.CopyFrom(rpc.to_status(BadChunkKey("it is bad")))
                    else:
                        result.response.key_index = self.request_count
                for _ in range(self.extra_answer_count):
                    answer.results.add().response.key_index = 1
                yield answer
        finally:
            self.open_count -= 1


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Lookups, CoordinatorConnection]]:
    lookups = Lookups()
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    server.add_generic_rpc_handlers((lookups,))
    address = f"127.0.0.1:{rpc.add_port(server, '127.0.0.1:0')}"
    await server.start()
    connection = CoordinatorConnection(address, WAIT_SECONDS)
    try:
        yield lookups, connection
    finally:
        lookups.released.set()
        await connection.aclose()
        await server.stop(None)


def lookup_call(connection: CoordinatorConnection) -> NodeLookupCall:
    return NodeLookupCall(pb_grpc.LookupServiceStub(connection.channel), pb.LookupStreamRequest, connection.address)


async def test_all_lookups_of_a_node_are_on_one_stream_and_each_gets_its_own_answer() -> None:
    async with serving() as (lookups, connection):
        coordinator = CoordinatorLookup(connection)
        one = await coordinator.lookup("a", [KEY], WAIT_SECONDS)
        others = await asyncio.gather(*(coordinator.lookup("a", [KEY], WAIT_SECONDS) for _ in range(20)))
        assert [found.key_index if found else 0 for found in (one, *others)] == list(range(1, 22))
        assert (lookups.stream_count, lookups.unary_count, coordinator.failure_count) == (1, 0, 0)
        await coordinator.aclose()
        await until(lambda: lookups.open_count == 0)


async def test_requesters_take_turns_in_lookups_beyond_those_in_flight() -> None:
    async with serving() as (coordinator, connection):
        lookups = NodeLookups(pb_grpc.LookupServiceStub(connection.channel), pb.LookupStreamRequest, connection.address)
        answered: list[str] = []

        async def lookup(caller: str, key: bytes) -> None:
            requester.set(caller)
            await lookups.lookup(pb.LookupRequest(chunk_keys=key), WAIT_SECONDS)
            answered.append(caller)

        async with asyncio.TaskGroup() as group:
            for key in (LATE, *[KEY] * (3 * MAX_IN_FLIGHT)):
                group.create_task(lookup("hog", key))
            await until(lambda: coordinator.open_count == 1)
            group.create_task(lookup("honest", KEY))
            await asyncio.sleep(0)
            coordinator.released.set()
        assert answered.index("honest") <= 2 * MAX_IN_FLIGHT, "behind those in flight, and as many as they let begin"
        await lookups.aclose()


async def test_a_refused_lookup_does_not_affect_the_others() -> None:
    async with serving() as (_, connection):
        call = lookup_call(connection)
        bad = asyncio.create_task(call.lookup(pb.LookupRequest(chunk_keys=BAD)))
        good = asyncio.create_task(call.lookup(pb.LookupRequest(chunk_keys=KEY)))
        with pytest.raises(BadChunkKey):
            await bad
        assert (await good).key_index == 2
        assert not call.has_ended
        await call.aclose()


async def test_a_lookup_that_is_cancelled_does_not_take_the_answer_of_the_next() -> None:
    async with serving() as (lookups, connection):
        call = lookup_call(connection)
        late = asyncio.create_task(call.lookup(pb.LookupRequest(chunk_keys=LATE)))
        await until(lambda: lookups.open_count == 1)
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
        lookups.released.set()
        assert (await call.lookup(pb.LookupRequest(chunk_keys=KEY))).key_index in (1, 2)  # the late one may be unsent
        await call.aclose()


async def test_a_late_answer_retires_the_stream_and_the_next_lookup_opens_another() -> None:
    async with serving() as (lookups, connection):
        coordinator = CoordinatorLookup(connection, unary_seconds=0.0)
        call = lookup_call(connection)
        coordinator._on_stream._call = call
        patient = asyncio.create_task(call.lookup(pb.LookupRequest(chunk_keys=LATE)))
        await until(lambda: lookups.open_count == 1)
        assert await coordinator.lookup("a", [KEY], 0.01) is None
        assert coordinator.silence
        assert call.has_ended
        assert await coordinator.lookup("a", [KEY], WAIT_SECONDS)
        assert not coordinator.silence
        assert (lookups.stream_count, coordinator.failure_count) == (2, 1)
        assert not call.is_over
        lookups.released.set()
        assert (await patient).key_index, "a lookup that has more time still gets its answer"
        await until(lambda: call.is_over)
        await coordinator.aclose()


async def test_a_retired_stream_ends_with_its_lookups() -> None:
    async with serving() as (lookups, connection):
        coordinator = CoordinatorLookup(connection, unary_seconds=0.0)
        call = lookup_call(connection)
        coordinator._on_stream._call = call
        waiting = [asyncio.create_task(call.lookup(pb.LookupRequest(chunk_keys=LATE))) for _ in range(2)]
        await until(lambda: lookups.open_count == 1)
        assert await coordinator.lookup("a", [KEY], 0.01) is None
        assert await coordinator.lookup("a", [KEY], WAIT_SECONDS)
        waiting[0].cancel()
        await asyncio.gather(waiting[0], return_exceptions=True)
        assert not call.is_over
        await coordinator.aclose()
        assert call.is_over
        with pytest.raises(Unreachable):
            await waiting[1]


async def test_lookups_on_a_stream_that_breaks_fail_and_the_next_opens_another() -> None:
    async with serving() as (lookups, connection):
        coordinator = CoordinatorLookup(connection, unary_seconds=0.0)
        assert await coordinator.lookup("a", [KEY], WAIT_SECONDS)
        lookups.ends.set()
        assert await coordinator.lookup("a", [KEY], WAIT_SECONDS) is None
        assert coordinator.silence
        lookups.ends.clear()
        assert await coordinator.lookup("a", [KEY], WAIT_SECONDS)
        assert lookups.stream_count == 2
        await coordinator.aclose()


async def test_after_a_failure_lookups_are_calls_of_their_own_for_a_while() -> None:
    async with serving() as (lookups, connection):
        coordinator = CoordinatorLookup(connection, unary_seconds=3600.0)
        lookups.ends.set()
        assert await coordinator.lookup("a", [KEY], WAIT_SECONDS) is None
        lookups.ends.clear()
        for _ in range(3):
            assert await coordinator.lookup("a", [KEY], WAIT_SECONDS)
        assert (lookups.stream_count, lookups.unary_count, coordinator.failure_count) == (1, 3, 1)
        await coordinator.aclose()


async def test_lookups_do_not_wait_behind_refusals() -> None:
    async with serving() as (lookups, connection):
        coordinator = CoordinatorLookup(connection, unary_seconds=3600.0)
        lookups.is_refusing = True
        assert await coordinator.lookup("a", [KEY], WAIT_SECONDS) is None
        assert not coordinator.silence
        assert await coordinator.lookup("a", [KEY], WAIT_SECONDS)
        assert (lookups.stream_count, lookups.unary_count) == (1, 1)
        await coordinator.aclose()


async def test_a_stream_without_lookups_ends_and_the_next_lookup_opens_another() -> None:
    async with serving() as (lookups, connection):
        coordinator = CoordinatorLookup(connection, idle_seconds=0.01)
        assert await coordinator.lookup("a", [KEY], WAIT_SECONDS)
        await until(lambda: lookups.stream_count > 0 and lookups.open_count == 0)
        assert await coordinator.lookup("a", [KEY], WAIT_SECONDS)
        assert lookups.stream_count == 2
        assert not coordinator.silence
        await coordinator.aclose()


class _Late(asyncio.Event):
    """Lookups that come when the wait for them has just been given up."""

    def __init__(self, lookup: Callable[[], object]) -> None:
        super().__init__()
        self._lookup = lookup

    async def wait(self) -> Literal[True]:
        try:
            return await super().wait()
        except asyncio.CancelledError:
            self._lookup()
            raise


async def test_a_lookup_that_comes_at_the_moment_of_the_idle_timeout_is_answered() -> None:
    lookups: list[asyncio.Future[pb.LookupResponse]] = []
    async with serving() as (_, connection):
        stub = pb_grpc.LookupServiceStub(connection.channel)
        call = NodeLookupCall(stub, pb.LookupStreamRequest, connection.address, idle_seconds=0.01)

        def lookup() -> None:
            if not lookups:
                answer: asyncio.Future[pb.LookupResponse] = asyncio.get_running_loop().create_future()
                call._requests.append((pb.LookupRequest(chunk_keys=KEY), answer))
                lookups.append(answer)
                call._has_requests.set()

        call._has_requests = _Late(lookup)
        await until(lambda: lookups)
        async with asyncio.timeout(WAIT_SECONDS):
            assert (await lookups[0]).key_index == 1
        await call.aclose()


async def test_lookups_that_wait_end_with_the_stream() -> None:
    async with serving() as (lookups, connection):
        call = lookup_call(connection)
        waiting = [asyncio.create_task(call.lookup(pb.LookupRequest(chunk_keys=LATE))) for _ in range(3)]
        await until(lambda: lookups.open_count == 1)
        await call.aclose()
        for one in waiting:
            with pytest.raises(Unreachable):
                await one


async def test_lookups_that_are_not_sent_yet_end_with_the_call() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts no connection
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        connection = CoordinatorConnection(address, WAIT_SECONDS)
        async with connection.channel:
            call = lookup_call(connection)
            lookups = [asyncio.create_task(call.lookup(pb.LookupRequest(chunk_keys=KEY)))]
            await until(lambda: call._pending)  # gRPC takes no more before it has sent this
            lookups += [asyncio.create_task(call.lookup(pb.LookupRequest(chunk_keys=KEY))) for _ in range(3)]
            await until(lambda: len(call._requests) == 3)
            await call.aclose()
            async with asyncio.timeout(WAIT_SECONDS):
                ended = await asyncio.gather(*lookups, return_exceptions=True)
            assert [type(error) for error in ended] == [Unreachable] * 4


async def test_lookups_end_with_a_call_that_is_ended_before_it_begins() -> None:
    async with serving() as (_, connection):
        call = lookup_call(connection)
        lookup = call.lookup(pb.LookupRequest(chunk_keys=KEY))
        answer = lookup.send(None)  # waits, before any other task has run
        assert answer is not None
        await call.aclose()
        with pytest.raises(Unreachable):
            await answer
        lookup.close()


async def test_a_coordinator_that_answers_what_it_was_not_asked_ends_the_call() -> None:
    async with serving() as (lookups, connection):
        lookups.extra_answer_count = 1
        call = lookup_call(connection)
        assert await call.lookup(pb.LookupRequest(chunk_keys=KEY))
        await until(lambda: call.has_ended)
        assert "more answers" in str(await call._reader)
