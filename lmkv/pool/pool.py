"""The shared-memory pool: memory that the node owns and the workers of its engines map (docs/contribute/pool.md)."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Self

from lmkv.errors import ConfigError
from lmkv.pool.memory import available_bytes, huge_pages, prefer
from lmkv.runtime.folder import Folder
from lmkv.units import format_bytes

POPULATE_STEP_BYTES = 16 << 20
"""Step of `Pool.populate`, which can be stopped in between; about 10 ms."""

LEFT_BYTES = 256 << 20
"""Memory that `populate` leaves to other processes, so that the kernel does not kill any."""

_MADV_HUGEPAGE = 14
_MADV_NOHUGEPAGE = 15
_MADV_POPULATE_READ = 22  # Linux 5.14
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Pool:
    """Shared memory, mapped into this process. Must be closed.

    The memory exists as long as any process has it mapped, and has no name in a file system. Use `create` or `attach`.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Maps `fd` and takes ownership of it. Raises `OSError` or `ValueError` if it cannot be mapped."""
        self.fd = fd
        self.size_bytes = size_bytes
        self._lock = threading.Lock()  # held while the kernel populates, so that the memory is not unmapped
        self._mapping = mmap.mmap(fd, size_bytes)
        self.buffer = memoryview(self._mapping)
        """The memory, writable. Objects made from it, such as arrays, keep it mapped after `close`."""
        anchor = ctypes.c_char.from_buffer(self._mapping)
        self.address = ctypes.addressof(anchor)
        """Address of the memory. Invalid after `close`."""
        del anchor  # would keep the memory mapped
        self.closed = False
        self.huge_page_bytes = 0
        """Size of the reserved huge pages that the pool uses; 0: none."""
        self.numa_node: int | None = None
        """The preferred NUMA node, if any."""
        # A hint, without effect if huge pages are disabled for shared memory.
        _libc.madvise(self.address, size_bytes, _MADV_HUGEPAGE)

    @classmethod
    def create(
        cls, size_bytes: int, path: Path | None = None, *, huge_pages: str = "auto", numa_node: int | None = None
    ) -> Self:
        """Creates a pool of zeros: anonymous memory, or a file on the tmpfs or hugetlbfs of `path`.

        An existing file at `path` is removed, and the new one is unlinked as soon as it is open, so that nothing stays
        after this process exits. Memory is allocated on first access, see `populate`, and preferably on `numa_node`.

        Anonymous memory uses reserved huge pages: with `huge_pages` of `auto` if there are enough, with `always` in any
        case, with `never` not. With huge pages the size is rounded down to whole ones. Raises `ConfigError` if there is
        not enough memory.
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
        """Creates a pool of huge pages; None if there are too few and `wanted` is `auto`."""
        available = huge_pages()
        size = size_bytes - size_bytes % available.page_bytes if available.page_bytes else 0
        if 0 < size <= available.free_bytes:
            try:
                pool = cls._sized(os.memfd_create("lmkv-pool", _MEMFD | os.MFD_HUGETLB), size, "max_local_cpu_size")
                pool.huge_page_bytes = available.page_bytes
                return pool
            except (ConfigError, OSError):  # taken by others meanwhile, or beyond the limit of this process
                if wanted == "always":
                    raise
        elif wanted == "always":
            raise ConfigError(
                f"pool_huge_pages: {format_bytes(available.free_bytes)} of huge pages are free, the pool needs "
                f"{format_bytes(size_bytes)}; raise vm.nr_hugepages, lower max_local_cpu_size, "
                "or set pool_huge_pages to auto"
            )
        return None

    @classmethod
    def _sized(cls, fd: int, size_bytes: int, key: str) -> Self:
        """Creates the pool in a new file, of which it takes ownership. Raises `ConfigError` about `key`."""
        try:
            os.ftruncate(fd, size_bytes)
            if key != "pool_path":
                # The memory cannot be shrunk under the processes that have it mapped.
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(fd, size_bytes)
        except OSError as error:
            os.close(fd)
            raise ConfigError(
                f"{key}: a pool of {format_bytes(size_bytes)} cannot be created: {error.strerror}; {_HINT}"
            ) from None

    @classmethod
    def from_file(cls, fd: int, size_bytes: int, numa_node: int | None = None) -> Self:
        """Maps the pool at the beginning of a named file; takes ownership of `fd`, also when it raises.

        Raises `ConfigError` if it cannot be mapped.
        """
        try:
            pool = cls(fd, size_bytes)
        except OSError as error:
            os.close(fd)
            raise ConfigError(
                f"pool_path: cannot create a pool of {format_bytes(size_bytes)}: {error.strerror}"
            ) from None
        if numa_node is not None and prefer(pool.address, pool.size_bytes, numa_node):
            pool.numa_node = numa_node
        return pool

    @classmethod
    def attach(cls, fd: int, size_bytes: int) -> Self:
        """Maps the pool of a file descriptor that the node sent; takes ownership of `fd`, also when it raises.

        Raises `ValueError` if the file is shorter than `size_bytes`, `OSError` if it cannot be mapped.
        """
        try:
            return cls(fd, size_bytes)
        except BaseException:
            os.close(fd)
            raise

    def populate(self, start: int = 0, stop: int | None = None, *, leave_bytes: int = 0) -> None:
        """Allocates the memory of `[start, stop)` now, so that later stores do not wait for page faults.

        To be called in a thread: it releases the GIL, changes no byte, may run while the pool is used, and ends early
        when the pool is closed. Page tables are per process, so workers benefit from it too.

        Raises `ConfigError` if there is not enough memory, or if the machine or a cgroup of this process would be left
        with less than `leave_bytes`, so that the kernel might kill a process. The error's `populated_bytes` is where it
        stopped; memory before that stays allocated.
        """
        stop = self.size_bytes if stop is None else min(stop, self.size_bytes)
        start -= start % mmap.PAGESIZE
        allocated_until = 0
        for begin in range(start, stop, POPULATE_STEP_BYTES):
            with self._lock:
                if self.closed:
                    return
                step = min(POPULATE_STEP_BYTES, stop - begin)
                if leave_bytes and begin + step > allocated_until:
                    allocated_until = self._allocated_until(begin)
                is_new = begin + step > allocated_until and not self.huge_page_bytes
                if leave_bytes and is_new and available_bytes() < step + leave_bytes:
                    raise self._ended(begin, f"less than {format_bytes(leave_bytes)} would be left")
                self._populate_step(begin, step)

    def _allocated_until(self, start: int) -> int:
        """End of the memory that is allocated already from `start` on. Takes time in proportion to it."""
        try:
            return os.lseek(self.fd, start, os.SEEK_HOLE)
        except OSError:  # not supported by hugetlbfs
            return start

    def _ended(self, populated_bytes: int, reason: str | None) -> ConfigError:
        return ConfigError(
            f"max_local_cpu_size: memory for a pool of {format_bytes(self.size_bytes)} ended at "
            f"{format_bytes(populated_bytes)}: {reason}; {_HINT}",
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
            # An older kernel. Writing to each page could overwrite data of another process; this allocates only holes.
            os.posix_fallocate(self.fd, start, size_bytes)
        except OSError as error:
            raise self._ended(start, error.strerror) from None

    def on_unmapped(self, then: Callable[[], object]) -> None:
        """Calls `then` when the memory is unmapped, which is after `close` and after the last view of `buffer` is gone.

        On the thread that unmaps it; at the latest when the process exits. Does nothing once the pool is closed.
        """
        with self._lock:
            if not self.closed:
                weakref.finalize(self._mapping, then)

    def close(self) -> None:
        """Unmaps the memory, unless views of `buffer` exist, and closes `fd`. Idempotent.

        `address` must no longer be in use. Other processes keep the memory.
        """
        with self._lock:
            if self.closed:
                return
            self.closed = True
            try:
                self.buffer.release()
                self._mapping.close()
            except BufferError:  # the last view unmaps it
                self.buffer = memoryview(b"")
                self.buffer.release()
            del self._mapping
            os.close(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_MEMFD = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
_HINT = "lower max_local_cpu_size, or free memory"


def check_fits(size_bytes: int, free_bytes: int, where: str) -> None:
    """Raises `ConfigError` if `size_bytes` exceed `free_bytes`."""
    if size_bytes > free_bytes:
        raise ConfigError(
            f"max_local_cpu_size: {format_bytes(size_bytes)} do not fit, "
            f"{format_bytes(free_bytes)} {where} are available; {_HINT}",
            size_bytes=size_bytes,
            available_bytes=free_bytes,
        )


def room_for_file(path: Path, size_bytes: int) -> tuple[int, int]:
    """The size of a pool, rounded down to whole pages of the file system of `path`, and the bytes available there.

    Raises `ConfigError` if the size is less than a page or `path` is not a regular file, `OSError` if there is no such
    folder.
    """
    file_system = os.statvfs(path.parent)
    if file_system.f_bsize > mmap.PAGESIZE:  # hugetlbfs: its memory is reserved
        if size_bytes < file_system.f_bsize:
            raise ConfigError(
                f"max_local_cpu_size: {format_bytes(size_bytes)} is less than one page at {path.parent}, "
                f"{format_bytes(file_system.f_bsize)}; raise it or name another pool_path"
            )
        size_bytes -= size_bytes % file_system.f_bsize
        free_bytes = 1 << 62
    else:
        free_bytes = available_bytes()
    if file_system.f_blocks:  # unknown for a hugetlbfs without a size
        free_bytes = min(free_bytes, file_system.f_bavail * file_system.f_frsize)
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise ConfigError(f"pool_path: {path} is not a regular file; name one, it need not exist", path=path)
    return size_bytes, free_bytes


def cannot_be_made(path: Path, error: OSError) -> ConfigError:
    """The error for a pool file that cannot be created."""
    return ConfigError(
        f"pool_path: {path} cannot be created: {error.strerror}; name a file on a tmpfs or hugetlbfs", path=path
    )


def _open_nameless(path: Path, size_bytes: int) -> tuple[int, int]:
    """Opens a new file at `path` and unlinks it; returns it with the size of the pool."""
    try:
        size_bytes, free_bytes = room_for_file(path, size_bytes)
        check_fits(size_bytes, free_bytes, f"at {path.parent}")
        with Folder.of_file(path, "pool_path") as folder:
            folder.unlink(path.name)
            fd = folder.open(path.name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            folder.unlink(path.name)
    except OSError as error:
        raise cannot_be_made(path, error) from None
    return fd, size_bytes


def enter_pages(address: int, size_bytes: int) -> None:
    """Enters pages of a mapping in the page tables of this process, so that the first read of each does not fault.

    `address` is that of a page. Releases the GIL. Raises `OSError` if the kernel cannot, as before Linux 5.14.
    """
    if _libc.madvise(address, size_bytes, _MADV_POPULATE_READ):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
