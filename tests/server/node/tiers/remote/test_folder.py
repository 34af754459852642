"""A folder that hosts share: what others plant, stale handles, killed writers, limits, bad configurations."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmkv.errors import ConfigError
from lmkv_server.node.cache.allocator import ALIGNMENT, align
from lmkv_server.node.tiers.remote.folder import STEP_BYTES, FolderStore
from lmkv_server.node.tiers.remote.store import StoreRefused
from lmkv_server.node.tiers.remote.sweeper import KEPT_SECONDS, SWEEP_SECONDS, UNFINISHED_SECONDS, USED_SECONDS
from tests.server.node.disk_parts import until
from tests.server.node.remote_parts import ROOT, SPEC, SharedFolder, host_with, name_of, names_of
from tests.support.small_tmpfs import on_small_tmpfs

OTHER_USER = 12345
KIB = 1 << 10


@pytest.fixture
def folder() -> Iterator[SharedFolder]:
    with SharedFolder() as folder:
        yield folder


def opened(folder: SharedFolder, **limits: Any) -> FolderStore:
    """A store whose sweeps are the test's."""
    store = folder.store(**limits)
    store.tree.open()
    return store


def put(store: FolderStore, *numbers: int, size_bytes: int = KIB) -> None:
    for number in numbers:
        assert store.put(name_of(number), [memoryview(bytes(size_bytes))])


def age(folder: SharedFolder, seconds: float, *names: str) -> None:
    """Lets files be as old as if they had not been used for some time."""
    then = time.time() - seconds
    for name in names:
        os.utime(folder.file(name), (then, then))


def entries(path: Path) -> list[str]:
    return [entry.name for entry in path.iterdir()]


def free_lease(folder: SharedFolder) -> None:
    """Lets the last sweep be long ago."""
    for file in (folder.path / "lmkv-sweeps").iterdir():
        os.utime(file, (0, 0))


# ---- what others have planted


@pytest.mark.parametrize("planted", ["link", "folder", "pipe", "user"])
async def test_what_no_node_has_made_is_a_miss_and_stays(folder: SharedFolder, tmp_path: Path, planted: str) -> None:
    async with host_with(folder.store()) as host:
        host.store(0, 1)
        await host.flushed()
        host.drop(0, 1)
        assert await host.count(0, 1) == 2
        file, elsewhere = folder.file(name_of(1)), tmp_path / "elsewhere"
        file.rename(elsewhere)
        match planted:
            case "link":
                file.symlink_to(elsewhere)
            case "folder":
                file.mkdir()
            case "pipe":
                os.mkfifo(file)
            case "user":
                if os.geteuid():
                    pytest.skip("only root gives files to others")
                elsewhere.rename(file)
                os.chown(file, OTHER_USER, OTHER_USER)
        assert await host.read(0, 1) == [0]
        assert await host.count(1) == 0
        host.store(1)
        await until(lambda: host.remote.stats().skipped_chunks == 1)
        assert file.name in entries(file.parent)
        assert elsewhere.exists() == (planted != "user")
        assert host.remote.usable


async def test_a_planted_folder_is_not_entered(
    folder: SharedFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder.path / "lmkv2").symlink_to(tmp_path)
    async with host_with(folder.store()) as host:
        assert await host.count(0) == 0
        host.store(0)
        await until(lambda: host.remote.stats().skipped_chunks == 1)
    assert not entries(tmp_path)
    assert "lmkv2 in " in caplog.text
    assert "is no folder: remove it" in caplog.text


def test_nodes_of_several_users_share_by_a_group(folder: SharedFolder) -> None:
    if os.geteuid():
        pytest.skip("only root gives files to others")
    os.chown(folder.path, 0, OTHER_USER)
    folder.path.chmod(0o2770)
    first = opened(folder)
    put(first, 0)
    file = folder.file(name_of(0))
    assert (file.stat().st_gid, file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o7777) == (
        OTHER_USER,
        0o660,
        0o2770,
    )
    os.chown(file, OTHER_USER + 1, OTHER_USER)  # as another node's user has made it
    assert first.sizes([name_of(0)]) == [KIB]
    file.chmod(0o666)
    assert first.sizes([name_of(0)]) == [0]


