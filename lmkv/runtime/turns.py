"""Turns of large messages on an event loop, of callers one after the other.

A server decodes a message at once, and accepts calls one by one. A caller with a hundred large messages on their way
would have all of them decoded before the call of another caller is accepted. So a large message waits for its turn:
there is one at a time, and between two of them the loop accepts the calls that have arrived.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

LARGE_BYTES = 64 << 10
"""Size from which on a message waits for its turn."""
QUIET_SECONDS = 0.0005
"""After a turn, the next one begins once no call has arrived in such a time."""
REMEMBERED_SECONDS = 1.0
"""How long a caller counts as one of large messages after one."""
MAX_PAUSE_SECONDS = 0.02
"""The next turn begins this long after the last one, whatever arrives."""


class Turns:
    """The turns on one event loop."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """By caller, in the order of their turns."""
        self._is_taken = False
        """Whether there is a turn, or a pause after one."""
        self._arrival_count = 0
        self._last_large: OrderedDict[str, float] = OrderedDict()
        """When callers sent their last large message, the oldest first."""

    def sends_large(self, caller: str) -> bool:
        """Whether a caller has sent a large message lately."""
        return time.monotonic() - self._last_large.get(caller, -REMEMBERED_SECONDS) < REMEMBERED_SECONDS

    def count_arrival(self) -> None:
        """Counts a call that has arrived."""
        self._arrival_count += 1

    @asynccontextmanager
    async def take(self, caller: str, size_bytes: int) -> AsyncIterator[None]:
        """Inside, a message has its turn. Waits for it if the message is large."""
        if size_bytes < LARGE_BYTES:
            yield
            return
        self._remember(caller)
        if self._is_taken:
            await self._wait(caller)
        self._is_taken = True
        try:
            yield
        finally:
            self._pause(time.monotonic() + MAX_PAUSE_SECONDS)

    def _remember(self, caller: str) -> None:
        now = time.monotonic()
        self._last_large[caller] = now
        self._last_large.move_to_end(caller)
        while now - next(iter(self._last_large.values())) >= REMEMBERED_SECONDS:
            self._last_large.popitem(last=False)

    async def _wait(self, caller: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it would have been this one's turn
                self._give()
            else:
                self._forget(caller, turn)
            raise

    def _forget(self, caller: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting[caller]
        queue.remove(turn)
        if not queue:
            del self._waiting[caller]

    def _pause(self, until: float) -> None:
        """Gives the next turn once calls have ceased to arrive."""
        arrival_count = self._arrival_count

        def look() -> None:
            if self._arrival_count != arrival_count and time.monotonic() < until:
                self._pause(until)
            else:
                self._give()

        asyncio.get_running_loop().call_later(QUIET_SECONDS, look)

    def _give(self) -> None:
        """Gives the turn to the next caller's first message, or leaves it to the first that comes."""
        if not self._waiting:
            self._is_taken = False
            return
        caller, queue = self._waiting.popitem(last=False)
        turn = queue.popleft()
        if queue:
            self._waiting[caller] = queue  # behind all others
        turn.set_result(None)


_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, Turns] = WeakKeyDictionary()


def of_loop() -> Turns:
    """The turns on the running event loop."""
    return _turns.setdefault(asyncio.get_running_loop(), Turns())
