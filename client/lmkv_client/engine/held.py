"""Holds the chunks that a lookup has found, and loads those that are not in the pool."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Self

from lmkv.keys import ChunkKey
from lmkv.misses import MissReason
from lmkv_client.engine.caller_lookup import CallerLookup, LoadWaiter, await_result
from lmkv_client.engine.dispatcher import Dispatcher
from lmkv_client.engine.extent import Extent


class Held:
    """The chunks that a lookup has found: the longest prefix of its keys that can be loaded.

    The node keeps those in its pool, and those that are loaded, until `release`; use it as a context manager. All
    methods may be called on any thread. Once the node is lost, loads end with the chunks that were in the pool.
    """

    def __init__(self, dispatcher: Dispatcher, lookup: CallerLookup | None) -> None:
        """`lookup`: None if nothing was found."""
        self._dispatcher = dispatcher
        self._lookup = lookup
        self.hit_count = lookup.hit_count if lookup else 0
        """The number of first keys whose chunks can be loaded: from the pool, the disk, peers, the remote store."""
        self.own_count = lookup.own_count if lookup else 0
        """The number of these chunks that were in the node's pool: `load` yields them without waiting."""
        self.token_count = lookup.hit_tokens if lookup and lookup.is_counted else 0
        """Tokens of the hit. The last extent may have others behind them, of another prompt."""
        self.keys: Sequence[ChunkKey] = lookup.hit_keys[: lookup.hit_count] if lookup else ()
        """Keys of the hit; the last is that of another prompt's partial chunk, if the hit ends with one."""

    def load(self, count: int | None = None, *, timeout: float = 1.0) -> Iterator[Extent]:
        """Yields the extents of the first `count` chunks, in order, each once it is in the pool.

        `count` is at most `hit_count`, which it is by default. Chunks outside the pool are brought into it, all of them
        requested at once. Ends early if the rest cannot be had, or not within `timeout` seconds. Extents are valid
        until `release`. Never raises.
        """
        deadline = time.monotonic() + timeout
        wanted, lookup = self._wanted(count), self._lookup
        if lookup is None:
            return
        self._dispatcher.loading(lookup, wanted)
        extents: list[Extent] = []
        for index in range(wanted):
            if index >= len(extents):
                extents = self._wait(lookup, index + 1, wanted, deadline)
                if index >= len(extents):
                    self._dispatcher.fell_short(lookup, index)
                    return
            self._dispatcher.delivered(lookup, [extents[index]], index + 1)
            yield extents[index]

    def begin_load(self, count: int | None = None, *, timeout: float = 1.0) -> Future[list[Extent]]:
        """As `load`, without blocking: the extents of the first `count` chunks, or fewer, all at once."""
        wanted, lookup = self._wanted(count), self._lookup
        if lookup is None:
            nothing: Future[list[Extent]] = Future()
            nothing.set_result([])
            return nothing
        self._dispatcher.loading(lookup, wanted)
        waiter = self._begin(lookup, wanted, wanted, time.monotonic() + timeout)
        waiter.future.add_done_callback(lambda loaded: self._count(lookup, loaded, wanted))
        return waiter.future

    def refuse(self, kept: int = 0, *, reason: MissReason = MissReason.BELOW_MINIMUM) -> None:
        """Records that the caller computes the hit behind its first `kept` chunks; it counts as missed for `reason`.

        By default all of the hit, since it is too short to load.
        """
        if self._lookup:
            self._dispatcher.refuse(self._lookup, kept, reason)

    def release(self) -> None:
        """Ends the lookup: its extents are no longer valid. Never blocks. Idempotent."""
        if self._lookup:
            self._dispatcher.release(self._lookup)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _wanted(self, count: int | None) -> int:
        return self.hit_count if count is None else max(0, min(count, self.hit_count))

    def _wait(self, lookup: CallerLookup, count: int, up_to: int, deadline: float) -> list[Extent]:
        if len(lookup.extents) >= up_to:
            return lookup.extents
        waiter = self._begin(lookup, count, up_to, deadline)
        await_result(waiter.future, deadline, self._dispatcher.expire)
        return lookup.extents  # perhaps more than waited for; none if they were released

    def _begin(self, lookup: CallerLookup, count: int, up_to: int, deadline: float) -> LoadWaiter:
        waiter = LoadWaiter(count=count, deadline=deadline)
        self._dispatcher.load(lookup, waiter, up_to)
        return waiter

    def _count(self, lookup: CallerLookup, loaded: Future[list[Extent]], wanted: int) -> None:
        if loaded.cancelled():
            return
        extents = loaded.result()
        self._dispatcher.delivered(lookup, extents, len(extents))
        if len(extents) < wanted:
            self._dispatcher.fell_short(lookup, len(extents))
