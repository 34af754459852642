"""Which channel two nodes use: the best that both have and that works between them."""

from __future__ import annotations

import pytest

from lmkv.errors import ChannelUnsupported
from tests.server.node.peer_parts import SMALL, Parts, Taken, keys_of

KEYS = keys_of(8)


def filled(transfer_channel: str) -> Parts:
    """An owner, to be entered."""
    return Parts("owner", chunk_count=64, transfer_channel=transfer_channel)


async def fetch_all(owner: Parts, reader: Parts) -> str:
    """Fetches every chunk and compares the bytes; the channel that they came by."""
    for key in KEYS:
        owner.put(key)
    taken = Taken(reader)
    fetched = await reader.peers.fetch(SMALL, KEYS, [owner.holder(len(KEYS))], 20.0, taken)
    assert (fetched.chunk_count, fetched.error) == (len(KEYS), None)
    taken.let_go()
    reader.check_nothing_left()
    return reader.channels.of(f"owner:{owner.epoch}")


@pytest.mark.parametrize(
    ("owners", "readers", "used"),
    [
        ("auto", "auto", "shm"),
        ("auto", "tcp", "tcp"),
        ("tcp", "auto", "tcp"),
        ("nixl", "auto", "nixl"),
        ("shm", "shm", "shm"),
        ("auto", "nixl", "nixl"),
    ],
)
async def test_two_nodes_use_the_best_channel_that_both_have(owners: str, readers: str, used: str) -> None:
    async with filled(owners) as owner, Parts("reader", transfer_channel=readers) as reader:
        assert await fetch_all(owner, reader) == used


async def test_shared_memory_out_of_reach_gives_way_to_the_next_channel() -> None:
    async with filled("auto") as owner, Parts("reader", transfer_channel="auto") as reader:
        await owner.channels.offer(["shm"])
        owner.transfer_socket.unlink()  # as it looks from another container
        assert await fetch_all(owner, reader) == "nixl"


async def test_nodes_without_a_common_channel_name_those_of_both() -> None:
    async with filled("tcp") as owner, Parts("reader", transfer_channel="shm") as reader:
        owner.put(KEYS[0])
        fetched = await reader.peers.fetch(SMALL, KEYS[:1], [owner.holder(1)], 5.0, Taken(reader))
        assert isinstance(fetched.error, ChannelUnsupported)
        assert fetched.error.metadata["channels"] == "tcp"
        assert fetched.error.metadata["wanted"] == "shm"


@pytest.mark.parametrize("channel", ["shm", "tcp"])
async def test_a_node_that_restarts_is_read_from_again(channel: str) -> None:
    async with Parts("reader", transfer_channel=channel) as reader:
        for _ in range(2):
            async with filled(channel) as owner:
                assert await fetch_all(owner, reader) == channel
            reader.tier.drop(KEYS)


@pytest.mark.parametrize("channel", ["shm", "tcp"])
async def test_bytes_that_their_owner_has_changed_meanwhile_are_a_miss(channel: str) -> None:
    async with filled(channel) as owner, Parts("reader", transfer_channel=channel) as reader:
        for key in KEYS:
            owner.put(key)
        owner.damage(KEYS[3])
        taken = Taken(reader)
        fetched = await reader.peers.fetch(SMALL, KEYS, [owner.holder(len(KEYS))], 20.0, taken)
        assert (fetched.chunk_count, taken.keys()) == (3, KEYS[:3])
        assert reader.peers.checksum_mismatches == 1
        taken.let_go()
