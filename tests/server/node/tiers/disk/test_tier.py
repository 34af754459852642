"""The disk tier over real folders: what goes in comes out, whatever happens to it on the way."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from lmkv.errors import Unreachable
from lmkv_server.node.tiers.backend import BackendTimes
from lmkv_server.node.tiers.base import Selection
from lmkv_server.node.tiers.disk import folder as disk_folder
from lmkv_server.node.tiers.disk.folder import PlainIo
from lmkv_server.node.tiers.disk.tier import DiskTier
from lmkv_server.node.tiers.disk.volume import WRITE_THREADS
from tests.server.node.cases import chunk_key, chunk_keys
from tests.server.node.disk_parts import (
    CHUNK_BYTES,
    WAIT_SECONDS,
    Host,
    files,
    flushed,
    host_with_disk,
    until,
)
from tests.support.small_tmpfs import on_small_tmpfs
from tests.support.specs import small_spec


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "disk" / "node"


@pytest.mark.parametrize("nixl", [False, True])
async def test_what_host_memory_forgets_is_still_on_disk(folder: Path, nixl: bool) -> None:
    async with host_with_disk(folder, nixl=nixl) as host:
        for number in range(4):
            host.store(number)
        await flushed(host)
        host.drop(*range(4))
        assert await host.count(*range(6)) == 4
        assert sorted(await host.read(*range(6))) == [0, 1, 2, 3]
        assert (host.disk.stats().read_chunks, host.disk.stats().read_bytes) == (4, 4 * CHUNK_BYTES)
        assert (host.disk.stats().written_chunks, host.disk.stats().skipped_chunks) == (4, 0)


async def test_a_restart_finds_everything_that_was_there(folder: Path) -> None:
    async with host_with_disk(folder) as host:
        for number in range(8):
            host.store(number, parent=number - 1 if number else None, size_bytes=CHUNK_BYTES - 8 * number)
    async with host_with_disk(folder) as host:
        assert host.on_disk == set(chunk_keys(*range(8)))
        assert len(await host.read(*range(8))) == 8
        (parent,) = {chunk.parent for chunk in host.tier if chunk.key == chunk_key(5)}
        assert parent == chunk_key(4)
        assert host.disk.stats().written_chunks == 0, "what came from disk is not written again"


async def test_another_spec_finds_nothing(folder: Path) -> None:
    async with host_with_disk(folder) as host:
        host.store(0)
        await flushed(host)
        host.drop(0)
        assert await host.count(0, spec=small_spec(layer_count=4)) == 0
        came: list[int] = []
        await host.disk.reader.read(b"g" * 16, chunk_keys(0), WAIT_SECONDS, lambda at, _: came.append(at))
        assert not came


async def test_two_who_want_the_same_chunk_share_one_read(folder: Path) -> None:
    async with host_with_disk(folder) as host:
        for number in range(4):
            host.store(number)
        await flushed(host)
        host.drop(*range(4))
        both = await asyncio.gather(host.read(0, 1, 2, 3), host.read(0, 1, 2, 3))
        assert both[0] == both[1]
        assert host.disk.stats().read_chunks == 4


async def test_what_is_used_least_goes_first_and_its_file_with_it(folder: Path) -> None:
    async with host_with_disk(folder, disk_chunks=4) as host:
        for number in range(4):
            host.store(number)
        await flushed(host)
        assert await host.count(0, 1) == 2
        for number in (4, 5):
            host.store(number)
        await flushed(host)
        await host.disk.settle()
        assert host.on_disk == set(chunk_keys(0, 1, 4, 5))
        assert host.disk.stats().evicted_chunks == 2
        assert len(files(folder)) == 4
        assert host.disk.used_bytes == host.disk.capacity_bytes == 4 * CHUNK_BYTES


async def test_a_smaller_disk_keeps_what_was_used_last(folder: Path) -> None:
    async with host_with_disk(folder) as host:
        for number in range(6):
            host.store(number)
        await flushed(host)
        for file in files(folder):
            os.utime(file, (1, 1))  # clocks of file systems are coarse
        host.drop(0)
        await host.read(0)
    async with host_with_disk(folder, disk_chunks=2) as host:
        assert len(host.on_disk) == 2
        assert chunk_key(0) in host.on_disk
    assert len(files(folder)) == 2


ONE, OTHER = b"1" * 16, b"2" * 16


async def flood(host: Host, numbers: range, owner: bytes) -> None:
    """Stores chunks of an owner, as many at a time as the pool has room for."""
    for number in numbers:
        host.store(number, owner=owner)
        await flushed(host)
    await host.disk.settle()


@pytest.mark.parametrize("folder_count", [1, 2])
async def test_an_owner_that_floods_a_disk_evicts_only_its_own_chunks(tmp_path: Path, folder_count: int) -> None:
    folders = [tmp_path / str(number) for number in range(folder_count)]
    async with host_with_disk(folders, disk_chunks=12, quota_chunks=4) as host:
        await flood(host, range(4), ONE)
        await flood(host, range(100, 130), OTHER)
        assert host.on_disk == set(chunk_keys(*range(4), *range(126, 130)))
        assert sum(len(files(folder)) for folder in folders) == 8
        assert host.disk.quotas is not None
        assert (host.disk.quotas.evicted_count, host.disk.stats().evicted_chunks) == (26, 26)


async def test_of_an_owners_chunks_on_disk_those_leave_first_that_were_not_used(folder: Path) -> None:
    async with host_with_disk(folder, quota_chunks=4) as host:
        await flood(host, range(4), ONE)
        assert await host.count(0) == 1
        await flood(host, range(4, 7), ONE)
        assert host.on_disk == set(chunk_keys(0, 4, 5, 6))


async def test_of_a_prompt_beyond_the_quota_the_disk_keeps_the_beginning(folder: Path) -> None:
    async with host_with_disk(folder, quota_chunks=4) as host:
        for number in range(8):
            host.store(number, parent=number - 1 if number else None, owner=ONE)
        await flushed(host)
        assert host.on_disk == set(chunk_keys(*range(4)))


async def test_after_a_restart_chunks_on_disk_have_their_owners_and_a_smaller_quota_holds(folder: Path) -> None:
    async with host_with_disk(folder, quota_chunks=6) as host:
        await flood(host, range(6), ONE)
        await flood(host, range(10, 12), OTHER)
    async with host_with_disk(folder, quota_chunks=2) as host:
        assert host.disk.quotas is not None
        assert host.disk.quotas.used_bytes(ONE) == host.disk.quotas.used_bytes(OTHER) == 2 * CHUNK_BYTES
        assert {chunk_key(10), chunk_key(11)} < host.on_disk
        came = await host.read(10)
        assert came[10].owner == OTHER, "what was read counts in the pool, too"


async def test_several_folders_share_the_chunks_and_all_are_found_again(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    async with host_with_disk(folders, host_chunks=30, disk_chunks=30) as host:
        for number in range(30):
            host.store(number)
        await flushed(host)
        assert [len(files(folder)) for folder in folders] == [10, 10, 10]
    async with host_with_disk(folders, host_chunks=30, disk_chunks=30) as host:
        assert len(await host.read(*range(30))) == 30


@pytest.mark.parametrize("nixl", [False, True])
@pytest.mark.parametrize("change", ["bit", "shorter", "longer", "gone", "name"])
async def test_a_file_that_is_not_what_was_written_is_a_miss_and_removed(folder: Path, change: str, nixl: bool) -> None:
    async with host_with_disk(folder, nixl=nixl) as host:
        for number in range(3):
            host.store(number)
        await flushed(host)
        host.drop(*range(3))
        (name,) = [path for path in files(folder) if path.name.startswith(chunk_key(1).hex())]
        damage(name, change)
        assert sorted(await host.read(0, 1, 2)) == [0, 2]
        await host.disk.settle()
        assert host.disk.stats().damaged_chunks == 1
        assert host.on_disk == set(chunk_keys(0, 2))
        assert not name.exists()


@pytest.mark.parametrize("change", ["shorter", "longer", "name"])
async def test_a_restart_removes_what_is_no_whole_chunk(folder: Path, change: str) -> None:
    async with host_with_disk(folder) as host:
        host.store(0)
        host.store(1)
    damage(files(folder)[0], change)
    (folder / "rest.new").write_bytes(b"unfinished")
    (folder / "notes.txt").write_bytes(b"not ours")
    async with host_with_disk(folder) as host:
        assert len(host.on_disk) == 1
    assert suffixes(folder) == ["", ".chunk", ".txt"]


def suffixes(folder: Path) -> list[str]:
    return sorted(path.suffix for path in folder.iterdir())


def damage(path: Path, change: str) -> None:
    content = path.read_bytes()
    match change:
        case "bit":
            path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
        case "shorter":
            path.write_bytes(content[:-4096])
        case "longer":
            path.write_bytes(content + bytes(4096))
        case "gone":
            path.unlink()
        case "name":
            path.rename(path.with_name(chunk_key(9).hex() + path.name[32:]))


async def test_what_is_dropped_is_gone_from_disk_too_even_if_it_is_just_being_written(folder: Path) -> None:
    async with host_with_disk(folder) as host:
        for number in range(8):
            host.store(number)
        await asyncio.sleep(0)  # the first are on their way, the others wait
        host.disk.forget(chunk_keys(*range(6)))
        host.drop(*range(6))
        await flushed(host)
        await host.disk.settle()
        assert host.on_disk == set(chunk_keys(6, 7))
        assert len(files(folder)) == 2


async def test_a_chunk_that_is_dropped_while_it_is_read_does_not_come_back(folder: Path) -> None:
    async with host_with_disk(folder) as host:
        host.store(0)
        await flushed(host)
        host.drop(0)
        reading = asyncio.create_task(host.read(0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert host.tier.reserved_count == 1
        host.disk.forget(chunk_keys(0))
        assert await reading == {}
        assert len(host.tier) == 0


async def test_a_full_pool_of_chunks_in_use_is_a_miss(folder: Path) -> None:
    async with host_with_disk(folder, host_chunks=2) as host:
        host.store(0)
        await flushed(host)
        host.drop(0)
        held = [host.store(1), host.store(2)]
        await flushed(host)
        host.tier.hold(held)
        assert await host.read(0) == {}
        host.tier.unhold(held)
        assert len(await host.read(0)) == 1


async def test_a_chunk_that_host_memory_loses_before_its_turn_is_skipped(folder: Path) -> None:
    async with host_with_disk(folder) as host:
        for number in range(8):
            host.store(number)
        host.drop(*range(8))  # before any write
        await flushed(host)
        assert host.disk.stats().skipped_chunks == 8
        assert not host.on_disk


# ---- folders that fail


class Trouble(PlainIo):
    """System calls of which some wait until they are let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def write(self, fd: int, memory: memoryview) -> None:
        self.let_go.wait(WAIT_SECONDS)
        super().write(fd, memory)


