"""Bytes of transfers between processes: channel metadata, TCP requests, and the lines that pass file descriptors."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from lmkv.errors import ChannelUnsupported, Unreachable, WrongInstance
from lmkv.pool import socket as pool_socket
from lmkv.runtime.places import Places
from lmkv.transfer.channel import ReadAccess, new_grant_id, unwrap, wrap
from lmkv.transfer.tcp.server import HELLO_BYTES, TcpServer, hello, request
from tests.fuzz.inputs import Input
from tests.fuzz.promises import refused_as

COVERS = ("lmkv.transfer.channel", "lmkv.transfer.tcp.server", "lmkv.transfer.channel", "lmkv.pool.socket")
END = cast(Any, SimpleNamespace(name="peer:1", pool=SimpleNamespace(address=4096, size_bytes=1 << 20)))
EPOCH = 7
FILE = "fuzz-answer"
GRANT = "0" * 32
MAX_ANSWER_BYTES = 1 << 16
SEEDS = [
    b"\0" + wrap("tcp", END, b"payload"),
    b"\x80" + wrap("tcp", END, b"payload")[8:],
    b"\x80\x00\x03\x00\x06" + bytes(16) + b"tc\xccpeer:1payload",  # a name that is not text
    b"\1" + hello(bytes(32)) + request(GRANT, [(4096, 16), (8192, 8)]) + request(GRANT, [(4096, 1 << 40)]),
    b'\2{"engine_id": "e", "rank": 0, "epoch": 7}\n',
    b'\2{"engine_id": "e", "rank": -1, "epoch": true}\n',
    b'\3{"size_bytes": 4096, "epoch": 7}\n',
    b'\3{"size_bytes": -4096, "epoch": 7}\n',
    b'\3{"size_bytes": 1180591620717411303424, "epoch": 7}\n',
    b'\3{"error": "no"}\n',
]


def run(data: bytes) -> None:
    """The first byte selects the message; its highest bit has the digest of channel metadata made right."""
    source = Input(data)
    selected = source.byte()
    (_metadata, _tcp, _hello, _answer)[selected % 4](source, bool(selected & 0x80))


def _metadata(source: Input, sealed: bool) -> None:
    data = source.rest()
    if sealed:
        from lmkv.transfer import channel

        data = channel._sealed(data)
    with refused_as(ChannelUnsupported, WrongInstance):
        region, payload = unwrap("tcp", "peer:1", data)
        end = SimpleNamespace(name="peer:1", pool=SimpleNamespace(address=region.address, size_bytes=region.size_bytes))
        assert wrap("tcp", cast(Any, end), payload) == data


class _Connection:
    """A connection of a reader that has sent all its bytes."""

    def __init__(self, received: bytes) -> None:
        self._received = received
        self.sent = b""

    def recv(self, count: int) -> bytes:
        data, self._received = self._received[:count], self._received[count:]
        return data

    def sendall(self, data: bytes | memoryview) -> None:
        self.sent += data
        assert len(self.sent) <= MAX_ANSWER_BYTES

    def settimeout(self, seconds: float | None) -> None: ...
    def setsockopt(self, *_: object) -> None: ...
    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *_: object) -> None: ...


def _tcp(source: Input, _: bool) -> None:
    """A granted range is sent; bytes outside of it never are."""
    secret, granted = b"s" * 64, b"g" * 64
    access = ReadAccess()
    reader = access.admit("reader:1")
    access.open(GRANT, [(4096 + 64, 64)], reader=reader)
    access.open(new_grant_id(), [(4096, 64)], peer_name="other:1")
    server = TcpServer.__new__(TcpServer)
    fields = {
        "_pool": SimpleNamespace(buffer=memoryview(bytearray(secret + granted + secret))),
        "_region": SimpleNamespace(address=4096),
        "_access": access,
        "_tls": None,
        "_log": SimpleNamespace(warning=lambda *_: None),
        "_connections": {},
        "_lock": threading.Lock(),
        "_strangers": Places[threading.Thread]("strangers", 1, 1),
        "_readers": Places[threading.Thread]("readers", 1, 1),
    }
    for name, value in fields.items():
        setattr(server, name, value)
    sent = source.rest()
    if len(sent) >= HELLO_BYTES and source.is_empty:
        sent = sent[: HELLO_BYTES - 32] + reader.token + sent[HELLO_BYTES:]
    connection = _Connection(sent)
    server._serve(cast(socket.socket, connection), "127.0.0.1")
    assert b"s" not in connection.sent, "bytes outside of the grant were sent"
    assert set(connection.sent) <= set(b"g\0\1")


def _hello(source: Input, _: bool) -> None:
    """A hello of a worker is refused with a bounded answer, or names engine, rank and epoch."""
    with refused_as(ValueError):
        engine_id, rank, epoch = pool_socket._parse_hello(
            pool_socket._parse(source.rest()[: pool_socket.MAX_LINE_BYTES])
        )
        assert engine_id
        assert rank >= 0
        assert isinstance(epoch, int)
        assert len(pool_socket._line({"engine_id": engine_id})) <= 8 * pool_socket.MAX_LINE_BYTES


def _answer(source: Input, _: bool) -> None:
    """The answer of a node maps its pool, or is refused as `Unreachable`; no file descriptor stays open."""
    line = source.rest()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fd = os.memfd_create(FILE)
        os.ftruncate(fd, 8192)
        if line:
            socket.send_fds(theirs, [line], [fd])
        os.close(fd)
        theirs.shutdown(socket.SHUT_WR)
        with refused_as(ValueError):
            received, fields = pool_socket._receive(ours, time.monotonic() + 60)
            with refused_as(Unreachable):
                attached = pool_socket._attached(
                    pool_socket.ReceivedFd(fd=received, fields=fields, connection=ours.dup()), "/socket", EPOCH
                )
                assert attached.pool.size_bytes <= 8192
                assert json.loads(line)["epoch"] == EPOCH
                attached.close()
        assert _open_count() == 0, "a file descriptor stays open"


def _open_count() -> int:
    """Descriptors of this target's file that are open."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            count += FILE in str(link.readlink())
    return count
