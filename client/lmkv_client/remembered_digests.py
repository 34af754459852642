"""Digests of files that were computed before, in a file of the user: a start need not read all weights again.

Whatever is wrong with the file, digests are computed again. Processes that write at the same time lose entries of each
other, which costs a computation.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

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
        self._folder = folder or _caches() / "lmkv"
        self._file = self._folder / "digests.json"

    def load(self) -> Entries:
        """Reads the remembered digests. Returns nothing if another user could have written the file."""
        with suppress(OSError, ValueError, TypeError, AttributeError):
            if not _is_own(self._folder.lstat()):
                return {}
            with self._file.open("rb") as file:
                if not _is_own(os.fstat(file.fileno())):
                    return {}
                content = json.loads(file.read(MAX_FILE_BYTES))
            return {
                str(path): ((int(inode), int(size), int(mtime), int(ctime)), str(digest))
                for path, ((inode, size, mtime, ctime), digest) in content.items()
            }
        return {}

    def add(self, entries: Mapping[str, tuple[FileStamp, str]]) -> None:
        """Remembers these too."""
        if not entries:
            return
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_own(self._folder.lstat()):
                return
            kept = {path: entry for path, entry in self.load().items() if path not in entries}
            latest = list((kept | dict(entries)).items())[-MAX_ENTRIES:]
            with tempfile.NamedTemporaryFile("w", dir=self._folder, prefix="digests-", delete=False) as file:
                written = Path(file.name)
                try:
                    json.dump(dict(latest), file)
                    file.flush()
                    written.replace(self._file)
                except OSError:
                    written.unlink()


def _caches() -> Path:
    """The user's folder of caches; one that cannot exist if there is none."""
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return caches if caches.is_absolute() else Path("~/.cache").expanduser()
    except RuntimeError:  # the user has no home
        return Path(os.devnull)


def _is_own(status: os.stat_result) -> bool:
    """Whether no other user may change what has this status."""
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
