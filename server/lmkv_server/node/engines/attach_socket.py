"""Serves `EngineService` on the node's unix sockets: by gRPC, and `Attach` as frames, without threads and HTTP/2.

Frames are those of `lmkv.rpc.frames`: messages in both directions, and pings of either side. The first frame carries
`hello`. The node ends a stream with a frame of the status that gRPC would return. Engines use the frames; by gRPC, the
same stream is for people and tools.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, suppress
from pathlib import Path
from typing import Self

from lmkv import rpc
from lmkv.config import NodeConfig
from lmkv.errors import LmkvError
from lmkv.rpc.frames import KEEPALIVE_SECONDS, KEEPALIVE_TIMEOUT_SECONDS, FrameBuffer, FrameKind, to_frame
from lmkv.rpc.requests import checked
from lmkv.runtime.folder import UnixListener
from lmkv.runtime.memory_budget import DECODED_PROTOBUF_FACTOR, Lease, of_process
from lmkv.telemetry.calls import ServerCalls
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1 import engine_service_pb2_grpc
from lmkv_server.node.engines.service import EngineService
from lmkv_server.node.ports import STOP_GRACE_SECONDS, bind

logger = logging.getLogger(__name__)

READ_BYTES = 1 << 18
_PEER = struct.Struct("3i")
"""Id, user and group of the process at the other end."""
CLOSE_SECONDS = 5.0
"""Time in which an engine must read the last frames; then the connection is closed without them."""

ServeStream = Callable[[AsyncIterator[pb.AttachRequest]], AsyncGenerator[pb.AttachResponse, None]]


class AttachSocket:
    """A unix socket that only this user can open. `async with`."""

    def __init__(self, path: Path, serve: ServeStream) -> None:
        self._path = path
        self._serve = serve
        self._listener: UnixListener | None = None
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        """Listens. Raises `ConfigError` if the path cannot be bound."""
        self._listener = UnixListener(self._path)
        self._server = await asyncio.start_unix_server(self._connected, sock=self._listener.socket)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        assert self._listener is not None
        self._server.close()
        self._listener.close()
        for connection in self._connections:
            connection.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(_Connection(reader, writer).serve(self._serve))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)


class _Connection:
    """One engine's connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._was_heard = False
        """Whether anything has arrived since this was last set to False."""

    async def serve(self, serve: ServeStream) -> None:
        keeper = asyncio.create_task(self._keep_alive())
        try:
            await self._relay(serve)
        except ConnectionError as error:
            logger.info("the connection to an engine is broken: %s", error)
        except LmkvError as error:
            self._send_status(error)
        except Exception as error:
            logger.exception("an engine's stream failed unexpectedly")
            self._send_status(LmkvError(f"the stream failed unexpectedly: {error!r}; see the node's log"))
        finally:
            keeper.cancel()
            self._writer.close()
        await self._wait_closed()

    async def _relay(self, serve: ServeStream) -> None:
        async with aclosing(serve(self._requests())) as responses:
            async for response in responses:
                self._write(FrameKind.MESSAGE, response.SerializeToString())
                await self._writer.drain()

    async def _requests(self) -> AsyncIterator[pb.AttachRequest]:
        """The messages of the engine until it ends the stream. Raises `BadMessage` or `MessageTooLarge` for others.

        Memory is taken for each before the rest of it is read, and held until the next. Raises `TooManyRequests` if
        there is none in time.
        """
        frames = FrameBuffer(rpc.MAX_MESSAGE_BYTES)
        with Lease(of_process(), self._share) as lease:
            while data := await self._reader.read(READ_BYTES):
                self._was_heard = True
                frames.add(data)
                while frame := frames.take():
                    kind, payload = frame
                    if kind is FrameKind.MESSAGE:
                        await lease.acquire(len(payload) * DECODED_PROTOBUF_FACTOR)
                        yield checked(payload, pb.AttachRequest.FromString)
                    elif kind is FrameKind.PING:
                        self._write(FrameKind.PONG)
                await lease.acquire(frames.wanted_bytes * DECODED_PROTOBUF_FACTOR)

    @property
    def _share(self) -> str:
        """Names the process whose share of memory a connection uses."""
        peer = self._writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        return f"process {_PEER.unpack(peer)[0]}"

    def _write(self, kind: FrameKind, payload: bytes = b"") -> None:
        self._writer.write(to_frame(kind, payload, rpc.MAX_MESSAGE_BYTES))

    def _send_status(self, error: LmkvError) -> None:
        self._write(FrameKind.STATUS, rpc.to_status(error).SerializeToString())

    async def _keep_alive(self) -> None:
        """Closes the connection if the engine does not answer, or does not read."""
        while True:
            self._was_heard = False
            await asyncio.sleep(KEEPALIVE_SECONDS)
            if self._was_heard:
                continue
            self._write(FrameKind.PING)
            await asyncio.sleep(KEEPALIVE_TIMEOUT_SECONDS)
            if not self._was_heard:
                logger.warning("an engine has not answered for %.0f s", KEEPALIVE_SECONDS + KEEPALIVE_TIMEOUT_SECONDS)
                self._writer.transport.abort()
                return

    async def _wait_closed(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                with suppress(OSError):
                    await self._writer.wait_closed()
        except TimeoutError:
            self._writer.transport.abort()


ENGINE_SERVICE = "lmkv.v1.EngineService"


async def serve_engines(config: NodeConfig, service: EngineService, calls: ServerCalls, stack: AsyncExitStack) -> None:
    """Serves until the stack is closed. Raises `ConfigError` if a socket cannot be bound."""
    # First: an engine that finds the socket of gRPC attaches here.
    await stack.enter_async_context(AttachSocket(config.attach_socket, service.attach))
    server = await rpc.make_server([ENGINE_SERVICE], calls)
    engine_service_pb2_grpc.add_EngineServiceServicer_to_server(service, server)
    bind(server, f"unix:{config.engine_socket}", "runtime_dir")
    await server.start()
    stack.push_async_callback(server.stop, STOP_GRACE_SECONDS)
