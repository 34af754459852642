"""Handles of copies that run: on threads, and of several KV-cache groups as one."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Protocol


class CopyHandle(Protocol):
    """A copy that runs."""

    def done(self) -> bool:
        """Whether it has ended. Raises `ValueError` or `RuntimeError` if it failed."""

    def wait(self) -> None:
        """Waits until it has ended. Raises as `done` does."""

    @property
    def checksums(self) -> list[int]:
        """Of a gather that is done: for each copy what its words add to its chunk's checksum."""

    @property
    def seconds(self) -> float | None:
        """Of a copy that is done: its duration, if the device measured it; else None."""


class ThreadTask:
    """A copy or a check on threads of this process."""

    seconds = None

    def __init__(self, futures: Sequence[Future[None]] = (), checksums: Sequence[int] = ()) -> None:
        self._futures = futures
        self.checksums = list(checksums)

    def done(self) -> bool:
        """Implements `CopyHandle`."""
        if not all(future.done() for future in self._futures):
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """Implements `CopyHandle`."""
        for future in self._futures:
            future.result()


class GatherTask:
    """A gather on a thread of this process, whose result are the checksums."""

    seconds = None

    def __init__(self, gathering: Future[list[int]]) -> None:
        self._gathering = gathering

    def done(self) -> bool:
        """Implements `CopyHandle`."""
        if not self._gathering.done():
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """Implements `CopyHandle`."""
        self._gathering.result()

    @property
    def checksums(self) -> list[int]:
        """Implements `CopyHandle`."""
        return self._gathering.result()


class JoinedCopies:
    """Copies of several groups that run side by side, as one."""

    def __init__(self, parts: Sequence[CopyHandle], indices: Sequence[Sequence[int]]) -> None:
        """`indices` are, for each part, the indices of its copies."""
        self._parts = parts
        self._indices = indices

    def done(self) -> bool:
        """Implements `CopyHandle`. A failure is raised when all parts have ended: none touches pages or pool then."""
        failure: Exception | None = None
        for part in self._parts:
            try:
                if not part.done():
                    return False
            except (ValueError, RuntimeError) as error:
                failure = error
        if failure:
            raise failure
        return True

    def wait(self) -> None:
        """Implements `CopyHandle`. Waits for all parts, failed or not."""
        with ExitStack() as stack:
            for part in self._parts:
                stack.callback(part.wait)

    @property
    def checksums(self) -> list[int]:
        """Implements `CopyHandle`."""
        sums = [0] * sum(map(len, self._indices))
        for part, own in zip(self._parts, self._indices, strict=True):
            for index, value in zip(own, part.checksums, strict=True):
                sums[index] = value
        return sums

    @property
    def seconds(self) -> float | None:
        """Implements `CopyHandle`. The longest of the parts."""
        return max((part.seconds for part in self._parts if part.seconds is not None), default=None)
