"""The contract of a backend: one folder, or one store, that a secondary tier keeps chunks in; and its health.

A backend is opened, and after a failure opened again with backoff. Its blocking calls run on threads of its own.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeVar

from lmkv.keys import ChunkKey
from lmkv.kv_inputs import KvInputs
from lmkv.misses import MissReason
from lmkv_server.node.cache.host import Chunk
from lmkv_server.node.tiers.base import TierStats
from lmkv_server.node.tiers.encryption_header import ChunkDescription
from lmkv_server.node.tiers.threads import DaemonThreads

logger = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 60.0
FULL_SECONDS = 60.0
"""Time for which a backend that was full, or refused a chunk, is given no new one."""
CLOSE_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendTimes:
    """The times by which a backend's health is judged."""

    retry_seconds: float = RETRY_SECONDS
    """The pause before a backend that failed is opened again; each further pause is twice as long."""
    full_seconds: float = FULL_SECONDS
    stall_seconds: float | None = None
    """A call that takes longer is late; None: only where `run_within` says so."""


class Reopened(Protocol):
    """A backend as its health sees it."""

    async def open(self) -> None:
        """Opens the folder or store, and calls `BackendHealth.opened` before it uses it. Raises `OSError`."""

    def lost(self) -> None:
        """Forgets what the backend holds: it has failed, and `open` will find out what is left."""


