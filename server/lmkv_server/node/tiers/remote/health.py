"""The remote store as the loop sees it: asked from threads, in time; opened, lost, opened again. For `RemoteTier`.

away ──open──► open ──a call fails──► away, for a second, then two, ... up to a minute
                ├── it takes no more ──► open, but nothing is put there for a minute
                └── a question stays open ──► late: nothing is begun until it answers, or fails
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, TypeVar

from lmkv_server.node.tiers.remote.backend import Refused, RemoteStore
from lmkv_server.node.tiers.remote.chunk import HEADER_BYTES, RemoteChunk, RemoteObject

logger = logging.getLogger(__name__)

T = TypeVar("T")

READ_THREADS = 8
WRITE_THREADS = 2
ASK_THREADS = 2
RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 60.0
REFUSED_SECONDS = 60.0
"""For so long after the store refused a chunk none is put there."""
REMOVED_AT_ONCE = 1000
CLOSE_SECONDS = 3.0


class BackendHealth:
    """A store and whether it can be used. One loop owns it; what blocks has threads of its own.

    `on_open` is called whenever it can be used again, `on_lost` when it cannot any more.
    """

    def __init__(
        self,
        store: RemoteStore,
        *,
        on_open: Callable[[], None],
        on_lost: Callable[[], None],
        retry_seconds: float = RETRY_SECONDS,
        refused_seconds: float = REFUSED_SECONDS,
    ) -> None:
        self.is_open = False
        self.failure_count = 0
        """Times that the store could not be reached, or refused a chunk."""
        self.late_count = 0
        """Questions that were not answered in time."""
        self.attempted = asyncio.Event()
        """Set once it was tried to reach it."""
        self.work = asyncio.Event()
        """Set whenever there may be something to put."""
        self._store = store
        self._on_open = on_open
        self._on_lost = on_lost
        self._retry_seconds = retry_seconds
        self._refused_seconds = refused_seconds
        self._refused_until = 0.0
        self._late: set[asyncio.Future[Any]] = set()
        self._running: set[asyncio.Future[Any]] = set()
        self._is_closed = False
        self._lost = asyncio.Event()
        self._said = ""
        self._readers = ThreadPoolExecutor(READ_THREADS, "lmkv-remote-read")
        self._writers = ThreadPoolExecutor(WRITE_THREADS, "lmkv-remote-write")
        self._askers = ThreadPoolExecutor(ASK_THREADS, "lmkv-remote-ask")

    def __str__(self) -> str:
        return self._store.shown

    @property
    def asks_singly(self) -> bool:
        """See `RemoteStore`."""
        return self._store.asks_singly

    @property
    def is_usable(self) -> bool:
        """Whether something may be begun."""
        return self.is_open and not self._late

    @property
    def takes_more(self) -> bool:
        """Whether something may be put there."""
        return self.is_usable and time.monotonic() >= self._refused_until

    async def keep(self) -> None:
        """Reaches the store, and again after it failed, until cancelled."""
        pause = self._retry_seconds
        while True:
            try:
                await self._run(self._askers, self._store.open)
            except OSError as error:
                self._failed(f"cannot be used, going on without it: {error}")
                self.attempted.set()
            else:
                began = time.monotonic()
                self._opened()
                self.attempted.set()
                await self._lost.wait()
                if time.monotonic() - began > MAX_RETRY_SECONDS:
                    pause = self._retry_seconds
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_RETRY_SECONDS)

    async def sizes(self, names: Sequence[str], seconds: float) -> list[int]:
        """See `RemoteStore`; nothing if there is no answer within `seconds`. Raises nothing but for cancellation."""
        try:
            asking = self._begin(self._askers, self._store.sizes, names)
            done, _ = await asyncio.wait([asking], timeout=seconds)
            if done:
                return asking.result()
        except OSError as error:
            self.lose(error)
            return []
        logger.debug("remote: %s did not answer within %.3g s", self, seconds)
        self.late_count += 1
        self._late.add(asking)
        asking.add_done_callback(self._answered)
        return []

    async def read(
        self, chunk: RemoteChunk, memory: memoryview, is_intact: Callable[[RemoteObject], bool]
    ) -> RemoteObject | None:
        """Reads a chunk; None if it is gone, or not what its header or `is_intact`, called on the thread, says.

        The memory is written until this returns.
        """

        def read() -> RemoteObject | None:
            header = bytearray(HEADER_BYTES)
            if not self._store.get(chunk.name, (memoryview(header), memory)):
                return None
            said = chunk.described(bytes(header))
            return said if said and is_intact(said) else None

        try:
            return await self._run(self._readers, read)
        except OSError as error:
            self.lose(error)
            return None

    async def write(self, name: str, header: bytes, memory: memoryview) -> bool | None:
        """Puts a chunk; False if it is there already, None if that failed. The memory is read until it returns."""
        try:
            return await self._run(self._writers, self._store.put, name, (memoryview(header), memory))
        except Refused as error:
            self._failed(f"takes no more, going on with what it has: {error}")
            self._refused_until = time.monotonic() + self._refused_seconds
            asyncio.get_running_loop().call_later(self._refused_seconds, self.work.set)
        except OSError as error:
            self.lose(error)
        return None

    async def remove(self, names: Sequence[str], *, dry_run: bool = False) -> int:
        """Removes objects, or only counts them; how many there are. Raises `OSError`, and then the store is lost."""

        def remove(part: Sequence[str]) -> int:
            count = sum(size > 0 for size in self._store.sizes(part))
            if not dry_run:
                self._store.remove(part)
            return count

        count = 0
        try:
            for start in range(0, len(names), REMOVED_AT_ONCE):
                count += await self._run(self._askers, remove, names[start : start + REMOVED_AT_ONCE])
        except OSError as error:
            self.lose(error)
            raise
        return count

    async def remove_all(self, root: str, *, dry_run: bool = False) -> int:
        """Removes, or only counts, what has a name that begins so. Raises `OSError`, and then the store is lost."""
        try:
            count, pages = 0, self._store.names(root)
            while page := await self._run(self._askers, lambda: list(islice(pages, 1))):
                count += len(page[0])
                if page[0] and not dry_run:
                    await self._run(self._askers, self._store.remove, page[0])
        except OSError as error:
            self.lose(error)
            raise
        return count

    def lose(self, error: OSError) -> None:
        """Goes on without the store until it can be reached again."""
        if not self.is_open or self._is_closed:
            return
        self._failed(f"is lost, going on without it: {error}")
        self.is_open = False
        self._on_lost()
        self._lost.set()

    async def aclose(self) -> None:
        """Ends what runs, as far as it ends in time. Idempotent."""
        self.is_open, self._is_closed = False, True
        if self._running:
            _, late = await asyncio.wait(self._running, timeout=CLOSE_SECONDS)
            if late:
                logger.warning("remote: %s does not answer; its threads are left behind", self)
        for threads in (self._readers, self._writers, self._askers):
            threads.shutdown(wait=not self._running, cancel_futures=True)
        self._store.close()

    def _opened(self) -> None:
        self.is_open = True
        self._lost.clear()
        if self._said:
            logger.info("remote: %s is there again", self)
        else:
            logger.info("remote: chunks are in %s, too", self)
        self._said = ""
        self._on_open()
        self.work.set()

    def _answered(self, asking: asyncio.Future[list[int]]) -> None:
        """A question that was late is over."""
        self._late.discard(asking)
        error = None if asking.cancelled() else asking.exception()
        if isinstance(error, OSError):
            self.lose(error)
        self.work.set()

    def _failed(self, text: str) -> None:
        """Says so once, not with every attempt."""
        self.failure_count += 1
        if text != self._said:
            logger.error("remote: %s %s", self, text)
            self._said = text

    def _begin(self, threads: ThreadPoolExecutor, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        if self._is_closed:
            raise OSError("closed")
        running = asyncio.get_running_loop().run_in_executor(threads, function, *arguments)
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return running

    async def _run(self, threads: ThreadPoolExecutor, function: Callable[..., T], *arguments: Any) -> T:
        """Has a thread do something. It is done even if nobody waits for it any more."""
        running = self._begin(threads, function, *arguments)
        await asyncio.wait([running])
        return running.result()
