"""Peers of a fleet that has certificates, and who has none of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge

from lmkv.auth.credentials import Credentials
from lmkv_server.node.metrics.server import MetricsServer
from tests.server.node.peer_parts import SMALL, Parts, Taken, keys_of
from tests.support.certificates import Certificates, issue, swap

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


async def test_metrics_come_over_https_and_follow_their_certificate(tmp_path: Path) -> None:
    first, second = issue(tmp_path / "first"), issue(tmp_path / "second")
    served = swap(tmp_path / "server", first)
    registry = CollectorRegistry()
    Gauge("answer", "The number.", registry=registry).set(42)
    async with MetricsServer(registry, "127.0.0.1", 0, served.server) as server:
        assert "answer 42.0" in await scrape(server.port, first.client)
        swap(tmp_path / "server", second)
        assert "answer 42.0" in await scrape(server.port, second.client)
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await scrape(server.port, first.client)


async def scrape(port: int, credentials: Credentials) -> str:
    async with httpx.AsyncClient(verify=credentials.client_contexts().get(), trust_env=False) as client:
        return (await client.get(f"https://127.0.0.1:{port}/metrics", timeout=10)).text
