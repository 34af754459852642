"""The disk tier with codecs over real folders: fewer bytes, errors within bounds, and wrong files are misses."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from lmkv.spec import KvSpec
from lmkv.transfer.bandwidth import LEAST_READS
from lmkv_server.node.cache.allocator import ALIGNMENT, align
from lmkv_server.node.tiers.base import Needs
from lmkv_server.node.tiers.codec import HEADER_BYTES
from lmkv_server.node.tiers.disk.folder import parse_file_name
from lmkv_server.node.tiers.encryption import ChunkEncryption, TenantKeys
from tests.server.node.cases import chunk_keys
from tests.server.node.disk_parts import CHUNK_BYTES, Chunks, files, flushed, host_with_disk
from tests.server.node.encoded_parts import EXACT, LOSSY, chunks_for, codec, numbers
from tests.support.encryption_keys import write_keys

CODECS = ("fp8", "int8", "int4", "zstd")
CODE_BYTES = {"fp8": 4 * 16 + CHUNK_BYTES // 4, "int8": 4 * 16 + CHUNK_BYTES // 4, "int4": 8 * 16 + CHUNK_BYTES // 8}
"""Bytes of the codes and scales of 16 groups: the keys and values of 2 layers, heads and blocks."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "disk" / "node"


@pytest.fixture(params=["plain", "encrypted"])
def encryption(request: pytest.FixtureRequest, tmp_path: Path) -> ChunkEncryption | None:
    if request.param == "plain":
        return None
    return ChunkEncryption(TenantKeys(write_keys(tmp_path / "keys", "a"), ""), "disk")


@pytest.mark.parametrize("name", CODECS)
async def test_chunks_come_back_within_the_bound_after_a_restart_too(
    folder: Path, encryption: ChunkEncryption | None, name: str
) -> None:
    chunks = chunks_for(name)
    async with host_with_disk(folder, codec=codec(name), encryption=encryption, chunks=chunks) as host:
        for number in range(4):
            host.store(number, parent=number - 1 if number else None)
        await flushed(host)
        host.drop(*range(4))
        assert await host.count(*range(6)) == 4
        assert sorted(await host.read(*range(6))) == [0, 1, 2, 3]
        assert host.disk.used_bytes == sum(path.stat().st_size for path in files(folder))
        assert host.disk.stats().damaged_chunks == 0
    async with host_with_disk(folder, codec=codec(name), encryption=encryption, chunks=chunks) as host:
        assert host.on_disk == set(chunk_keys(*range(4)))
        assert sorted(await host.read(*range(6))) == [0, 1, 2, 3]


@pytest.mark.parametrize("name", CODE_BYTES)
async def test_files_have_the_bytes_of_codes_and_scales(folder: Path, name: str) -> None:
    async with host_with_disk(folder, codec=codec(name), chunks=chunks_for(name)) as host:
        host.store(1)
    (file,) = files(folder)
    assert file.stat().st_size == align(HEADER_BYTES + CODE_BYTES[name])
    chunk = parse_file_name(file.name)
    assert chunk
    assert (chunk.codec, chunk.encoded_bytes) == (f"{name}.16", HEADER_BYTES + CODE_BYTES[name])
    assert (chunk.size_bytes, chunk.fingerprint) == (CHUNK_BYTES, LOSSY.fingerprint)


@pytest.mark.parametrize("name", CODECS)
async def test_chunks_of_engines_that_want_exact_ones_are_exact(
    folder: Path, encryption: ChunkEncryption | None, name: str
) -> None:
    chunks = chunks_for(name, EXACT)
    async with host_with_disk(folder, codec=codec(name), encryption=encryption, chunks=chunks) as host:
        stored = [host.store(number).checksum for number in range(4)]
        await flushed(host)
        host.drop(*range(4))
        assert [chunk.checksum for _, chunk in sorted((await host.read(*range(4))).items())] == stored


@pytest.mark.parametrize(("before", "after"), [("int8", "fp8"), ("int8", None), (None, "int8"), ("zstd", "int8")])
async def test_files_of_another_codec_are_removed_and_never_read(
    folder: Path, encryption: ChunkEncryption | None, before: str | None, after: str | None
) -> None:
    one, other = (codec(name) if name else None for name in (before, after))
    async with host_with_disk(folder, codec=one, encryption=encryption, chunks=chunks_for("int8")) as host:
        host.store(0)
    async with host_with_disk(folder, codec=other, encryption=encryption, chunks=chunks_for("int8")) as host:
        assert not host.on_disk
        assert not await host.read(0)
    assert not files(folder)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("at", [0, 7, 8, 12, 24, HEADER_BYTES, HEADER_BYTES + 5, 900])
