"""Folders that lmkv makes or uses: opened so that no other user can have planted or replaced what is in them.

A shared folder may have entries of several users, as `local_disk`, a configured `runtime_dir` or /dev/shm. A private
one is a node's own. Paths are opened component by component, and what is in a folder by its descriptor: what is swapped
after a check is not used. The last component is no symbolic link; those before it may be, if root or this user made
them.

A shared folder belongs to root or to this user, and others may not replace its entries: it is not writable for all
users, or has the sticky bit. Neither holds for a mount point, whose content the administrator has named: volumes of
Kubernetes belong to root and are writable for all, those of containers belong to any user.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

from lmkv.errors import ConfigError

MAX_LINKS = 40
"""Most symbolic links in a path, as in the kernel."""
_ENTER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_ROOT = 0


class Folder:
    """An open folder. A context manager; it is closed when nothing refers to it, too.

    Methods raise `ConfigError` for what another user could have planted, and `OSError` for everything else.
    """

    def __init__(self, fd: int, path: Path, key: str) -> None:
        """Takes ownership of `fd`. `key` is the name of the setting that refusals name. Use `shared` and `private`."""
        self.fd = fd
        self.path = path
        self._key = key
        self.close = weakref.finalize(self, os.close, fd)
        """Closes the folder. Idempotent."""

    @classmethod
    def shared(cls, path: Path, key: str, *, mode: int | None = None) -> Self:
        """Opens a folder of several users. It is made with `mode`, and its parents, if there is none; None: never."""
        return cls._open_shared(path.absolute(), key, mode, may_be_link=False)

    @classmethod
    def of_file(cls, path: Path, key: str) -> Self:
        """Opens the existing folder that a file is in. It may be a link, as it is not the path's last component."""
        return cls._open_shared(path.absolute().parent, key, None, may_be_link=True)

    @classmethod
    def private(cls, path: Path, key: str, *, make: bool = True) -> Self:
        """Opens a folder of this user alone; makes it and its parents, with `make`, if there is none."""
        path = path.absolute()
        with cls(_walk(path.parent, key, 0o755 if make else None), path.parent, key) as parent:
            return parent.subfolder(path.name, make=make)

    @classmethod
    def _open_shared(cls, path: Path, key: str, mode: int | None, *, may_be_link: bool) -> Self:
        if may_be_link:
            folder = cls(_walk(path, key, mode), path, key)
        else:
            with cls(_walk(path.parent, key, None if mode is None else 0o755), path.parent, key) as parent:
                folder = cls(parent._enter(path.name, mode), path, key)
        status = os.fstat(folder.fd)
        is_planted = status.st_uid not in (_ROOT, os.geteuid())
        is_replaceable = bool(status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX)
        if (is_planted or is_replaceable) and not _is_mount_point(folder.fd):
            folder.close()
            if is_planted:
                raise folder._refusal(_foreign(status))
            raise folder._refusal("is writable for all users: run `chmod o-w` or `chmod +t` on it")
        return folder

    def subfolder(self, name: str, *, make: bool = True) -> Self:
        """Opens a private folder in this one: of this user, and writable for no other one."""
        folder = type(self)(
            self._enter(name, 0o700 if make else None, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC),
            self.path / name,
            self._key,
        )
        status = os.fstat(folder.fd)
        if status.st_uid != os.geteuid():
            folder.close()
            raise folder._refusal(_foreign(status))
        if status.st_mode & stat.S_IWOTH:
            folder.close()
            raise folder._refusal("is writable for all users: remove it, or look through it and run `chmod 700` on it")
        if status.st_mode & stat.S_IWGRP:  # Kubernetes adds it to all folders of a volume at each start of a pod
            with suppress(OSError):
                os.fchmod(folder.fd, stat.S_IMODE(status.st_mode) & ~stat.S_IWGRP)
        return folder

    def open(self, name: str, flags: int) -> int:
        """Opens a file, and makes it for this user alone if `flags` say so. No link, and no file of another user."""
        try:
            fd = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.fd)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise self._refusal("is a symbolic link: remove it", name) from None
            raise
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            reason = "is no regular file: remove it"
        elif status.st_uid != os.geteuid():
            reason = f"belongs to user {status.st_uid}, not to {os.geteuid()}: remove it, or run `chown` on it"
        elif status.st_mode & stat.S_IWOTH:
            reason = "is writable for all users: remove it"
        elif status.st_nlink > 1:
            reason = "has another name, too, which may be a file of another use: remove it"
        else:
            return fd
        os.close(fd)
        raise self._refusal(reason, name)

    def unlink(self, name: str) -> None:
        """Removes a file; does nothing if there is none."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def rename(self, name: str, new_name: str) -> None:
        """Renames a file, instead of another of the new name."""
        os.rename(name, new_name, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def scan(self) -> Iterator[os.DirEntry[str]]:
        """The entries. Of a private folder, which was opened to be read."""
        with os.scandir(self.fd) as entries:
            yield from entries

    @property
    def is_in_place(self) -> bool:
        """Whether the folder is still what its path names."""
        try:
            return os.path.samestat(self.path.lstat(), os.fstat(self.fd))
        except OSError:
            return False

    def _enter(self, name: str, mode: int | None, flags: int = _ENTER) -> int:
        """Opens the folder of this name; makes it with `mode` if there is none and `mode` is not None."""
        try:
            return os.open(name or ".", flags, dir_fd=self.fd)  # the root has no name
        except FileNotFoundError:
            if mode is None:
                raise
        except NotADirectoryError:
            where = self.path / name
            if not where.is_symlink():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(where)) from None
            raise self._refusal(
                f"is no folder, but a symbolic link: use {os.path.realpath(where)} itself", name
            ) from None
        try:
            with suppress(FileExistsError):  # another process has made it in the meantime
                os.mkdir(name, mode, dir_fd=self.fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path / name)) from None
        return self._enter(name, None, flags)

    def _refusal(self, reason: str, name: str = "") -> ConfigError:
        return ConfigError(f"{self._key}: {self.path / name} {reason}, or set {self._key} to another", key=self._key)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _walk(path: Path, key: str, mode: int | None) -> int:
    """Opens a folder that others may own, following links of root and of this user. Missing folders are made."""
    at = Folder(os.open("/", _ENTER), Path("/"), key)
    left = [*reversed(path.parts[1:])]
    links = 0
    while left:
        name = left.pop()
        with at:
            try:
                fd = os.open(name, _LOOK, dir_fd=at.fd)
            except FileNotFoundError:
                fd = -1
            if fd >= 0:
                with Folder(fd, at.path / name, key) as found:
                    status = os.fstat(fd)
                    if stat.S_ISLNK(status.st_mode):
                        if status.st_uid not in (_ROOT, os.geteuid()):
                            raise found._refusal(f"is a symbolic link of user {status.st_uid}: remove it")
                        links += 1
                        if links > MAX_LINKS:
                            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
                        target = Path(os.readlink("", dir_fd=fd))
                        left += reversed(target.parts[1:] if target.is_absolute() else target.parts)
                        if target.is_absolute():
                            at = Folder(os.open("/", _ENTER), Path("/"), key)
                        else:
                            at = Folder(os.dup(at.fd), at.path, key)
                        continue
            at = Folder(at._enter(name, mode), at.path / name, key)
    at.close.detach()
    return at.fd


def _is_mount_point(fd: int) -> bool:
    """Whether something is mounted at a folder."""
    parent = os.open("..", _ENTER, dir_fd=fd)
    try:
        return _mount_of(fd) != _mount_of(parent)
    finally:
        os.close(parent)


def _mount_of(fd: int) -> str:
    """Identifies the mount that a file is in, by the kernel's number of it, or the device where that is not known."""
    with suppress(OSError):
        for line in Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines():
            if line.startswith("mnt_id:"):
                return line
    return str(os.fstat(fd).st_dev)


