"""A relay between two ends of a TLS connection that records all bytes, and may change the records of one end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Self

APPLICATION_DATA = 23
_HEAD_BYTES = 5

Change = Callable[[int, bytes], Iterable[bytes]]
"""What to send in place of an encrypted record. The number is that of its end's encrypted records since `alter`."""


def unchanged(_: int, record: bytes) -> Iterable[bytes]:
    """The record itself."""
    return [record]


class _End:
    """One end, as the source of records."""

    def __init__(self) -> None:
        self.change: Change = unchanged
        self.count = 0

    def parts(self, record: bytes) -> Iterable[bytes]:
        """What to send in place of the record."""
        if record[0] != APPLICATION_DATA:
            return [record]
        self.count += 1
        return self.change(self.count - 1, record)


class TlsRelay:
    """Relays to `port`. Of TLS it understands only the borders of records."""

    def __init__(self, port: int) -> None:
        self.port = 0
        self.connection_count = 0
        self.seen = bytearray()
        """All bytes, of both ends."""
        self._target = port
        self._reader = _End()
        self._owner = _End()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def alter(self, change: Change) -> None:
        """Changes the encrypted records that the owner sends from now on."""
        self._owner.change, self._owner.count = change, 0

    def alter_requests(self, change: Change) -> None:
        """Changes the encrypted records that the reader sends from now on."""
        self._reader.change, self._reader.count = change, 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._start, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server
        self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _start(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connection_count += 1
        task = asyncio.create_task(self._relay(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._copy(reader, far_writer, self._reader))
                group.create_task(self._copy(far_reader, writer, self._owner))
        finally:
            for end in (writer, far_writer):
                end.close()

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, end: _End) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await source.readexactly(_HEAD_BYTES)
                record = head + await source.readexactly(int.from_bytes(head[3:], "big"))
                self.seen += record
                for part in end.parts(record):
                    target.write(part)
                await target.drain()
        target.close()
