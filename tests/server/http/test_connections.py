"""A thousand and one real connections to each HTTP server: health is answered, and other clients are served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from lmkv.config import CoordinatorConfig, ProxyConfig
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.coordinator.http import bodies
from lmkv_server.http import protocol
from lmkv_server.http.protocol import SPARE_CONNECTIONS, SPARE_CONNECTIONS_PER_CLIENT
from lmkv_server.http.server import MAX_CONCURRENT_REQUESTS, MAX_CONNECTIONS_PER_CLIENT, HttpOptions, HttpServer
from lmkv_server.proxy.proxy import IDLE_CONNECTIONS, Proxy

COUNT = MAX_CONCURRENT_REQUESTS + 1
WAIT_SECONDS = 60.0
"""Most time for an answer; uvicorn's own limit keeps a probe waiting until idle connections end, 10 to 30 s."""
CLIENTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5")
PROBE_FROM = "127.0.0.9"

Line = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle connections and unfinished bodies do not end by themselves while a test runs."""
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 3600.0)
    monkeypatch.setattr(bodies, "BODY_TIMEOUT_SECONDS", 3600.0)


@pytest.fixture(params=["coordinator", "proxy"])
async def port(request: pytest.FixtureRequest) -> AsyncIterator[int]:
    """The HTTP port of a server of at most a thousand connections, or a thousand and one."""
    async with AsyncExitStack() as stack:
        if request.param == "coordinator":
            serving = await stack.enter_async_context(Coordinator(CoordinatorConfig(port=0, http_port=0)))
            yield int(serving.http_address.rpartition(":")[2])
        else:
            assert IDLE_CONNECTIONS + 1 <= COUNT
            config = ProxyConfig(
                port=0, mode="route", engines=("http://127.0.0.1:1",), stop_timeout=0.0, max_concurrent_requests=1
            )
            yield (await stack.enter_async_context(Proxy(config))).port


@asynccontextmanager
async def opened(port: int, count: int, clients: Sequence[str], sent: bytes = b"") -> AsyncIterator[list[Line]]:
    """Connections from several addresses in turn, over each of which `sent` was sent."""
    lines: list[Line] = []
    try:
        for number in range(count):
            client = clients[number % len(clients)]
            line = await asyncio.open_connection("127.0.0.1", port, local_addr=(client, 0))
            lines.append(line)
            line[1].write(sent)
        yield lines
    finally:
        for _, writer in lines:
            writer.transport.abort()


async def answered(port: int, path: str, client: str = PROBE_FROM) -> int:
    """Status of the answer to a GET over a connection of its own."""
    async with asyncio.timeout(WAIT_SECONDS), opened(port, 1, [client], get(path)) as [(reader, _)]:
        return int((await reader.readline()).split()[1])


async def drained(lines: Sequence[Line]) -> None:
    """Waits until a health probe was answered over each."""
    async with asyncio.timeout(WAIT_SECONDS):
        for reader, _ in lines:
            assert (await reader.readuntil(b'{"status":"ok"}')).startswith(b"HTTP/1.1 200 ")


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()


def closed_count(lines: Sequence[Line]) -> int:
    return sum(reader.at_eof() for reader, _ in lines)


async def closes(lines: Sequence[Line], count: int) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while closed_count(lines) < count:  # noqa: ASYNC110  # streams have no event for it
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nHo", get("/healthz")])
async def test_idle_connections_do_not_keep_health_probes_waiting(port: int, sent: bytes) -> None:
    async with opened(port, COUNT, CLIENTS, sent) as lines:
        assert await answered(port, "/healthz") == 200
        assert await answered(port, "/metrics") == 200
        if sent.endswith(b"\r\n\r\n"):
            assert not any(reader.at_eof() and not reader._buffer for reader, _ in lines)  # type: ignore[attr-defined]


async def test_the_connection_that_was_idle_longest_is_the_first_to_go() -> None:
    async with Coordinator(CoordinatorConfig(port=0, http_port=0, max_connections_per_client=10)) as coordinator:
        port = int(coordinator.http_address.rpartition(":")[2])
        full = 10 + SPARE_CONNECTIONS_PER_CLIENT
        async with opened(port, full, CLIENTS[:1], get("/healthz")) as lines:
            await drained(lines)
            lines[0][1].write(get("/healthz"))  # it is now the last to have become idle
            await drained(lines[:1])
            async with opened(port, 3, CLIENTS[:1], get("/healthz")) as more:
                await drained(more)
                for reader, _ in lines[1:4]:
                    async with asyncio.timeout(WAIT_SECONDS):
                        await reader.read()
                assert closed_count(lines) == 3
                assert not lines[0][0].at_eof()


async def test_one_client_leaves_room_for_others() -> None:
    async with Coordinator(CoordinatorConfig(port=0, http_port=0)) as coordinator:
        port = int(coordinator.http_address.rpartition(":")[2])
        async with opened(port, COUNT, CLIENTS[:1]) as greedy, opened(port, 20, CLIENTS[1:2]) as modest:
            await closes(greedy, COUNT - MAX_CONNECTIONS_PER_CLIENT - SPARE_CONNECTIONS_PER_CLIENT)
            assert await answered(port, "/metrics", CLIENTS[0]) == 200
            assert closed_count(modest) == 0


UNFINISHED = b"POST /slow HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"


class SlowServer:
    """A server whose path `/slow` answers once it may, after it has read the body."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.begun_count = 0
        self.http = HttpServer(self._app, HttpOptions(host="127.0.0.1", port=0))

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        with suppress(ClientDisconnect):
            await request.body()
            if scope["path"] == "/slow":
                self.begun_count += 1
                await self.may_answer.wait()
            await JSONResponse({})(scope, receive, send)


