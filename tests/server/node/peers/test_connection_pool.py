"""Connections to peers: changes of their address and epoch, failures, and their number."""

from __future__ import annotations

import asyncio
import time

import pytest

from lmkv.errors import LmkvError
from lmkv.v1.cache_service_pb2 import Holder
from lmkv_server.node.peers import connection as peer_connection
from lmkv_server.node.peers import connection_pool
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


async def test_an_earlier_epoch_of_a_peer_gets_no_connection_and_ends_none() -> None:
    async with Parts("owner") as owner, Parts("reader") as reader:
        later = connection_at(reader, owner, "127.0.0.1", owner.epoch + 1)
        stale = Holder(instance_id=owner.instance_id, epoch=owner.epoch, peer_address=owner.address)
        assert reader.connections.get(stale) is None
        assert connection_at(reader, owner, "127.0.0.1", owner.epoch + 1) is later


async def test_the_connection_that_was_not_used_for_longest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_pool, "MAX_CONNECTIONS", 2)
    async with Parts("reader") as reader:
        get = reader.connections.get
        holders = [Holder(instance_id=name, epoch=1, peer_address="127.0.0.1:1") for name in "abc"]
        a, b = (get(holder) for holder in holders[:2])
        assert get(holders[0]) is a
        assert get(holders[2]) is not None
        assert get(holders[0]) is a
        assert get(holders[1]) is not b


async def test_the_backoff_doubles_with_each_failure_in_a_row_and_begins_again_after_a_success(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_connection, "FIRST_BACKOFF_SECONDS", 1000.0)
    monkeypatch.setattr(peer_connection, "LAST_BACKOFF_SECONDS", 3000.0)
    async with Parts("owner") as owner, Parts("reader") as reader:
        connection = connection_at(reader, owner, "127.0.0.1")

        def pause() -> float:
            connection.record_failure()
            assert connection.is_backing_off
            return round((connection._retry_at - time.monotonic()) / 1000)

        assert [pause() for _ in range(4)] == [1, 2, 3, 3]
        connection.record_success()
        assert pause() == 1


async def test_nixl_metadata_that_could_not_be_had_is_asked_for_again() -> None:
    async with Parts("owner") as owner, Parts("reader") as reader:
        connection = connection_at(reader, owner, "127.0.0.1", owner.epoch + 1)
        with pytest.raises(LmkvError):  # the owner refuses a call to another epoch of it
            await connection.connect_nixl(SMALL, WAIT_SECONDS)
        connection.epoch = owner.epoch
        asking = asyncio.create_task(connection.connect_nixl(SMALL, WAIT_SECONDS))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await connection.connect_nixl(SMALL, WAIT_SECONDS)
        assert connection.nixl_metadata
