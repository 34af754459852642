from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from lmkv import rpc
from lmkv.rpc.endpoints import make_server, open_channel
from lmkv.rpc.prompts import by_keys
from lmkv.rpc.unary_call import answer_of
from lmkv.v1.cache_service_pb2 import LookupRequest, LookupResponse
from lmkv.v1.cache_service_pb2_grpc import CacheServiceServicer, CacheServiceStub, add_CacheServiceServicer_to_server
from tests.support.native_memory import IS_COUNTED, allocated_bytes
from tests.waiting import WAIT_SECONDS, until

NAME = "lmkv.v1.CacheService/Lookup"
CALLS = 500
LOST_BYTES = 900
"""What gRPC loses of each, if the task that waits for its end is cancelled."""


class Cache(CacheServiceServicer):
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
async def cache() -> Cache:
    return Cache()  # type: ignore[abstract]  # one RPC is enough here


@pytest.fixture
async def address(cache: Cache) -> AsyncIterator[str]:
    server = await make_server(("lmkv.v1.CacheService",))
    add_CacheServiceServicer_to_server(cache, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@pytest.fixture
async def stub(address: str) -> AsyncIterator[Any]:
    async with open_channel(address) as channel:
        yield CacheServiceStub(channel)


async def cancel_calls(stub: Any, cache: Cache, count: int) -> None:
    """Has the server begin each call, cancels it, and waits until the server has noticed."""
    for _ in range(count):
        begun_count = cache.begun_count
        call = asyncio.create_task(rpc.call(stub.Lookup, NAME, "server", LookupRequest(), WAIT_SECONDS))
        await until(lambda before=begun_count: cache.begun_count > before)  # type: ignore[misc]
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    await until(lambda: cache.running_count == 0)


@pytest.mark.skipif(not IS_COUNTED, reason="the C library does not count what it has allocated")
async def test_calls_that_are_cancelled_keep_no_memory(stub: Any, cache: Cache) -> None:
    await cancel_calls(stub, cache, CALLS)  # pools and tables fill
    before = allocated_bytes()
    await cancel_calls(stub, cache, CALLS)
    assert allocated_bytes() - before < CALLS * LOST_BYTES / 2


async def test_a_cancelled_call_ends_at_the_server(stub: Any, cache: Cache) -> None:
    await cancel_calls(stub, cache, 1)
    assert (cache.begun_count, cache.running_count) == (1, 0)


async def test_a_call_that_has_its_answer_returns_it(stub: Any) -> None:
    assert (
        await answer_of(stub.Lookup(LookupRequest(prompt=by_keys([bytes(16)])), timeout=WAIT_SECONDS))
    ).revision == 16
