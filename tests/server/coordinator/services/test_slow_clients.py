"""Clients of the gRPC port that take their time, or never come to the point: none of them is waited for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from lmkv import rpc
from lmkv.config import CoordinatorConfig
from lmkv.config.kinds import OFF
from lmkv.rpc import endpoints, requests
from lmkv.v1.cache_service_pb2 import LookupRequest
from lmkv.v1.cache_service_pb2_grpc import CacheServiceStub
from lmkv_server.coordinator.coordinator import Coordinator
from tests.server.coordinator.guarded import Guarded, guarded
from tests.support.certificates import issue
from tests.support.tokens import entry

WAIT_SECONDS = 60.0
LOOKUP = "/lmkv.v1.CacheService/Lookup"
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
TLS = b"\x16\x03\x01\x02\x00" + bytes(100)
"""How a handshake begins."""


@pytest.mark.parametrize("encrypted", [False, True])
async def test_who_does_not_finish_a_handshake_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encrypted: bool
) -> None:
    options = dict(rpc.SERVER_OPTIONS)
    assert options["grpc.server_handshake_timeout_ms"] == endpoints.HANDSHAKE_MS
    monkeypatch.setattr(endpoints, "SERVER_OPTIONS", [*(options | {"grpc.server_handshake_timeout_ms": 300}).items()])
    credentials = issue(tmp_path).server if encrypted else rpc.PLAINTEXT
    async with (
        Coordinator(
            CoordinatorConfig(
                port=0,
                http_port=OFF,
                tls_cert=credentials.cert,
                tls_key=credentials.key,
                tls_client_ca=credentials.client_ca,
            )
        ) as coordinator,
        asyncio.timeout(WAIT_SECONDS),
    ):
        beginning = TLS if encrypted else HTTP2
        await asyncio.gather(*(outlast(coordinator, said) for said in (b"", beginning[:5], beginning)))
        await asyncio.gather(outlast(coordinator, beginning, dripping=True))


async def outlast(coordinator: Coordinator, said: bytes, *, dripping: bool = False) -> None:
    """Says so much, and returns once the server hangs up."""
    reader, writer = await asyncio.open_connection(coordinator.host, coordinator.port)

    async def drip() -> None:
        for byte in said:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.05)

    dropping = asyncio.create_task(drip()) if dripping else None
    if dropping is None:
        writer.write(said)
    try:
        await reader.read()
    except ConnectionResetError:
        pass
    finally:
        if dropping is not None:
            dropping.cancel()
            await asyncio.gather(dropping, return_exceptions=True)
        writer.close()


async def test_strangers_are_refused_before_they_have_said_anything(tmp_path: Path) -> None:
    async with guarded(tmp_path, [entry("reader")]) as fleet:
        assert await silent_call(fleet, "") is grpc.StatusCode.UNAUTHENTICATED
        assert await silent_call(fleet, "made-up") is grpc.StatusCode.UNAUTHENTICATED


async def test_who_is_known_and_sends_no_message_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "MESSAGE_SECONDS", 0.3)
    async with guarded(tmp_path, [entry("reader", max_concurrent_requests=1)]) as fleet:
        assert await silent_call(fleet, "reader-token") is grpc.StatusCode.INVALID_ARGUMENT
        cache: Any = CacheServiceStub(await fleet.channel("reader-token"))
        await cache.Lookup(LookupRequest(), timeout=WAIT_SECONDS)  # it counts no more


async def test_a_call_that_ends_without_a_message_has_an_explanation(tmp_path: Path) -> None:
    async with guarded(tmp_path, [entry("reader")]) as fleet:
        call = await opened(fleet, "reader-token")
        await call.done_writing()
        with pytest.raises(grpc.RpcError, match="the call ended without a message; send one"):
            await call


async def silent_call(fleet: Guarded, token: str) -> grpc.StatusCode:
    """How a lookup ends whose message never comes."""
    async with asyncio.timeout(WAIT_SECONDS):
        code: grpc.StatusCode = await (await opened(fleet, token)).code()
        return code


async def opened(fleet: Guarded, token: str) -> Any:
    """A lookup that has begun, and not said what to look up."""
    channel: Any = await fleet.channel(token)
    return channel.stream_unary(LOOKUP)()
