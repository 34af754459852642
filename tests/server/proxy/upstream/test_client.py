"""Requests to engines: large bodies are sent in parts."""

from __future__ import annotations

import asyncio
import tracemalloc

from lmkv.rpc.endpoints import PLAINTEXT
from lmkv_server.proxy.engine import BOTH, Engine
from lmkv_server.proxy.upstream.client import Upstream, UpstreamClient, open_session
from tests.waiting import WAIT_SECONDS

BODY = b"x" * (32 << 20)


async def test_a_large_body_is_sent_as_the_engine_reads_it() -> None:
    """The event loop would copy all of it at once otherwise, before any other request is served."""
    begun, going = asyncio.Event(), asyncio.Event()
    received = b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal received
        head = await reader.readuntil(b"\r\n\r\n")
        begun.set()
        await going.wait()
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length: "))
        received = await reader.readexactly(int(length.split()[1]))
        assert b"transfer-encoding" not in head.lower()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, open_session() as session:
        engine = Engine(url=f"http://127.0.0.1:{port}", role=BOTH)
        client = UpstreamClient(engine, Upstream(session, PLAINTEXT.client_contexts()))
        tracemalloc.start()
        try:
            asking = asyncio.create_task(client.request("POST", "/v1/completions", {}, BODY))
            async with asyncio.timeout(WAIT_SECONDS):
                await begun.wait()
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        going.set()
        assert (await asking).body == b"{}"
    assert received == BODY
    assert most < len(BODY) // 8
