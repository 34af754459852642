"""The TCP channel with TLS: what a relay between two nodes sees, and what it achieves by changing it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from lmkv.auth.credentials import Credentials
from lmkv.errors import ChannelUnsupported, Unreachable
from lmkv.transfer import Channel, Copy
from lmkv.transfer.channel import unwrap, wrap
from lmkv.transfer.tcp.channel import TcpChannel
from tests.lmkv.transfer.ends import GRANT_ID, MIB, Memory, Stops, content
from tests.support.certificates import Certificates, issue
from tests.support.tls_relay import Change, TlsRelay, unchanged
from tests.waiting import until

SIZE = MIB
ANSWER, FIRST, LATER = 0, 1, 20
"""The owner's records of a read: the answer to the request, then those with the chunk's bytes."""
PATIENCE = 60.0


def fleet(certificates: Certificates) -> Credentials:
    """What a node of a fleet with certificates has."""
    return Credentials(ca=certificates.ca, cert=certificates.cert, key=certificates.key, client_ca=certificates.ca)


def repeat(_: int, record: bytes) -> Iterable[bytes]:
    return [record, record]


def flip(_: int, record: bytes) -> Iterable[bytes]:
    return [record[:-1] + bytes([record[-1] ^ 1])]


def drop(_: int, _record: bytes) -> Iterable[bytes]:
    return []


def at(first: int, change: Change) -> Change:
    """The change, applied to one record only."""
    return lambda count, record: change(count, record) if count == first else [record]


class Pair:
    """An owner and a reader, and a relay between them."""

    def __init__(self, owner: Memory, reader: Memory, channels: tuple[Channel, Channel], relay: TlsRelay) -> None:
        self.owner = owner
        self.reader = reader
        self.relay = relay
        self._owner_channel, self._reader_channel = channels
        self.metadata = self._through_relay(self._owner_channel.metadata_for(owner.admit()))

    def _through_relay(self, metadata: bytes) -> bytes:
        """The same metadata, but for its port."""
        fields = json.loads(unwrap("tcp", "owner:1", metadata)[1])
        return wrap("tcp", self.owner.end("owner:1"), json.dumps(fields | {"port": self.relay.port}).encode())

    async def connect(self) -> None:
        await self._reader_channel.add_peer("owner:1", self.metadata)

    async def read(self) -> None:
        """Reads all of the owner's memory, and checks when that has stopped."""
        stops = Stops()
        copy = Copy(remote_address=self.owner.address, local_address=self.reader.address, size_bytes=SIZE)
        try:
            await self._reader_channel.read("owner:1", [copy], PATIENCE, stops, GRANT_ID)
        finally:
            assert stops.count == 1


@asynccontextmanager
async def pair(owner_tls: Credentials | None, reader_tls: Credentials | None) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        own, other = Memory(SIZE), Memory(SIZE)
        stack.callback(own.close)
        stack.callback(other.close)
        own.words[:] = content(7, SIZE)
        owner = await TcpChannel.open(own.end("owner:1", tls=owner_tls))
        stack.push_async_callback(owner.aclose)
        reader = await TcpChannel.open(other.end("reader:1", tls=reader_tls))
        stack.push_async_callback(reader.aclose)
        port = json.loads(unwrap("tcp", "owner:1", owner.metadata_for(own.admit()))[1])["port"]
        relay = await stack.enter_async_context(TlsRelay(port))
        yield Pair(own, other, (owner, reader), relay)


@pytest.fixture
def tls(tmp_path: Path) -> Credentials:
    return fleet(issue(tmp_path / "fleet"))


async def test_a_relay_sees_neither_chunk_nor_token_nor_grant(tls: Credentials) -> None:
    async with pair(tls, tls) as ends:
        await ends.connect()
        await ends.read()
        assert np.array_equal(ends.reader.words, ends.owner.words)
        seen = bytes(ends.relay.seen)
        assert len(seen) > SIZE
        plain = ends.owner.words.tobytes()
        assert not any(plain[start : start + 16] in seen for start in range(0, SIZE, 4096))
        token = json.loads(unwrap("tcp", "owner:1", ends.metadata)[1])["token"]
        assert bytes.fromhex(token) not in seen
        assert GRANT_ID.encode() not in seen


