"""The shared-memory pool: one run of memory that the node owns and that its engines' workers map (docs/pool.md)."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
from pathlib import Path
from typing import Self

from lmkv.errors import ConfigError
from lmkv.pool.memory import available_bytes, huge_pages
from lmkv.pool.numa import prefer

POPULATE_STEP_BYTES = 16 << 20
"""`Pool.populate` can be stopped between steps of this size, some 10 ms each."""

LEFT_BYTES = 256 << 20
"""Memory that a pool does not take even though it was promised: without it the kernel ends processes."""

_MADV_HUGEPAGE = 14
_MADV_NOHUGEPAGE = 15
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Pool:
    """Shared memory, mapped into this process. Whoever makes one closes it.

    The memory lives as long as any process has it mapped, whatever happens to the one that made it, and has no name
    in any file system. `create` and `attach` make pools.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Maps `fd` and owns it from here on. Raises `OSError` or `ValueError` if it cannot be mapped."""
        self.fd = fd
        self.size_bytes = size_bytes
        self._lock = threading.Lock()  # no unmapping while the kernel populates
        self._mapping = mmap.mmap(fd, size_bytes)
        self.buffer = memoryview(self._mapping)
        """The memory, to be read and written. What is made from it, such as an array, keeps it mapped after `close`."""
        anchor = ctypes.c_char.from_buffer(self._mapping)
        self.address = ctypes.addressof(anchor)
        """Where the memory begins. Means nothing once the pool is closed."""
        del anchor  # it would keep the memory mapped
        self.closed = False
        self.huge_page_bytes = 0
        """Size of the huge pages that it is made of, set apart for it; 0: of whatever the kernel gives."""
        self.numa_node: int | None = None
        """The NUMA node that it prefers, if any."""
        # A wish: it does nothing where huge pages are off for shared memory.
        _libc.madvise(self.address, size_bytes, _MADV_HUGEPAGE)

    @classmethod
    def create(
        cls, size_bytes: int, path: Path | None = None, *, huge_pages: str = "auto", numa_node: int | None = None
    ) -> Self:
        """A new pool, all zeros: anonymous memory, or a file on the tmpfs or hugetlbfs that `path` is on.

        A file that is already at `path` is removed, and the new one loses its name as soon as it is open, so nothing is
        left behind however this process ends. Memory is taken when it is first touched; see `populate`. It comes from
        `numa_node` as long as that has any.

        Anonymous memory is made of huge pages that the machine has set apart: with `huge_pages` of `auto` if there are
        enough, with `always` in any case, with `never` not. Then, and on hugetlbfs, the size is rounded down to whole
        ones. Raises `ConfigError` if it would not fit.
        """
        if size_bytes <= 0:
            raise ConfigError(f"max_local_cpu_size: the pool must have a size, not {size_bytes} bytes", size=size_bytes)
        pool = cls._of_huge_pages(size_bytes, huge_pages) if path is None and huge_pages != "never" else None
        if pool is None and path is None:
            check_fits(size_bytes, available_bytes(), "of memory")
            pool = cls._sized(os.memfd_create("lmkv-pool", _MEMFD), size_bytes, "max_local_cpu_size")
        elif pool is None and path is not None:
            fd, size_bytes = _open_nameless(path, size_bytes)
            pool = cls._sized(fd, size_bytes, "pool_path")
        assert pool is not None
        if huge_pages == "never":
            _libc.madvise(pool.address, pool.size_bytes, _MADV_NOHUGEPAGE)
        if numa_node is not None and prefer(pool.address, pool.size_bytes, numa_node):
            pool.numa_node = numa_node
        return pool

    @classmethod
    def _of_huge_pages(cls, size_bytes: int, wanted: str) -> Self | None:
        """A pool of huge pages; None if there are too few and it need not be one."""
        available = huge_pages()
        size = size_bytes - size_bytes % available.page_bytes if available.page_bytes else 0
        if 0 < size <= available.free_bytes:
            try:
                pool = cls._sized(os.memfd_create("lmkv-pool", _MEMFD | os.MFD_HUGETLB), size, "max_local_cpu_size")
                pool.huge_page_bytes = available.page_bytes
                return pool
            except (ConfigError, OSError):  # taken by others since, or beyond what this process may have
                if wanted == "always":
                    raise
        elif wanted == "always":
            raise ConfigError(
                f"pool_huge_pages: {gb(available.free_bytes)} of huge pages are free, the pool is to have "
                f"{gb(size_bytes)}; raise vm.nr_hugepages, lower max_local_cpu_size, or set pool_huge_pages to auto"
            )
        return None

    @classmethod
    def _sized(cls, fd: int, size_bytes: int, key: str) -> Self:
        """The pool in a new file, which it owns. Raises `ConfigError` about `key` if it cannot be so large."""
        try:
            os.ftruncate(fd, size_bytes)
            if key != "pool_path":
                # Nobody can pull the memory from under those who have it mapped.
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(fd, size_bytes)
        except OSError as error:
            os.close(fd)
            raise ConfigError(f"{key}: a pool of {gb(size_bytes)} cannot be had: {error.strerror}; {_HINT}") from None

    @classmethod
    def from_file(cls, fd: int, size_bytes: int, numa_node: int | None = None) -> Self:
        """The pool at the beginning of a file that keeps its name; owns `fd`, also when it raises. See `PoolFile`.

        Raises `ConfigError` if it cannot be mapped.
        """
        try:
            pool = cls(fd, size_bytes)
        except OSError as error:
            os.close(fd)
            raise ConfigError(f"pool_path: a pool of {gb(size_bytes)} cannot be had: {error.strerror}") from None
        if numa_node is not None and prefer(pool.address, pool.size_bytes, numa_node):
            pool.numa_node = numa_node
        return pool

    @classmethod
    def attach(cls, fd: int, size_bytes: int) -> Self:
        """The pool behind a file descriptor that the node handed over; owns `fd`, also when it raises.

        Raises `ValueError` if the file is shorter than `size_bytes`, `OSError` if it cannot be mapped.
        """
        try:
            return cls(fd, size_bytes)
        except BaseException:
            os.close(fd)
            raise

    def populate(self, start: int = 0, stop: int | None = None, *, leave_bytes: int = 0) -> None:
        """Takes the memory of `[start, stop)` now, so that later stores do not wait for page faults.

        For a thread: it holds no GIL, changes no byte, may run while others use the pool, and ends early when the pool
        is closed. Page tables belong to a process, so a worker gains from it too.

        Raises `ConfigError` if the memory is not there after all, or if taking it would leave the machine, or a cgroup
        of this process, less than `leave_bytes`, so that the kernel would rather kill somebody than give it. Its
        `populated_bytes` say how far it came; what is before that stays.
        """
        stop = self.size_bytes if stop is None else min(stop, self.size_bytes)
        start -= start % mmap.PAGESIZE
        taken_until = 0
        for begin in range(start, stop, POPULATE_STEP_BYTES):
            with self._lock:
                if self.closed:
                    return
                step = min(POPULATE_STEP_BYTES, stop - begin)
                if leave_bytes and begin + step > taken_until:
                    taken_until = self._taken_until(begin)
                is_new = begin + step > taken_until and not self.huge_page_bytes
                if leave_bytes and is_new and available_bytes() < step + leave_bytes:
                    raise self._ended(begin, f"less than {gb(leave_bytes)} would be left")
                self._populate_step(begin, step)

    def _taken_until(self, start: int) -> int:
        """Where the memory ends that the file has already, from `start` on. It takes time by what there is."""
        try:
            return os.lseek(self.fd, start, os.SEEK_HOLE)
        except OSError:  # a hugetlbfs cannot tell
            return start

    def _ended(self, populated_bytes: int, reason: str | None) -> ConfigError:
        return ConfigError(
            f"max_local_cpu_size: memory for a pool of {gb(self.size_bytes)} ended at {gb(populated_bytes)}: "
            f"{reason}; {_HINT}",
            populated_bytes=populated_bytes,
        )

    def _populate_step(self, start: int, size_bytes: int) -> None:
        try:
            if _libc.madvise(self.address + start, size_bytes, _MADV_POPULATE_WRITE) == 0:
                return
            error_number = ctypes.get_errno()
            if error_number != errno.EINVAL:
                reason = "no more memory" if error_number == errno.EFAULT else os.strerror(error_number)
                raise OSError(error_number, reason)
            # An older kernel. Touching each page would undo what another process writes there; this takes only holes.
            os.posix_fallocate(self.fd, start, size_bytes)
        except OSError as error:
            raise self._ended(start, error.strerror) from None

    def close(self) -> None:
        """Unmaps the memory, unless views of `buffer` still need it, and closes `fd`. Others keep it; idempotent.

        Whoever holds `address` must have stopped using it.
        """
        with self._lock:
            if self.closed:
                return
            self.closed = True
            try:
                self.buffer.release()
                self._mapping.close()
            except BufferError:  # the last view will unmap it
                self.buffer = memoryview(b"")
                self.buffer.release()
            del self._mapping
            os.close(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_MEMFD = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
_HINT = "lower max_local_cpu_size, or free some"


def gb(size_bytes: int) -> str:
    """A size as the messages about pools say it."""
    return f"{size_bytes / 2**30:.1f} GB"


def check_fits(size_bytes: int, free_bytes: int, where: str) -> None:
    """Raises `ConfigError` if a pool of this size does not."""
    if size_bytes > free_bytes:
        raise ConfigError(
            f"max_local_cpu_size: {gb(size_bytes)} do not fit, {gb(free_bytes)} {where} are available; {_HINT}",
            size_bytes=size_bytes,
            available_bytes=free_bytes,
        )


def room_for_file(path: Path, size_bytes: int) -> tuple[int, int]:
    """The size of a pool in whole pages of the file system that `path` is on, and the bytes that can be had available.

    Raises `ConfigError` if not even a page fits or `path` is something else than a plain file, `OSError` if there is no
    such folder.
    """
    file_system = os.statvfs(path.parent)
    if file_system.f_bsize > mmap.PAGESIZE:  # hugetlbfs: its memory was set apart when the machine was configured
        if size_bytes < file_system.f_bsize:
            raise ConfigError(
                f"max_local_cpu_size: {gb(size_bytes)} is less than one page at {path.parent}, "
                f"{gb(file_system.f_bsize)}; raise it or name another pool_path"
            )
        size_bytes -= size_bytes % file_system.f_bsize
        free_bytes = 1 << 62
    else:
        free_bytes = available_bytes()
    if file_system.f_blocks:  # a hugetlbfs without a size does not say
        free_bytes = min(free_bytes, file_system.f_bavail * file_system.f_frsize)
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise ConfigError(f"pool_path: {path} is not a plain file; name one, it need not exist", path=path)
    return size_bytes, free_bytes


def cannot_be_made(path: Path, error: OSError) -> ConfigError:
    """What to say where a pool's file cannot be had."""
    return ConfigError(
        f"pool_path: {path} cannot be made: {error.strerror}; name a file on a tmpfs or hugetlbfs", path=path
    )


def _open_nameless(path: Path, size_bytes: int) -> tuple[int, int]:
    """A new empty file where `path` was, without a name any more, and the size that it shall have."""
    try:
        size_bytes, free_bytes = room_for_file(path, size_bytes)
        check_fits(size_bytes, free_bytes, f"at {path.parent}")
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        path.unlink()
    except OSError as error:
        raise cannot_be_made(path, error) from None
    return fd, size_bytes
