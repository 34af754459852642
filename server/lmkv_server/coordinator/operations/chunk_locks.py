"""Locks on chunks that moves drop: two moves that swap a chunk would otherwise both drop it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
from numpy.typing import NDArray

from lmkv.errors import Unreachable


class ChunkLocks:
    """Locks by chunk key. One event loop owns it."""

    def __init__(self) -> None:
        self._locked: set[bytes] = set()
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def hold(self, batch: NDArray[np.void], deadline: float) -> AsyncIterator[None]:
        """Locks all chunks of a batch together. Raises `Unreachable` after the deadline."""
        keys = {key.tobytes() for key in batch}
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline - time.monotonic()):
                async with self._changed:
                    await self._changed.wait_for(lambda: keys.isdisjoint(self._locked))
                    self._locked |= keys
        except TimeoutError:
            raise Unreachable("waited too long for other moves of the same chunks") from None
        try:
            yield
        finally:
            self._locked -= keys
            async with self._changed:
                self._changed.notify_all()
