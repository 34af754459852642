"""Who is let into a pool: only those who know the token, only to read, and only as many as there is room for."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from lmkv.errors import ChannelUnsupported, ConfigError, LmkvError, Unreachable
from lmkv.pool.socket import receive_fd
from lmkv.transfer import ChannelEnd, Copy
from lmkv.transfer.channel import unwrap, wrap
from lmkv.transfer.shm import ShmChannel
from lmkv.transfer.tcp import server
from lmkv.transfer.tcp.channel import MAX_IDLE, READ_THREADS, TcpChannel
from lmkv.transfer.tcp.server import GRANTED, HEAD, MAX_RANGES, REFUSED, hello, request, shut
from tests.lmkv.transfer.ends import GRANT_ID, MIB, SIZE, Memory
from tests.waiting import WAIT_SECONDS, until


def with_another_token(kind: str, end: ChannelEnd, metadata: bytes) -> bytes:
    """The same metadata, but for its token."""
    words = json.loads(unwrap(kind, end.name, metadata)[1])
    words["token"] = "00" * (len(words["token"]) // 2)
    return wrap(kind, end, json.dumps(words).encode())


@pytest.mark.parametrize(("kind", "error"), [("shm", ChannelUnsupported), ("tcp", Unreachable)])
async def test_a_wrong_token_opens_nothing(
    kind: str, error: type[LmkvError], short_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own, other = Memory(MIB), Memory(MIB)
    owner, reader = await own.open(kind, "owner:1", short_folder), await other.open(kind, "reader:1", short_folder)
    metadata = owner.metadata_for(own.admit())
    with pytest.raises(error):
        await reader.add_peer("owner:1", with_another_token(kind, own.end("owner:1"), metadata))
    assert "refused" in caplog.text
    await reader.add_peer("owner:1", metadata)
    await reader.aclose()
    await owner.aclose()


def file_count() -> int:
    """Files that this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_an_end_of_shared_memory_that_comes_again_replaces_the_one_before(short_folder: Path) -> None:
    own, other = Memory(MIB), Memory(MIB)
    reader = await other.open("shm", "reader:1", short_folder)
    owner = await own.open("shm", "owner:1", short_folder)
    await reader.add_peer("owner:1", owner.metadata_for(own.admit()))
    before = file_count()
    await owner.aclose()
    await owner.aclose()
    owner = await own.open("shm", "owner:1", short_folder)
    await reader.add_peer("owner:1", owner.metadata_for(own.admit()))
    await until(lambda: file_count() <= before, "what it had of the first one is closed")
    await reader.aclose()
    await owner.aclose()


async def test_shared_memory_is_handed_out_to_be_read_only(short_folder: Path) -> None:
    own = Memory(MIB)
    owner = await ShmChannel.open(own.end("owner:1", short_folder))
    metadata = owner.metadata_for(own.admit())
    token = json.loads(unwrap("shm", "owner:1", metadata)[1])["token"]
    taken = await asyncio.to_thread(receive_fd, short_folder / "owner:1.sock", {"token": token}, 5.0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(taken.fd, b"x", 0)
    os.close(taken.fd)
    taken.connection.close()
    assert (short_folder / "owner:1.sock").stat().st_mode & 0o777 == 0o600
    await owner.aclose()


async def test_a_port_that_is_taken_is_refused_by_key() -> None:
    memory = Memory(MIB)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="transfer_port: cannot listen on"):
            await TcpChannel.open(ChannelEnd(name="owner:1", pool=memory.pool, port=port))
    channel = await TcpChannel.open(ChannelEnd(name="owner:1", pool=memory.pool, port=port))
    await channel.aclose()


async def test_a_tcp_owner_refuses_what_it_did_not_agree_on_and_serves_the_next(short_folder: Path) -> None:
    memory = Memory(MIB)
    channel = await TcpChannel.open(memory.end("owner:1"))
    words = json.loads(unwrap("tcp", "owner:1", channel.metadata_for(memory.admit()))[1])
    greeting = hello(bytes.fromhex(words["token"]))

    def answer_to(said: bytes) -> bytes:
        with socket.create_connection((words["host"], words["port"]), 5.0) as connection:
            connection.sendall(said)
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            while data := connection.recv(1 << 16):
                answer += data
            return answer

    for said, answer in (
        (b"", b""),
        (greeting[:-1], b""),
        (b"x" * len(greeting), b""),
        (greeting, GRANTED),
        (greeting + HEAD.pack(0, GRANT_ID.encode()), GRANTED),
        (greeting + HEAD.pack(MAX_RANGES + 1, GRANT_ID.encode()), GRANTED),
        (greeting + request(GRANT_ID, [(memory.address, 8)])[:-1], GRANTED),
        (greeting + request(GRANT_ID, [(memory.address + MIB - 4, 8)]), GRANTED + REFUSED),
        (greeting + request(GRANT_ID, [(memory.address, 8), (1 << 63, 1 << 63)]), GRANTED + REFUSED),
        (greeting + request(GRANT_ID, [(memory.address, 8), (memory.address, 0)]), 2 * GRANTED + bytes(8)),
        (
            greeting + request("", [(memory.address, 8)]) + request(GRANT_ID, [(memory.address, 8)]),
            GRANTED + REFUSED + GRANTED + bytes(8),
        ),
    ):
        assert await asyncio.to_thread(answer_to, said) == answer
    await channel.aclose()


