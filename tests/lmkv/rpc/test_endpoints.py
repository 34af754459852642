"""Names that the system itself resolves, without a network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # the stubs lack it
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from lmkv import rpc
from lmkv.errors import BadTokens, Full, LmkvError, NoFreeExtents, Unreachable
from lmkv.internal.v1.report_service_pb2 import ReportRequest, ReportResponse
from lmkv.internal.v1.report_service_pb2_grpc import (
    ReportServiceServicer,
    ReportServiceStub,
    add_ReportServiceServicer_to_server,
)
from lmkv.rpc.endpoints import (
    CHANNEL_OPTIONS,
    MAX_CALLS_PER_CONNECTION,
    MAX_MESSAGE_BYTES,
    SERVER_OPTIONS,
    answer_of,
    make_server,
    open_channel,
    resolve,
)
from lmkv.rpc.error_status import DOMAIN, from_rpc_error, from_status, to_status
from lmkv.rpc.messages import by_keys
from lmkv.v1.cache_service_pb2 import LookupRequest, LookupResponse, WatchRequest, WatchResponse
from lmkv.v1.cache_service_pb2_grpc import CacheServiceServicer, CacheServiceStub, add_CacheServiceServicer_to_server
from tests.chaos.link import Link
from tests.support.native_memory import IS_COUNTED, allocated_bytes
from tests.waiting import WAIT_SECONDS, until

SERVICES = ("lmkv.v1.CacheService", "lmkv.internal.v1.ReportService")
DEADLINE = 40.0
HALF_OPEN_SECONDS = 40.0
"""Less than the minute that gRPC waits for a ping by itself."""


class Cache(CacheServiceServicer):
    """Answers a lookup, or raises what the test has put into `failure`."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.abort = False
        self.delay_seconds = 0.0

    async def Lookup(self, request: LookupRequest, context: Any) -> LookupResponse:  # noqa: N802
        await asyncio.sleep(self.delay_seconds)
        if self.abort:
            await context.abort(grpc.StatusCode.DATA_LOSS, "its own words")
        if self.failure:
            raise self.failure
        return LookupResponse(revision=len(b"".join(request.prompt.keys.chunk_keys)))

    async def Watch(self, request: WatchRequest, context: Any) -> AsyncIterator[WatchResponse]:  # noqa: N802
        yield WatchResponse(revision=1)
        if self.failure:
            raise self.failure
        yield WatchResponse(revision=2)


class Reports(ReportServiceServicer):
    """Acknowledges reports; refuses one without an instance."""

    async def Report(  # noqa: N802
        self, requests: AsyncIterator[ReportRequest], context: Any
    ) -> AsyncIterator[ReportResponse]:
        async for request in requests:
            if not request.instance_id:
                raise BadTokens("a report without instance", sequence=request.sequence)
            yield ReportResponse(acked_sequence=request.sequence)


