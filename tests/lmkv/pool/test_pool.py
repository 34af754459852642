"""The pool: created, attached, populated, closed, and refused where it does not fit."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from lmkv.errors import ConfigError
from lmkv.pool import pool as pool_module
from lmkv.pool.memory import HugePages, available_bytes, huge_pages
from lmkv.pool.pool import POPULATE_STEP_BYTES, Pool
from tests.support.small_tmpfs import on_small_tmpfs
from tests.waiting import WAIT_SECONDS

MB = 1 << 20


def resident_bytes(pool: Pool) -> int:
    """Bytes of the pool that this process has in its page tables."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith(f"{pool.address:x}-"):
            found = True
        if found and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the pool is not mapped")


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_pool_is_zeroed_memory_that_two_mappings_share() -> None:
    with Pool.create(MB) as pool:
        assert len(pool.buffer) == pool.size_bytes == MB
        assert pool.address % mmap.PAGESIZE == 0
        assert bytes(pool.buffer) == bytes(MB)
        with Pool.attach(os.dup(pool.fd), MB) as other:
            other.buffer[123] = 7
            assert pool.buffer[123] == 7
            assert other.address != pool.address


def test_the_size_need_not_be_whole_pages() -> None:
    with Pool.create(1000) as pool:
        pool.populate()
        pool.buffer[999] = 1
        assert len(pool.buffer) == 1000


