"""Files by NIXL: bytes arrive whole, and what goes wrong is an `OSError` that says what."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from lmkv.errors import ConfigError
from lmkv.pool.pool import Pool
from lmkv.transfer.channel import Region
from lmkv.transfer.nixl.channel import NixlFiles

SIZE = 1 << 20


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool.create(8 * SIZE, huge_pages="never") as pool:
        yield pool


@pytest.fixture
def nixl(pool: Pool) -> NixlFiles:
    return NixlFiles(Region(address=pool.address, size_bytes=pool.size_bytes))


def written(nixl: NixlFiles, pool: Pool, path: Path, at: int) -> bytes:
    """Writes one part of the pool to a file; what it was."""
    content = os.urandom(SIZE)
    pool.buffer[at : at + SIZE] = content
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        nixl.write(fd, pool.buffer[at : at + SIZE])
    finally:
        os.close(fd)
    return content


def test_what_is_written_is_read_again_elsewhere(nixl: NixlFiles, pool: Pool, tmp_path: Path) -> None:
    content = written(nixl, pool, tmp_path / "a", SIZE)
    assert (tmp_path / "a").read_bytes() == content
    fd = os.open(tmp_path / "a", os.O_RDONLY)
    assert nixl.read(fd, pool.buffer[4 * SIZE : 5 * SIZE]) == SIZE
    os.close(fd)
    assert bytes(pool.buffer[4 * SIZE : 5 * SIZE]) == content


def test_threads_do_not_meet(nixl: NixlFiles, pool: Pool, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        contents = list(threads.map(lambda at: written(nixl, pool, tmp_path / str(at), at * SIZE), range(8)))
    assert [(tmp_path / str(at)).read_bytes() for at in range(8)] == contents


def test_a_shorter_file_is_not_read(nixl: NixlFiles, pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 4096)
    fd = os.open(tmp_path / "a", os.O_RDONLY)
    assert nixl.read(fd, pool.buffer[:SIZE]) == 4096
    os.close(fd)
    assert not any(pool.buffer[:SIZE])


def test_a_file_that_cannot_be_written_is_an_error_of_the_system(nixl: NixlFiles, pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    fd = os.open(tmp_path / "a", os.O_RDONLY)
    with pytest.raises(OSError) as raised:
        nixl.write(fd, pool.buffer[:SIZE])
    os.close(fd)
    assert raised.value.errno == errno.EBADF


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and GDS may start")
def test_a_plugin_that_does_not_start_is_said_with_the_fix(pool: Pool) -> None:
    region = Region(address=pool.address, size_bytes=pool.size_bytes)
    with pytest.raises(ConfigError, match=r"local_disk_io: NIXL's GDS plugin .* libcufile; set local_disk_io to plain"):
        NixlFiles(region, "GDS")
