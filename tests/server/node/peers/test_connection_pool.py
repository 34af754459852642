"""Connections to a peer whose address changes."""

from __future__ import annotations

import asyncio

from lmkv.v1.cache_service_pb2 import Holder
from lmkv_server.node.peers.connection import PeerConnection
from tests.server.node.peer_parts import SMALL, Parts, keys_of, no_grants
from tests.waiting import WAIT_SECONDS, until

KEYS = keys_of(4)


def connection_at(reader: Parts, owner: Parts, host: str, epoch: int = 0) -> PeerConnection:
    """The reader's connection to the owner, at one of the names of the loopback."""
    port = owner.address.rpartition(":")[2]
    holder = Holder(instance_id=owner.instance_id, epoch=epoch or owner.epoch, peer_address=f"{host}:{port}")
    connection = reader.connections.get(holder)
    assert connection
    return connection


async def test_calls_in_flight_to_the_old_address_of_a_peer_are_answered() -> None:
    async with Parts("owner", transfer_channel="shm") as owner, Parts("reader", transfer_channel="shm") as reader:
        for key in KEYS:
            owner.put(key)
        old = connection_at(reader, owner, "127.0.0.1")
        await old.connect(SMALL, WAIT_SECONDS)
        acquiring = [asyncio.create_task(old.acquire(SMALL, KEYS, 0.1, WAIT_SECONDS)) for _ in range(8)]
        await asyncio.sleep(0)  # they are sent
        assert connection_at(reader, owner, "localhost") is not old
        for answer in await asyncio.gather(*acquiring):
            assert list(answer.present) == [0, 1, 2, 3]
        await no_grants(owner)


async def test_a_peer_at_a_new_address_is_still_readable() -> None:
    async with Parts("owner", transfer_channel="shm") as owner, Parts("reader", transfer_channel="shm") as reader:
        old = connection_at(reader, owner, "127.0.0.1")
        await old.connect(SMALL, WAIT_SECONDS)
        await connection_at(reader, owner, "localhost").connect(SMALL, WAIT_SECONDS)
        await until(lambda: not reader.connections._tasks, "the old connection is closed")
        assert reader.channels.of(old.name) == "shm"
        connection_at(reader, owner, "localhost", owner.epoch + 1)  # it has restarted
        await until(lambda: not reader.channels.of(old.name), "the memory of the old process is unmapped")
