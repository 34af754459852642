"""Peers of a fleet that has certificates, and who has none of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from lmkv.auth.credentials import Credentials
from lmkv.errors import ChannelUnsupported
from lmkv.transfer.tcp.channel import TcpChannel
from lmkv_server.node.peers.connection import PeerConnection
from tests.server.node.peer_parts import SMALL, Parts, Taken, keys_of, words_of
from tests.support.certificates import Certificates, issue, swap
from tests.support.metrics import SAMPLE, serving_metrics
from tests.support.tls_relay import TlsRelay

KEYS = keys_of(4)


def files(certificates: Certificates) -> dict[str, Any]:
    """The configuration of a node in a fleet with certificates."""
    return {"tls_ca": certificates.ca, "tls_cert": certificates.cert, "tls_key": certificates.key}


async def fetched_count(reader: Parts, owner: Parts) -> int:
    """Chunks of `KEYS` that come from one to the other."""
    taken = Taken(reader)
    fetched = await reader.fetch(SMALL, KEYS, [owner.holder(len(KEYS))], 5.0, taken)
    taken.let_go()
    return fetched.chunk_count


async def test_peers_speak_tls_and_show_each_other_who_they_are(tmp_path: Path) -> None:
    fleet = files(issue(tmp_path))
    async with (
        Parts("owner", transfer_channel="shm", **fleet) as owner,
        Parts("reader", transfer_channel="shm", **fleet) as reader,
    ):
        for key in KEYS:
            owner.put(key)
        assert await fetched_count(reader, owner) == len(KEYS)


@pytest.mark.parametrize("who", ["without certificate", "of another issuer", "expired"])
async def test_a_stranger_gets_neither_metadata_nor_chunks(tmp_path: Path, who: str) -> None:
    fleet, stranger = issue(tmp_path / "fleet"), issue(tmp_path / "stranger", expired=who == "expired")
    shown = {} if who == "without certificate" else files(stranger) | {"tls_ca": fleet.ca}
    async with (
        Parts("owner", transfer_channel="shm", **files(fleet)) as owner,
        Parts("reader", transfer_channel="shm", **shown) as reader,
    ):
        for key in KEYS:
            owner.put(key)
        assert await fetched_count(reader, owner) == 0
        assert reader.fetcher.stats().failure_count == 1


async def test_one_name_may_stand_for_all_nodes(tmp_path: Path) -> None:
    fleet = files(issue(tmp_path, "lmkv-node")) | {"tls_peer_name": "lmkv-node"}
    async with (
        Parts("owner", transfer_channel="shm", **fleet) as owner,
        Parts("reader", transfer_channel="shm", **fleet) as reader,
    ):
        for key in KEYS:
            owner.put(key)
        assert await fetched_count(reader, owner) == len(KEYS)


async def test_bytes_between_nodes_are_encrypted_where_the_fleet_has_certificates(tmp_path: Path) -> None:
    async with relayed_pair(tmp_path) as (owner, reader, relay):
        assert await fetched_count(reader, owner) == len(KEYS)
        assert len(relay.seen) > len(KEYS) * SMALL.chunk_bytes
        assert not any(words_of(key, SMALL)[64:72].tobytes() in relay.seen for key in KEYS)


async def test_a_chunk_that_was_changed_on_its_way_is_a_miss_and_counted(tmp_path: Path) -> None:
    async with relayed_pair(tmp_path) as (owner, reader, relay):
        await connected(reader, owner)
        relay.alter(lambda _, record: [record[:-1] + bytes([record[-1] ^ 1])])
        assert await fetched_count(reader, owner) == 0
        assert reader.fetcher.stats().failure_count == 1
        assert len(reader.tier) == 0


async def test_nodes_of_which_one_does_not_encrypt_refuse_each_other_by_key(tmp_path: Path) -> None:
    fleet = files(issue(tmp_path))
    async with (
        Parts("owner", transfer_channel="tcp", transfer_encryption=False, **fleet) as owner,
        Parts("reader", transfer_channel="tcp", **fleet) as reader,
    ):
        with pytest.raises(ChannelUnsupported, match="set transfer_encryption and the keys tls_cert"):
            await connected(reader, owner)


async def test_a_node_that_requires_encryption_offers_and_uses_no_channel_without(tmp_path: Path) -> None:
    fleet = files(issue(tmp_path))
    async with (
        Parts("strict", transfer_channel="auto", require_encryption=True, **fleet) as strict,
        Parts("lax", transfer_channel="nixl", **fleet) as lax,
    ):
        assert set(strict.channels.names) == {"shm", "tcp"}
        with pytest.raises(ChannelUnsupported, match=r"lax.* has the transfer channels nixl, not"):
            await connected(strict, lax)
        with pytest.raises(ChannelUnsupported, match=r"strict.* has the transfer channels .*, not nixl"):
            await connected(lax, strict)
        with pytest.raises(ChannelUnsupported, match="require_encryption: the channel nixl does not encrypt"):
            await connection_to(lax, strict).connect_nixl(SMALL, 5.0)


async def test_metrics_come_over_https_and_follow_their_certificate(tmp_path: Path) -> None:
    first, second = issue(tmp_path / "first"), issue(tmp_path / "second")
    served = swap(tmp_path / "server", first)
    async with serving_metrics(served.server) as server:
        assert SAMPLE in await scrape(server.port, first.client)
        swap(tmp_path / "server", second)
        assert SAMPLE in await scrape(server.port, second.client)
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await scrape(server.port, first.client)


def connection_to(owner: Parts, reader: Parts) -> PeerConnection:
    connection = reader.connections.get(owner.holder(1))
    assert connection
    return connection


async def connected(reader: Parts, owner: Parts) -> None:
    await connection_to(owner, reader).connect(SMALL, 5.0)


@asynccontextmanager
async def relayed(owner: Parts) -> AsyncIterator[TlsRelay]:
    """A relay to the owner's TCP channel, to which readers connect."""
    channel = await owner.channels.offer(["tcp"])
    assert isinstance(channel, TcpChannel)
    server = channel._server
    async with TlsRelay(server.port) as relay:
        server.port = relay.port
        yield relay


async def scrape(port: int, credentials: Credentials) -> str:
    async with httpx.AsyncClient(verify=credentials.client_contexts().get(), trust_env=False, timeout=60) as client:
        return (await client.get(f"https://127.0.0.1:{port}/metrics", timeout=60)).text


@asynccontextmanager
async def relayed_pair(folder: Path) -> AsyncIterator[tuple[Parts, Parts, TlsRelay]]:
    """An owner that holds `KEYS`, a reader, and the relay between their TCP channels, with certificates in `folder`."""
    fleet = files(issue(folder))
    async with (
        Parts("owner", transfer_channel="tcp", **fleet) as owner,
        Parts("reader", transfer_channel="tcp", **fleet) as reader,
        relayed(owner) as relay,
    ):
        for key in KEYS:
            owner.put(key)
        yield owner, reader, relay
