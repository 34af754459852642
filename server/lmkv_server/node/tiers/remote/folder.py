"""A folder that hosts share, such as one on NFS or Lustre, as a `RemoteStore`: one file for each object.

    lmkv2/fingerprint/first two digits of the key/key

A file is written under another name in its folder, closed, so that a file system that is consistent from close to open
has all of it, and renamed. It is not synchronized to the device: a file that a crash of the server leaves incomplete is
a miss. Nodes take no locks.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import numpy as np

from lmkv.config.remote_url import RemoteUrl
from lmkv_server.node.cache.allocator import ALIGNMENT, align
from lmkv_server.node.tiers.remote.store import StoreRefused, first_bytes
from lmkv_server.node.tiers.remote.sweeper import BUCKETS, OBJECT, UNFINISHED, USED_SECONDS, FolderLimits, Sweeper
from lmkv_server.node.tiers.remote.tree import REFUSED, FolderTree
from lmkv_server.node.tiers.threads import DaemonThreads, ThreadBuffer

ASKERS = 8
ASKED_AT_ONCE = 32
"""Files that one of the threads looks for, one after the other."""
STEP_BYTES = ALIGNMENT + (16 << 20)
"""Bytes that one call reads or writes, with a page of headers; between two the deadline is checked."""
_NAME = re.compile(r"(?P<folder>[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*)/(?P<key>[0-9a-f]{32})")
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe in its place has no writer


class FolderStore:
    """Files of trusted users in a `FolderTree`. A sweeper of one of the nodes removes those of the longest disuse."""

    one_per_request = False
    pads_headers = True

    def __init__(self, url: RemoteUrl, *, timeout_seconds: float, limits: FolderLimits) -> None:
        """`timeout_seconds` bounds a call where the file system is slow; where it hangs, only its caller can."""
        self.shown = url.shown
        self.tree = FolderTree(url.folder)
        self.sweeper = Sweeper(self.tree, limits)
        self._timeout_seconds = timeout_seconds
        self._buffer = ThreadBuffer()
        self._askers = DaemonThreads(ASKERS, "lmkv-folder-ask")

    @property
    def evicted_count(self) -> int:
        """Objects that this process has removed to keep the limits."""
        return self.sweeper.evicted_count

    def open(self) -> None:
        """Raises `ConfigError` if the folder cannot be used as it is configured."""
        self.tree.open()
        if not self.tree.is_read_only:
            self.sweeper.start()

    def sizes(self, names: Sequence[str]) -> list[int]:
        """Asks for several at a time: each may take a request to a server."""
        self.tree.check()
        sizes = partial(self._sizes, self._deadline())
        slices = [names[start : start + ASKED_AT_ONCE] for start in range(0, len(names), ASKED_AT_ONCE)]
        answers = map(sizes, slices) if len(slices) < 2 else self._askers.map(sizes, slices)
        return [size for answer in answers for size in answer]

    def get(self, name: str, parts: Sequence[memoryview]) -> int:
        """The whole pages of the last part are read past the page cache straight into it; `_Pages` has the others."""
        folder, file = _place(name)
        deadline = self._deadline()
        return self.tree.again(folder, partial(self._get, folder, file, parts, deadline), 0)

    def put(self, name: str, parts: Sequence[memoryview]) -> bool:
        """Bytes are written as `get` reads them."""
        folder, file = _place(name)
        deadline = self._deadline()
        with _refusals():
            self.tree.check()
            put = self.tree.again(folder, partial(self._put, folder, file, parts, deadline), None)
            if put is None:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), name)
            return put

    def remove(self, names: Sequence[str]) -> None:
        """What is no file of a trusted user stays."""
        with _refusals():
            for folder, file in map(_place, names):
                self.tree.again(folder, partial(self._remove, folder, file), None)

    def names(self, prefix: str) -> Iterator[list[str]]:
        self.tree.check()
        for spec in self.tree.spec_folders(prefix.rstrip("/")):
            for number in range(BUCKETS):
                folder = self.tree.folder(spec)
                entries = self.tree.scan(folder.fd, f"{number:02x}") if folder else ()
                yield [f"{spec}/{entry.name}" for entry in entries if OBJECT.fullmatch(entry.name)]

    def close(self) -> None:
        self._askers.shutdown(wait=False, cancel_futures=True)
        self.sweeper.stop()
        self.tree.close()

    def _sizes(self, deadline: float, names: Sequence[str]) -> list[int]:
        return [
            self.tree.again(folder, partial(self._size, folder, file, deadline), 0)
            for folder, file in map(_place, names)
        ]

    def _size(self, folder: str, file: str, deadline: float) -> int:
        if time.monotonic() > deadline:
            raise TimeoutError("no answer in time")
        found = self.tree.folder(folder)
        status = None if found is None else os.stat(file, dir_fd=found.fd, follow_symlinks=False)
        return status.st_size if status and self.tree.is_object(status) else 0

    def _get(self, folder: str, file: str, parts: Sequence[memoryview], deadline: float) -> int:
        found = self.tree.folder(folder)
        if found is None:
            return 0
        with suppress(_NotAFile), _opened(found.fd, file, self.tree.flags) as fd:
            status = os.fstat(fd)
            if not self.tree.is_object(status) or status.st_size > sum(map(len, parts)):
                return 0
            if not self._fill(fd, list(first_bytes(parts, status.st_size)), deadline):
                return 0
            _used(fd, status)
            return status.st_size
        return 0

    def _put(self, folder: str, file: str, parts: Sequence[memoryview], deadline: float) -> bool:
        found = self.tree.folder(folder, make=True)
        assert found is not None, "made, or refused"
        if self._is_present(found.fd, file, sum(map(len, parts))):
            return False
        unfinished = f"{file}.{secrets.token_hex(8)}{UNFINISHED}"
        try:
            fd = self.tree.create(found.fd, unfinished, self.tree.flags)
        except FileNotFoundError:
            self.tree.enter(found.fd, file.partition("/")[0], make=True)
            fd = self.tree.create(found.fd, unfinished, self.tree.flags)
        try:
            try:
                self._write(fd, parts, deadline)
            finally:
                os.close(fd)  # a server may only now say that there is no space
            os.rename(unfinished, file, src_dir_fd=found.fd, dst_dir_fd=found.fd)
        except OSError:
            with suppress(OSError):
                os.unlink(unfinished, dir_fd=found.fd)
            raise
        return True

    def _is_present(self, folder: int, file: str, size_bytes: int) -> bool:
        """Whether there is a file of this size, which counts as a use. Raises `StoreRefused` if it is foreign."""
        try:
            with _opened(folder, file) as fd:
                status = os.fstat(fd)
                if not self.tree.is_object(status):
                    raise _NotAFile
                _used(fd, status)
                return status.st_size == size_bytes
        except FileNotFoundError:
            return False
        except _NotAFile:
            raise StoreRefused(f"{file} is no file of a node that shares {self.tree.path}: remove it") from None

    def _remove(self, folder: str, file: str) -> None:
        found = self.tree.folder(folder)
        if found and self.tree.is_object(os.stat(file, dir_fd=found.fd, follow_symlinks=False)):
            os.unlink(file, dir_fd=found.fd)

    def _fill(self, fd: int, parts: Sequence[memoryview], deadline: float) -> bool:
        """Fills the memory from a file; False if it ends early. Raises `TimeoutError`."""
        pages = self._pages(parts)
        left, offset, end = pages.all, 0, sum(map(len, parts))
        while offset < end:
            count = os.preadv(fd, _step(left, deadline), offset)
            offset += count
            left = _behind(left, count)
            if not count or (pages.is_aligned and offset < end and offset % ALIGNMENT):
                return False
        pages.take()
        return True

    def _write(self, fd: int, parts: Sequence[memoryview], deadline: float) -> None:
        pages = self._pages(parts)
        pages.put()
        left, size_bytes = pages.all, sum(map(len, parts))
        offset = 0
        while step := _step(left, deadline):
            count = os.pwritev(fd, step, offset)
            offset += count
            left = _behind(left, count)
        if offset > size_bytes:
            os.ftruncate(fd, size_bytes)  # without what its last page was padded with

    def _pages(self, parts: Sequence[memoryview]) -> _Pages:
        if self.tree.is_direct:
            return _Pages(parts, self._buffer)
        return _Pages(parts)

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout_seconds


class _Pages:
    """The parts of an object, as direct I/O needs them: whole pages of memory.

    What stands before the whole pages of the last part, and behind them, is copied from and to a buffer; so is all of
    it where the memory or the length of the parts before it is not aligned to pages.
    """

    def __init__(self, parts: Sequence[memoryview], buffers: ThreadBuffer | None = None) -> None:
        """Without `buffers` nothing is copied."""
        self.is_aligned = buffers is not None
        self.all = list(parts)
        self._copied: list[memoryview] = []
        self._buffer = memoryview(bytearray())
        if buffers is None:
            return
        *before, last = parts
        front = sum(map(len, before))
        whole = len(last) // ALIGNMENT * ALIGNMENT if front % ALIGNMENT == _address(last) % ALIGNMENT == 0 else 0
        self._copied = [*before, last[whole:]]
        end = align(front + len(last) - whole)
        self._buffer = buffers.get(end)[:end]
        self.all = [self._buffer[:front], last[:whole], self._buffer[front:]] if whole else [self._buffer]

    def put(self) -> None:
        """Copies parts to the buffer, and pads them with zeros."""
        at = 0
        for part in self._copied:
            self._buffer[at : at + len(part)] = part
            at += len(part)
        self._buffer[at:] = bytes(len(self._buffer) - at)

    def take(self) -> None:
        """Copies parts from the buffer."""
        at = 0
        for part in self._copied:
            part[:] = self._buffer[at : at + len(part)]
            at += len(part)


def _address(memory: memoryview) -> int:
    address: int = np.frombuffer(memory, np.uint8).ctypes.data if memory else 0
    return address


class _NotAFile(Exception):
    """What has the name of an object is a link, a folder, or of a user that is not trusted."""


@contextmanager
def _opened(folder: int, file: str, flags: int = 0) -> Iterator[int]:
    """Opens a file for reading. Raises `_NotAFile` for a link, and for what this user may not read."""
    try:
        fd = os.open(file, _READ | flags, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EACCES, errno.ENXIO, errno.EINVAL):
            raise _NotAFile from None  # the last one for a folder that is opened for direct I/O
        raise
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _refusals() -> Iterator[None]:
    """Maps what the file system does not permit to a refusal."""
    try:
        yield
    except StoreRefused:
        raise
    except OSError as error:
        if error.errno in REFUSED:
            raise StoreRefused(error.errno, error.strerror) from None
        raise


def _place(name: str) -> tuple[str, str]:
    """The folder of an object's spec, and the path of its file there. Raises `ValueError` if it is no object's name."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name[:100]!r} is no name of an object")
    return match["folder"], f"{match['key'][:2]}/{match['key']}"


def _used(fd: int, status: os.stat_result) -> None:
    """Renews the time of a file's last use, by the clock of its server."""
    if time.time() - status.st_mtime > USED_SECONDS:
        with suppress(OSError):  # of a folder that is read-only
            os.utime(fd)


def _step(parts: Sequence[memoryview], deadline: float) -> list[memoryview]:
    """The parts that are read or written next. Raises `TimeoutError` after the deadline."""
    if time.monotonic() > deadline:
        raise TimeoutError("no answer in time")
    return [part for part in first_bytes(parts, STEP_BYTES) if part]


def _behind(parts: Sequence[memoryview], count: int) -> list[memoryview]:
    """The parts without their first bytes."""
    left = []
    for part in parts:
        left.append(part[count:])
        count = max(0, count - len(part))
    return [part for part in left if part]