@asynccontextmanager
async def serving(cache: Cache) -> AsyncIterator[str]:
    """A real server on a free port of the loopback."""
    server = await make_server(SERVICES)
    add_CacheServiceServicer_to_server(cache, server)
    add_ReportServiceServicer_to_server(Reports(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@pytest.fixture
async def cache() -> Cache:
    return Cache()  # type: ignore[abstract]  # two RPCs are enough here


@pytest.fixture
async def address(cache: Cache) -> AsyncIterator[str]:
    async with serving(cache) as address:
        yield address


@pytest.fixture
async def stub(address: str) -> AsyncIterator[Any]:
    async with open_channel(address) as channel:
        yield CacheServiceStub(channel)


async def failure_of(call: Callable[[], Awaitable[object]]) -> tuple[grpc.aio.AioRpcError, LmkvError]:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call()
    return raised.value, from_rpc_error(raised.value)


@pytest.mark.parametrize("reason", sorted(LmkvError.by_reason))
async def test_every_error_crosses_the_wire_whole(cache: Cache, stub: Any, reason: str) -> None:
    cls = LmkvError.by_reason[reason]
    cache.failure = cls("tokens end at 100, ä, 7 came", limit=100, retry_seconds=2.5)
    rpc_error, error = await failure_of(lambda: stub.Lookup(LookupRequest(), timeout=DEADLINE))
    assert type(error) is cls
    assert str(error) == "tokens end at 100, ä, 7 came"
    assert error.metadata == {"limit": "100", "retry_seconds": "2.5"}
    assert rpc_error.code().name == cls.code


async def test_a_status_carries_one_error_info_of_our_domain(cache: Cache, stub: Any) -> None:
    cache.failure = BadTokens("no", limit=1)
    rpc_error, _ = await failure_of(lambda: stub.Lookup(LookupRequest(), timeout=DEADLINE))
    status = rpc_status.from_call(rpc_error)  # type: ignore[arg-type]
    assert status is not None
    info = error_details_pb2.ErrorInfo()
    assert [detail.Unpack(info) for detail in status.details] == [True]
    assert (info.domain, info.reason, dict(info.metadata)) == (DOMAIN, "BAD_TOKENS", {"limit": "1"})


@pytest.mark.parametrize(
    ("metadata", "seconds"), [({}, 1.0), ({"retry_seconds": 0.25}, 0.25), ({"retry_seconds": 3}, 3)]
)
def test_a_full_node_says_when_to_come_back(metadata: dict[str, Any], seconds: float) -> None:
    status = to_status(NoFreeExtents("full", **metadata))
    retry = error_details_pb2.RetryInfo()
    assert status.details[1].Unpack(retry)
    assert retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9 == seconds
    assert isinstance(from_status(status), Full)


async def test_an_error_ends_a_stream_after_what_came_before(cache: Cache, stub: Any) -> None:
    cache.failure = BadTokens("enough", limit=1)
    call = stub.Watch(WatchRequest(), timeout=DEADLINE)
    assert (await call.read()).revision == 1
    _, error = await failure_of(call.read)
    assert type(error) is BadTokens


async def test_an_error_ends_a_stream_both_ways(address: str) -> None:
    def reports() -> Iterator[ReportRequest]:
        yield ReportRequest(instance_id="a", sequence=1)
        yield ReportRequest(sequence=2)

    async with open_channel(address) as channel:
        call: Any = ReportServiceStub(channel).Report(reports(), timeout=DEADLINE)
        assert (await call.read()).acked_sequence == 1
        _, error = await failure_of(call.read)
    assert error.metadata == {"sequence": "2"}


async def test_an_unexpected_failure_is_internal_and_the_server_continues(
    cache: Cache, stub: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cache.failure = ZeroDivisionError("oops")
    rpc_error, error = await failure_of(lambda: stub.Lookup(LookupRequest(), timeout=DEADLINE))
    assert rpc_error.code() is grpc.StatusCode.INTERNAL
    assert type(error) is LmkvError
    assert "ZeroDivisionError" in str(error)
    assert "Traceback" in caplog.text
    assert "/lmkv.v1.CacheService/Lookup failed unexpectedly" in caplog.text
    cache.failure = None
    assert (await stub.Lookup(LookupRequest(prompt=by_keys([b"abc"])), timeout=DEADLINE)).revision == 3


async def test_an_unexpected_failure_ends_a_stream_as_internal(cache: Cache, stub: Any) -> None:
    cache.failure = ZeroDivisionError("oops")
    call = stub.Watch(WatchRequest(), timeout=DEADLINE)
    await call.read()
    rpc_error, _ = await failure_of(call.read)
    assert rpc_error.code() is grpc.StatusCode.INTERNAL


async def test_a_handler_may_abort_in_its_own_words(cache: Cache, stub: Any) -> None:
    cache.abort = True
    rpc_error, error = await failure_of(lambda: stub.Lookup(LookupRequest(), timeout=DEADLINE))
    assert rpc_error.code() is grpc.StatusCode.DATA_LOSS
    assert str(error) == "DATA_LOSS: its own words"


async def test_a_message_over_the_limit_is_refused_and_the_server_continues(address: str) -> None:
    async with grpc.aio.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
        stub: Any = CacheServiceStub(channel)
        too_large = LookupRequest(prompt=by_keys([bytes(MAX_MESSAGE_BYTES)]))
        rpc_error, _ = await failure_of(lambda: stub.Lookup(too_large, timeout=DEADLINE))
        assert rpc_error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.Lookup(LookupRequest(prompt=by_keys([bytes(1000)])), timeout=DEADLINE)).revision == 1000


async def test_our_own_channel_does_not_even_send_it(stub: Any) -> None:
    too_large = LookupRequest(prompt=by_keys([bytes(MAX_MESSAGE_BYTES)]))
    rpc_error, error = await failure_of(lambda: stub.Lookup(too_large, timeout=DEADLINE))
    assert rpc_error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert type(error) is LmkvError


async def test_calls_of_one_connection_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    count, going = 0, asyncio.Event()

    async def wait(request: LookupRequest, context: Any) -> LookupResponse:
        nonlocal count
        count += 1
        await going.wait()
        return LookupResponse()

    monkeypatch.setattr(Cache, "Lookup", lambda _self, request, context: wait(request, context))
    async with serving(Cache()) as address, open_channel(address) as channel:  # type: ignore[abstract]
        lookups: Any = CacheServiceStub(channel)
        health: Any = health_pb2_grpc.HealthStub(channel)
        await health.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE)  # the client has learned the limit
        calls = [asyncio.ensure_future(lookups.Lookup(LookupRequest())) for _ in range(MAX_CALLS_PER_CONNECTION)]
        await until(lambda: count == MAX_CALLS_PER_CONNECTION)
        with pytest.raises(grpc.aio.AioRpcError, match="Deadline Exceeded"):
            await lookups.Lookup(LookupRequest(), timeout=0.5)
        assert count == MAX_CALLS_PER_CONNECTION, "further calls wait in the client"
        going.set()
        await asyncio.gather(*calls)
        assert (await lookups.Lookup(LookupRequest(), timeout=DEADLINE)).revision == 0


async def test_a_method_that_is_not_served_is_unimplemented(stub: Any, address: str) -> None:
    channel: Any
    async with open_channel(address) as channel:
        unknown = channel.unary_unary("/lmkv.v1.CacheService/Guess")
        rpc_error, _ = await failure_of(lambda: unknown(b"", timeout=DEADLINE))
        assert rpc_error.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_call_on_a_closed_channel_is_unreachable(address: str) -> None:
    channel = open_channel(address)
    lookup: Any = CacheServiceStub(channel).Lookup
    await channel.close(None)
    with pytest.raises(Unreachable, match="closed"):
        await rpc.call(lookup, "CacheService/Lookup", address, LookupRequest(), 5.0)


async def test_a_missing_server_is_unreachable() -> None:
    async with open_channel("127.0.0.1:1") as channel:
        stub: Any = CacheServiceStub(channel)
        _, error = await failure_of(lambda: stub.Lookup(LookupRequest(), timeout=DEADLINE))
    assert type(error) is Unreachable
    assert error.metadata == {"grpc_code": "UNAVAILABLE"}


@pytest.mark.timeout(600)
async def test_a_connection_whose_far_end_is_lost_is_given_up_for_a_new_one(address: str) -> None:
    async with Link("caller>server") as link:
        door = await link.open_door(int(address.rpartition(":")[2]))
        async with open_channel(door) as channel:
            stub: Any = CacheServiceStub(channel)
            await stub.Lookup(LookupRequest(), timeout=DEADLINE)
            link.half_open()
            async with asyncio.timeout(HALF_OPEN_SECONDS):
                while True:
                    with suppress(grpc.RpcError):
                        await stub.Lookup(LookupRequest(), timeout=1, wait_for_ready=True)
                        return


async def test_no_answer_in_time_is_unreachable(cache: Cache, stub: Any) -> None:
    cache.delay_seconds = DEADLINE
    _, error = await failure_of(lambda: stub.Lookup(LookupRequest(), timeout=0.05))
    assert type(error) is Unreachable
    assert error.metadata == {"grpc_code": "DEADLINE_EXCEEDED"}


def test_a_reason_of_a_later_version_is_still_an_error() -> None:
    class Later(LmkvError):
        """Known here only while the status is made."""

        code = "ABORTED"
        reason = "LATER"

    status = to_status(Later("from the future", year=2040))
    del LmkvError.by_reason["LATER"]
    error = from_status(status)
    assert type(error) is LmkvError
    assert str(error) == "from the future"


async def test_a_second_server_on_the_port_fails(address: str) -> None:
    server = await make_server(())
    with pytest.raises(RuntimeError):
        server.add_insecure_port(address)
    await server.stop(None)


async def test_health_answers_for_each_service(address: str) -> None:
    async with open_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for service in ("", *SERVICES):
            response = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=DEADLINE)
            assert response.status == health_pb2.HealthCheckResponse.SERVING
        rpc_error, _ = await failure_of(
            lambda: stub.Check(health_pb2.HealthCheckRequest(service="lmkv.v1.Nothing"), timeout=DEADLINE)
        )
        assert rpc_error.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_the_services(address: str) -> None:
    async with open_channel(address) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        async for response in stub.ServerReflectionInfo(iter([request]), timeout=DEADLINE):
            names = {service.name for service in response.list_services_response.service}
    assert names == {*SERVICES, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


async def test_reflection_describes_the_messages(address: str) -> None:
    async with open_channel(address) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(file_containing_symbol="lmkv.v1.CacheService")
        async for response in stub.ServerReflectionInfo(iter([request]), timeout=DEADLINE):
            assert b"LookupRequest" in response.file_descriptor_response.file_descriptor_proto[0]


async def test_a_server_listens_on_a_unix_socket_too(cache: Cache, short_folder: Path) -> None:
    server = await make_server(SERVICES)
    add_CacheServiceServicer_to_server(cache, server)
    server.add_insecure_port(f"unix:{short_folder}/s")
    await server.start()
    try:
        async with open_channel(f"unix:{short_folder}/s") as channel:
            stub: Any = CacheServiceStub(channel)
            assert (await stub.Lookup(LookupRequest(prompt=by_keys([b"a"])), timeout=DEADLINE)).revision == 1
    finally:
        await server.stop(None)


@pytest.mark.parametrize("name", dict([*CHANNEL_OPTIONS, *SERVER_OPTIONS]))
def test_grpc_knows_the_option(name: str) -> None:
    library = Path(cygrpc.__file__).read_bytes()
    assert name.encode() + b"\0" in library, "gRPC passes over options that it does not know without a word"


NAME = "lmkv.v1.CacheService/Lookup"
CALLS = 500
LOST_BYTES = 900
"""What gRPC loses of each, if the task that waits for its end is cancelled."""


class HangingCache(CacheServiceServicer):
    """Answers a lookup of keys at once, and one of none too late."""

    def __init__(self) -> None:
        self.begun_count = self.running_count = 0

    async def Lookup(self, request: LookupRequest, context: Any) -> LookupResponse:  # noqa: N802
        self.begun_count += 1
        self.running_count += 1
        try:
            await asyncio.sleep(0 if request.prompt.keys.chunk_keys else WAIT_SECONDS)
        finally:
            self.running_count -= 1
        return LookupResponse(revision=len(b"".join(request.prompt.keys.chunk_keys)))


@pytest.fixture
async def hanging_cache() -> HangingCache:
    return HangingCache()  # type: ignore[abstract]  # one RPC is enough here


@pytest.fixture
async def hanging_address(hanging_cache: HangingCache) -> AsyncIterator[str]:
    server = await make_server(("lmkv.v1.CacheService",))
    add_CacheServiceServicer_to_server(hanging_cache, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@pytest.fixture
async def hanging_stub(hanging_address: str) -> AsyncIterator[Any]:
    async with open_channel(hanging_address) as channel:
        yield CacheServiceStub(channel)


async def cancel_calls(hanging_stub: Any, hanging_cache: HangingCache, count: int) -> None:
    """Has the server begin each call, cancels it, and waits until the server has noticed."""
    for _ in range(count):
        begun_count = hanging_cache.begun_count
        call = asyncio.create_task(rpc.call(hanging_stub.Lookup, NAME, "server", LookupRequest(), WAIT_SECONDS))
        await until(lambda before=begun_count: hanging_cache.begun_count > before)  # type: ignore[misc]
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    await until(lambda: hanging_cache.running_count == 0)


@pytest.mark.skipif(not IS_COUNTED, reason="the C library does not count what it has allocated")
async def test_calls_that_are_cancelled_keep_no_memory(hanging_stub: Any, hanging_cache: HangingCache) -> None:
    await cancel_calls(hanging_stub, hanging_cache, CALLS)  # pools and tables fill
    before = allocated_bytes()
    await cancel_calls(hanging_stub, hanging_cache, CALLS)
    assert allocated_bytes() - before < CALLS * LOST_BYTES / 2


async def test_a_cancelled_call_ends_at_the_server(hanging_stub: Any, hanging_cache: HangingCache) -> None:
    await cancel_calls(hanging_stub, hanging_cache, 1)
    assert (hanging_cache.begun_count, hanging_cache.running_count) == (1, 0)


async def test_a_call_that_has_its_answer_returns_it(hanging_stub: Any) -> None:
    assert (
        await answer_of(hanging_stub.Lookup(LookupRequest(prompt=by_keys([bytes(16)])), timeout=WAIT_SECONDS))
    ).revision == 16


async def test_a_host_with_addresses_of_both_kinds_is_one_host() -> None:
    assert await resolve("localhost:9000") == ["127.0.0.1:9000"]


@pytest.mark.parametrize("address", ["10.0.0.5:9000", "[::1]:9000"])
async def test_an_address_stands_for_itself(address: str) -> None:
    assert await resolve(address) == [address]


async def test_an_unknown_name_is_said() -> None:
    with pytest.raises(Unreachable, match=r"the name unknown\.invalid "):
        await resolve("unknown.invalid:9000")
