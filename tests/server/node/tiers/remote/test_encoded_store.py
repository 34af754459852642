"""The remote tier with codecs over real stores: names, bytes and bounds, and wrong objects are misses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lmkv.spec import KvSpec
from lmkv.transfer.bandwidth import LEAST_READS
from lmkv_server.node.tiers.base import Needs
from lmkv_server.node.tiers.codec import HEADER_BYTES as CODEC_HEADER_BYTES
from lmkv_server.node.tiers.encryption import ChunkEncryption, TenantKeys
from lmkv_server.node.tiers.remote.backend import EncodedObjects
from lmkv_server.node.tiers.remote.store import HEADER_BYTES, object_name
from tests.server.node.cases import chunk_key, chunk_keys
from tests.server.node.disk_parts import WAIT_SECONDS
from tests.server.node.encoded_parts import EXACT, LOSSY, chunks_for, codec
from tests.server.node.remote_parts import AWS, CHUNK_BYTES, S3Server, SharedFolder, host_with, padded
from tests.support.encryption_keys import write_keys
from tests.support.redis_server import RedisServer

AnyServer = RedisServer | S3Server | SharedFolder
CODECS = ("fp8", "int8", "int4", "zstd")


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in AWS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("lmkv_server.node.tiers.backend_tier.FLUSH_SECONDS", WAIT_SECONDS)


@pytest.fixture(scope="module")
def _servers() -> Iterator[dict[str, AnyServer]]:
    with RedisServer() as redis, S3Server() as s3, SharedFolder() as folder:
        yield {"redis": redis, "s3": s3, "folder": folder}


@pytest.fixture(params=["redis", "s3", "folder"])
def server(request: pytest.FixtureRequest, _servers: dict[str, AnyServer]) -> AnyServer:
    """Each kind of store, empty."""
    server = _servers[request.param]
    server.empty()
    return server


@pytest.fixture(params=["plain", "encrypted"])
def encryption(request: pytest.FixtureRequest, tmp_path: Path) -> ChunkEncryption | None:
    if request.param == "plain":
        return None
    return ChunkEncryption(TenantKeys(write_keys(tmp_path / "keys", "a"), ""), "remote")


@pytest.mark.parametrize("name", CODECS)
async def test_what_one_node_stores_another_finds_and_reads(
    server: AnyServer, encryption: ChunkEncryption | None, name: str
) -> None:
    chunks = chunks_for(name)
    async with host_with(server.store(), codec=codec(name), encryption=encryption, chunks=chunks) as first:
        first.store(*range(20))
        first.store(20, token_count=16)
    root = EncodedObjects(codec(name), encryption).root
    assert root.startswith(f"lmkv2c/{codec(name).scope}/lmkv2")
    assert server.names() == {object_name(LOSSY.fingerprint, chunk_key(number), root) for number in range(21)}
    async with host_with(server.store(), codec=codec(name), encryption=encryption, chunks=chunks) as second:
        assert await second.count(*range(24)) == 21
        assert await second.read(*range(24)) == list(range(21))
        stats = second.remote.stats()
        assert (stats.read_chunks, stats.damaged_chunks) == (21, 0)
        assert second.tier.chunk_bytes == 20 * CHUNK_BYTES + CHUNK_BYTES // 2, "no chunk takes more room than it has"


async def test_objects_have_the_bytes_of_codes_and_scales(server: AnyServer) -> None:
    async with host_with(server.store(), codec=codec("int8"), chunks=chunks_for("int8")) as host:
        host.store(1)
    (name,) = server.names()
    assert len(server.read(name)) == padded(server, HEADER_BYTES) + CODEC_HEADER_BYTES + 16 * 4 + CHUNK_BYTES // 4


async def test_load_or_compute_counts_the_bytes_that_are_read(
    server: AnyServer, encryption: ChunkEncryption | None
) -> None:
    """Of an engine that accepts rounded chunks these are fewer, and known when some were read; until then it loads."""
    needs = Needs(spec=LOSSY, keys=chunk_keys(0, 1), indices=range(2))
    chunks = chunks_for("int8")
    async with host_with(server.store(), codec=codec("int8"), encryption=encryption, chunks=chunks) as host:
        host.store(0, 1)
        await host.flushed()
        host.drop(0, 1)
        for _ in range(LEAST_READS + 1):  # a measured store: 1 MiB takes a second
            host.remote.reader._bandwidth.record_read(1 << 20, 1.0, time.monotonic())

        async def expected(spec: KvSpec) -> float | None:
            return host.remote.expected_seconds(await host.remote.lookup(replace(needs, spec=spec)), 1 << 20)

        assert await expected(LOSSY) is None
        assert await expected(EXACT) == pytest.approx(1.0)
        assert await host.read(0, 1) == [0, 1]
        share = (CODEC_HEADER_BYTES + 16 * 4 + CHUNK_BYTES // 4) / CHUNK_BYTES
        assert await expected(LOSSY) == pytest.approx(share)
        assert await expected(EXACT) == pytest.approx(1.0)


@pytest.mark.parametrize(("theirs", "mine"), [("int8", "fp8"), ("int8", None), (None, "int8"), ("zstd", None)])
async def test_a_node_with_another_codec_finds_and_removes_nothing(
    server: AnyServer, encryption: ChunkEncryption | None, theirs: str | None, mine: str | None
) -> None:
    one, other = (codec(name) if name else None for name in (theirs, mine))
    async with host_with(server.store(), codec=one, encryption=encryption, chunks=chunks_for("int8")) as host:
        host.store(0, 1)
    async with host_with(server.store(), codec=other, encryption=encryption, chunks=chunks_for("int8")) as host:
        assert await host.count(0, 1) == 0
        assert await host.clear() == 0
    assert len(server.names()) == 2


@pytest.mark.parametrize("name", CODECS)
async def test_chunks_of_engines_that_want_exact_ones_are_exact(server: AnyServer, name: str) -> None:
    chunks = chunks_for(name, EXACT)
    async with host_with(server.store(), codec=codec(name), chunks=chunks) as host:
        host.store(0, 1)
        await host.flushed()
        host.drop(0, 1)
        assert await host.count(0, 1) == 2
        assert await host.read(0, 1) == [0, 1]


@pytest.mark.parametrize("at", [0, 60, HEADER_BYTES, HEADER_BYTES + 8, HEADER_BYTES + CODEC_HEADER_BYTES + 3, -1])
async def test_a_changed_bit_is_a_miss_and_the_object_is_removed(server: AnyServer, at: int) -> None:
    async with host_with(server.store(), codec=codec("int8"), chunks=chunks_for("int8")) as host:
        host.store(0)
        await host.flushed()
        host.drop(0)
        (name,) = server.names()
        whole = bytearray(server.read(name))
        whole[at if at < HEADER_BYTES else at - HEADER_BYTES + padded(server, HEADER_BYTES)] ^= 1
        server.replace(name, bytes(whole))
        assert await host.count(0) == 1
        assert await host.read(0) == []
        assert host.remote.stats().damaged_chunks == 1
    assert not server.names()


@pytest.mark.parametrize("change", [-8, 8])
async def test_a_torn_object_is_a_miss(server: AnyServer, change: int) -> None:
    async with host_with(server.store(), codec=codec("zstd"), chunks=chunks_for("zstd")) as host:
        host.store(0)
        await host.flushed()
        host.drop(0)
        (name,) = server.names()
        whole = server.read(name)
        server.replace(name, whole[:change] if change < 0 else whole + bytes(change))
        assert await host.count(0) == 1
        assert await host.read(0) == []
