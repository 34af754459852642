"""Folders that other users could have planted, replaced or filled, and those of administrators and Kubernetes."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmkv.errors import ConfigError
from lmkv.runtime.folder import MAX_LINKS, Folder, UnixListener

OTHER = 12345
KEY = "local_disk"
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root has files of other users")


@pytest.fixture
def shared(short_folder: Path) -> Path:
    """A folder in which every user may make entries, as /tmp."""
    short_folder.chmod(0o711)
    folder = short_folder / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def as_other(*command: object) -> None:
    subprocess.run([str(part) for part in command], user=OTHER, group=OTHER, check=True)


def read(folder: Folder, name: str) -> bytes:
    fd = folder.open(name, os.O_RDONLY)
    try:
        return os.read(fd, 100)
    finally:
        os.close(fd)


# ---- what is opened


def test_folders_are_made_for_this_user_with_their_parents(tmp_path: Path) -> None:
    with Folder.private(tmp_path / "a" / "b" / "c", KEY) as folder:
        os.close(folder.open("file", os.O_WRONLY | os.O_CREAT))
        assert [entry.name for entry in folder.scan()] == ["file"]
    modes = [(tmp_path / path).stat().st_mode & 0o777 for path in ("a", "a/b", "a/b/c", "a/b/c/file")]
    assert modes == [0o755, 0o755, 0o700, 0o600]
    with pytest.raises(FileNotFoundError):
        Folder.private(tmp_path / "none", KEY, make=False)
    with pytest.raises(FileNotFoundError):
        Folder.shared(tmp_path / "none", KEY)


def test_folders_that_another_process_makes_at_the_same_time_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = os.mkdir

    def after_another(name: str, *arguments: int, **options: int) -> None:
        make(name, *arguments, **options)
        make(name, *arguments, **options)

    monkeypatch.setattr(os, "mkdir", after_another)
    with Folder.private(tmp_path / "a" / "b", "runtime_dir") as folder:
        assert folder.is_in_place


def test_a_folder_that_is_refused_leaves_nothing_open(tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    (tmp_path / "all").chmod(0o777)
    file_count = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(ConfigError, match="writable for all users"):
        Folder.shared(tmp_path / "all", "local_disk")
    assert len(list(Path("/proc/self/fd").iterdir())) == file_count


def test_a_relative_path_and_one_with_dots_lead_where_they_always_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Folder.private(Path("a/../b"), KEY).close  # noqa: B018  # it is closed with its last reference
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    with Folder.shared(Path("/"), KEY) as root:
        assert os.fstat(root.fd).st_ino == Path("/").stat().st_ino


def test_links_before_the_last_component_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "absolute").symlink_to(tmp_path / "link")
    for path in ("link/inner", "absolute/inner", "absolute/../link/inner"):
        with Folder.shared(tmp_path / path, KEY) as folder:
            assert os.fstat(folder.fd).st_ino == (tmp_path / "real" / "inner").stat().st_ino
            assert folder.is_in_place
    with Folder.of_file(tmp_path / "link" / "pool", KEY) as folder:
        assert os.fstat(folder.fd).st_ino == (tmp_path / "real").stat().st_ino


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    with pytest.raises(OSError) as refused:
        Folder.private(tmp_path / "one" / "a", KEY)
    assert refused.value.errno == errno.ELOOP
    last = tmp_path
    for number in range(MAX_LINKS):
        (tmp_path / f"link-{number}").symlink_to(last)
        last = tmp_path / f"link-{number}"
    Folder.private(last / "a", KEY).close()


def test_a_link_as_the_last_component_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "dangling").symlink_to("nowhere")
    for open_it in (Folder.shared, Folder.private):
        with pytest.raises(
            ConfigError, match=f"^local_disk: {tmp_path}/link is no folder, but .*{tmp_path}/real itself"
        ):
            open_it(tmp_path / "link", KEY)
        with pytest.raises(ConfigError, match="is no folder, but a symbolic link"):
            open_it(tmp_path / "dangling", KEY)
    assert not (tmp_path / "nowhere").exists()


# ---- other users


@as_root
def test_a_link_of_another_user_is_refused_anywhere_in_a_path(shared: Path) -> None:
    victim = shared.parent / "victim"
    victim.mkdir()
    as_other("ln", "-s", victim, shared / "planted")
    for path in (shared / "planted", shared / "planted" / "n"):
        for open_it in (Folder.shared, Folder.private):
            with pytest.raises(ConfigError, match=r"symbolic link"):
                open_it(path, KEY)
    with pytest.raises(ConfigError, match=rf"is a symbolic link of user {OTHER}: remove it"):
        Folder.of_file(shared / "planted" / "pool", KEY)
    assert not list(victim.iterdir())


@as_root
def test_a_folder_of_another_user_is_refused(shared: Path) -> None:
    as_other("mkdir", shared / "planted")
    said = rf"^local_disk: .*planted belongs to user {OTHER} \(this process is user 0\): run `chown 0` on it, or set"
    for open_it in (Folder.shared, Folder.private):
        with pytest.raises(ConfigError, match=said):
            open_it(shared / "planted", KEY)


@pytest.mark.parametrize(
    ("mode", "is_shared", "is_private"),
    [
        (0o700, True, True),
        (0o755, True, True),
        (0o2775, True, True),  # of a volume with fsGroup
        (0o777, False, False),
        (0o2777, False, False),
        (0o1777, True, False),
    ],
)
def test_what_others_may_write_to_is_refused(tmp_path: Path, mode: int, is_shared: bool, is_private: bool) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for open_it, is_opened in ((Folder.shared, is_shared), (Folder.private, is_private)):
        folder.chmod(mode)
        if is_opened:
            open_it(folder, KEY).close()
        else:
            with pytest.raises(ConfigError, match=r"is writable for all users: .*`chmod"):
                open_it(folder, KEY)
    if is_private:
        assert not folder.stat().st_mode & 0o022, "others could have added files"


@pytest.fixture
def volume(short_folder: Path) -> Iterator[Path]:
    """A mount point, as volumes are in containers."""
    folder = short_folder / "volume"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "lmkv-test", folder], capture_output=True).returncode:
        pytest.skip("this process may not mount")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@as_root
@pytest.mark.parametrize(("owner", "mode"), [(0, 0o2777), (0, 0o2775), (OTHER, 0o777), (OTHER, 0o755)])
def test_a_volume_may_belong_to_any_user_and_be_writable_for_all(volume: Path, owner: int, mode: int) -> None:
    os.chown(volume, owner, 10001)
    volume.chmod(mode)
    with Folder.shared(volume, KEY) as folder, folder.subfolder("n") as private:
        os.close(private.open("chunk", os.O_WRONLY | os.O_CREAT))
    (volume / "n").chmod(0o2770)  # as Kubernetes does at the next start
    (volume / "n" / "chunk").chmod(0o660)
    with Folder.shared(volume, KEY) as folder, folder.subfolder("n") as private:
        assert read(private, "chunk") == b""


@as_root
def test_a_process_of_another_user_may_use_the_folders_of_its_pod(shared: Path) -> None:
    """A node that is not root: `runAsUser`, with a folder that root has made and given it by its group."""
    shared.chmod(0o2775)
    os.chown(shared, 0, OTHER)
    pid = os.fork()
    if not pid:
        status = 1
        try:
            os.setgroups([])
            os.setgid(OTHER)
            os.setuid(OTHER)
            with Folder.shared(shared, KEY) as folder, folder.subfolder("n") as private:
                os.close(private.open("chunk", os.O_WRONLY | os.O_CREAT))
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (shared / "n").stat().st_uid == OTHER
    with Folder.shared(shared, KEY) as folder, pytest.raises(ConfigError, match=rf"n belongs to user {OTHER}"):
        folder.subfolder("n")


# ---- files


def test_only_plain_files_of_this_user_are_opened(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    with Folder.private(tmp_path / "n", KEY) as folder:
        (folder.path / "link").symlink_to(secret)
        os.link(secret, folder.path / "hard")
        os.mkfifo(folder.path / "pipe")
        (folder.path / "open").touch()
        (folder.path / "open").chmod(0o666)
        file_count = len(list(Path("/proc/self/fd").iterdir()))
        for name, reason in (
            ("link", "is a symbolic link: remove it"),
            ("hard", "has another name"),
            ("pipe", "is no regular file"),
            ("open", "is writable for all users"),
        ):
            with pytest.raises(ConfigError, match=f"^local_disk: {folder.path / name} {reason}.*, or set local_disk"):
                folder.open(name, os.O_RDWR | os.O_CREAT)
        assert len(list(Path("/proc/self/fd").iterdir())) == file_count, "what is refused is closed"
        with pytest.raises(FileNotFoundError):
            folder.open("none", os.O_RDONLY)
        folder.unlink("none")
    assert secret.read_text() == "secret"


@as_root
def test_a_file_of_another_user_is_refused(shared: Path) -> None:
    as_other("touch", shared / "pool")
    with (
        Folder.of_file(shared / "pool", KEY) as folder,
        pytest.raises(ConfigError, match=rf"pool belongs to user {OTHER}, not to 0: remove it, or run `chown` on it"),
    ):
        folder.open("pool", os.O_RDWR)


def test_what_is_swapped_after_the_check_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "file").write_text("victim")
    with Folder.private(tmp_path / "n", KEY) as folder:
        folder.path.joinpath("file").write_text("own")
        folder.path.rename(tmp_path / "moved")
        folder.path.symlink_to("victim")
        assert read(folder, "file") == b"own"
        assert not folder.is_in_place
        folder.rename("file", "other")
        folder.unlink("other")
    assert [path.name for path in (tmp_path / "victim").iterdir()] == ["file"]
    assert not list((tmp_path / "moved").iterdir())


def test_a_folder_that_is_swapped_all_the_time_is_opened_or_refused(tmp_path: Path) -> None:
    own, victim, place = (tmp_path / name for name in ("own", "victim", "place"))
    for path in (own, victim):
        path.mkdir(mode=0o700)
        (path / "file").write_text(path.name)
    ended = threading.Event()

    def swap() -> None:
        while not ended.is_set():
            own.rename(place)
            place.rename(own)
            place.symlink_to(victim)
            place.unlink()

    thread = threading.Thread(target=swap)
    thread.start()
    opened = refused = 0
    try:
        while opened < 20 or refused < 20:
            try:
                with Folder.private(place, KEY, make=False) as folder:
                    assert read(folder, "file") == b"own"
                    opened += 1
            except ConfigError:
                refused += 1
            except (FileNotFoundError, NotADirectoryError):
                continue
    finally:
        ended.set()
        thread.join()
    shutil.rmtree(victim)


def connect(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_only_its_user_can_open_it(short_folder: Path) -> None:
    listener = UnixListener(short_folder / "one.sock")
    assert stat.S_IMODE(listener.path.stat().st_mode) == 0o600
    connect(listener.path)
    listener.close()
    assert not listener.path.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_another_user_is_refused_by_the_kernel(short_folder: Path) -> None:
    short_folder.chmod(0o755)
    listener = UnixListener(short_folder / "one.sock")
    try:
        os.seteuid(12345)
        with pytest.raises(PermissionError):
            connect(listener.path)
    finally:
        os.seteuid(0)
        listener.close()


def test_a_socket_at_which_a_process_listens_is_not_replaced(short_folder: Path) -> None:
    first = UnixListener(short_folder / "one.sock")
    with pytest.raises(ConfigError, match="another node listens at"):
        UnixListener(first.path)
    connect(first.path)
    first.close()


def test_the_socket_of_a_dead_process_is_replaced(short_folder: Path) -> None:
    path = short_folder / "one.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    listener = UnixListener(path)
    connect(path)
    listener.close()


def test_the_file_of_a_newer_listener_stays(short_folder: Path) -> None:
    first = UnixListener(short_folder / "one.sock")
    first.path.rename(short_folder / "moved.sock")
    second = UnixListener(first.path)
    first.close()
    connect(second.path)
    second.close()