@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize("size_bytes", [1, 4095, 4096, 4097, (1 << 20) - 81, 1 << 20, (3 << 20) + 5])
def test_files_have_the_bytes_of_their_parts_with_direct_io_and_without(
    folder: SharedFolder, is_direct: bool, size_bytes: int
) -> None:
    store = opened(folder)
    if is_direct and not store.tree.is_direct:
        pytest.skip("the file system of temporary files has no direct I/O")
    store.tree.is_direct = is_direct
    header, data = os.urandom(81), os.urandom(size_bytes)
    assert store.put(name_of(0), [memoryview(header), memoryview(data)])
    assert folder.read(name_of(0)) == header + data
    parts = [memoryview(bytearray(81)), memoryview(bytearray(size_bytes + 10_000))]
    assert store.get(name_of(0), parts) == 81 + size_bytes
    assert bytes(parts[0]) == header
    assert bytes(parts[1]) == data + bytes(10_000)
    too_small = memoryview(bytearray(80))
    assert store.get(name_of(0), [too_small]) == 0


@pytest.mark.parametrize("size_bytes", [4096, 4097, 3 << 20, STEP_BYTES + 5, 2 * STEP_BYTES])
def test_whole_pages_of_the_pool_are_written_and_read_without_a_copy(folder: SharedFolder, size_bytes: int) -> None:
    store = opened(folder)
    if not store.tree.is_direct:
        pytest.skip("the file system of temporary files has no direct I/O")
    header = os.urandom(ALIGNMENT)
    with mmap.mmap(-1, 2 * align(size_bytes)) as memory, memoryview(memory) as pool:
        pool[:size_bytes] = os.urandom(size_bytes)
        written, read = pool[:size_bytes], pool[align(size_bytes) :][:size_bytes]
        assert store.put(name_of(0), [memoryview(header), written])
        assert folder.read(name_of(0)) == header + bytes(written)
        parts = [memoryview(bytearray(ALIGNMENT)), read]
        assert store.get(name_of(0), parts) == ALIGNMENT + size_bytes
        assert bytes(parts[0]) == header
        assert read == written
        written.release()
        read.release()
    assert len(store._buffer.get(0)) <= 2 * ALIGNMENT, "it has only the headers and the last page"


# ---- a file system that loses things


async def test_a_tree_that_was_removed_is_made_again(folder: SharedFolder) -> None:
    async with host_with(folder.store()) as host:
        host.store(0, 1)
        await host.flushed()
        folder.empty()
        host.drop(0, 1)
        assert await host.read(0, 1) == []
        host.store(0, 1, 2)
        await host.flushed()
        assert folder.names() == names_of(0, 1, 2)
        host.drop(0, 1, 2)
        assert await host.count(0, 1, 2) == 3
        assert await host.read(0, 1, 2) == [0, 1, 2]


@pytest.mark.parametrize(("times", "read"), [(1, [0]), (2, [])])
async def test_a_stale_handle_is_opened_once_more(
    folder: SharedFolder, monkeypatch: pytest.MonkeyPatch, times: int, read: list[int]
) -> None:
    async with host_with(folder.store()) as host:
        host.store(0)
        await host.flushed()
        host.drop(0)
        assert await host.count(0) == 1
        left = [errno.ESTALE] * times
        get = FolderStore._get

        def stale(self: FolderStore, *arguments: Any) -> int:
            if left:
                raise OSError(left.pop(), "stale")
            return get(self, *arguments)

        monkeypatch.setattr(FolderStore, "_get", stale)
        assert await host.read(0) == read
        assert host.remote.usable


async def test_a_folder_that_is_gone_is_done_without_until_it_is_back(folder: SharedFolder) -> None:
    away = folder.path.with_name(folder.path.name + "-away")
    async with host_with(folder.store(), retry_seconds=0.01) as host:
        host.store(0)
        await host.flushed()
        folder.path.rename(away)
        assert await host.count(0, 1) == 0
        assert host.remote.is_down
        away.rename(folder.path)
        await host.open()
        assert await host.count(0, 1) == 1