def _foreign(status: os.stat_result) -> str:
    return f"belongs to user {status.st_uid} (this process is user {os.geteuid()}): run `chown {os.geteuid()}` on it"


BACKLOG = 128


class UnixListener:
    """A listening unix socket. The kernel refuses connections of other users, except root: its mode is 600."""

    def __init__(self, path: Path) -> None:
        """Listens; the stale socket of a dead process is removed.

        Raises `ConfigError` if another process listens there or the path cannot be bound.
        """
        self.path = path
        self.socket = _listen(path)
        self._inode = path.stat().st_ino

    def close(self) -> None:
        """Stops listening and removes the socket's file."""
        self.socket.close()
        with suppress(OSError):
            if self.path.stat().st_ino == self._inode:  # else it belongs to a newer process
                self.path.unlink()


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        _remove_stale(path)
        listener.bind(str(path))
        path.chmod(0o600)  # before a process can connect
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise ConfigError(
            f"runtime_dir: cannot listen at {path}: {reason}; name another directory", path=path
        ) from None
    except BaseException:
        listener.close()
        raise
    return listener


def _remove_stale(path: Path) -> None:
    if not path.is_socket():
        return  # no file, or one that bind refuses to replace
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a full backlog means that a process listens
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:
            pass
    raise ConfigError(
        f"runtime_dir: another node listens at {path}; give this one another instance_id or runtime_dir", path=path
    )
