"""Turns of large messages on an event loop, and slots of other work, of callers one after the other.

A server decodes a message at once, and accepts calls one by one. A caller with a hundred large messages on their way
would have all of them decoded before the call of another caller is accepted. So a large message waits for its turn:
there is one at a time, and between two of them the loop accepts the calls that have arrived. The parts of large
messages that a server reads itself are read one at a time, too.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

LARGE_BYTES = 64 << 10
"""Size from which on a message waits for its turn."""
QUIET_SECONDS = 0.001
"""After a turn, the next one begins once no call has arrived in such a time, and the loop was not busy. gRPC needs
several iterations of the loop to accept a call, and libuv's timers count milliseconds: half of one would be no time."""
LARGE_BYTES_PER_SECOND = 512 << 20
"""Large messages have turns at such a rate at most: the larger one is, the longer the loop is left to others then."""
REMEMBERED_SECONDS = 1.0
"""Time for which a caller counts as a sender of large messages after it has sent a large message."""
MAX_PAUSE_SECONDS = 0.02
"""The next turn begins this long after the last one, whatever arrives."""


class _Queue:
    """Waiting tasks; callers take turns."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Waiting tasks by caller, in the order of the callers' turns."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    async def wait(self, caller: str, on_lost: Callable[[], None]) -> None:
        """Waits until `give_next` has reached this one; calls `on_lost` if it is cancelled between that and its run."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                on_lost()
            else:
                self._forget(caller, turn)
            raise

    def give_next(self) -> bool:
        """Ends the wait of the first of the next caller. Returns whether there is one."""
        while self._waiting:
            caller, queue = self._waiting.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._waiting[caller] = queue  # behind all others
            if not turn.done():  # else it was cancelled, and has not run since
                turn.set_result(None)
                return True
        return False

    def _forget(self, caller: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(caller)
        if queue is not None and turn in queue:
            queue.remove(turn)
            if not queue:
                del self._waiting[caller]


class Slots:
    """A number of slots. Those that wait for one get it in order, and callers in turn."""

    def __init__(self, count: int) -> None:
        self._free_count = count
        self._waiting = _Queue()

    @property
    def is_locked(self) -> bool:
        """Whether the next one would wait."""
        return self._free_count == 0

    @property
    def waiting_count(self) -> int:
        """Number of those that wait for a slot."""
        return len(self._waiting)

    @asynccontextmanager
    async def take(self, caller: str) -> AsyncIterator[None]:
        """Inside, a caller has a slot."""
        if self._free_count:
            self._free_count -= 1
        else:
            await self._waiting.wait(caller, self._give)
        try:
            yield
        finally:
            self._give()

    def _give(self) -> None:
        if not self._waiting.give_next():
            self._free_count += 1


class Turns:
    """The turns on one event loop."""

    def __init__(self) -> None:
        self._waiting = _Queue()
        self._is_taken = False
        """Whether there is a turn, or a pause after one."""
        self._reading = _Queue()
        self._has_read = False
        """Whether a part is read in this iteration of the event loop."""
        self._arrival_count = 0
        self._last_large: OrderedDict[str, float] = OrderedDict()
        """When callers sent their last large message, the oldest first."""

    @property
    def waiting_count(self) -> int:
        """Large messages that wait for their turn."""
        return len(self._waiting)

    def sends_large(self, caller: str) -> bool:
        """Whether a caller has sent a large message lately."""
        return time.monotonic() - self._last_large.get(caller, -REMEMBERED_SECONDS) < REMEMBERED_SECONDS

    def count_arrival(self) -> None:
        """Counts a call that has arrived."""
        self._arrival_count += 1

    @asynccontextmanager
    async def take(self, caller: str, size_bytes: int, *, is_streamed: bool = False) -> AsyncIterator[None]:
        """Inside, a message has its turn. Waits for it if the message is large.

        The answer to one of a stream brings no call to accept: the loop is left to others for one iteration only.
        """
        if size_bytes < LARGE_BYTES:
            yield
            return
        self._remember(caller)
        if self._is_taken:
            await self._waiting.wait(caller, self._give)
        self._is_taken = True
        try:
            yield
        finally:
            quiet_seconds = 0.0 if is_streamed else max(size_bytes / LARGE_BYTES_PER_SECOND, QUIET_SECONDS)
            self._pause(time.monotonic() + MAX_PAUSE_SECONDS, min(quiet_seconds, MAX_PAUSE_SECONDS))

    async def read(self, caller: str) -> None:
        """Must be awaited before a part of a large message is read: there is one in an iteration of the event loop."""
        if self._has_read:
            await self._reading.wait(caller, lambda: None)
            return
        self._has_read = True
        asyncio.get_running_loop().call_soon(self._give_read)

    def _give_read(self) -> None:
        self._has_read = self._reading.give_next()
        if self._has_read:
            asyncio.get_running_loop().call_soon(self._give_read)

    def _remember(self, caller: str) -> None:
        now = time.monotonic()
        self._last_large[caller] = now
        self._last_large.move_to_end(caller)
        while now - next(iter(self._last_large.values())) >= REMEMBERED_SECONDS:
            self._last_large.popitem(last=False)

    def _pause(self, until: float, quiet_seconds: float) -> None:
        """Gives the next turn once calls have ceased to arrive, and others to keep the loop busy."""
        arrival_count, begin = self._arrival_count, time.monotonic()

        def look() -> None:
            now = time.monotonic()
            is_quiet = self._arrival_count == arrival_count and (not quiet_seconds or now - begin < 2 * quiet_seconds)
            if is_quiet or now >= until:
                self._give()
            else:
                self._pause(until, QUIET_SECONDS)

        asyncio.get_running_loop().call_later(quiet_seconds, look)

    def _give(self) -> None:
        """Gives the turn to the next caller's first message, or leaves it to the first that comes."""
        self._is_taken = self._waiting.give_next()


_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, Turns] = WeakKeyDictionary()


def of_loop() -> Turns:
    """The turns on the running event loop."""
    return _turns.setdefault(asyncio.get_running_loop(), Turns())
