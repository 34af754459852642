"""Copies that run in a worker: handles of them, their division by KV-cache group, and the worker's loads and stores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Protocol

from lmkv_client.connector.messages import AuditedExtent, LoadPlan
from lmkv_client.connector.vllm_api import init_logger
from lmkv_kernels import ChunkCopy, Pages, copied_bytes


class CopyHandle(Protocol):
    """A copy that runs."""

    def done(self) -> bool:
        """Whether it has ended. Raises `ValueError` or `RuntimeError` if it failed."""

    def wait(self) -> None:
        """Waits until it has ended. Raises as `done` does."""

    @property
    def checksums(self) -> list[int]:
        """Returns the sum that the words of each copy add to its chunk's checksum. The gather must be done."""

    @property
    def seconds(self) -> float | None:
        """Returns the duration of a copy that is done if the device measured it, else None."""


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


logger = init_logger("vllm.lmkv")

COPY_ERRORS = (ValueError, RuntimeError)
"""Errors of a failed copy."""


@dataclass(kw_only=True, slots=True)
class RunningLoad:
    """A load in progress."""

    sync: bool
    """Whether the forward pass of its step needed it; vLLM does not ask for its end."""
    started_at: float
    parts: list[CopyHandle] = field(default_factory=list)
    postponed: list[LoadPlan] = field(default_factory=list)
    """Pieces that wait until the pool is mapped."""
    size_bytes: int = 0
    copy_seconds: float | None = None
    """Total duration of the parts that have ended, where the device measures it."""
    failed_blocks: list[int] = field(default_factory=list)
    copied_blocks: list[int] = field(default_factory=list)
    all_or_none: bool = False
    final: bool = False
    failed: bool = False
    lost: bool = False
    """Whether the rest of the request's load cannot be had, so that what was copied is of no use."""

    def begin(self, act: Callable[[], CopyHandle]) -> None:
        """Starts a part; a failure to start fails the load."""
        try:
            self.parts.append(act())
        except COPY_ERRORS as error:
            self.fail(error)

    def over(self) -> bool:
        """Whether all parts have ended and no further plan will arrive."""
        self.parts = [part for part in self.parts if not self._part_is_over(part)]
        return self.final and not self.parts and not self.postponed

    def wait(self) -> None:
        """Waits for running parts."""
        for part in self.parts:
            with suppress(*COPY_ERRORS):
                part.wait()

    def fail(self, error: Exception) -> None:
        """Records that a part of it could not be copied."""
        logger.error("cannot load: %s", error)
        self.failed = True

    def _part_is_over(self, part: CopyHandle) -> bool:
        try:
            if not part.done():
                return False
        except COPY_ERRORS as error:
            self.fail(error)
        else:
            if part.seconds is not None:
                self.copy_seconds = (self.copy_seconds or 0.0) + part.seconds
        return True

    def seconds(self, now: float) -> float:
        """Returns the duration of the load. vLLM sees the end of a synchronous load on a device only after the forward
        pass, so the device's clock counts."""
        if self.sync and self.copy_seconds is not None:
            return self.copy_seconds
        return now - self.started_at


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningStore:
    """A store in progress."""

    copies: Sequence[ChunkCopy]
    copying: CopyHandle
    started_at: float
    finished_ids: Sequence[str] = ()
    """Finished requests whose pages are read."""
    audits: Mapping[int, AuditedExtent] = field(default_factory=dict)
    """Held chunks to compare with what is written, as in `StepPlan`."""


def by_group(copies: Sequence[ChunkCopy], group_count: int) -> dict[int, list[int]]:
    """Indices of the copies of each group. Raises `ValueError` if there is no such group."""
    indices: dict[int, list[int]] = {}
    for index, copy in enumerate(copies):
        if not 0 <= copy.group < group_count:
            raise ValueError(f"copies[{index}]: group {copy.group} is not among the rank's {group_count}")
        indices.setdefault(copy.group, []).append(index)
    return indices


def grouped_bytes(pages: Sequence[Pages], copies: Sequence[ChunkCopy]) -> int:
    """Total bytes of the copies, for the heads of this rank; `pages` are those of each group."""
    if len(pages) == 1:
        return copied_bytes(pages[0], copies)
    groups = by_group(copies, len(pages))
    return sum(copied_bytes(pages[group], [copies[index] for index in own]) for group, own in groups.items())


def begin_each(
    copies: Sequence[ChunkCopy], group_count: int, begin: Callable[[int, list[ChunkCopy]], CopyHandle]
) -> CopyHandle:
    """Begins the copies of each group. If one of them cannot begin, those before it have ended when this raises."""
    groups = by_group(copies, group_count)
    begun: list[CopyHandle] = []
    try:
        for group, own in groups.items():
            begun.append(begin(group, [copies[index] for index in own]))
    except BaseException:
        with suppress(ValueError, RuntimeError):
            JoinedCopies(begun, []).wait()
        raise
    return JoinedCopies(begun, list(groups.values()))
