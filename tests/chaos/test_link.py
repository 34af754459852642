"""Links: what each fault looks like to who is connected by one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.chaos.link import Link, Way

WAIT_SECONDS = 60.0
SILENCE_SECONDS = 0.1
"""Nothing comes for so long; never mistaken where all is well, however slow the machine."""


class Caller:
    """One connection to an echo server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def say(self, word: bytes) -> None:
        """Sends a word."""
        self._writer.write(word)
        await self._writer.drain()

    async def hear(self, timeout_seconds: float = WAIT_SECONDS) -> bytes:
        """What comes next; nothing at the end."""
        async with asyncio.timeout(timeout_seconds):
            return await self._reader.read(100)

    def close(self) -> None:
        """Hangs up."""
        self._writer.close()


class Parts:
    """A link to an echo."""

    def __init__(self, link: Link, address: str) -> None:
        self.link = link
        self._address = address

    async def call(self) -> Caller:
        """A connection over the link."""
        host, _, port = self._address.rpartition(":")
        return Caller(*await asyncio.open_connection(host, int(port)))


@pytest.fixture
async def parts() -> AsyncIterator[Parts]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while word := await reader.read(100):
            writer.write(word)
        writer.close()

    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server, Link("a>b") as link:
        yield Parts(link, await link.open_door(server.sockets[0].getsockname()[1]))


@pytest.mark.parametrize("ways", [(Way.QUESTIONS,), (Way.ANSWERS,), tuple(Way)])
async def test_what_is_cut_is_silent_and_comes_when_it_is_mended(parts: Parts, ways: tuple[Way, ...]) -> None:
    caller = await parts.call()
    parts.link.cut(*ways)
    parts.link.cut(*ways)
    await caller.say(b"hello")
    parts.link.mend(*ways)
    with pytest.raises(TimeoutError):
        await caller.hear(SILENCE_SECONDS)
    parts.link.mend(*ways)
    assert await caller.hear() == b"hello"
    caller.close()


async def test_who_refuses_resets_connections_and_new_ones(parts: Parts) -> None:
    before = await parts.call()
    await before.say(b"hello")
    assert await before.hear() == b"hello"
    parts.link.refuse()
    with pytest.raises(ConnectionResetError):
        await before.hear()
    with pytest.raises(ConnectionResetError):
        await (await parts.call()).hear()
    parts.link.accept()
    after = await parts.call()
    await after.say(b"again")
    assert await after.hear() == b"again"
    after.close()


async def test_a_half_open_connection_stays_silent_and_a_new_one_works(parts: Parts) -> None:
    caller = await parts.call()
    await caller.say(b"hello")
    assert await caller.hear() == b"hello"
    parts.link.half_open()
    await caller.say(b"hello?")
    with pytest.raises(TimeoutError):
        await caller.hear(SILENCE_SECONDS)
    other = await parts.call()
    await other.say(b"hello")
    assert await other.hear() == b"hello"
    caller.close()
    other.close()


async def test_a_late_link_passes_everything_on_in_order(parts: Parts) -> None:
    parts.link.delay(0.05)
    caller = await parts.call()
    await caller.say(b"hello")
    assert await caller.hear() == b"hello"
    parts.link.hurry(0.05)
    await caller.say(b"again")
    assert await caller.hear() == b"again"
    caller.close()
