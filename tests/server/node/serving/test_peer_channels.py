"""Which channel two nodes use: the best that both have and that works between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lmkv import rpc
from lmkv.errors import ChannelUnsupported, ConfigError, Unreachable
from lmkv.keys import ChunkKey
from lmkv.transfer import Channel, Copy, channels, choice, open_channel
from lmkv.transfer.nixl.channel import NixlChannel
from lmkv.v1 import peer_service_pb2 as pb
from lmkv.v1 import peer_service_pb2_grpc as pb_grpc
from tests.lmkv.transfer.ends import MIB, Memory
from tests.lmkv.transfer.rdma import fake_rdma, use_links_of
from tests.server.node.peer_parts import SMALL, Parts, Taken, keys_of, words_of
from tests.waiting import WAIT_SECONDS

KEYS = keys_of(8)


Links = Callable[[pytest.MonkeyPatch], None]
"""Sets the links that nodes find from now on."""
Pair = tuple[Parts, Parts]


def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "find_links", frozenset)


@pytest.fixture
def with_rdma(tmp_path: Path) -> Links:
    fake_rdma(tmp_path)
    return partial(use_links_of, tmp_path)


def filled(transfer_channel: str) -> Parts:
    """An owner, to be entered."""
    return Parts("owner", chunk_count=64, transfer_channel=transfer_channel)


async def fetch_all(owner: Parts, reader: Parts) -> str:
    """Fetches every chunk and compares the bytes; the channel that they came by."""
    for key in KEYS:
        if owner.tier.get(key) is None:
            owner.put(key)
    taken = Taken(reader)
    fetched = await reader.fetch(SMALL, KEYS, [owner.holder(len(KEYS))], 60.0, taken)
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
        ("nixl", "nixl", "nixl"),
    ],
)
async def test_two_nodes_use_the_best_channel_that_both_have(owners: str, readers: str, used: str) -> None:
    async with filled(owners) as owner, Parts("reader", transfer_channel=readers) as reader:
        assert await fetch_all(owner, reader) == used


@asynccontextmanager
async def without_shared_memory(owner_links: Links = no_links, reader_links: Links = no_links) -> AsyncIterator[Pair]:
    """An owner and a reader with `auto`, as on two hosts: the owner's socket is not in the reader's file system."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        owner_links(monkeypatch)
        async with filled("auto") as owner:
            reader_links(monkeypatch)
            async with Parts("reader", transfer_channel="auto") as reader:
                await owner.channels.offer(["shm"])
                owner.transfer_socket.unlink()
                yield owner, reader


async def test_two_hosts_without_rdma_use_tcp() -> None:
    async with without_shared_memory() as (owner, reader):
        assert await fetch_all(owner, reader) == "tcp"


async def test_two_hosts_with_rdma_use_nixl(with_rdma: Links) -> None:
    async with without_shared_memory(with_rdma, with_rdma) as (owner, reader):
        assert await fetch_all(owner, reader) == "nixl"


async def test_rdma_of_one_host_alone_is_of_no_use(with_rdma: Links) -> None:
    async with without_shared_memory(with_rdma, no_links) as (owner, reader):
        assert await fetch_all(owner, reader) == "tcp"
    async with without_shared_memory(no_links, with_rdma) as (owner, reader):
        assert await fetch_all(owner, reader) == "tcp"


