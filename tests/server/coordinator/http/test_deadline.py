"""Slow clients: none of them keeps a connection, or prevents other clients from being served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.coordinator.http import bodies
from lmkv_server.http import protocol

WAIT_SECONDS = 60.0
HEAD = b"POST /lookup HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 1.0)
    monkeypatch.setattr(bodies, "BODY_TIMEOUT_SECONDS", 1.0)


@asynccontextmanager
async def connected(coordinator: Coordinator) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = coordinator.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            yield reader, writer
    finally:
        writer.close()


async def rest(reader: asyncio.StreamReader) -> bytes:
    """Everything until the server hangs up, however it does."""
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


async def dripped(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Sends a byte at a time until the other side has had enough."""
    try:
        for byte in data:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.02)
    except ConnectionError:
        return


async def test_who_says_nothing_is_cut_off(coordinator: Coordinator) -> None:
    async with connected(coordinator) as (reader, _):
        assert await rest(reader) == b""


async def test_who_sends_headers_byte_by_byte_is_cut_off(coordinator: Coordinator) -> None:
    async with connected(coordinator) as (reader, writer):
        dripping = asyncio.create_task(dripped(writer, HEAD * 100))
        assert await rest(reader) == b""
        dripping.cancel()


async def test_who_sends_a_second_request_byte_by_byte_is_cut_off(coordinator: Coordinator) -> None:
    async with connected(coordinator) as (reader, writer):
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert await reader.readuntil(b'{"status":"ok"}')
        dripping = asyncio.create_task(dripped(writer, HEAD * 100))
        assert await rest(reader) == b""
        dripping.cancel()


async def test_who_sends_headers_without_end_is_cut_off_before_the_time_is_up(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 3600.0)
    async with connected(coordinator) as (reader, writer):
        writer.write(HEAD + b"X: y\r\n" * (protocol.MAX_HEAD_BYTES // 5))
        assert await rest(reader) == b""


async def test_a_client_that_sends_a_body_byte_by_byte_gets_an_error(coordinator: Coordinator) -> None:
    async with connected(coordinator) as (reader, writer):
        writer.write(HEAD + b"Content-Length: 1000\r\n\r\n")
        dripping = asyncio.create_task(dripped(writer, b" " * 1000))
        assert await reader.readline() == b"HTTP/1.1 408 Request Timeout\r\n"
        dripping.cancel()


async def test_an_answer_that_takes_long_is_not_cut_off(coordinator: Coordinator) -> None:
    async with connected(coordinator) as (reader, writer):
        writer.write(b"GET /lmkv.v1.CacheService/Watch HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert (await reader.readline()).endswith(b"200 OK\r\n")
        reading = asyncio.create_task(rest(reader))
        ended, _ = await asyncio.wait({reading}, timeout=3 * protocol.HEAD_SECONDS)
        assert not ended
        reading.cancel()
