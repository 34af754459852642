"""One node per instance id and host, and the secret that proves its identity to coordinators after a restart."""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from pathlib import Path
from typing import TextIO

from lmkv.errors import ConfigError

SECRET_BYTES = 32


class InstanceLock:
    """Holds an instance id on this host. The kernel releases it when the process ends.

    Raises `ConfigError` if another process holds it.
    """

    def __init__(self, path: Path, instance_id: str) -> None:
        self._file: TextIO = path.open("a+")
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


def instance_secret(path: Path) -> bytes:
    """The secret of this instance, from a file that only this user can read; created by the first node.

    A file of another owner, mode or length is replaced. Hold the `InstanceLock`. Raises `ConfigError` if the file
    cannot be written.
    """
    try:
        status = path.lstat()
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077:
            kept = path.read_bytes()
            if len(kept) == SECRET_BYTES:
                return kept
    except OSError:
        pass  # missing or unreadable: replaced
    secret = secrets.token_bytes(SECRET_BYTES)
    new = path.with_suffix(".new")
    try:
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secret)
        new.replace(path)
    except OSError as error:
        raise ConfigError(
            f"runtime_dir: cannot write {path}: {error.strerror}; set runtime_dir to a folder that this user may write",
            key="runtime_dir",
        ) from None
    return secret