class BackendHealth:
    """Whether a backend can be used. One event loop owns it. A failed call raises `OSError` to its caller only."""

    def __init__(
        self, tier: str, name: str, backend: Reopened, threads: Mapping[str, int], times: BackendTimes
    ) -> None:
        """`name` is that of the backend in logs and errors; `threads`: how many each kind of call has."""
        self.name = name
        self.is_open = False
        self.attempted = asyncio.Event()
        """Set after the first attempt to open the backend."""
        self.work = asyncio.Event()
        """Set when there may be something to write."""
        self._tier = tier
        self._backend = backend
        self._times = times
        self._full_until = 0.0
        self._late: dict[asyncio.Future[Any], float] = {}
        """The time at which each late call began."""
        self._running: set[asyncio.Future[Any]] = set()
        self._failed = asyncio.Event()
        self._is_ended = False
        self._logged = ""
        self._failure_count = 0
        self._late_count = 0
        self._threads = {kind: DaemonThreads(count, f"lmkv-{tier}-{kind}") for kind, count in threads.items()}

    @property
    def usable(self) -> bool:
        """Whether a call may be started."""
        return self.is_open and not self._late

    @property
    def is_late(self) -> bool:
        """Whether a call has run for longer than it should."""
        return bool(self._late)

    def answers_within(self, seconds: float) -> bool:
        """Whether a call may be started that has this time: not if one has run for as long already."""
        return self.is_open and time.monotonic() - min(self._late.values(), default=math.inf) < seconds

    @property
    def is_full(self) -> bool:
        """Whether it was full, or refused a chunk, less than `full_seconds` ago."""
        return time.monotonic() < self._full_until

    def stats(self) -> TierStats:
        """Failures, and calls of `run_within` that were late."""
        return TierStats(failures=self._failure_count, late_lookups=self._late_count)

    async def keep_open(self) -> None:
        """Opens the backend, and again after a failure, until cancelled."""
        pause = self._times.retry_seconds
        while True:
            try:
                await self._backend.open()
            except OSError as error:
                self._fail(f"cannot be used, continuing without it: {_text(error)}")
                self.attempted.set()
            else:
                opened = time.monotonic()
                self._logged = ""
                self.attempted.set()
                await self._failed.wait()
                if time.monotonic() - opened > MAX_RETRY_SECONDS:
                    pause = self._times.retry_seconds
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_RETRY_SECONDS)

    def opened(self) -> None:
        """Marks the backend open: `Reopened.open` calls it."""
        self.is_open = True
        self._failed.clear()
        self.work.set()

    def close(self, error: OSError) -> None:
        """Marks the backend closed after a failure, until it is opened again. Idempotent."""
        if self.is_open and not self._is_ended:
            self._fail(f"is lost, continuing without it: {_text(error)}")
            self.is_open = False
            self._backend.lost()
            self._failed.set()

    def full(self, error: OSError, retry: Callable[[], None] = lambda: None) -> None:
        """Notes that the backend takes no new chunks; `retry` is called when it is tried again."""
        self._fail(f"accepts no more writes, continuing with its contents: {_text(error)}")
        self._full_until = time.monotonic() + self._times.full_seconds

        def end() -> None:
            retry()
            self.work.set()

        asyncio.get_running_loop().call_later(self._times.full_seconds, end)

    async def run(self, kind: str, function: Callable[..., T], *arguments: Any) -> T:
        """Runs a blocking call on a thread; it ends even if the caller is cancelled. Raises `OSError`."""
        began, call = time.monotonic(), self._start(kind, function, *arguments)
        done, _ = await asyncio.wait([call], timeout=self._times.stall_seconds)
        if not done:
            self._late[call] = began
            call.add_done_callback(self._end_late)
            self._log(f"is slow, continuing without it: no answer for {self._times.stall_seconds:g} s")
            await asyncio.wait([call])
            self._logged = ""
        return call.result()

    async def run_within(self, seconds: float, kind: str, function: Callable[..., T], *arguments: Any) -> T | None:
        """Runs a call as `run` does, but returns None if it has not ended after `seconds`."""
        began, call = time.monotonic(), self._start(kind, function, *arguments)
        done, _ = await asyncio.wait([call], timeout=seconds)
        if done:
            return call.result()
        logger.debug("%s: %s did not answer within %.3g s", self._tier, self.name, seconds)
        self._late_count += 1
        self._late[call] = began
        call.add_done_callback(self._end_late)
        call.add_done_callback(self._close_if_failed)
        return None

    async def wait_idle(self) -> None:
        """Returns once no call is running."""
        while self._running:
            await asyncio.wait(self._running)

    async def aclose(self) -> None:
        """Waits a bounded time for running calls, and ends the threads. Idempotent."""
        self.is_open, self._is_ended = False, True
        if self._running:
            _, late = await asyncio.wait(self._running, timeout=CLOSE_SECONDS)
            if late:
                logger.warning("%s: %s does not answer; its threads are left behind", self._tier, self.name)
        for threads in self._threads.values():
            threads.shutdown(wait=not self._running, cancel_futures=True)

    def _start(self, kind: str, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        if self._is_ended:
            raise OSError(errno.ESHUTDOWN, "closed")
        call = asyncio.get_running_loop().run_in_executor(self._threads[kind], function, *arguments)
        self._running.add(call)
        call.add_done_callback(self._running.discard)
        return call

    def _end_late(self, call: asyncio.Future[Any]) -> None:
        self._late.pop(call, None)
        self.work.set()

    def _close_if_failed(self, call: asyncio.Future[Any]) -> None:
        error = None if call.cancelled() else call.exception()
        if isinstance(error, OSError):
            self.close(error)

    def _fail(self, text: str) -> None:
        self._failure_count += 1
        self._log(text)

    def _log(self, text: str) -> None:
        """Logs a state once, not at each attempt."""
        if text != self._logged:
            logger.error("%s: %s %s", self._tier, self.name, text)
            self._logged = text


def _text(error: OSError) -> str:
    return error.strerror or str(error)


class WriteResult(Enum):
    """The result of writing a chunk."""

    WRITTEN = "written"
    PRESENT = "present"
    """The backend held it already."""
    SKIPPED = "skipped"
    """There was no room, or the backend failed or refused it."""
    UNWANTED = "unwanted"
    """It was dropped meanwhile, and removed from the backend again."""


class ListedChunk(Protocol):
    """A chunk as a backend knows it without reading it."""

    @property
    def key(self) -> ChunkKey: ...
    @property
    def fingerprint(self) -> bytes: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that reading it writes to."""

    @property
    def prefix_digests(self) -> bytes:
        """The digests of `host.Chunk`; empty if the backend does not know them."""

    @property
    def owner(self) -> bytes:
        """The owner of `host.Chunk`; empty if the backend does not know it."""


C = TypeVar("C", bound=ListedChunk)


class ReadChunk(ChunkDescription, Protocol):
    """A chunk as it was read."""

    @property
    def moved_bytes(self) -> int:
        """Bytes that were read for it: of an encoded chunk, those of its code."""

    @property
    def writer(self) -> bytes:
        """The id of the inputs of the engine that has stored it (`KvInputs.id`); empty if that is not known."""


class Backend(Reopened, Protocol[C]):
    """One folder or store. A failed call marks its health closed; none raises but for cancellation."""

    @property
    def health(self) -> BackendHealth: ...

    @property
    def usable(self) -> bool:
        """Whether chunks can be found and read now."""

    @property
    def writable(self) -> bool:
        """Whether chunks can be written now."""

    def has_room(self, size_bytes: int, /) -> bool:
        """Whether a chunk is known to fit without an eviction."""

    def find(self, key: ChunkKey) -> C | None:
        """The chunk, if the backend is known to hold it. Does not count as a use."""

    def holds(self, chunk: C) -> bool:
        """Whether the chunk that `find` returned has not been dropped or replaced since."""

    async def read(self, chunk: C, memory: memoryview, is_intact: Callable[[Any], bool]) -> ReadChunk | None:
        """Reads a chunk; None if it is absent, incomplete, or not what `is_intact`, called on a thread, accepts.

        The memory is written to until this returns, and, if it is cancelled, longer.
        """

    def inputs(self, writer: bytes) -> KvInputs | None:
        """The inputs of the engine that has stored a chunk that was read, by their id; None if they are not known."""

    async def write(self, chunk: Chunk, memory: memoryview, is_wanted: Callable[[], bool]) -> WriteResult:
        """Writes a chunk of the host tier; removes it again unless it `is_wanted` when it is written.

        Before the first chunk of an engine it writes the inputs of its KV.

        `memory` has the chunk's bytes, padded to whole pages. It is read until this returns, or longer if cancelled.
        """

    def keeps(self, key: ChunkKey) -> bool:
        """Whether it holds the chunk, among those that count towards quotas."""

    def is_free(self, key: ChunkKey) -> bool:
        """Whether it keeps the chunk, and no other one continues it there."""

    def evict(self, key: ChunkKey) -> None:
        """Removes a chunk, if it keeps it, because its owner has more than its quota."""

    def discard(self, chunks: Sequence[C], reason: MissReason, /) -> None:
        """Forgets chunks that are damaged or gone, and removes what is left of them in the background."""

    async def settle(self) -> None:
        """Returns once removals that were started have ended. Raises `Unreachable` if it knows that they hang."""

    async def aclose(self) -> None:
        """Ends running calls within a bounded time, and releases the folder or store. Idempotent."""
