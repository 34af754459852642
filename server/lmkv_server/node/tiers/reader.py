"""Reads chunks of a deeper tier straight into the pool, verifies them, and makes them visible.

Used by `DiskTier` and `RemoteTier`.

asked for ──► extent reserved ──► read ──► summed ──► committed to the host tier
                                    └── torn, or gone: dropped, and a miss
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from lmkv.keys import ChunkKey
from lmkv.pool.pool import Pool
from lmkv.transfer.bandwidth import Bandwidth
from lmkv_kernels import checksum
from lmkv_server.node.cache.host import Chunk, HostTier, Reserved

logger = logging.getLogger(__name__)

READS_AHEAD = 8
"""Chunks that one load reads at a time."""
MAX_READS = 16
"""Chunks that are read at a time in all: so many extents are reserved for it at most."""
MAX_WAITING = 1024
"""Chunks that are read or wait for it; what is asked for beyond these is a miss."""

OnRead = Callable[[int, Chunk], None]
"""Told, by index, of a chunk that was just committed to the host tier; to hold it is up to the callee."""
_Ended = Callable[[Chunk | None], None]


class Listed(Protocol):
    """A chunk that a deeper tier has, as far as it knows without reading it."""

    @property
    def key(self) -> ChunkKey: ...
    @property
    def fingerprint(self) -> bytes: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def file_bytes(self) -> int:
        """Bytes of the pool that reading it writes to."""


class Described(Protocol):
    """A chunk that was read, with all there is to know of it."""

    @property
    def key(self) -> ChunkKey: ...
    @property
    def parent(self) -> ChunkKey | None: ...
    @property
    def fingerprint(self) -> bytes: ...
    @property
    def token_count(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def checksum(self) -> int: ...


L = TypeVar("L", bound=Listed)
C = TypeVar("C", bound=Listed, contravariant=True)


class Place(Protocol[C]):
    """Where chunks are: a folder, or a store. Its name for people is its `str`."""

    @property
    def is_usable(self) -> bool:
        """Whether something may be begun here."""

    async def read(self, chunk: C, memory: memoryview, is_intact: Callable[[Any], bool]) -> Described | None:
        """Reads a chunk; None if it is not there, not whole, or not what `is_intact`, called on a thread, says.

        The memory is written until this returns.
        """


class Deeper(Protocol[L]):
    """A tier to read from."""

    def find(self, key: ChunkKey) -> tuple[Any, L] | None:
        """The chunk and its `Place`, if it is there."""

    def is_wanted(self, place: Any, chunk: L, /) -> bool:
        """Whether the chunk that was found there has not been dropped since."""

    def discard(self, place: Any, chunks: Sequence[L], /) -> None:
        """Forgets chunks that are damaged or gone, and removes what is left of them."""


class TierReader(Generic[L]):
    """The chunks that are being read. One loop owns it."""

    def __init__(self, deeper: Deeper[L], tier: HostTier, pool: Pool) -> None:
        self.read_chunks = 0
        """Chunks read whole since the start."""
        self.read_bytes = 0
        """Bytes of these."""
        self.damaged_count = 0
        """Chunks that were not what was written, or not there, and were dropped."""
        self._deeper = deeper
        self._tier = tier
        self._pool = pool
        self._bandwidth = Bandwidth()
        self._reading: dict[ChunkKey, list[_Ended]] = {}
        self._may_read = asyncio.Semaphore(MAX_READS)
        self._tasks: set[asyncio.Task[None]] = set()

    def expected_seconds(self, size_bytes: int) -> float | None:
        """What it should take to read so many bytes; None if that is not known."""
        return self._bandwidth.seconds(size_bytes, time.monotonic())

    async def read(self, fingerprint: bytes, keys: Sequence[ChunkKey], timeout_seconds: float, on_read: OnRead) -> None:
        """Brings those of the chunks that are there into the host tier, begun in order, a few at a time.

        What does not come within `timeout_seconds`, is torn, or finds no room in the pool, does not come. Two who want
        the same chunk share one read. Raises nothing but for cancellation, and neither may `on_read`, which is not
        called any more after the return.
        """
        ahead = asyncio.Semaphore(READS_AHEAD)
        began, size_bytes, listening = time.monotonic(), 0, True

        def ended(index: int, chunk: Chunk | None) -> None:
            nonlocal size_bytes
            ahead.release()
            if chunk and listening:
                size_bytes += chunk.size_bytes
                on_read(index, chunk)

        try:
            async with asyncio.timeout(timeout_seconds):
                for index, key in enumerate(keys):
                    await ahead.acquire()
                    self._begin(key, fingerprint, partial(ended, index))
                for _ in range(READS_AHEAD):
                    await ahead.acquire()
        except TimeoutError:
            logger.debug("to read %d chunks takes more than %.3g s", len(keys), timeout_seconds)
        finally:
            listening = False
        now = time.monotonic()
        self._bandwidth.record_read(size_bytes, now - began, now)

    async def aclose(self) -> None:
        """Ends every read. The tier must be closed: nobody writes to the pool any more. Idempotent."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _begin(self, key: ChunkKey, fingerprint: bytes, ended: _Ended) -> None:
        """Has a chunk read, unless it is being read already; `ended` is called in any case, perhaps at once."""
        found = self._deeper.find(key)
        if found is None or found[1].fingerprint != fingerprint or not found[0].is_usable:
            ended(None)
        elif (waiting := self._reading.get(key)) is not None:
            waiting.append(ended)
        elif len(self._reading) >= MAX_WAITING:
            ended(None)
        else:
            self._reading[key] = [ended]
            task = asyncio.create_task(self._bring(*found))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _bring(self, place: Place[L], chunk: L) -> None:
        brought = None
        try:
            async with self._may_read:
                brought = self._tier.get(chunk.key)  # perhaps it came from elsewhere since
                if brought is None and place.is_usable and (reserved := self._tier.reserve(chunk.size_bytes)):
                    brought = await self._bring_into(reserved, place, chunk)
        finally:
            for ended in self._reading.pop(chunk.key):
                ended(brought)

    async def _bring_into(self, reserved: Reserved, place: Place[L], chunk: L) -> Chunk | None:
        """Reads into an extent, which stays reserved for good if this is cancelled: the thread goes on writing."""
        memory = self._pool.buffer[reserved.offset : reserved.offset + chunk.file_bytes]
        came = await place.read(chunk, memory, lambda said: self._is_intact(reserved, said))
        is_wanted = self._deeper.is_wanted(place, chunk)  # else nobody shall find it again
        if came is None or not is_wanted:
            self._tier.give_back(reserved.offset)
            if is_wanted:
                self.damaged_count += 1
                logger.warning("chunk %s is damaged or gone in %s, and was dropped", chunk.key.hex(), place)
                self._deeper.discard(place, [chunk])
            return None
        self.read_chunks += 1
        self.read_bytes += came.size_bytes
        committed = self._tier.commit(
            reserved.offset,
            key=came.key,
            fingerprint=came.fingerprint,
            size_bytes=came.size_bytes,
            checksum=came.checksum,
            token_count=came.token_count,
            parent=came.parent,
        )
        return committed or self._tier.get(chunk.key)

    def _is_intact(self, reserved: Reserved, said: Described) -> bool:
        return checksum(self._pool.buffer, reserved.offset, said.size_bytes) == said.checksum
