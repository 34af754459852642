"""The limits of channels: what moves the same bytes between the same processes with nothing of lmkv around it.

For `shm` that is memcpy, for `nixl` an agent as its own documentation uses it, for the others a loop over sockets.
"""

from __future__ import annotations

import socket
import threading
import time
from typing import Any, Protocol

import numpy as np

from lmkv.errors import LmkvError
from lmkv.pool.pool import Pool
from lmkv.transfer.nixl import api as nixl_api

POLL_SECONDS = 0.0001
READ_SECONDS = 30.0
MEMCPY, NIXL, SOCKET = "memcpy", "bare NIXL read", "plain socket loop"
LIMITS = {"shm": MEMCPY, "nixl": NIXL, "tcp": SOCKET, "tcp_tls": SOCKET, "ucx": SOCKET, "mooncake": SOCKET}
"""What each channel is compared with."""
SHORT_NAMES = {MEMCPY: "memcpy", NIXL: "raw", SOCKET: "socket"}
"""What the limits are called in the names of rows."""


class BareOwner(Protocol):
    """The owning end."""

    @property
    def metadata(self) -> bytes:
        """What the reading end must know."""

    def begin(self) -> None:
        """Serves from now on."""

    def pause(self) -> None:
        """Costs nothing until `begin`."""

    def close(self) -> None:
        """Ends."""


class BareReader(Protocol):
    """The reading end."""

    def read(self, remote: list[int], local: list[int], size_bytes: int) -> None:
        """Brings runs of `size_bytes` at `remote` addresses to `local` ones."""

    def close(self) -> None:
        """Ends."""


def bare_owner(transfer_channel: str, pool: Pool) -> BareOwner:
    """The owning end of a channel's limit."""
    kinds: dict[str, type[BareOwner]] = {MEMCPY: NoOwner, NIXL: NixlOwner, SOCKET: SocketOwner}
    kind: Any = kinds[LIMITS[transfer_channel]]
    owner: BareOwner = kind(pool)
    return owner


def bare_reader(transfer_channel: str, pool: Pool, metadata: bytes) -> BareReader:
    """The reading end of a channel's limit."""
    kinds: dict[str, type[BareReader]] = {MEMCPY: Memcpy, NIXL: NixlReader, SOCKET: SocketReader}
    kind: Any = kinds[LIMITS[transfer_channel]]
    reader: BareReader = kind(pool, metadata)
    return reader


class NoOwner:
    """The owning end where none is needed."""

    metadata = b""

    def __init__(self, _pool: Pool) -> None: ...

    def begin(self) -> None:
        """See `BareOwner`."""

    def pause(self) -> None:
        """See `BareOwner`."""

    def close(self) -> None:
        """See `BareOwner`."""


class Memcpy:
    """Copies as many bytes, of its own, to the same place, on one thread."""

    def __init__(self, pool: Pool, _metadata: bytes) -> None:
        self._target = np.frombuffer(pool.buffer, np.uint8)
        self._source = np.ones(pool.size_bytes, np.uint8)
        self._address = pool.address

    def read(self, _remote: list[int], local: list[int], size_bytes: int) -> None:
        """See `BareReader`."""
        for address in local:
            start = address - self._address
            np.copyto(self._target[start : start + size_bytes], self._source[start : start + size_bytes])

    def close(self) -> None:
        """See `BareReader`."""
        del self._target


class BareAgent:
    """A NIXL agent as its own documentation uses it, without a progress thread, over a pool."""

    def __init__(self, name: str, pool: Pool) -> None:
        api = nixl_api.load()
        self.agent: Any = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self.agent.register_memory([(pool.address, pool.size_bytes, 0, "")], "DRAM")


class NixlReader(BareAgent):
    """Reads in one transfer."""

    def __init__(self, pool: Pool, metadata: bytes) -> None:
        super().__init__("bare-reader", pool)
        self.agent.add_remote_agent(metadata)

    def read(self, remote: list[int], local: list[int], size_bytes: int) -> None:
        """See `BareReader`."""
        descriptors = [
            self.agent.get_xfer_descs([(address, size_bytes, 0) for address in addresses], "DRAM")
            for addresses in (local, remote)
        ]
        handle = self.agent.initialize_xfer("READ", *descriptors, NixlOwner.NAME)
        state = self.agent.transfer(handle)
        deadline = time.monotonic() + READ_SECONDS
        while state == "PROC" and time.monotonic() < deadline:
            state = self.agent.check_xfer_state(handle)
        self.agent.release_xfer_handle(handle)
        if state != "DONE":
            raise LmkvError(f"NIXL ended a read in state {state}")

    def close(self) -> None:
        """See `BareReader`."""


class NixlOwner(BareAgent):
    """Makes progress for readers, on a thread, while it is wanted."""

    NAME = "bare-owner"

    def __init__(self, pool: Pool) -> None:
        super().__init__(self.NAME, pool)
        self.metadata: bytes = self.agent.get_agent_metadata()
        self._wanted = threading.Event()
        self._ending = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """See `BareOwner`."""
        self._wanted.set()

    def pause(self) -> None:
        """See `BareOwner`."""
        self._wanted.clear()

    def close(self) -> None:
        """Ends the thread, which must be before the interpreter does."""
        self._ending = True
        self._wanted.set()
        self._thread.join()

    def _run(self) -> None:
        while self._wanted.wait() and not self._ending:
            self.agent.get_new_notifs()
            time.sleep(POLL_SECONDS)


class SocketReader:
    """Receives straight into the pool, as many bytes as it asks for by their address and size."""

    def __init__(self, pool: Pool, metadata: bytes) -> None:
        self._pool = pool
        self._connection = socket.create_connection(("127.0.0.1", int.from_bytes(metadata, "big")))
        self._connection.settimeout(READ_SECONDS)

    def read(self, remote: list[int], local: list[int], size_bytes: int) -> None:
        """See `BareReader`."""
        for there, here in zip(remote, local, strict=True):
            self._connection.sendall(there.to_bytes(8, "big") + size_bytes.to_bytes(8, "big"))
            start, done = here - self._pool.address, 0
            while done < size_bytes:
                with self._pool.buffer[start + done : start + size_bytes] as target:
                    count = self._connection.recv_into(target)
                if not count:
                    raise LmkvError("the bare socket's other end is gone")
                done += count

    def close(self) -> None:
        """See `BareReader`."""
        self._connection.close()


class SocketOwner:
    """Sends what one reader asks for, on a thread."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.metadata = int(self._listener.getsockname()[1]).to_bytes(4, "big")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """See `BareOwner`."""

    def pause(self) -> None:
        """See `BareOwner`."""

    def close(self) -> None:
        """See `BareOwner`."""
        self._listener.close()

    def _run(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            while request := connection.recv(16, socket.MSG_WAITALL):
                start = int.from_bytes(request[:8], "big") - self._pool.address
                with self._pool.buffer[start : start + int.from_bytes(request[8:], "big")] as run:
                    connection.sendall(run)
