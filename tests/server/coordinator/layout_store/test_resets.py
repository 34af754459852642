"""A store that resets connections, as one does that is just killed: however that is noticed, the store is lost."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from lmkv.config.remote_url import parse_remote_url
from lmkv.runtime.signals import fast_loop
from lmkv_server.coordinator.layout_store.layout_store import StoreLost
from lmkv_server.coordinator.layout_store.valkey_client import ValkeyClient

TRIES = 500
"""In some of them the reset is noticed between a connection's beginning and the first word over it."""
RESET_AT_CLOSE = struct.pack("ii", 1, 0)


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def reset_all() -> None:
            with suppress(OSError):  # it is the end of the test
                while True:
                    connection, _ = server.accept()
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
                    connection.close()

        thread = threading.Thread(target=reset_all)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_connection_that_is_reset_is_a_store_that_is_lost(port: int) -> None:
    async def connect() -> None:
        for _ in range(TRIES):
            store = ValkeyClient(parse_remote_url(f"redis://127.0.0.1:{port}/0"), held_seconds=60.0)
            with pytest.raises(StoreLost):
                await store.connect()
            await store.aclose()

    with asyncio.Runner(loop_factory=fast_loop()) as runner:  # the loop that coordinators have
        runner.run(connect())
