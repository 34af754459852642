"""Values that are read from files, such as certificates and tokens, and reloaded on access after a change."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from lmkv.errors import ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Reloadable(Generic[T]):
    """A value that is reloaded when its files change. `get` costs one `stat` per file.

    `make` raises `ConfigError` if the files are invalid, perhaps because one of a pair was replaced: the last value
    then stays, but the constructor raises. Thread-safe.
    """

    def __init__(self, paths: Sequence[str] | Callable[[], Sequence[str]], make: Callable[[], T]) -> None:
        """`paths` may be a function, since a file can name others on which the value depends."""
        self._paths = paths if callable(paths) else lambda: paths
        self._make = make
        self._stamp = self._read_stamps()  # before the files are read, so that a change meanwhile is noticed
        self._value = make()

    def get(self) -> T:
        """The value of the current files, or the last valid one."""
        stamp = self._read_stamps()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._value = self._make()
            except ConfigError as error:
                logger.warning("keeping the previous value: %s", error)
            else:
                logger.info("reloaded: %s", ", ".join(self._paths()))
        return self._value

    def _read_stamps(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_stamp(path) for path in self._paths() if path)


def _stamp(path: str) -> tuple[int, int, int] | None:
    """Modification time, inode and size of a file; None if there is no such file."""
    try:
        # Follows links: Kubernetes replaces a link to update secrets. `Path.stat` would cost four times as much.
        status = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
