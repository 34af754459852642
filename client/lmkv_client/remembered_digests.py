"""Digests of files that were computed before, in a file of the user: a start need not read all weights again.

Whatever is wrong with the file, digests are computed again. Processes that write at the same time lose entries of each
other, which costs a computation.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from lmkv.errors import ConfigError
from lmkv.runtime.folder import Folder

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
    """The user's folder of caches; one that cannot exist if there is none."""
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return caches if caches.is_absolute() else Path("~/.cache").expanduser()
    except RuntimeError:  # the user has no home
        return Path(os.devnull)
