"""A link between two processes: TCP proxies in user space that pass on, late, one way only, not at all, or break."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import Counter
from contextlib import suppress
from enum import Enum
from types import TracebackType
from typing import Self

BUFFER_BYTES = 1 << 18
CONNECT_SECONDS = 5.0
_LINGER_NOT = struct.pack("ii", 1, 0)
"""Has the system reset a connection when it is closed."""


class Way(Enum):
    """Which way bytes go."""

    QUESTIONS = "questions"
    """From who connected."""
    ANSWERS = "answers"
    """To who connected."""


class Link:
    """One process's way to another. A context manager; `open_door` gives an address for each of the other's.

    What is cut is kept and passed on afterwards: a network that is there again has TCP repeat what it lost.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._servers: list[asyncio.Server] = []
        self._connections: set[_Connection] = set()
        self._cuts: Counter[Way] = Counter()
        self._is_open = {way: asyncio.Event() for way in Way}
        for event in self._is_open.values():
            event.set()
        self._resets = 0
        self._delays: list[float] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Ends all connections. Idempotent."""
        for server in self._servers:
            server.close()
        tasks = [connection.task for connection in self._connections]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def open_door(self, port: int) -> str:
        """An address that leads to a port of this host, whether or not a process listens there yet."""

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if self._resets:
                _reset(writer)
                return
            connection = _Connection(self, reader, writer, port)
            self._connections.add(connection)
            connection.task.add_done_callback(lambda _: self._connections.discard(connection))

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        self._servers.append(server)
        host, own_port = server.sockets[0].getsockname()
        return f"{host}:{own_port}"

    # --- Faults: each lasts until it is taken back as often as it was made -----------------------------------------

    def cut(self, *ways: Way) -> None:
        """Passes nothing on."""
        for way in ways:
            self._cuts[way] += 1
            self._is_open[way].clear()

    def mend(self, *ways: Way) -> None:
        """Takes a `cut` back."""
        for way in ways:
            self._cuts[way] -= 1
            if not self._cuts[way]:
                self._is_open[way].set()

    def refuse(self) -> None:
        """Resets every connection, and new ones at once."""
        self._resets += 1
        for connection in self._connections:
            connection.reset()

    def accept(self) -> None:
        """Takes a `refuse` back."""
        self._resets -= 1

    def delay(self, seconds: float) -> None:
        """Is late with all that it passes on."""
        self._delays.append(seconds)

    def hurry(self, seconds: float) -> None:
        """Takes a `delay` back."""
        self._delays.remove(seconds)

    def half_open(self) -> None:
        """Loses the far end of every connection, without a word to the near end. Nothing takes this back."""
        for connection in self._connections:
            connection.lose_far_end()

    async def passable(self, way: Way) -> None:
        """Returns when something may be passed on."""
        await self._is_open[way].wait()
        if self._delays:
            await asyncio.sleep(max(self._delays))


class _Connection:
    """One connection, and the other that it is continued by."""

    def __init__(self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
        self._link = link
        self._near = reader, writer
        self._far: asyncio.StreamWriter | None = None
        self._is_lost = False
        self._port = port
        self.task = asyncio.create_task(self._run(), name=f"{link.name}:{port}")

    def reset(self) -> None:
        """Breaks both ends."""
        for writer in (self._near[1], self._far):
            if writer is not None:
                _reset(writer)

    def lose_far_end(self) -> None:
        """Breaks the far end, and is silent at the near one."""
        self._is_lost = True
        if self._far is not None:
            _reset(self._far)

    async def _run(self) -> None:
        reader, writer = self._near
        try:
            await self._link.passable(Way.QUESTIONS)
            async with asyncio.timeout(CONNECT_SECONDS):
                far_reader, self._far = await asyncio.open_connection("127.0.0.1", self._port)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, self._far, Way.QUESTIONS))
                group.create_task(self._pump(far_reader, writer, Way.ANSWERS))
        except (OSError, TimeoutError, ExceptionGroup):  # either side may end it any time, and be it by its death
            pass
        finally:
            self.reset()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Way) -> None:
        while True:
            data = b""
            with suppress(OSError):
                data = await reader.read(BUFFER_BYTES)
            await self._link.passable(way)
            if self._is_lost and way is Way.ANSWERS:
                return  # invisible to the near end
            if self._is_lost and data:
                continue
            if not data:
                writer.close()
                raise ConnectionResetError
            writer.write(data)
            await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    own = writer.get_extra_info("socket")
    with suppress(OSError):  # it is closed already
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
    writer.transport.abort()
