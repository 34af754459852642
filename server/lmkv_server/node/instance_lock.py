"""One node per instance id and host, and the secret that proves its identity to coordinators after a restart."""

from __future__ import annotations

import fcntl
import os
import secrets
from contextlib import suppress
from typing import TextIO

from lmkv.config.node import LOCK_FILE, SECRET_FILE
from lmkv.errors import ConfigError
from lmkv.runtime.folder import Folder

SECRET_BYTES = 32


class InstanceLock:
    """Holds an instance id on this host. The kernel releases it when the process ends.

    Raises `ConfigError` if another process holds it.
    """

    def __init__(self, folder: Folder, instance_id: str) -> None:
        self._file: TextIO = os.fdopen(folder.open(LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_APPEND), "a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            pid = self._file.read().strip() or "unknown"
            self._file.close()
            raise ConfigError(
                f"instance_id: {instance_id!r} is already run by process {pid} on this host; "
                "give each node its own instance_id"
            ) from None
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self._file.close()


def instance_secret(folder: Folder) -> bytes:
    """The secret of this instance, from a file that only this user can read; created by the first node.

    A file of another owner, mode or length is replaced. Hold the `InstanceLock`. Raises `ConfigError` if the file
    cannot be written.
    """
    with suppress(OSError, ConfigError), os.fdopen(folder.open(SECRET_FILE, os.O_RDONLY), "rb") as file:
        if not os.fstat(file.fileno()).st_mode & 0o077:
            kept = file.read(SECRET_BYTES + 1)
            if len(kept) == SECRET_BYTES:
                return kept
    secret = secrets.token_bytes(SECRET_BYTES)
    new = f"{SECRET_FILE}.new"
    try:
        folder.unlink(new)
        with os.fdopen(folder.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(secret)
        folder.rename(new, SECRET_FILE)
    except OSError as error:
        raise ConfigError(
            f"runtime_dir: cannot write {folder.path / SECRET_FILE}: {error.strerror}; set runtime_dir to a folder "
            "that this user may write",
            key="runtime_dir",
        ) from None
    return secret
