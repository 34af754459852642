"""The file of a pool that outlives its node: found again, replaced, refused; and who still has it mapped."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lmkv.errors import ConfigError
from lmkv.pool.file import STAMP_BYTES, PoolFile, remove_unused
from lmkv.pool.pool import Pool
from tests.support.small_tmpfs import on_small_tmpfs

MB = 1 << 20
TABLE = 10_000
STAMP = b"test 1"


def opened(path: Path, size_bytes: int = MB, *, stamp: bytes = STAMP) -> PoolFile:
    return PoolFile.open(path, size_bytes, TABLE, stamp=stamp)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pool"


@pytest.fixture
def kept(path: Path) -> Path:
    """A closed pool file with content."""
    with opened(path) as file:
        file.pool.buffer[100:104] = b"pool"
        file.table[0:5] = b"table"
    return path


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_what_is_in_it_is_found_again(path: Path) -> None:
    files = open_files()
    with opened(path) as file:
        assert file.replaced_because == "there was no file"
        assert file.pool.size_bytes == len(file.pool.buffer) == MB
        assert bytes(file.table) == bytes(len(file.table))
        assert len(file.table) >= TABLE
        file.pool.buffer[MB - 1] = 7
        file.table[len(file.table) - 1] = 8
    with opened(path) as file:
        assert file.replaced_because == ""
        assert file.pool.buffer[MB - 1] == 7
        assert file.table[len(file.table) - 1] == 8
    file.close()
    assert open_files() == files
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_pool_is_whole_pages_so_that_the_table_is_apart_from_it(path: Path) -> None:
    with opened(path, MB + 5) as file:
        assert file.pool.size_bytes == MB
        assert path.stat().st_size == MB + -(-(TABLE + STAMP_BYTES) // 4096) * 4096


def test_the_memory_of_the_table_is_taken_ahead_and_that_of_the_pool_is_not(path: Path) -> None:
    with opened(path) as file:
        assert TABLE < path.stat().st_blocks * 512 < MB
        file.pool.populate()
        assert path.stat().st_blocks * 512 > MB


def test_a_file_of_another_size_or_stamp_is_replaced_with_the_reason(kept: Path) -> None:
    for size_bytes, stamp, news in (
        (2 * MB, STAMP, "the existing file has another size"),
        (2 * MB, b"test 2", "the existing file is damaged, or of another version of lmkv"),
    ):
        with opened(kept, size_bytes, stamp=stamp) as file:
            assert file.replaced_because == news
            assert bytes(file.pool.buffer[100:104]) == bytes(4)
            assert bytes(file.table[0:5]) == bytes(5)
    with opened(kept, 2 * MB, stamp=b"test 2") as file:
        assert file.replaced_because == ""


@pytest.mark.parametrize("size", [0, 1, 4096, MB, 5 * MB])
def test_a_file_that_was_cut_is_no_pool(kept: Path, size: int) -> None:
    os.truncate(kept, size)
    with opened(kept) as file:
        assert file.replaced_because
        assert bytes(file.pool.buffer[100:104]) == bytes(4)


def test_a_replaced_file_stays_the_memory_of_those_who_have_it_mapped(kept: Path) -> None:
    with opened(kept) as file:
        other = Pool.attach(os.dup(file.pool.fd), MB)
    with other, opened(kept, 2 * MB) as file:
        file.pool.populate()
        assert bytes(other.buffer[100:104]) == b"pool"
        assert not file.has_earlier_users, "theirs is another file"


def test_two_cannot_have_it_at_a_time(path: Path) -> None:
    with opened(path) as file:
        files = open_files()
        with pytest.raises(ConfigError, match=rf"^pool_path: another node uses {path}; give each node its own"):
            opened(path)
        with pytest.raises(ConfigError, match=r"^pool_path: another node uses "):
            opened(path, 2 * MB)
        assert open_files() == files
        file.pool.buffer[0] = 1
    with opened(path) as file:
        assert file.pool.buffer[0] == 1


def test_what_is_not_this_users_alone_or_no_plain_file_is_refused(kept: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(kept)
    kept.chmod(0o660)
    for path in (kept, tmp_path, tmp_path / "link", tmp_path / "missing" / "pool"):
        files = open_files()
        with pytest.raises(ConfigError, match=rf"^pool_path: {path} "):
            opened(path)
        assert open_files() == files
    kept.chmod(0o600)
    with opened(kept) as file:
        assert file.replaced_because == ""


def test_a_pool_larger_than_memory_is_refused_and_leaves_no_pool(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^max_local_cpu_size: .* do not fit"):
        opened(path, 1 << 50)
    with opened(path) as file:
        assert file.replaced_because == "there was no file"


# ---- who has it mapped


HOLDER = """
import os, sys
from lmkv.pool.pool import Pool
pool = Pool.attach(int(sys.argv[1]), {size})
print(pool.buffer[100:104].tobytes(), flush=True)
sys.stdin.readline()
pool.close()
print("let go", flush=True)
sys.stdin.readline()
"""


@contextmanager
def holder(fd: int) -> Iterator[subprocess.Popen[str]]:
    """A process that maps the pool behind `fd`, and unmaps it on request."""
    command = [sys.executable, "-c", HOLDER.format(size=MB), str(fd)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, pass_fds=[fd], text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def test_those_of_an_earlier_life_are_seen_until_they_let_go(kept: Path) -> None:
    with opened(kept) as file, holder(file.pool.fd) as process:
        assert not file.has_earlier_users, "they got it from this life"
        file.close()
        with opened(kept) as later:
            assert later.has_earlier_users
            assert bytes(later.pool.buffer[100:104]) == b"pool"
            process.stdin.write("\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            assert process.stdout.readline() == "let go\n"  # type: ignore[union-attr]
            assert not later.has_earlier_users, "its memory is unmapped, though it runs"


def test_those_of_several_earlier_lives_are_seen_until_they_are_killed(kept: Path) -> None:
    with opened(kept) as first, holder(first.pool.fd) as one:
        first.close()
        with opened(kept) as second, holder(second.pool.fd) as two:
            second.close()
            with opened(kept) as third:
                for process in (one, two):
                    assert third.has_earlier_users
                    process.kill()
                    process.wait()
                assert not third.has_earlier_users


def test_a_reader_that_rereads_it_is_not_waited_for(kept: Path) -> None:
    with opened(kept) as file:
        peer = os.open(f"/proc/self/fd/{file.pool.fd}", os.O_RDONLY)
    with opened(kept) as file:
        assert not file.has_earlier_users
    os.close(peer)


# ---- forgotten


def test_an_unused_file_can_be_forgotten(kept: Path) -> None:
    with opened(kept):
        assert not remove_unused(kept)
        assert kept.exists()
    assert remove_unused(kept)
    assert not kept.exists()
    assert not remove_unused(kept)


def test_a_file_that_is_removed_while_a_node_has_it_is_its_memory_still(kept: Path) -> None:
    with opened(kept) as file:
        kept.unlink()
        file.pool.populate()
        assert bytes(file.pool.buffer[100:104]) == b"pool"
        with opened(kept) as other:
            assert other.replaced_because == "there was no file"


# ---- full


FULL = """
import sys
from pathlib import Path
from lmkv.errors import ConfigError
from lmkv.pool.file import PoolFile
path, other = Path(sys.argv[1], "pool"), Path(sys.argv[1], "other")
MB = 1 << 20
def opened(size_bytes):
    return PoolFile.open(path, size_bytes, 10_000, stamp=b"s")
other.write_bytes(bytes(3 * MB))
for size_bytes in (2 * MB, MB):  # the second one would fit without its table
    try:
        opened(size_bytes).close()
    except ConfigError as error:
        print(error)
other.write_bytes(bytes(2 * MB))
with opened(MB) as file:
    print(file.replaced_because)
    file.pool.populate()
with opened(MB) as file:
    print(repr(file.replaced_because))
other.write_bytes(bytes(2 * MB - 40_000))  # what the file has itself counts as free
with opened(MB) as file:
    print(repr(file.replaced_because))
"""


def test_a_full_file_system_is_refused_and_leaves_nothing_that_passes_for_a_pool(tmp_path: Path) -> None:
    *refused, first, second, third = on_small_tmpfs(tmp_path, 4 * MB, FULL).splitlines()
    assert len(refused) == 2
    assert all(re.match(r"max_local_cpu_size: [\d.]+ MiB do not fit, [\d.]+ [KM]iB at ", line) for line in refused)
    assert (first, second, third) == ("there was no file", "''", "''")
