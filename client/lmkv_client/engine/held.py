"""What a lookup has found, and the loads of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Self

from lmkv.keys import ChunkKey
from lmkv.misses import MissReason
from lmkv_client.engine.dispatcher import Dispatcher
from lmkv_client.engine.extent import Extent
from lmkv_client.engine.lookups import HeldChunks, LoadWaiter
from lmkv_client.engine.waiting import await_result


class Held:
    """The chunks that a lookup has found: the longest prefix of its keys that can be loaded.

    The node keeps those in its pool, and those that are loaded, until `release`; use it as a context manager. All
    methods may be called on any thread. Once the node is lost, loads end with the chunks that were in the pool.
    """

    def __init__(self, dispatcher: Dispatcher, chunks: HeldChunks | None) -> None:
        """`chunks`: None if nothing was found."""
        self._dispatcher = dispatcher
        self._chunks = chunks
        self.hit_count = chunks.hit_count if chunks else 0
        """Chunks, the first ones of the keys, that can be loaded: from the pool, the disk, peers, the remote store."""
        self.own_count = chunks.own_count if chunks else 0
        """Those of them that were in the node's pool: `load` yields them without waiting."""
        self.token_count = chunks.record.hit_tokens if chunks and chunks.record else 0
        """Tokens of the hit. The last extent may have others behind them, of another prompt."""
        self.keys: Sequence[ChunkKey] = chunks.keys if chunks else ()
        """Keys of the hit; the last is that of another prompt's partial chunk, if the hit ends with one."""

    def load(self, count: int | None = None, *, timeout: float = 1.0) -> Iterator[Extent]:
        """Yields the extents of the first `count` chunks, in order, each once it is in the pool.

        `count` is at most `hit_count`, which it is by default. Chunks outside the pool are brought into it, all of them
        requested at once. Ends early if the rest cannot be had, or not within `timeout` seconds. Extents are valid
        until `release`. Never raises.
        """
        deadline = time.monotonic() + timeout
        wanted, chunks = self._wanted(count), self._chunks
        if chunks is None:
            return
        self._dispatcher.loading(chunks, wanted)
        extents: list[Extent] = []
        for index in range(wanted):
            if index >= len(extents):
                extents = self._wait(chunks, index + 1, wanted, deadline)
                if index >= len(extents):
                    self._dispatcher.fell_short(chunks, index)
                    return
            self._dispatcher.delivered(chunks, [extents[index]], index + 1)
            yield extents[index]

    def begin_load(self, count: int | None = None, *, timeout: float = 1.0) -> Future[list[Extent]]:
        """As `load`, without blocking: the extents of the first `count` chunks, or fewer, all at once."""
        wanted, chunks = self._wanted(count), self._chunks
        if chunks is None:
            nothing: Future[list[Extent]] = Future()
            nothing.set_result([])
            return nothing
        self._dispatcher.loading(chunks, wanted)
        waiter = self._begin(chunks, wanted, wanted, time.monotonic() + timeout)
        waiter.future.add_done_callback(lambda loaded: self._count(chunks, loaded, wanted))
        return waiter.future

    def refuse(self, kept: int = 0, *, reason: MissReason = MissReason.BELOW_MINIMUM) -> None:
        """Records that the caller computes the hit behind its first `kept` chunks; it counts as missed for `reason`.

        By default all of the hit, since it is too short to load.
        """
        if self._chunks:
            self._dispatcher.refuse(self._chunks, kept, reason)

    def release(self) -> None:
        """Ends the lookup: its extents are no longer valid. Never blocks. Idempotent."""
        if self._chunks:
            self._dispatcher.release(self._chunks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _wanted(self, count: int | None) -> int:
        return self.hit_count if count is None else max(0, min(count, self.hit_count))

    def _wait(self, chunks: HeldChunks, count: int, up_to: int, deadline: float) -> list[Extent]:
        if len(chunks.extents) >= up_to:
            return chunks.extents
        waiter = self._begin(chunks, count, up_to, deadline)
        await_result(waiter.future, deadline, self._dispatcher.expire)
        return chunks.extents  # perhaps more than waited for; none if they were released

    def _begin(self, chunks: HeldChunks, count: int, up_to: int, deadline: float) -> LoadWaiter:
        waiter = LoadWaiter(count=count, deadline=deadline)
        self._dispatcher.load(chunks, waiter, up_to)
        return waiter

    def _count(self, chunks: HeldChunks, loaded: Future[list[Extent]], wanted: int) -> None:
        if loaded.cancelled():
            return
        extents = loaded.result()
        self._dispatcher.delivered(chunks, extents, len(extents))
        if len(extents) < wanted:
            self._dispatcher.fell_short(chunks, len(extents))