def _socket_of(words: dict[str, Any], client: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection((words["host"], words["port"]), WAIT_SECONDS, (client, 0))


async def test_idle_connections_leave_the_channel_to_readers() -> None:
    """Without a hello from another address, and without a read from the reader's own one."""
    memory, mine = Memory(MIB), Memory(MIB)
    channel, reader = await TcpChannel.open(memory.end("owner:1")), await TcpChannel.open(mine.end("reader:1"))
    admitted = memory.admit()
    metadata = channel.metadata_for(admitted)
    words = json.loads(unwrap("tcp", "owner:1", metadata)[1])
    greeting = hello(admitted.token)
    silent = [await asyncio.to_thread(_socket_of, words, "127.0.0.2") for _ in range(2 * server.MAX_STRANGERS)]
    idle = []
    for _ in range(server.MAX_READERS + 8):
        connection = await asyncio.to_thread(_socket_of, words)
        connection.sendall(greeting)
        assert await asyncio.to_thread(connection.recv, 1) == GRANTED
        idle.append(connection)
    memory.words[:] = 7
    await reader.add_peer("owner:1", metadata)
    for _ in range(8):
        copy = Copy(remote_address=memory.address, local_address=mine.address, size_bytes=MIB)
        await reader.read("owner:1", [copy], WAIT_SECONDS, lambda: None, GRANT_ID)
        assert (mine.words == 7).all()
        mine.words[:] = 0
    assert await asyncio.to_thread(silent[0].recv, 1) == b"", "the oldest one was closed"
    assert await asyncio.to_thread(idle[0].recv, 1) == b""
    idle[-1].sendall(request(GRANT_ID, [(memory.address, 8)]))
    assert await asyncio.to_thread(idle[-1].recv, 1) == GRANTED, "the newest ones stay"
    for connection in (*silent, *idle):
        connection.close()
    await reader.aclose()
    await channel.aclose()


async def test_connections_that_have_ended_take_no_place() -> None:
    """Many come and go without a hello, from the address of one that takes its time for it."""
    memory = Memory(MIB)
    channel = await TcpChannel.open(memory.end("owner:1"))
    admitted = memory.admit()
    words = json.loads(unwrap("tcp", "owner:1", channel.metadata_for(admitted))[1])
    slow = await asyncio.to_thread(_socket_of, words)
    for number in range(2 * server.MAX_STRANGERS):
        (await asyncio.to_thread(_socket_of, words)).close()
        if number % 16 == 0:
            await until(lambda: len(channel._server._connections) == 1)
    slow.sendall(hello(admitted.token))
    assert await asyncio.to_thread(slow.recv, 1) == GRANTED
    slow.close()
    await channel.aclose()


async def test_a_reader_whose_idle_connection_was_closed_connects_again() -> None:
    memory, mine = Memory(MIB), Memory(MIB)
    channel, reader = await TcpChannel.open(memory.end("owner:1")), await TcpChannel.open(mine.end("reader:1"))
    await reader.add_peer("owner:1", channel.metadata_for(memory.admit()))
    memory.words[:] = 7
    (known,) = reader._peers["owner:1"].idle
    for connection in list(channel._server._connections.values()):
        shut(connection)
    assert known in reader._peers["owner:1"].idle, "the loop has not run: the reader has not noticed"
    copy = Copy(remote_address=memory.address, local_address=mine.address, size_bytes=MIB)
    await reader.read("owner:1", [copy], WAIT_SECONDS, lambda: None, GRANT_ID)
    assert (mine.words == 7).all()
    await reader.aclose()
    await channel.aclose()


async def test_a_reader_keeps_few_idle_connections_and_none_to_a_peer_that_it_has_removed() -> None:
    """The owner serves each connection by a thread of its own, and other readers need the places."""
    memory, mine = Memory(MIB), Memory(MIB)
    channel, reader = await TcpChannel.open(memory.end("owner:1")), await TcpChannel.open(mine.end("reader:1"))
    await reader.add_peer("owner:1", channel.metadata_for(memory.admit()))
    copy = Copy(remote_address=memory.address, local_address=mine.address, size_bytes=MIB)

    def read() -> asyncio.Task[list[int] | None]:
        return asyncio.create_task(reader.read("owner:1", [copy], WAIT_SECONDS, lambda: None, GRANT_ID))

    await asyncio.gather(*(read() for _ in range(READ_THREADS)))
    peer = reader._peers["owner:1"]
    assert 1 < len(peer.idle) <= MAX_IDLE
    await until(lambda: len(channel._server._connections) == len(peer.idle))
    reading = [read() for _ in range(MAX_IDLE)]
    await asyncio.sleep(0)
    assert not peer.idle, "all of them read"
    await reader.remove_peer("owner:1")
    await asyncio.gather(*reading, return_exceptions=True)
    await until(lambda: not channel._server._connections)
    await reader.aclose()
    await channel.aclose()


async def test_a_reader_beyond_the_limit_is_disconnected_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """While all others read: one that is between two reads would give way."""
    monkeypatch.setattr(server, "MAX_READERS", 1)
    memory = Memory(SIZE)
    channel = await TcpChannel.open(memory.end("owner:1"))
    words = json.loads(unwrap("tcp", "owner:1", channel.metadata_for(memory.admit()))[1])

    def connect(more: bytes = b"") -> tuple[socket.socket, bytes]:
        connection = _socket_of(words)
        connection.sendall(hello(bytes.fromhex(words["token"])) + more)
        try:
            answer = connection.recv(1)
            return connection, answer + connection.recv(1) if more else answer
        except ConnectionResetError:
            return connection, b""

    first, answer = await asyncio.to_thread(connect, request(GRANT_ID, [(memory.address, SIZE)]))
    assert answer == 2 * GRANTED
    for _ in range(2):
        beyond, answer = await asyncio.to_thread(connect)
        assert answer == b""
        beyond.close()
    first.close()
    while answer != GRANTED:  # once the server has noticed
        another, answer = await asyncio.to_thread(connect)
        another.close()
    await channel.aclose()
