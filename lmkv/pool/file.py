"""The file of a pool that survives restarts of its node, and detection of its earlier users.

docs/guides/warm-restart.md describes both.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import Self

from lmkv.errors import ConfigError
from lmkv.pool.pool import Pool, cannot_be_made, check_fits, room_for_file
from lmkv.runtime.folder import Folder

STAMP_BYTES = 64
"""Size of the stamp at the beginning of the table."""

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, process
_WHOLE = (os.SEEK_SET, 0, 0, 0)
_BLOCK_BYTES = 512  # of what `stat` counts


class PoolFile:
    """A named file that contains a pool and, behind it, a table of the pool's content. Must be closed.

        0 ────────────── pool ────────────── size_bytes ── stamp ── table ──┤
          mapped by the node and its workers    mapped by the node alone

    It is opened twice, for two locks that the kernel releases when the processes exit. The lock of the first file
    description shows that a node is running. The second description is passed to workers with the pool, and its lock
    is held as long as any of them has the pool mapped: after a restart, the node so detects whether processes that got
    the pool earlier may still access it.
    """

    def __init__(
        self, fd: int, size_bytes: int, table_bytes: int, *, numa_node: int | None, replaced_because: str
    ) -> None:
        """Takes ownership of `fd`, the first description. Use `open`."""
        self._fd = fd
        self.replaced_because = replaced_because
        """Why the file has no earlier content; empty if its table is from before a restart."""
        self._mapping = mmap.mmap(fd, table_bytes, offset=size_bytes)
        self.table = memoryview(self._mapping)[STAMP_BYTES:]
        """The table, all zeros in a new file. Its memory is allocated: writing never fails."""
        shared = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        self.pool = Pool.from_file(shared, size_bytes, numa_node)
        """The pool; closed with the file."""
        fcntl.fcntl(shared, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, *_WHOLE))

    @classmethod
    def open(cls, path: Path, size_bytes: int, table_bytes: int, *, stamp: bytes, numa_node: int | None = None) -> Self:
        """Opens the file at `path` if it has this stamp and this exact size, else replaces it.

        On a hugetlbfs sizes are whole huge pages: the pool's is rounded down, the table's up. Processes that have a
        replaced file mapped keep its memory. Raises `ConfigError` if another node has the file, if other users can
        write to it, or if there is not enough memory.
        """
        try:
            size_bytes, _ = room_for_file(path, size_bytes)
            page = max(os.statvfs(path.parent).f_bsize, mmap.PAGESIZE)
            size_bytes -= size_bytes % page
            table_bytes = -(-(STAMP_BYTES + table_bytes) // page) * page
            folder = Folder.of_file(path, "pool_path")
            fd = _open_locked(folder, path.name)
            try:
                replaced_because = _difference(fd, size_bytes, table_bytes, stamp)
                if replaced_because and os.fstat(fd).st_size:
                    folder.unlink(path.name)
                    old, fd = fd, _open_locked(folder, path.name, os.O_EXCL)
                    os.close(old)
                _, free_bytes = room_for_file(path, size_bytes)  # after the old file was removed
                free_bytes += os.fstat(fd).st_blocks * _BLOCK_BYTES
                check_fits(size_bytes + table_bytes, free_bytes, f"at {path.parent}")
                if replaced_because:
                    _fill(fd, size_bytes, table_bytes, stamp)
                return cls(fd, size_bytes, table_bytes, numa_node=numa_node, replaced_because=replaced_because)
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            raise cannot_be_made(path, error) from None

    @property
    def has_earlier_users(self) -> bool:
        """Whether a process that got the pool before the node's restart still has it mapped."""
        reply = fcntl.fcntl(self.pool.fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, *_WHOLE))
        return bool(_FLOCK.unpack(reply)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Unmaps and closes everything; the file stays. Idempotent."""
        self.pool.close()
        if self._fd >= 0:
            self.table.release()
            self._mapping.close()
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def remove_unused(path: Path) -> bool:
    """Removes the file of a pool unless a node uses it; returns whether it was removed."""
    try:
        with Folder.of_file(path, "pool_path") as folder:
            fd = folder.open(path.name, os.O_RDWR)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                folder.unlink(path.name)
                return True
            finally:
                os.close(fd)
    except (OSError, ConfigError):
        return False


def _open_locked(folder: Folder, name: str, flags: int = 0) -> int:
    """Opens or creates the file and locks it. Raises `ConfigError` if another node or other users can access it."""
    path = folder.path / name
    while True:
        fd = folder.open(name, os.O_RDWR | os.O_CREAT | flags)
        try:
            if os.fstat(fd).st_mode & 0o077:
                raise ConfigError(
                    f"pool_path: {path} is not this user's alone (mode 600); remove it or name another file", path=path
                )
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"pool_path: another node uses {path}; give each node its own instance_id, or its own pool_path",
                    path=path,
                ) from None
            if os.fstat(fd).st_nlink:  # else it was removed before it was locked
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _difference(fd: int, size_bytes: int, table_bytes: int, stamp: bytes) -> str:
    """Why the content of the file cannot be used; empty if it can."""
    found = os.fstat(fd).st_size
    if found == 0:
        return "there was no file"
    if found != size_bytes + table_bytes:
        return "the existing file has another size"
    with mmap.mmap(fd, table_bytes, prot=mmap.PROT_READ, offset=size_bytes) as table:
        if table[:STAMP_BYTES] != stamp.ljust(STAMP_BYTES, b"\0"):
            return "the existing file is damaged, or of another version of lmkv"
    return ""


def _fill(fd: int, size_bytes: int, table_bytes: int, stamp: bytes) -> None:
    """Sets the size of a new file and allocates its table, so that no write to it can fail; writes the stamp last."""
    os.ftruncate(fd, size_bytes + table_bytes)
    try:
        os.posix_fallocate(fd, size_bytes, table_bytes)
        with mmap.mmap(fd, table_bytes, offset=size_bytes) as table:
            table[: len(stamp)] = stamp
    except OSError:
        with suppress(OSError):
            os.ftruncate(fd, 0)  # so that it is not taken for a pool
        raise
