"""Runs blocking reads in threads, with timeouts, cancellation, and notification when a read has stopped.

`ThreadedChannel` is the base of the channels that read in threads.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

from lmkv.errors import Full, LmkvError, Unreachable
from lmkv.transfer.channel import ChannelEnd, Copy, Region, check_copies

logger = logging.getLogger(__name__)

MAX_READS = 1024
CLOSE_SECONDS = 3.0


class Job:
    """The state of one read, shared by the event loop and the threads that run it."""

    def __init__(self, peer_name: str) -> None:
        self.peer_name = peer_name
        self.abandoned = False
        """Whether the caller no longer waits: the threads should stop."""
        self._error: BaseException | None = None
        self._interrupt: Callable[[], None] | None = None

    def abandon(self) -> None:
        """Makes the threads stop soon."""
        self.abandoned = True
        if self._interrupt:
            self._interrupt()

    def fail(self, error: BaseException) -> None:
        """Stores the first error, and stops the other threads."""
        self._error = self._error or error
        self.abandon()

    def take_error(self) -> BaseException | None:
        """The error, if any. It is removed here, to break a reference cycle."""
        error, self._error = self._error, None
        return error

    def set_interrupt(self, interrupt: Callable[[], None]) -> None:
        """Sets how to interrupt a thread's next blocking call. Raises `Unreachable` if the read was abandoned."""
        self._interrupt = interrupt  # before the check, so that a concurrent `abandon` is not missed
        self.check()

    def check(self) -> None:
        """Raises `Unreachable` if it was abandoned."""
        if self.abandoned:
            raise Unreachable(f"the read from {self.peer_name} was cancelled", peer=self.peer_name)


Part = Callable[[Job], None]
"""One thread's part of a read. Raises an `LmkvError` if it fails, and soon after the job was abandoned."""


class Threads:
    """The thread pool of one channel. Its methods are called on one event loop."""

    def __init__(self, name: str, count: int) -> None:
        self._executor = ThreadPoolExecutor(count, name)
        self._jobs: set[Job] = set()
        self._closed = False

    async def run(
        self, peer_name: str, parts: Sequence[Part], timeout_seconds: float, on_stopped: Callable[[], None]
    ) -> None:
        """Runs a read with the guarantees of `Channel.read`; it has stopped when all parts have ended.

        Raises `Full` if too many reads are waiting.
        """
        job, abandoned = Job(peer_name), False
        try:
            if self._closed:
                raise Unreachable("the transfer channel is closed")
            if len(self._jobs) >= MAX_READS:
                raise Full(f"more than {MAX_READS} transfers are waiting", retry_seconds=0.1)
        except LmkvError:
            on_stopped()
            raise
        if not parts:
            on_stopped()
            return
        self._jobs.add(job)
        loop = asyncio.get_running_loop()
        ended = asyncio.gather(
            *(loop.run_in_executor(self._executor, _run, part, job) for part in parts), return_exceptions=True
        )

        def stopped(_: object) -> None:
            self._jobs.discard(job)
            if abandoned:
                job.take_error()
            on_stopped()

        ended.add_done_callback(stopped)
        try:
            async with asyncio.timeout(timeout_seconds):
                await asyncio.shield(ended)
        except TimeoutError:
            abandoned = True
            job.abandon()
            raise Unreachable(
                f"{peer_name} did not deliver within {timeout_seconds:.3g} s", peer=peer_name, quarantined=True
            ) from None
        except asyncio.CancelledError:
            abandoned = True
            job.abandon()
            raise
        if error := job.take_error():
            try:
                raise error
            finally:
                del error

    async def aclose(self) -> None:
        """Ends all reads. Idempotent."""
        self._closed = True
        for job in self._jobs:
            job.abandon()
        closing = asyncio.create_task(asyncio.to_thread(self._executor.shutdown))
        await asyncio.wait([closing], timeout=CLOSE_SECONDS)
        if not closing.done():
            logger.warning("a transfer did not end within %.0f s; its thread is abandoned", CLOSE_SECONDS)
        await asyncio.sleep(0)  # let callbacks of ended reads run


def _run(part: Part, job: Job) -> None:
    try:
        job.check()
        part(job)
    except BaseException as error:
        job.fail(error)


class ReadablePeer(Protocol):
    """A peer, as a channel that reads in threads knows it."""

    @property
    def region(self) -> Region:
        """Its pool, at the address in its own process."""

    def forget(self) -> None:
        """Releases its connections and memory: now, or after the reads that use them. Called on the event loop."""


P = TypeVar("P", bound=ReadablePeer)


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreadedRead:
    """One read of a channel: its parts, and how it ends."""

    parts: Sequence[Part]
    stop: Callable[[], None] = lambda: None
    """Called when all parts have ended."""
    checksums: Callable[[], list[int] | None] = lambda: None
    """Returns the result of the read, if it has succeeded."""


class ThreadedChannel(ABC, Generic[P]):
    """The peers of a channel, and its reads from them. A channel adds peers, and makes a `ThreadedRead` of copies."""

    name: ClassVar[str]

    def __init__(self, end: ChannelEnd, thread_count: int) -> None:
        self._own = end.region
        self._peers: dict[str, P] = {}
        self._threads = Threads(f"lmkv-{self.name}", thread_count)

    async def remove_peer(self, peer_name: str) -> None:
        """Implements `Channel`."""
        self._forget(peer_name)

    async def read(
        self,
        peer_name: str,
        copies: Sequence[Copy],
        timeout_seconds: float,
        on_stopped: Callable[[], None],
        grant_id: str = "",
    ) -> list[int] | None:
        """Implements `Channel`."""
        try:
            if peer_name not in self._peers:
                raise Unreachable(f"{peer_name} is not connected", peer=peer_name)
            peer = self._peers[peer_name]
            check_copies(peer_name, copies, peer.region, self._own)
        except Unreachable:
            on_stopped()
            raise
        read = self._make_read(peer, copies, grant_id)

        def stopped() -> None:
            read.stop()
            on_stopped()

        await self._threads.run(peer_name, read.parts, timeout_seconds, stopped)
        return read.checksums()

    def serve(self, needed: bool) -> None:
        """Does nothing: peers access the memory themselves, or threads serve them."""

    async def aclose(self) -> None:
        """Ends all reads and disconnects from all peers. Idempotent."""
        await self._threads.aclose()
        for peer_name in tuple(self._peers):
            self._forget(peer_name)

    def _forget(self, peer_name: str) -> None:
        if peer := self._peers.pop(peer_name, None):
            peer.forget()

    @abstractmethod
    def _make_read(self, peer: P, copies: Sequence[Copy], grant_id: str) -> ThreadedRead:
        """Returns the read that makes these copies; they are inside of both pools."""
