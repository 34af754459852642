"""The sweeper of a shared folder: keeps its files below a size, and removes those that were not used for long.

All nodes have one, and about twice in a minute one of them sweeps: the first that makes the next file in `lmkv-sweeps`.
Two that sweep at a time do no harm. Keys are hashes, so that some of the buckets stand for all: in a large tree a sweep
looks at as many as it may, in a random order.
"""

from __future__ import annotations

import logging
import os
import random
import re
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from lmkv.telemetry.logs import LimitedLogger
from lmkv_server.node.tiers.remote.tree import Directory, FolderTree

logger = logging.getLogger(__name__)

SWEEP_SECONDS = 30.0
"""Least time between two sweeps of all nodes together."""
USED_SECONDS = 30.0
"""A read renews the time of a file's last use if it is older."""
KEPT_SECONDS = 2 * USED_SECONDS
"""A file that was used since is not removed."""
UNFINISHED_SECONDS = 600.0
"""After this time the incomplete file of a writer that was killed, and an empty folder, are removed."""
MAX_SWEPT = 65_536
"""Files and folders that one sweep looks at."""
LOW_WATER = 0.9
"""Fraction of the limit to which a sweep empties the folder."""
BUCKETS = 256
OBJECT = re.compile(r"[0-9a-f]{32}")
UNFINISHED = ".new"
_UNFINISHED = re.compile(r"([0-9a-f]{32}\.)?[0-9a-f]{16}\.new")
_FOLDER = "lmkv-sweeps"
_SWEEP = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderLimits:
    """What files may take; without one of them nothing is removed for it."""

    size_bytes: int = 0
    """Bytes of all files of all nodes; 0: no limit."""
    unused_seconds: float = 0.0
    """Time after which a file that was not used is removed; 0: no limit."""


@dataclass(frozen=True, slots=True, order=True)
class _File:
    used: float
    """The time of its last use, by the clock of its server."""
    size_bytes: int
    folder: str
    """Of its spec."""
    path: str
    """In that folder."""


