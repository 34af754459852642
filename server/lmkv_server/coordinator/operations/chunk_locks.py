"""Which chunks a move is at: two moves that swap a chunk would else both drop it, each relying on the other's copy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
from numpy.typing import NDArray

from lmkv.errors import Unreachable


class ChunkLocks:
    """Chunks that some move is about to drop somewhere. One event loop owns it."""

    def __init__(self) -> None:
        self._claimed: set[bytes] = set()
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def on(self, batch: NDArray[np.void], deadline: float) -> AsyncIterator[None]:
        """Waits until nobody else claims any of the batch. Raises `Unreachable` after the deadline."""
        keys = {key.tobytes() for key in batch}
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline - time.monotonic()):
                async with self._changed:
                    await self._changed.wait_for(lambda: keys.isdisjoint(self._claimed))
                    self._claimed |= keys
        except TimeoutError:
            raise Unreachable("other moves of the same chunks took too long") from None
        try:
            yield
        finally:
            self._claimed -= keys
            async with self._changed:
                self._changed.notify_all()