def test_what_a_killed_writer_leaves_is_never_read_and_is_swept(folder: SharedFolder) -> None:
    script = (
        "import sys; from tests.server.node.remote_parts import *; from itertools import count\n"
        "folder = SharedFolder.__new__(SharedFolder); folder.path = Path(sys.argv[1]); store = folder.store()\n"
        "store.tree.open(); data = memoryview(bytes(64 << 20))\n"
        "for number in count(): store.put(name_of(number), [data]); print(number, flush=True)"
    )
    command = [sys.executable, "-c", script, str(folder.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as writer:
        assert writer.stdout
        writer.stdout.readline()
        while not list(folder.path.rglob("*.new")):
            assert writer.poll() is None
        writer.send_signal(signal.SIGKILL)
    store = opened(folder)
    whole = [name for name in folder.names() if not name.endswith(".new")]
    assert set(store.sizes(whole)) == {64 << 20}
    unfinished = list(folder.path.rglob("*.new"))
    for file in unfinished:
        os.utime(file, (0, time.time() - UNFINISHED_SECONDS / 2))
    assert store.sweeper.sweep()
    assert list(folder.path.rglob("*.new")) == unfinished, "its writer may still run"
    for file in unfinished:
        os.utime(file, (0, time.time() - 2 * UNFINISHED_SECONDS))
    free_lease(folder)
    assert store.sweeper.sweep()
    assert not list(folder.path.rglob("*.new"))
    assert set(store.sizes(whole)) == {64 << 20}


def test_a_full_folder_and_a_read_only_one_are_read(tmp_path: Path) -> None:
    script = """if True:
        import subprocess, sys
        from pathlib import Path
        from lmkv_server.node.tiers.remote.store import StoreRefused
        from tests.server.node.remote_parts import SharedFolder, name_of
        folder = SharedFolder.__new__(SharedFolder)
        folder.path = Path(sys.argv[1], "shared")
        folder.path.mkdir()
        store = folder.store()
        store.open()
        data = memoryview(bytes(1 << 20))
        assert store.put(name_of(0), [data])
        try:
            for number in range(1, 99):
                store.put(name_of(number), [data])
        except StoreRefused as error:
            print(error.strerror)
        assert not list(folder.path.rglob("*.new"))
        store.tree.open()  # full, it can be opened
        got = memoryview(bytearray(1 << 20))
        assert store.get(name_of(0), [got]) == 1 << 20
        subprocess.run(["mount", "-o", "remount,ro", sys.argv[1]], check=True)
        store.tree.open()
        assert store.tree.is_read_only
        assert store.get(name_of(0), [got]) == 1 << 20
        for refused in (lambda: store.put(name_of(99), [data]), lambda: store.remove([name_of(0)])):
            try:
                refused()
            except StoreRefused as error:
                print(error.strerror)
        """
    lines = on_small_tmpfs(tmp_path, 8 << 20, script).splitlines()
    assert lines == [os.strerror(errno.ENOSPC), *[os.strerror(errno.EROFS)] * 2]


# ---- limits


def test_a_sweep_keeps_what_was_used_last_and_what_is_not_of_nodes(folder: SharedFolder) -> None:
    store = opened(folder, size_bytes=10 * KIB)
    put(store, *range(12))
    for number in range(12):
        age(folder, 1000 - number, name_of(number))
    foreign = folder.file(name_of(0)).with_name("notes.txt")
    foreign.write_bytes(bytes(100 * KIB))
    os.utime(foreign, (0, 0))
    got = memoryview(bytearray(KIB))
    assert store.get(name_of(0), [got]) == KIB  # which counts as a use
    assert store.sweeper.sweep()
    assert folder.names() - {f"{name_of(0).rpartition('/')[0]}/notes.txt"} == names_of(0, *range(4, 12))
    assert store.evicted_count == 3
    assert foreign.exists()


def test_what_was_used_lately_is_kept_whatever_the_limit(folder: SharedFolder) -> None:
    store = opened(folder, size_bytes=KIB)
    put(store, 0, 1, 2)
    age(folder, 2 * KEPT_SECONDS, name_of(1))
    assert store.sweeper.sweep()
    assert folder.names() == names_of(0, 2)


def test_what_was_not_used_for_long_is_removed(folder: SharedFolder) -> None:
    store = opened(folder, size_bytes=0, unused_seconds=3600.0)
    put(store, 0, 1)
    age(folder, 3700, name_of(0))
    age(folder, 3500, name_of(1))
    assert store.sweeper.sweep()
    assert folder.names() == names_of(1)


def test_a_sweep_looks_at_the_files_of_other_versions_too(folder: SharedFolder) -> None:
    store = opened(folder, size_bytes=KIB)
    older = name_of(0, root="lmkv0/")
    folder.replace(older, bytes(KIB))
    put(store, 1)
    age(folder, 2 * KEPT_SECONDS, older)
    assert store.sweeper.sweep()
    assert folder.names() == names_of(1)


def test_one_of_several_nodes_sweeps_at_a_time(folder: SharedFolder) -> None:
    stores = [opened(folder) for _ in range(3)]
    assert [store.sweeper.sweep() for store in stores] == [True, False, False]
    age_seconds = SWEEP_SECONDS * 2
    (lease,) = (folder.path / "lmkv-sweeps").iterdir()
    os.utime(lease, (0, time.time() - age_seconds))
    assert [store.sweeper.sweep() for store in reversed(stores)] == [True, False, False]


def test_a_sweep_of_a_large_tree_looks_at_a_part_of_it(folder: SharedFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkv_server.node.tiers.remote.sweeper.MAX_SWEPT", 128)
    store = opened(folder, size_bytes=KIB)
    names = [f"lmkv2/{SPEC.fingerprint.hex()}/{number:02x}{number:030x}" for number in range(256)]
    for name in names:
        store.put(name, [memoryview(bytes(KIB))])
    age(folder, 2 * KEPT_SECONDS, *names)
    assert store.sweeper.sweep()
    assert 64 <= store.evicted_count <= 129


def test_a_read_renews_the_time_of_the_last_use_not_each_time(folder: SharedFolder) -> None:
    store = opened(folder)
    put(store, 0)
    got = memoryview(bytearray(KIB))
    for seconds, renewed in ((USED_SECONDS / 2, False), (USED_SECONDS * 2, True)):
        age(folder, seconds, name_of(0))
        before = folder.file(name_of(0)).stat().st_mtime
        store.get(name_of(0), [got])
        assert (folder.file(name_of(0)).stat().st_mtime > before) == renewed


def test_empty_folders_are_removed_and_made_again(folder: SharedFolder) -> None:
    store = opened(folder)
    put(store, 0)
    store.remove([name_of(0)])
    bucket = folder.file(name_of(0)).parent
    for path in (bucket, bucket.parent):
        os.utime(path, (0, 0))
    assert store.sweeper.sweep()
    assert not bucket.exists()
    put(store, 0)
    assert store.sizes([name_of(0)]) == [KIB]


# ---- bad configurations


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("absent", "does not exist; mount it, or make it"),
        ("file", "is no folder; name one that nodes share"),
        ("all", "is writable for all users"),
    ],
)
async def test_a_folder_that_cannot_be_used_ends_the_start(folder: SharedFolder, case: str, error: str) -> None:
    match case:
        case "absent":
            folder.path.rmdir()
        case "file":
            folder.path.rmdir()
            folder.path.touch()
        case "all":
            folder.path.chmod(0o777)
    try:
        with pytest.raises(ConfigError, match=f"remote_url: {folder.path} {error}"):
            async with host_with(folder.store(), ready=False):
                pass
    finally:
        folder.path.unlink() if case == "file" else None
        folder.path.mkdir(exist_ok=True)


async def test_a_folder_of_this_host_alone_is_noticed(folder: SharedFolder, caplog: pytest.LogCaptureFixture) -> None:
    async with host_with(folder.store()):
        pass
    assert "which nodes of other hosts do not share" in caplog.text


def test_no_object_has_a_name_that_leaves_the_folder(folder: SharedFolder) -> None:
    store = opened(folder)
    for name in ("../x/" + "0" * 32, "lmkv2/../" + "0" * 32, "/etc/" + "0" * 32, "lmkv2/passwd"):
        with pytest.raises(ValueError, match="is no name of an object"):
            store.put(name, [memoryview(b"x")])
    assert not folder.names()
    assert issubclass(StoreRefused, OSError)