def test_the_shared_memory_cannot_be_resized() -> None:
    with Pool.create(MB) as pool:
        assert fcntl.fcntl(pool.fd, fcntl.F_GET_SEALS) & (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        for size in (0, 2 * MB):
            with pytest.raises(PermissionError):
                os.ftruncate(pool.fd, size)


def test_closing_twice_is_fine_and_leaves_no_file_open() -> None:
    before = open_files()
    pool = Pool.create(MB)
    pool.close()
    pool.close()
    pool.populate()
    assert open_files() == before
    with pytest.raises(ValueError, match="released"):
        pool.buffer[0] = 1


def test_views_outlive_the_pool() -> None:
    pool = Pool.create(MB)
    array = np.frombuffer(pool.buffer, np.uint8)
    array[5] = 9
    pool.close()
    assert array[5] == 9
    array[6] = 10
    assert array[6] == 10
    with pytest.raises(ValueError, match="released"):
        pool.buffer[0] = 1


def test_populating_takes_the_memory_and_changes_no_byte() -> None:
    with Pool.create(2 * POPULATE_STEP_BYTES + 12345) as pool:
        pool.buffer[4096:8192] = b"x" * 4096
        assert resident_bytes(pool) <= 64 * 4096
        pool.populate(POPULATE_STEP_BYTES, POPULATE_STEP_BYTES + MB)
        assert MB <= resident_bytes(pool) < 4 * MB
        pool.populate()
        assert resident_bytes(pool) >= pool.size_bytes
        assert bytes(pool.buffer[4096:8192]) == b"x" * 4096
        assert pool.buffer[0] == pool.buffer[pool.size_bytes - 1] == 0


def test_populating_works_on_a_kernel_that_cannot_populate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_MADV_POPULATE_WRITE", 9999)
    with Pool.create(MB) as pool:
        pool.buffer[:4096] = b"x" * 4096
        pool.populate()
        assert os.fstat(pool.fd).st_blocks * 512 == MB
        assert bytes(pool.buffer[:4097]) == b"x" * 4096 + b"\0"


def test_populating_ends_when_the_pool_is_closed() -> None:
    pool = Pool.create(min(2 << 30, available_bytes() // 2))
    thread = threading.Thread(target=pool.populate)
    thread.start()
    time.sleep(0.02)
    pool.close()
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()


def test_a_pool_larger_than_memory_is_refused_with_the_key_and_the_fix() -> None:
    files = open_files()
    with pytest.raises(ConfigError, match=r"^max_local_cpu_size: 1024\.00 TiB do not fit, .* of memory .*; lower "):
        Pool.create(1 << 50)
    with pytest.raises(ConfigError, match="max_local_cpu_size"):
        Pool.create(0)
    assert open_files() == files


def test_a_pool_in_a_file_has_no_name_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    with Pool.create(MB, path) as pool:
        assert list(tmp_path.iterdir()) == []
        pool.populate()
        with Pool.attach(os.dup(pool.fd), MB) as other:
            other.buffer[123] = 7
            assert pool.buffer[123] == 7
    assert list(tmp_path.iterdir()) == []


def test_what_is_left_of_a_predecessor_is_replaced_but_not_emptied(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    path.write_bytes(b"y" * 4096)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096) as still_mapped:
        with Pool.create(MB, path) as pool:
            assert pool.buffer[0] == 0
        assert still_mapped[4095] == ord("y")


def test_a_pool_file_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("elsewhere")
    for path in (tmp_path, tmp_path / "link", tmp_path / "missing" / "pool"):
        with pytest.raises(ConfigError, match=r"^pool_path: "):
            Pool.create(MB, path)
    with pytest.raises(ConfigError, match=rf"^max_local_cpu_size: 1024\.00 TiB do not fit, .* at {tmp_path}"):
        Pool.create(1 << 50, tmp_path / "pool")


def test_attaching_more_than_there_is_is_refused_and_closes_the_file() -> None:
    with Pool.create(MB) as pool:
        fd = os.dup(pool.fd)
        with pytest.raises(ValueError, match="greater"):
            Pool.attach(fd, 2 * MB)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_a_killed_owner_leaves_nothing_behind(tmp_path: Path) -> None:
    script = f"""
import time
from pathlib import Path
from lmkv.pool.pool import Pool
pools = [Pool.create({MB}), Pool.create({MB}, Path({str(tmp_path / "pool")!r}))]
print("ready", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        files = {link.readlink() for link in Path(f"/proc/{owner.pid}/fd").iterdir()}
        assert any("lmkv-pool" in file.name for file in files)
        owner.kill()
    assert list(tmp_path.iterdir()) == []
    assert [file for file in files if file.is_relative_to("/dev/shm") and file.exists()] == []


def test_importing_the_pool_needs_neither_kernels_nor_numpy() -> None:
    script = "import lmkv.pool.socket, sys; print(sorted({'numpy', 'lmkv_kernels', 'torch'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "[]\n"


def test_a_pool_is_made_of_huge_pages_where_enough_are_free() -> None:
    there = huge_pages()
    if there.free_bytes < 2 * there.page_bytes or not there.page_bytes:
        pytest.skip("this machine has set no huge pages apart (vm.nr_hugepages)")
    size = 2 * there.page_bytes
    for wanted in ("auto", "always"):
        with Pool.create(size - 1, huge_pages=wanted) as pool:
            assert pool.huge_page_bytes == pool.size_bytes == there.page_bytes
            pool.populate()
            pool.buffer[pool.size_bytes - 1] = 7
            with Pool.attach(os.dup(pool.fd), pool.size_bytes) as other:
                assert other.buffer[pool.size_bytes - 1] == 7
    with Pool.create(size, huge_pages="never") as pool:
        assert pool.huge_page_bytes == 0


def test_without_enough_huge_pages_a_pool_is_of_small_ones_or_refused() -> None:
    size = huge_pages().free_bytes + 4 * MB
    with Pool.create(size) as pool:
        assert pool.huge_page_bytes == 0
        assert pool.size_bytes == size
    with pytest.raises(ConfigError, match=r"^pool_huge_pages: .* of huge pages are free, .*; raise vm.nr_hugepages, "):
        Pool.create(size, huge_pages="always")


def test_huge_pages_that_are_gone_when_they_are_asked_for_are_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    page = huge_pages().page_bytes or 2 * MB
    size = huge_pages().free_bytes + page
    monkeypatch.setattr(pool_module, "huge_pages", lambda: HugePages(page_bytes=page, free_bytes=size))
    files = open_files()
    with Pool.create(size) as pool:
        assert pool.huge_page_bytes == 0
    with pytest.raises((ConfigError, OSError)):
        Pool.create(size, huge_pages="always")
    assert open_files() == files


def test_populating_leaves_the_requested_memory_free() -> None:
    with Pool.create(2 * POPULATE_STEP_BYTES) as pool:
        with pytest.raises(ConfigError, match=r"^max_local_cpu_size: .* ended at 0 B: less than ") as raised:
            pool.populate(leave_bytes=1 << 60)
        assert raised.value.metadata == {"populated_bytes": "0"}
        assert resident_bytes(pool) == 0
        pool.populate(leave_bytes=1)
        assert resident_bytes(pool) >= pool.size_bytes


def test_populating_what_was_taken_before_asks_for_nothing(tmp_path: Path) -> None:
    with Pool.create(2 * POPULATE_STEP_BYTES, tmp_path / "pool") as pool:
        pool.populate(0, POPULATE_STEP_BYTES)
        with Pool.attach(os.dup(pool.fd), pool.size_bytes) as other:
            with pytest.raises(ConfigError) as raised:
                other.populate(leave_bytes=1 << 60)
            assert raised.value.metadata == {"populated_bytes": str(POPULATE_STEP_BYTES)}
            assert resident_bytes(other) >= POPULATE_STEP_BYTES


SHORT = """
import sys
from pathlib import Path
from lmkv.errors import ConfigError
from lmkv.pool.pool import POPULATE_STEP_BYTES, Pool
folder = Path(sys.argv[1])
ours, theirs = (Pool.create(3 * POPULATE_STEP_BYTES, folder / name) for name in "ab")
theirs.populate(0, 2 * POPULATE_STEP_BYTES)
try:
    ours.populate()
except ConfigError as error:
    print(error.metadata["populated_bytes"], error, sep=": ")
ours.buffer[2 * POPULATE_STEP_BYTES - 1] = 7
"""


def test_memory_that_ends_while_it_is_taken_is_an_error_that_says_how_far_it_came(tmp_path: Path) -> None:
    printed = on_small_tmpfs(tmp_path, 4 * POPULATE_STEP_BYTES, SHORT)
    assert printed.startswith(f"{2 * POPULATE_STEP_BYTES}: max_local_cpu_size: memory for a pool of 48.0 MiB ended at ")
    assert "no more memory; lower max_local_cpu_size" in printed
