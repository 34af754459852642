"""Loads and stores that run in a worker. Used by `WorkerSide`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from lmkv_client.connector.messages import LoadPlan
from lmkv_client.connector.vllm_api import init_logger
from lmkv_client.connector.worker.handles import CopyHandle
from lmkv_kernels import ChunkCopy

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
        """How long it took. The end of a synchronous load on a device is seen only after the forward pass that waits
        for it, so the device's clock counts."""
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
