"""One folder with a file for each chunk. Every method blocks, and runs on a thread; all raise `OSError`.

A file has a temporary name until it is complete. The next opening removes incomplete files that a crash has left. Files
are not flushed: after a power failure a file may have its name and wrong bytes, which the checksum shows at a read.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from lmkv_server.node.cache.allocator import ALIGNMENT
from lmkv_server.node.tiers.disk.chunk import SUFFIX, DiskChunk, parse_file_name

logger = logging.getLogger(__name__)

LOCK = "lock"
PROBE = "probe.new"
UNFINISHED = ".new"
"""Suffix of incomplete files."""


class FileIo(Protocol):
    """Moves bytes between an open file and memory that is aligned to pages: `PlainIo`, or `NixlFiles`.

    Called on several threads at a time. Raises `OSError`.
    """

    def read(self, fd: int, memory: memoryview) -> int:
        """Reads from the file's beginning; how many bytes came before its end."""

    def write(self, fd: int, memory: memoryview) -> None:
        """Writes all of it to the file's beginning."""


class PlainIo:
    """Plain system calls."""

    def read(self, fd: int, memory: memoryview) -> int:
        done = 0
        while done < len(memory) and (count := os.preadv(fd, [memory[done:]], done)):
            done += count
        return done

    def write(self, fd: int, memory: memoryview) -> None:
        done = 0
        while done < len(memory):
            done += os.pwrite(fd, memory[done:], done)


class DiskFolder:
    """A folder of one node. Call `open` first, and again after a failure."""

    def __init__(self, path: Path, io: FileIo | None = None) -> None:
        self.path = path
        self.direct = False
        """Whether reads and writes bypass the page cache, if the file system supports it."""
        self._io = io or PlainIo()
        self._lock: int | None = None
        self._made = False

    def open(self) -> list[DiskChunk]:
        """Makes the folder if need be, removes what is of no use; the chunks in it, least recently used first.

        A folder that existed once is not created again if its parent is gone: a disk may have been mounted there.
        """
        self.close()
        self.path.mkdir(mode=0o700, parents=not self._made, exist_ok=True)
        self._made = True
        self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(errno.EBUSY, "another node uses it") from None
        self.direct = self._probe()
        return self._scan()

    def close(self) -> None:
        """Releases the folder for other nodes. Idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def write(self, chunk: DiskChunk, memory: memoryview, instead_of: Iterable[DiskChunk] = ()) -> None:
        """Writes a chunk of which `memory` has the bytes, padded to whole pages, after removing others for it."""
        self.remove(instead_of)
        name = self.path / chunk.file_name
        unfinished = name.with_suffix(UNFINISHED)
        try:
            fd = self._open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                self._io.write(fd, memory)
            finally:
                os.close(fd)
            unfinished.rename(name)
        except OSError:
            with suppress(OSError):
                unfinished.unlink()
            raise

    def read(self, chunk: DiskChunk, memory: memoryview) -> bool:
        """Reads a chunk into `memory`, which has the length of its file; whether that worked.

        Nothing is verified. Counts as a use, also for a node that is started later. Raises only if the folder is gone:
        everything else concerns this chunk alone.
        """
        try:
            fd = self._open(self.path / chunk.file_name, os.O_RDONLY)
            try:
                count = self._io.read(fd, memory)
                with suppress(OSError):  # of a file system that is read-only by now
                    os.utime(fd)
                return count == chunk.file_bytes == os.fstat(fd).st_size
            finally:
                os.close(fd)
        except OSError as error:
            if not self.path.is_dir():
                raise
            logger.warning("%s cannot be read: %s", self.path / chunk.file_name, error.strerror)
            return False

    def remove(self, chunks: Iterable[DiskChunk]) -> None:
        """Removes the files of the chunks; missing files and those that cannot be removed are ignored."""
        for chunk in chunks:
            with suppress(OSError):
                (self.path / chunk.file_name).unlink()

    def _open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC | (os.O_DIRECT if self.direct else 0), 0o600)

    def _probe(self) -> bool:
        """Whether a file can be written past the page cache. Raises if none can be written at all."""
        path, direct = self.path / PROBE, False
        with mmap.mmap(-1, ALIGNMENT) as page, memoryview(page) as memory:
            for flag in (0, os.O_DIRECT):
                fd = -1
                try:
                    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flag, 0o600)
                    if flag:  # the first is only to see that there may be files: a full disk still has chunks to read
                        os.pwrite(fd, memory, 0)
                    direct = bool(flag)
                except OSError as error:
                    if not flag:
                        raise
                    direct = error.errno != errno.EINVAL
                finally:
                    if fd >= 0:
                        os.close(fd)
        path.unlink(missing_ok=True)
        return direct

    def _scan(self) -> list[DiskChunk]:
        found: list[tuple[int, int, DiskChunk]] = []
        torn = 0
        with os.scandir(self.path) as entries:
            for entry in entries:
                if entry.name.endswith(UNFINISHED):
                    _unlink(entry.path)
                    continue
                if not entry.name.endswith(SUFFIX) or not entry.is_file(follow_symlinks=False):
                    continue  # not ours to remove
                chunk = parse_file_name(entry.name)
                status = entry.stat(follow_symlinks=False)
                if chunk is None or status.st_size != chunk.file_bytes:
                    _unlink(entry.path)
                    torn += 1
                else:
                    found.append((status.st_mtime_ns, chunk.serial, chunk))
        if torn:
            logger.warning("%s: %d files of no whole chunk were removed", self.path, torn)
        found.sort(key=lambda each: each[:2])
        return [chunk for _, _, chunk in found]


def _unlink(path: str) -> None:
    with suppress(OSError):
        Path(path).unlink()