class Sweeper:
    """Sweeps on a thread of its own from `start` to `stop`."""

    def __init__(self, tree: FolderTree, limits: FolderLimits) -> None:
        self._evicted_count = 0
        self._tree = tree
        self._limits = limits
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._log = LimitedLogger(logger)

    @property
    def evicted_count(self) -> int:
        """Files of chunks that were removed."""
        return self._evicted_count

    def start(self) -> None:
        """Starts the thread, which a process that ends does not wait for. Idempotent."""
        if self._thread is None and (self._limits.size_bytes or self._limits.unused_seconds):
            self._thread = threading.Thread(target=self._run, name="lmkv-remote-sweep", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread soon; does not wait for it. Idempotent."""
        self._stopped.set()

    def sweep(self) -> bool:
        """Sweeps, if no node has done so lately; returns whether it did. Raises `OSError`."""
        lease = self._tree.again(_FOLDER, self._elect, None)
        if lease is None:
            return False
        files, share = self._look(lease)
        self._evict(files, share, lease.now)
        return True

    def _run(self) -> None:
        while not self._stopped.wait(random.uniform(0.5, 1.5) * SWEEP_SECONDS):  # noqa: S311  # no secret
            try:
                self.sweep()
            except OSError as error:
                self._log.warning("remote: a sweep of %s ended early: %s", self._tree.path, error)

    def _elect(self) -> _Lease | None:
        """Begins a sweep, unless another node has begun one lately or does so now."""
        folder = self._tree.folder(_FOLDER, make=True)
        assert folder is not None, "made, or refused"
        now = self._server_time(folder)
        numbers = []
        for entry in self._tree.scan(folder.fd, "."):
            if _SWEEP.fullmatch(entry.name):
                numbers.append(int(entry.name))
            else:
                self._remove_unfinished(folder.fd, entry, now)
        last = max(numbers, default=0)
        with suppress(FileNotFoundError):  # removed by a node that has begun the next sweep since
            if last and now - os.stat(str(last), dir_fd=folder.fd, follow_symlinks=False).st_mtime < SWEEP_SECONDS:
                return None
        try:
            os.close(self._tree.create(folder.fd, str(last + 1)))
        except FileExistsError:
            return None
        for number in numbers:
            with suppress(OSError):
                os.unlink(str(number), dir_fd=folder.fd)
        return _Lease(folder, str(last + 1), now)

    def _server_time(self, folder: Directory) -> float:
        """The time by the clock of the server, which sets the times of files."""
        name = f"{secrets.token_hex(8)}{UNFINISHED}"
        fd = self._tree.create(folder.fd, name)
        try:
            return os.fstat(fd).st_mtime
        finally:
            os.close(fd)
            os.unlink(name, dir_fd=folder.fd)

    def _look(self, lease: _Lease) -> tuple[list[_File], float]:
        """Returns the files of as many buckets as one sweep may look at, and which fraction of all buckets these are.

        Removes what is incomplete or empty on the way.
        """
        specs = list(self._tree.spec_folders())
        files: list[_File] = []
        looked = 0
        for count, bucket in enumerate(random.sample(range(BUCKETS), BUCKETS), start=1):
            for spec in specs:
                found = list(self._files(spec, f"{bucket:02x}", lease.now))
                files += found
                looked += 1 + len(found)
            lease.renew()
            if looked >= MAX_SWEPT or self._stopped.is_set():
                return files, count / BUCKETS
        for spec in specs:
            self._remove_empty(*spec.rpartition("/")[::2], lease.now)
        return files, 1.0

    def _files(self, spec: str, bucket: str, now: float) -> Iterator[_File]:
        folder = self._tree.folder(spec)
        if folder is None:
            return
        is_empty = True
        for entry in self._tree.scan(folder.fd, bucket):
            is_empty = False
            with suppress(FileNotFoundError):
                if OBJECT.fullmatch(entry.name):
                    status = entry.stat(follow_symlinks=False)
                    if self._tree.is_object(status):
                        yield _File(status.st_mtime, status.st_size, spec, f"{bucket}/{entry.name}")
                else:
                    self._remove_unfinished(folder.fd, entry, now, f"{bucket}/")
        if is_empty:
            self._remove_empty(spec, bucket, now)

    def _remove_unfinished(self, folder: int, entry: os.DirEntry[str], now: float, inner: str = "") -> None:
        """Removes an incomplete file whose writer must be gone."""
        if _UNFINISHED.fullmatch(entry.name):
            status = entry.stat(follow_symlinks=False)
            if self._tree.is_object(status) and now - status.st_mtime > UNFINISHED_SECONDS:
                os.unlink(f"{inner}{entry.name}", dir_fd=folder)

    def _remove_empty(self, parent: str, name: str, now: float) -> None:
        """Removes a folder if it is empty, unless a node may have made it just now to write to it."""
        with suppress(OSError):
            if folder := self._tree.folder(parent):
                status = os.stat(name, dir_fd=folder.fd, follow_symlinks=False)
                if now - status.st_mtime > UNFINISHED_SECONDS:
                    os.rmdir(name, dir_fd=folder.fd)

    def _evict(self, files: list[_File], share: float, now: float) -> None:
        """Removes the files that were used least recently, until the rest is small and young enough."""
        limit_bytes = self._limits.size_bytes * share
        used_bytes = sum(file.size_bytes for file in files)
        target_bytes = LOW_WATER * limit_bytes if limit_bytes and used_bytes > limit_bytes else used_bytes
        removed_count = 0
        for file in sorted(files):
            unused_seconds = now - file.used
            is_old = 0 < self._limits.unused_seconds < unused_seconds
            if unused_seconds < KEPT_SECONDS or not (is_old or used_bytes > target_bytes) or self._stopped.is_set():
                break
            used_bytes -= file.size_bytes
            removed_count += self._remove(file)
        self._evicted_count += removed_count
        if removed_count:
            logger.info("remote: %d chunks were evicted from %s", removed_count, self._tree.path)

    def _remove(self, file: _File) -> bool:
        """Removes a file, unless it was used or removed meanwhile."""
        with suppress(FileNotFoundError):
            folder = self._tree.folder(file.folder)
            if folder and os.stat(file.path, dir_fd=folder.fd, follow_symlinks=False).st_mtime == file.used:
                os.unlink(file.path, dir_fd=folder.fd)
                return True
        return False


class _Lease:
    """The file that keeps others from beginning a sweep."""

    def __init__(self, folder: Directory, name: str, now: float) -> None:
        """`now` is the time of the server at which the sweep began."""
        self.now = now
        self._folder = folder
        self._name = name
        self._renewed = time.monotonic()

    def renew(self) -> None:
        """Renews it if a good part of its time has passed."""
        if time.monotonic() - self._renewed > SWEEP_SECONDS / 3:
            self._renewed = time.monotonic()
            with suppress(OSError):  # the next sweep begins earlier then
                os.utime(self._name, dir_fd=self._folder.fd, follow_symlinks=False)