@pytest.fixture
async def slow() -> AsyncIterator[SlowServer]:
    server = SlowServer()
    await server.http.start()
    yield server
    server.may_answer.set()
    await server.http.aclose()


async def test_requests_in_flight_leave_places_to_other_clients_and_to_health_probes(slow: SlowServer) -> None:
    """One client gets 429 beyond its share, others what it has left, 503 once all is taken, and probes an answer."""
    port = slow.http.port
    async with opened(port, MAX_CONNECTIONS_PER_CLIENT + 1, CLIENTS[:1], get("/slow")) as first:
        async with asyncio.timeout(WAIT_SECONDS):
            refused = await first[-1][0].read()
        assert refused.startswith(b"HTTP/1.1 429 ")
        assert b"max_connections_per_client" in refused
        assert await answered(port, "/healthz", CLIENTS[0]) == 200
        assert await answered(port, "/other") == 200
        async with AsyncExitStack() as stack:
            others: list[Line] = []
            for number in range(3, 15):  # each has a part of what those before have left
                rest = MAX_CONCURRENT_REQUESTS - slow.begun_count
                client = f"127.0.0.{number}"
                begun = slow.begun_count
                lines = await stack.enter_async_context(opened(port, rest // 2 + 2, [client], get("/slow")))
                others += lines
                async with asyncio.timeout(WAIT_SECONDS):
                    answer = await lines[-1][0].read()
                if slow.begun_count == MAX_CONCURRENT_REQUESTS:
                    assert answer.startswith(b"HTTP/1.1 503 ")
                    break
                assert answer.startswith(b"HTTP/1.1 429 ")
                assert slow.begun_count > begun
            assert slow.begun_count == MAX_CONCURRENT_REQUESTS
            for _ in range(3 * SPARE_CONNECTIONS):
                assert await answered(port, "/healthz") == 200
            assert await answered(port, "/other") == 503
        async with asyncio.timeout(WAIT_SECONDS):
            while await answered(port, "/other") != 200:  # noqa: ASYNC110  # the server has no event for it
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("clients", [CLIENTS[:1], CLIENTS], ids=["of one client", "of several"])
async def test_bodies_that_do_not_arrive_take_no_place_from_complete_requests(
    slow: SlowServer, clients: Sequence[str]
) -> None:
    port = slow.http.port
    async with (
        opened(port, 1, [PROBE_FROM], UNFINISHED[:-4]) as [(reader, writer)],
        opened(port, COUNT + SPARE_CONNECTIONS, clients, UNFINISHED) as silent,
    ):
        await closes(silent, 1)
        async with opened(port, 50, [PROBE_FROM], UNFINISHED + b"123456789") as complete:
            async with asyncio.timeout(WAIT_SECONDS):
                while slow.begun_count < 50:  # noqa: ASYNC110  # the server has no event for it
                    await asyncio.sleep(0.01)
            writer.write(UNFINISHED[-4:] + b"12345")  # its body arrives slowly, and is not disturbed
            await writer.drain()
            assert await answered(port, "/other") == 200
            slow.may_answer.set()
            writer.write(b"6789")
            for answer, _ in (*complete, (reader, writer)):
                async with asyncio.timeout(WAIT_SECONDS):
                    assert (await answer.readline()).startswith(b"HTTP/1.1 200 ")
            assert closed_count(complete) == 0
