"""The remote tier with encryption over real stores: objects hold no byte of a chunk, and wrong ones are misses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lmkv_server.node.tiers.encryption import ChunkEncryption, TenantKeys
from lmkv_server.node.tiers.encryption_header import HEADER_BYTES as ENCRYPTION_HEADER_BYTES
from lmkv_server.node.tiers.remote.backend import EncryptedObjects
from lmkv_server.node.tiers.remote.store import HEADER_BYTES, RemoteObject
from tests.server.node.cases import chunk_key
from tests.server.node.disk_parts import WAIT_SECONDS, content, until
from tests.server.node.remote_parts import (
    AWS,
    CHUNK_BYTES,
    SPEC,
    S3Server,
    SharedFolder,
    host_with,
    name_of,
    names_of,
    padded,
)
from tests.support.encryption_keys import secret_of, write_keys
from tests.support.redis_server import RedisServer

AnyServer = RedisServer | S3Server | SharedFolder
POSITIONS = {
    "header": 60,
    "magic": HEADER_BYTES,
    "key id": HEADER_BYTES + 8,
    "nonce": HEADER_BYTES + 16,
    "checksum": HEADER_BYTES + 28,
    "tag": HEADER_BYTES + 44,
    "first byte": -CHUNK_BYTES,
    "last byte": -1,
}


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in AWS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("lmkv_server.node.tiers.remote.backend.STEP_BYTES", 5000)  # several for each chunk
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


@pytest.fixture
def encryption(tmp_path: Path) -> ChunkEncryption:
    return encryption_of(tmp_path, "a")


def encryption_of(folder: Path, *names: str, tenant: str = "") -> ChunkEncryption:
    return ChunkEncryption(TenantKeys(write_keys(folder / "keys", *names), tenant), "remote")


def root_of(encryption: ChunkEncryption) -> str:
    return EncryptedObjects(encryption).root


async def put(server: AnyServer, encryption: ChunkEncryption | None, *numbers: int) -> None:
    async with host_with(server.store(), encryption=encryption) as host:
        host.store(*numbers)
        await host.flushed()


async def got(server: AnyServer, encryption: ChunkEncryption | None, *numbers: int) -> list[int]:
    """The chunks that another node finds and reads."""
    async with host_with(server.store(), encryption=encryption) as host:
        assert await host.count(*numbers) <= len(numbers)
        return await host.read(*numbers)


async def test_what_one_node_stores_another_finds_and_reads(server: AnyServer, encryption: ChunkEncryption) -> None:
    async with host_with(server.store(), encryption=encryption) as first:
        first.store(*range(20))
        first.store(20, token_count=16)
    assert server.names() == names_of(*range(21), root=root_of(encryption))
    async with host_with(server.store(), encryption=encryption) as second:
        assert await second.count(*range(24)) == 21
        assert await second.read(*range(24)) == list(range(21))
        stats = second.remote.stats()
        assert (stats.read_chunks, stats.undecryptable_chunks, stats.damaged_chunks) == (21, 0, 0)
        second.store(21, 22)
        await second.flushed()
        assert second.remote.stats().written_chunks == 2


async def test_neither_bytes_nor_checksum_are_in_the_store(server: AnyServer, encryption: ChunkEncryption) -> None:
    async with host_with(server.store(), encryption=encryption) as host:
        host.store(1)
        await host.flushed()
        (chunk,) = host.tier
        checksum = chunk.checksum
    whole, clear = server.read(name_of(1, root_of(encryption))), content(1, CHUNK_BYTES)
    assert len(whole) == padded(server, HEADER_BYTES + ENCRYPTION_HEADER_BYTES) + CHUNK_BYTES
    assert not any(clear[at : at + 8] in whole for at in range(0, len(clear), 8))
    assert checksum.to_bytes(8, "little") not in whole
    assert secret_of("a") not in whole


@pytest.mark.parametrize("position", POSITIONS)
async def test_a_changed_bit_is_a_miss_and_the_object_is_removed(
    server: AnyServer, encryption: ChunkEncryption, position: str
) -> None:
    root = root_of(encryption)
    async with host_with(server.store(), encryption=encryption) as host:
        host.store(0, 1, 2)
        await host.flushed()
        host.drop(0, 1, 2)
        assert await host.count(0, 1, 2) == 3
        whole = bytearray(server.read(name_of(1, root)))
        whole[POSITIONS[position]] ^= 1
        server.replace(name_of(1, root), bytes(whole))
        assert await host.read(0, 1, 2) == [0, 2]
        stats = host.remote.stats()
        assert (stats.damaged_chunks, stats.undecryptable_chunks) == (1, position != "header")
        await until(lambda: server.names() == names_of(0, 2, root=root))
        assert host.remote.usable, "the store is not to blame"


async def test_an_object_under_the_name_of_another_is_a_miss_even_with_a_header_made_for_it(
    server: AnyServer, encryption: ChunkEncryption
) -> None:
    root = root_of(encryption)
    await put(server, encryption, 0, 1)
    other = server.read(name_of(1, root))
    forged = RemoteObject(
        key=chunk_key(0),
        fingerprint=SPEC.fingerprint,
        token_count=SPEC.chunk_size,
        size_bytes=CHUNK_BYTES,
        checksum=0,
    )
    for content_of_it in (other, forged.header + other[HEADER_BYTES:]):
        server.replace(name_of(0, root), content_of_it)
        async with host_with(server.store(), encryption=encryption) as host:
            assert await host.count(0) == 1
            assert await host.read(0) == []
            assert host.remote.stats().damaged_chunks == 1


async def test_objects_that_are_not_encrypted_are_not_read_and_stay(
    server: AnyServer, encryption: ChunkEncryption
) -> None:
    await put(server, None, 0, 1)
    assert await got(server, encryption, 0, 1) == []
    assert server.names() == names_of(0, 1)
    await put(server, encryption, 0)
    assert await got(server, None, 0, 1) == [0, 1]
    async with host_with(server.store(), encryption=encryption) as host:
        assert await host.clear() == 1, "the encrypted one"
    assert server.names() == names_of(0, 1)


async def test_tenants_of_one_store_neither_find_nor_remove_each_others_chunks(
    tmp_path: Path, server: AnyServer
) -> None:
    one, other = (encryption_of(tmp_path, "a", tenant=tenant) for tenant in ("one", "other"))
    await put(server, one, 0, 1)
    assert await got(server, other, 0, 1) == []
    await put(server, other, 0)
    assert len(server.names()) == 3
    for name in names_of(0, root=root_of(one)):
        server.replace(name_of(1, root_of(other)), server.read(name))
    async with host_with(server.store(), encryption=other) as host:
        assert await host.count(0, 1) == 2
        assert await host.read(0, 1) == [0], "the other is of the first tenant's key"
        await until(lambda: len(server.names()) == 3)
        assert await host.clear(SPEC.fingerprint) == 1
    assert server.names() == names_of(0, 1, root=root_of(one))


async def test_a_key_is_replaced_and_old_objects_stay_readable_until_it_is_removed(
    tmp_path: Path, server: AnyServer
) -> None:
    await put(server, encryption_of(tmp_path, "old"), 0)
    await put(server, encryption_of(tmp_path, "new", "old"), 0, 1)
    assert await got(server, encryption_of(tmp_path, "new", "old"), 0, 1) == [0, 1]
    async with host_with(server.store(), encryption=encryption_of(tmp_path, "new")) as host:
        assert await host.count(0, 1) == 2
        assert await host.read(0, 1) == [1]
        assert host.remote.stats().undecryptable_chunks == 1
        await until(lambda: len(server.names()) == 1)
        host.store(0)
        await host.flushed()
    assert await got(server, encryption_of(tmp_path, "new"), 0, 1) == [0, 1], "it is written again"
