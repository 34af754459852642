"""SHA-256 of whole files, which decide what an engine computes: read once, by several threads, and remembered.

A digest is of a file as it was at a moment that the caller names by a `Stamp`: when the engine began to load it, say.
If a file has another stamp afterwards, what the engine has in memory is not known, and there is no digest.

Digests that were computed before are remembered in a file of the user: a start need not read all weights again.
Whatever is wrong with that file, digests are computed again. Processes that write it at the same time lose entries of
each other, which costs a computation.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass
from hashlib import sha256
from pathlib import Path

from lmkv.errors import ConfigError
from lmkv.runtime.folder import Folder
from lmkv.units import format_bytes, format_rate
from lmkv_client.engine.log import logger
from lmkv_client.processors import PROCESSORS, use_processors

FILE = "digests.json"
FileStamp = tuple[int, int, int, int]
"""Inode, size, and the times of the last modification and the last change, in nanoseconds."""
Entries = dict[str, tuple[FileStamp, str]]
"""Stamp and digest, by path."""

MAX_ENTRIES = 4096
"""Most files that are remembered; those added last stay."""
MAX_FILE_BYTES = 4 << 20
"""Largest file that is read."""


class RememberedDigests:
    """The digests that this user remembers."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` is made if need be; by default `lmkv` in the user's folder of caches."""
        self._path = folder or _caches() / "lmkv"

    def load(self) -> Entries:
        """Reads the remembered digests. Returns nothing if another user could have written the file."""
        with suppress(OSError, ConfigError), self._open(make=False) as folder:
            return _read(folder)
        return {}

    def add(self, entries: Mapping[str, tuple[FileStamp, str]]) -> None:
        """Remembers these too."""
        if not entries:
            return
        with suppress(OSError, ConfigError), self._open(make=True) as folder:
            kept = {path: entry for path, entry in _read(folder).items() if path not in entries}
            latest = list((kept | dict(entries)).items())[-MAX_ENTRIES:]
            new = f"digests-{secrets.token_hex(8)}"
            try:
                with os.fdopen(folder.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w") as file:
                    json.dump(dict(latest), file)
                folder.rename(new, FILE)
            except OSError:
                folder.unlink(new)

    def _open(self, *, make: bool) -> Folder:
        return Folder.private(self._path, "XDG_CACHE_HOME", make=make)


def _read(folder: Folder) -> Entries:
    with (
        suppress(OSError, ValueError, TypeError, AttributeError, ConfigError),
        os.fdopen(folder.open(FILE, os.O_RDONLY), "rb") as file,
    ):
        if os.fstat(file.fileno()).st_mode & stat.S_IWGRP:
            return {}
        content = json.loads(file.read(MAX_FILE_BYTES))
        return {
            str(path): ((int(inode), int(size), int(mtime), int(ctime)), str(digest))
            for path, ((inode, size, mtime, ctime), digest) in content.items()
        }
    return {}


def _caches() -> Path:
    """The user's folder of caches; without such a folder, a path that cannot exist."""
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return caches if caches.is_absolute() else Path("~/.cache").expanduser()
    except RuntimeError:  # the user has no home
        return Path(os.devnull)


READ_BYTES = 4 << 20
MAX_THREADS = 16
"""Most threads that read files at once."""
LOGGED_BYTES = 1 << 30
"""Size from which on the log has the progress."""
LOG_SECONDS = 10.0
"""Time between two lines of it."""
REMEMBERED_BYTES = 16 << 20
"""Size from which on the digest of a file is remembered: others are read in a few milliseconds."""
UNCERTAIN_NS = 2_000_000_000
"""Files that were changed less than this before they are read are not remembered: clocks of file systems are coarse,
and a second change at the same time would have the same stamp."""

_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stamp:
    """Values that change whenever a file's content changes. They include ctime, which no program can set."""

    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> Stamp:
        """The stamp of a file now. Opens it, so that a file system of the network asks its server."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
        finally:
            os.close(fd)
        return cls(
            inode=status.st_ino, size_bytes=status.st_size, mtime_ns=status.st_mtime_ns, ctime_ns=status.st_ctime_ns
        )


def stamps(paths: Iterable[Path]) -> dict[Path, Stamp]:
    """The stamps of these files now."""
    return {path: Stamp.of(path) for path in paths}


def digests(stamped: Mapping[Path, Stamp], remembered: RememberedDigests | None = None) -> dict[Path, str]:
    """The SHA-256 of each file, in hexadecimal digits. Blocks while they are read.

    Reads no file that a hub's cache names by its SHA-256, or whose digest is remembered. Raises `ConfigError` if a file
    has not the stamp any more that `stamped` says, and `OSError` if it cannot be read.
    """
    remembered = remembered or RememberedDigests()
    is_large = any(stamp.size_bytes >= REMEMBERED_BYTES for stamp in stamped.values())
    known = remembered.load() if is_large else {}
    found: dict[Path, str] = {}
    for path, stamp in stamped.items():
        remembered_stamp, digest = known.get(str(path.absolute()), (None, ""))
        if blob := _blob_name(path):
            found[path] = blob
        elif remembered_stamp == astuple(stamp):
            found[path] = digest
    began_ns = time.time_ns()
    unread = {path: stamp.size_bytes for path, stamp in stamped.items() if path not in found}
    read = _Reading(unread).run() if unread else {}
    check_unchanged(stamped)
    remembered.add(
        {
            str(path.absolute()): (astuple(stamped[path]), digest)
            for path, digest in read.items()
            if stamped[path].size_bytes >= REMEMBERED_BYTES and stamped[path].ctime_ns < began_ns - UNCERTAIN_NS
        }
    )
    return found | read


def check_unchanged(stamped: Mapping[Path, Stamp]) -> None:
    """Raises `ConfigError` if a file was changed or removed since it had its stamp."""
    for path, stamp in stamped.items():
        try:
            is_same = Stamp.of(path) == stamp
        except OSError:
            is_same = False
        if not is_same:
            raise _changed(path)


def check_unchanged_since(stamped: Mapping[Path, Stamp], began: float) -> None:
    """Raises `ConfigError` if a file was changed after `began`, in seconds since 1970."""
    for path, stamp in stamped.items():
        if stamp.ctime_ns > began * 1e9:
            raise _changed(path)


def process_start() -> float:
    """Returns the time of this process's start, in seconds since 1970: it cannot have loaded anything before."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def _changed(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} has changed since the engine began to load it, so that its weights are not known: start the engine "
        "again, or set model_id to a name of the weights",
        key="model_id",
    )


