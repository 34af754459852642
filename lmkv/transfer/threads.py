"""Reads that block, carried out on threads: deadlines, cancellation, and the proof that a read has stopped."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from lmkv.errors import Full, LmkvError, Unreachable

logger = logging.getLogger(__name__)

MAX_READS = 1024
CLOSE_SECONDS = 3.0


class Job:
    """One read, between the loop that asks for it and the threads that carry it out."""

    def __init__(self, peer_name: str) -> None:
        self.peer_name = peer_name
        self.abandoned = False
        """Whether nobody waits for it any more: its threads should end."""
        self._error: BaseException | None = None
        self._interrupt: Callable[[], None] | None = None

    def abandon(self) -> None:
        """Has its threads end soon."""
        self.abandoned = True
        if self._interrupt:
            self._interrupt()

    def fail(self, error: BaseException) -> None:
        """Notes what went wrong first, and ends the other threads."""
        self._error = self._error or error
        self.abandon()

    def take_error(self) -> BaseException | None:
        """What went wrong, if anything did; forgotten here, or the two would keep each other alive."""
        error, self._error = self._error, None
        return error

    def set_interrupt(self, interrupt: Callable[[], None]) -> None:
        """Says, on a thread, how to end what it is about to wait for. Raises `Unreachable` if it need not begin."""
        self._interrupt = interrupt  # first: whoever abandons it meanwhile sees one or the other
        self.check()

    def check(self) -> None:
        """Raises `Unreachable` if it was abandoned."""
        if self.abandoned:
            raise Unreachable(f"the read from {self.peer_name} was given up", peer=self.peer_name)


Part = Callable[[Job], None]
"""One thread's share of a read. Raises an `LmkvError` if it fails, soon once the job is abandoned."""


class Threads:
    """The threads of one channel. Belongs to one event loop."""

    def __init__(self, name: str, count: int) -> None:
        self._executor = ThreadPoolExecutor(count, name)
        self._jobs: set[Job] = set()
        self._closed = False

    async def run(
        self, peer_name: str, parts: Sequence[Part], timeout_seconds: float, on_stopped: Callable[[], None]
    ) -> None:
        """Carries out a read, with the promises of `Channel.read`: it has stopped once all of its parts have ended.

        Raises `Full` if too many wait already.
        """
        job, left = Job(peer_name), False
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
            if left:
                job.take_error()
            on_stopped()

        ended.add_done_callback(stopped)
        try:
            async with asyncio.timeout(timeout_seconds):
                await asyncio.shield(ended)
        except TimeoutError:
            left = True
            job.abandon()
            raise Unreachable(
                f"{peer_name} did not deliver within {timeout_seconds:.3g} s", peer=peer_name, quarantined=True
            ) from None
        except asyncio.CancelledError:
            left = True
            job.abandon()
            raise
        if error := job.take_error():
            try:
                raise error
            finally:
                del error

    async def aclose(self) -> None:
        """Ends every read. Idempotent."""
        self._closed = True
        for job in self._jobs:
            job.abandon()
        closing = asyncio.create_task(asyncio.to_thread(self._executor.shutdown))
        await asyncio.wait([closing], timeout=CLOSE_SECONDS)
        if not closing.done():
            logger.warning("a transfer did not end within %.0f s; its thread is left behind", CLOSE_SECONDS)
        await asyncio.sleep(0)  # those who wait for reads that have ended are told


def _run(part: Part, job: Job) -> None:
    try:
        job.check()
        part(job)
    except BaseException as error:
        job.fail(error)