async def test_a_changed_bit_in_header_scales_or_codes_is_a_miss_and_the_file_is_removed(
    folder: Path, encryption: ChunkEncryption | None, name: str, at: int
) -> None:
    async with host_with_disk(folder, codec=codec(name), encryption=encryption, chunks=chunks_for(name)) as host:
        host.store(0)
        host.store(1)
        await flushed(host)
        host.drop(0, 1)
        (file, *_) = files(folder)
        whole = bytearray(file.read_bytes())
        whole[at + (ALIGNMENT if encryption else 0)] ^= 1
        file.write_bytes(whole)
        assert len(await host.read(0, 1)) == 1
        await host.disk.settle()
        assert host.disk.stats().damaged_chunks == 1
        assert not file.exists()


async def test_a_file_that_is_sealed_as_another_codec_is_a_miss(folder: Path) -> None:
    """Even where its name is sealed again: the header says what the bytes are."""
    async with host_with_disk(folder, codec=codec("fp8"), chunks=chunks_for("fp8")) as host:
        host.store(0)
    (file,) = files(folder)
    chunk = parse_file_name(file.name)
    assert chunk
    forged = type(chunk)(**{name: getattr(chunk, name) for name in chunk.__slots__} | {"codec": "int8.16"})
    file.rename(folder / forged.file_name)
    async with host_with_disk(folder, codec=codec("int8"), chunks=chunks_for("int8")) as host:
        assert len(host.on_disk) == 1
        assert not await host.read(0)


async def test_rounded_bytes_are_given_to_no_engine_that_wants_exact_ones(folder: Path) -> None:
    """The specs differ, so do the keys; and if a file claims otherwise, it is a miss."""
    async with host_with_disk(folder, codec=codec("int8"), chunks=chunks_for("int8")) as host:
        host.store(0)
    (file,) = files(folder)
    chunk = parse_file_name(file.name)
    assert chunk
    fields = {name: getattr(chunk, name) for name in chunk.__slots__} | {"fingerprint": EXACT.fingerprint}
    file.rename(folder / type(chunk)(**fields).file_name)
    async with host_with_disk(folder, codec=codec("int8"), chunks=chunks_for("int8", EXACT)) as host:
        assert not await host.read(0)


async def test_a_chunk_with_elements_that_are_no_numbers_is_stored_as_it_is(folder: Path) -> None:
    chunks = Chunks(
        spec=LOSSY,
        token_count=LOSSY.chunk_size,
        content=lambda number, size: numbers(number, size - 4) + b"\x00\x00\xc0\x7f",
    )
    async with host_with_disk(folder, codec=codec("int8"), chunks=chunks) as host:
        host.store(0)
        await flushed(host)
        host.drop(0)
        assert await host.read(0)


async def test_load_or_compute_counts_the_bytes_that_are_read(folder: Path) -> None:
    """Of an engine that accepts rounded chunks these are fewer, and known when some were read; until then it loads."""
    needs = Needs(spec=LOSSY, keys=chunk_keys(0, 1), indices=range(2))
    async with host_with_disk(folder, codec=codec("int8"), chunks=chunks_for("int8")) as host:
        for number in range(2):
            host.store(number)
        await flushed(host)
        host.drop(0, 1)
        for _ in range(LEAST_READS + 1):  # a measured disk: 1 MiB takes a second
            host.disk.reader._bandwidth.record_read(1 << 20, 1.0, time.monotonic())

        async def expected(spec: KvSpec) -> float | None:
            return host.disk.expected_seconds(await host.disk.lookup(replace(needs, spec=spec)), 1 << 20)

        assert await expected(LOSSY) is None
        assert await expected(EXACT) == pytest.approx(1.0)
        assert len(await host.read(0, 1)) == 2
        share = (HEADER_BYTES + CODE_BYTES["int8"]) / CHUNK_BYTES
        assert await expected(LOSSY) == pytest.approx(share)
        assert await expected(EXACT) == pytest.approx(1.0)


async def test_a_folder_is_filled_by_stored_bytes(folder: Path) -> None:
    """Room for 8 exact chunks holds 16 of int8: each takes one page of its two."""
    async with host_with_disk(
        folder, host_chunks=32, disk_chunks=9, codec=codec("int8"), chunks=chunks_for("int8")
    ) as host:
        for number in range(24):
            host.store(number)
            await flushed(host)
        assert len(host.on_disk) == 16
        assert host.disk.used_bytes <= 9 * CHUNK_BYTES