def _blob_name(path: Path) -> str:
    """The SHA-256 by which the cache of Hugging Face names a large file that it has checked; else empty."""
    if not path.is_symlink():
        return ""
    blob = path.resolve()
    return blob.name if blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name) else ""


class _Reading:
    """Files that several threads read. The largest files come first: each file is read by one thread."""

    def __init__(self, sizes: Mapping[Path, int]) -> None:
        self._waiting = sorted(sizes, key=lambda path: sizes[path])
        self._total_bytes = sum(sizes.values())
        self._read_bytes = 0
        self._found: dict[Path, str] = {}
        self._errors: list[OSError] = []
        self._lock = threading.Lock()

    def run(self) -> dict[Path, str]:
        """The digests of all files."""
        count = max(1, min(len(self._waiting), len(PROCESSORS), MAX_THREADS))
        threads = [threading.Thread(target=self._read_files, name="lmkv-digests", daemon=True) for _ in range(count)]
        began = time.monotonic()
        is_logged = self._total_bytes >= LOGGED_BYTES
        if is_logged:
            logger.info("weights: computing the digest of %s", format_bytes(self._total_bytes))
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(LOG_SECONDS)
                if is_logged and thread.is_alive():
                    logger.info(
                        "weights: digest of %s of %s", format_bytes(self._read_bytes), format_bytes(self._total_bytes)
                    )
        if self._errors:
            raise self._errors[0]
        if is_logged:
            seconds = time.monotonic() - began
            logger.info(
                "weights: digest of %s in %.1f s, %s",
                format_bytes(self._read_bytes),
                seconds,
                format_rate(self._read_bytes, seconds),
            )
        return self._found

    def _read_files(self) -> None:
        use_processors()
        buffer = memoryview(bytearray(READ_BYTES))
        while True:
            with self._lock:
                if not self._waiting or self._errors:
                    return
                path = self._waiting.pop()
            try:
                self._read(path, buffer)
            except OSError as error:
                self._errors.append(error)

    def _read(self, path: Path, buffer: memoryview) -> None:
        digest = sha256()
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
                with self._lock:
                    self._read_bytes += count
        self._found[path] = digest.hexdigest()
