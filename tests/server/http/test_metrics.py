"""A server of `/metrics` alone, as a node has: what it answers, whom it refuses, and how it ends connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from lmkv_server.http import protocol
from lmkv_server.http.server import HttpServer
from tests.support.metrics import SAMPLE, serving_metrics

WAIT_SECONDS = 60.0


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    async with serving_metrics() as server:
        yield server


async def answer_to(port: int, first_line: str, *headers: str) -> tuple[str, str]:
    """The status line and the body of the response to a request."""
    lines = [first_line, "Connection: close", *headers]
    text = (await response_to(port, "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n")).decode()
    head, _, body = text.partition("\r\n\r\n")
    return head.partition("\r\n")[0], body


async def response_to(port: int, request: bytes) -> bytes:
    """The whole response to these bytes, after which the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        return await rest(reader)
    finally:
        writer.close()


async def rest(reader: asyncio.StreamReader) -> bytes:
    """All bytes until the server closes the connection, however it does."""
    async with asyncio.timeout(WAIT_SECONDS):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


@pytest.mark.parametrize(
    ("first_line", "status", "body"),
    [
        ("GET /metrics HTTP/1.1", "200 OK", SAMPLE),
        ("GET /metrics?name[]=x HTTP/1.1", "200 OK", SAMPLE),
        ("HEAD /metrics HTTP/1.1", "200 OK", ""),
        ("POST /metrics HTTP/1.1", "405 Method Not Allowed", "use GET\n"),
        ("GET / HTTP/1.1", "404 Not Found", "only /metrics is served\n"),
    ],
)
async def test_it_serves_metrics_alone(server: HttpServer, first_line: str, status: str, body: str) -> None:
    line, text = await answer_to(server.port, first_line)
    assert line == f"HTTP/1.1 {status}"
    assert body in text if body else not text


async def test_what_is_not_http_is_refused(server: HttpServer) -> None:
    assert (await response_to(server.port, b"\x00\xff\r\n\r\n")).startswith(b"HTTP/1.1 400 Bad Request\r\n")
    head = b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * (protocol.MAX_HEAD_BYTES // 5)
    assert await response_to(server.port, head) == b""


@pytest.mark.parametrize(
    "headers",
    [["Host: evil.example"], ["Host: 127.0.0.1", "Origin: http://evil.example"], ["Host: x", "origin: http://x"]],
)
async def test_pages_of_other_sites_do_not_read_metrics(server: HttpServer, headers: list[str]) -> None:
    line, text = await answer_to(server.port, "GET /metrics HTTP/1.1", *headers)
    assert line == "HTTP/1.1 403 Forbidden"
    assert SAMPLE not in text


async def test_a_name_in_allowed_hosts_reads_metrics() -> None:
    async with serving_metrics(allowed_hosts=["*.pods.example"]) as server:
        for name, status in (("a.pods.example:80", "200"), ("pods.example", "403"), ("localhost", "200")):
            line, _ = await answer_to(server.port, "GET /metrics HTTP/1.1", f"Host: {name}")
            assert line.split()[1] == status, name


async def test_closing_ends_a_connection_whose_request_is_incomplete(server: HttpServer) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET /met")
    await writer.drain()
    await server.aclose()
    await server.aclose()
    assert await rest(reader) == b""
    writer.close()


async def test_a_client_that_reads_no_response_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The response is larger than the buffers of the kernel: the server cannot send all of it."""
    monkeypatch.setattr(protocol, "READ_SECONDS", 1.0)
    async with serving_metrics(documentation="x" * (16 << 20)) as server:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", server.port))
            client.send(b"GET /metrics HTTP/1.1\r\n\r\n")
            connections = server._server.server_state.connections
            async with asyncio.timeout(WAIT_SECONDS):
                while not connections:  # noqa: ASYNC110  # the server has no event for it
                    await asyncio.sleep(0.01)
                while connections:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
