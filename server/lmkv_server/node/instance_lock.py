"""One node per instance id and host."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import TextIO

from lmkv.errors import ConfigError


class InstanceLock:
    """Holds an instance id on this host. The kernel lets go of it however the process ends.

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