async def test_a_slow_disk_delays_nothing_and_is_used_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    trouble = Trouble()
    host = Host(8)
    times = BackendTimes(stall_seconds=1.0)
    async with DiskTier([folder], 32 * CHUNK_BYTES, host.cache, io=trouble, times=times) as disk:
        host.disk = disk
        host.store(0)
        await until(lambda: not disk.usable)
        for number in range(1, 20):  # more than host memory holds: it makes room as always
            host.store(number)
        assert await host.count(0) == 0
        assert "slow" in caplog.text
        trouble.let_go.set()
        await until(lambda: disk.usable)
        host.store(20)
        await flushed(host)
        assert chunk_key(20) in host.on_disk
        host.check()
    host.pool.close()


async def test_a_disk_that_hangs_ends_neither_a_drop_nor_the_node_late(folder: Path) -> None:
    trouble = Trouble()
    trouble.let_go.set()
    host = Host(8)
    times = BackendTimes(stall_seconds=0.2)
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            async with DiskTier([folder], 32 * CHUNK_BYTES, host.cache, io=trouble, times=times) as disk:
                host.disk = disk
                host.store(0)
                await flushed(host)
                trouble.let_go.clear()
                for number in range(1, 1 + WRITE_THREADS):  # which removals share the threads with
                    host.store(number)
                await until(lambda: not disk.usable)
                with pytest.raises(Unreachable, match=f"{folder} does not answer"):
                    await disk.drop(Selection(keys=chunk_keys(0)))
                assert chunk_key(0) not in host.on_disk
    finally:
        trouble.let_go.set()


