"""What is made of files, and made anew once they change: certificates, tokens. No restart, and no timer either."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from lmkv.errors import ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Reloadable(Generic[T]):
    """A value that follows its files. Whoever needs it asks each time: that costs a `stat` a file.

    Files that make no value, perhaps since only one of a pair has been replaced so far, leave the last one in place.
    `make` raises `ConfigError` then; so does the constructor. Safe to use from any thread.
    """

    def __init__(self, paths: Sequence[str] | Callable[[], Sequence[str]], make: Callable[[], T]) -> None:
        """`paths` may be asked for each time: what a file says can depend on others that it names."""
        self._paths = paths if callable(paths) else lambda: paths
        self._make = make
        self._stamp = self._read_stamps()  # before they are read: what changes meanwhile is seen
        self._value = make()

    def get(self) -> T:
        """The value that the files make now, or made last."""
        stamp = self._read_stamps()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._value = self._make()
            except ConfigError as error:
                logger.warning("going on as before: %s", error)
            else:
                logger.info("read anew: %s", ", ".join(self._paths()))
        return self._value

    def _read_stamps(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_stamp(path) for path in self._paths() if path)


def _stamp(path: str) -> tuple[int, int, int] | None:
    """What tells one content of a file from the next; None if there is no such file."""
    try:
        # Follows links: Kubernetes swaps the one that all secrets are behind. Path would cost four times as much.
        status = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
