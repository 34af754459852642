"""The protocol of a TCP connection: a hello with the reader's token, then requests for byte ranges under a grant.

    reader   MARK token          count grant (address size)...                    count grant ...
    owner                GRANTED                                 GRANTED bytes...                  REFUSED

The owner answers `REFUSED` if no live grant of this reader covers all ranges; the connection stays open. It closes the
connection of a reader without a valid token or with a protocol error.
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Sequence

from lmkv.auth.credentials import Credentials
from lmkv.transfer.access import GRANT_ID_BYTES, TOKEN_BYTES

MARK = b"lmkvtcp2"
HELLO_BYTES = len(MARK) + TOKEN_BYTES
GRANTED = b"\1"
REFUSED = b"\0"
MAX_RANGES = 4096
"""Maximum number of ranges in one request."""
HEAD = struct.Struct(f"!I{GRANT_ID_BYTES}s")
"""Number of ranges, and the grant's id."""
RANGE = struct.Struct("!QQ")


def hello(token: bytes) -> bytes:
    """The first bytes of a connection."""
    return MARK + token


def request(grant_id: str, ranges: Sequence[tuple[int, int]]) -> bytes:
    """A request for ranges under a grant: address in the owner's process, and size."""
    return HEAD.pack(len(ranges), grant_id.encode()) + b"".join(RANGE.pack(address, size) for address, size in ranges)


MAX_BYTES = 1 << 37
"""Bytes after which an encrypted connection is not used again: half of what AES-GCM allows for one key."""
RECEIVED_AT_ONCE = 1 << 30
"""The most bytes that one call of OpenSSL may receive."""
SEND_BYTES = 1 << 20
"""Bytes that an encrypted send may take `STUCK_SECONDS` for."""


class Tls:
    """TLS for the channel of one node, by the certificates of the fleet: both ends present theirs."""

    def __init__(self, credentials: Credentials) -> None:
        self._server = credentials.server_context()
        self._server.minimum_version = ssl.TLSVersion.TLSv1_3
        self._server.num_tickets = 0  # a session that is resumed would outlive its certificate
        self._clients = credentials.client_contexts()
        self._name = credentials.name

    def accept(self, connection: socket.socket) -> ssl.SSLSocket:
        """The owner's end. The caller does the handshake. `connection` must not be used any more."""
        return self._server.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def connect(self, connection: socket.socket, host: str) -> ssl.SSLSocket:
        """The reader's end, after the handshake. Raises `OSError`."""
        context = self._clients.get()
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        return context.wrap_socket(connection, server_hostname=self._name or host.strip("[]"))


class Connection:
    """A reader's connection to an owner. Blocking; used by one thread at a time, except `shut`."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._is_encrypted = isinstance(connection, ssl.SSLSocket)
        self._flags = 0 if self._is_encrypted else socket.MSG_WAITALL
        self._byte_count = 0

    @property
    def is_worn(self) -> bool:
        """Whether its keys have encrypted so much that it must not be used for another read."""
        return self._is_encrypted and self._byte_count > MAX_BYTES

    def send(self, data: bytes) -> None:
        """Sends all of it."""
        self.socket.sendall(data)

    def receive(self) -> bytes:
        """One byte; none at the end of the connection."""
        return self.socket.recv(1)

    def fill(self, target: memoryview) -> bool:
        """Receives bytes until the target is full, without the GIL; False at the end of the connection."""
        done = 0
        while done < len(target):
            count = self.socket.recv_into(target[done : done + RECEIVED_AT_ONCE], 0, self._flags)
            if not count:
                return False
            done += count
        self._byte_count += done
        return True

    def shut(self) -> None:
        """Ends calls that block in another thread."""
        shut(self.socket)

    def close(self) -> None:
        """Closes it. Idempotent."""
        self.socket.close()


def shut(connection: socket.socket) -> None:
    """Shuts a connection down that another thread may use.

    Not by `SSLSocket.shutdown`: that removes the encryption first, and a thread that sends or receives at that moment
    would continue without it.
    """
    try:
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
    except OSError:
        pass  # it is closed
