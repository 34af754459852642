"""The disk tier with encryption over real folders: files hold no byte of a chunk, and wrong ones are misses."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmkv_server.node.cache.allocator import ALIGNMENT
from lmkv_server.node.tiers.disk.folder import parse_file_name
from lmkv_server.node.tiers.encryption import ChunkEncryption, TenantKeys
from tests.server.node.cases import chunk_key, chunk_keys
from tests.server.node.disk_parts import CHUNK_BYTES, content, files, flushed, host_with_disk
from tests.support.encryption_keys import secret_of, write_keys

FILE_BYTES = ALIGNMENT + CHUNK_BYTES
POSITIONS = {
    "magic": 0,
    "version": 7,
    "key id": 8,
    "nonce": 16,
    "checksum": 28,
    "tag": 44,
    "first byte": ALIGNMENT,
    "second step": ALIGNMENT + 4096,
    "last byte": FILE_BYTES - 1,
}


@pytest.fixture(autouse=True)
def _several_steps_for_each_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkv_server.node.tiers.disk.tier.STEP_BYTES", 4096)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "disk" / "node"


@pytest.fixture
def encryption(tmp_path: Path) -> ChunkEncryption:
    return encryption_of(tmp_path, "a")


def encryption_of(folder: Path, *names: str, tenant: str = "") -> ChunkEncryption:
    return ChunkEncryption(TenantKeys(write_keys(folder / "keys", *names), tenant), "disk")


async def write(folder: Path, encryption: ChunkEncryption | None, *numbers: int) -> None:
    async with host_with_disk(folder, encryption=encryption) as host:
        for number in numbers:
            host.store(number)


async def found(folder: Path, encryption: ChunkEncryption | None) -> set[bytes]:
    """Keys of the chunks that a node with these keys finds and reads; it finds none that it cannot read."""
    async with host_with_disk(folder, host_chunks=16, encryption=encryption) as host:
        keys = [chunk.key for chunk in host.disk]
        came = await host.read(*(int.from_bytes(key, "big") for key in keys))
        assert len(came) == len(keys)
        return set(keys)


async def test_what_host_memory_forgets_comes_back_from_disk(folder: Path, encryption: ChunkEncryption) -> None:
    async with host_with_disk(folder, encryption=encryption) as host:
        for number in range(4):
            host.store(number, size_bytes=CHUNK_BYTES - 8 * number)
        await flushed(host)
        host.drop(*range(4))
        assert await host.count(*range(6)) == 4
        assert sorted(await host.read(*range(6))) == [0, 1, 2, 3]
        stats = host.disk.stats()
        assert (stats.read_chunks, stats.undecryptable_chunks, stats.damaged_chunks) == (4, 0, 0)
        assert host.disk.used_bytes == sum(path.stat().st_size for path in files(folder)) == 4 * FILE_BYTES


async def test_a_restart_finds_all_of_it_with_parents_and_checksums(folder: Path, encryption: ChunkEncryption) -> None:
    async with host_with_disk(folder, encryption=encryption) as host:
        written = [host.store(number, parent=number - 1 if number else None) for number in range(8)]
        checksums = {chunk.key: chunk.checksum for chunk in written}
    async with host_with_disk(folder, encryption=encryption) as host:
        assert host.on_disk == set(chunk_keys(*range(8)))
        came = await host.read(*range(8))
        assert {chunk.key: chunk.checksum for chunk in came.values()} == checksums
        assert came[5].parent == chunk_key(4)
        assert host.disk.stats().written_chunks == 0


async def test_neither_bytes_nor_checksum_nor_keys_are_on_disk(folder: Path, encryption: ChunkEncryption) -> None:
    async with host_with_disk(folder, encryption=encryption) as host:
        chunk = host.store(1, size_bytes=CHUNK_BYTES - 104)
        end = chunk.offset + CHUNK_BYTES
        host.pool.buffer[end - 104 : end] = b"s" * 104  # what an extent has behind its chunk
    (file,) = files(folder)
    whole, clear = file.read_bytes(), content(1, CHUNK_BYTES - 104)
    assert not any(clear[at : at + 8] in whole for at in range(0, len(clear) - 8, 8))
    assert whole.endswith(bytes(104))
    assert whole[60:ALIGNMENT] == bytes(ALIGNMENT - 60)
    assert chunk.checksum.to_bytes(8, "little") not in whole
    assert f"{chunk.checksum:016x}" not in file.name
    assert secret_of("a") not in whole
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("position", POSITIONS)
async def test_a_changed_bit_is_a_miss_and_the_file_is_removed(
    folder: Path, encryption: ChunkEncryption, position: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with host_with_disk(folder, encryption=encryption) as host:
        for number in range(3):
            host.store(number)
        await flushed(host)
        host.drop(*range(3))
        (file,) = [path for path in files(folder) if path.name.startswith(chunk_key(1).hex())]
        whole = bytearray(file.read_bytes())
        assert len(whole) == FILE_BYTES
        whole[POSITIONS[position]] ^= 1
        file.write_bytes(whole)
        assert sorted(await host.read(0, 1, 2)) == [0, 2]
        await host.disk.settle()
        stats = host.disk.stats()
        assert (stats.undecryptable_chunks, stats.damaged_chunks, stats.failures) == (1, 1, 0)
        assert host.on_disk == set(chunk_keys(0, 2))
        assert not file.exists()
        assert host.disk.usable
    assert caplog.text.count("cannot be decrypted") == 1


@pytest.mark.parametrize("change", ["shorter", "longer", "empty"])
async def test_a_torn_file_is_a_miss(folder: Path, encryption: ChunkEncryption, change: str) -> None:
    async with host_with_disk(folder, encryption=encryption) as host:
        host.store(0)
        await flushed(host)
        host.drop(0)
        (file,) = files(folder)
        whole = file.read_bytes()
        file.write_bytes({"shorter": whole[:-ALIGNMENT], "longer": whole + bytes(ALIGNMENT), "empty": b""}[change])
        assert not await host.read(0)
        assert host.disk.stats().damaged_chunks == 1


async def test_a_file_with_the_name_of_another_is_a_miss_although_it_is_whole(
    folder: Path, encryption: ChunkEncryption, caplog: pytest.LogCaptureFixture
) -> None:
    await write(folder, encryption, 0, 1)
    one, other = files(folder)
    content_of_one = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content_of_one)
    async with host_with_disk(folder, encryption=encryption) as host:
        assert not await host.read(0, 1)
        assert host.disk.stats().undecryptable_chunks == 2
    assert caplog.text.count("cannot be decrypted") == caplog.text.count("was dropped") == 1, (
        "one line, not one a chunk"
    )


async def test_a_name_made_for_the_bytes_of_another_chunk_is_a_miss(folder: Path, encryption: ChunkEncryption) -> None:
    await write(folder, encryption, 0)
    (file,) = files(folder)
    chunk = parse_file_name(file.name)
    assert chunk
    name = chunk.file_name.replace(chunk_key(0).hex(), chunk_key(9).hex())
    assert parse_file_name(name) is None, "its seal is of another name"
    forged = type(chunk)(
        key=chunk_key(9),
        fingerprint=chunk.fingerprint,
        token_count=chunk.token_count,
        size_bytes=chunk.size_bytes,
        key_id=chunk.key_id,
        serial=chunk.serial,
    )
    file.rename(folder / forged.file_name)
    async with host_with_disk(folder, encryption=encryption) as host:
        assert host.on_disk == {chunk_key(9)}
        assert not await host.read(9)
        assert host.disk.stats().undecryptable_chunks == 1


async def test_files_that_are_not_encrypted_are_removed_when_encryption_is_configured(
    folder: Path, encryption: ChunkEncryption, caplog: pytest.LogCaptureFixture
) -> None:
    await write(folder, None, 0, 1)
    assert await found(folder, encryption) == set()
    assert not files(folder)
    assert "2 files that are not encrypted, or of unknown keys, or of another codec were removed" in caplog.text


async def test_encrypted_files_are_removed_when_encryption_is_not_configured(
    folder: Path, encryption: ChunkEncryption
) -> None:
    await write(folder, encryption, 0, 1)
    assert await found(folder, None) == set()
    assert not files(folder)


async def test_a_plain_file_under_an_encrypted_name_is_a_miss(folder: Path, encryption: ChunkEncryption) -> None:
    await write(folder, encryption, 0)
    (file,) = files(folder)
    file.write_bytes(content(0, CHUNK_BYTES).ljust(FILE_BYTES, b"\0"))
    async with host_with_disk(folder, encryption=encryption) as host:
        assert not await host.read(0)
        assert host.disk.stats().undecryptable_chunks == 1


async def test_a_key_is_replaced_and_old_files_stay_readable_until_it_is_removed(tmp_path: Path, folder: Path) -> None:
    await write(folder, encryption_of(tmp_path, "old"), 0)
    await write(folder, encryption_of(tmp_path, "new", "old"), 1)
    both = await found(folder, encryption_of(tmp_path, "new", "old"))
    assert both == set(chunk_keys(0, 1))
    assert await found(folder, encryption_of(tmp_path, "new")) == {chunk_key(1)}
    assert len(files(folder)) == 1


async def test_a_key_that_is_removed_while_the_node_runs_makes_its_files_misses(tmp_path: Path, folder: Path) -> None:
    encryption = encryption_of(tmp_path, "old")
    async with host_with_disk(folder, encryption=encryption) as host:
        host.store(0)
        await flushed(host)
        write_keys(tmp_path / "keys", "new")
        host.store(1)
        await flushed(host)
        host.drop(0, 1)
        assert sorted(await host.read(0, 1)) == [1]
        assert host.disk.stats().undecryptable_chunks == 1


async def test_a_tenant_does_not_find_what_another_has_written(tmp_path: Path, folder: Path) -> None:
    await write(folder, encryption_of(tmp_path, "a", tenant="one"), 0)
    (file,) = files(folder)
    kept = file.read_bytes()
    assert await found(folder, encryption_of(tmp_path, "a", tenant="other")) == set()
    file.write_bytes(kept)
    assert await found(folder, encryption_of(tmp_path, "a", tenant="one")) == {chunk_key(0)}


async def test_a_full_disk_evicts_by_the_length_of_files(folder: Path, encryption: ChunkEncryption) -> None:
    async with host_with_disk(folder, disk_chunks=6, encryption=encryption) as host:
        for number in range(8):
            host.store(number)
        await flushed(host)
        await host.disk.settle()
        assert host.disk.used_bytes == 4 * FILE_BYTES == host.disk.capacity_bytes
        assert sum(path.stat().st_size for path in files(folder)) == 4 * FILE_BYTES
        assert host.disk.stats().evicted_chunks == 4
