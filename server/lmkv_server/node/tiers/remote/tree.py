"""A folder that nodes of many hosts share: its subfolders and files, and which of them are trusted.

What this process or a node like it has not made is neither read, followed, replaced nor removed. Trusted is what
belongs to this user, root, or the owner of the shared folder, and what belongs to its group, if the group may write to
it. It is not writable for all users, unless the file system gives every file this mode.

Calls block for as long as the file system does not answer: they belong on threads that a process may leave behind.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import re
import secrets
import stat
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from lmkv.errors import ConfigError
from lmkv.runtime.folder import Folder
from lmkv.telemetry.logs import LimitedLogger
from lmkv_server.node.cache.allocator import ALIGNMENT
from lmkv_server.node.tiers.remote.store import StoreRefused

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_OPEN = 64
"""Subfolders that are kept open: one for each kind of chunks."""
STALE = (errno.ESTALE, errno.EIO, errno.ENOTCONN)
"""What a file system on the network answers for what it had before, such as a folder that was made again."""
REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOTDIR, errno.ELOOP)
BUCKET = re.compile(r"[0-9a-f]{2}")
"""The folder of the keys that begin with these digits."""
MAX_DEPTH = 4
"""Slashes in the longest name of a folder that has buckets."""
_VERSION = re.compile(r"lmkv[0-9]{1,4}[a-z]?")
LOCAL_SYSTEMS = ("btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs")
"""File systems that hosts do not share."""
_KEY = "remote_url"
_ENTER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Directory:
    """An open folder, which is closed with the last reference to it."""

    def __init__(self, fd: int) -> None:
        """Takes ownership of `fd`."""
        self.fd = fd
        self._close = weakref.finalize(self, os.close, fd)

    @property
    def is_removed(self) -> bool:
        """Whether the folder was removed since it was opened."""
        return os.fstat(self.fd).st_nlink == 0


class FolderTree:
    """The shared folder. Thread-safe. Call `open` first, and again after a failure.

    Names are relative to the folder. Methods raise `StoreRefused` for what is not permitted, or for which there is no
    space, and another `OSError` if the file system fails.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.is_read_only = False
        """Whether nothing could be written when the folder was opened."""
        self.is_direct = False
        """Whether files can be read and written past the page cache, whole pages at a time."""
        self._root: Folder | None = None
        self._owners = frozenset[int]()
        self._group: int | None = None
        """The group whose files are trusted."""
        self._ignores_modes = False
        """Whether files are writable for all users however they are made."""
        self._folders: OrderedDict[str, Directory] = OrderedDict()
        self._lock = threading.Lock()
        self._log = LimitedLogger(logger)

    def open(self) -> None:
        """Opens the folder, and finds out what may be done in it.

        Raises `ConfigError` if it does not exist, is none, may not be read, or may be replaced by other users.
        """
        self.close()
        try:
            root = Folder.shared(self.path, _KEY)
            os.close(os.open(".", _ENTER, dir_fd=root.fd))
        except OSError as error:
            if reason := _UNUSABLE.get(error.errno or 0):
                raise ConfigError(f"{_KEY}: {self.path} {reason}", key=_KEY) from None
            raise
        status = os.fstat(root.fd)
        self._owners = frozenset((0, os.geteuid(), status.st_uid))
        mode = status.st_mode
        self._group = status.st_gid if mode & stat.S_IWGRP and not mode & stat.S_IWOTH else None
        self._root = root
        self._probe(root)
        if (system := _file_system(status)) in LOCAL_SYSTEMS:
            logger.warning("remote: %s is on %s, which nodes of other hosts do not share", self.path, system)

    def close(self) -> None:
        """Closes all that no call uses. Idempotent."""
        with self._lock:
            self._folders.clear()
        self._root = None

    def check(self) -> None:
        """Raises `OSError` unless the folder is open, and still what its path names."""
        root = self._root
        if root is None or not root.is_in_place:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))

    def folder(self, name: str, *, make: bool = False) -> Directory | None:
        """Opens a subfolder, or makes it; None if there is none, or if it is not trusted and not to be made.

        It may have been removed since it was opened first: `again` notices.
        """
        with self._lock:
            if found := self._folders.get(name):
                self._folders.move_to_end(name)
                return found
        root = self._root
        if root is None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
        at: Directory | Folder = root
        for part in name.split("/"):
            entered = self.enter(at.fd, part, make=make)
            if entered is None:
                return None
            at = entered
        assert isinstance(at, Directory)
        with self._lock:
            self._folders[name] = at
            while len(self._folders) > MAX_OPEN:
                self._folders.popitem(last=False)
        return at

    def enter(self, parent: int, name: str, *, make: bool = False) -> Directory | None:
        """Opens a folder in an open one, as `folder` does."""
        try:
            entered = Directory(os.open(name, _ENTER, dir_fd=parent))
        except FileNotFoundError:
            if not make:
                return None
            self._make(parent, name)
            entered = Directory(os.open(name, _ENTER, dir_fd=parent))
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP, errno.EACCES):
                raise
            is_link = error.errno != errno.EACCES
            self._foreign(name, "is no folder" if is_link else "may not be read by this user", make=make)
            return None
        if self.trusts(status := os.fstat(entered.fd)):
            return entered
        self._foreign(name, f"belongs to user {status.st_uid} and has mode {status.st_mode & 0o777:o}", make=make)
        return None

    def scan(self, parent: int, name: str) -> Iterator[os.DirEntry[str]]:
        """The entries of a folder in an open one; none if there is no such folder, or if it is not trusted."""
        if (found := self.enter(parent, name)) is not None:
            with os.scandir(found.fd) as entries:
                yield from entries

    def spec_folders(self, name: str = "") -> Iterator[str]:
        """The names of all folders below one that have buckets: those of this version of lmkv and of others.

        Each spec has one for each way in which its chunks are encoded and encrypted.
        """
        if not name:
            root = self._root
            names = [] if root is None else [entry.name for entry in self.scan(root.fd, ".")]
            for version in filter(_VERSION.fullmatch, names):
                yield from self.spec_folders(version)
            return
        folder = self.folder(name)
        inner = [] if folder is None else [entry.name for entry in self.scan(folder.fd, ".") if _is_folder(entry)]
        if any(map(BUCKET.fullmatch, inner)):
            yield name
        elif name.count("/") < MAX_DEPTH:
            for each in inner:
                yield from self.spec_folders(f"{name}/{each}")

    def trusts(self, status: os.stat_result) -> bool:
        """Whether this process or a node like it has made a file or folder."""
        is_own = status.st_uid in self._owners or status.st_gid == self._group
        return is_own and (self._ignores_modes or not status.st_mode & stat.S_IWOTH)

    def is_object(self, status: os.stat_result) -> bool:
        """Whether it is a regular file that is trusted."""
        return stat.S_ISREG(status.st_mode) and self.trusts(status)

    @property
    def flags(self) -> int:
        """Flags of files of chunks."""
        return os.O_DIRECT if self.is_direct else 0

    def create(self, folder: int, name: str, flags: int = 0) -> int:
        """Makes a file that does not exist, for those who may write to the shared folder."""
        flags |= os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600, dir_fd=folder)
        if self._group is not None:
            with suppress(OSError):  # of a file system without modes
                os.fchmod(fd, 0o660)
        return fd

    def again(self, name: str, call: Callable[[], T], absent: T) -> T:
        """Returns what a call returns that uses `folder(name)`; calls it once more if that was out of date.

        Returns `absent` if that does not help, and the shared folder itself is fine.
        """
        for _ in range(2):
            with self._lock:
                known = self._folders.get(name)
            try:
                with suppress(FileNotFoundError):
                    if (result := call()) != absent:
                        return result
                if known is None or not known.is_removed:
                    return absent
            except OSError as error:
                if error.errno not in STALE:
                    raise
                self.check()
            self._forget(name)
        return absent

    def _forget(self, name: str) -> None:
        with self._lock:
            self._folders.pop(name, None)

    def _make(self, parent: int, name: str) -> None:
        with suppress(FileExistsError):  # another node has made it in the meantime
            os.mkdir(name, 0o700, dir_fd=parent)
            if self._group is not None:
                with suppress(OSError):
                    os.chmod(name, 0o2770, dir_fd=parent)  # noqa: S103  # for its group

    def _foreign(self, name: str, reason: str, *, make: bool) -> None:
        """Notes what is not trusted, which is the same as absent unless it should be made."""
        self._log.warning("remote: %s in %s is ignored: it %s", name, self.path, reason)
        if make:
            raise StoreRefused(f"{name} in {self.path} {reason}: remove it, or name another folder in {_KEY}")

    def _probe(self, root: Folder) -> None:
        """Finds out as whose files are made, and with which mode. A full file system still has chunks to read."""
        name = f".lmkv-{secrets.token_hex(8)}.new"
        self.is_read_only = self.is_direct = False
        try:
            fd = self.create(root.fd, name)
        except OSError as error:
            if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
                self.is_read_only = True
                logger.warning("remote: %s is read-only here (%s): chunks are read", self.path, error.strerror)
            elif error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return
        try:
            status = os.fstat(fd)
            self.is_direct = _is_direct(root.fd, name)
        finally:
            os.close(fd)
            os.unlink(name, dir_fd=root.fd)
        self._owners |= {status.st_uid}  # servers may map users to others
        self._ignores_modes = bool(status.st_mode & stat.S_IWOTH)


_UNUSABLE = {
    errno.ENOENT: "does not exist; mount it, or make it",
    errno.ENOTDIR: "is no folder; name one that nodes share",
    errno.EACCES: "may not be read by this user; permit it",
}


def _is_direct(folder: int, name: str) -> bool:
    """Whether a file can be written past the page cache. A full file system is asked again when it is opened again."""
    try:
        fd = os.open(name, os.O_WRONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, ALIGNMENT) as page, memoryview(page) as memory:
            return os.pwrite(fd, memory, 0) == ALIGNMENT
    except OSError:
        return False
    finally:
        os.close(fd)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)


def _file_system(status: os.stat_result) -> str:
    """The type of the file system that something is on; empty if it is not known."""
    device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    for words in _mounts():
        if words[2] == device:
            return words[words.index("-") + 1]
    return ""


def _mounts() -> Iterator[list[str]]:
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            yield line.split(" ")