@pytest.mark.parametrize("change", [flip, drop, repeat], ids=["flipped", "dropped", "repeated"])
@pytest.mark.parametrize("record", [ANSWER, FIRST, LATER])
async def test_a_changed_record_ends_the_read_and_the_next_read_succeeds(
    tls: Credentials, change: Change, record: int
) -> None:
    async with pair(tls, tls) as ends:
        await ends.connect()
        ends.relay.alter(at(record, change))
        with pytest.raises(Unreachable):
            await ends.read()
        ends.relay.alter(unchanged)
        await ends.read()
        assert np.array_equal(ends.reader.words, ends.owner.words)


async def test_records_in_another_order_end_the_read(tls: Credentials) -> None:
    kept: list[bytes] = []

    def swap(count: int, record: bytes) -> Iterable[bytes]:
        if count == FIRST:
            kept.append(record)
            return []
        return [record, *kept] if count == FIRST + 1 else [record]

    async with pair(tls, tls) as ends:
        await ends.connect()
        ends.relay.alter(swap)
        with pytest.raises(Unreachable):
            await ends.read()


async def test_a_connection_that_is_cut_ends_the_read(tls: Credentials) -> None:
    async with pair(tls, tls) as ends:

        def cut(_: int, record: bytes) -> Iterable[bytes]:
            raise ConnectionResetError

        await ends.connect()
        ends.relay.alter(at(LATER, cut))
        with pytest.raises(Unreachable):
            await ends.read()


async def test_a_changed_request_is_not_answered(tls: Credentials) -> None:
    async with pair(tls, tls) as ends:
        await ends.connect()
        ends.relay.alter_requests(flip)
        with pytest.raises(Unreachable):
            await ends.read()
        assert not ends.reader.words.any()


async def test_records_of_an_earlier_connection_mean_nothing_to_a_later_one(tls: Credentials) -> None:
    earlier: list[bytes] = []

    def keep(_: int, record: bytes) -> Iterable[bytes]:
        earlier.append(record)
        return [record]

    async with pair(tls, tls) as ends:
        await ends.connect()
        ends.relay.alter(keep)
        await ends.read()
    async with pair(tls, tls) as ends:
        await ends.connect()
        ends.relay.alter(lambda count, _: [earlier[count]])
        with pytest.raises(Unreachable):
            await ends.read()
        assert not ends.reader.words.any()


@pytest.mark.parametrize("encrypts", ["owner", "reader"])
async def test_ends_that_do_not_both_encrypt_refuse_each_other(tls: Credentials, encrypts: str) -> None:
    mine = {"owner": (tls, None), "reader": (None, tls)}[encrypts]
    async with pair(*mine) as ends:
        with pytest.raises(
            ChannelUnsupported, match=f"{encrypts}:1 encrypts the transfer channel tcp .* set transfer_"
        ):
            await ends.connect()
        assert ends.relay.connection_count == 0


@pytest.mark.parametrize("stranger", ["owner", "reader"])
async def test_a_certificate_of_another_issuer_opens_nothing(
    tls: Credentials, tmp_path: Path, stranger: str, caplog: pytest.LogCaptureFixture
) -> None:
    other = fleet(issue(tmp_path / "other"))
    async with pair(*((other, tls) if stranger == "owner" else (tls, other))) as ends:
        with pytest.raises(Unreachable):
            await ends.connect()
        await until(lambda: "no TLS handshake" in caplog.text)


async def test_a_worn_connection_is_not_used_for_another_read(
    tls: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(tls, tls) as ends:
        await ends.connect()
        await ends.read()
        await ends.read()
        assert ends.relay.connection_count == 1
        monkeypatch.setattr("lmkv.transfer.tcp.server.MAX_BYTES", 2 * SIZE)
        await ends.read()
        await ends.read()
        assert ends.relay.connection_count == 2


async def test_a_channel_that_closes_leaves_no_reader_behind(tls: Credentials) -> None:
    async with pair(tls, tls) as ends:
        await ends.connect()
        reading = asyncio.create_task(ends.read())
        await asyncio.sleep(0)
    assert isinstance((await asyncio.gather(reading, return_exceptions=True))[0], Unreachable | None)