@pytest.mark.parametrize("failing", ["open", "add_peer"])
async def test_nixl_that_does_not_start_or_connect_gives_way_to_tcp(
    failing: str, with_rdma: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise ConfigError("no device") if failing == "open" else Unreachable("no route")

    monkeypatch.setattr(NixlChannel, failing, fail)
    async with without_shared_memory(with_rdma, with_rdma) as (owner, reader):
        assert await fetch_all(owner, reader) == "tcp"


async def test_a_fetch_by_nixl_that_fails_ends_by_tcp_without_an_error(
    with_rdma: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_read, calls = NixlChannel.read, list[str]()

    async def read(channel: NixlChannel, peer_name: str, *rest: Any) -> None:
        calls.append(peer_name)
        await real_read(channel, "a peer that is not connected" if len(calls) > 1 else peer_name, *rest)

    monkeypatch.setattr(NixlChannel, "read", read)
    async with without_shared_memory(with_rdma, with_rdma) as (owner, reader):
        assert await fetch_all(owner, reader) == "nixl"
        reader.tier.drop(KEYS)
        assert await fetch_all(owner, reader) == "tcp"
        reader.tier.drop(KEYS)
        assert await fetch_all(owner, reader) == "tcp"
    assert len(calls) == 2


async def test_a_channel_that_is_measured_to_be_slower_is_replaced_without_an_error(
    with_rdma: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "SAMPLE_BYTES", len(KEYS) * SMALL.chunk_bytes)
    monkeypatch.setattr(choice, "SWITCH_FACTOR", 0.0)  # any bandwidth of the other channel is enough
    async with without_shared_memory(with_rdma, with_rdma) as (owner, reader):
        async with asyncio.timeout(WAIT_SECONDS):
            while await fetch_all(owner, reader) == "nixl":
                reader.tier.drop(KEYS)
        assert owner.channels.access.refused_count == 0
        assert reader.pipeline.stats().checksum_mismatches == 0


async def test_nodes_without_a_common_channel_name_those_of_both() -> None:
    async with filled("tcp") as owner, Parts("reader", transfer_channel="shm") as reader:
        owner.put(KEYS[0])
        fetched = await reader.fetch(SMALL, KEYS[:1], [owner.holder(1)], 5.0, Taken(reader))
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
        fetched = await reader.fetch(SMALL, KEYS, [owner.holder(len(KEYS))], 60.0, taken)
        assert (fetched.chunk_count, taken.keys()) == (3, KEYS[:3])
        assert reader.pipeline.stats().checksum_mismatches == 1
        taken.let_go()


class Stranger:
    """A caller of `Init` that is no node: it reads by the metadata that it was given, whatever it was granted."""

    def __init__(self, owner: Parts, stub: pb_grpc.PeerServiceAsyncStub, channel: Channel, memory: Memory) -> None:
        self.owner = owner
        self.stub = stub
        self._channel = channel
        self._memory = memory
        self._name = f"owner:{owner.epoch}"
        self.session_id = ""

    async def introduce(self) -> None:
        """Calls `Init` and connects."""
        request = pb.InitRequest(instance_id="stranger", epoch=1, spec=SMALL.to_proto(), channels=["tcp"])
        response = await self.stub.Init(request, timeout=WAIT_SECONDS)
        self.session_id = response.session_id
        await self._channel.add_peer(self._name, response.channel_metadata)

    async def acquire(self, *keys: ChunkKey) -> str:
        """Has chunks granted; the grant's id."""
        request = pb.AcquireRequest(
            session_id=self.session_id,
            peer_epoch=self.owner.epoch,
            fingerprint=SMALL.fingerprint,
            chunk_keys=keys,
        )
        return (await self.stub.Acquire(request, timeout=WAIT_SECONDS)).grant.grant_id

    async def read(self, grant_id: str, offset: int, size_bytes: int) -> bytes:
        """Bytes of the owner's pool."""
        copy = Copy(
            remote_address=self.owner.pool.address + offset, local_address=self._memory.address, size_bytes=size_bytes
        )
        await self._channel.read(self._name, [copy], WAIT_SECONDS, lambda: None, grant_id)
        return bytes(self._memory.pool.buffer[:size_bytes])


async def test_over_tcp_a_caller_of_init_reads_what_it_was_granted_and_nothing_else() -> None:
    memory = Memory(MIB)
    async with filled("tcp") as owner, rpc.open_channel(owner.address) as words:
        chunks = [owner.put(key) for key in KEYS[:3]]
        channel = await open_channel("tcp", memory.end("stranger:1"))
        stranger = Stranger(owner, pb_grpc.PeerServiceStub(words), channel, memory)
        other = Stranger(owner, pb_grpc.PeerServiceStub(words), channel, memory)
        try:
            await other.introduce()
            of_another = await other.acquire(KEYS[1])
            await stranger.introduce()
            for grant_id in ("", "f" * 32, of_another):
                with pytest.raises(Unreachable, match="no live grant covers it"):
                    await stranger.read(grant_id, chunks[1].offset, SMALL.chunk_bytes)
            own = await stranger.acquire(KEYS[0])
            read = await stranger.read(own, chunks[0].offset, SMALL.chunk_bytes)
            assert read == words_of(KEYS[0], SMALL).tobytes()
            with pytest.raises(Unreachable, match="no live grant covers it"):
                await stranger.read(own, chunks[2].offset, SMALL.chunk_bytes)
            await stranger.stub.Release(
                pb.ReleaseRequest(session_id=stranger.session_id, grant_id=own), timeout=WAIT_SECONDS
            )
            with pytest.raises(Unreachable, match="no live grant covers it"):
                await stranger.read(own, chunks[0].offset, SMALL.chunk_bytes)
            assert owner.channels.access.refused_count == 5
        finally:
            await channel.aclose()
            memory.close()
