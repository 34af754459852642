"""One folder of the disk tier, with its index and its threads: opened, used, lost, opened again. For `DiskTier`.

away ──open──► open ──a write fails──► away, for a second, then two, ... up to a minute
                ├── no room ──► open, but with a limit, for a minute
                └── no answer ──► stalled: nothing is begun until it answers
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from lmkv.units import format_bytes
from lmkv_server.node.tiers.disk.chunk import DiskChunk
from lmkv_server.node.tiers.disk.folder import DiskFolder
from lmkv_server.node.tiers.disk.index import DiskIndex

logger = logging.getLogger(__name__)

T = TypeVar("T")

READ_THREADS = 4
WRITE_THREADS = 2
"""Enough for near the speed of a device, past the page cache."""
RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 60.0
FULL_SECONDS = 60.0
"""For so long after a disk was full it is not tried to put more there than it took."""
STALL_SECONDS = 10.0
"""A device that takes longer for one chunk is left alone until it has done."""
REMOVED_AT_ONCE = 256
FILLED_AT_ONCE = 1024
"""After so many chunks of a folder that is opened others have a turn: some 15 milliseconds."""
CLOSE_SECONDS = 3.0
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class DiskVolume:
    """A folder and what it holds. One loop owns it; what blocks has threads of its own: no folder waits for another.

    `on_open` is told of what the folder holds once it is open, `on_lost` of what is lost when it fails.
    """

    def __init__(
        self,
        folder: DiskFolder,
        capacity_bytes: int,
        *,
        on_open: Callable[[DiskVolume], None],
        on_lost: Callable[[Iterable[DiskChunk]], None],
        retry_seconds: float = RETRY_SECONDS,
        full_seconds: float = FULL_SECONDS,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        self.folder = folder
        self.index = DiskIndex(capacity_bytes)
        self.is_open = False
        self.failure_count = 0
        """Times that it could not be opened or written."""
        self.attempted = asyncio.Event()
        """Set once it was tried to open it."""
        self.work = asyncio.Event()
        """Set whenever there may be something to write here."""
        self._capacity_bytes = capacity_bytes
        self._on_open = on_open
        self._on_lost = on_lost
        self._retry_seconds = retry_seconds
        self._full_seconds = full_seconds
        self._stall_seconds = stall_seconds
        self._late_count = 0
        self._running: set[asyncio.Future[Any]] = set()
        self._is_closed = False
        self._lost = asyncio.Event()
        self._said = ""
        self._readers = ThreadPoolExecutor(READ_THREADS, "lmkv-disk-read")
        self._writers = ThreadPoolExecutor(WRITE_THREADS, "lmkv-disk-write")

    def __str__(self) -> str:
        return str(self.folder.path)

    @property
    def is_usable(self) -> bool:
        """Whether something may be begun here."""
        return self.is_open and not self._late_count

    def has_room(self, size_bytes: int) -> bool:
        """Whether so many bytes fit without another chunk having to go."""
        return self.is_usable and self.index.used_bytes + size_bytes <= self.index.limit_bytes

    async def keep(self) -> None:
        """Opens the folder, and again after it failed, until cancelled."""
        pause = self._retry_seconds
        while True:
            try:
                found = await self._run(self._writers, self.folder.open)
            except OSError as error:
                self._failed(error, "cannot be used, going on without it")
                self.attempted.set()
            else:
                pause = self._retry_seconds
                await self._fill(found)
                self.attempted.set()
                await self._lost.wait()
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_RETRY_SECONDS)
            if self._running:  # what still runs must not meet what the next opening finds
                await asyncio.wait(self._running)

    async def write(self, chunk: DiskChunk, memory: memoryview, instead_of: Iterable[DiskChunk]) -> bool:
        """Writes a chunk that room was reserved for; whether that worked. The memory is read until it returns."""
        try:
            await self._run(self._writers, self.folder.write, chunk, memory, instead_of)
        except OSError as error:
            self._write_failed(error)
            return False
        return True

    async def read(
        self, chunk: DiskChunk, memory: memoryview, is_intact: Callable[[DiskChunk], bool]
    ) -> DiskChunk | None:
        """Reads a chunk; None if it is not there, not whole, or not what `is_intact`, called on the thread, says.

        The memory is written until this returns.
        """
        try:
            is_whole = await self._run(self._readers, lambda: self.folder.read(chunk, memory) and is_intact(chunk))
        except OSError as error:
            self.lose(error)
            return None
        return chunk if is_whole else None

    async def remove(self, chunks: Sequence[DiskChunk]) -> None:
        """Removes the files of chunks that are out of the index, with writes in between."""
        with suppress(OSError):  # closed: then the next opening finds them
            for start in range(0, len(chunks), REMOVED_AT_ONCE):
                await self._run(self._writers, self.folder.remove, chunks[start : start + REMOVED_AT_ONCE])

    def lose(self, error: OSError) -> None:
        """Goes on without the folder until it can be opened again."""
        self._failed(error, "is lost, going on without it")
        if not self.is_open:
            return
        self.is_open = False
        chunks = list(self.index)
        for chunk in chunks:
            self.index.remove(chunk.key)
        self._on_lost(chunks)
        self._lost.set()

    async def aclose(self) -> None:
        """Ends what runs, as far as it ends in time. Idempotent."""
        self.is_open, self._is_closed = False, True
        if self._running:
            _, late = await asyncio.wait(self._running, timeout=CLOSE_SECONDS)
            if late:
                logger.warning("%s does not answer; its threads are left behind", self.folder.path)
        for threads in (self._readers, self._writers):
            threads.shutdown(wait=not self._running, cancel_futures=True)
        self.folder.close()

    async def _fill(self, found: list[DiskChunk]) -> None:
        too_much: list[DiskChunk] = []
        for start in range(0, len(found), FILLED_AT_ONCE):
            too_much += self.index.fill(found[start : start + FILLED_AT_ONCE])
            await asyncio.sleep(0)
        await self.remove(too_much)
        self.is_open = True
        self._lost.clear()
        logger.info(
            "disk: %s has %d chunks, %s of %s%s",
            self.folder.path,
            len(self.index),
            format_bytes(self.index.used_bytes),
            format_bytes(self._capacity_bytes),
            "" if self.folder.direct else "; its file system knows no direct IO",
        )
        self._said = ""
        self._on_open(self)

    def _write_failed(self, error: OSError) -> None:
        if error.errno not in NO_ROOM:
            self.lose(error)
            return
        if not self.is_open:
            return
        self._failed(error, "is full, going on with what it has")
        self.index.full()
        asyncio.get_running_loop().call_later(self._full_seconds, self._empty_again)

    def _empty_again(self) -> None:
        self.index.limit_bytes = self._capacity_bytes
        self._said = ""
        self.work.set()

    def _failed(self, error: OSError, what: str) -> None:
        self.failure_count += 1
        self._say(f"{what}: {error.strerror or error}")

    def _say(self, text: str) -> None:
        """Once, not with every attempt."""
        if text != self._said:
            logger.error("disk: %s %s", self.folder.path, text)
            self._said = text

    async def _run(self, threads: ThreadPoolExecutor, function: Callable[..., T], *arguments: Any) -> T:
        """Has a thread do something. It is done even if nobody waits for it any more."""
        if self._is_closed:
            raise OSError(errno.ESHUTDOWN, "closed")
        running = asyncio.get_running_loop().run_in_executor(threads, function, *arguments)
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        done, _ = await asyncio.wait([running], timeout=self._stall_seconds)
        if not done:
            self._late_count += 1
            self._say(f"is slow, going on without it: no answer for {self._stall_seconds:g} s")
            try:
                await asyncio.wait([running])
            finally:
                self._late_count -= 1
                self._said = ""
                self.work.set()
        return running.result()