async def test_a_chunk_that_is_dropped_while_it_is_written_is_not_kept(folder: Path) -> None:
    trouble = Trouble()
    host = Host(8)
    async with DiskTier([folder], 32 * CHUNK_BYTES, host.cache, io=trouble) as disk:
        host.disk = disk
        host.store(0)
        host.store(1)
        await until(lambda: len(disk.writer._writing) > 0)
        disk.forget(chunk_keys(0, 1))
        trouble.let_go.set()
        await flushed(host)
        await disk.settle()
        assert host.on_disk == set()
        assert not files(folder)
        host.drop(0, 1)
        host.check()
    host.pool.close()


async def test_a_folder_that_vanishes_is_done_without_and_used_again(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with host_with_disk(folder, retry_seconds=0.02) as host:
        for number in range(3):
            host.store(number)
        await flushed(host)
        shutil.rmtree(folder.parent)
        host.drop(0)
        assert await host.read(0) == {}
        assert not host.on_disk
        assert (host.disk.usable, host.disk.capacity_bytes) == (False, 0)
        assert caplog.text.count("is lost") == 1
        host.store(3)
        assert not folder.parent.exists(), "nothing is made where a disk may have been"
        folder.parent.mkdir()
        await until(lambda: host.disk.usable)
        await flushed(host)
        assert host.on_disk == set(chunk_keys(1, 2, 3)), "what host memory holds is written again"


async def test_one_folder_that_cannot_be_used_leaves_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    async with host_with_disk([tmp_path / "file" / "a", tmp_path / "b"], retry_seconds=0.01) as host:
        host.store(0)
        await flushed(host)
        assert len(files(tmp_path / "b")) == 1
        await until(lambda: host.disk.stats().failures > 2)
        assert caplog.text.count("cannot be used") == 1, "once, not with every attempt"
        assert host.disk.stats().down_backends == 1
        assert host.disk.usable


async def test_a_folder_that_another_node_uses_is_left_to_it(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with host_with_disk(folder) as first, host_with_disk(folder, retry_seconds=0.01) as second:
        assert not second.disk.usable
        assert "another node uses it" in caplog.text
        first.store(0)
        await flushed(first)
        assert len(files(folder)) == 1


def script(body: str) -> str:
    return "import asyncio, os, sys\nfrom pathlib import Path\n" + PARTS + textwrap.dedent(body)


PARTS = """
from tests.server.node.cases import chunk_keys
from tests.server.node.disk_parts import *
"""


@pytest.mark.parametrize("nixl", [False, True])
def test_a_full_disk_keeps_what_fits_and_takes_more_once_there_is_room(tmp_path: Path, nixl: bool) -> None:
    out = on_small_tmpfs(
        tmp_path,
        20 * CHUNK_BYTES,
        script("""
        async def main():
            folder = Path(sys.argv[1]) / "node"
            nixl = NIXL
            async with host_with_disk(folder, host_chunks=64, disk_chunks=64, nixl=nixl, full_seconds=0.05) as host:
                for number in range(60):
                    host.store(number)
                await flushed(host)
                kept = host.disk.chunk_count
                assert 10 < kept <= 20, kept
                assert host.disk.stats().failures, "it was full"
                assert host.disk.usable
                for volume in host.disk.volumes:
                    assert volume.index.used_bytes == sum(chunk.file_bytes for chunk in volume.index)
                numbers = [number for number in range(60) if host.disk.get(chunk_keys(number)[0])]
                host.drop(*range(60))
                assert sorted(await host.read(*range(60))) == numbers
                print(kept)
        asyncio.run(main())
        """).replace("NIXL", str(nixl)),
    )
    assert int(out) > 10


async def test_a_folder_that_is_swapped_for_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    victim, moved = tmp_path / "victim", tmp_path / "moved"
    victim.mkdir()
    async with host_with_disk(folder) as host:
        host.store(0)
        await flushed(host)
        host.drop(0)
        shutil.copytree(folder, victim, dirs_exist_ok=True)
        before = {path: path.read_bytes() for path in victim.iterdir()}
        swap(folder, victim, moved)
        assert await host.read(0) == {}
        await until(lambda: not host.disk.usable)
        host.store(1)
        await until(lambda: host.disk.volumes[0].folder.refusal is not None)
        assert {path: path.read_bytes() for path in victim.iterdir()} == before
        swap(folder, None, moved)
        await until(lambda: host.disk.usable)
        await flushed(host)
        host.drop(1)
        assert set(await host.read(0, 1)) == {0, 1}


def swap(folder: Path, target: Path | None, moved: Path) -> None:
    """Puts a link to `target` in place of a folder; None: takes it back."""
    if target:
        folder.rename(moved)
        folder.symlink_to(target)
    else:
        folder.unlink()
        moved.rename(folder)


def test_without_permission_the_node_continues(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "kept").mkdir(mode=0o755)
    body = script("""
    async def main():
        content(0, 8)  # imports what is out of reach from here on
        if os.getuid() == 0:  # whom no permission stops
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        async with host_with_disk(Path(sys.argv[1]) / "node") as host:
            host.store(0)
            assert not host.disk.usable
            assert host.disk.stats().failures == 1
    asyncio.run(main())
    """)
    done = subprocess.run(
        [sys.executable, "-c", body, str(tmp_path / "kept")], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Permission denied") == 1, "it says so, once"


KILLED = """
async def main():
    async with host_with_disk(Path(sys.argv[1]), host_chunks=20, disk_chunks=24) as host:
        for number in range(10**9):
            host.store(number)
            if not number % 4:
                await asyncio.sleep(0)
            if number == 100:
                print("writing", flush=True)
asyncio.run(main())
"""


@pytest.mark.parametrize("file_count", [5, 10, 15])
async def test_whatever_a_killed_process_leaves_is_whole_or_gone(tmp_path: Path, file_count: int) -> None:
    folder = tmp_path / "node"
    kill_while_writing(folder, file_count)
    async with host_with_disk(folder, host_chunks=64, disk_chunks=24) as host:
        found = [int.from_bytes(key, "big") for key in host.on_disk]
        assert len(found) >= file_count - 5  # of those that were counted some may have had to go for others
        assert sorted(await host.read(*found)) == sorted(found), "nothing is found that is not whole"
        assert host.disk.stats().damaged_chunks == 0
    assert ".new" not in suffixes(folder)


def kill_while_writing(folder: Path, file_count: int) -> None:
    """Kills a process that writes and evicts without end, once there is this number of files."""
    with subprocess.Popen([sys.executable, "-c", script(KILLED), str(folder)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == b"writing\n"
            deadline = time.monotonic() + WAIT_SECONDS
            while sum(1 for _ in folder.glob("*.chunk")) < file_count:
                assert time.monotonic() < deadline
                time.sleep(0.002)
        finally:
            process.kill()


async def test_where_there_is_no_direct_io_the_page_cache_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_folder.DiskFolder, "_probe", lambda _: False)
    async with host_with_disk(folder) as host:
        host.store(0)
        await flushed(host)
        host.drop(0)
        assert len(await host.read(0)) == 1
