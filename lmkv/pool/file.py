"""The file of a pool that outlives its node, and who still uses it from an earlier life (docs/warm-restart.md)."""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import struct
from contextlib import suppress
from pathlib import Path
from typing import Self

from lmkv.errors import ConfigError
from lmkv.pool.pool import Pool, cannot_be_made, check_fits, room_for_file

STAMP_BYTES = 64
"""Room for the stamp of a file, where its table begins."""

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, process
_WHOLE = (os.SEEK_SET, 0, 0, 0)
_BLOCK_BYTES = 512  # of what `stat` counts


class PoolFile:
    """A file with a pool and, behind it, a table of what is in it. It keeps its name; whoever opens one closes it.

        0 ────────────── pool ────────────── size_bytes ── stamp ── table ──┤
          mapped by the node and its workers    mapped by the node alone

    It is opened twice, for two locks that the kernel lets go of however a process ends. One file description stays
    with the node, and its lock says that a node runs. The other goes to workers with the pool, and its lock stays for
    as long as any of them has the pool mapped: so a later life of the node knows whether somebody of an earlier one
    may still read or write it.
    """

    def __init__(
        self, fd: int, size_bytes: int, table_bytes: int, *, numa_node: int | None, replaced_because: str
    ) -> None:
        """Owns `fd`, the description that stays here. `open` makes one."""
        self._fd = fd
        self.replaced_because = replaced_because
        """Why nothing can be found in it; empty if its table is that of an earlier life."""
        self._mapping = mmap.mmap(fd, table_bytes, offset=size_bytes)
        self.table = memoryview(self._mapping)[STAMP_BYTES:]
        """Memory about the pool, all zeros in a new file. It was taken already: writing to it never fails."""
        shared = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        self.pool = Pool.from_file(shared, size_bytes, numa_node)
        """The pool; it is closed with the file."""
        fcntl.fcntl(shared, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, *_WHOLE))

    @classmethod
    def open(cls, path: Path, size_bytes: int, table_bytes: int, *, stamp: bytes, numa_node: int | None = None) -> Self:
        """The file at `path`: the one that is there if it has this stamp and just this size, else a new one.

        On a hugetlbfs sizes are whole huge pages: the pool's is rounded down, the table's up. A file that is replaced
        stays the memory of those who have it mapped. Raises `ConfigError` if another node has the file, if it may be
        written by others than this user, or if there is no room.
        """
        try:
            size_bytes, _ = room_for_file(path, size_bytes)
            page = max(os.statvfs(path.parent).f_bsize, mmap.PAGESIZE)
            size_bytes -= size_bytes % page
            table_bytes = -(-(STAMP_BYTES + table_bytes) // page) * page
            fd = _open_locked(path)
            try:
                replaced_because = _difference(fd, size_bytes, table_bytes, stamp)
                if replaced_because and os.fstat(fd).st_size:
                    path.unlink()
                    old, fd = fd, _open_locked(path, os.O_EXCL)
                    os.close(old)
                _, free_bytes = room_for_file(path, size_bytes)  # now that the old one is gone
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
        """Whether a process still has it mapped that got it from an earlier life of the node."""
        asked = fcntl.fcntl(self.pool.fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, *_WHOLE))
        return bool(_FLOCK.unpack(asked)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Lets go of all of it; the file stays. Idempotent."""
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
    """Removes the file of a pool unless a node has it; whether there was one."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if os.fstat(fd).st_uid != os.getuid():
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def _open_locked(path: Path, flags: int = 0) -> int:
    """The file, made if it is not there, and locked. Raises `ConfigError` if another node has it, or others may."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
        try:
            status = os.fstat(fd)
            if status.st_uid != os.getuid() or status.st_mode & 0o077 or not stat.S_ISREG(status.st_mode):
                raise ConfigError(
                    f"pool_path: {path} is not this user's alone (mode 600); remove it or name another file", path=path
                )
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"pool_path: another node has {path}; give each node its own instance_id, or its own pool_path",
                    path=path,
                ) from None
            if os.fstat(fd).st_nlink:  # else somebody has removed it before the lock was ours
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _difference(fd: int, size_bytes: int, table_bytes: int, stamp: bytes) -> str:
    """Why the file cannot be used as it is; empty if it can."""
    found = os.fstat(fd).st_size
    if found == 0:
        return "there was none"
    if found != size_bytes + table_bytes:
        return "the one that was there has another size"
    with mmap.mmap(fd, table_bytes, prot=mmap.PROT_READ, offset=size_bytes) as table:
        if table[:STAMP_BYTES] != stamp.ljust(STAMP_BYTES, b"\0"):
            return "the one that was there is damaged, or of another version of lmkv"
    return ""


def _fill(fd: int, size_bytes: int, table_bytes: int, stamp: bytes) -> None:
    """Gives a new file its size, and its table the memory, so that no write to it can fail; the stamp comes last."""
    os.ftruncate(fd, size_bytes + table_bytes)
    try:
        os.posix_fallocate(fd, size_bytes, table_bytes)
        with mmap.mmap(fd, table_bytes, offset=size_bytes) as table:
            table[: len(stamp)] = stamp
    except OSError:
        with suppress(OSError):
            os.ftruncate(fd, 0)  # so that it does not pass for a pool
        raise
